"""Client and AsyncClient over transports that answer what they are told to, and over a real socket."""

from __future__ import annotations

import inspect
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

import akv_sdk
from akv_sdk import AsyncClient, AsyncSession, Client, Session

AKV = {
    "stream_tokens": 9,
    "visible_tokens": 9,
    "dropped_tokens": 0,
    "prefilled_tokens": 9,
    "replayed_tokens": 0,
    "next_position": 9,
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
COMPLETION = {"id": "c", "model": "m", "choices": [CHOICE], "usage": USAGE, "akv": AKV}
LAYOUT = {"session": "s", "stream_tokens": 9, "visible_tokens": 9, "dropped_tokens": 0, "next_position": 9}
INFO = {**LAYOUT, "resident_tokens": 9, "pages": 1, "fragmentation": 0.4, "generating": False, "idle_s": 0.1}
STATS = {**dict.fromkeys(akv_sdk.CacheStats.model_fields, 3), "fragmentation": [3] * 10}
USER = [{"role": "user", "content": "hi"}]


class Script:
    """Answers with the given replies (bodies, functions that make a response, exceptions), the last one for ever."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply() if callable(reply) else httpx.Response(200, json=reply)

    @property
    def bodies(self):
        return [json.loads(request.content) for request in self.requests]


def refusal(status: int, code: str, **headers: str) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(
        status, json={"error": {"message": "no", "code": code, "param": "p"}}, headers=headers
    )


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces; an exception among them breaks the connection there. Knows whether it was closed."""

    def __init__(self, *chunks):
        self.chunks = chunks
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.is_closed = True

    async def aclose(self) -> None:
        self.is_closed = True


def sse(*payloads) -> list[bytes]:
    return [f"data: {p if isinstance(p, str) else json.dumps(p)}\n\n".encode() for p in payloads]


def piece(text: str, **more) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


def whole_stream() -> Chunks:
    return Chunks(*sse(piece("hel"), piece("lo"), {"choices": [], "usage": USAGE, "akv": AKV}, "[DONE]"))


# --- what is sent and how the reply comes back ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "method", "path", "reply", "want"),
    [
        (lambda c: c.chat(USER).text, "POST", "/v1/chat/completions", COMPLETION, "hello"),
        (
            lambda c: c.completions([1, 2], max_tokens=0, echo=True).text,
            "POST",
            "/v1/completions",
            {**COMPLETION, "choices": [{"text": "ab"}]},
            "ab",
        ),
        (lambda c: c.render(USER).tokens, "POST", "/v1/render", {"tokens": [1], "text": "x", "spans": []}, [1]),
        (lambda c: c.tokenize("x").count, "POST", "/tokenize", {"tokens": [1], "count": 1, "max_model_len": 8}, 1),
        (lambda c: c.detokenize([1]).prompt, "POST", "/detokenize", {"prompt": "x"}, "x"),
        (
            lambda c: c.tokenizer().num_vocab,
            "GET",
            "/v1/tokenizer",
            {"name": "n", "num_vocab": 7, "eos_token_id": 0, "special_tokens": {}},
            7,
        ),
        (lambda c: c.models()[0].id, "GET", "/v1/models", {"object": "list", "data": [{"id": "m"}]}, "m"),
        (lambda c: c.health(), "GET", "/health", {}, True),
        (lambda c: c.stats().steps, "GET", "/v1/cache/stats", STATS, 3),
        (lambda c: c.drop("s", blocks=["b"]).next_position, "POST", "/v1/cache/drop", LAYOUT, 9),
        (lambda c: c.restore("s", spans=[(0, 3)]).next_position, "POST", "/v1/cache/restore", LAYOUT, 9),
        (lambda c: c.repos("s", 3, None, -2).next_position, "POST", "/v1/cache/repos", LAYOUT, 9),
        (lambda c: c.fork("s", "t").session, "POST", "/v1/cache/sessions/s/fork", {**INFO, "session": "t"}, "t"),
        (lambda c: c.sessions()[0].pages, "GET", "/v1/cache/sessions", {"data": [INFO]}, 1),
        (lambda c: c.session_info("a/b").pages, "GET", "/v1/cache/sessions/a%2Fb", INFO, 1),
        (lambda c: c.delete_session("s"), "DELETE", "/v1/cache/sessions/s", {}, None),
    ],
)
def test_each_method_asks_its_route(connect, call, method, path, reply, want):
    server = Script(reply)
    assert call(connect(transport=httpx.MockTransport(server), api_key="k")) == want
    (request,) = server.requests
    assert (request.method, request.url.raw_path.decode()) == (method, path)
    assert request.headers["authorization"] == "Bearer k"
    assert ("content-type" in request.headers) == (method == "POST")


