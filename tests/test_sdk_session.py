"""Session and AsyncSession against a small server that keeps streams and ops for real, one token per character."""

from __future__ import annotations

import httpx
import pytest

import akv_sdk
from akv_sdk import LastNObservations, types
from tests.fake_server import CHAT, DROP, FakeServer, Refused, with_observations


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def client(connect, server):
    return connect(transport=httpx.MockTransport(server), max_retries=0)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_are_what_the_api_has(client, server):
    session = client.session(model="m")
    session.system("s")
    session.user([{"type": "text", "text": "u"}])
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    session.assistant(None, tool_calls=[call])
    assert session.observe("a.py\n", tool="ls", tool_call_id="c") == "obs-1"
    assert session.observe("kept", ephemeral=False) is None
    reply = session.complete(max_tokens=5, temperature=0)
    assert session.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "content": '<ephemeral_observation id="obs-1">\na.py\n\n</ephemeral_observation>',
            "name": "ls",
            "tool_call_id": "c",
        },
        {"role": "tool", "content": "kept"},
        {"role": "assistant", "content": "answer 5"},
    ]
    assert reply.text == "answer 5"
    sent = server.last(CHAT)
    assert (sent["messages"], sent["model"], sent["max_tokens"]) == (session.messages[:-1], "m", 5)


def test_names_and_block_ids_are_fresh(client):
    one, other = client.session(), client.session()
    assert one.name != other.name
    assert [one.observe("a"), one.observe('<ephemeral_observation id="obs-9">'), one.observe("c")] == [
        "obs-1",
        "obs-2",
        "obs-3",
    ]
    resumed = client.session("mine", messages=one.messages)
    assert (resumed.name, resumed.observe("d"), one.observe("d")) == ("mine", "obs-4", "obs-4")


def test_a_prefill_appends_nothing(client, server):
    session = client.session()
    session.user("hi")
    session.complete(max_tokens=0)
    assert session.messages == [{"role": "user", "content": "hi"}]
    assert [span.role for span in session.spans] == ["user"]


def test_a_failed_completion_changes_nothing(client, server):
    session = client.session()
    with_observations(session, 1)
    session.drop(blocks=["obs-1"])
    before = (list(session.messages), session.ops, session.spans)
    server.failures = [Refused(503, "out_of_pages")]
    with pytest.raises(akv_sdk.OutOfPages):
        session.complete()
    assert (session.messages, session.ops, session.spans) == before


def test_a_session_has_one_continuation(client):
    session = client.session()
    session.user("hi")
    for params in ({"n": 2}, {"echo": True}, {"max_token": 1}):
        with pytest.raises(TypeError):
            session.complete(**params)


def test_a_stream_appends_when_it_ends(client, server):
    session = client.session()
    session.user("hi")
    stream = session.stream(max_tokens=9)
    assert "".join(event.text for event in stream) == "answer 1"
    assert session.messages[1:] == [{"role": "assistant", "content": "answer 1"}]
    assert [span.role for span in session.spans] == ["user", "assistant"]
    assert stream.final.akv.session == session.name


def test_a_stream_left_early_appends_nothing(client, server):
    session = client.session()
    session.user("hi")
    stream = session.stream()
    assert next(stream).text == "a"
    stream.close()
    server.failures = [Refused(400, "context_length_exceeded")]
    with pytest.raises(akv_sdk.ContextLengthExceeded):
        list(session.stream())
    assert session.messages == [{"role": "user", "content": "hi"}]


# --- ops --------------------------------------------------------------------------------------------------------------


def test_a_dropped_block_is_no_longer_visible_and_its_op_travels_on(client, server):
    session = client.session()
    first, second = with_observations(session, 2)
    assert (session.is_visible(first), session.is_visible(second)) == (True, True)
    layout = session.drop(blocks=[first])
    assert layout.changed == len("\noutput 0\n")
    assert (session.is_visible(first), session.is_visible(second)) == (False, True)
    assert session.ops == tuple(layout.ops) == tuple(layout.applied)
    assert session.ops[0].at == layout.stream_tokens  # as the server resolved it
    session.complete()
    assert server.last(CHAT)["akv"] == {
        "session": session.name,
        "ops": [op.model_dump(exclude_none=True) for op in session.ops],
        "on_miss": "replay",
    }
    assert not session.is_visible(first)


