"""The sessions of all tenants: who owns which stream, who may change it when, and what a request makes of it.

Owns names, tenants, waiting (an op on a session that generates holds from the end of that generation) and the journal
of ops, which is kept in memory. Lives on one event loop. Knows no HTTP; what a stream *is* stands in `streams.py`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from akv_sdk import types
from akv_server import streams
from akv_server.errors import AkvError
from akv_server.ops import History, Op, Timeline
from akv_server.streams import Continued, Edited, NamedSpan, Stream

AUTO_CLOSES_ABOVE = 0.75  # repos: "auto" closes a gap once this part of the window's positions is used


class Cache(Protocol):
    """The part of the engine that is used here."""

    def residency(self, salt: str, tokens: list[int], history: History) -> tuple[int, int]: ...


@dataclass
class Session:
    """A tenant's named stream. `stream` is replaced as a whole, and only by who holds `lock`."""

    tenant: str
    name: str
    salt: str
    stream: Stream = field(default_factory=Stream)
    is_new: bool = True  # nothing was ever kept in it: it goes if its first request fails
    generating: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_used_s: float = field(default_factory=time.monotonic)


Prompt = Callable[[Stream], Continued]
"""What a request wants to go on from, worked out against the stream that its session has."""


@dataclass
class Turn:
    """A completion on a session, from prompt to answer. `session` is None for a request that names none; `before` is
    its stream, salt and newness before the prompt was kept."""

    session: Session | None
    salt: str
    stream: Stream
    warnings: list[str]
    before: tuple[Stream, str, bool] | None = None


