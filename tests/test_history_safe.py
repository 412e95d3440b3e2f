"""Two sessions with the same 4,000 tokens, one with a drop, the other without: never a wrong token, in any order.

The right ids are those of a server that never saw the other session. Where two best logits lie within 1e-3, either is
right.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from akv_server import loader
from akv_server.loader import LoadedModel
from tests.server import Server, load_tiny, serving_model

STREAM, START, END, TAIL, GENERATED = 4000, 1000, 3500, 40, 12
TIE = 1e-3
# The steps of each session keep their order; the two are interleaved in every way.
DROPS, PLAIN = ("feed", "drop", "generate"), ("feed", "generate")
ORDERS = sorted(set(itertools.permutations("DDDPP")))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def small_vocabulary() -> list[int]:
    return tokens(300)


def tokens(num_vocab: int) -> list[int]:
    return random.Random(7).choices(range(10, num_vocab), k=STREAM + TAIL)


class Agent:
    """One session going through its steps."""

    def __init__(self, client: httpx.Client, session: str, prompt: list[int], salt: str) -> None:
        self.client, self.session, self.prompt, self.salt = client, session, prompt, salt
        self.choice: dict[str, Any] = {}

    def do(self, step: str) -> None:
        if step == "feed":
            self._complete(self.prompt[:STREAM], max_tokens=0)
        elif step == "drop":
            self._post("/v1/cache/drop", session=self.session, spans=[[START, END]])
        else:
            self.choice = self._complete(self.prompt, max_tokens=GENERATED, logprobs=2)["choices"][0]

    def _complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        more |= {"temperature": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        akv = {"session": self.session}
        return self._post("/v1/completions", prompt=prompt, ignore_eos=True, cache_salt=self.salt, akv=akv, **more)

    def _post(self, route: str, **body: Any) -> dict[str, Any]:
        reply = self.client.post(route, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


def assert_same(choice: dict[str, Any], right: dict[str, Any]) -> None:
    pairs = zip(choice["token_ids"], right["token_ids"], strict=True)
    for (got, want), best in zip(pairs, right["logprobs"]["top_logprobs"], strict=True):
        if got == want:
            continue
        first, second = sorted(best.values(), reverse=True)[:2]
        assert first - second < TIE
        assert best.get(f"token_id:{got}", -99) > first - TIE
        return  # from here on they are other texts


def right_answers(loaded: LoadedModel, prompt: list[int]) -> dict[str, dict[str, Any]]:
    answers = {}
    for kind, steps in (("D", DROPS), ("P", PLAIN)):
        with serving_model(loaded, pool_tokens=8192) as fresh, fresh.client(timeout=300) as client:
            agent = Agent(client, kind, prompt, "alone")
            for step in steps:
                agent.do(step)
            answers[kind] = agent.choice
    assert answers["D"]["token_ids"] != answers["P"]["token_ids"], "the drop must matter, or the test shows nothing"
    return answers


def run_order(client: httpx.Client, order: tuple[str, ...], prompt: list[int]) -> dict[str, Agent]:
    salt = "".join(order)
    agents = {kind: Agent(client, f"{kind}-{salt}", prompt, salt) for kind in "DP"}
    steps = {"D": iter(DROPS), "P": iter(PLAIN)}
    for kind in order:
        agents[kind].do(next(steps[kind]))
    return agents


@pytest.fixture(scope="module")
def tiny_server(tiny: LoadedModel) -> Iterator[Server]:
    with serving_model(tiny, pool_tokens=16384) as server:
        yield server


@pytest.fixture(scope="module")
def tiny_answers(tiny: LoadedModel, small_vocabulary: list[int]) -> dict[str, dict[str, Any]]:
    return right_answers(tiny, small_vocabulary)


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_every_order(tiny_server, tiny_answers, small_vocabulary, order):
    with tiny_server.client() as client:
        agents = run_order(client, order, small_vocabulary)
    for kind, agent in agents.items():
        assert_same(agent.choice, tiny_answers[kind])
    tiny_server.engine.check()


def test_eight_at_once(tiny_server, tiny_answers, small_vocabulary):
    def run(number: int) -> tuple[str, Agent]:
        kind = "DP"[number % 2]
        with tiny_server.client(timeout=300) as client:
            agent = Agent(client, f"{kind}-at-once-{number}", small_vocabulary, "at once")
            for step in DROPS if kind == "D" else PLAIN:
                agent.do(step)
        return kind, agent

    before = tiny_server.engine.stats()
    with ThreadPoolExecutor(8) as pool:
        for kind, agent in pool.map(run, range(8)):
            assert_same(agent.choice, tiny_answers[kind])
    tiny_server.engine.check()
    prefilled = tiny_server.engine.stats()["tokens_prefilled"] - before["tokens_prefilled"]
    assert prefilled <= STREAM + 2 * (TAIL + GENERATED) + 8 * 16, "eight sessions of one text must compute it once"


@pytest.mark.timeout(900)
def test_on_the_default_model():
    loaded = loader.load("default", weights="float32")
    prompt = tokens(40_000)
    answers = right_answers(loaded, prompt)
    with serving_model(loaded, pool_tokens=8192) as server, server.client(timeout=300) as client:
        for order in (("P", "D", "D", "P", "D"), ("D", "P", "D", "D", "P")):
            for kind, agent in run_order(client, order, prompt).items():
                assert_same(agent.choice, answers[kind])
        server.engine.check()
