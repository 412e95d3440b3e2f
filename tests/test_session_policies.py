"""What a session makes of policies, over a real server with a tiny model: notes, marks and pins, and the decision
between dropping and summarising with what it cost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

import akv_sdk
from akv_sdk import CacheOrSummarise, Client, LastNObservations, Mark, Summary, summariser
from akv_sdk.policies import summarise
from tests.conversations import call, context_of, result, tagged
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
    assert summarise.moved_marks(marks, places, context.spans, context_of(after).spans)[0].message == 4
