"""Client and AsyncClient: thin twins that move the bytes of the calls built in `_wire.py` over httpx.

Own the connection, the waiting between retries and the streams. Know nothing of what a call means, nor of an agent's
state, which `session.py` holds. `transport` is the one seam: any httpx transport stands in for the network (a fake
server in tests, an ASGI app, a proxy).

All methods of both raise what `errors.py` draws. A call is sent again, with backoff, when it cannot have arrived, when
it got no reply and may be repeated, and when the server put it off (429, 503, or `session_busy` with a Retry-After);
never once a reply has begun. Each op goes out under an Idempotency-Key of its own, so that the server applies it once
however often it arrives. `fork` and `delete_session` have none and are not repeated unless the connection was never
made.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from random import Random
from types import TracebackType
from typing import Any, TypeVar, Unpack
from urllib.parse import urlsplit

import httpx

from akv_sdk import _wire, types
from akv_sdk._wire import Call, Event, Message, Params
from akv_sdk.errors import AkvError, ApiError, BadReply, ConnectionFailed, Timeout, TransportError
from akv_sdk.session import AsyncSession, Session

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8000"
MAX_CONNECT_S = 10.0


class Client:
    """A connection to one AKV server. Safe to share between threads; a `Session` of it is not.

    Args:
        base_url: of the server, with or without `/v1` at its end.
        api_key: sent as a bearer token.
        timeout_s: the longest silence of the server that is waited out (a stream may last longer than this).
        max_retries: how often a call is sent again.
        transport: what carries requests instead of the network.
        rng: where the jitter of the backoff is drawn from.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
        transport: httpx.BaseTransport | None = None,
        rng: Random | None = None,
    ) -> None:
        self._http = httpx.Client(**_http_options(base_url, api_key, timeout_s), transport=transport)
        self._max_retries = max_retries
        self._rng = rng or Random()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. Sessions stay on the server."""
        self._http.close()

    def session(
        self, name: str | None = None, *, model: str | None = None, messages: Iterable[Message] = ()
    ) -> Session:
        """An agent's session; nothing is sent yet. Without a name it gets a fresh one, and `close` deletes it."""
        return Session(self, name, model=model, messages=messages)

    def chat(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> types.Completion:
        """Continues a conversation. `ops`, if given, is the stream's whole history and replaces the server's."""
        return self._send(_wire.chat(messages, model=model, session=session, ops=ops, on_miss=on_miss, params=params))

    def chat_stream(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> Stream:
        """As `chat`, event by event; the request is sent when the first event is asked for."""
        return Stream(
            self,
            _wire.chat(messages, model=model, session=session, ops=ops, on_miss=on_miss, params=params, stream=True),
        )

    def completions(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> types.Completion:
        """Continues a text or a list of token ids. With `max_tokens=0, echo=True, logprobs=n` the prompt is fed and
        scored and nothing generated."""
        return self._send(
            _wire.completions(prompt, model=model, session=session, ops=ops, on_miss=on_miss, params=params)
        )

    def completions_stream(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> Stream:
        """As `completions`, event by event; the request is sent when the first event is asked for."""
        return Stream(
            self,
            _wire.completions(
                prompt, model=model, session=session, ops=ops, on_miss=on_miss, params=params, stream=True
            ),
        )

    def render(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> types.RenderReply:
        """Tokens and spans that `chat` would have, without running it."""
        return self._send(_wire.render(messages, model=model, tools=tools, add_generation_prompt=add_generation_prompt))

    def tokenize(
        self, prompt: str, *, model: str | None = None, add_special_tokens: bool = False, parse_special: bool = False
    ) -> types.TokenizeReply:
        return self._send(
            _wire.tokenize(prompt, model=model, add_special_tokens=add_special_tokens, parse_special=parse_special)
        )

    def detokenize(self, tokens: Iterable[int], *, model: str | None = None) -> types.DetokenizeReply:
        return self._send(_wire.detokenize(tokens, model=model))

    def tokenizer(self) -> types.TokenizerReply:
        """What tiktoken needs to build the model's encoding; see `akv_sdk.tokens`."""
        return self._send(_wire.tokenizer())

    def models(self) -> list[types.ModelCard]:
        return self._send(_wire.models())

    def health(self) -> bool:
        """Whether the server answers that it is up. Never raises and is never sent again: made for waiting loops."""
        try:
            self._attempt(_wire.health(), {}).close()
        except AkvError:
            return False
        return True

    def stats(self) -> types.CacheStats:
        return self._send(_wire.stats())

    def drop(
        self,
        session: str,
        *,
        spans: Iterable[Sequence[int]] | None = None,
        blocks: Iterable[str] | None = None,
        pages: Iterable[int] | None = None,
        repos: types.Repos = True,
        mode: types.Mode = "mask",
    ) -> types.LayoutReply:
        """Makes tokens invisible to everything computed from now on; with `repos` closes the gap in positions.

        Exactly one of `spans` (`[start, end)` indexes), `blocks` (ids) and `pages` says which. `mode="mask"` computes
        nothing, and later tokens keep what they absorbed: it is no redaction. `mode="forget"` makes it as if the tokens
        had never been there, at the price of computing what follows anew.

        Where a `Session` has this name, drop through it: it sends the history that it knows, and that replaces this.
        """
        return self._send(_wire.drop(session, spans=spans, blocks=blocks, pages=pages, repos=repos, mode=mode))

    def restore(
        self,
        session: str,
        *,
        spans: Iterable[Sequence[int]] | None = None,
        blocks: Iterable[str] | None = None,
        repos: types.Repos = True,
    ) -> types.LayoutReply:
        """Makes dropped tokens visible again; with `repos` opens the gap that their drop closed."""
        return self._send(_wire.restore(session, spans=spans, blocks=blocks, repos=repos))

    def repos(self, session: str, start: int, end: int | None, delta: int) -> types.LayoutReply:
        """Moves the positions of tokens `[start, end)` by `delta`; `end=None` also of everything computed later."""
        return self._send(_wire.repos(session, start=start, end=end, delta=delta))

    def fork(self, session: str, name: str | None = None) -> types.SessionInfo:
        """Copies a session without copying its KV. The reply's `session` is the copy's name."""
        return self._send(_wire.fork(session, name=name))

    def sessions(self) -> list[types.SessionInfo]:
        return self._send(_wire.sessions())

    def session_info(self, session: str) -> types.SessionInfo:
        return self._send(_wire.session_info(session))

    def delete_session(self, session: str) -> None:
        """Frees what the server keeps of a session. Raises SessionNotFound where there is none."""
        self._send(_wire.delete_session(session))

    def _send(self, call: Call[T]) -> T:
        response = self._open(call)
        try:
            body = response.read()
        except httpx.HTTPError as error:
            raise _transport_error(error, call) from error
        finally:
            response.close()
        return _wire.read(call, body, status=response.status_code, request_id=response.headers.get("x-request-id"))

    def _stream(self, call: Call[types.Completion], on_end: Callable[[types.Completion], None]) -> Stream:
        return Stream(self, call, on_end)

    def _open(self, call: Call[T]) -> httpx.Response:
        """A good reply whose body is still to be read, after as many attempts as it takes and is allowed."""
        num_failures, headers = 0, _headers(call)
        while True:
            try:
                return self._attempt(call, headers)
            except AkvError as error:
                num_failures += 1
                delay_s = _wire.retry_delay_s(
                    error,
                    num_failures=num_failures,
                    max_retries=self._max_retries,
                    is_repeatable=call.is_repeatable,
                    rng=self._rng,
                )
                if delay_s is None:
                    raise
            time.sleep(delay_s)

    def _attempt(self, call: Call[T], headers: dict[str, str]) -> httpx.Response:
        try:
            response = self._http.send(_request(self._http, call, headers), stream=True)
            if response.is_success:
                return response
            try:
                body = response.read()
            finally:
                response.close()
        except httpx.HTTPError as error:
            raise _transport_error(error, call) from error
        raise _refusal(response, body)


class AsyncClient:
    """`Client` for asyncio: the same names, arguments and errors; what does I/O is awaited."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: Random | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(**_http_options(base_url, api_key, timeout_s), transport=transport)
        self._max_retries = max_retries
        self._rng = rng or Random()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    def session(
        self, name: str | None = None, *, model: str | None = None, messages: Iterable[Message] = ()
    ) -> AsyncSession:
        return AsyncSession(self, name, model=model, messages=messages)

    async def chat(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> types.Completion:
        return await self._send(
            _wire.chat(messages, model=model, session=session, ops=ops, on_miss=on_miss, params=params)
        )

    def chat_stream(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> AsyncStream:
        return AsyncStream(
            self,
            _wire.chat(messages, model=model, session=session, ops=ops, on_miss=on_miss, params=params, stream=True),
        )

    async def completions(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> types.Completion:
        return await self._send(
            _wire.completions(prompt, model=model, session=session, ops=ops, on_miss=on_miss, params=params)
        )

    def completions_stream(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        **params: Unpack[Params],
    ) -> AsyncStream:
        return AsyncStream(
            self,
            _wire.completions(
                prompt, model=model, session=session, ops=ops, on_miss=on_miss, params=params, stream=True
            ),
        )

    async def render(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> types.RenderReply:
        return await self._send(
            _wire.render(messages, model=model, tools=tools, add_generation_prompt=add_generation_prompt)
        )

    async def tokenize(
        self, prompt: str, *, model: str | None = None, add_special_tokens: bool = False, parse_special: bool = False
    ) -> types.TokenizeReply:
        return await self._send(
            _wire.tokenize(prompt, model=model, add_special_tokens=add_special_tokens, parse_special=parse_special)
        )

    async def detokenize(self, tokens: Iterable[int], *, model: str | None = None) -> types.DetokenizeReply:
        return await self._send(_wire.detokenize(tokens, model=model))

    async def tokenizer(self) -> types.TokenizerReply:
        return await self._send(_wire.tokenizer())

    async def models(self) -> list[types.ModelCard]:
        return await self._send(_wire.models())

    async def health(self) -> bool:
        try:
            await (await self._attempt(_wire.health(), {})).aclose()
        except AkvError:
            return False
        return True

    async def stats(self) -> types.CacheStats:
        return await self._send(_wire.stats())

    async def drop(
        self,
        session: str,
        *,
        spans: Iterable[Sequence[int]] | None = None,
        blocks: Iterable[str] | None = None,
        pages: Iterable[int] | None = None,
        repos: types.Repos = True,
        mode: types.Mode = "mask",
    ) -> types.LayoutReply:
        return await self._send(_wire.drop(session, spans=spans, blocks=blocks, pages=pages, repos=repos, mode=mode))

    async def restore(
        self,
        session: str,
        *,
        spans: Iterable[Sequence[int]] | None = None,
        blocks: Iterable[str] | None = None,
        repos: types.Repos = True,
    ) -> types.LayoutReply:
        return await self._send(_wire.restore(session, spans=spans, blocks=blocks, repos=repos))

    async def repos(self, session: str, start: int, end: int | None, delta: int) -> types.LayoutReply:
        return await self._send(_wire.repos(session, start=start, end=end, delta=delta))

    async def fork(self, session: str, name: str | None = None) -> types.SessionInfo:
        return await self._send(_wire.fork(session, name=name))

    async def sessions(self) -> list[types.SessionInfo]:
        return await self._send(_wire.sessions())

    async def session_info(self, session: str) -> types.SessionInfo:
        return await self._send(_wire.session_info(session))

    async def delete_session(self, session: str) -> None:
        await self._send(_wire.delete_session(session))

    async def _send(self, call: Call[T]) -> T:
        response = await self._open(call)
        try:
            body = await response.aread()
        except httpx.HTTPError as error:
            raise _transport_error(error, call) from error
        finally:
            await response.aclose()
        return _wire.read(call, body, status=response.status_code, request_id=response.headers.get("x-request-id"))

    def _stream(self, call: Call[types.Completion], on_end: Callable[[types.Completion], None]) -> AsyncStream:
        return AsyncStream(self, call, on_end)

    async def _open(self, call: Call[T]) -> httpx.Response:
        num_failures, headers = 0, _headers(call)
        while True:
            try:
                return await self._attempt(call, headers)
            except AkvError as error:
                num_failures += 1
                delay_s = _wire.retry_delay_s(
                    error,
                    num_failures=num_failures,
                    max_retries=self._max_retries,
                    is_repeatable=call.is_repeatable,
                    rng=self._rng,
                )
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)

    async def _attempt(self, call: Call[T], headers: dict[str, str]) -> httpx.Response:
        try:
            response = await self._http.send(_request(self._http, call, headers), stream=True)
            if response.is_success:
                return response
            try:
                body = await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise _transport_error(error, call) from error
        raise _refusal(response, body)


class Stream:
    """A streamed completion: an iterator of events, and `final` once it has ended.

    The request is sent with the first `next`. Leaving early (`close`, the end of a `with`, dropping the last reference)
    disconnects, which ends the generation on the server.
    """

    def __init__(
        self, client: Client, call: Call[types.Completion], on_end: Callable[[types.Completion], None] | None = None
    ) -> None:
        self._reader = _wire.StreamReader()
        self._events = _events(client, call, self._reader, on_end)

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._events.close()

    @property
    def final(self) -> types.Completion:
        """The whole completion. Raises RuntimeError before the stream has ended."""
        return _ended(self._reader)


class AsyncStream:
    """`Stream` for `async for`. Where it is left early, `aclose` (or `async with`) disconnects at once; without that it
    happens when the event loop collects the iterator."""

    def __init__(
        self,
        client: AsyncClient,
        call: Call[types.Completion],
        on_end: Callable[[types.Completion], None] | None = None,
    ) -> None:
        self._reader = _wire.StreamReader()
        self._events = _async_events(client, call, self._reader, on_end)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._events.aclose()

    @property
    def final(self) -> types.Completion:
        return _ended(self._reader)


def _events(
    client: Client,
    call: Call[types.Completion],
    reader: _wire.StreamReader,
    on_end: Callable[[types.Completion], None] | None,
) -> Generator[Event, None, None]:
    response = client._open(call)
    try:
        for chunk in response.iter_bytes():
            yield from reader.push(chunk)
    except httpx.HTTPError as error:
        if reader.final is None:
            raise _transport_error(error, call) from error
    finally:
        response.close()
    if reader.final is None:
        raise _cut_short(response)
    if on_end is not None:
        on_end(reader.final)


async def _async_events(
    client: AsyncClient,
    call: Call[types.Completion],
    reader: _wire.StreamReader,
    on_end: Callable[[types.Completion], None] | None,
) -> AsyncGenerator[Event, None]:
    response = await client._open(call)
    try:
        async for chunk in response.aiter_bytes():
            for event in reader.push(chunk):
                yield event
    except httpx.HTTPError as error:
        if reader.final is None:
            raise _transport_error(error, call) from error
    finally:
        await response.aclose()
    if reader.final is None:
        raise _cut_short(response)
    if on_end is not None:
        on_end(reader.final)


def _ended(reader: _wire.StreamReader) -> types.Completion:
    if reader.final is None:
        raise RuntimeError("final: the stream has not ended")
    return reader.final


def _http_options(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"base_url: {base_url!r} is not an http or https address")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s: {timeout_s} is not greater than 0")
    return {
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key is not None else {},
        "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, MAX_CONNECT_S)),
        # A proxy of the environment cannot reach this machine's own loopback for us.
        "trust_env": url.hostname not in ("localhost", "127.0.0.1", "::1"),
    }


def _headers(call: Call[T]) -> dict[str, str]:
    """The headers of every attempt to send a call."""
    headers = {} if call.body is None else {"Content-Type": "application/json"}
    return headers | {"Idempotency-Key": uuid.uuid4().hex} if call.keyed else headers


def _request(http: httpx.Client | httpx.AsyncClient, call: Call[T], headers: dict[str, str]) -> httpx.Request:
    return http.build_request(call.method, call.path, content=call.body, headers=headers)


def _refusal(response: httpx.Response, body: bytes) -> ApiError:
    return _wire.error_of_reply(response.status_code, response.headers, body, now=datetime.now(UTC))


def _cut_short(response: httpx.Response) -> ConnectionFailed:
    request_id = response.headers.get("x-request-id")
    return ConnectionFailed("the stream ended before the server said that it was done", request_id=request_id)


def _transport_error(error: httpx.HTTPError, call: Call[T]) -> TransportError:
    where = f"{call.method} {call.path}"
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectionFailed(f"{where}: cannot connect: {reason}", sent=False)
    if isinstance(error, httpx.TimeoutException):
        return Timeout(f"{where}: no answer in time: {reason}")
    if isinstance(error, httpx.DecodingError | httpx.TooManyRedirects):
        return BadReply(f"{where}: {reason}")
    return ConnectionFailed(f"{where}: {reason}")
