"""Session and AsyncSession: the agent's verbs. Append messages, let the model go on, drop what it no longer needs.

Thin twins that move the calls of a `Conversation`, which holds the messages, the history of ops as the server resolved
them, and the spans of the last reply. Know no HTTP; a client moves the bytes. The whole history goes out with every
completion, so a server that lost the session builds it again, and an op on a session that the server lost builds it
first. So that its tokens lie where they lay, an answer goes out with the ids that it was generated as (`akv.token_ids`
of its message). A session is used by one thread or task at a time.

One answer at a time: a completion while another is written, or while `manage` rewrites, is refused (SessionBusy) before
anything is sent. Ops, policies and forks may come while a stream of the session is read: they first read it to its end,
hold from the end of that answer, and leave its events to whoever iterates.

Ops on a session's name go through its `Session`. The history that a completion sends replaces the server's: an op that
came past it, from `Client.drop` or another process, is undone by the next one, which says so in `akv.warnings`. `info`
takes such ops over before that.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import isawaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast
from weakref import WeakSet

from akv_sdk import _wire, types
from akv_sdk._wire import Call, Message, SessionParams
from akv_sdk.conversation import Conversation, checked_summary
from akv_sdk.errors import SessionNotFound, TransportError
from akv_sdk.policies import CacheOrSummarise, Decision, Policy, decide
from akv_sdk.policies.context import spans_of

if TYPE_CHECKING:
    from akv_sdk.client import AsyncClient, Client
    from akv_sdk.streams import AsyncStream, Stream

T = TypeVar("T")


def _elapsed_ms(since_s: float) -> float:
    return 1000 * (time.perf_counter() - since_s)


class Session(Conversation):
    """A conversation on a `Client`. Made by `Client.session`; see `Conversation` for its attributes.

    As a context manager it closes itself.
    """

    def __init__(self, client: Client, name: str | None, *, model: str | None, messages: Iterable[Message]) -> None:
        super().__init__(name, model=model, messages=messages)
        self._client = client
        self._streams: WeakSet[Stream] = WeakSet()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def complete(
        self,
        *,
        on_miss: types.OnMiss = "replay",
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[SessionParams],
    ) -> types.Completion:
        """Lets the model go on, and appends what it wrote. With `max_tokens=0` the stream is only prefilled and nothing
        appended. When it raises, the session is as it was; StreamDiverged, where an op or a mark would hit tokens
        that moved, comes after the server went on."""
        with self._turn(params, on_miss, auto_drop) as turn:
            reply = self._client._send(turn.call)
            turn.take(reply)
            return reply

    def stream(
        self,
        *,
        on_miss: types.OnMiss = "replay",
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[SessionParams],
    ) -> Stream:
        """As `complete`, event by event. The message is appended when the iterator is exhausted; a stream that is left
        early appends nothing. The request is made and sent with the first event; append nothing yourself before the
        end."""
        stream = self._client._stream(self._turn(params, on_miss, auto_drop, stream=True))
        self._streams.add(stream)
        return stream

    def drop(
        self,
        *,
        blocks: Iterable[str] | None = None,
        spans: Iterable[Sequence[int]] | None = None,
        pages: Iterable[int] | None = None,
        repos: types.Repos = True,
        mode: types.Mode = "mask",
    ) -> types.LayoutReply:
        """Makes tokens invisible from here on, see `Client.drop`. Safe to call again when the reply was lost."""
        call = _wire.drop(self.name, spans=spans, blocks=blocks, pages=pages, repos=repos, mode=mode)
        return self._edit(call, is_by_index=blocks is None)

    def forget(
        self,
        *,
        blocks: Iterable[str] | None = None,
        spans: Iterable[Sequence[int]] | None = None,
        pages: Iterable[int] | None = None,
        repos: types.Repos = True,
    ) -> types.LayoutReply:
        """Drops tokens as if they had never been there: what follows them is computed anew without them."""
        return self.drop(blocks=blocks, spans=spans, pages=pages, repos=repos, mode="forget")

    def restore(
        self,
        *,
        blocks: Iterable[str] | None = None,
        spans: Iterable[Sequence[int]] | None = None,
        repos: types.Repos = True,
    ) -> types.LayoutReply:
        """Makes dropped tokens visible again, see `Client.restore`."""
        return self._edit(_wire.restore(self.name, spans=spans, blocks=blocks, repos=repos), is_by_index=blocks is None)

    def repos(self, start: int, end: int | None, delta: int) -> types.LayoutReply:
        """Moves positions, see `Client.repos`. The client sends it again by itself where that is safe; after an error
        that leaves open whether it arrived, look at `info` before you call it anew."""
        return self._edit(_wire.repos(self.name, start=start, end=end, delta=delta), is_by_index=True)

    def apply(self, policy: Policy, *, note: bool = False) -> types.LayoutReply | None:
        """Drops what the policy names; what no policy may drop stays. None where nothing goes. With `note`, the next
        observation or user message opens with a line that says what went and how to get it back."""
        self._read_ahead()
        drops = decide(policy, self.context)
        if not drops:
            return None
        layout = self.drop(spans=spans_of(drops))
        if note:
            self._untold += drops
        return layout

    def manage(self, policy: CacheOrSummarise) -> Decision:
        """Drops from the cache, or rewrites older messages to a summary, as the policy decides; says and logs what was
        done, why, and what it took. When it raises, the session is as it was."""
        self._read_ahead()
        since_s = time.perf_counter()
        decision = policy.decide(self.context)
        if decision.kind == "drop":
            layout = self.drop(spans=spans_of(decision.drops))
            return self._log(replace(decision, freed_tokens=layout.changed, elapsed_ms=_elapsed_ms(since_s)))
        if decision.kind == "summarise":
            with self._alone():
                summary = checked_summary(policy.summarise(self._run(self._asking(decision.replaced))))
                decision = self._run(self._rewriting(decision, summary))
            decision = replace(decision, elapsed_ms=_elapsed_ms(since_s))
        return self._log(decision)

    def fork(self, name: str | None = None) -> Session:
        """A session that shares this one's past, and its KV, and goes its own way from here."""
        reply = self._on_server(_wire.fork(self.name, name=name), is_by_index=False)
        copy = Session(self._client, reply.session, model=self.model, messages=self.messages)
        copy._is_anonymous = name is None
        self._hand_on(copy, reply)
        return copy

    def info(self) -> types.SessionInfo:
        """What the server holds of this session; also brings `spans` and `ops` up to date."""
        reply = self._client.session_info(self.name)
        self._take_info(reply)
        return reply

    def close(self) -> None:
        """Deletes the session on the server if its name was made up; one that was named stays, to be resumed. A server
        that cannot be reached is left to expire it. Streams that are still read are left."""
        for stream in list(self._streams):
            stream.close()
        if self._is_anonymous:
            with suppress(TransportError):
                self.delete()

    def delete(self) -> None:
        """Frees what the server keeps of this session. It may be used further: the server then builds it again."""
        self._read_ahead()
        with suppress(SessionNotFound):
            self._client.delete_session(self.name)

    def _read_ahead(self) -> None:
        """An op waits on the server for the end of an answer, and the server for whoever reads it: that is us."""
        for stream in list(self._streams):
            stream.read_ahead()

    def _run(self, calls: Generator[Call[Any], Any, T]) -> T:
        """Sends calls that depend on each other's replies, and gives what they come to."""
        reply: Any = None
        while True:
            try:
                call = calls.send(reply)
            except StopIteration as done:
                return cast("T", done.value)
            reply = self._client._send(call)

    def _edit(self, call: Call[types.LayoutReply], *, is_by_index: bool) -> types.LayoutReply:
        reply = self._on_server(call, is_by_index=is_by_index)
        self._take_layout(reply)
        return reply

    def _on_server(self, call: Call[T], *, is_by_index: bool) -> T:
        """Sends a call that needs the session there; where it is not, builds it from what we hold and tries again."""
        self._read_ahead()
        try:
            return self._client._send(call)
        except SessionNotFound:
            if not self.messages:
                raise
        self._take_rebuilt(self._client._send(self._rebuild()), is_by_index=is_by_index)
        return self._client._send(call)


