"""Who runs in the next step, and on which tokens: admission, chunked prefill in phases, decode, preemption.

`schedule()` decides one step and gives it as plain integers (no torch), so that it can be sent to other ranks;
`commit()` takes what the model made of it. Owns requests from submission to their outcome. Knows no model, no text
and no HTTP.

A sequence's life:

    waiting -> prefilling (the spans that its plan found, in order) -> decoding -> closing -> gone
       ^-------------- preempted: its tokens are kept, its KV is not -------'

*Closing* computes the last generated token, which was sampled but never fed, so that the next request of the stream
finds everything there. The client has its answer by then.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from akv_server.attention import Attention
from akv_server.cache import Cache, Lease, Move, Plan, Span, span_indexes
from akv_server.errors import AkvError
from akv_server.ops import FORGOTTEN, History, Layout, Timeline, common_prefix
from akv_server.radix import Array, shifts, visible_mask

if TYPE_CHECKING:  # it lives beside the sampler, which is torch
    from akv_server.sampler import SamplingParams

log = logging.getLogger("akv")

_SCORED_ROWS = 128  # of a step that wants logits of whole prompts: they are vocab_size floats a row


@dataclass(slots=True)
class GeneratedToken:
    """One sampled token; `logprob` and the likeliest `(id, logprob)` only if the request asked."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


Score = tuple[float, list[tuple[int, float]]]
"""Log-probability of a token, and the likeliest `(id, logprob)` at its place."""


@dataclass(slots=True)
class Outcome:
    """How a request ended. The token counts are of the prompt: `cached + prefilled + replayed` is all of it but
    what is forgotten; a token that was let go while invisible, and that nobody needs, counts as cached.
    `computed_visible` counts those prefilled or replayed that the answer sees."""

    finish_reason: str  # "stop", "length", "abort", "error"
    error: AkvError | None
    tokens: list[int]
    cached_tokens: int
    prefilled_tokens: int
    replayed_tokens: int
    prompt_scores: list[Score | None]
    computed_visible: int = 0


@dataclass(slots=True)
class Request:
    """One generation behind a stream. The engine owns it after `submit`.

    Callbacks run in the engine's thread and must not block. `on_token` may return a finish reason, which ends the
    generation with that token. `on_done` comes exactly once.
    """

    request_id: str
    salt: str  # root of the tree that it may share with
    tokens: list[int]  # the stream so far
    history: History  # ops with at <= len(tokens)
    sampling: SamplingParams
    max_tokens: int  # 0: compute (and score) only
    stop_token_ids: frozenset[int]
    on_done: Callable[[Outcome], None]
    on_token: Callable[[GeneratedToken], str | None] = lambda _: None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    scores_from: int | None = None  # with num_prompt_logprobs: score what stands behind this even where its KV is there
    num_known: int = 0  # tokens that this session computed before: computing them again counts as replayed
    token_mask: Callable[[], Array] | None = None  # bool [vocab]: what may be sampled behind the tokens heard so far
    attention: Attention | None = None  # the engine notes here what the stream's tokens get while this decodes
    timeline: Timeline | None = None  # the history worked out, if the caller has it


class State(Enum):
    PREFILLING = 1
    DECODING = 2
    CLOSING = 3


class View:
    """What one sequence sees, as an attention plan has it: a page table and segments. Grows as tokens are written."""

    __slots__ = ("end", "page_size", "pages", "phase", "segments", "version")

    def __init__(self, lease: Lease, layout: Layout, phase: int, end: int, page_size: int) -> None:
        self.phase, self.version, self.end, self.page_size = phase, lease.version, end, page_size
        self.pages = array("i")
        self.segments: list[list[int]] = []  # (slot, length, start index, delta)
        index = np.flatnonzero(visible_mask(layout.feed(end - layout.num_tokens), end))
        slots = lease.slots[index]
        assert (slots >= 0).all(), "a visible token is not there"
        if not len(index):
            return
        pages, offsets = np.divmod(slots, page_size)
        turns = np.flatnonzero(np.diff(pages)) + 1
        self.pages.extend(pages[np.concatenate([[0], turns])].tolist())
        entry = np.zeros(len(index), np.int64)
        entry[turns] = 1
        logical = np.cumsum(entry) * page_size + offsets
        delta = shifts(layout, 0, end)[index] - lease.written[index]
        breaks = np.flatnonzero((np.diff(index) != 1) | (np.diff(logical) != 1) | (np.diff(delta) != 0)) + 1
        starts = np.concatenate([[0], breaks])
        lengths = np.diff(np.concatenate([starts, [len(index)]]))
        self.segments = np.stack([logical[starts], lengths, index[starts], delta[starts]], axis=1).tolist()

    def extend(self, lease: Lease, end: int, shift: int) -> None:
        """Adds the tokens `[self.end, end)`, all visible under the view's layout with this shift."""
        size = self.page_size
        for index in range(self.end, end):
            slot = int(lease.slots[index])
            page, offset = divmod(slot, size)
            if not self.pages or self.pages[-1] != page:
                self.pages.append(page)
            logical = (len(self.pages) - 1) * size + offset
            delta = shift - int(lease.written[index])
            last = self.segments[-1] if self.segments else None
            if last and last[0] + last[1] == logical and last[2] + last[1] == index and last[3] == delta:
                last[1] += 1
            else:
                self.segments.append([logical, 1, index, delta])
        self.end = end