class Sessions:
    """All sessions. `window` is the number of positions that the model has."""

    def __init__(self, cache: Cache, *, window: int, page_size: int) -> None:
        self._cache = cache
        self._window = window
        self._page_size = page_size
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @asynccontextmanager
    async def turn(
        self,
        tenant: str,
        name: str | None,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        ops: list[types.Op] | None = None,
        on_miss: types.OnMiss = "replay",
    ) -> AsyncIterator[Turn]:
        """A turn on the session `name`, which nobody else can change until it ends.

        Nothing is changed until `keep_prompt`. Raises `session_busy`, and what the prompt or the ops are refused for.
        """
        salt = repr((tenant, cache_salt))
        if name is None:
            yield await self._prepared(None, Stream(), salt, prompt, ops, on_miss)
            return
        session = self._sessions.setdefault((tenant, name), Session(tenant, name, salt))
        if session.generating:
            message = "the session is generating; wait for its answer, fork it, or use another session"
            raise AkvError("session_busy", message, param="akv.session", retry_after_s=1)
        session.generating = True
        try:
            async with session.lock:
                if self._sessions.setdefault((tenant, name), session) is not session:
                    raise AkvError("session_busy", "the session was just replaced; try again", retry_after_s=1)
                yield await self._prepared(session, session.stream, salt, prompt, ops, on_miss)
        finally:
            session.generating = False
            session.last_used_s = time.monotonic()
            if session.is_new and self._sessions.get((tenant, name)) is session:
                del self._sessions[tenant, name]

    async def _prepared(
        self,
        session: Session | None,
        stream: Stream,
        salt: str,
        prompt: Prompt,
        ops: list[types.Op] | None,
        on_miss: types.OnMiss,
    ) -> Turn:
        """The stream that the request asks for; tokenising may take a while, so not on the loop."""

        def prepare() -> Turn:
            before = stream if session is None or session.salt == salt else replace(stream, num_known=0)
            continued = prompt(before)
            after, warnings = continued.stream, _divergence(continued, has_client_ops=ops is not None)
            if ops is not None:
                after = _with_client_history(after, ops)
            if on_miss == "forget":
                after, lost = self._forget_lost(after, salt)
                warnings += lost
            return Turn(session, salt, after, warnings)

        return await asyncio.to_thread(prepare)

    def keep_prompt(self, turn: Turn) -> None:
        """The session's stream is the prompt now; it stays so if the client leaves before the answer is whole."""
        if session := turn.session:
            turn.before = turn.before or (session.stream, session.salt, session.is_new)
            session.salt = turn.salt
            self._replace(session, turn.stream)

    def take_back(self, turn: Turn) -> None:
        """The request failed: the session is as it was."""
        if turn.session and turn.before:
            turn.session.stream, turn.session.salt, turn.session.is_new = turn.before

    def keep_answer(self, turn: Turn, stream: Stream) -> None:
        """The session goes on with the answered prompt. All of it counts as computed: the engine computes the last
        token, too, before it lets go."""
        turn.stream = replace(stream, num_known=len(stream.tokens))
        self.keep_prompt(turn)

    def _forget_lost(self, stream: Stream, salt: str) -> tuple[Stream, list[str]]:
        """Turns drops into forgets where a replay would have to compute the dropped span again."""

        def num_resident(num_tokens: int, history: History) -> int:
            resident, _ = self._cache.residency(salt, stream.tokens[:num_tokens], history)
            return resident

        history = stream.timeline.history
        first_missing = _index_of_visible(stream, num_resident(len(stream.tokens), history))
        lost = []
        for op in history:
            if op.kind != "drop" or op.mode == "forget" or op.at <= first_missing:
                continue
            assert op.end is not None
            before = (
                tuple(o for o in history if o.at <= op.start),
                tuple(o for o in history if o.at <= op.end and o != op),
            )
            resident = num_resident(op.end, before[1]) - num_resident(op.start, before[0])
            if resident < Timeline(before[1]).layout_at(op.end).num_visible_in(op.start, op.end):
                lost.append(op)
        if not lost:
            return stream, []
        changed = [replace(op, at=op.start, mode="forget") if op in lost else op for op in history]
        try:
            after = stream.with_history(tuple(sorted(changed, key=lambda op: op.at)))
        except AkvError:  # a later op leaves no room for it; a replay is always right
            return stream, [
                "on_miss: spans that are no longer cached cannot be forgotten under the ops that follow them"
            ]
        spans = ", ".join(f"[{op.start}, {op.end})" for op in lost)
        return after, [f"on_miss: no longer cached and therefore forgotten, not masked: {spans}"]

    # Ops: each waits for a generation under way, then changes the stream at its new end, or refuses.

    async def drop(self, tenant: str, body: types.DropRequest) -> types.LayoutReply:
        def edit(stream: Stream) -> Edited:
            if body.pages is not None:
                spans = streams.spans_of_pages(stream, body.pages)
            else:
                spans = _spans(stream, body.spans, body.blocks)
            return streams.drop(stream, spans, repos=self._closes(stream, body.repos), forget=body.mode == "forget")

        return await self._edit(tenant, body.session, edit)

    async def restore(self, tenant: str, body: types.RestoreRequest) -> types.LayoutReply:
        def edit(stream: Stream) -> Edited:
            spans = _spans(stream, body.spans, body.blocks)
            return streams.restore(stream, spans, repos=self._opens(stream, body.repos, spans))

        return await self._edit(tenant, body.session, edit)

    async def repos(self, tenant: str, body: types.ReposRequest) -> types.LayoutReply:
        return await self._edit(
            tenant, body.session, lambda stream: streams.reposition(stream, body.start, body.end, body.delta)
        )

    async def _edit(self, tenant: str, name: str, edit: Callable[[Stream], Edited]) -> types.LayoutReply:
        async with self._idle(tenant, name) as session:
            edited = await asyncio.to_thread(edit, session.stream)  # thousands of spans take a while
            self._replace(session, edited.stream)
            return layout_reply(session.name, edited.stream, edited.changed, edited.applied)

    def _closes(self, stream: Stream, repos: types.Repos) -> bool:
        return stream.layout.next_position > AUTO_CLOSES_ABOVE * self._window if repos == "auto" else repos

    def _opens(self, stream: Stream, repos: types.Repos, spans: list[NamedSpan]) -> bool:
        """ "auto": open the gap again only if the tokens do not fit where they are."""
        if repos != "auto":
            return repos
        try:
            streams.restore(stream, spans, repos=False)
        except AkvError:
            return True
        return False

    # Looking, forking, deleting.

    def info(self, tenant: str, name: str) -> types.SessionInfo:
        session = self._get(tenant, name)
        stream = session.stream
        resident, pages = self._cache.residency(session.salt, stream.tokens, stream.timeline.history)
        slots = pages * self._page_size
        return types.SessionInfo(
            **dict(layout_reply(name, stream)),
            spans=stream.spans(),
            resident_tokens=resident,
            pages=pages,
            fragmentation=max(0.0, 1 - resident / slots) if slots else 0.0,
            generating=session.generating,
            idle_s=0.0 if session.generating else time.monotonic() - session.last_used_s,
        )

    def list(self, tenant: str) -> types.SessionList:
        names = [name for owner, name in self._sessions if owner == tenant]
        return types.SessionList(data=[self.info(tenant, n) for n in names if not self._sessions[tenant, n].is_new])

    async def fork(self, tenant: str, name: str, copy: str | None) -> types.SessionInfo:
        """A second session with the same stream. Copies no page: what both have in common they share in the tree."""
        async with self._idle(tenant, name) as session:
            copy = copy or f"{name[:160]}-{uuid.uuid4().hex[:12]}"
            if (tenant, copy) in self._sessions:
                raise AkvError("invalid_request", f"a session {copy!r} exists already", param="session")
            forked = self._sessions[tenant, copy] = Session(tenant, copy, session.salt)
            self._replace(forked, session.stream)
        return self.info(tenant, copy)

    async def delete(self, tenant: str, name: str) -> None:
        """Forgets the session. Its KV stays for whoever has the same history, until it is evicted."""
        async with self._idle(tenant, name) as session:
            del self._sessions[tenant, name]
            session.stream, session.is_new = Stream(), True  # whoever waits for it with a prompt starts afresh

    def _get(self, tenant: str, name: str) -> Session:
        session = self._sessions.get((tenant, name))
        if session is None or session.is_new:
            raise AkvError("session_not_found", f"there is no session {name[:200]!r}", param="session")
        return session

    @asynccontextmanager
    async def _idle(self, tenant: str, name: str) -> AsyncIterator[Session]:
        """The session once nothing generates on it, held until the block ends."""
        session = self._sessions.get((tenant, name)) or self._get(tenant, name)
        async with session.lock:
            if self._get(tenant, name) is not session:  # deleted and made anew while this waited
                raise AkvError("session_not_found", f"the session {name[:200]!r} was deleted", param="session")
            session.last_used_s = time.monotonic()
            yield session

    def _replace(self, session: Session, stream: Stream) -> None:
        session.stream = stream
        session.is_new = False


