"""Client and AsyncClient: thin twins that move the bytes of the calls built in `_wire.py` over httpx.

Own the connection and the waiting between retries; `streams.py` reads streamed replies. Know nothing of what a call
means, nor of an agent's state, which `session.py` holds. `transport` is the one seam: any httpx transport stands in for
the network (a fake server in tests, an ASGI app, a proxy).

All methods of both raise what `errors.py` draws. A call is sent again, with backoff, when it cannot have arrived, when
it got no reply and may be repeated, and when the server put it off (429, 503, or `session_busy` with a Retry-After);
never once a reply has begun. Each op goes out under an Idempotency-Key of its own, so that the server applies it once
however often it arrives. `fork` and `delete_session` have none and are not repeated unless the connection was never
made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from types import TracebackType
from typing import Any, TypeVar, Unpack

import httpx

from akv_sdk import _transport, _wire, types
from akv_sdk._wire import Call, Message, Params, Turn
from akv_sdk.errors import AkvError
from akv_sdk.session import AsyncSession, Session
from akv_sdk.streams import AsyncStream, Stream

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8000"


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
        self._http = httpx.Client(**_transport.http_options(base_url, api_key, timeout_s), transport=transport)
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
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[Params],
    ) -> types.Completion:
        """Continues a conversation. `ops`, if given, is the stream's whole history and replaces the server's.
        `auto_drop` says whether the server may drop by itself what the model stopped looking at, and when (`AutoDrop`);
        left out, the server's start decides."""
        call = _wire.chat(
            messages, model=model, session=session, ops=ops, on_miss=on_miss, auto_drop=auto_drop, params=params
        )
        return self._send(call)

    def chat_stream(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[Params],
    ) -> Stream:
        """As `chat`, event by event; the request is sent when the first event is asked for."""
        call = _wire.chat(
            messages,
            model=model,
            session=session,
            ops=ops,
            on_miss=on_miss,
            auto_drop=auto_drop,
            params=params,
            stream=True,
        )
        return self._stream(nullcontext(Turn(call)))

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
        call = _wire.completions(
            prompt, model=model, session=session, ops=ops, on_miss=on_miss, params=params, stream=True
        )
        return self._stream(nullcontext(Turn(call)))

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
        """Makes dropped tokens visible again; with `repos` what follows moves away by as much as the gap was closed."""
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
            raise _transport.transport_error(error, call) from error
        finally:
            response.close()
        return _wire.read(call, body, status=response.status_code, request_id=response.headers.get("x-request-id"))

    def _stream(self, turn: AbstractContextManager[Turn]) -> Stream:
        return Stream(self, turn)

    def _open(self, call: Call[T]) -> httpx.Response:
        """A good reply whose body is still to be read, after as many attempts as it takes and is allowed."""
        num_failures, headers = 0, _transport.headers_of(call)
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
            response = self._http.send(_transport.request_of(self._http, call, headers), stream=True)
            if response.is_success:
                return response
            try:
                body = response.read()
            finally:
                response.close()
        except httpx.HTTPError as error:
            raise _transport.transport_error(error, call) from error
        raise _transport.refusal(response, body)


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
        self._http = httpx.AsyncClient(**_transport.http_options(base_url, api_key, timeout_s), transport=transport)
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
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[Params],
    ) -> types.Completion:
        call = _wire.chat(
            messages, model=model, session=session, ops=ops, on_miss=on_miss, auto_drop=auto_drop, params=params
        )
        return await self._send(call)

    def chat_stream(
        self,
        messages: Iterable[Message],
        *,
        model: str | None = None,
        session: str | None = None,
        ops: Iterable[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[Params],
    ) -> AsyncStream:
        call = _wire.chat(
            messages,
            model=model,
            session=session,
            ops=ops,
            on_miss=on_miss,
            auto_drop=auto_drop,
            params=params,
            stream=True,
        )
        return self._stream(nullcontext(Turn(call)))

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
        call = _wire.completions(
            prompt, model=model, session=session, ops=ops, on_miss=on_miss, params=params, stream=True
        )
        return self._stream(nullcontext(Turn(call)))

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
            raise _transport.transport_error(error, call) from error
        finally:
            await response.aclose()
        return _wire.read(call, body, status=response.status_code, request_id=response.headers.get("x-request-id"))

    def _stream(self, turn: AbstractContextManager[Turn]) -> AsyncStream:
        return AsyncStream(self, turn)

    async def _open(self, call: Call[T]) -> httpx.Response:
        num_failures, headers = 0, _transport.headers_of(call)
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
            response = await self._http.send(_transport.request_of(self._http, call, headers), stream=True)
            if response.is_success:
                return response
            try:
                body = await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise _transport.transport_error(error, call) from error
        raise _transport.refusal(response, body)
