"""The sessions of all tenants: who owns which stream, who may change it when, and what a request makes of it.

Owns names, tenants, waiting (an op on a session that generates holds from the end of that generation), expiry, and
what is told to the journal when: nothing is acknowledged before it is durable there. Without a journal all of it is
kept in memory alone. Lives on one event loop. Knows no HTTP; what a stream *is* stands in `streams.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from akv_sdk import types
from akv_server import streams
from akv_server.errors import AkvError
from akv_server.journal import Done, Journal, Saved
from akv_server.ops import History, Op, Timeline
from akv_server.streams import Continued, Edited, NamedSpan, Stream

AUTO_CLOSES_ABOVE = 0.75  # repos: "auto" closes a gap once this part of the window's positions is used
MAX_KEYS = 64  # idempotency keys that a session remembers at least: a reply that was lost is asked for soon
DAY_S = 24 * 3600.0
MAX_SESSIONS = 1000


class Cache(Protocol):
    """The part of the engine that is used here."""

    def residency(
        self, salt: str, tokens: list[int], timeline: Timeline, *, with_tier: bool = False
    ) -> tuple[int, int]: ...


@dataclass
class Session:
    """A tenant's named stream. `stream` is replaced as a whole, and only by who holds `lock`.

    `done` are the op requests that had a key. Until `is_loaded`, the journal alone has what the session holds.
    """

    tenant: str
    name: str
    salt: str
    stream: Stream = field(default_factory=Stream)
    is_new: bool = True  # nothing was ever kept in it: it goes if its first request fails
    generating: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_used_s: float = 0.0
    done: tuple[Done, ...] = ()
    is_loaded: bool = True
    told: Saved | None = None  # what the journal was last told to write
    write: Future[None] | None = None  # and whether it did

    @property
    def saved(self) -> Saved:
        return Saved(self.salt, self.stream, self.done)

    @property
    def is_busy(self) -> bool:
        return self.generating or self.lock.locked()


Prompt = Callable[[Stream], Continued]
"""What a request wants to go on from, worked out against the stream that its session has."""
Edit = Callable[[Stream, int], tuple[Stream, list[types.AppliedEdit]]]
"""What a request changes of its stream before it runs; given that, and how many of its tokens the session had."""


@dataclass
class Turn:
    """A completion on a session, from prompt to answer. `session` is None for a request that names none; `before` is
    its stream, salt and newness before the prompt was kept."""

    session: Session | None
    salt: str
    stream: Stream
    warnings: list[str]
    applied_edits: list[types.AppliedEdit] = field(default_factory=list)
    before: tuple[Stream, str, bool] | None = None


class Sessions:
    """All sessions. `window` is the number of positions that the model has.

    One that is idle for `ttl_s` seconds goes, and so do the least recently used idle ones beyond `max_sessions`.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        window: int,
        page_size: int,
        journal: Journal | None = None,
        ttl_s: float = DAY_S,
        max_sessions: int = MAX_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_expired = 0
        self._cache = cache
        self._window = window
        self._page_size = page_size
        self._journal = journal
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._sessions: dict[tuple[str, str], Session] = {}  # the least recently used first
        for entry in journal.entries() if journal else ():
            session = Session(entry.tenant, entry.name, "", is_new=False, is_loaded=False)
            session.last_used_s = clock() - max(0.0, time.time() - entry.used_s)
            self._sessions[entry.tenant, entry.name] = session
        self.expire()

    def __len__(self) -> int:
        return len(self._sessions)

    def count(self, tenant: str | None) -> int:
        """Sessions of a tenant, or of all."""
        return len(self) if tenant is None else sum(owner == tenant for owner, _ in self._sessions)

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
        edit: Edit | None = None,
        num_asked: int = 0,
    ) -> AsyncIterator[Turn]:
        """A turn on the session `name`, which nobody else can change until it ends. Its answer may take `num_asked`
        tokens, where the request says how many.

        Nothing is changed until `keep_prompt`. Raises `session_busy`, and what the prompt or the ops are refused for.
        """
        salt = repr((tenant, cache_salt))
        if name is None:
            yield await self._prepared(None, Stream(), salt, prompt, ops, on_miss, edit, num_asked)
            return
        self.expire()
        session = self._sessions.setdefault((tenant, name), Session(tenant, name, salt))
        if session.generating:
            message = "the session is generating; wait for its answer, or use another session"
            raise AkvError("session_busy", message, param="akv.session", retry_after_s=1)
        session.generating = True
        self.expire()
        try:
            async with session.lock:
                if self._sessions.setdefault((tenant, name), session) is not session:
                    raise AkvError("session_busy", "the session was just replaced; try again", retry_after_s=1)
                await self._load(session)
                yield await self._prepared(session, session.stream, salt, prompt, ops, on_miss, edit, num_asked)
        finally:
            session.generating = False
            if self._sessions.get((tenant, name)) is session:
                self._touch(session)
                if session.is_new:
                    self._remove(session)
                else:  # whatever became of it: nobody was promised anything, so nobody waits
                    self._tell(session)

    async def _prepared(
        self,
        session: Session | None,
        stream: Stream,
        salt: str,
        prompt: Prompt,
        ops: list[types.Op] | None,
        on_miss: types.OnMiss,
        edit: Edit | None,
        num_asked: int,
    ) -> Turn:
        """The stream that the request asks for; tokenising may take a while, so not on the loop."""

        def prepare() -> Turn:
            before = stream if session is None or session.salt == salt else replace(stream, num_known=0)
            continued = prompt(before)
            after = continued.stream
            warnings = [*continued.warnings, *_divergence(continued, has_client_ops=ops is not None)]
            if ops is not None:
                after = _with_client_history(after, ops)
                warnings += _replaced(before.timeline.history, after.timeline.history)
            if on_miss == "forget":
                after, lost = self._forget_lost(after, salt)
                warnings += lost
            num_common = continued.num_common if session else 0
            if after.closes_gaps and self._closes(after, "auto", num_asked):
                after = streams.close_gaps(after, num_common).stream
            after, applied = edit(after, num_common) if edit else (after, [])
            return Turn(session, salt, after, warnings, applied)

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

    async def keep_answer(self, turn: Turn, stream: Stream) -> None:
        """The session goes on with the answered prompt; returns once that is durable. All of it counts as computed: the
        engine computes the last token, too, before it lets go."""
        turn.stream = replace(stream, num_known=len(stream.tokens))
        self.keep_prompt(turn)
        if turn.session:
            await self._durable(turn.session)

    def _forget_lost(self, stream: Stream, salt: str) -> tuple[Stream, list[str]]:
        """Turns drops into forgets where a replay would have to compute the dropped span again."""

        def num_resident(num_tokens: int, history: History) -> int:
            resident, _ = self._cache.residency(salt, stream.tokens[:num_tokens], Timeline(history), with_tier=True)
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

    # Ops: each waits for a generation under way, then changes the stream at its new end, or refuses. One that comes
    # with a `key` again, because its reply was lost, is answered and not applied again.

    async def drop(self, tenant: str, body: types.DropRequest, *, key: str | None = None) -> types.LayoutReply:
        def edit(stream: Stream) -> Edited:
            if body.pages is not None:
                spans = streams.spans_of_pages(stream, body.pages)
            else:
                spans = _spans(stream, body.spans, body.blocks)
            closes = self._closes(stream, body.repos)
            edited = streams.drop(stream, spans, repos=closes, forget=body.mode == "forget")
            if body.repos != "auto":
                return edited
            if closes:
                closed = streams.close_gaps(edited.stream, len(stream.tokens))
                return replace(closed, changed=edited.changed, applied=edited.applied + closed.applied)
            is_open = stream.closes_gaps or bool(edited.applied)
            return replace(edited, stream=replace(edited.stream, closes_gaps=is_open))

        return await self._edit(tenant, body, edit, key)

    async def restore(self, tenant: str, body: types.RestoreRequest, *, key: str | None = None) -> types.LayoutReply:
        def edit(stream: Stream) -> Edited:
            spans = _spans(stream, body.spans, body.blocks)
            return streams.restore(stream, spans, repos=bool(body.repos))  # which opens no more than was closed

        return await self._edit(tenant, body, edit, key)

    async def repos(self, tenant: str, body: types.ReposRequest, *, key: str | None = None) -> types.LayoutReply:
        def edit(stream: Stream) -> Edited:
            edited = streams.reposition(stream, body.start, body.end, body.delta)
            before, after = stream.layout.next_position, edited.stream.layout.next_position
            if after > max(self._window, before):
                message = f"delta: the next token would get position {after}, the model has {self._window}"
                raise AkvError("context_length_exceeded", message, param="delta")
            return edited

        return await self._edit(tenant, body, edit, key)

    async def _edit(
        self, tenant: str, body: OpRequest, edit: Callable[[Stream], Edited], key: str | None
    ) -> types.LayoutReply:
        async with self._idle(tenant, body.session) as session:
            request = _request(body) if key is not None else ""
            done = next((done for done in session.done if done.key == key), None)
            if done is not None:
                if done.request != request:
                    message = "this Idempotency-Key was used for another request"
                    raise AkvError("invalid_request", message, param="Idempotency-Key")
                await self._durable(session)
                return layout_reply(session.name, session.stream, done.changed, list(done.applied))
            edited = await asyncio.to_thread(edit, session.stream)  # thousands of spans take a while
            before = session.stream, session.done
            self._replace(session, edited.stream)
            if key is not None:
                if len(session.done) >= 2 * MAX_KEYS:
                    session.done = session.done[-MAX_KEYS:]
                session.done += (Done(key, request, edited.changed, tuple(edited.applied)),)
            try:
                await self._durable(session)
            except AkvError:
                session.stream, session.done = before
                raise
            return layout_reply(session.name, edited.stream, edited.changed, edited.applied)

    def _closes(self, stream: Stream, repos: types.Repos, num_asked: int = 0) -> bool:
        """ "auto": once positions come near the end of the window, or the answer would; then the gaps left before are
        closed, too."""
        most = min(AUTO_CLOSES_ABOVE * self._window, self._window - num_asked)
        return stream.layout.next_position > most if repos == "auto" else repos

    # Looking, forking, deleting.

    async def info(self, tenant: str, name: str) -> types.SessionInfo:
        return await self._info(self._get(tenant, name))

    async def _info(self, session: Session) -> types.SessionInfo:
        await self._load(session)
        stream = session.stream
        residency = self._cache.residency
        resident, pages = await asyncio.to_thread(residency, session.salt, stream.tokens, stream.timeline)
        slots = pages * self._page_size
        return types.SessionInfo(
            **dict(layout_reply(session.name, stream)),
            spans=stream.spans(),
            resident_tokens=resident,
            pages=pages,
            fragmentation=max(0.0, 1 - resident / slots) if slots else 0.0,
            generating=session.generating,
            idle_s=0.0 if session.generating else self._clock() - session.last_used_s,
        )

    async def list(self, tenant: str) -> types.SessionList:
        self.expire()
        found = [s for s in self._sessions.values() if s.tenant == tenant]
        return types.SessionList(data=[await self._info(session) for session in found if not session.is_new])

    async def fork(self, tenant: str, name: str, copy: str | None) -> types.SessionInfo:
        """A second session with the same stream. Copies no page: what both have in common they share in the tree."""
        async with self._idle(tenant, name) as session:
            copy = copy or f"{name[:160]}-{uuid.uuid4().hex[:12]}"
            if (tenant, copy) in self._sessions:
                raise AkvError("invalid_request", f"a session {copy!r} exists already", param="session")
            forked = self._sessions[tenant, copy] = Session(tenant, copy, session.salt)
            async with forked.lock:
                self._touch(forked)
                self._replace(forked, session.stream)
                self.expire()
                try:
                    await self._durable(forked)
                except AkvError:
                    self._remove(forked)
                    raise
        return await self._info(forked)

    async def delete(self, tenant: str, name: str) -> None:
        """Forgets the session. Its KV stays for whoever has the same history, until it is evicted."""
        async with self._idle(tenant, name) as session:
            await _done(self._remove(session))

    def expire(self) -> None:
        """Lets go of the sessions that were idle for too long, and of those beyond the limit."""
        now, num_over = self._clock(), len(self._sessions) - self._max_sessions
        gone: list[Session] = []
        for session in self._sessions.values():
            if len(gone) >= num_over and now - session.last_used_s <= self._ttl_s:
                break
            if not session.is_busy:
                gone.append(session)
        for session in gone:
            self._remove(session)
        self.num_expired += len(gone)

    def _get(self, tenant: str, name: str) -> Session:
        self.expire()
        session = self._sessions.get((tenant, name))
        if session is None or session.is_new:
            raise AkvError("session_not_found", f"there is no session {name[:200]!r}", param="session")
        return session

    @asynccontextmanager
    async def _idle(self, tenant: str, name: str) -> AsyncIterator[Session]:
        """The session once nothing generates on it, held until the block ends."""
        self.expire()
        session = self._sessions.get((tenant, name)) or self._get(tenant, name)
        async with session.lock:
            if self._get(tenant, name) is not session:  # deleted and made anew while this waited
                raise AkvError("session_not_found", f"the session {name[:200]!r} was deleted", param="session")
            await self._load(session)
            self._touch(session)
            yield session

    def _touch(self, session: Session) -> None:
        session.last_used_s = self._clock()
        key = session.tenant, session.name
        self._sessions[key] = self._sessions.pop(key)

    def _replace(self, session: Session, stream: Stream) -> None:
        session.stream = stream
        session.is_new = False

    def _remove(self, session: Session) -> Future[None] | None:
        del self._sessions[session.tenant, session.name]
        session.stream, session.is_new = Stream(), True  # whoever waits for it with a prompt starts afresh
        session.done, session.told, session.is_loaded = (), None, True
        return self._journal.delete(session.tenant, session.name) if self._journal else None

    # The journal.

    async def _load(self, session: Session) -> None:
        """What the journal has of a session that was not asked for since start-up."""
        if session.is_loaded:
            return
        assert self._journal is not None
        found = await asyncio.wrap_future(self._journal.load(session.tenant, session.name))
        if not session.is_loaded:  # or somebody else was quicker
            session.salt, session.stream, session.done = found.salt, found.stream, found.done
            session.told, session.is_loaded = session.saved, True

    def _tell(self, session: Session) -> None:
        """Has the journal write what the session holds, unless it was told already."""
        if self._journal is None or not session.is_loaded:
            return
        has_failed = session.write is not None and session.write.done() and session.write.exception() is not None
        if has_failed or session.told is None or not _is_same(session.told, session.saved):
            session.told = session.saved
            session.write = self._journal.save(session.tenant, session.name, session.told, time.time())

    async def _durable(self, session: Session) -> None:
        """Returns once all that the session holds is in the journal. Raises AkvError where it could not be written."""
        self._tell(session)
        await _done(session.write)