def layout_reply(name: str, stream: Stream, changed: int = 0, applied: list[Op] | None = None) -> types.LayoutReply:
    layout = stream.layout
    return types.LayoutReply(
        session=name,
        stream_tokens=len(stream.tokens),
        visible_tokens=layout.num_visible,
        dropped_tokens=len(stream.tokens) - layout.num_visible,
        next_position=layout.next_position,
        changed=changed,
        applied=[streams.wire_of(op) for op in applied or []],
        ops=[streams.wire_of(op) for op in stream.timeline.history],
        segments=[types.SegmentInfo(**segment._asdict()) for segment in layout.segments],
    )


def _spans(stream: Stream, spans: list[types.Span] | None, blocks: list[str] | None) -> list[NamedSpan]:
    if blocks is not None:
        return streams.spans_of_blocks(stream, blocks)
    return streams.named_spans(stream, spans or [])


def _divergence(continued: Continued, *, has_client_ops: bool) -> list[str]:
    """Says out loud where a prompt left the session's stream, if a message differs or an op was lost by it."""
    at, index = continued.num_common, continued.first_different
    num_lost = 0 if has_client_ops else continued.num_lost
    if index is None and not num_lost:
        return []
    what = (
        "the prompt leaves the session's stream" if index is None else f"messages[{index}] differs from the session's"
    )
    gone = f"; {num_lost} {'op' if num_lost == 1 else 'ops'} behind that went" if num_lost else ""
    return [f"stream_diverged: {what}, which goes on from token {at}{gone}"]


def _index_of_visible(stream: Stream, nth: int) -> int:
    """The index of the visible token number `nth`, counted from 0; the stream's length if there are not so many."""
    for segment in stream.layout.segments:
        if nth < segment.end - segment.start:
            return segment.start + nth
        nth -= segment.end - segment.start
    return len(stream.tokens)


def _with_client_history(stream: Stream, ops: list[types.Op]) -> Stream:
    try:
        return stream.with_history(tuple(streams.op_of(op) for op in ops))
    except AkvError as error:
        param = f"akv.{error.param}"
        raise AkvError(error.code, f"akv.{error.message}", param=param) from error
