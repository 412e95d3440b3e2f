"""Metrics: the text is what Prometheus reads, every counter is in it, and each counts what it says."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from akv_sdk.types import CacheStats
from akv_server import metrics
from akv_server.batch import Outcome
from akv_server.engine import Engine, EngineConfig
from akv_server.loader import LoadedModel
from akv_server.metrics import Histogram, RequestMetrics, Watch, exposition
from tests import test_tier as tier
from tests.server import Server, serving_model

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')
Families = dict[str, tuple[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]]


def parse(text: str) -> Families:
    """Reads the text format strictly: help and type before samples, each family once and together, no sample twice, and
    histograms that add up."""
    families: Families = {}
    assert text.endswith("\n")
    name, has_help = "", False
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, about = line.removeprefix("# HELP ").split(" ", 1)
            assert name not in families
            assert about
            has_help = True
        elif line.startswith("# TYPE "):
            typed, kind = line.removeprefix("# TYPE ").split(" ")
            assert has_help and typed == name
            assert kind in ("counter", "gauge", "histogram")
            assert name.endswith("_total") == (kind == "counter")
            families[name], has_help = (kind, {}), False
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            suffix = found[1].removeprefix(name)
            kind, samples = families[name]
            assert suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",)), line
            pairs = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', found[2])
            labels = tuple(
                (key, re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), value)) for key, value in pairs
            )
            assert (suffix, labels) not in samples
            samples[suffix, labels] = float(found[3])
    for kind, samples in families.values():
        assert samples
        if kind == "histogram":
            buckets = [(dict(labels)["le"], n) for (suffix, labels), n in samples.items() if suffix == "_bucket"]
            bounds, counts = [float(bound) for bound, _ in buckets], [n for _, n in buckets]
            assert bounds == sorted(set(bounds))
            assert bounds[-1] == math.inf
            assert counts == sorted(counts)
            assert counts[-1] == next(n for (suffix, _), n in samples.items() if suffix == "_count")
    return families


def value(families: Families, name: str, suffix: str = "", **labels: str) -> float:
    (found,) = (
        n for (end, pairs), n in families[f"akv_{name}"][1].items()
        if end == suffix and labels.items() <= dict(pairs).items()
    )  # fmt: skip
    return found


def stats(**fields: Any) -> CacheStats:
    filled = {name: i + 1 for i, name in enumerate(CacheStats.model_fields)}
    return CacheStats(**{**filled, "fragmentation": list(range(10)), **fields})


# The text ------------------------------------------------------------------------------------------------------------


def test_every_counter_is_shown_once() -> None:
    """Each field of the statistics, alone, moves a sample of the text; the model's name may be anything."""
    model = 'a "quoted" \\ name\nof two lines'
    base = parse(exposition(stats(), RequestMetrics(), model))
    assert {dict(labels)["model_name"] for _, samples in base.values() for _, labels in samples} == {model}
    for name in CacheStats.model_fields:
        changed = stats(**{name: [7] * 10 if name == "fragmentation" else 1000})
        assert parse(exposition(changed, RequestMetrics(), model)) != base, name


def test_what_vllm_has_too_has_its_name() -> None:
    families = parse(exposition(stats(), RequestMetrics(), "m"))
    for name, kind in {
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "kv_cache_usage_perc": "gauge",
        "prefix_cache_queries_total": "counter",
        "prefix_cache_hits_total": "counter",
        "external_prefix_cache_hits_total": "counter",
        "num_preemptions_total": "counter",
        "prompt_tokens_total": "counter",
        "generation_tokens_total": "counter",
        "request_success_total": "counter",
        "request_prompt_tokens": "histogram",
        "request_generation_tokens": "histogram",
        "time_to_first_token_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "request_time_per_output_token_seconds": "histogram",
        "e2e_request_latency_seconds": "histogram",
    }.items():
        assert families[f"akv_{name}"][0] == kind


def test_a_histogram_counts_as_numpy_does() -> None:
    rng = Random(1)
    bounds = (0.5, 1, 2.5, 10)
    values = [*(rng.uniform(0, 20) for _ in range(500)), *bounds, 0.0]
    histogram = Histogram(bounds)
    for one in values:
        histogram.observe(one)
    samples = list(histogram.samples())
    assert [n for suffix, _, n in samples if suffix == "_bucket"] == [
        *((np.array(values) <= bound).sum() for bound in bounds),
        len(values),
    ]
    assert [n for suffix, _, n in samples if suffix != "_bucket"] == pytest.approx([sum(values), len(values)])