def test_dropping_again_is_nothing_and_restoring_brings_back(client):
    session = client.session()
    (block,) = with_observations(session, 1)
    session.drop(blocks=[block], repos=False)
    again = session.drop(blocks=[block])
    assert (again.changed, again.applied, len(session.ops)) == (0, [], 1)
    session.restore(blocks=[block], repos=False)
    assert session.is_visible(block)
    assert [op.op for op in session.ops] == ["drop", "restore"]


def test_the_other_ways_to_say_what(client, server):
    session = client.session()
    with_observations(session, 1)
    assert session.drop(spans=[(0, 3), (5, 9)]).dropped_tokens == 7
    assert session.drop(pages=[1]).dropped_tokens == 23
    assert session.forget(spans=[(9, 11)]).applied[0] == types.Op(
        op="drop", at=9, start=9, end=11, repos=True, mode="forget"
    )
    assert session.repos(20, None, 5).applied[0].delta == 5
    assert [op.op for op in session.ops] == ["drop", "drop", "drop", "drop", "repos"]


def test_a_bad_op_names_its_field_and_changes_nothing(client, server):
    session = client.session()
    with_observations(session, 1)
    before = session.spans
    for arguments, error, param in (
        ({"spans": [(0, 10**6)]}, akv_sdk.SpanOutOfRange, "spans[0]"),
        ({"blocks": ["obs-1", "obs-7"]}, akv_sdk.InvalidRequest, "blocks[1]"),
        ({"spans": [(0, 1.5)]}, akv_sdk.InvalidRequest, "spans[0][1]"),
        ({}, akv_sdk.InvalidRequest, "spans"),
    ):
        with pytest.raises(error) as caught:
            session.drop(**arguments)
        assert caught.value.param == param
    assert (session.ops, session.spans) == ((), before)


def test_is_visible_knows_what_was_not_sent_yet_and_refuses_the_rest(client):
    session = client.session()
    block = session.observe("x")
    assert session.is_visible(block)
    with pytest.raises(KeyError, match="obs-2"):
        session.is_visible("obs-2")


def test_info_brings_the_session_up_to_date(client, server):
    session = client.session()
    (block,) = with_observations(session, 1)
    client.drop(session.name, blocks=[block])  # past the session's back
    assert session.is_visible(block)
    info = session.info()
    assert isinstance(info, akv_sdk.SessionInfo)
    assert not session.is_visible(block)
    assert len(session.ops) == 1


# --- the server loses the session -------------------------------------------------------------------------------------


def test_a_restarted_server_gets_the_history_with_the_next_completion(client, server):
    session = client.session()
    with_observations(session, 3)
    session.drop(blocks=["obs-1", "obs-2"])
    kept = server.info(session.name)
    server.restart()
    session.complete(max_tokens=0)
    assert server.info(session.name) == kept


def test_an_op_on_a_lost_session_builds_it_first(client, server):
    session = client.session()
    tools = [{"type": "function", "function": {"name": "bash"}}]
    with_observations(session, 3)
    session.complete(tools=tools, cache_salt="pepper")
    session.drop(blocks=["obs-1"])
    messages = list(session.messages)
    server.restart()
    server.log.clear()
    session.drop(blocks=["obs-2"])
    assert server.routes() == [DROP, CHAT, DROP]
    sent = server.last(CHAT)
    assert (sent["max_tokens"], sent["tools"], sent["cache_salt"]) == (0, tools, "pepper")
    assert session.messages == messages
    assert [session.is_visible(f"obs-{i}") for i in (1, 2, 3)] == [False, False, True]
    assert len(session.ops) == 2


def test_an_op_before_the_first_completion_builds_the_session(client, server):
    session = client.session()
    block = session.observe("x")
    assert session.drop(blocks=[block]).changed == len("\nx\n")
    assert not session.is_visible(block)
    assert server.routes() == [DROP, CHAT, DROP]


