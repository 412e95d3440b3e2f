"""What a session makes of policies, over a real server with a tiny model: notes, marks and pins, and the decision
between dropping and summarising with what it cost."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

import akv_sdk
from akv_sdk import CacheOrSummarise, Client, LastNObservations, Mark, Op, Summary, decide, summariser
from akv_sdk.policies import summarise
from akv_sdk.policies.context import dropped_spans, visible_parts
from akv_server import streams
from akv_server.ops import Timeline
from tests.conversations import call, context_of, result, tagged, text_of
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
        assert content.startswith("[No longer shown: obs-1 (sh, ")
        assert content.endswith(']\n<ephemeral_observation id="obs-2">\ntwo\n</ephemeral_observation>')
        session.user("go on")
        assert session.messages[-1]["content"] == "go on"
        assert session.context.messages[-2]["content"].count("No longer shown") == 1
        session.complete(max_tokens=1)
        session.restore(blocks=["obs-1"])
        assert session.is_visible("obs-1")


def test_a_note_outlives_the_observation_behind_it(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        for text in ("one", "two", "three"):
            session.observe(f"{text} " * 8, tool="sh")
            session.complete(max_tokens=1)
            session.apply(LastNObservations(0), note=True)
        assert [session.is_visible(f"obs-{i}") for i in (1, 2, 3)] == [False] * 3
        tokens = client.render(session.messages).tokens
        for i, about in ((3, "obs-1"), (5, "obs-2")):
            span = session.spans[i]
            visible = visible_parts((span.content_start, span.content_end), session.context.dropped)
            left = "".join(client.detokenize(tokens[a:b]).prompt for a, b in visible)
            note, tags = left.split("]\n")
            assert note.startswith(f"[No longer shown: {about} (sh, ")
            assert tags == tagged(session.spans[i].blocks[0].id, "")


def test_a_note_tells_of_nothing_that_was_restored_before_it_is_sent(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        for text in ("one", "two", "three"):
            session.observe(f"{text} " * 8, tool="sh")
        session.complete(max_tokens=1)
        session.apply(LastNObservations(1), note=True)
        fork = session.fork()
        session.restore(blocks=["obs-1"])
        (block,) = session.spans[2].blocks
        session.restore(spans=[(block.start, block.end - 5)])
        session.user("go on")
        assert session.messages[-1]["content"] == (
            "[No longer shown: obs-2 (sh, 5 tokens, older than the last 1). "
            "Ask for it by this name to have it restored.]\ngo on"
        )
        fork.restore(blocks=["obs-1", "obs-2"])
        fork.user("go on")
        assert fork.messages[-1]["content"] == "go on"
        fork.close()


def test_after_a_summary_a_note_tells_of_the_messages_that_stayed(client: Client):
    with client.session() as session:
        session.messages.append(dict(TASK))
        for i in range(3):
            session.assistant(f"Looking at file number {i}, thinking at length about it.")
            session.observe(f"output {i} " * 8, tool="sh")
        session.complete(max_tokens=1)
        assert session.apply(LastNObservations(0), note=True) is not None
        assert session.manage(CacheOrSummarise(0, NEVER.summarise, keep_messages=3)).replaced == (1, 5)
        session.user([{"type": "text", "text": "go on"}])
        note, text = session.messages[-1]["content"]
        assert re.findall("obs-[0-9]", note["text"]) == ["obs-3"]
        assert text["text"] == "go on"
        session.restore(blocks=["obs-3"])
        assert session.is_visible("obs-3")


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
    assert lines[2].endswith(f"{rewritten.elapsed_ms:.0f} ms")
    assert f"prefilled {rewritten.prefilled_tokens}, generated 8 tokens" in lines[2]


def test_what_a_decision_says_it_cost_is_what_the_server_counted(client: Client):
    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(6):
            session.user(f"Look at the file number {i}, at length.")
            session.complete(max_tokens=2, temperature=0)
        before = client.stats()
        write = summariser(client.chat, max_tokens=8, temperature=0)
        decision = session.manage(CacheOrSummarise(10, write, keep_messages=2))
        after = client.stats()
        computed = after.tokens_prefilled + after.tokens_replayed - before.tokens_prefilled - before.tokens_replayed
        assert decision.prefilled_tokens == computed > 0
        assert decision.generated_tokens == after.tokens_generated - before.tokens_generated == 8
        assert decision.freed_tokens == decision.visible_tokens - session.context.visible_tokens


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
    moves = summarise.Moves(places, context.spans, context_of(after).spans)
    assert summarise.moved_marks(marks, moves)[0].message == 4


# --- what the summariser is told --------------------------------------------------------------------------------------


def test_the_summariser_is_told_what_is_visible_in_openais_words(client: Client):
    asked: list[list[JSON]] = []

    def write(messages: list[JSON]) -> Summary:
        asked.append(messages)
        return Summary("what was done")

    two = f"first {tagged('a', 'gone one')} between {tagged('b', 'kept one')} last"
    calls = [*call("sh", "c1", cmd="ls")["tool_calls"], *call("sh", "c2", cmd="secret")["tool_calls"]]
    with client.session() as session:
        session.messages += [
            dict(SYSTEM),
            {"role": "user", "content": two, "tags": ["demo"], "is_demo": True, "akv": {"keep_head": 0}},
            {"role": "assistant", "content": "let me look", "tool_calls": calls, "reasoning_content": "hm"},
            result("c1", "untagged output", name="sh", tags=["remove_output"]),
            result("c2", tagged("obs-9", "head, middle, tail"), name="sh"),
            {"role": "tool", "content": "nobody asked", "name": "sh"},
            {"role": "assistant", "content": [{"type": "text", "text": "done", "cache_control": {}}]},
            {"role": "user", "content": "go on"},
        ]
        session.complete(max_tokens=1)
        insides = {block.id: (block.start, block.end) for span in session.spans for block in span.blocks}
        middle = insides["obs-9"][0] + len(client.tokenize("head").tokens), insides["obs-9"][1] - 3
        plain = session.spans[3]
        kept = client.render(session.messages).tokens
        session.drop(spans=[insides["a"], (plain.content_start, plain.content_end), insides["input-1"], middle])
        assert session.manage(CacheOrSummarise(0, write, keep_messages=2)).kind == "summarise"
    tail = client.detokenize(kept[middle[1] : insides["obs-9"][1]]).prompt
    told = [call("sh", "c1", cmd="ls")["tool_calls"][0], call("sh", "c2")["tool_calls"][0]]
    assert asked == [
        [
            SYSTEM,
            {"role": "user", "content": two.replace("gone one", "")},
            {"role": "assistant", "content": "let me look", "tool_calls": told},
            {"role": "tool", "content": "", "tool_call_id": "c1"},
            {"role": "tool", "content": tagged("obs-9", f"head{tail}"), "tool_call_id": "c2"},
            {"role": "user", "content": "nobody asked"},
            {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
            {"role": "user", "content": summarise.REQUEST},
        ]
    ]


@pytest.mark.parametrize(
    ("written", "error", "message"),
    [
        (
            Summary(""),
            akv_sdk.EmptySummary,
            "the summary is empty (0 tokens were generated for it), nothing was changed",
        ),
        (Summary(" \n", 5, 7), akv_sdk.EmptySummary, "empty (7 tokens"),
        (None, TypeError, "summarise: gave None; return an akv_sdk.Summary"),
        ("what was done", TypeError, "summarise: gave a str; return an akv_sdk.Summary"),
    ],
)
def test_what_is_no_summary_is_refused_and_changes_nothing(server: Server, written: Any, error: Any, message: str):
    def session_of(client: Any) -> Any:
        session = client.session()
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(4):
            session.assistant(f"Looking at file number {i}, thinking at length about it.")
            session.user("Look at the next.")
        return session

    async def write(messages: list[JSON]) -> Any:
        return written

    policy = CacheOrSummarise(0, lambda messages: written, keep_messages=1)
    with Client(server.url) as client, session_of(client) as session:
        session.complete(max_tokens=1)
        before, spans = list(session.messages), session.spans
        with pytest.raises(error, match=re.escape(message)):
            session.manage(policy)
        with pytest.raises(TypeError, match="an asynchronous summariser needs an AsyncSession"):
            session.manage(CacheOrSummarise(0, write, keep_messages=1))
        assert (session.messages, session.spans, session.info().spans) == (before, spans, spans)
        assert session.manage(NEVER).kind == "summarise"

    async def manage_in_the_twin() -> None:
        async with akv_sdk.AsyncClient(server.url) as client, session_of(client) as session:
            await session.complete(max_tokens=1)
            before = list(session.messages)
            for policy in (CacheOrSummarise(0, write), CacheOrSummarise(0, lambda messages: written)):
                with pytest.raises(error, match=re.escape(message)):
                    await session.manage(policy)
            assert session.messages == before

    asyncio.run(manage_in_the_twin())


# --- what was dropped stays so ----------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["drop", "drop", "forget", "restore"]), *[st.integers(0, 60)] * 3), max_size=12
)


def histories(context: akv_sdk.Context, steps: list[tuple[str, int, int, int]]) -> list[Op]:
    """A history of a conversation: each step drops or restores a piece of a block, where some message ends."""
    blocks = [(span.end, block) for span in context.spans for block in span.blocks]
    ops = []
    for i, (kind, which, first, second) in enumerate(steps):
        home_end, block = blocks[which % len(blocks)]
        length = block.end - block.start
        start, end = sorted((block.start + first % (length + 1), block.start + second % (length + 1)))
        at = start if kind == "forget" else max(home_end, context.spans[(i + 2) % len(context.spans)].end)
        mode = "forget" if kind == "forget" else "mask"
        op = "restore" if kind == "restore" else "drop"
        ops.append(Op(op=op, at=at, start=start, end=end, repos=True, mode=mode))  # type: ignore[arg-type]
    return sorted(ops, key=lambda op: op.at)


@settings(deadline=None)
@given(STEPS, st.integers(0, 6))
def test_kept_messages_show_what_they_showed(steps, keep):
    turns = [[call("sh", f"c{i}", n=i), result(f"c{i}", tagged(f"obs-{i}", f"{i} output"))] for i in range(5)]
    messages = [SYSTEM, {"role": "user", "content": "see " + tagged("page", "the page")}]
    messages += [message for turn in turns for message in turn]
    bare = context_of(messages)
    context = context_of(messages, histories(bare, steps), marks=[Mark(message=5, pinned=True)])
    after, places = summarise.rewritten(context, summarise.summarisable(context, keep), "what was done")
    moves = summarise.Moves(places, context.spans, context_of(after).spans)
    ops = summarise.moved_ops(context.ops, moves)
    now = context_of(after, ops)

    def shown(context: akv_sdk.Context, message: int) -> str:
        span = context.spans[message]
        text = text_of(context.messages)
        return "".join(text[a:b] for a, b in visible_parts((span.start, span.end), context.dropped))

    assert {old: shown(now, new) for old, new in places.items()} == {old: shown(context, old) for old in places}
    timeline = Timeline(tuple(streams.op_of(op) for op in ops))  # raises where the server would
    layout = timeline.layout_at(now.stream_tokens)
    assert layout.num_visible == now.visible_tokens == layout.next_position
    assert moves.visible_tokens(ops) == now.visible_tokens
    once = {target.block for target in context.targets if target.dropped_at is not None and target.message in places}
    assert {target.block for target in now.targets if target.dropped_at is not None} == once


def test_a_summary_leaves_dropped_what_was_dropped_also_past_the_window(client: Client):
    """More text than the model's window stays behind the summary; most of it was dropped, and some restored."""
    with client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(3):
            session.assistant(f"Looking at file number {i}, thinking at length about it." * 3)
            session.user("Look at the next.")
        blocks = []
        for i in range(8):
            blocks.append(session.observe(f"output {i} " * 40, tool="sh"))
            session.complete(max_tokens=2, temperature=0)
            session.apply(LastNObservations(1))
        session.restore(blocks=blocks[:1])
        assert session.context.stream_tokens > 2048 > session.context.visible_tokens
        before = session.context
        decision = session.manage(CacheOrSummarise(0, lambda messages: Summary("Three files."), keep_messages=16))
        assert (decision.kind, decision.replaced) == ("summarise", (2, 7))
        assert decision.freed_tokens == before.visible_tokens - session.context.visible_tokens > 0
        assert session.context.stream_tokens > 2048
        assert [session.is_visible(block) for block in blocks] == [True] + [False] * 6 + [True]
        insides = [(block.start, block.end) for span in session.spans for block in span.blocks]
        assert dropped_spans(session.ops) == insides[1:-1]
        session.user("go on")
        reply = session.complete(max_tokens=1, temperature=0)
        assert (reply.akv.warnings, reply.akv.replayed_tokens) == ([], 0)
        assert reply.akv.dropped_tokens == sum(end - start for start, end in insides[1:-1])
        assert [drop.target.block for drop in decide(LastNObservations(0), session.context)] == blocks[-1:]
