"""The loop: schedule, forward, sample, commit. Owns the model, its KV, and the thread that runs them.

Requests may be submitted and aborted from any thread at any time: the scheduler's state is touched under one lock,
which is held while a step is decided and while it is committed, never while the model runs. A request that is aborted
meanwhile gives its pages back at once; nothing can take them before the next step is decided.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from akv_kernels.plan import SequencePlan, build_plan
from torch import Tensor

from akv_server.attention import SAMPLED_EVERY
from akv_server.batch import GeneratedToken, Request, Running, Score, State, Step
from akv_server.cache import Cache
from akv_server.errors import AkvError
from akv_server.graphs import DecodeGraphs, capture_cuda_graphs
from akv_server.kv import KV
from akv_server.masks import Array, visible_mask
from akv_server.model import Model, StepInput
from akv_server.ops import Timeline
from akv_server.sampler import Draw, logprobs, sample
from akv_server.scheduler import Scheduler
from akv_server.tier import File, Memory, Storage, Tier

log = logging.getLogger("akv")

_STOP_S = 10  # for KV to reach the file when the engine stops
_STOP_PAGES = 8  # at a time


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of an engine. `max_step_tokens` bounds a step's prefill; while others decode it takes a quarter of that.
    A history whose fragmentation exceeds `compact_above` is compacted, `compact_tokens_per_step` tokens between two
    steps (0: never). Evicted KV is kept in a file (`disk_path`, up to `disk_bytes`), or else in up to `host_bytes` of
    host memory (0: it is lost), and `load_tokens_per_step` tokens of it brought back before a step."""

    num_pages: int
    page_size: int = 16
    max_step_tokens: int = 512
    max_running: int = 64
    compact_above: float = 0.4
    compact_tokens_per_step: int = 64
    disk_path: Path | None = None
    disk_bytes: int = 0
    host_bytes: int = 0
    load_tokens_per_step: int = 256