def test_a_lost_session_is_built_once_only(client, server):
    session = client.session()
    with_observations(session, 1)
    server.log.clear()
    gone = [Refused(404, "session_not_found") for _ in range(3)]
    server.failures = [gone[0]]
    session.drop(blocks=["obs-1"])
    server.failures = gone[1:]
    with pytest.raises(akv_sdk.SessionNotFound):
        session.drop(blocks=["obs-1"])
    assert server.routes() == [DROP, CHAT, DROP, DROP, CHAT]
    with pytest.raises(akv_sdk.SessionNotFound):
        client.session("empty").drop(spans=[(0, 1)])


def test_a_session_built_again_elsewhere_is_not_cut_by_old_numbers(client, server):
    def lost_session(*, with_op: bool):
        session = client.session()
        server.padding = ""
        with_observations(session, 2)
        if with_op:
            session.drop(blocks=["obs-1"])
        server.restart()
        server.padding = "##"
        server.log.clear()
        return session

    for session, arguments in (
        (lost_session(with_op=True), {"blocks": ["obs-2"]}),
        (lost_session(with_op=False), {"spans": [(20, 30)]}),
    ):
        server.padding = "##"
        with pytest.raises(akv_sdk.StreamDiverged):
            session.drop(**arguments)
    session = lost_session(with_op=False)
    session.drop(blocks=["obs-2"])  # by name it is still the right one
    assert not session.is_visible("obs-2")


def test_a_resumed_session_leaves_the_servers_journal_alone(client, server):
    first = client.session("mine")
    with_observations(first, 2)
    first.drop(blocks=["obs-1"])
    resumed = client.session("mine", messages=first.messages)
    assert resumed.ops == ()
    resumed.user("go on")
    resumed.complete()
    assert "ops" not in server.last(CHAT)["akv"]
    assert resumed.ops == first.ops
    assert not resumed.is_visible("obs-1")


# --- fork, close, policies --------------------------------------------------------------------------------------------


def test_a_fork_goes_its_own_way(client, server):
    session = client.session()
    with_observations(session, 2)
    session.drop(blocks=["obs-1"])
    copy = session.fork("branch")
    assert (copy.name, copy.messages, copy.ops) == ("branch", session.messages, session.ops)
    copy.drop(blocks=["obs-2"])
    copy.user("what if")
    copy.complete()
    assert (session.is_visible("obs-2"), copy.is_visible("obs-2")) == (True, False)
    assert (len(session.ops), len(copy.ops)) == (1, 2)
    assert len(copy.messages) == len(session.messages) + 2
    with session.fork() as passing:
        assert passing.name == f"{session.name}-copy"
    copy.close()
    assert set(server.streams) == {session.name, "branch"}  # a name of its own stays


def test_closing_deletes_what_was_made_up_here_and_keeps_what_was_named(client, server):
    with client.session() as anonymous, client.session("mine") as named:
        for session in (anonymous, named):
            session.user("hi")
            session.complete()
        assert set(server.streams) == {anonymous.name, "mine"}
    assert set(server.streams) == {"mine"}
    named.delete()
    assert server.streams == {}
    named.delete()  # gone already: nothing to do


def test_closing_on_a_server_that_is_gone_is_no_error(connect):
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    session = connect(transport=httpx.MockTransport(refuse), max_retries=0).session()
    session.close()
    with pytest.raises(akv_sdk.ConnectionFailed):
        session.delete()


def test_the_last_n_observations_are_kept_and_nothing_is_dropped_twice(client, server):
    session = client.session()
    session.user("go")
    assert session.apply(LastNObservations(2)) is None
    for i in range(1, 7):
        session.observe(f"output {i}")
        session.complete()
        layout = session.apply(LastNObservations(2))
        assert (layout is None) == (i <= 2)
        assert session.apply(LastNObservations(2)) is None
        assert [n for n in range(1, i + 1) if session.is_visible(f"obs-{n}")] == list(range(max(1, i - 1), i + 1))
    blocks = [(block.start, block.end) for span in session.spans for block in span.blocks]
    assert [body["spans"] for route, body in server.log if route == DROP] == [[list(span)] for span in blocks[:4]]
