"""Random sequences of good and bad calls on one server: what is refused changes nothing, the cache holds together after
every call, and in the end every session answers as a fresh server would that was told its history."""

from __future__ import annotations

from random import Random
from typing import Any

import httpx
import pytest

from akv_sdk.types import SessionInfo
from tests.server import Server, load_tiny, serving_model

SESSIONS = ("a", "b", "c")
POOL_TOKENS = 640  # small: sessions push one another out
MAX_STREAM = 240


class Caller:
    """Makes calls at random and remembers what each session's stream must be."""

    def __init__(self, server: Server, client: httpx.Client, rng: Random) -> None:
        self.server, self.client, self.rng = server, client, rng
        self.streams: dict[str, list[int]] = {}
        self.num_refused = 0

    def info(self, name: str) -> SessionInfo | None:
        reply = self.client.get(f"/v1/cache/sessions/{name}")
        if reply.status_code == 404:
            return None
        what_lasts = {"idle_s": 0.0, "resident_tokens": 0, "pages": 0, "fragmentation": 0.0}
        return SessionInfo.model_validate(reply.json()).model_copy(update=what_lasts)

    def call(self, name: str, method: str, route: str, **body: Any) -> dict[str, Any] | None:
        before = self.info(name)
        reply = self.client.request(method, route, json=body or None)
        if reply.status_code == 200:
            return dict(reply.json())
        assert reply.status_code in (400, 404, 409, 503), reply.text
        assert self.info(name) == before, "a refusal changed the session"
        self.num_refused += 1
        return None

    def complete(self, name: str) -> None:
        rng, old = self.rng, self.streams.get(name, [])
        kept = old if rng.random() < 0.7 else old[: rng.randrange(len(old) + 1)]
        prompt = (kept + [3 + rng.randrange(4) for _ in range(rng.randrange(60))])[:MAX_STREAM]
        if rng.random() < 0.1:
            prompt = rng.choice([[], [*prompt, 10**6], prompt + [5] * 3000])
        reply = self.call(
            name, "POST", "/v1/completions", prompt=prompt, max_tokens=rng.randrange(6), temperature=0,
            return_token_ids=True, akv={"session": name, "on_miss": rng.choice(["replay", "replay", "forget"])},
        )  # fmt: skip
        if reply:
            self.streams[name] = prompt + reply["choices"][0]["token_ids"]
            assert reply["akv"]["stream_tokens"] == len(self.streams[name])

    def op(self, name: str) -> None:
        rng, n = self.rng, len(self.streams.get(name, []))
        spans = [sorted((rng.randrange(n + 1), rng.randrange(n + 1))) for _ in range(rng.choice([1, 1, 2]))]
        if rng.random() < 0.15:
            spans[-1] = rng.choice([[n, n + 1], [5, 3], [0, 2**31], [0.0, 1], [-1, 2]])
        repos = rng.choice([True, True, False, "auto"])
        kind = rng.choice(["drop", "drop", "forget", "restore", "repos"])
        if kind == "repos":
            body: dict[str, Any] = {"start": spans[0][0], "end": rng.choice([None, spans[0][1]])}
            self.call(name, "POST", "/v1/cache/repos", session=name, delta=rng.randrange(-20, 21), **body)
        elif kind == "restore":
            self.call(name, "POST", "/v1/cache/restore", session=name, spans=spans, repos=repos)
        else:
            mode = "forget" if kind == "forget" else "mask"
            self.call(name, "POST", "/v1/cache/drop", session=name, spans=spans, repos=repos, mode=mode)

    def step(self) -> None:
        name, what = self.rng.choice(SESSIONS), self.rng.random()
        if what < 0.45:
            self.complete(name)
        elif what < 0.9:
            self.op(name)
        elif what < 0.94:
            copy = self.rng.choice(SESSIONS)
            if self.call(copy, "POST", f"/v1/cache/sessions/{name}/fork", session=copy):
                self.streams[copy] = self.streams[name]
        elif what < 0.97:
            if self.call(name, "DELETE", f"/v1/cache/sessions/{name}"):
                del self.streams[name]
        else:
            self.server.engine.evict_all()
        self.server.engine.check()

    def answer(self, tokens: list[int], **more: Any) -> list[tuple[int, float]]:
        """Greedy tokens with their log-probabilities."""
        ask = {"prompt": tokens, "max_tokens": 4, "temperature": 0, "logprobs": 1, "return_token_ids": True}
        reply = self.client.post("/v1/completions", json={**ask, **more})
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_calls(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    loaded = load_tiny(tmp_path_factory.mktemp("model"))
    with serving_model(loaded, pool_tokens=POOL_TOKENS) as server, server.client() as client:
        caller = Caller(server, client, Random(seed))
        for _ in range(150):
            caller.step()
        assert caller.num_refused > 10
        assert server.engine.stats()["pages_evicted"] > 0
        assert caller.streams
        for name, stream in caller.streams.items():
            info = caller.info(name)
            assert info
            assert info.stream_tokens == len(stream)
            if not info.visible_tokens:
                continue
            ops = [op.model_dump(mode="json") for op in info.ops]
            ours = caller.answer([*stream, 3], akv={"session": name})
            fresh = caller.answer([*stream, 3], akv={"ops": ops}, cache_salt=f"nobody's, {name}")
            for (token, logprob), (other, expected) in zip(ours, fresh, strict=True):
                assert logprob == pytest.approx(expected, abs=1e-3)
                if token != other:
                    break  # a tie within rounding; what follows is another text
        server.engine.check()