@dataclass(eq=False, slots=True)
class Running:
    """A request that holds a lease."""

    request: Request
    lease: Lease
    plan: Plan
    order: int  # of admission: the youngest is preempted first
    todo: deque[Span]
    outcome: Outcome
    limit: int  # tokens it may generate in all
    state: State = State.PREFILLING
    view: View | None = None
    carried: object = None  # the sampler's state, the engine's to keep
    is_counted: bool = True  # its outcome says how its prompt came to be there; not when that was told before


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `[first_row, first_row + end - start)` of a step: tokens `[start, end)` of one sequence, one layout."""

    running: Running
    start: int
    end: int
    first_row: int
    pages: array[int]
    segments: list[list[int]]
    samples: bool  # its last row is the one to sample from
    scores: bool  # every row's logits are wanted


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens `[start, end)` of one sequence that the tier has, and where they go."""

    running: Running
    lease: Lease
    start: int
    end: int
    slots: Array  # int32 [end - start]
    keys: list[bytes]  # of the blocks that they lie in


@dataclass(frozen=True, slots=True)
class Step:
    """Loads, then one forward pass (none where there are no chunks), in plain integers. Valid until it is committed;
    nothing else may be scheduled meanwhile."""

    loads: list[Load]
    chunks: list[Chunk]
    token_ids: Array  # int64 [num_rows]
    positions: Array  # int64 [num_rows]
    write_slots: Array  # int64 [num_rows], -1: its KV is there
    logit_rows: list[int]


