"""Many agents, little memory: real trajectories under a pool of a quarter of their working set answer as they would
with room for everything."""

from __future__ import annotations

import functools
import json
import random

import pytest

from akv_server import loader
from akv_server.batch import Outcome, Request
from akv_server.engine import Engine, EngineConfig
from akv_server.ops import Op
from akv_server.sampler import SamplingParams
from tests.models import tiny_model

SESSIONS, TURNS, TURN_TOKENS = 32, 5, 90
VOCAB = 300


@pytest.fixture(scope="module")
def conversations(shared, default_tokenizer) -> list[list[list[int]]]:
    """Per session its turns: tokens of real observations and replies, each turn cut to a length. Sessions that play the
    same trajectory share its beginning and then part."""
    paths = sorted((shared / "trajectories").glob("*.json"))
    found = []
    for number in range(SESSIONS):
        messages = json.loads(paths[number % len(paths)].read_text())["messages"]
        texts = [m["content"] if isinstance(m["content"], str) else json.dumps(m["content"]) for m in messages]
        skipped = 2 + number // len(paths)
        chosen = [texts[0], *texts[skipped : skipped + TURNS - 1]]
        found.append([[i % VOCAB for i in default_tokenizer.encode(t[:2000])][:TURN_TOKENS] or [1] for t in chosen])
    return found


def play(engine: Engine, conversations: list[list[list[int]]]) -> list[list[int]]:
    """All sessions at once, turn by turn; from the third turn on each drops what it read two turns ago."""
    streams: list[list[int]] = [[] for _ in conversations]
    histories: list[tuple[Op, ...]] = [() for _ in conversations]
    starts: list[list[int]] = [[] for _ in conversations]
    answers: list[list[int]] = [[] for _ in conversations]
    order = random.Random(0)
    for turn in range(TURNS):
        outcomes: dict[int, Outcome] = {}
        for number in order.sample(range(len(conversations)), len(conversations)):
            starts[number].append(len(streams[number]))
            if turn >= 2:
                at, start = len(streams[number]), starts[number][turn - 2]
                histories[number] += (Op("drop", at, start + 5, starts[number][turn - 1], repos=True),)
            streams[number] = streams[number] + conversations[number][turn]
            engine.submit(
                Request(
                    request_id=f"{number}-{turn}",
                    salt="",
                    tokens=streams[number],
                    history=histories[number],
                    sampling=SamplingParams(temperature=0),
                    max_tokens=6,
                    stop_token_ids=frozenset(),
                    on_done=functools.partial(outcomes.__setitem__, number),
                )
            )
        while not engine.scheduler.is_idle:
            engine.step()
        engine.check()
        for number, outcome in outcomes.items():
            assert outcome.error is None
            assert len(outcome.tokens) == 6
            answers[number] += outcome.tokens
            streams[number] = streams[number] + outcome.tokens
    return answers


def test_a_quarter_of_the_working_set_is_enough(tmp_path, conversations):
    model = loader.load(str(tiny_model(tmp_path)), weights="float32").model
    roomy = Engine(model, EngineConfig(num_pages=2000))
    wanted = play(roomy, conversations)
    stats = roomy.stats()
    assert stats["pages_evicted"] == stats["preemptions"] == stats["tokens_replayed"] == 0
    tight = Engine(model, EngineConfig(num_pages=stats["pages_used"] // 4))
    assert play(tight, conversations) == wanted
    stats = tight.stats()
    assert stats["pages_evicted"] > 0
    assert stats["preemptions"] > 0
    tight.evict_all()
    assert tight.stats()["pages_free"] == tight.stats()["pages_total"]
