"""Session and AsyncSession: the agent's verbs. Append messages, let the model go on, drop what it no longer needs.

Own the conversation as the client knows it: the messages, the history of ops as the server resolved them, and the spans
of the last reply. Know no HTTP; a client moves the calls. The whole history goes out with every completion, so a server
that lost the session builds it again, and an op on a session that the server lost builds it first. A session is used by
one thread or task at a time.
"""

from __future__ import annotations

import re
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from akv_sdk import _wire, types
from akv_sdk._wire import Call, Message, SessionParams
from akv_sdk.errors import SessionNotFound, StreamDiverged, TransportError
from akv_sdk.policy import Policy

if TYPE_CHECKING:
    from akv_sdk.client import AsyncClient, AsyncStream, Client, Stream

T = TypeVar("T")
_BLOCK_ID = re.compile(r'<ephemeral_observation id="([^"]*)">')


class _Conversation:
    """What both twins hold, and everything about it that needs no I/O.

    Attributes:
        name: of the session on the server.
        messages: the conversation so far. Append to it as you like; editing what was sent makes the stream diverge
            there, and the server says so.
        spans: where each message and block lies, from the last reply.
    """

    def __init__(self, name: str | None, *, model: str | None, messages: Iterable[Message]) -> None:
        self.name = name if name is not None else f"session-{uuid.uuid4().hex}"
        self.model = model
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.spans: list[types.MessageSpan] = []
        self._ops: list[types.Op] | None = None  # None: not known yet, the server's journal holds
        self._is_anonymous = name is None
        self._shape: dict[str, Any] = {}  # what the last completion asked for that decides how the stream is rendered

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {len(self.messages)} messages, {len(self.ops)} ops>"

    @property
    def ops(self) -> tuple[types.Op, ...]:
        """The history of the stream, as the server last told it."""
        return tuple(self._ops or ())

    def system(self, content: str) -> None:
        self.messages.append({"role": "system", "content": content})

    def user(self, content: str | Sequence[Mapping[str, Any]]) -> None:
        self.messages.append({"role": "user", "content": content})

    def assistant(self, content: str | None, *, tool_calls: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Appends an assistant message that was not generated here."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if tool_calls:
            message["tool_calls"] = [dict(call) for call in tool_calls]
        self.messages.append(message)

    @overload
    def observe(
        self, output: str, *, tool: str | None = None, tool_call_id: str | None = None, ephemeral: Literal[True] = True
    ) -> str: ...

    @overload
    def observe(
        self, output: str, *, tool: str | None = None, tool_call_id: str | None = None, ephemeral: bool
    ) -> str | None: ...

    def observe(
        self, output: str, *, tool: str | None = None, tool_call_id: str | None = None, ephemeral: bool = True
    ) -> str | None:
        """Appends a tool's output. An ephemeral one is marked as a block, to be dropped later by its id.

        Returns:
            The block's id, unique in this session, or None where it is not ephemeral.
        """
        block_id = None
        if ephemeral:
            block_id = self._fresh_block_id()
            output = f'<ephemeral_observation id="{block_id}">\n{output}\n</ephemeral_observation>'
        message = {"role": "tool", "content": output}
        if tool is not None:
            message["name"] = tool
        if tool_call_id is not None:
            message["tool_call_id"] = tool_call_id
        self.messages.append(message)
        return block_id

    def is_visible(self, block_id: str) -> bool:
        """Whether the model sees any of the block's inside; True for one that was not sent yet. Raises KeyError."""
        found = [block.visible for span in self.spans for block in span.blocks if block.id == block_id]
        if found:
            return any(found)
        if block_id in self._own_block_ids():
            return True
        raise KeyError(block_id)

    def _own_block_ids(self) -> list[str]:
        contents = (message.get("content") for message in self.messages)
        opened = (_BLOCK_ID.match(content) for content in contents if isinstance(content, str))
        return [match[1] for match in opened if match]

    def _fresh_block_id(self) -> str:
        numbers = [int(name[4:]) for name in self._own_block_ids() if re.fullmatch(r"obs-[0-9]+", name)]
        return f"obs-{max(numbers, default=0) + 1}"

    def _completion(
        self, params: Mapping[str, Any], on_miss: types.OnMiss = "replay", stream: bool = False
    ) -> Call[types.Completion]:
        if "n" in params or "echo" in params:
            raise TypeError("n, echo: a session has one continuation, and no echo")
        self._shape = {name: params[name] for name in ("tools", "cache_salt") if name in params}
        return _wire.chat(
            self.messages,
            model=self.model,
            session=self.name,
            ops=self._ops,
            on_miss=on_miss,
            params=params,
            stream=stream,
        )

    def _rebuild(self) -> Call[types.Completion]:
        """A call that makes the server hold this session again: it prefills and generates nothing."""
        return self._completion({**self._shape, "max_tokens": 0})

    def _take(self, reply: types.Completion) -> None:
        if "ops" in reply.akv.model_fields_set:
            self._ops = list(reply.akv.ops)
        self.spans = reply.akv.spans

    def _take_and_append(self, reply: types.Completion) -> None:
        self._take(reply)
        self.messages.append(dict(reply.message))

    def _take_rebuilt(self, reply: types.Completion, *, is_by_index: bool) -> None:
        """Takes the reply of `_rebuild`. Raises StreamDiverged where tokens lie elsewhere than before and ops, old or
        about to come, would hit others than were meant (text that the model wrote need not tokenize as it did)."""
        ours, theirs = (
            [(s.start, s.content_start, s.content_end) for s in spans] for spans in (self.spans, reply.akv.spans)
        )
        if ours != theirs[: len(ours)] and (self._ops or is_by_index):
            raise StreamDiverged(
                f"session {self.name!r} was built again from its messages and its tokens lie elsewhere than before; "
                "its ops would no longer hit what was meant"
            )
        self._take(reply)

    def _take_layout(self, reply: types.LayoutReply) -> None:
        if "ops" in reply.model_fields_set:
            self._ops = list(reply.ops)
        if "segments" not in reply.model_fields_set:
            return
        ends = [segment.end for segment in reply.segments]

        def is_visible(block: types.Block) -> bool:
            after = bisect_right(ends, block.start)
            return after < len(ends) and reply.segments[after].start < block.end

        self.spans = [
            span.model_copy(
                update={"blocks": [block.model_copy(update={"visible": is_visible(block)}) for block in span.blocks]}
            )
            for span in self.spans
        ]

    def _take_info(self, info: types.SessionInfo) -> None:
        self.spans = info.spans
        self._take_layout(info)

    def _hand_on(self, copy: _Conversation, info: types.SessionInfo) -> None:
        """Gives a fork what this session holds that the server does not know."""
        copy._shape = dict(self._shape)
        copy._take_info(info)


class Session(_Conversation):
    """A conversation on a `Client`. Made by `Client.session`; see `_Conversation` for its attributes.

    As a context manager it closes itself.
    """

    def __init__(self, client: Client, name: str | None, *, model: str | None, messages: Iterable[Message]) -> None:
        super().__init__(name, model=model, messages=messages)
        self._client = client

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def complete(self, *, on_miss: types.OnMiss = "replay", **params: Unpack[SessionParams]) -> types.Completion:
        """Lets the model go on, and appends what it wrote. With `max_tokens=0` the stream is only prefilled and nothing
        appended. When it raises, the session is as it was."""
        call = self._completion(params, on_miss)
        reply = self._client._send(call)
        if params.get("max_tokens") == 0:
            self._take(reply)
        else:
            self._take_and_append(reply)
        return reply

    def stream(self, *, on_miss: types.OnMiss = "replay", **params: Unpack[SessionParams]) -> Stream:
        """As `complete`, event by event. The message is appended when the iterator is exhausted; a stream that is left
        early appends nothing. The request is sent with the first event; append nothing yourself before the end."""
        return self._client._stream(self._completion(params, on_miss, stream=True), self._take_and_append)

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
        """Moves positions, see `Client.repos`. Not safe to call again when the reply was lost: look at `info` first."""
        return self._edit(_wire.repos(self.name, start=start, end=end, delta=delta), is_by_index=True)

    def apply(self, policy: Policy) -> types.LayoutReply | None:
        """Drops the blocks that the policy names; None where it names none."""
        blocks = policy.select(self.spans)
        return self.drop(blocks=blocks) if blocks else None

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
        that cannot be reached is left to expire it."""
        if self._is_anonymous:
            with suppress(TransportError):
                self.delete()

    def delete(self) -> None:
        """Frees what the server keeps of this session. It may be used further: the server then builds it again."""
        with suppress(SessionNotFound):
            self._client.delete_session(self.name)

    def _edit(self, call: Call[types.LayoutReply], *, is_by_index: bool) -> types.LayoutReply:
        reply = self._on_server(call, is_by_index=is_by_index)
        self._take_layout(reply)
        return reply

    def _on_server(self, call: Call[T], *, is_by_index: bool) -> T:
        """Sends a call that needs the session there; where it is not, builds it from what we hold and tries again."""
        try:
            return self._client._send(call)
        except SessionNotFound:
            if not self.messages:
                raise
        self._take_rebuilt(self._client._send(self._rebuild()), is_by_index=is_by_index)
        return self._client._send(call)


class AsyncSession(_Conversation):
    """`Session` on an `AsyncClient`: the same names, arguments and errors; what does I/O is awaited."""

    def __init__(
        self, client: AsyncClient, name: str | None, *, model: str | None, messages: Iterable[Message]
    ) -> None:
        super().__init__(name, model=model, messages=messages)
        self._client = client

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def complete(self, *, on_miss: types.OnMiss = "replay", **params: Unpack[SessionParams]) -> types.Completion:
        call = self._completion(params, on_miss)
        reply = await self._client._send(call)
        if params.get("max_tokens") == 0:
            self._take(reply)
        else:
            self._take_and_append(reply)
        return reply

    def stream(self, *, on_miss: types.OnMiss = "replay", **params: Unpack[SessionParams]) -> AsyncStream:
        return self._client._stream(self._completion(params, on_miss, stream=True), self._take_and_append)

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

    async def apply(self, policy: Policy) -> types.LayoutReply | None:
        blocks = policy.select(self.spans)
        return await self.drop(blocks=blocks) if blocks else None

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
        if self._is_anonymous:
            with suppress(TransportError):
                await self.delete()

    async def delete(self) -> None:
        with suppress(SessionNotFound):
            await self._client.delete_session(self.name)

    async def _edit(self, call: Call[types.LayoutReply], *, is_by_index: bool) -> types.LayoutReply:
        reply = await self._on_server(call, is_by_index=is_by_index)
        self._take_layout(reply)
        return reply

    async def _on_server(self, call: Call[T], *, is_by_index: bool) -> T:
        try:
            return await self._client._send(call)
        except SessionNotFound:
            if not self.messages:
                raise
        self._take_rebuilt(await self._client._send(self._rebuild()), is_by_index=is_by_index)
        return await self._client._send(call)
