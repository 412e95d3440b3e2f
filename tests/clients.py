"""Requests to an engine on a tiny model, what comes of them, and whether that is right."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from akv_server.batch import GeneratedToken, Outcome, Request
from akv_server.engine import Engine
from akv_server.ops import Op, Timeline
from akv_server.sampler import SamplingParams
from tests.truth import Truth

GREEDY = SamplingParams(temperature=0)
VOCAB = 300


@dataclass
class Client:
    """A request and what came of it."""

    tokens: list[int]
    history: tuple[Op, ...] = ()
    max_tokens: int = 0
    salt: str = ""
    score: int | None = None
    known: int = 0
    sampling: SamplingParams = GREEDY
    timeline: Timeline | None = None
    generated: list[GeneratedToken] = field(default_factory=list)
    outcome: Outcome | None = None

    def request(self) -> Request:
        return Request(
            request_id=str(id(self)),
            salt=self.salt,
            tokens=list(self.tokens),
            history=self.history,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop_token_ids=frozenset(),
            on_token=self._on_token,
            on_done=self._on_done,
            num_logprobs=3,
            num_prompt_logprobs=self.score,
            num_known=self.known,
            timeline=self.timeline,
        )

    def _on_token(self, token):
        self.generated.append(token)

    def _on_done(self, outcome):
        assert self.outcome is None
        self.outcome = outcome

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.generated]


def run(engine: Engine, *clients: Client) -> Client:
    for client in clients:
        engine.submit(client.request())
    finish(engine)
    assert all(client.outcome is not None for client in clients)
    return clients[-1]


def finish(engine: Engine) -> None:
    for _ in range(10_000):
        if engine.scheduler.is_idle:
            return
        engine.step()
        engine.check()
    raise AssertionError("the engine does not come to an end")


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def drop(start, end, at, **more):
    return Op("drop", at, start, end, repos=True, **more)


def assert_right(client: Client, truth: Truth) -> None:
    """Every generated token is the truth's best (or within 1e-3 of it), with the truth's log-probability."""
    tokens = client.tokens + client.ids
    logprobs = truth.logits(tokens, client.history).log_softmax(-1)
    for i, token in enumerate(client.generated):
        row = logprobs[len(client.tokens) + i - 1]
        assert row[token.token_id] >= row.max() - 1e-3
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=2e-4)


def idle(engine: Engine) -> None:
    """What an engine does when nobody asks for anything."""
    while engine._may_compact:
        engine._compact()
        engine.check()
