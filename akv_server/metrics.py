"""What the server counts and times, in Prometheus' text format.

Owns the names and meanings of all metrics, and the numbers of requests (how each ended, how long it took). What the
cache and the engine count comes in as `akv_sdk.types.CacheStats`. Where vLLM has the same thing, it has vLLM's name
with the prefix `akv_`. Knows neither HTTP nor the engine.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from akv_sdk.types import CacheStats
from akv_server.batch import Outcome

FINISH_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 400)
_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600, 1800)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float]  # suffix of the name, labels, value


class Histogram:
    """How many observations were at most each of `bounds`. Not thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[Sample]:
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield "_bucket", {"le": bound}, total
        yield "_sum", {}, self._sum
        yield "_count", {}, total


class RequestMetrics:
    """Counts and times of all requests since start-up; a completion of n choices is n requests. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.num_prompt_tokens = 0
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.between_tokens = Histogram(_TOKEN_S)
        self.per_token = Histogram(_TOKEN_S)
        self.whole = Histogram(_REQUEST_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generated_tokens = Histogram(_TOKENS)
        self.lock = threading.Lock()

    def families(self) -> Iterator[Family]:
        with self.lock:
            finished = [("", {"finished_reason": reason}, float(n)) for reason, n in self.finished.items()]
            yield "request_success_total", "counter", "Requests that ended, by how they did.", finished
            for name, about, histogram in (
                ("time_to_first_token_seconds", "From a request's arrival to its first token.", self.first_token),
                ("inter_token_latency_seconds", "From one token to the next.", self.between_tokens),
                (
                    "request_time_per_output_token_seconds",
                    "Mean time between the tokens of one request.",
                    self.per_token,
                ),
                ("e2e_request_latency_seconds", "From a request's arrival to its end.", self.whole),
                ("request_prompt_tokens", "Tokens of a request's prompt.", self.prompt_tokens),
                ("request_generation_tokens", "Tokens generated for a request.", self.generated_tokens),
            ):
                yield name, "histogram", about, list(histogram.samples())
            yield _single("prompt_tokens_total", "counter", "Prompt tokens, cached or not.", self.num_prompt_tokens)


class Watch:
    """Times one request that arrived at `arrived_s` of the metrics' clock."""

    def __init__(self, metrics: RequestMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = self._last_s = self._first_s = arrived_s
        self._num_tokens = 0

    def on_token(self) -> None:
        metrics, now = self._metrics, self._metrics.clock()
        with metrics.lock:
            if self._num_tokens:
                metrics.between_tokens.observe(now - self._last_s)
            else:
                metrics.first_token.observe(now - self._arrived_s)
                self._first_s = now
        self._last_s = now
        self._num_tokens += 1

    def on_done(self, outcome: Outcome) -> None:
        metrics, now = self._metrics, self._metrics.clock()
        num_prompt = outcome.cached_tokens + outcome.prefilled_tokens + outcome.replayed_tokens + outcome.absent_tokens
        with metrics.lock:
            metrics.finished[outcome.finish_reason] += 1
            metrics.whole.observe(now - self._arrived_s)
            metrics.num_prompt_tokens += num_prompt
            metrics.prompt_tokens.observe(num_prompt)
            metrics.generated_tokens.observe(self._num_tokens)
            if self._num_tokens > 1:
                metrics.per_token.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


Family = tuple[str, str, str, Sequence[Sample]]  # name, type, meaning, samples

# field of CacheStats: name, type, meaning. Fields that end up in a family of several samples stand in `_of_stats`.
_PLAIN: dict[str, tuple[str, str, str]] = {
    "page_size": ("page_size_tokens", "gauge", "Tokens of one page."),
    "pages_total": ("pages", "gauge", "Pages of the pool."),
    "pages_free": ("pages_free", "gauge", "Pages that nobody holds."),
    "pages_used": ("pages_used", "gauge", "Pages that a running request or the tree holds."),
    "pages_shared": ("pages_shared", "gauge", "Used pages that several histories see or hold."),
    "pages_evictable": ("pages_evictable", "gauge", "Used pages that only the tree holds."),
    "pages_dead": ("pages_dead", "gauge", "Evictable pages that no history sees."),
    "tree_edges": ("tree_edges", "gauge", "Edges of the radix tree."),
    "sessions": ("sessions", "gauge", "Sessions that the server knows."),
    "sessions_expired": ("sessions_expired_total", "counter", "Sessions forgotten because idle or too many."),
    "running": ("num_requests_running", "gauge", "Requests that are being computed."),
    "waiting": ("num_requests_waiting", "gauge", "Requests that wait for room."),
    "tokens_cached": ("prefix_cache_hits_total", "counter", "Prompt tokens that were found in the cache."),
    "tokens_cached_tier": ("external_prefix_cache_hits_total", "counter", "Of these, found in the host tier."),
    "tokens_loaded": ("tier_loaded_tokens_total", "counter", "Tokens brought back from the host tier."),
    "tokens_stored": ("tier_stored_tokens_total", "counter", "Tokens written to the host tier."),
    "tier_blocks": ("tier_blocks", "gauge", "Blocks of one page each in the host tier."),
    "tier_damaged": ("tier_damaged_total", "counter", "Blocks of the host tier that failed their checksum."),
    "tokens_prefilled": ("tokens_prefilled_total", "counter", "Prompt tokens computed for the first time."),
    "tokens_replayed": ("tokens_replayed_total", "counter", "Tokens computed again because their KV was lost."),
    "tokens_generated": ("generation_tokens_total", "counter", "Tokens generated."),
    "pages_copied": ("pages_copied_total", "counter", "Pages copied because two wrote behind one prefix."),
    "pages_evicted": ("pages_evicted_total", "counter", "Pages evicted."),
    "compactions": ("compactions_total", "counter", "Pieces of compaction done."),
    "tokens_moved": ("tokens_moved_total", "counter", "Tokens moved by compaction."),
    "pages_compacted": ("pages_compacted_total", "counter", "Pages saved by compaction."),
    "preemptions": ("num_preemptions_total", "counter", "Running requests whose pages were taken away."),
    "steps": ("steps_total", "counter", "Forward passes."),
    "attention_launches": ("attention_launches_total", "counter", "Attention kernels launched."),
}


_ABOUT_QUERIES = (
    "Tokens found in the cache or computed to go on from: those of prompts, but for what is gone and nobody sees, and, "
    "once more, prompts and generated tokens that are computed again after a preemption."
)
_ABOUT_SOURCES = (
    "The tokens of akv_prefix_cache_queries_total by where they came from: computed by this session before, shared "
    "with another, in the host tier, computed for the first time, or replayed. What is computed again after a "
    "preemption, prompts and generated tokens, is replayed, so the sources need not add up to "
    "akv_prompt_tokens_total."
)


def exposition(stats: CacheStats, requests: RequestMetrics, model: str) -> str:
    """The text that `GET /metrics` answers: every family with its help and type, every sample with the model's name."""
    lines: list[str] = []
    for name, kind, about, samples in (*_of_stats(stats), *requests.families()):
        lines += [f"# HELP akv_{name} {about}", f"# TYPE akv_{name} {kind}"]
        lines += [_line(f"akv_{name}{suffix}", {"model_name": model, **labels}, v) for suffix, labels, v in samples]
    return "\n".join(lines) + "\n"


def _of_stats(stats: CacheStats) -> Iterator[Family]:
    for field, (name, kind, about) in _PLAIN.items():
        yield _single(name, kind, about, getattr(stats, field))
    in_use = (stats.pages_used - stats.pages_evictable) / stats.pages_total
    yield _single("kv_cache_usage_perc", "gauge", "Part of the pages that running requests hold, 0 to 1.", in_use)
    queries = stats.tokens_cached + stats.tokens_prefilled + stats.tokens_replayed
    yield _single("prefix_cache_queries_total", "counter", _ABOUT_QUERIES, queries)
    sources = {
        "session": stats.tokens_cached_session,
        "shared": stats.tokens_cached_shared,
        "tier": stats.tokens_cached_tier,
        "computed": stats.tokens_prefilled,
        "replayed": stats.tokens_replayed,
    }
    yield (
        "prompt_tokens_by_source_total",
        "counter",
        _ABOUT_SOURCES,
        _labelled("source", sources.items()),
    )
    tenths = ((f"{i / 10:.1f}-{(i + 1) / 10:.1f}", n) for i, n in enumerate(stats.fragmentation))
    yield (
        "histories_by_fragmentation",
        "gauge",
        "Histories at rest in the tree, by the part of their pages' slots that they do not see.",
        _labelled("fragmentation", tenths),
    )


def _single(name: str, kind: str, about: str, value: float) -> Family:
    return name, kind, about, [("", {}, value)]


def _labelled(label: str, values: Iterable[tuple[str, float]]) -> list[Sample]:
    return [("", {label: text}, value) for text, value in values]


def _line(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