def test_ops_are_sent_as_the_wire_has_them(connect):
    server = Script(LAYOUT)
    client = connect(transport=httpx.MockTransport(server))
    client.drop("s", spans=[(2, 5), [7, 8]], repos=False, mode="forget")
    client.restore("s", blocks=["b"], repos="auto")
    client.repos("s", 4, None, -3)
    assert server.bodies == [
        {"session": "s", "spans": [[2, 5], [7, 8]], "repos": False, "mode": "forget"},
        {"session": "s", "blocks": ["b"], "repos": "auto"},
        {"session": "s", "start": 4, "delta": -3},
    ]


@pytest.mark.parametrize(
    "base_url", ["http://akv.test", "http://akv.test/", "http://akv.test/v1", "http://akv.test/v1/"]
)
def test_the_address_may_end_in_v1(base_url):
    server = Script(COMPLETION)
    with Client(base_url, transport=httpx.MockTransport(server)) as client:
        client.chat(USER)
    assert str(server.requests[0].url) == "http://akv.test/v1/chat/completions"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url"),
        ({"base_url": "ftp://x"}, "base_url"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_bad_options_are_named(options, field):
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=field):
            kind(**options)


def test_the_twins_have_the_same_methods_with_the_same_arguments():
    for one, other in ((Client, AsyncClient), (Session, AsyncSession)):
        names = {name for name in vars(one) if not name.startswith("_")}
        assert names == {name for name in vars(other) if not name.startswith("_")}
        for name in names:
            arguments = [list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in (one, other)]
            assert arguments[0] == arguments[1], name


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_refusal_is_raised_as_its_class_and_not_repeated(connect):
    server = Script(refusal(409, "position_conflict", **{"x-request-id": "r-9"}))
    with pytest.raises(akv_sdk.PositionConflict) as caught:
        connect(transport=httpx.MockTransport(server)).drop("s", blocks=["b"])
    assert (caught.value.param, caught.value.status, caught.value.request_id) == ("p", 409, "r-9")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "failure",
    [
        refusal(503, "out_of_pages", **{"retry-after": "0.01"}),
        lambda: httpx.Response(429, text="slow down", headers={"retry-after": "0"}),
        refusal(409, "session_busy", **{"retry-after": "0.01"}),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ],
)
def test_what_passes_is_tried_again(connect, failure):
    server = Script(failure, COMPLETION)
    assert connect(transport=httpx.MockTransport(server)).chat(USER).text == "hello"
    assert len(server.requests) == 2
    assert server.bodies[0] == server.bodies[1]


def test_it_gives_up_in_the_end(connect):
    server = Script(refusal(503, "out_of_pages", **{"retry-after": "0.01"}))
    with pytest.raises(akv_sdk.OutOfPages) as caught:
        connect(transport=httpx.MockTransport(server), max_retries=3).chat(USER)
    assert caught.value.retry_after_s == 0.01
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (httpx.ReadTimeout("slow"), akv_sdk.Timeout),
        (httpx.WriteTimeout("slow"), akv_sdk.Timeout),
        (refusal(409, "session_busy"), akv_sdk.SessionBusy),
        (lambda: httpx.Response(200, text="<html>"), akv_sdk.BadReply),
        (lambda: httpx.Response(500, text="oops"), akv_sdk.ApiError),
        (lambda: httpx.Response(302, headers={"location": "http://elsewhere"}), akv_sdk.ApiError),
    ],
)
def test_what_does_not_pass_is_not(connect, failure, error):
    server = Script(failure)
    with pytest.raises(error):
        connect(transport=httpx.MockTransport(server)).chat(USER)
    assert len(server.requests) == 1


def test_an_op_whose_reply_was_lost_is_sent_again_under_its_key(connect):
    server = Script(httpx.ReadError("reset"), httpx.ConnectTimeout("slow"), LAYOUT)
    client = connect(transport=httpx.MockTransport(server))
    for op in (
        lambda: client.repos("s", 0, None, 3),
        lambda: client.drop("s", spans=[(0, 1)]),
        lambda: client.restore("s", spans=[(0, 1)]),
    ):
        assert op().session == "s"
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert len(keys) == 5
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 3


def test_a_fork_whose_reply_was_lost_is_not_made_twice(connect):
    lost = Script(httpx.ReadError("reset"), LAYOUT)
    with pytest.raises(akv_sdk.ConnectionFailed) as caught:
        connect(transport=httpx.MockTransport(lost)).fork("s")
    assert caught.value.sent
    assert len(lost.requests) == 1
    assert "idempotency-key" not in lost.requests[0].headers


