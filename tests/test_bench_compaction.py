"""What `make bench` says of compaction holds on a tiny model: on a rolling drop it acts, and changes no token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from akv_server import loader
from akv_server.engine import Engine, EngineConfig
from tests.models import tiny_model
from tests.perf import bench

VOCAB = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("models"), max_position_embeddings=16384)
    return loader.load(str(path), weights="float32").model


@pytest.fixture(params=["recorded", "synthetic"])
def turns(request):
    if request.param == "synthetic":
        found = bench.synthetic_agent()
    else:
        request.getfixturevalue("shared")
        found = bench.recorded_agent()
    return [replace(turn, tokens=[token % VOCAB for token in turn.tokens]) for turn in found]


def test_a_rolling_drop_passes_the_trigger_and_is_compacted(model, turns):
    agents, pages, stats = [], [], []
    for tokens_per_step in (0, 256):
        engine = Engine(model, EngineConfig(num_pages=768, compact_tokens_per_step=tokens_per_step))
        agents.append(bench.rolling_drop(engine, turns))
        pages.append(engine.residency("rolling", agents[-1].tokens, agents[-1].timeline)[1])
        stats.append(engine.stats())
        engine.check()
    visible = agents[0].timeline.layout_at(len(agents[0].tokens)).num_visible
    assert 1 - visible / (16 * pages[0]) > 0.4
    assert stats[0]["tokens_moved"] == 0 < stats[1]["tokens_moved"]
    assert stats[1]["tokens_moved"] <= 256 * stats[1]["compactions"]
    assert visible / 16 <= pages[1] < 0.75 * pages[0]
    assert [agent.written for agent in agents] == [agents[0].written] * 2
    assert stats[1]["tokens_replayed"] == stats[1]["preemptions"] == 0