OpRequest = types.DropRequest | types.RestoreRequest | types.ReposRequest


def _request(body: OpRequest) -> str:
    """What tells one op request from another."""
    return hashlib.sha256(f"{type(body).__name__} {body.model_dump_json()}".encode()).hexdigest()


async def _done(write: Future[None] | None) -> None:
    """Waits for a write. It goes on if whoever waits is cancelled."""
    if write is not None:
        await asyncio.shield(asyncio.wrap_future(write))


def _is_same(a: Saved, b: Saved) -> bool:
    return a.stream is b.stream and a.salt == b.salt and a.done is b.done


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


def _replaced(ours: History, theirs: History) -> list[str]:
    """Says out loud that the client's ops leave out some of the session's: another client may have added them."""
    rest = iter(theirs)
    if all(op in rest for op in ours):
        return []
    count = (Counter(ours) - Counter(theirs)).total() or len(ours)  # or all are there, in another order
    return [f"akv.ops: replaced {count} {'op' if count == 1 else 'ops'} that the session had"]


def _with_client_history(stream: Stream, ops: list[types.Op]) -> Stream:
    try:
        return stream.with_history(tuple(streams.op_of(op) for op in ops))
    except AkvError as error:
        param = f"akv.{error.param}"
        raise AkvError(error.code, f"akv.{error.message}", param=param) from error