def test_a_reply_that_breaks_off_is_not_asked_for_again(connect):
    body = Chunks(b'{"id": ', httpx.ReadError("reset"))
    server = Script(lambda: httpx.Response(200, stream=body))
    with pytest.raises(akv_sdk.ConnectionFailed):
        connect(transport=httpx.MockTransport(server)).chat(USER)
    assert len(server.requests) == 1
    assert body.is_closed


def test_health_answers_instead_of_raising(connect):
    for reply in (httpx.ConnectError("refused"), refusal(503, "out_of_pages"), httpx.ReadTimeout("slow")):
        server = Script(reply)
        assert connect(transport=httpx.MockTransport(server)).health() is False
        assert len(server.requests) == 1


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_gives_events_and_then_the_whole(connect):
    body = whole_stream()
    server = Script(lambda: httpx.Response(200, stream=body))
    stream = connect(transport=httpx.MockTransport(server)).chat_stream(USER, max_tokens=4)
    assert server.requests == []
    with pytest.raises(RuntimeError, match="final"):
        _ = stream.final
    assert [event.text for event in stream] == ["hel", "lo"]
    assert (stream.final.text, stream.final.akv.next_position) == ("hello", 9)
    assert body.is_closed
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_text_completion_streams_too(connect):
    chunks = sse(
        {"choices": [{"index": 0, "text": "ab", "finish_reason": "length"}], "usage": USAGE, "akv": AKV}, "[DONE]"
    )
    server = Script(lambda: httpx.Response(200, stream=Chunks(*chunks)))
    stream = connect(transport=httpx.MockTransport(server)).completions_stream("x")
    assert [(event.text, event.finish_reason) for event in stream] == [("ab", "length")]
    assert stream.final.message == {"role": "assistant", "content": "ab"}


def test_opening_a_stream_is_retried_and_its_refusal_raised(connect):
    server = Script(
        refusal(503, "out_of_pages", **{"retry-after": "0.01"}), lambda: httpx.Response(200, stream=whole_stream())
    )
    stream = connect(transport=httpx.MockTransport(server)).chat_stream(USER)
    assert "".join(event.text for event in stream) == "hello"
    assert len(server.requests) == 2
    server = Script(refusal(400, "context_length_exceeded"))
    with pytest.raises(akv_sdk.ContextLengthExceeded):
        list(connect(transport=httpx.MockTransport(server)).chat_stream(USER))


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (httpx.ReadError("reset"), akv_sdk.ConnectionFailed),
        (httpx.ReadTimeout("slow"), akv_sdk.Timeout),
        (b"", akv_sdk.ConnectionFailed),  # an orderly end, but not of the stream
        (sse({"error": {"message": "m", "code": "internal_error"}})[0], akv_sdk.InternalError),
        (b"data: {\n\n", akv_sdk.BadReply),
    ],
)
def test_a_stream_that_breaks_off_says_so_and_is_not_repeated(connect, last, error):
    body = Chunks(*sse(piece("hel")), last)
    server = Script(lambda: httpx.Response(200, stream=body))
    stream = connect(transport=httpx.MockTransport(server)).chat_stream(USER)
    assert next(stream).text == "hel"
    with pytest.raises(error):
        next(stream)
    with pytest.raises(RuntimeError):
        _ = stream.final
    assert body.is_closed
    assert len(server.requests) == 1


def test_leaving_a_stream_disconnects(connect):
    body = whole_stream()
    with connect(transport=httpx.MockTransport(Script(lambda: httpx.Response(200, stream=body)))).chat_stream(
        USER
    ) as stream:
        assert next(stream).text == "hel"
        assert not body.is_closed
    assert body.is_closed


def test_breaking_out_of_a_loop_disconnects():
    body = whole_stream()
    with Client(
        "http://akv.test", transport=httpx.MockTransport(Script(lambda: httpx.Response(200, stream=body)))
    ) as client:
        for _ in client.chat_stream(USER):
            break
        assert body.is_closed


# --- a real socket ----------------------------------------------------------------------------------------------------


def test_over_a_socket_a_dropped_connection_is_tried_again():
    """The first connection is closed without a byte; the second gets its answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    answer = json.dumps(COMPLETION).encode()
    seen: list[bytes] = []

    def serve() -> None:
        for is_served in (False, True):
            connection, _ = listener.accept()
            with connection:
                seen.append(connection.recv(65536))
                if is_served:
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
                    connection.sendall(head.encode() + answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener, Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=20) as client:
        assert client.chat(USER).text == "hello"
    thread.join(10)
    assert len(seen) == 2
    assert seen[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


def test_nobody_listening_is_a_failed_connection(connect):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", max_retries=0) as client, pytest.raises(akv_sdk.ConnectionFailed) as caught:
        client.models()
    assert not caught.value.sent
