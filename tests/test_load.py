"""Load: 64 sessions at once with random lengths, drops, restores, forks and disconnects against `akv serve` as a
process, and a few requests that must be refused.

A short form runs with the tests; `make soak` (AKV_SOAK=1) runs ten minutes and holds memory to be flat.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

import akv_sdk
from tests.models import tiny_model
from tests.server import akv_serve

SESSIONS = 64
IS_SOAK = os.environ.get("AKV_SOAK") == "1"
DURATION_S = 600.0 if IS_SOAK else 12.0
WINDOW, POOL_TOKENS = 2048, 16384
LEAVES, FORKS, DROPS, RESTORES, ERRS, ENDS = 0.15, 0.05, 0.4, 0.2, 0.1, 0.1


class Agent:
    """One session after the other until the time is up. Every error ends the test, but those that it provokes."""

    def __init__(self, client: akv_sdk.AsyncClient, seed: int, happened: Counter[str]) -> None:
        self.client, self.random, self.happened = client, random.Random(seed), happened

    async def run(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            session = self.client.session()
            session.system("You are an agent.")
            await self._converse(session, end_s)
            await session.delete()
            self.happened["sessions"] += 1

    async def _converse(self, session: akv_sdk.AsyncSession, end_s: float) -> None:
        seen: list[str] = []
        gone: list[str] = []
        for _ in range(self.random.randrange(2, 16)):
            seen.append(session.observe("x = 1\n" * self.random.randrange(1, 40), tool="bash"))
            if self.random.random() < LEAVES:
                await self._leave(session)
            await self._answer(session, seen, gone)
            if seen and self.random.random() < DROPS:
                gone.append(seen.pop(self.random.randrange(len(seen))))
                layout = await session.drop(blocks=gone[-1:], mode=self.random.choice(["mask", "mask", "forget"]))
                assert layout.changed > 0
                self.happened["drops"] += 1
                if any(op.mode == "forget" for op in layout.ops):
                    gone.clear()  # what is forgotten does not come back
            if gone and self.random.random() < RESTORES:
                await session.restore(blocks=[gone.pop()])
                self.happened["restores"] += 1
            if self.random.random() < FORKS:
                fork = await session.fork()
                fork.user("And?")
                await self._answer(fork, list(seen), [])
                await fork.delete()
                self.happened["forks"] += 1
            if self.random.random() < ERRS:
                await self._err(session)
            if self.random.random() < ENDS or time.monotonic() > end_s:
                return

    async def _answer(self, session: akv_sdk.AsyncSession, seen: list[str], gone: list[str]) -> None:
        """An answer of some length; a session that outgrew the window is refused, and goes on once all is dropped."""
        params = {"max_tokens": self.random.randrange(1, 20), "temperature": 1.0}
        try:
            await session.complete(**params)
        except akv_sdk.ContextLengthExceeded:
            self.happened["too long"] += 1
            old = [block for block in seen if any(b.id == block for span in session.spans for b in span.blocks)]
            await session.drop(blocks=old)
            del seen[: len(old)]
            gone.clear()
            await session.complete(**params)
        self.happened["answers"] += 1

    async def _leave(self, session: akv_sdk.AsyncSession) -> None:
        """The client disconnects in the middle of an answer, streamed or not."""
        try:
            if self.random.random() < 0.5:
                stream = session.stream(max_tokens=400, temperature=1.0, ignore_eos=True)
                async for _ in stream:
                    break
                await stream.aclose()
            else:
                whole = session.complete(max_tokens=400, temperature=1.0, ignore_eos=True)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(whole, timeout=self.random.uniform(0.0, 0.1))
        except akv_sdk.ContextLengthExceeded:
            return
        self.happened["left"] += 1

    async def _err(self, session: akv_sdk.AsyncSession) -> None:
        """Requests that are refused and change nothing."""
        before = (await session.info()).stream_tokens
        with pytest.raises(akv_sdk.SpanOutOfRange):
            await session.drop(spans=[(0, before + 1)])
        with pytest.raises(akv_sdk.SessionNotFound):
            await self.client.drop("nobody's", spans=[(0, 1)])
        with pytest.raises(akv_sdk.ContextLengthExceeded):
            await self.client.completions(prompt=[5] * (WINDOW + 1), max_tokens=1)
        assert (await session.info()).stream_tokens == before
        self.happened["refused"] += 1


async def fill_the_pool(client: akv_sdk.AsyncClient) -> None:
    """Eight sequences that together take nearly all pages at once: there is room for them, or pages were lost."""
    before = await client.stats()
    prompts = [[5 + i] * 2000 for i in range(POOL_TOKENS // WINDOW)]
    asked = (client.completions(prompt=p, max_tokens=16, temperature=0, ignore_eos=True) for p in prompts)
    replies = await asyncio.gather(*asked)
    assert [reply.akv.prefilled_tokens for reply in replies] == [2000] * len(prompts)
    after = await client.stats()
    assert after.preemptions == before.preemptions
    assert after.tokens_replayed == before.tokens_replayed


def resident_kb(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.timeout(DURATION_S + 180)
def test_load(tmp_path):
    happened: Counter[str] = Counter()
    memory: list[tuple[float, int]] = []

    async def run(url: str, pid: int) -> None:
        start = time.monotonic()

        async def watch() -> None:
            while True:
                memory.append((time.monotonic() - start, resident_kb(pid)))
                await asyncio.sleep(1)

        watcher = asyncio.create_task(watch())
        limits = httpx.Limits(max_connections=SESSIONS)
        async with akv_sdk.AsyncClient(url, transport=httpx.AsyncHTTPTransport(limits=limits)) as client:
            agents = (Agent(client, seed, happened).run(start + DURATION_S) for seed in range(SESSIONS))
            await asyncio.gather(*agents)
            watcher.cancel()
            for _ in range(500):
                stats = await client.stats()
                if not stats.running and not stats.waiting:
                    break
                await asyncio.sleep(0.02)
            assert (stats.running, stats.waiting, stats.sessions) == (0, 0, 0)
            assert stats.pages_free + stats.pages_used == stats.pages_total == POOL_TOKENS // stats.page_size
            assert stats.pages_evictable == stats.pages_used
            await fill_the_pool(client)
        metrics = httpx.get(f"{url}/metrics").text
        found = re.findall(r'request_success_total{.*finished_reason="(\w+)".*} (\S+)', metrics)
        ended = {reason: float(count) for reason, count in found}
        assert ended["error"] == 0, "no request failed on the server, not even one that was tried again"
        assert ended["abort"] > 0

    options = ("--model", str(tiny_model(tmp_path)), "--weights", "float32", "--pool-tokens", str(POOL_TOKENS))
    with akv_serve(*options) as (url, pid):
        asyncio.run(run(url, pid))
    wanted = ("answers", "drops", "restores", "forks", "left", "refused")
    assert min(happened[what] for what in wanted) > 0, happened
    assert happened["answers"] > 2 * SESSIONS
    if IS_SOAK:

        def minute(number: int) -> float:
            return statistics.mean(kb for t, kb in memory if 60 * (number - 1) <= t < 60 * number)

        assert minute(10) <= 1.03 * minute(3), f"{minute(3):.0f} kB in the third minute, {minute(10):.0f} in the last"