def test_requests_are_timed_from_their_arrival() -> None:
    times = iter([2.0, 2.1, 2.3, 3.0, 3.0])
    requests = RequestMetrics(clock=lambda: next(times))
    watch = Watch(requests, 0.0)
    for _ in range(3):
        watch.on_token()
    watch.on_done(Outcome("length", None, [1, 2, 3], 10, 20, 5, []))
    Watch(requests, 1.0).on_done(Outcome("abort", None, [], 0, 0, 0, []))
    families = parse(exposition(stats(), requests, "m"))
    for name, total, count in [
        ("time_to_first_token_seconds", 2.0, 1),
        ("inter_token_latency_seconds", 0.3, 2),
        ("request_time_per_output_token_seconds", 0.15, 1),
        ("e2e_request_latency_seconds", 5.0, 2),
        ("request_prompt_tokens", 35, 2),
        ("request_generation_tokens", 3, 2),
    ]:
        assert value(families, name, "_sum") == pytest.approx(total)
        assert value(families, name, "_count") == count
    finished = {
        reason: value(families, "request_success_total", finished_reason=reason) for reason in metrics.FINISH_REASONS
    }
    assert finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    assert value(families, "prompt_tokens_total") == 35


# A server's ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving_model(loaded, pool_tokens=640) as server:
        yield server


