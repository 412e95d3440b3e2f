"""HTTP: every route, who may call it, how a body is read and how an error looks. The only module that imports FastAPI.

Owns status codes, headers, server-sent events, API keys, and noticing that a client has left.
Decides nothing about streams: that is `sessions.py`, and `completions.py` for running them.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from akv_sdk import types
from akv_server import messages
from akv_server.bodies import MAX_BODY_BYTES, Bodies
from akv_server.completions import Completion, Completions
from akv_server.errors import AkvError
from akv_server.messages_reply import Reply
from akv_server.requests import ChatBody, CompletionBody, parse, read_json

log = logging.getLogger("akv")

OPEN_ROUTES = ("/health", "/version")

T = TypeVar("T")


def create_app(
    service: Completions, *, api_keys: Sequence[tuple[str, str]] = (), max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application around a running engine. `api_keys` are pairs of tenant and key; without any there is one tenant,
    `""`. What `/metrics` says is the server's own, of all tenants together, and whoever has any key may read it."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(Front, api_keys=api_keys)
    app.add_exception_handler(AkvError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    sessions, tokenizer = service.sessions, service.tokenizer
    started_s = int(time.time())
    model = {
        "id": service.model,
        "object": "model",
        "created": started_s,
        "owned_by": "akv",
        "max_model_len": service.window,
    }

    bodies = Bodies(max_body_bytes)

    def reading(request: Request, make: Callable[[dict[str, Any]], T]) -> AbstractAsyncContextManager[T]:
        return bodies.read(request.stream(), _content_length(request), lambda data: make(read_json(data)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return CompletionResponse(service, request, reading(request, partial(parse, ChatBody)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return CompletionResponse(service, request, reading(request, partial(parse, CompletionBody)))

    @app.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        return MessageResponse(service, request, reading(request, messages.asked))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        async with reading(request, partial(messages.asked, kind=messages.CountBody)) as fields:
            try:
                return JSONResponse(messages.counted(fields, *await asyncio.to_thread(service.count, fields.body)))
            except AkvError as error:
                raise fields.renamed(error) from error

    @app.post("/v1/cache/drop")
    async def drop(request: Request) -> Response:
        async with reading(request, partial(parse, types.DropRequest)) as fields:
            return _json(await sessions.drop(_tenant(request), fields, key=_idempotency_key(request)))

    @app.post("/v1/cache/restore")
    async def restore(request: Request) -> Response:
        async with reading(request, partial(parse, types.RestoreRequest)) as fields:
            return _json(await sessions.restore(_tenant(request), fields, key=_idempotency_key(request)))

    @app.post("/v1/cache/repos")
    async def repos(request: Request) -> Response:
        async with reading(request, partial(parse, types.ReposRequest)) as fields:
            return _json(await sessions.repos(_tenant(request), fields, key=_idempotency_key(request)))

    @app.get("/v1/cache/sessions")
    async def list_sessions(request: Request) -> Response:
        return _json(await sessions.list(_tenant(request)))

    @app.get("/v1/cache/sessions/{name:path}")
    async def session_info(request: Request, name: str) -> Response:
        return _json(await sessions.info(_tenant(request), name))

    @app.delete("/v1/cache/sessions/{name:path}")
    async def delete_session(request: Request, name: str) -> Response:
        await sessions.delete(_tenant(request), name)
        return JSONResponse({"session": name, "deleted": True})

    @app.post("/v1/cache/sessions/{name:path}/fork")
    async def fork_session(request: Request, name: str) -> Response:
        def make(data: bytes) -> types.ForkRequest:
            return parse(types.ForkRequest, read_json(data) if data.strip() else {})

        async with bodies.read(request.stream(), _content_length(request), make) as fields:
            return _json(await sessions.fork(_tenant(request), name, fields.session))

    @app.get("/v1/cache/stats")
    async def stats(request: Request) -> Response:
        return _json(service.stats(_tenant(request)))

    @app.post("/v1/render")
    async def render(request: Request) -> Response:
        async with reading(request, partial(parse, types.RenderRequest)) as fields:
            return _json(await asyncio.to_thread(service.render, fields))

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        async with reading(request, partial(parse, types.TokenizeRequest)) as fields:
            return _json(await asyncio.to_thread(service.tokenize, fields))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        async with reading(request, partial(parse, types.DetokenizeRequest)) as fields:
            return _json(await asyncio.to_thread(service.detokenize, fields))

    @app.get("/v1/tokenizer")
    async def published_tokenizer() -> Response:
        return _json(tokenizer.published())

    @app.head("/v1/models")
    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model)

    @app.head("/health")
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def show_version() -> Response:
        return JSONResponse({"version": version("akv")})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    return app


class Front:
    """What stands before every route: a request id, the API key, and an answer even where we fail."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[tuple[str, str]]) -> None:
        self._app = app
        self._api_keys = [(tenant, key.encode()) for tenant, key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        scope["akv.tenant"] = self._tenant(headers)
        try:
            if scope["akv.tenant"] is None and scope["path"] not in OPEN_ROUTES:
                message = "no valid API key: send Authorization: Bearer KEY, or X-Api-Key: KEY"
                response = _error_reply(AkvError("unauthorized", message), scope["path"])
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.debug("request %s: its client left before it had sent all", request_id.decode())
        except Exception:
            log.exception("request %s failed: %s %s", request_id.decode(), scope["method"], scope["path"])
            if not has_started:
                message = "the server failed to answer this request; its log says why"
                await _error_reply(AkvError("internal_error", message), scope["path"])(scope, receive, send_with_id)

    def _tenant(self, headers: dict[bytes, bytes]) -> str | None:
        """Whose key one of the headers has; the bearer's if both have one."""
        if not self._api_keys:
            return ""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        found = self._owner(bearer.strip()) if scheme.lower() == b"bearer" else None
        return self._owner(headers.get(b"x-api-key", b"")) if found is None else found

    def _owner(self, given: bytes) -> str | None:
        """Compares with every key, in time that does not depend on how much of one is right."""
        found = None
        for tenant, key in self._api_keys:
            if hmac.compare_digest(given, key):
                found = tenant
        return found


class CompletionResponse(Response):
    """Runs a completion for as long as its client listens. Streams start with the first token, so that whatever fails
    before it has an error status of its own."""

    def __init__(self, service: Completions, request: Request, reading: AbstractAsyncContextManager[Any]) -> None:
        super().__init__()
        self._service = service
        self._reading = reading
        self._tenant = _tenant(request)
        self._header_session = request.headers.get("x-akv-session")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as preparing:
            await self._run(await preparing.enter_async_context(self._reading), preparing, scope, receive, send)

    async def _run(self, fields: Any, preparing: AsyncExitStack, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._service.run(self._tenant, self._header_session, fields, preparing)
        send_all = self._stream(run, send) if fields.stream else self._send_whole(run, scope, receive, send)
        await _while_connected(receive, send_all)

    async def _send_whole(
        self, run: AbstractAsyncContextManager[Completion], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with run as completion:
            body = await self._whole(completion)
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, run: AbstractAsyncContextManager[Completion], send: Send) -> None:
        has_started = False

        async def put(event: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": more})
            await asyncio.sleep(0)  # to hear of a client that has left, and end, before the next one

        try:
            async with run as completion:
                async for event in self._events(completion):
                    if not has_started:
                        has_started = True
                        headers = [
                            (b"content-type", b"text/event-stream; charset=utf-8"),
                            (b"cache-control", b"no-cache"),
                        ]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await put(event)
        except AkvError as error:
            if not has_started:
                raise
            await put(self._failure(error))
        except Exception:
            if not has_started:
                raise
            log.exception("a stream failed")
            await put(self._failure(AkvError("internal_error", "the server failed in the middle of this answer")))
        await put(self._last_event, more=False)

    # How OpenAI answers.

    _last_event = "data: [DONE]\n\n"

    async def _whole(self, completion: Completion) -> dict[str, Any]:
        return await completion.whole()

    async def _events(self, completion: Completion) -> AsyncIterator[str]:
        async for chunk in completion.chunks():
            yield f"data: {_dumps(chunk)}\n\n"

    def _failure(self, error: AkvError) -> str:
        return f"data: {_dumps(_envelope(error))}\n\n"


class MessageResponse(CompletionResponse):
    """The same as Anthropic answers. A whole message is what its events add up to."""

    _last_event = ""
    _asked: messages.Asked

    async def _run(self, asked: Any, preparing: AsyncExitStack, scope: Scope, receive: Receive, send: Send) -> None:
        self._asked = asked
        try:
            await super()._run(asked.body, preparing, scope, receive, send)
        except AkvError as error:
            raise asked.renamed(error) from error

    def _reply(self, completion: Completion) -> Reply:
        num_prompt_tokens = completion.num_visible_prompt_tokens
        return Reply(self._asked, num_prompt_tokens=num_prompt_tokens, is_thinking=completion.is_thinking)

    async def _whole(self, completion: Completion) -> dict[str, Any]:
        reply = self._reply(completion)
        async for chunk in completion.chunks():
            for _ in reply.events(chunk):
                pass
        return reply.message

    async def _events(self, completion: Completion) -> AsyncIterator[str]:
        reply = self._reply(completion)
        async for chunk in completion.chunks():
            for event in reply.events(chunk):
                yield _event(event)

    def _failure(self, error: AkvError) -> str:
        return _event(messages.error_body(self._asked.renamed(error)))


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it the moment the client hangs up. The body must have been read before."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait((task,))
    try:
        if not task.cancelled():
            task.result()
    finally:
        del task  # else its error, whose traceback holds this frame, keeps the whole body until garbage is collected


def _content_length(request: Request) -> int | None:
    given = request.headers.get("content-length", "")
    return int(given) if given.isascii() and given.isdigit() else None


def _tenant(request: Request) -> str:
    return str(request.scope["akv.tenant"])


def _idempotency_key(request: Request) -> str | None:
    """What names an op across attempts to send it. An empty header is none."""
    key = request.headers.get("idempotency-key")
    if key and len(key) > 200:
        raise AkvError("invalid_request", "Idempotency-Key: at most 200 characters", param="Idempotency-Key")
    return key or None


def _request_id(given: bytes) -> bytes:
    """The client's own id if it is a plain short one."""
    is_plain = 0 < len(given) <= 100 and all(c in b"-_.:" or chr(c).isalnum() for c in given) and given.isascii()
    return given if is_plain else uuid.uuid4().hex.encode()


def _json(body: Any) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _dumps(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _event(body: dict[str, Any]) -> str:
    return f"event: {body['type']}\ndata: {_dumps(body)}\n\n"


def _envelope(error: AkvError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 413: "invalid_request_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    body = types.ErrorBody(message=error.message, type=kind, param=error.param, code=error.code)
    return types.ErrorReply(error=body).model_dump()


def _envelope_at(path: str, error: AkvError) -> dict[str, Any]:
    return messages.error_body(error) if path.startswith("/v1/messages") else _envelope(error)


def _error_reply(error: AkvError, path: str) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(math.ceil(error.retry_after_s))}
    if error.code == "out_of_pages":  # the request alone is too large; OpenAI's and Anthropic's SDKs go by this
        headers["X-Should-Retry"] = "false"
    return JSONResponse(_envelope_at(path, error), status_code=error.status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AkvError)
    return _error_reply(error, request.url.path)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return _error_reply(AkvError("not_found", f"there is no route {request.method} {path}"), path)
    reply = AkvError("invalid_request", f"{request.method} {path}: {error.detail}")
    return JSONResponse(_envelope_at(path, reply), status_code=error.status_code, headers=error.headers)