class Scheduler:
    """Requests on the way and the cache they share. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        cache: Cache,
        move: Move,
        *,
        max_step_tokens: int,
        max_loaded_tokens: int,
        max_running: int,
        max_positions: int,
    ) -> None:
        self.cache = cache
        self._move = move  # how compaction copies tokens
        self.max_step_tokens = max_step_tokens
        self.max_loaded_tokens = max_loaded_tokens  # in a step
        self.max_running = max_running
        self.max_positions = max_positions
        self.waiting: deque[tuple[Request, Array, Timeline, Outcome | None, object]] = deque()
        self.running: list[Running] = []
        self.num_preemptions = 0
        self.tokens_cached = 0
        self.tokens_cached_session = 0  # of these, in the pool and computed by the same session before
        self.tokens_cached_tier = 0  # of these, to be brought back from the tier
        self.tokens_loaded = 0
        self.tokens_prefilled = 0
        self.tokens_replayed = 0
        self.tokens_generated = 0
        self._admitted = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def check_request(self, request: Request) -> None:
        """Raises AkvError for a request that could never run. Reads no tree: any thread may call it."""
        timeline = request.timeline = request.timeline or Timeline(request.history)
        n = len(request.tokens)
        if not n:
            raise AkvError("invalid_request", "the prompt is empty", param="prompt")
        for start, end, layout in timeline.phases(n):
            self._check_window(layout.feed(end - start).next_position)
        last = timeline.layout_at(n)
        if all(run.state == FORGOTTEN for run in last.runs if run.start < n):
            message = "all tokens of the stream are forgotten: there is nothing to go on from"
            raise AkvError("invalid_request", message, param="akv.ops")
        self._check_window(last.next_position + (1 if request.max_tokens else 0))
        if last.num_visible + 1 > self._pool_tokens:
            raise self._too_large()

    @property
    def _pool_tokens(self) -> int:
        return self.cache.pool.num_pages * self.cache.page_size

    def _too_large(self) -> AkvError:
        message = (
            f"the request alone needs more than the {self._pool_tokens} tokens of the pool; drop some, or start the "
        )
        return AkvError("out_of_pages", message + "server with a larger pool", param="messages", retry_after_s=60)

    def _check_window(self, next_position: int) -> None:
        if next_position > self.max_positions:
            raise AkvError(
                "context_length_exceeded",
                f"the stream reaches position {next_position}, the model's window ends at {self.max_positions}; "
                "drop spans with repos to make room",
                param="messages",
            )

    def submit(self, request: Request) -> None:
        """Queues a request that `check_request` let pass."""
        ids = np.asarray(request.tokens, np.int32)
        timeline = request.timeline or Timeline(request.history)
        self.waiting.append((request, ids, timeline, None, None))

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is; its work is freed at once. Unknown ids are no error: it may just be done."""
        for entry in self.waiting:
            if entry[0].request_id == request_id:
                self.waiting.remove(entry)
                outcome = entry[3] or _nothing_done("abort")
                outcome.finish_reason = "abort"
                entry[0].on_done(outcome)
                return
        for running in self.running:
            if running.request.request_id == request_id and running.state is not State.CLOSING:
                self._end(running, "abort")
                self._close(running)
                return

    def fail(self, running: Running, error: AkvError) -> None:
        """Ends a running request with an error."""
        if running.state is not State.CLOSING:
            running.outcome.error = error
            self._end(running, "error")
        self._close(running)

    def fail_all(self, error: AkvError) -> None:
        """Ends every request with an error."""
        for entry in list(self.waiting):
            self.waiting.remove(entry)
            refused = entry[3] or _nothing_done("error")
            refused.finish_reason, refused.error = "error", error
            entry[0].on_done(refused)
        for running in list(self.running):
            self.fail(running, error)

    # Decide a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None where nothing can run. Reserves the slots that it writes."""
        self._admit()
        parts: list[tuple[Running, Span, int, int]] = []
        for running in sorted(self.running, key=lambda r: r.order):
            if running.state is not State.PREFILLING and running in self.running:
                n = running.lease.num_tokens
                layout = running.lease.timeline.layout_at(n - 1)
                span = Span(n - 1, n, layout, running.plan.num_phases, False)
                if self._reserve(running, span, n - 1, n, parts):
                    parts.append((running, span, n - 1, n))
        budget = self.max_step_tokens // 4 if parts else self.max_step_tokens
        self._load(parts)
        prefilling = [r for r in self.running if r.state is State.PREFILLING and not r.todo[0].loads]
        if any(r.request.num_prompt_logprobs is not None for r in prefilling):
            budget = min(budget, _SCORED_ROWS)
        prefilling.sort(key=lambda r: (sum(s.end - s.start for s in r.todo), r.order))
        for i, running in enumerate(prefilling):
            if running in self.running:
                budget -= self._prefill(running, max(1, budget // (len(prefilling) - i)), parts)
            if budget <= 0:
                break
        return self._step(parts) if parts else None

    def _load(self, parts: list[tuple[Running, Span, int, int]]) -> None:
        """Puts what the tier has, and the sequences that prefill need next, into the step: whole blocks, so that none
        is read twice. What they compute waits for a later step, since it is read under the shifts that come with it."""
        left, size = self.max_loaded_tokens, self.cache.page_size
        for running in [r for r in self.running if r.state is State.PREFILLING]:
            for span in list(running.todo) if running in self.running else ():
                end = min(span.end, (span.start + left) // size * size)
                if not span.loads or end <= span.start or not self._reserve(running, span, span.start, end, parts):
                    break
                parts.append((running, span, span.start, end))
                left -= end - span.start
                if end < span.end:
                    break

    def _prefill(self, running: Running, share: int, parts: list[tuple[Running, Span, int, int]]) -> int:
        """Puts up to `share` tokens of a sequence's spans into the step; several phases of it may run together, since
        every layer writes all of the step's keys before any row reads them. Returns the tokens put in."""
        used = 0
        for span in list(running.todo):
            if used >= share or span.loads:
                break
            start, end = span.start, min(span.end, span.start + share - used)
            if not span.resident and not self._reserve(running, span, start, end, parts):
                break
            parts.append((running, span, start, end))
            used += end - start
        return used

    def _reserve(
        self, running: Running, span: Span, start: int, end: int, parts: list[tuple[Running, Span, int, int]]
    ) -> bool:
        """Slots for `[start, end)`; makes room by preempting the youngest others. False: the sequence must wait, or is
        itself gone (preempted, or ended because not even an empty pool would do)."""
        while not self.cache.reserve(running.lease, start, end, shift_at(span.layout, start)):
            in_step = {r for r, *_ in parts}
            others = [r for r in self.running if r is not running and r not in in_step]
            youngest = max(others, key=lambda r: r.order, default=None)
            if youngest is not None and youngest.order > running.order:
                self._preempt(youngest)
            elif len(self.running) > 1:
                if running not in in_step:
                    self._preempt(running)
                return False
            elif running in in_step:
                return False
            elif self._compact(running.lease):
                continue
            elif running.state is State.PREFILLING:
                self.fail(running, self._too_large())
                return False
            else:  # it has its answer so far; the pool holds no more
                if running.state is State.DECODING:
                    self._end(running, "length")
                self._publish_computed(running)
                self._close(running)
                return False
        return True

    def _compact(self, lease: Lease) -> bool:
        """The last resort of a request that runs alone: gathers what it holds into fewer pages. False: no fewer."""
        found = self.cache.compaction_of(lease, max(1, self.cache.pool.num_free) * self.cache.page_size)
        if found is not None:
            self.cache.compact(found, self._move)
        return found is not None

    def _step(self, parts: list[tuple[Running, Span, int, int]]) -> Step:
        chunks: list[Chunk] = []
        token_ids: list[Array] = []
        positions: list[Array] = []
        write_slots: list[Array] = []
        logit_rows: list[int] = []
        row = 0
        loads: list[Load] = []
        for running, span, start, end in parts:
            lease = running.lease
            if span.loads:
                blocks = range(start // self.cache.page_size, -(-end // self.cache.page_size))
                keys = [running.plan.keys[block] for block in blocks]
                loads.append(Load(running, lease, start, end, lease.slots[start:end].copy(), keys))
                continue
            shift = shift_at(span.layout, start)
            view = running.view
            if view is None or (view.phase, view.version, view.end) != (span.phase, lease.version, start):
                view = View(lease, span.layout, span.phase, start, self.cache.page_size)
            view.extend(lease, end, shift)
            running.view = view
            scores = running.request.num_prompt_logprobs is not None and running.state is State.PREFILLING
            is_last = running.state is State.PREFILLING and span is running.todo[-1] and end == span.end
            samples = running.state is State.DECODING or (is_last and running.limit > 0)
            chunks.append(
                Chunk(running, start, end, row, view.pages[:], [list(s) for s in view.segments], samples, scores)
            )
            token_ids.append(lease.tokens[start:end])
            positions.append(np.arange(start, end) + shift)
            write_slots.append(np.full(end - start, -1) if span.resident else lease.slots[start:end])
            if scores:
                logit_rows += range(row, row + end - start)
            elif samples:
                logit_rows.append(row + end - start - 1)
            row += end - start
        empty = [np.empty(0, np.int64)]
        return Step(
            loads,
            chunks,
            np.concatenate(token_ids or empty).astype(np.int64),
            np.concatenate(positions or empty).astype(np.int64),
            np.concatenate(write_slots or empty).astype(np.int64),
            logit_rows,
        )

    # Admission and preemption --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for entry in list(self.waiting):
            if len(self.running) >= self.max_running:
                return
            request, ids, timeline, outcome, carried = entry
            plan = self._plan(request, ids, timeline)
            if not self.cache.fits_alone(plan):
                self.waiting.remove(entry)
                refused = outcome or _nothing_done("error")
                refused.finish_reason, refused.error = "error", self._too_large()
                request.on_done(refused)
                continue
            if self._is_being_computed(request.salt, ids, timeline, plan.match.length):
                continue
            if self.running and not self.cache.room_for(plan):
                return
            self.waiting.remove(entry)
            self._start(request, plan, outcome, carried)

    def _plan(self, request: Request, ids: Array, timeline: Timeline) -> Plan:
        outputs = "none" if not request.max_tokens else "last"
        if request.num_prompt_logprobs is not None:
            outputs = "all"
        return self.cache.plan(request.salt, ids, timeline, outputs=outputs, outputs_from=request.scores_from)

    def _is_being_computed(self, salt: str, ids: Array, timeline: Timeline, cached: int) -> bool:
        """Whether a running sequence is just computing a prefix of this stream that is not in the tree yet: waiting for
        it is cheaper than computing it twice."""
        for running in self.running:
            if running.request.salt != salt or running.state is State.DECODING:
                continue
            lease = running.lease
            n = min(len(ids), lease.num_tokens)
            if n <= cached:
                continue
            different = ids[cached:n] != lease.tokens[cached:n]
            common = cached + int(different.argmax()) if different.any() else n
            common = common_prefix(timeline, lease.timeline, common)
            gain = 1 if running.state is State.CLOSING else self.cache.page_size
            if common >= cached + gain:
                return True
        return False

    def _start(self, request: Request, plan: Plan, outcome: Outcome | None, carried: object) -> None:
        lease = self.cache.open(plan)
        n, is_counted = len(plan.tokens), outcome is None
        layout = plan.timeline.layout_at(n)
        if outcome is None:
            computed = plan.computed_indexes
            replayed = int((computed < request.num_known).sum())
            outcome = Outcome("", None, [], 0, plan.num_computed - replayed, replayed, [])
            outcome.cached_tokens = n - plan.num_computed - plan.num_forgotten
            outcome.computed_visible = int(visible_mask(layout, n)[computed].sum())
            self.tokens_cached += outcome.cached_tokens
            self.tokens_cached_session += request.num_known - _num_known_elsewhere(plan, request.num_known) - replayed
            self.tokens_cached_tier += plan.num_loaded
            self.tokens_prefilled += outcome.prefilled_tokens
            if request.num_prompt_logprobs is not None:
                outcome.prompt_scores = [None] * n
        else:
            replayed = plan.num_computed
        self.tokens_replayed += replayed
        room = min(self.max_positions - layout.next_position, self._pool_tokens - layout.num_visible)
        limit = min(request.max_tokens, len(outcome.tokens) + room)
        running = Running(request, lease, plan, self._admitted, deque(plan.todo), outcome, limit)
        running.carried, running.is_counted = carried, is_counted
        self._admitted += 1
        self.running.append(running)
        if not running.todo:  # all is there and no output wanted
            self._end(running, "length")
            self._close(running)

    def _preempt(self, running: Running) -> None:
        """Takes a sequence's pages away; it waits, first in line, and is replayed."""
        self.num_preemptions += 1
        self._publish_computed(running)
        if running.state is State.CLOSING:  # the client has its answer; the last token is computed when it is needed
            self._close(running)
            return
        lease = running.lease
        ids = lease.tokens[: lease.num_tokens].copy()
        self._close(running)
        entry = (running.request, ids, lease.timeline, running.outcome, running.carried)
        self.waiting.appendleft(entry)

    def _replan(self, running: Running) -> None:
        """What the tier was to bring did not come: goes on another way, most often by computing it."""
        request, before = running.request, running.lease
        plan = self._plan(request, before.tokens[: before.num_tokens].copy(), before.timeline)
        if not self.cache.fits_alone(plan):
            self.fail(running, self._too_large())
            return
        more = np.setdiff1d(plan.computed_indexes, span_indexes(running.todo))
        replayed = int((more < request.num_known).sum()) if running.is_counted else len(more)
        prefilled = len(more) - replayed
        self.tokens_replayed += replayed
        self.tokens_prefilled += prefilled
        if running.is_counted:
            outcome = running.outcome
            outcome.cached_tokens -= len(more)
            n = len(plan.tokens)
            outcome.computed_visible += int(visible_mask(plan.timeline.layout_at(n), n)[more].sum())
            outcome.prefilled_tokens += prefilled
            outcome.replayed_tokens += replayed
            self.tokens_cached -= len(more)
            from_tier = np.isin(more, np.concatenate([np.arange(s.start, s.end) for s in running.todo if s.loads]))
            self.tokens_cached_tier -= int(from_tier.sum())
            self.tokens_cached_session -= int((~from_tier & (more < request.num_known)).sum())
        running.lease, running.plan, running.todo, running.view = self.cache.open(plan), plan, deque(plan.todo), None
        self.cache.close(before)

    # What a step came to -------------------------------------------------------------------------------------------

    def commit(
        self, step: Step, loaded: list[Array], sampled: dict[Running, GeneratedToken], scores: dict[int, Score]
    ) -> None:
        """Takes a step's results: `loaded` has, for each load, the written shifts of its tokens up to the first that
        did not come; `sampled` a token for every chunk that samples; `scores` the log-probability that row r gave to
        the token after it, by row."""
        for load, written in zip(step.loads, loaded, strict=True):
            self._take_loaded(load, written)
        last_of = {chunk.running: chunk for chunk in step.chunks}
        for chunk in step.chunks:
            running = chunk.running
            if running not in self.running:
                continue  # ended by the callback of an earlier chunk
            if running.state is State.CLOSING:
                self._publish_computed(running)
                self._close(running)
                continue
            if chunk.scores:
                for row in range(chunk.first_row, chunk.first_row + chunk.end - chunk.start):
                    index = chunk.start + row - chunk.first_row + 1
                    if index < len(running.outcome.prompt_scores):
                        running.outcome.prompt_scores[index] = scores[row]
            if running.state is State.PREFILLING:
                self._advance(running, chunk.end)
                if chunk is last_of[running]:
                    self._publish(running, chunk.end)
            if chunk.samples:
                self._take(running, sampled[running])
            elif running.state is State.PREFILLING and not running.todo:
                self._end(running, "length")
                self._close(running)

    def _take_loaded(self, load: Load, written: Array) -> None:
        running, end = load.running, load.start + len(written)
        if running not in self.running or running.lease is not load.lease:
            return  # aborted meanwhile, or it goes another way since an earlier load of the step
        running.lease.written[load.start : end] = written
        self.tokens_loaded += len(written)
        if len(written):
            self._advance(running, end)
            self._publish(running, end)
        if end < load.end:
            self._replan(running)
        elif not running.todo:
            self._end(running, "length")
            self._close(running)

    def _advance(self, running: Running, end: int) -> None:
        span = running.todo[0]
        if end < span.end:
            running.todo[0] = replace(span, start=end)
        else:
            running.todo.popleft()

    def _publish(self, running: Running, end: int) -> None:
        """Shares what is computed up to `end`, and lets go of what no later phase reads."""
        self.cache.publish(running.lease, end)
        self.cache.release(running.lease, running.todo[0].phase if running.todo else running.plan.num_phases)

    def _take(self, running: Running, token: GeneratedToken) -> None:
        """A sampled token joins the stream; the request goes on, or ends with it."""
        running.state = State.DECODING
        running.outcome.tokens.append(token.token_id)
        self.tokens_generated += 1
        self.cache.append(running.lease, token.token_id)
        try:
            reason = running.request.on_token(token)
        except AkvError as error:
            self.fail(running, error)
            return
        except Exception:
            log.exception("a listener failed on token %d of request %s", token.token_id, running.request.request_id)
            self.fail(running, AkvError("internal_error", "the reply could not be built"))
            return
        if reason is None and token.token_id in running.request.stop_token_ids:
            reason = "stop"
        if reason is None and len(running.outcome.tokens) >= running.limit:
            reason = "length"
        if reason is not None:
            self._end(running, reason)
            running.state = State.CLOSING

    def _end(self, running: Running, reason: str) -> None:
        """Tells the client. The sequence may still have its last token to compute."""
        running.outcome.finish_reason = reason
        running.request.on_done(running.outcome)

    def _publish_computed(self, running: Running) -> None:
        lease = running.lease
        if running.todo:
            end = running.todo[0].start
        else:
            end = lease.num_tokens if lease.slots[lease.num_tokens - 1] >= 0 else lease.num_tokens - 1
        self.cache.publish(lease, end)

    def _close(self, running: Running) -> None:
        self.running.remove(running)
        self.cache.close(running.lease)


def shift_at(layout: Layout, index: int) -> int:
    """How far the token with this index sits from its index."""
    return layout.position(index) - index


def _num_known_elsewhere(plan: Plan, num_known: int) -> int:
    """Of the first tokens, those that are forgotten or to be brought back from the tier."""
    loaded = sum(max(0, min(span.end, num_known) - span.start) for span in plan.todo if span.loads)
    return plan.timeline.layout_at(len(plan.tokens)).num_forgotten_in(0, num_known) + loaded


def _nothing_done(reason: str) -> Outcome:
    return Outcome(reason, None, [], 0, 0, 0, [])
