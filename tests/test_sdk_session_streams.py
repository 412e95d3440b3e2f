"""What a session may do while its stream is read, and what it sends when: against the fake server, both twins."""

from __future__ import annotations

import asyncio

import httpx
import pytest

import akv_sdk
from akv_sdk import CacheOrSummarise, LastNObservations, Summary
from tests.fake_server import CHAT, DROP, RENDER, FakeServer, with_observations


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def client(connect, server):
    return connect(transport=httpx.MockTransport(server), max_retries=0)


def begun(session):
    """A stream of a session with two observations, one event of it read."""
    with_observations(session, 2)
    session.user("go on")
    stream = session.stream()
    assert next(stream).text == "a"
    return stream


@pytest.mark.parametrize("verb", ["drop", "forget", "apply", "manage"])
def test_what_drops_while_a_stream_is_read_waits_for_its_end(client, server, verb):
    session = client.session()
    stream = begun(session)
    if verb == "apply":
        session.apply(LastNObservations(1), note=True)
    elif verb == "manage":
        fits = session.context.visible_tokens + 30  # but the question and its answer come to 36
        policy = CacheOrSummarise(fits, lambda messages: Summary("no"))
        assert session.manage(policy).kind == "drop"
    else:
        getattr(session, verb)(blocks=["obs-1"])
    assert session.messages[-1] == {"role": "assistant", "content": "answer 7"}
    assert server.routes()[-1] == DROP and server.last(DROP)["session"] == session.name
    length = session.spans[-1].end
    (op,) = session.ops
    assert (op.at, session.is_visible("obs-1")) == (op.start if verb == "forget" else length, False)
    assert [block.visible for span in session.spans for block in span.blocks] == [False, True]
    assert "a" + "".join(event.text for event in stream) == "answer 7"
    assert stream.final.text == "answer 7"
    assert len(session.messages) == 8


def test_a_summary_while_a_stream_is_read_covers_its_answer(client, server):
    session = client.session()
    stream = begun(session)
    session.pin("obs-1")
    asked = []

    def write(messages):
        asked.append(messages)
        return Summary("what was done")

    decision = session.manage(CacheOrSummarise(0, write, keep_messages=0))
    assert (decision.kind, decision.replaced) == ("summarise", (3, 7))
    assert [event.text for event in stream][-1] == "7"
    assert [m["role"] for m in session.messages] == ["system", "user", "tool", "user", "assistant"]
    assert session.messages[-1]["content"] == "answer 7"
    assert [span.role for span in session.spans] == [m["role"] for m in session.messages]
    session.user("and on")
    assert session.complete().text == "answer 6"


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_summary_whose_messages_lie_otherwise_than_rendered(client, server, monkeypatch, is_settled):
    """An answer's own ids can lie otherwise than its text: what was dropped goes where it turns out to be."""
    session = client.session()
    with_observations(session, 3)
    session.drop(blocks=["obs-2", "obs-3"])
    before = list(session.messages)
    route = server.route

    def otherwise(method, path, body):
        is_rendered = path in ("/v1/render", "/detokenize")
        server.padding = "two" if is_rendered else "" if is_settled else "n" * len(server.log)
        return route(method, path, body)

    monkeypatch.setattr(server, "route", otherwise)
    policy = CacheOrSummarise(0, lambda messages: Summary("s"), keep_messages=2)
    if not is_settled:
        with pytest.raises(akv_sdk.StreamDiverged, match="lie elsewhere each time"):
            session.manage(policy)
        assert session.messages == before
        return
    assert session.manage(policy).kind == "summarise"
    assert server.routes()[-3:] == [RENDER, CHAT, CHAT]
    (block,) = session.spans[-2].blocks
    assert [(op.start, op.end) for op in session.ops] == [(block.start, block.end)]
    assert not session.is_visible("obs-3")


def test_one_answer_at_a_time(client, server):
    session = client.session()
    stream = begun(session)
    before = (list(session.messages), server.routes())
    for refused in (session.complete, lambda: next(session.stream())):
        with pytest.raises(akv_sdk.SessionBusy):
            refused()
    assert (session.messages, server.routes()) == before
    list(stream)
    session.user("and on")
    assert session.complete().text == "answer 9"


def test_a_completion_while_a_summary_is_written_is_refused(client, server):
    session = client.session()
    with_observations(session, 2)
    sent = server.routes()

    def write(messages):
        with pytest.raises(akv_sdk.SessionBusy):
            session.complete()
        return Summary("what was done")

    async def write_later(messages):
        with pytest.raises(akv_sdk.SessionBusy):
            await session.inner.complete()
        return Summary("what was done")

    policy = CacheOrSummarise(0, write if isinstance(session, akv_sdk.Session) else write_later, keep_messages=0)
    assert session.manage(policy).kind == "summarise"
    assert server.routes() == [*sent, RENDER, CHAT]
    session.complete()


def test_a_stream_that_has_not_begun_sends_what_holds_when_it_does(client, server):
    session = client.session()
    with_observations(session, 1)
    stream = session.stream()
    session.drop(blocks=["obs-1"])
    assert server.routes()[-1] == DROP  # nothing was sent for the stream yet
    list(stream)
    assert len(server.last(CHAT)["akv"]["ops"]) == 1
    assert not session.is_visible("obs-1")


def test_a_stream_that_was_left_holds_nothing(client, server):
    session = client.session()
    stream = begun(session)
    stream.close()
    assert list(stream) == []
    assert session.drop(blocks=["obs-1"]).changed > 0
    assert session.complete().text == "answer 7"


def test_closing_a_session_leaves_its_streams(client, server):
    session = client.session()
    stream = begun(session)
    session.close()
    assert session.name not in server.streams
    assert list(stream) == []
    assert len(session.messages) == 7  # the answer that was left is not among them


def test_one_task_may_read_what_another_waits_for(server):
    async def both() -> list[str]:
        async with akv_sdk.AsyncClient("http://akv.test", transport=httpx.MockTransport(server)) as client:
            session = client.session()
            session.user("hi")
            session.observe("x")
            stream = session.stream()
            texts = [(await anext(stream)).text]

            async def read() -> None:
                async for event in stream:
                    await asyncio.sleep(0)
                    texts.append(event.text)

            await asyncio.gather(read(), session.drop(blocks=["obs-1"]), session.apply(LastNObservations(1)))
            assert not session.is_visible("obs-1")
            return texts

    assert "".join(asyncio.run(both())) == "answer 2"


def test_server_driven_drops_are_asked_for_by_request(client, server):
    session = client.session()
    session.user("hi")
    settings = akv_sdk.AutoDrop(epsilon=0.1, dry_run=True)
    session.complete(auto_drop=settings)
    assert server.last(CHAT)["akv"]["auto_drop"] == {"epsilon": 0.1, "turns": 3, "dry_run": True}
    list(session.stream(auto_drop=False))
    assert server.last(CHAT)["akv"]["auto_drop"] is False
    session.complete()
    assert "auto_drop" not in server.last(CHAT)["akv"]
    client.chat(session.messages, session=session.name, auto_drop=True)
    assert server.last(CHAT)["akv"]["auto_drop"] is True
    list(client.chat_stream(session.messages, session=session.name, auto_drop=True))
    assert server.last(CHAT)["akv"]["auto_drop"] is True