class AsyncSession(Conversation):
    """`Session` on an `AsyncClient`: the same names, arguments and errors; what does I/O is awaited."""

    def __init__(
        self, client: AsyncClient, name: str | None, *, model: str | None, messages: Iterable[Message]
    ) -> None:
        super().__init__(name, model=model, messages=messages)
        self._client = client
        self._streams: WeakSet[AsyncStream] = WeakSet()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def complete(
        self,
        *,
        on_miss: types.OnMiss = "replay",
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[SessionParams],
    ) -> types.Completion:
        with self._turn(params, on_miss, auto_drop) as turn:
            reply = await self._client._send(turn.call)
            turn.take(reply)
            return reply

    def stream(
        self,
        *,
        on_miss: types.OnMiss = "replay",
        auto_drop: types.AutoDrop | bool | None = None,
        **params: Unpack[SessionParams],
    ) -> AsyncStream:
        stream = self._client._stream(self._turn(params, on_miss, auto_drop, stream=True))
        self._streams.add(stream)
        return stream

    async def drop(
        self,
        *,
        blocks: Iterable[str] | None = None,
        spans: Iterable[Sequence[int]] | None = None,
        pages: Iterable[int] | None = None,
        repos: types.Repos = True,
        mode: types.Mode = "mask",
    ) -> types.LayoutReply:
        call = _wire.drop(self.name, spans=spans, blocks=blocks, pages=pages, repos=repos, mode=mode)
        return await self._edit(call, is_by_index=blocks is None)

    async def forget(
        self,
        *,
        blocks: Iterable[str] | None = None,
        spans: Iterable[Sequence[int]] | None = None,
        pages: Iterable[int] | None = None,
        repos: types.Repos = True,
    ) -> types.LayoutReply:
        return await self.drop(blocks=blocks, spans=spans, pages=pages, repos=repos, mode="forget")

    async def restore(
        self,
        *,
        blocks: Iterable[str] | None = None,
        spans: Iterable[Sequence[int]] | None = None,
        repos: types.Repos = True,
    ) -> types.LayoutReply:
        return await self._edit(
            _wire.restore(self.name, spans=spans, blocks=blocks, repos=repos), is_by_index=blocks is None
        )

    async def repos(self, start: int, end: int | None, delta: int) -> types.LayoutReply:
        return await self._edit(_wire.repos(self.name, start=start, end=end, delta=delta), is_by_index=True)

    async def apply(self, policy: Policy, *, note: bool = False) -> types.LayoutReply | None:
        await self._read_ahead()
        drops = decide(policy, self.context)
        if not drops:
            return None
        layout = await self.drop(spans=spans_of(drops))
        if note:
            self._untold += drops
        return layout

    async def manage(self, policy: CacheOrSummarise) -> Decision:
        await self._read_ahead()
        since_s = time.perf_counter()
        decision = policy.decide(self.context)
        if decision.kind == "drop":
            layout = await self.drop(spans=spans_of(decision.drops))
            return self._log(replace(decision, freed_tokens=layout.changed, elapsed_ms=_elapsed_ms(since_s)))
        if decision.kind == "summarise":
            with self._alone():
                written = policy.summarise(await self._run(self._asking(decision.replaced)))
                summary = checked_summary(await written if isawaitable(written) else written)
                decision = await self._run(self._rewriting(decision, summary))
            decision = replace(decision, elapsed_ms=_elapsed_ms(since_s))
        return self._log(decision)

    async def fork(self, name: str | None = None) -> AsyncSession:
        reply = await self._on_server(_wire.fork(self.name, name=name), is_by_index=False)
        copy = AsyncSession(self._client, reply.session, model=self.model, messages=self.messages)
        copy._is_anonymous = name is None
        self._hand_on(copy, reply)
        return copy

    async def info(self) -> types.SessionInfo:
        reply = await self._client.session_info(self.name)
        self._take_info(reply)
        return reply

    async def close(self) -> None:
        for stream in list(self._streams):
            await stream.aclose()
        if self._is_anonymous:
            with suppress(TransportError):
                await self.delete()

    async def delete(self) -> None:
        await self._read_ahead()
        with suppress(SessionNotFound):
            await self._client.delete_session(self.name)

    async def _read_ahead(self) -> None:
        for stream in list(self._streams):
            await stream.read_ahead()

    async def _run(self, calls: Generator[Call[Any], Any, T]) -> T:
        reply: Any = None
        while True:
            try:
                call = calls.send(reply)
            except StopIteration as done:
                return cast("T", done.value)
            reply = await self._client._send(call)

    async def _edit(self, call: Call[types.LayoutReply], *, is_by_index: bool) -> types.LayoutReply:
        reply = await self._on_server(call, is_by_index=is_by_index)
        self._take_layout(reply)
        return reply

    async def _on_server(self, call: Call[T], *, is_by_index: bool) -> T:
        await self._read_ahead()
        try:
            return await self._client._send(call)
        except SessionNotFound:
            if not self.messages:
                raise
        self._take_rebuilt(await self._client._send(self._rebuild()), is_by_index=is_by_index)
        return await self._client._send(call)
