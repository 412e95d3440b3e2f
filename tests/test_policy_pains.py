"""What users of other context managers suffer from, one test each: over real trajectories where policies alone decide,
and over a real server with a tiny model where the cache has a say."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

import akv_sdk
from akv_sdk import (
    CacheOrSummarise,
    ClearToolUsesEdit,
    Client,
    Completion,
    ContextEdits,
    DropRepeats,
    InTurn,
    LastNObservations,
    Mark,
    RollingDrop,
    Summary,
    decide,
    summariser,
)
from akv_sdk.policies import Context, Policy, summarise
from tests.conversations import call, context_of, ops_of, result, tagged, trajectories
from tests.server import Server, load_tiny, serving_model

JSON = dict[str, Any]
SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Find the bug."}
NEVER = CacheOrSummarise(0, summarise=lambda messages: Summary("what was done"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_model(load_tiny(tmp_path_factory.mktemp("model"))) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
    server.engine.check()


def prefixes(messages: list[JSON]) -> Iterator[list[JSON]]:
    """The conversation as it stood after each observation."""
    for i, message in enumerate(messages):
        if "<ephemeral_observation" in (message["content"] or ""):
            yield messages[: i + 1]


def orphans(messages: list[JSON]) -> list[int]:
    """Tool results without their call in the assistant message that they follow."""
    found, open_calls = [], set()
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            open_calls = {c["id"] for c in message.get("tool_calls") or []}
        elif message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                found.append(i)
        else:
            open_calls = set()
    return found


def unanswered(messages: list[JSON]) -> int:
    calls = Counter((i, c["id"]) for i, m in enumerate(messages) for c in m.get("tool_calls") or [])
    last = -1
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            last = i
        elif message["role"] == "tool":
            calls[last, message["tool_call_id"]] -= 1
    return sum(count > 0 for count in calls.values())


# --- (a) clearing re-fires on every turn ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        LastNObservations(3),
        LastNObservations(2, polling=4),
        ClearToolUsesEdit(trigger=9000, keep=3),
        RollingDrop(9000),
        InTurn(DropRepeats(), RollingDrop(9000)),
        ContextEdits.parse(
            {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 5}}]}
        ),
    ],
    ids=repr,
)
def test_a_policy_fires_once_per_block(shared, policy: Policy):
    num_dropped = 0
    for name, messages in trajectories(shared).items():
        if len(messages) > 60:
            continue
        ops: list[akv_sdk.Op] = []
        dropped: Counter[tuple[str, int, int]] = Counter()
        for so_far in prefixes(messages):
            context = context_of(so_far, ops)
            drops = decide(policy, context)
            dropped.update(drop.target.place for drop in drops)
            ops += ops_of(drops, context.stream_tokens)
            assert decide(policy, context_of(so_far, ops)) == [], f"{name}: fires again on the same history"
        assert set(dropped.values()) <= {1}, name
        num_dropped += len(dropped)
    assert num_dropped > 40


def test_a_resend_drops_nothing_and_prefills_what_is_new(client: Client):
    session = client.session()
    session.messages += [dict(SYSTEM), dict(TASK)]
    for i in range(4):
        session.observe(f"output {i} " * 6, tool="sh")
        session.complete(max_tokens=2, temperature=0)
        session.apply(LastNObservations(2))
    ops = session.ops
    assert len(ops) == 2
    again = client.session(session.name, messages=session.messages)  # a new process: it knows the messages alone
    again.user("go on")
    reply = again.complete(max_tokens=1, temperature=0)
    assert again.ops == ops
    assert again.apply(LastNObservations(2)) is None
    span = reply.akv.spans[-1]
    assert reply.akv.replayed_tokens == 0
    assert reply.akv.prefilled_tokens <= span.end - span.start + 20  # and the opening of the answer
    session.delete()


# --- (b), (c) trimming orphans a tool message, at any cut -------------------------------------------------------------


def test_no_cut_of_any_trajectory_parts_a_result_from_its_call(shared):
    num_cuts = 0
    for name, messages in trajectories(shared).items():
        context = context_of(messages)
        step = 1 if len(messages) < 200 else 29
        for keep in range(0, len(messages) + 1, step):
            replaced = summarise.summarisable(context, keep)
            if replaced == (0, 0):
                continue
            num_cuts += 1
            after, places = summarise.rewritten(context, replaced, "what was done")
            assert orphans(after) == orphans(messages) == [], (name, keep)
            assert len(after) <= len(messages)
            assert all(after[new] == messages[old] for old, new in places.items())
            assert places.keys() >= set(range(len(messages) - keep, len(messages)))
    assert num_cuts > 500


def test_dropping_leaves_every_message_where_it_is(shared):
    for messages in trajectories(shared).values():
        before = [dict(message) for message in messages]
        context = context_of(messages)
        for policy in (LastNObservations(1), ClearToolUsesEdit(trigger=0, keep=0), DropRepeats()):
            drops = decide(policy, context)
            assert all(messages[drop.target.message]["content"] for drop in drops)
        assert messages == before and orphans(messages) == []


# --- (d) one bad pair poisons all later runs --------------------------------------------------------------------------


def test_calls_that_nobody_answered_do_no_harm(shared):
    messages = trajectories(shared)["coding-pi-large-session"]
    assert unanswered(messages) == 18
    context = context_of(messages)
    for policy in (LastNObservations(5), ClearToolUsesEdit(trigger=0, clear_tool_inputs=True), RollingDrop(100_000)):
        drops = decide(policy, context)
        assert len(drops) > 100
        answered = {target.call for target in context.observations}
        assert all(drop.target.call in answered for drop in drops)
    replaced = summarise.summarisable(context, 10)
    asked = summarise.request(context, replaced)
    assert unanswered(asked) == 0 and orphans(asked) == []
    assert unanswered(messages) == 18  # nothing of the conversation itself was touched


# --- (e) compaction between a call and its output, or during a stream -------------------------------------------------


@pytest.mark.parametrize("num_results", [0, 1])
def test_a_call_that_waits_for_its_output_is_not_compacted_away(num_results):
    two = {**call("sh", "a"), "tool_calls": [*call("sh", "a")["tool_calls"], *call("sh", "b")["tool_calls"]]}
    turn = [call("sh", "z"), result("z", "done")]
    messages = [SYSTEM, TASK, *turn, *turn, two, *[result("a", "first")][:num_results]]
    context = context_of(messages)
    replaced = summarise.summarisable(context, 0)
    after, _ = summarise.rewritten(context, replaced, "what was done")
    assert replaced == (2, 6)
    assert orphans([*after, result("b", "second")]) == []


def test_a_drop_during_a_stream_holds_from_its_end(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        block = session.observe("a long output " * 5)
        session.complete(max_tokens=1)
        session.user("go on")
        stream = session.stream(max_tokens=30, temperature=0, ignore_eos=True)
        next(stream)
        (op,) = session.drop(blocks=[block]).applied
        final = list(stream) and stream.final
        assert isinstance(final, Completion)
        assert final.usage.completion_tokens == 30
        assert op.at >= final.akv.stream_tokens - 1
        assert session.ops == (op,) and not session.is_visible(block)
        session.user("and on")
        assert session.complete(max_tokens=1).akv.dropped_tokens == op.end - op.start
        assert session.ops == (op,)


# --- (f) after a prune the cached tokens fall to 0 --------------------------------------------------------------------


def test_after_a_drop_the_rest_still_comes_from_the_cache(client: Client):
    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(3):
            session.observe(f"output {i} " * 8)
            session.complete(max_tokens=2, temperature=0)
        before = session.context.visible_tokens
        layout = session.apply(LastNObservations(1))
        assert layout is not None and layout.changed > 100
        session.user("go on")
        reply = session.complete(max_tokens=1, temperature=0)
        assert reply.usage.cached_tokens >= before - layout.changed - 1
        assert reply.akv.replayed_tokens == 0
        assert reply.akv.prefilled_tokens < 60


# --- (g) one message moves between requests ---------------------------------------------------------------------------


def test_a_message_that_moved_is_named(client: Client):
    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        blocks = [session.observe(f"output {i} " * 4) for i in range(3)]
        session.complete(max_tokens=1)
        session.drop(blocks=[blocks[0]])
        session.messages[3], session.messages[4] = session.messages[4], session.messages[3]
        session.user("go on")
        replies = client.chat(session.messages, session=session.name, max_tokens=1)
        assert any("message 3" in warning or "messages[3]" in warning for warning in replies.akv.warnings)
        common = session.spans[3].start
        assert replies.usage.cached_tokens >= common - 16


# --- (h) clearing by count drives re-read loops -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LastNObservations(3), ClearToolUsesEdit(trigger=0, keep=3)], ids=repr)
def test_files_in_use_are_not_read_for_ever(policy: Policy):
    """An agent goes round four files with room for three, and reads again what it no longer sees."""
    files = {name: f"contents of {name} " * 5 for name in ("a.py", "b.py", "c.py", "d.py")}
    messages: list[JSON] = [SYSTEM, TASK]
    ops: list[akv_sdk.Op] = []
    reads: Counter[str] = Counter()
    for turn in range(40):
        wanted = sorted(files)[turn % 4]
        context = context_of(messages, ops)
        if not any(t.text == files[wanted].strip() and t.is_whole for t in context.observations):
            reads[wanted] += 1
            call_id = f"c{turn}"
            messages += [call("read", call_id), result(call_id, tagged(f"obs-{turn}", files[wanted]), name="read")]
        context = context_of(messages, ops)
        ops += ops_of(decide(policy, context), context.stream_tokens)
    assert max(reads.values()) == 2  # once more, and then it stays


# --- (i) "unchanged, see above" after the text above was dropped ------------------------------------------------------


def test_a_cache_of_reads_can_ask_what_the_model_still_sees(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        block = session.observe("def f(): pass " * 5, tool="read", keep_head=4)

        def read_again() -> str:
            return "unchanged, see above" if session.is_visible(block) else "the whole text"

        session.complete(max_tokens=1)
        assert read_again() == "unchanged, see above"
        session.observe("another", tool="sh")
        session.complete(max_tokens=1)
        assert session.apply(LastNObservations(1)) is not None
        assert read_again() == "the whole text"  # the first tokens are there, the text is not
        session.restore(blocks=[block])
        assert read_again() == "unchanged, see above"
        session.user("go on")
        reply = session.complete(max_tokens=1)
        assert (reply.akv.dropped_tokens, reply.akv.replayed_tokens) == (0, 0)
        assert session.apply(LastNObservations(1)) is None  # what was asked back stays


# --- (j) one observation larger than the whole budget -----------------------------------------------------------------


def test_one_observation_larger_than_the_budget_goes_once():
    messages = [SYSTEM, TASK, call("sh", "a"), result("a", tagged("big", "x" * 5000))]
    context = context_of(messages)
    drops = decide(RollingDrop(300), context)
    assert [drop.target.num_tokens for drop in drops] == [5000]
    assert decide(RollingDrop(300), context.after(drops)) == []
    assert decide(RollingDrop(10), context.after(drops)) == []
    policy = CacheOrSummarise(300, summarise=lambda messages: Summary("done"))
    assert [policy.decide(context).kind, policy.decide(context.after(drops)).kind] == ["drop", "nothing"]
    pinned = Context(context.messages, context.spans, marks=[Mark(message=3, pinned=True)])
    stuck = policy.decide(pinned)
    assert (stuck.kind, "nothing may go" in stuck.reason) == ("nothing", True)


def test_one_observation_larger_than_the_window_is_a_clear_error(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        session.observe("x y " * 4000)
        with pytest.raises(akv_sdk.ContextLengthExceeded):
            session.complete(max_tokens=1)


# --- (k) `keep` counts tool uses in a run with a single user message --------------------------------------------------


def test_keep_counts_tool_uses_not_user_turns(shared):
    messages = trajectories(shared)["coding-swesmith-pandas53652"]
    assert sum(message["role"] == "user" for message in messages) == 1
    context = context_of(messages)
    num_uses = len([target for target in context.observations if target.parts])
    assert num_uses == len(context.observations)
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1000}}
    for policy in (LastNObservations(3), ClearToolUsesEdit(trigger=1000), ContextEdits.parse({"edits": [edit]})):
        gone = {drop.target.block for drop in decide(policy, context)}
        kept = [target.block for target in context.observations if target.block not in gone]
        assert kept[-3:] == [target.block for target in context.observations[-3:]]
        assert len(kept) - 3 == sum(t.is_orphan for t in context.observations[:-3]) * (policy != LastNObservations(3))


# --- notes, marks and decisions through a session ---------------------------------------------------------------------


def test_the_next_message_says_what_went_and_the_text_before_stays(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        session.observe("one " * 8, tool="sh")
        session.complete(max_tokens=1)
        before = [dict(message) for message in session.messages]
        assert session.apply(LastNObservations(0), note=True) is not None
        assert session.messages == before
        session.observe("two", tool="sh")
        content = session.messages[-1]["content"]
        assert content.startswith('<ephemeral_observation id="obs-2">\n[No longer shown: obs-1 (sh, ')
        assert content.endswith("]\ntwo\n</ephemeral_observation>")
        session.user("go on")
        assert session.messages[-1]["content"] == "go on"
        assert session.context.messages[-2]["content"].count("No longer shown") == 1
        session.complete(max_tokens=1)
        session.restore(blocks=["obs-1"])
        assert session.is_visible("obs-1")


def test_marks_and_pins_of_a_session(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        blocks = [session.observe(f"output {i} " * 4, keep_tail=3) for i in range(3)]
        kept = session.observe("the plan", ephemeral=False)
        session.messages.append(result("c", "plain " * 5))
        session.complete(max_tokens=1)
        assert kept is None
        session.pin(blocks[1])
        session.mark(5, tool_call_id="c", keep_head=2)
        layout = session.apply(LastNObservations(0))
        assert layout is not None
        insides = {b.id: (b.start, b.end) for span in session.spans for b in span.blocks}
        plain = session.spans[5]
        assert [(op.start, op.end) for op in layout.applied] == [
            (insides[blocks[0]][0], insides[blocks[0]][1] - 3),
            (insides[blocks[2]][0], insides[blocks[2]][1] - 3),
            (plain.content_start + 2, plain.content_end),
        ]
        fork = session.fork()
        assert fork.apply(LastNObservations(0)) is None
        with pytest.raises(KeyError):
            session.pin("obs-99")
        with pytest.raises(ValueError, match="message 5 has 'c', not 'd'"):
            session.mark(5, tool_call_id="d")
        fork.close()


def test_dropping_is_preferred_and_a_summary_says_what_it_cost(client: Client, caplog):
    asked: list[list[JSON]] = []

    def write(messages: list[JSON]) -> Summary:
        asked.append(messages)
        return summariser(client.chat, max_tokens=8, temperature=0)(messages)  # type: ignore[return-value]

    with client.session() as session, caplog.at_level(logging.DEBUG, "akv_sdk"):
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(4):
            session.assistant(f"Looking at file number {i}, thinking at length about it.")
            session.observe(f"output {i} " * 5, tool="sh")
        session.complete(max_tokens=2, temperature=0)
        visible = session.context.visible_tokens
        policy = CacheOrSummarise(visible, write, keep_messages=3)
        assert session.manage(policy).kind == "nothing"
        dropped = session.manage(CacheOrSummarise(visible - 60, write, keep_messages=3))
        assert (dropped.kind, dropped.prefilled_tokens) == ("drop", 0)
        assert dropped.freed_tokens >= 60
        session.pin((session.spans[-1].content_start, session.spans[-1].content_end))
        num_messages = len(session.messages)
        rewritten = session.manage(CacheOrSummarise(visible // 3, write, keep_messages=3))
        assert rewritten.kind == "summarise"
        assert (rewritten.replaced, rewritten.generated_tokens) == ((2, 8), 8)
        assert rewritten.prefilled_tokens > 0 and rewritten.freed_tokens > 0 and rewritten.elapsed_ms > 0
        assert asked[0][-1]["content"] == summarise.REQUEST
        assert "output 0" not in str(asked) and "output 2" in str(asked)
        assert len(session.messages) == num_messages - 5
        assert session.messages[2]["content"].startswith(summarise.SUMMARY_OPENING)
        assert session.marks[-1].span == (session.spans[-1].content_start, session.spans[-1].content_end)
        session.user("go on")
        reply = session.complete(max_tokens=1, temperature=0)
        assert reply.akv.prefilled_tokens < 60
    lines = [record.getMessage() for record in caplog.records if record.name == "akv_sdk.session"]
    assert [line.split(": ")[1] for line in lines] == ["nothing", "drop", "summarise"]
    assert all("visible tokens" in line for line in lines)


def test_any_chat_call_can_summarise(client: Client, server: Server):
    messages = [TASK, {"role": "user", "content": "Summarise."}]
    ours = summariser(client.chat, max_tokens=6, temperature=0)(messages)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        model = server.service.model
        theirs = summariser(api.chat.completions.create, model=model, max_tokens=6, temperature=0)(messages)
    assert isinstance(ours, Summary) and isinstance(theirs, Summary)
    assert (ours.text, ours.generated_tokens) == (theirs.text, theirs.generated_tokens)


async def _managed(url: str) -> akv_sdk.Decision:
    async with akv_sdk.AsyncClient(url) as client, client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(3):
            session.assistant(f"Looking at file number {i}.")
            session.user(f"Look at the next, number {i}.")
        await session.complete(max_tokens=1)
        policy = CacheOrSummarise(10, summariser(client.chat, max_tokens=4, temperature=0), keep_messages=1)
        assert await session.apply(LastNObservations(0)) is None
        decision = await session.manage(policy)
        assert session.messages[2]["content"].startswith(summarise.SUMMARY_OPENING)
        return decision


def test_the_asynchronous_twin_manages_too(server: Server):
    decision = asyncio.run(_managed(server.url))
    assert (decision.kind, decision.generated_tokens) == ("summarise", 4)


def test_a_summary_alone_is_not_summarised_again():
    turn = [call("sh", "z"), result("z", "done " * 50)]
    messages = [SYSTEM, TASK, *turn * 5]
    context = context_of(messages)
    after, _ = summarise.rewritten(context, summarise.summarisable(context, 2), "what was done")
    assert [m["role"] for m in after] == ["system", "user", "user", "assistant", "tool"]
    assert summarise.summarisable(context_of(after), 2) == (0, 0)
    assert NEVER.decide(context_of(after)).kind == "nothing"
    more, _ = summarise.rewritten(
        context_of([*after, *turn]), summarise.summarisable(context_of([*after, *turn]), 2), "b"
    )
    assert [m["role"] for m in more] == ["system", "user", "user", "assistant", "tool"]


def test_what_is_pinned_outlives_a_summary():
    turns = [[call("sh", f"c{i}"), result(f"c{i}", tagged(f"obs-{i}", "done"))] for i in range(4)]
    messages = [SYSTEM, TASK, *(message for turn in turns for message in turn)]
    marks = [Mark(message=5, block="obs-1", pinned=True)]
    context = context_of(messages, marks=marks)
    after, places = summarise.rewritten(context, summarise.summarisable(context, 2), "what was done")
    assert after == [
        SYSTEM,
        TASK,
        {"role": "user", "content": "Summary of the work so far:\nwhat was done"},
        *turns[1],
        *turns[3],
    ]
    assert summarise.moved_marks(marks, places, context.spans, context_of(after).spans)[0].message == 4
