"""Who runs in the next step, and on which tokens: admission, chunked prefill in phases, decode, preemption.

`schedule()` decides one step, `commit()` takes what the model made of it; the values they deal in stand in `batch.py`.
Owns requests from submission to their outcome, and what is counted of them. Knows no model, no text and no HTTP.

A sequence's life:

    waiting -> prefilling (the spans that its plan found, in order) -> decoding -> closing -> gone
       ^-------------- preempted: its tokens are kept, its KV is not -------'

*Closing* computes the last generated token, which was sampled but never fed, so that the next request of the stream
finds everything there. The client has its answer by then.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace

import numpy as np

from akv_server.batch import (
    Chunk,
    GeneratedToken,
    Load,
    Outcome,
    Request,
    Running,
    Score,
    Source,
    State,
    Step,
    View,
    Waiting,
)
from akv_server.cache import Cache, Lease, Move
from akv_server.errors import AkvError
from akv_server.masks import Array
from akv_server.ops import FORGOTTEN, Timeline, common_prefix
from akv_server.planning import Plan, Span

log = logging.getLogger("akv")

_SCORED_ROWS = 128  # of a step that wants logits of whole prompts: they are vocab_size floats a row


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
        self.waiting: deque[Waiting] = deque()
        self.running: list[Running] = []
        self.num_plans = 0
        self.num_preemptions = 0
        self.tokens_cached = 0
        self.tokens_cached_session = 0  # of these, in the pool and computed by the same session before
        self.tokens_cached_tier = 0  # of these, in the tier
        self.tokens_loaded = 0
        self.tokens_prefilled = 0
        self.tokens_replayed = 0
        self.tokens_generated = 0
        self._admitted = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def checked(self, request: Request) -> Waiting:
        """What to submit of a request. Raises AkvError where it could never run. Reads no tree: any thread may call
        it."""
        timeline = request.timeline or Timeline(request.history)
        n = len(request.tokens)
        if not n:
            raise AkvError("invalid_request", "the prompt is empty", param="prompt")
        self._check_window(timeline.peak(n))
        last = timeline.layout_at(n)
        if all(run.state == FORGOTTEN for run in last.runs if run.start < n):
            message = "all tokens of the stream are forgotten: there is nothing to go on from"
            raise AkvError("invalid_request", message, param="akv.ops")
        self._check_window(last.next_position + (1 if request.max_tokens else 0))
        if last.num_visible + 1 > self._pool_tokens:
            raise self._too_large()
        return Waiting(request, np.asarray(request.tokens, np.int32), timeline)

    @property
    def _pool_tokens(self) -> int:
        return self.cache.pool.num_pages * self.cache.page_size

    def _too_large(self) -> AkvError:
        message = (
            f"the request alone needs more than the {self._pool_tokens} tokens of the pool; drop some, or start the "
        )
        # Time alone makes no room: longer than clients wait by themselves, short for one that obeys whatever it hears.
        return AkvError("out_of_pages", message + "server with a larger pool", param="messages", retry_after_s=90)

    def _check_window(self, next_position: int) -> None:
        if next_position > self.max_positions:
            raise AkvError(
                "context_length_exceeded",
                f"the stream reaches position {next_position}, the model's window ends at {self.max_positions}; "
                "drop spans with repos to make room",
                param="messages",
            )

    def submit(self, waiting: Waiting) -> None:
        """Queues a request that `checked` let pass."""
        self.waiting.append(waiting)

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is; its work is freed at once. Unknown ids are no error: it may just be done."""
        for waiting in self.waiting:
            if waiting.request.request_id == request_id:
                self._drop(waiting, "abort")
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
        for waiting in list(self.waiting):
            self._drop(waiting, "error", error)
        for running in list(self.running):
            self.fail(running, error)

    def start_over(self, error: AkvError) -> None:
        """After a fault of ours: ends every request with an error and empties the cache, which may have been left half
        changed. Counters stay."""
        ended = [(w.request, w.outcome or Outcome("", None, [], 0, 0, 0, [])) for w in self.waiting]
        ended += [(r.request, r.outcome) for r in self.running if not r.outcome.finish_reason]
        self.waiting.clear()
        self.running.clear()
        self.cache.reset()
        for request, outcome in ended:
            outcome.finish_reason, outcome.error = "error", error
            try:
                request.on_done(outcome)
            except Exception:  # one client that cannot be told keeps nobody else from it
                log.exception("a listener failed on the end of request %s", request.request_id)

    def _drop(self, waiting: Waiting, reason: str, error: AkvError | None = None) -> None:
        """Ends a request that waits."""
        self.waiting.remove(waiting)
        outcome = waiting.outcome or Outcome(reason, error, [], 0, 0, 0, [])
        outcome.finish_reason, outcome.error = reason, error
        waiting.request.on_done(outcome)

    # Decide a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None where nothing can run. Reserves the slots that it writes."""
        self._admit()
        parts: list[tuple[Running, Span, int, int]] = []
        for running in sorted(self.running, key=lambda r: r.order):
            if running.state is not State.PREFILLING and running in self.running:
                n = running.lease.num_tokens
                phase, _, layout = running.lease.timeline.phase_of(n - 1)
                span = Span(n - 1, n, layout, phase, False)
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
        while not self.cache.reserve(running.lease, start, end, span.layout.shift(start)):
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
        found = self.cache.compaction_of(lease, self.cache.pool.num_free * self.cache.page_size)
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
            shift = span.layout.shift(start)
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
        for waiting in list(self.waiting):
            if len(self.running) >= self.max_running:
                return
            if self._is_being_computed(waiting):
                continue
            if self.running and self.cache.num_obtainable <= waiting.num_obtainable:
                return  # there was no room with so many
            plan = self._plan(waiting.request, waiting.tokens, waiting.timeline)
            if not self.cache.fits_alone(plan):
                self._drop(waiting, "error", self._too_large())
                continue
            self._find_who_computes(waiting, plan.match.length)
            if waiting.behind is not None:
                continue
            if self.running and not self.cache.room_for(plan):
                waiting.num_obtainable = self.cache.num_obtainable
                return
            self.waiting.remove(waiting)
            self._start(waiting, plan)

    def _plan(self, request: Request, tokens: Array, timeline: Timeline) -> Plan:
        self.num_plans += 1
        outputs = "none" if not request.max_tokens else "last"
        if request.num_prompt_logprobs is not None:
            outputs = "all"
        return self.cache.plan(request.salt, tokens, timeline, outputs=outputs, outputs_from=request.scores_from)

    def _is_being_computed(self, waiting: Waiting) -> bool:
        """Whether the sequence that it waits behind still has enough of their common prefix to compute: waiting for it
        is cheaper than computing that twice."""
        running = waiting.behind
        if running is None or running.state is State.DECODING or running not in self.running:
            return False
        done = running.todo[0].start if running.todo else running.lease.num_tokens - 1
        return waiting.num_common >= done + self._least_gain(running)

    def _least_gain(self, running: Running) -> int:
        return 1 if running.state is State.CLOSING else self.cache.page_size

    def _find_who_computes(self, waiting: Waiting, num_cached: int) -> None:
        """Which running sequence is just computing a prefix of this stream that is not in the tree yet, if one is."""
        for running in self.running:
            lease = running.lease
            n = min(len(waiting.tokens), lease.num_tokens)
            if running.request.salt != waiting.request.salt or n <= num_cached:
                continue
            different = waiting.tokens[num_cached:n] != lease.tokens[num_cached:n]
            common = num_cached + int(different.argmax()) if different.any() else n
            common = common_prefix(waiting.timeline, lease.timeline, common)
            waiting.behind, waiting.num_common = running, common
            if common >= num_cached + self._least_gain(running) and self._is_being_computed(waiting):
                return
        waiting.behind = None

    def _start(self, waiting: Waiting, plan: Plan) -> None:
        request, outcome, sources = waiting.request, waiting.outcome, waiting.sources
        n = len(plan.tokens)
        is_counted = outcome is not None
        if outcome is None or sources is None:
            sources = np.where(plan.resident, Source.POOL, np.where(plan.loadable, Source.TIER, Source.UNTOLD))
            sources = sources.astype(np.int8)
            cached = int(np.count_nonzero(sources))
            outcome = Outcome("", None, [], cached, 0, 0, [])
            if request.num_prompt_logprobs is not None:
                outcome.prompt_scores = [None] * n
        num_visible = int(np.count_nonzero(plan.last_need == plan.num_phases))
        next_position = plan.timeline.layout_at(n).next_position
        room = min(self.max_positions - next_position, self._pool_tokens - num_visible)
        limit = min(request.max_tokens, len(outcome.tokens) + room)
        lease = self.cache.open(plan)
        running = Running(request, lease, plan, self._admitted, deque(plan.todo), outcome, sources, limit)
        running.carried, running.is_counted = waiting.carried, is_counted
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
        self._count_found(running)
        lease = running.lease
        tokens = lease.tokens[: lease.num_tokens].copy()
        self._close(running)
        again = Waiting(running.request, tokens, lease.timeline, running.outcome, running.sources, running.carried)
        self.waiting.appendleft(again)

    def _replan(self, running: Running) -> None:
        """What the tier was to bring did not come: goes on another way, most often by computing it."""
        before = running.lease
        plan = self._plan(running.request, before.tokens[: before.num_tokens].copy(), before.timeline)
        if not self.cache.fits_alone(plan):
            self.fail(running, self._too_large())
            return
        if not running.is_counted:  # what was found, and is to be computed now, was not found after all
            computed = plan.computed_indexes
            running.outcome.cached_tokens -= int(np.isin(running.sources[computed], (Source.POOL, Source.TIER)).sum())
            running.sources[computed] = Source.UNTOLD
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
        if not (span.resident or span.loads):
            self._count_computed(running, span.start, end)
        if end < span.end:
            running.todo[0] = replace(span, start=end)
        else:
            running.todo.popleft()
        if not running.todo:
            self._count_found(running)

    def _count_computed(self, running: Running, start: int, end: int) -> None:
        """Tells the counters, and the outcome where it accounts for these tokens for the first time."""
        outcome, num_known = running.outcome, running.request.num_known
        n = len(running.sources)
        num_generated = max(0, min(end, n + len(outcome.tokens) - 1) - max(start, n))  # before it was preempted
        sources = running.sources[start:end]
        new = np.flatnonzero(sources == Source.UNTOLD) + start
        sources[:] = Source.COMPUTED
        replayed = int(np.count_nonzero(new < num_known))
        outcome.replayed_tokens += replayed
        outcome.prefilled_tokens += len(new) - replayed
        outcome.computed_visible += int(np.count_nonzero(running.plan.last_need[new] == running.plan.num_phases))
        self.tokens_prefilled += len(new) - replayed
        self.tokens_replayed += replayed + len(sources) - len(new) + num_generated

    def _count_found(self, running: Running) -> None:
        """Tells the counters what of a prompt was in the cache, once that is certain: they never fall."""
        if not running.is_counted:
            running.is_counted = True
            from_pool = running.sources == Source.POOL
            from_tier = int(np.count_nonzero(running.sources == Source.TIER))
            self.tokens_cached += int(np.count_nonzero(from_pool)) + from_tier
            self.tokens_cached_session += int(np.count_nonzero(from_pool[: running.request.num_known]))
            self.tokens_cached_tier += from_tier

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
        self._count_found(running)
        if not running.todo:
            num_untold = int(np.count_nonzero(running.sources == Source.UNTOLD))
            running.outcome.absent_tokens = num_untold - running.plan.num_forgotten
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
