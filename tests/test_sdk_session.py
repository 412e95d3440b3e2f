"""Session and AsyncSession against a small server that keeps streams and ops for real, one token per character."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

import akv_sdk
from akv_sdk import CacheOrSummarise, LastNObservations, Summary, types
from tests.test_sdk_client import Chunks

PAGE = 16


class Refused(Exception):
    def __init__(self, status: int, code: str, param: str | None = None):
        self.reply = httpx.Response(status, json={"error": {"message": code, "code": code, "param": param}})


class FakeServer:
    """Streams of characters and their ops, kept naively: what is visible is worked out token by token, each time."""

    def __init__(self) -> None:
        self.streams: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, Any]] = []
        self.replies: list[Chunks] = []  # streamed ones
        self.padding = ""  # comes before every message: another one makes the same messages lie elsewhere
        self.failures: list[Refused] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.log.append((f"{request.method} {request.url.path}", body))
        try:
            if self.failures:
                raise self.failures.pop(0)
            return self.route(request.method, request.url.path, body)
        except Refused as refused:
            return refused.reply

    def route(self, method: str, path: str, body: Any) -> httpx.Response:
        if path == "/v1/chat/completions":
            return self.complete(body)
        if path.startswith("/v1/cache/sessions/"):
            name = path.split("/")[4]
            stream = self.get(name)
            if method == "DELETE":
                del self.streams[name]
                return httpx.Response(200, json={})
            if path.endswith("/fork"):
                name = body.get("session") or f"{name}-copy"
                self.streams[name] = {**stream, "ops": list(stream["ops"])}
            return httpx.Response(200, json=self.info(name))
        return httpx.Response(200, json=self.edit(path.split("/")[-1], body))

    def get(self, name: str) -> dict[str, Any]:
        if not all(reply.is_closed for reply in self.replies):
            raise Refused(500, "internal_error")  # a real one waits for the end of its answer, and for its reader
        if name not in self.streams:
            raise Refused(404, "session_not_found", "session")
        return self.streams[name]

    def complete(self, body: Any) -> httpx.Response:
        name, messages = body["akv"]["session"], body["messages"]
        kept = self.streams.get(name, {"ops": []})
        stream = self.streams[name] = {"messages": messages, "ops": body["akv"].get("ops", kept["ops"])}
        message = {"role": "assistant", "content": f"answer {len(messages)}"}
        if body.get("max_tokens") == 0:
            message["content"] = ""
        else:
            stream["messages"] = [*messages, message]
        info = self.info(name)
        akv = {**info, "prefilled_tokens": 0, "replayed_tokens": 0}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return httpx.Response(200, json={"choices": [choice], "usage": usage, "akv": akv})
        chunks = [{"choices": [{"index": 0, "delta": {"content": letter}}]} for letter in message["content"]]
        lines = [json.dumps(chunk) for chunk in [*chunks, {"choices": [], "usage": usage, "akv": akv}]] + ["[DONE]"]
        self.replies.append(Chunks(*(f"data: {line}\n\n".encode() for line in lines)))
        return httpx.Response(200, stream=self.replies[-1])

    def render(self, stream: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        at, spans = 0, []
        for i, message in enumerate(stream["messages"]):
            start = at
            content_start = start + len(f"{self.padding}<{message['role']}>")
            content = message["content"] or ""
            content = content if isinstance(content, str) else "".join(part["text"] for part in content)
            content_end = content_start + len(content)
            at = content_end + len("</>")
            blocks = [
                {"id": found[1], "start": content_start + found.start(2), "end": content_start + found.end(2)}
                for found in re.finditer(
                    r'<ephemeral_observation id="(.*?)">(.*?)</ephemeral_observation>', content, re.S
                )
            ]
            ends = {"start": start, "end": at, "content_start": content_start, "content_end": content_end}
            spans.append({"message": i, "role": message["role"], "blocks": blocks, **ends})
        return at, spans

    def visible(self, stream: dict[str, Any]) -> list[bool]:
        visible = [True] * self.render(stream)[0]
        for op in stream["ops"]:
            if op["op"] != "repos":
                visible[op["start"] : op["end"]] = [op["op"] == "restore"] * (op["end"] - op["start"])
        return visible

    def info(self, name: str) -> dict[str, Any]:
        stream = self.get(name)
        num_tokens, spans = self.render(stream)
        visible = self.visible(stream)
        for span in spans:
            for block in span["blocks"]:
                block["visible"] = any(visible[block["start"] : block["end"]])
        runs = re.finditer("1+", "".join("01"[seen] for seen in visible))
        return {
            "session": name,
            "stream_tokens": num_tokens,
            "visible_tokens": sum(visible),
            "dropped_tokens": num_tokens - sum(visible),
            "next_position": num_tokens,
            "ops": stream["ops"],
            "segments": [{"start": r.start(), "end": r.end(), "shift": 0, "written_shift": 0} for r in runs],
            "spans": spans,
            "resident_tokens": 0,
            "pages": 0,
            "fragmentation": 0.0,
            "generating": False,
            "idle_s": 0.0,
        }

    def edit(self, kind: str, body: Any) -> dict[str, Any]:
        stream = self.get(body["session"])
        before, applied = self.visible(stream), []
        if kind == "repos":
            spans = [[body["start"], body.get("end")]]
        elif "blocks" in body:
            blocks = {block["id"]: block for span in self.render(stream)[1] for block in span["blocks"]}
            if unknown := set(body["blocks"]) - set(blocks):
                raise Refused(400, "invalid_request", f"blocks[{body['blocks'].index(min(unknown))}]")
            spans = [[blocks[name]["start"], blocks[name]["end"]] for name in body["blocks"]]
        else:
            spans = body.get("spans") or [[page * PAGE, (page + 1) * PAGE] for page in body["pages"]]
        for start, end in spans:
            if (end or 0) > len(before):
                raise Refused(400, "span_out_of_range", "spans[0]")
            wanted = kind == "restore"
            if kind != "repos" and all(seen == wanted for seen in self.visible(stream)[start:end]):
                continue
            op = {"op": kind, "at": len(before), "start": start, "end": end, "delta": body.get("delta", 0)}
            if kind != "repos":
                op["repos"] = bool(body["repos"])
            if body.get("mode") == "forget":
                op |= {"mode": "forget", "at": start}
            op = types.Op.model_validate(op).model_dump()
            applied.append(op)
            stream["ops"] = [*stream["ops"], op]
        changed = sum(a != b for a, b in zip(before, self.visible(stream), strict=True))
        layout = {name: value for name, value in self.info(body["session"]).items() if name != "spans"}
        return {**layout, "changed": changed, "applied": applied}

    def restart(self) -> None:
        self.streams.clear()

    def routes(self) -> list[str]:
        return [route for route, _ in self.log]

    def last(self, route: str) -> Any:
        return [body for seen, body in self.log if seen == route][-1]


CHAT, DROP = "POST /v1/chat/completions", "POST /v1/cache/drop"


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def client(connect, server):
    return connect(transport=httpx.MockTransport(server), max_retries=0)


def with_observations(session, count: int) -> list[str]:
    """Turns of an agent: after each observation the model goes on."""
    session.system("You are an agent.")
    session.user("Find the bug.")
    blocks = []
    for i in range(count):
        blocks.append(session.observe(f"output {i}", tool="bash", tool_call_id=f"call-{i}"))
        session.complete()
    return blocks


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


# --- while a stream is read -------------------------------------------------------------------------------------------


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
    assert server.routes() == [*sent, CHAT]
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
