"""What users of other context managers suffer from, one test each: over real trajectories where policies alone decide,
and over a real server with a tiny model where the cache has a say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

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
)
from akv_sdk.policies import Context, Policy, summarise
from tests.conversations import call, context_of, ops_of, result, tagged, trajectories
from tests.server import Server

JSON = dict[str, Any]
SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Find the bug."}
NEVER = CacheOrSummarise(0, summarise=lambda messages: Summary("what was done"))


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


def turns(session: akv_sdk.Session, num_turns: int) -> Iterator[int]:
    """Turns of an agent whose observations nobody marked."""
    for i in range(num_turns):
        session.messages.append({"role": "user", "content": f"output {i} of a command " * 4})
        session.complete(max_tokens=2, temperature=0)
        yield i


def test_a_head_beyond_the_threshold_is_not_summarised_on_every_turn(client: Client):
    asked: list[int] = []

    def write(messages: list[JSON]) -> Summary:
        asked.append(len(messages))
        return Summary("what was done")

    with client.session() as session:
        session.messages += [{**SYSTEM, "content": "You are an agent. " * 30}, dict(TASK)]
        session.complete(max_tokens=0)
        threshold = session.context.visible_tokens // 2
        policy = CacheOrSummarise(threshold, write, keep_messages=2)
        decisions = [session.manage(policy) for _ in turns(session, 12)]
        summaries = [i for i, decision in enumerate(decisions) if decision.kind == "summarise"]
        assert len(summaries) == len(asked) in (2, 3)
        assert min(b - a for a, b in pairwise(summaries)) >= 3
        assert all(5 * decisions[i].freed_tokens >= decisions[i].visible_tokens for i in summaries)
        assert [decision.kind for decision in decisions[:2]] == ["nothing", "nothing"]
        assert "nothing is left to summarise" in decisions[0].reason
        assert "which is too little" in decisions[1].reason


@pytest.mark.parametrize("length", [0.4, 1.0, 3.0])
def test_a_summary_longer_than_what_it_replaces_is_left_aside(client: Client, length: float):
    """By a summariser that writes `length` times what it read, in tokens: it is not asked again on each turn."""
    asked: list[int] = []

    def write(messages: list[JSON]) -> Summary:
        text = "".join(message["content"] for message in messages[2:-1])
        asked.append(len(text))
        return Summary("x" * int(length * len(client.tokenize(text).tokens)), 3, 5)

    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        session.complete(max_tokens=0)
        policy = CacheOrSummarise(session.context.visible_tokens, write, keep_messages=2)
        for i in turns(session, 10):
            before, history = list(session.messages), session.ops
            decision = session.manage(policy)
            assert (decision.freed_tokens > 0) == (decision.kind == "summarise")
            if decision.kind == "nothing":
                assert (session.messages, session.ops) == (before, history)
            if len(asked) == 1 and i == 1 and length == 3.0:
                assert "tokens would free -" in decision.reason
                assert (decision.prefilled_tokens, decision.generated_tokens) == (3, 5)
                assert "generated 5 tokens" in str(decision)
        assert 1 <= len(asked) <= 4


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
    asked = summarise.request(context, replaced, {})
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


def test_compaction_during_a_stream_waits_for_its_end(client: Client):
    """A drop and then a summary, each while an answer is read: they hold behind it, and it is whole."""
    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(3):
            session.observe(f"output {i} " * 8)
        session.complete(max_tokens=1)
        session.user("go on")
        for kind in ("drop", "summarise"):
            stream = session.stream(max_tokens=30, temperature=0, ignore_eos=True)
            first = next(stream)
            fits = session.context.visible_tokens - 100 if kind == "drop" else 0
            decision = session.manage(
                CacheOrSummarise(fits, lambda messages: Summary("what was done"), keep_messages=1)
            )
            assert decision.kind == kind
            assert (first.text + "".join(event.text for event in stream)).startswith(stream.final.text)
            assert stream.final.usage.completion_tokens == 30
            assert session.messages[-1]["content"] == stream.final.text
            session.user("and on")
            reply = session.complete(max_tokens=1)
            assert reply.akv.warnings == [] and reply.akv.prefilled_tokens < 60
            assert [span.role for span in session.spans] == [message["role"] for message in session.messages]


async def _compacted_during_a_stream(url: str) -> None:
    async with akv_sdk.AsyncClient(url) as client, client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        block = session.observe("output " * 8)
        await session.complete(max_tokens=1)
        session.user("go on")
        stream = session.stream(max_tokens=30, temperature=0, ignore_eos=True)
        events = [await anext(stream)]

        async def read() -> None:
            events.extend([event async for event in stream])

        policy = CacheOrSummarise(session.context.visible_tokens, lambda messages: Summary("no"))
        with pytest.raises(akv_sdk.SessionBusy):
            await session.complete(max_tokens=1)
        _, decision = await asyncio.gather(read(), session.manage(policy))
        assert (decision.kind, session.is_visible(block)) == ("drop", False)
        assert sum(len(event.token_ids) for event in events) == stream.final.usage.completion_tokens == 30
        assert session.messages[-1]["content"] == stream.final.text
        session.user("and on")
        reply = await session.complete(max_tokens=1)
        assert reply.akv.dropped_tokens == decision.freed_tokens


def test_compaction_during_a_stream_of_the_asynchronous_twin(server: Server):
    asyncio.run(_compacted_during_a_stream(server.url))


def test_compaction_between_a_call_and_its_output(client: Client):
    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(3):
            session.messages += [call("sh", f"c{i}"), result(f"c{i}", "done " * 9)]
        session.messages.append(call("sh", "c3"))
        session.complete(max_tokens=0)
        policy = CacheOrSummarise(0, lambda messages: Summary("what was done"), keep_messages=0)
        assert session.manage(policy).replaced == (2, 8)
        assert session.messages[-1] == call("sh", "c3")
        session.observe("done at last", tool_call_id="c3")
        assert orphans(session.messages) == []
        assert session.complete(max_tokens=1).akv.warnings == []


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


def test_one_observation_larger_than_the_threshold_is_not_summarised_around_for_ever(client: Client):
    """Nobody marked it, and it is among the newest messages: all that goes by a summary is little."""
    asked: list[int] = []

    def write(messages: list[JSON]) -> Summary:
        asked.append(len(messages))
        return Summary("what was done")

    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for _ in turns(session, 2):
            pass
        session.messages.append({"role": "user", "content": "x y " * 250})
        policy = CacheOrSummarise(200, write, keep_messages=12)
        for _ in turns(session, 5):
            decision = session.manage(policy)
            assert decision.kind == "nothing"
            assert "too little" in decision.reason or "nothing is left" in decision.reason
        assert asked == []
        policy = CacheOrSummarise(200, write, keep_messages=2)
        kinds = [session.manage(policy).kind for _ in turns(session, 5)]
        assert kinds == ["summarise", "nothing", "nothing", "summarise", "nothing"]  # the second for what is new
        assert len(asked) == 2


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
