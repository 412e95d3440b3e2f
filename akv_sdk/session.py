"""Session and AsyncSession: the agent's verbs. Append messages, let the model go on, drop what it no longer needs.

Own the conversation as the client knows it: the messages, the history of ops as the server resolved them, and the spans
of the last reply. Know no HTTP; a client moves the calls. The whole history goes out with every completion, so a server
that lost the session builds it again, and an op on a session that the server lost builds it first. So that its tokens
lie where they lay, an answer goes out with the ids that it was generated as (`akv.token_ids` of its message). A session
is used by one thread or task at a time.

Ops on a session's name go through its `Session`. The history that a completion sends replaces the server's: an op that
came past it, from `Client.drop` or another process, is undone by the next one, which says so in `akv.warnings`. `info`
takes such ops over before that.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import isawaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from akv_sdk import _wire, types
from akv_sdk._wire import Call, Message, SessionParams
from akv_sdk.errors import SessionNotFound, StreamDiverged, TransportError
from akv_sdk.policies import CacheOrSummarise, Context, Decision, Drop, Policy, Summary, decide, summarise
from akv_sdk.policies.context import note_of, spans_of

if TYPE_CHECKING:
    from akv_sdk.client import AsyncClient, AsyncStream, Client, Stream

T = TypeVar("T")
logger = logging.getLogger(__name__)

_BLOCK_ID = re.compile(r'<ephemeral_observation id="([^"]*)">')


class _Conversation:
    """What both twins hold, and everything about it that needs no I/O.

    Attributes:
        name: of the session on the server.
        messages: the conversation so far. Append to it as you like; editing what was sent makes the stream diverge
            there, and the server says so.
        spans: where each message and block lies, from the last reply.
        marks: what was said about messages and spans besides the tags in their text.
    """

    def __init__(self, name: str | None, *, model: str | None, messages: Iterable[Message]) -> None:
        self.name = name if name is not None else f"session-{uuid.uuid4().hex}"
        self.model = model
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.spans: list[types.MessageSpan] = []
        self.marks: list[types.Mark] = []
        self._ops: list[types.Op] | None = None  # None: not known yet, the server's journal holds
        self._is_anonymous = name is None
        self._note: str | None = None  # goes before the next observation or user message
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
        if isinstance(content, str):
            content = self._noted(content)
        elif self._note is not None:
            content = [{"type": "text", "text": self._noted("").rstrip()}, *content]
        self.messages.append({"role": "user", "content": content})

    def assistant(self, content: str | None, *, tool_calls: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Appends an assistant message that was not generated here."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if tool_calls:
            message["tool_calls"] = [dict(call) for call in tool_calls]
        self.messages.append(message)

    @overload
    def observe(
        self,
        output: str,
        *,
        tool: str | None = None,
        tool_call_id: str | None = None,
        ephemeral: Literal[True] = True,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> str: ...

    @overload
    def observe(
        self,
        output: str,
        *,
        tool: str | None = None,
        tool_call_id: str | None = None,
        ephemeral: bool,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> str | None: ...

    def observe(
        self,
        output: str,
        *,
        tool: str | None = None,
        tool_call_id: str | None = None,
        ephemeral: bool = True,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> str | None:
        """Appends a tool's output. An ephemeral one is marked as a block, to be dropped later by its id; one that is
        not is never dropped by a policy. Of a block that a policy drops, the first `keep_head` and the last `keep_tail`
        tokens stay visible; no text changes for that.

        Returns:
            The block's id, unique in this session, or None where it is not ephemeral.
        """
        block_id = None
        if keep_head or keep_tail or not ephemeral:
            self.marks.append(
                types.Mark(message=len(self.messages), ephemeral=ephemeral, keep_head=keep_head, keep_tail=keep_tail)
            )
        output = self._noted(output)
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

    def mark(
        self,
        place: int | tuple[int, int],
        *,
        tool_call_id: str | None = None,
        ephemeral: bool = True,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> None:
        """Marks an observation without tags: a message by its index, or a span of the stream.

        `tool_call_id` makes sure of the message: ids repeat in real data, so an id alone does not name one. Raises
        ValueError where the message has another, IndexError where there is no such message.
        """
        if isinstance(place, tuple):
            mark = types.Mark(span=place, ephemeral=ephemeral, keep_head=keep_head, keep_tail=keep_tail)
        else:
            own = self.messages[place].get("tool_call_id")
            if tool_call_id is not None and own != tool_call_id:
                raise ValueError(f"tool_call_id: message {place} has {own!r}, not {tool_call_id!r}")
            index = range(len(self.messages))[place]
            mark = types.Mark(
                message=index,
                tool_call_id=tool_call_id,
                ephemeral=ephemeral,
                keep_head=keep_head,
                keep_tail=keep_tail,
            )
        self.marks.append(mark)

    def pin(self, place: str | tuple[int, int]) -> None:
        """Keeps a block, by its id, or a span of the stream from every policy. Raises KeyError for an unknown block."""
        if isinstance(place, tuple):
            self.marks.append(types.Mark(span=place, pinned=True))
            return
        homes = {span.message for span in self.spans for block in span.blocks if block.id == place}
        homes |= {i for i, block_id in self._own_blocks() if block_id == place}
        if not homes:
            raise KeyError(place)
        self.marks += [types.Mark(message=i, block=place, pinned=True) for i in sorted(homes)]

    @property
    def context(self) -> Context:
        """The stream as policies see it."""
        return Context(self.messages, self.spans, self.ops, tuple(self.marks))

    def is_visible(self, block_id: str) -> bool:
        """Whether the model sees all of the block's inside; True for one that was not sent yet. Raises KeyError."""
        found = [(block.start, block.end) for span in self.spans for block in span.blocks if block.id == block_id]
        if found:
            gone = self.context.dropped
            return not any(start < b and a < end for start, end in found for a, b in gone)
        if any(own == block_id for _, own in self._own_blocks()):
            return True
        raise KeyError(block_id)

    def _own_blocks(self) -> list[tuple[int, str]]:
        """(message, id) of the blocks that messages consist of."""
        contents = ((i, message.get("content")) for i, message in enumerate(self.messages))
        opened = ((i, _BLOCK_ID.match(content)) for i, content in contents if isinstance(content, str))
        return [(i, match[1]) for i, match in opened if match]

    def _fresh_block_id(self) -> str:
        numbers = [int(name[4:]) for _, name in self._own_blocks() if re.fullmatch(r"obs-[0-9]+", name)]
        return f"obs-{max(numbers, default=0) + 1}"

    def _noted(self, text: str) -> str:
        """The text of the next message, behind the note that waits for it."""
        note, self._note = self._note, None
        return text if note is None else f"{note}\n{text}"

    def _leave_note(self, drops: Sequence[Drop]) -> None:
        self._note = note_of(drops) if self._note is None else f"{self._note}\n{note_of(drops)}"

    def _completion(
        self, params: Mapping[str, Any], on_miss: types.OnMiss = "replay", stream: bool = False
    ) -> Call[types.Completion]:
        if "n" in params or "echo" in params:
            raise TypeError("n, echo: a session has one continuation, and no echo")
        self._shape = {name: params[name] for name in ("tools", "cache_salt", "stop") if name in params}
        params = {"return_token_ids": True, **params}
        return _wire.chat(
            self.messages,
            model=self.model,
            session=self.name,
            ops=self._ops,
            on_miss=on_miss,
            params=params,
            stream=stream,
            marks=self.marks,
        )

    def _rebuild(self) -> Call[types.Completion]:
        """A call that makes the server hold this session again: it prefills and generates nothing."""
        return self._completion({**self._shape, "max_tokens": 0})

    def _rewriting(self, messages: Sequence[Message]) -> Call[types.Completion]:
        """A call that puts other messages in the place of these: prefills and generates nothing. The server keeps the
        ops that lie before the first message that differs."""
        params = {**self._shape, "max_tokens": 0}
        return _wire.chat(
            messages, model=self.model, session=self.name, ops=None, on_miss="replay", params=params, stream=False
        )

    def _take_rewritten(self, reply: types.Completion, messages: list[dict[str, Any]], places: dict[int, int]) -> None:
        before = self.spans
        self._take(reply)
        self.messages = messages
        self.marks = summarise.moved_marks(self.marks, places, before, self.spans)

    def _log(self, decision: Decision) -> Decision:
        logger.log(logging.DEBUG if decision.kind == "nothing" else logging.INFO, "%s: %s", self.name, decision)
        return decision

    def _take(self, reply: types.Completion) -> None:
        if "ops" in reply.akv.model_fields_set:
            self._ops = list(reply.akv.ops)
        self.spans = reply.akv.spans

    def _on_reply(self, params: Mapping[str, Any]) -> Callable[[types.Completion], None]:
        """What to do with the reply to the conversation as it is now. The server keeps ops that come while it generates
        for the end of it, and they are not in that reply: where there were some, ours is the newer history."""
        begun, num_sent = self._ops, len(self.messages)
        is_prefill = params.get("max_tokens") == 0

        def take(reply: types.Completion) -> None:
            newer = self._ops if self._ops is not begun else None
            self._check_unmoved(self.spans[:num_sent], reply.akv.spans, begun)
            self._take(reply)
            if not is_prefill:
                generated_as = {"akv": {"token_ids": reply.token_ids}} if reply.token_ids else {}
                self.messages.append({**reply.message, **generated_as})
            if newer is not None:
                self._ops = newer

        return take

    def _check_unmoved(
        self, ours: list[types.MessageSpan], theirs: list[types.MessageSpan], ops: list[types.Op] | None
    ) -> None:
        """Raises StreamDiverged where an op or a mark by index hits tokens that moved."""
        at = _first_moved(ours, theirs)
        if at is None:
            return
        ends = [op.end for op in ops or ()] + [mark.span[1] for mark in self.marks if mark.span is not None]
        if any(end is None or end > at for end in ends):
            raise StreamDiverged(
                f"session {self.name!r}: tokens from {at} on lie elsewhere than before; its ops or marks no longer hit "
                "what was meant (info() takes over what the server has now)"
            )

    def _take_rebuilt(self, reply: types.Completion, *, is_by_index: bool) -> None:
        """Takes the reply of `_rebuild`. Raises StreamDiverged where tokens lie elsewhere than before and ops, old or
        about to come, would hit others than were meant (text that the model wrote need not tokenize as it did)."""
        is_moved = len(reply.akv.spans) < len(self.spans) or _first_moved(self.spans, reply.akv.spans) is not None
        if is_moved and (self._ops or is_by_index):
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
        copy.marks = list(self.marks)
        copy._note = self._note
        copy._take_info(info)