class Engine:
    """Runs requests on one model. `start()` makes a thread that does so; without it, `step()` does one step."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """Raises AkvError `invalid_request` where the file for evicted KV cannot be used, or not one block has room."""
        assert config.compact_tokens_per_step == 0 or config.compact_tokens_per_step >= 2 * config.page_size
        assert config.load_tokens_per_step >= config.page_size
        self.model = model
        self.config = config
        self.kv = KV(model, config.num_pages, config.page_size)
        self.graphs = self._make_graphs() if model.device.type == "cuda" else None
        self.forward = self.graphs.forward if self.graphs else self.run_eagerly
        self._draw: Draw | None = getattr(model.backend, "sample", None)
        self.tier = self._make_tier()
        self.cache = Cache(
            config.num_pages,
            config.page_size,
            self.kv.copy_page,
            compact_above=config.compact_above,
            tier=self.tier,
        )
        self.scheduler = Scheduler(
            self.cache,
            self.kv.move,
            max_step_tokens=config.max_step_tokens,
            max_loaded_tokens=config.load_tokens_per_step,
            max_running=config.max_running,
            max_positions=model.config.max_positions,
        )
        self.num_steps = 0
        self._unsampled = SAMPLED_EVERY - 1  # decode steps since attention was last noted, of those that want it
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._stopping = False
        self._thread: threading.Thread | None = None

    def _make_graphs(self) -> DecodeGraphs:
        pages = self.kv.k_pages, self.kv.v_pages
        return DecodeGraphs(self.model, *pages, capture_cuda_graphs(), max_rows=self.config.max_running)

    def _make_tier(self) -> Tier | None:
        config, kv = self.config, self.kv
        if config.disk_path is not None:
            model = self.model.fingerprint()
            storage: Storage = File(config.disk_path, config.disk_bytes, kv, config.page_size, model)
        elif config.host_bytes:
            block_bytes = kv.block_bytes(config.page_size)
            if self.model.device.type != "cpu":
                block_bytes = 1 << (block_bytes - 1).bit_length()  # torch rounds pinned memory up to a power of two
            storage = Memory(config.host_bytes, block_bytes)
        else:
            return None
        flops_per_s = 5e10 if self.model.device.type == "cpu" else 1e14  # a guess, until it is measured
        prefill_per_s = flops_per_s / (2 * self.model.config.num_layer_weights)
        return Tier(kv, storage, config.page_size, prefill_per_s=prefill_per_s)

    # Any thread ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine's thread."""
        assert self._thread is None
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="akv-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in, for good. Requests on the way end with "abort"; KV that is in the
        pool goes to the file, where there is one."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            for request in [r.request for r in self.scheduler.running] + [w.request for w in self.scheduler.waiting]:
                self.scheduler.abort(request.request_id)
            if self.tier is not None:
                deadline = time.monotonic() + _STOP_S
                while self.config.disk_path and time.monotonic() < deadline and self.cache.tree.evict(_STOP_PAGES):
                    self.tier.storage.flush()
                self.tier.storage.close()

    def submit(self, request: Request) -> None:
        """Queues a request. Raises AkvError at once where it can never run: `context_length_exceeded`,
        `out_of_pages`, or a history that cannot hold."""
        waiting = self.scheduler.checked(request)
        with self._work:
            self.scheduler.submit(waiting)
            self._work.notify()

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages at once; harmless when it is done already."""
        with self._lock:
            self.scheduler.abort(request_id)

    def fail_all(self, error: AkvError) -> None:
        """Ends every request with an error."""
        with self._lock:
            self.scheduler.fail_all(error)

    def evict_all(self) -> int:
        """Lets go of all KV that no running request holds; returns the number of pages freed."""
        with self._lock:
            return self.cache.evict_all()

    def residency(
        self, salt: str, tokens: Sequence[int], timeline: Timeline, *, with_tier: bool = False
    ) -> tuple[int, int]:
        """`(visible tokens whose KV is there, pages they lie in)` of a stream; `with_tier` also counts tokens that
        would be brought back instead of being computed. Mutates nothing. Waits while a step is decided or committed, so
        an event loop calls it in a thread."""
        ids = np.asarray(tokens, np.int32)
        visible = visible_mask(timeline.layout_at(len(tokens)), len(tokens))
        with self._lock:
            match = self.cache.tree.match(salt, ids, timeline)
            there = np.zeros(len(tokens), bool)
            there[: match.length] = match.slots >= 0
            loadable = self.cache.in_tier(salt, ids, timeline, there)[0] if with_tier else there
        pages = np.unique(match.slots[(visible & there)[: match.length]] // self.config.page_size)
        return int((visible & (there | loadable)).sum()), len(pages)

    def check(self) -> None:
        """Asserts the cache's invariants."""
        with self._lock:
            self.cache.check()

    def stats(self) -> dict[str, Any]:
        """Counters since start-up and the pool as it is now: the fields of `akv_sdk.types.CacheStats` but those that
        count sessions."""
        with self._lock:
            pool, scheduler, tree = self.cache.pool, self.scheduler, self.cache.tree
            return {
                "page_size": pool.page_size,
                "pages_total": pool.num_pages,
                "pages_free": pool.num_free,
                "pages_used": pool.num_pages - pool.num_free,
                "pages_shared": pool.num_shared,
                "pages_evictable": pool.num_evictable,
                "pages_dead": len(pool.dead),
                "tree_edges": tree.num_edges,
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "fragmentation": list(tree.num_by_fragmentation),
                "tokens_cached": scheduler.tokens_cached,
                "tokens_cached_session": scheduler.tokens_cached_session,
                "tokens_cached_tier": scheduler.tokens_cached_tier,
                "tokens_cached_shared": (
                    scheduler.tokens_cached - scheduler.tokens_cached_session - scheduler.tokens_cached_tier
                ),
                "tokens_loaded": scheduler.tokens_loaded,
                "tokens_stored": self.tier.num_stored if self.tier else 0,
                "tier_blocks": len(self.tier.storage) if self.tier else 0,
                "tier_damaged": self.tier.storage.num_damaged if self.tier else 0,
                "tokens_prefilled": scheduler.tokens_prefilled,
                "tokens_replayed": scheduler.tokens_replayed,
                "tokens_generated": scheduler.tokens_generated,
                "pages_copied": self.cache.num_pages_copied,
                "pages_evicted": tree.num_evicted_pages,
                "compactions": self.cache.num_compactions,
                "tokens_moved": self.cache.num_tokens_moved,
                "pages_compacted": self.cache.num_pages_compacted,
                "preemptions": scheduler.num_preemptions,
                "steps": self.num_steps,
                "attention_launches": self.num_steps * self.model.config.num_layers,
            }

    # The engine's thread -------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._stopping or not self.scheduler.is_idle or self._may_compact)
                if self._stopping:
                    return
            try:
                self.step()
            except Exception:  # a fault of ours: whoever waits must hear of it, and the next request gets its chance
                log.exception("a step could not be decided or committed")
                with self._lock:
                    self.scheduler.start_over(AkvError("internal_error", "the engine failed on a step"))

    @property
    def _may_compact(self) -> bool:
        return self.cache.is_sparse and self.config.compact_tokens_per_step > 0

    def _compact(self) -> None:
        """One bounded piece of compaction, between two steps."""
        if not self._may_compact:
            return
        found = self.cache.plan_compaction(self.config.compact_tokens_per_step)
        if found is None:
            self.cache.settle()
        else:
            self.cache.compact(found, self.kv.move)

    def step(self) -> bool:
        """Decides one step, runs it and commits it. False where there was nothing to do. A failing step ends the
        requests in it with `internal_error`; the others go on."""
        with self._lock:
            step = self.scheduler.schedule()
            if step is None:
                self._compact()
                return False
        try:
            loaded = self._load(step)
            sampled, scores = self._run(step) if step.chunks else ({}, {})
        except Exception:
            log.exception("a step of %d rows failed", len(step.token_ids))
            with self._lock:
                inside = [load.running for load in step.loads] + [chunk.running for chunk in step.chunks]
                for running in dict.fromkeys(inside):
                    if running in self.scheduler.running:
                        self.scheduler.fail(running, AkvError("internal_error", "the model failed on this step"))
            return True
        self.num_steps += bool(step.chunks)
        with self._lock:
            self.scheduler.commit(step, loaded, sampled, scores)
            self._compact()
        return True

    def _load(self, step: Step) -> list[Array]:
        skip = [load.start % self.config.page_size for load in step.loads]
        assert self.tier is not None or not step.loads
        return [self.tier.load(load.keys, s, load.slots) for load, s in zip(step.loads, skip, strict=True)]  # type: ignore[union-attr]

    @torch.inference_mode()
    def _run(self, step: Step) -> tuple[dict[Running, GeneratedToken], dict[int, Score]]:
        begun = time.perf_counter()
        sequences = [SequencePlan(range(c.start, c.end), c.pages, c.segments) for c in step.chunks]  # type: ignore[arg-type]
        step_input = StepInput(
            torch.from_numpy(step.token_ids),
            torch.from_numpy(step.positions),
            torch.from_numpy(step.write_slots),
            build_plan(sequences, self.model.rotary, self.config.page_size),
            torch.tensor(step.logit_rows, dtype=torch.int64),
        )
        if self._notes_attention(step):
            mass = torch.zeros(len(step_input.plan.page_table), device=self.model.device)
            logits = self.run_eagerly(step_input, mass)
            self._note_attention(step, mass.cpu().numpy())
        else:
            logits = self.forward(step_input)
        results = self._sample(step, logits), self._score(step, logits)
        self._time_prefill(step, begun)
        return results

    def run_eagerly(self, step: StepInput, page_mass: Tensor | None = None) -> Tensor:
        """The logits of a step that lies on the host, float32 [R, vocab_size] on the device; no graph is used."""
        return self.model.forward(step.to(self.model.device), self.kv.k_pages, self.kv.v_pages, page_mass)

    def _notes_attention(self, step: Step) -> bool:
        """Whether it is time again, in a step that only decodes: the mass of a prompt's rows would cost too much."""
        is_decode = all(chunk.running.state is not State.PREFILLING for chunk in step.chunks)
        if not is_decode or not any(chunk.samples and chunk.running.request.attention for chunk in step.chunks):
            return False
        self._unsampled = (self._unsampled + 1) % SAMPLED_EVERY
        return self._unsampled == 0

    def _note_attention(self, step: Step, mass: Array) -> None:
        first = 0
        for chunk in step.chunks:
            end = first + len(chunk.pages)
            if chunk.samples and (attention := chunk.running.request.attention):
                attention.add(mass[first:end], chunk.segments, self.config.page_size)
            first = end

    def _time_prefill(self, step: Step, begun: float) -> None:
        """Tells the tier how fast prefill is: by steps of nothing else, and not by small ones, which take as long."""
        num_rows = len(step.token_ids)
        is_prefill = all(chunk.running.state is State.PREFILLING for chunk in step.chunks)
        if self.tier is not None and is_prefill and num_rows >= self.config.max_step_tokens // 4:
            self.kv.synchronize()
            self.tier.saw_prefill(num_rows, time.perf_counter() - begun)

    def _sample(self, step: Step, logits: Tensor) -> dict[Running, GeneratedToken]:
        place = {row: i for i, row in enumerate(step.logit_rows)}
        chunks = [chunk for chunk in step.chunks if chunk.samples]
        if not chunks:
            return {}
        rows = logits  # as many as sample: those, in their order
        if len(chunks) < len(step.logit_rows):
            rows = logits[[place[c.first_row + c.end - c.start - 1] for c in chunks]]
        for chunk in chunks:
            if chunk.running.carried is None:
                chunk.running.carried = chunk.running.request.sampling.generator()
        params = [chunk.running.request.sampling for chunk in chunks]
        generators = [chunk.running.carried for chunk in chunks]
        admitted = _masked(rows, [chunk.running.request for chunk in chunks])
        ids = sample(admitted, params, generators, self._draw)  # type: ignore[arg-type]
        sampled = {c.running: GeneratedToken(int(token)) for c, token in zip(chunks, ids.tolist(), strict=True)}
        asked = [i for i, c in enumerate(chunks) if c.running.request.num_logprobs is not None]
        if asked:
            most = max(chunks[i].running.request.num_logprobs or 0 for i in asked)
            for i, (logprob, top) in zip(asked, _scores(rows[asked], ids[asked], most), strict=True):
                token = sampled[chunks[i].running]
                token.logprob, token.top = logprob, top[: chunks[i].running.request.num_logprobs]
        return sampled

    def _score(self, step: Step, logits: Tensor) -> dict[int, Score]:
        place = {row: i for i, row in enumerate(step.logit_rows)}
        scores: dict[int, Score] = {}
        for chunk in step.chunks:
            if not chunk.scores:
                continue
            lease = chunk.running.lease
            count = min(chunk.end, lease.num_tokens - 1) - chunk.start  # the last token has none behind it
            rows = [place[chunk.first_row + i] for i in range(count)]
            targets = torch.from_numpy(lease.tokens[chunk.start + 1 : chunk.start + 1 + count].astype(np.int64))
            num_top = chunk.running.request.num_prompt_logprobs or 0
            for i, score in enumerate(_scores(logits[rows], targets, num_top) if rows else ()):
                scores[chunk.first_row + i] = score
        return scores


def _masked(
    logits: Tensor,  # float32 [R, vocab]
    requests: Sequence[Request],  # R of them
) -> Tensor:
    """The logits, without the tokens that a request does not admit. Leaves `logits` alone."""
    held = {row: request.token_mask() for row, request in enumerate(requests) if request.token_mask is not None}
    if not held:
        return logits
    rows, masks = list(held), torch.from_numpy(np.stack(list(held.values()))).to(logits.device)
    masked = logits.clone()
    masked[rows] = masked[rows].masked_fill(~masks, float("-inf"))
    return masked


def _scores(logits: Tensor, token_ids: Tensor, num_top: int) -> list[Score]:
    chosen, ids, top = logprobs(logits, token_ids, num_top)
    pairs = zip(ids.tolist(), top.tolist(), strict=True)
    return [(c, list(zip(i, t, strict=True))) for c, (i, t) in zip(chosen.tolist(), pairs, strict=True)]