def complete(client: httpx.Client, prompt: list[int], session: str | None = None, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    reply = client.post("/v1/completions", json=body | ({"akv": {"session": session}} if session else {}))
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def read(client: httpx.Client) -> tuple[CacheStats, Families]:
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return CacheStats.model_validate(client.get("/v1/cache/stats").json()), parse(reply.text)


def wait_for_idle(server: Server) -> None:
    """Until the last tokens are computed, which clients do not wait for."""
    while server.engine.stats()["running"]:
        time.sleep(0.005)


def source(families: Families, name: str) -> float:
    return value(families, "prompt_tokens_by_source_total", source=name)


def test_hits_say_who_had_computed_it(server: Server) -> None:
    prompt = list(range(10, 74))
    with server.client() as client:
        first = complete(client, prompt, "a")
        stream = prompt + first["choices"][0]["token_ids"]
        complete(client, [*stream, 5], "a")  # 68 tokens of its own
        complete(client, [*prompt, 7], "b")  # 64 of another's
        complete(client, [*prompt, 8])  # nobody's: shared, too
        wait_for_idle(server)
        server.engine.evict_all()
        complete(client, [*prompt, 7, 9], "b", max_tokens=1)  # 65 again, 1 new
        now, families = read(client)
        names = ("session", "shared", "computed", "replayed")
        assert [source(families, name) for name in names] == [68, 128, 64 + 1 + 1 + 1 + 1, 65]
        assert value(families, "prefix_cache_hits_total") == 196 == now.tokens_cached
        assert (
            value(families, "prefix_cache_queries_total")
            == value(families, "prompt_tokens_total")
            == 64 + 69 + 65 + 65 + 66
        )
        assert value(families, "generation_tokens_total") == 17
        assert value(families, "request_success_total", finished_reason="length") == 5
        assert value(families, "time_to_first_token_seconds", "_count") == 5
        assert value(families, "inter_token_latency_seconds", "_count") == 4 * 3
        assert value(families, "sessions") == 2


def test_what_is_computed_again_after_a_preemption_is_replayed_and_no_prompt(loaded: LoadedModel) -> None:
    """And the help of the families that count it says so."""
    engine = Engine(loaded.model, EngineConfig(10, max_step_tokens=64))
    clients = [tier.Client(tier.some_tokens(60, seed=seed), max_tokens=40) for seed in range(3)]
    tier.run(engine, *clients)
    requests = RequestMetrics()
    for client in clients:
        assert client.outcome
        Watch(requests, 0).on_done(client.outcome)
    text = exposition(stats(**engine.stats()), requests, "m")
    families = parse(text)
    assert value(families, "num_preemptions_total") > 0
    assert value(families, "prompt_tokens_total") == source(families, "computed") == 3 * 60
    replayed = source(families, "replayed")
    assert replayed > 60, "a prompt, and what had been generated behind it"
    queries = sum(source(families, name) for name in ("session", "shared", "tier", "computed", "replayed"))
    assert value(families, "prefix_cache_queries_total") == queries == 3 * 60 + replayed
    for name in ("prefix_cache_queries_total", "prompt_tokens_by_source_total"):
        about = re.search(f"# HELP akv_{name} (.*)", text)
        assert about
        assert "again after a preemption" in about[1]
        assert "prompts and generated tokens" in about[1]


def test_what_the_host_tier_has_is_a_hit_of_its_own(loaded: LoadedModel) -> None:
    """300 tokens, 100 of them invisible by now: what is seen comes back from the tier but for the last half page."""
    engine = tier.always_loading(Engine(loaded.model, EngineConfig(24, max_step_tokens=64, host_bytes=2**22)))
    try:
        tier.run(engine, tier.Client(tier.TOKENS, tier.HISTORY, max_tokens=4))
        tier.again(engine)
        counts = engine.stats()
        names = ("session", "shared", "tier")
        assert [counts[f"tokens_cached_{name}"] for name in names] == [0, 0, 288]
        assert (counts["tokens_cached"], counts["tokens_loaded"]) == (288, 188)
        tier.run(engine, tier.Client(tier.TOKENS, tier.HISTORY, max_tokens=4))
        counts = engine.stats()
        assert [counts[f"tokens_cached_{name}"] for name in names] == [0, 200, 288 + 100], "the invisible stayed there"
    finally:
        engine.stop()


def test_a_forgotten_span_is_nobodys_hit(server: Server) -> None:
    prompt = list(range(10, 74))
    with server.client() as client:
        complete(client, prompt, "a", max_tokens=1)
        body = {"session": "a", "spans": [[20, 40]], "mode": "forget"}
        assert client.post("/v1/cache/drop", json=body).json()["changed"] == 20
        complete(client, prompt, "a", max_tokens=1)
        now, _ = read(client)
        assert now.tokens_cached_session + now.tokens_cached_shared == now.tokens_cached == 20
        assert now.tokens_cached_shared == 0


def test_the_pages_add_up(server: Server) -> None:
    """Two sessions share a prefix of two whole pages."""
    rng = Random(2)
    prompt = [rng.randrange(10, 300) for _ in range(32)]
    with server.client() as client:
        for name in "ab":
            complete(client, [*prompt, *(rng.randrange(10, 300) for _ in range(60))], name)
        wait_for_idle(server)
        now, families = read(client)
        assert now.pages_free + now.pages_used == now.pages_total == 40
        assert now.pages_shared == 2
        assert now.pages_evictable == now.pages_used
        assert value(families, "kv_cache_usage_perc") == 0
        assert now.fragmentation == [2, *[0] * 9]
        server.engine.check()


def test_sparse_histories_are_counted_by_how_sparse_they_are(loaded: LoadedModel) -> None:
    with serving_model(loaded, pool_tokens=640) as server, server.client() as client:
        object.__setattr__(server.engine.config, "compact_tokens_per_step", 0)  # else they would not stay so
        prompt = list(range(10, 106))
        answered = complete(client, prompt, "a", max_tokens=1)["choices"][0]["token_ids"]
        body = {"session": "a", "spans": [[16 * i + 2, 16 * i + 16] for i in range(5)], "repos": True}
        assert client.post("/v1/cache/drop", json=body).json()["visible_tokens"] == 27
        complete(client, prompt + answered, "a", max_tokens=0)
        complete(client, [*prompt, *answered, 5], "a", max_tokens=0)
        wait_for_idle(server)
        now, families = read(client)
        assert sum(now.fragmentation) == 1
        expected = 1 - 28 / (7 * 16)  # 2 of 16 in each of five pages, the sixth, and 2 in the last
        (tenth,) = (i for i, n in enumerate(now.fragmentation) if n)
        assert tenth == int(10 * expected)
        assert value(families, "histories_by_fragmentation", fragmentation="0.7-0.8") == 1
        server.engine.check()