def _first_moved(ours: Sequence[types.MessageSpan], theirs: Sequence[types.MessageSpan]) -> int | None:
    """The start of the first message that lies elsewhere for the server than it did for us."""
    for a, b in zip(ours, theirs, strict=False):
        if (a.start, a.content_start, a.content_end) != (b.start, b.content_start, b.content_end):
            return min(a.start, b.start)
    return None


def _elapsed_ms(since_s: float) -> float:
    return 1000 * (time.perf_counter() - since_s)


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
        appended. When it raises, the session is as it was; StreamDiverged, where an op or a mark would hit tokens
        that moved, comes after the server went on."""
        call, take = self._completion(params, on_miss), self._on_reply(params)
        reply = self._client._send(call)
        take(reply)
        return reply

    def stream(self, *, on_miss: types.OnMiss = "replay", **params: Unpack[SessionParams]) -> Stream:
        """As `complete`, event by event. The message is appended when the iterator is exhausted; a stream that is left
        early appends nothing. The request is sent with the first event; append nothing yourself before the end."""
        return self._client._stream(self._completion(params, on_miss, stream=True), self._on_reply(params))

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
        drops = decide(policy, self.context)
        if not drops:
            return None
        layout = self.drop(spans=spans_of(drops))
        if note:
            self._leave_note(drops)
        return layout

    def manage(self, policy: CacheOrSummarise) -> Decision:
        """Drops from the cache, or rewrites older messages to a summary, as the policy decides; says and logs what was
        done, why, and what it took. When it raises, the session is as it was."""
        since_s = time.perf_counter()
        context = self.context
        decision = policy.decide(context)
        if decision.kind == "drop":
            layout = self.drop(spans=spans_of(decision.drops))
            return self._log(replace(decision, freed_tokens=layout.changed, elapsed_ms=_elapsed_ms(since_s)))
        if decision.kind == "summarise":
            summary = policy.summarise(summarise.request(context, decision.replaced))
            if not isinstance(summary, Summary):
                raise TypeError("summarise: an asynchronous one needs an AsyncSession")
            messages, places = summarise.rewritten(context, decision.replaced, summary.text)
            reply = self._client._send(self._rewriting(messages))
            self._take_rewritten(reply, messages, places)
            return self._log(summarise.measured(decision, summary, reply.akv, _elapsed_ms(since_s)))
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
        call, take = self._completion(params, on_miss), self._on_reply(params)
        reply = await self._client._send(call)
        take(reply)
        return reply

    def stream(self, *, on_miss: types.OnMiss = "replay", **params: Unpack[SessionParams]) -> AsyncStream:
        return self._client._stream(self._completion(params, on_miss, stream=True), self._on_reply(params))

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
        drops = decide(policy, self.context)
        if not drops:
            return None
        layout = await self.drop(spans=spans_of(drops))
        if note:
            self._leave_note(drops)
        return layout

    async def manage(self, policy: CacheOrSummarise) -> Decision:
        since_s = time.perf_counter()
        context = self.context
        decision = policy.decide(context)
        if decision.kind == "drop":
            layout = await self.drop(spans=spans_of(decision.drops))
            return self._log(replace(decision, freed_tokens=layout.changed, elapsed_ms=_elapsed_ms(since_s)))
        if decision.kind == "summarise":
            written = policy.summarise(summarise.request(context, decision.replaced))
            summary = await written if isawaitable(written) else written
            messages, places = summarise.rewritten(context, decision.replaced, summary.text)
            reply = await self._client._send(self._rewriting(messages))
            self._take_rewritten(reply, messages, places)
            return self._log(summarise.measured(decision, summary, reply.akv, _elapsed_ms(since_s)))
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
