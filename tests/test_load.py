"""Load: 64 sessions at once with random lengths, drops, forks and disconnects against `akv serve` as a process.

A short form runs with the tests; `make soak` (AKV_SOAK=1) runs ten minutes and holds memory to be flat.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import time
from pathlib import Path

import httpx
import pytest

import akv_sdk
from tests.models import tiny_model
from tests.server import akv_serve

SESSIONS = 64
IS_SOAK = os.environ.get("AKV_SOAK") == "1"
DURATION_S = 600.0 if IS_SOAK else 12.0
LEAVES, FORKS, DROPS, ENDS = 0.1, 0.05, 0.4, 0.1


async def agent(client: akv_sdk.AsyncClient, random_: random.Random, end_s: float, counts: dict[str, int]) -> None:
    """One agent after the other, until the time is up. Every error ends the test, but those that it provokes."""
    while time.monotonic() < end_s:
        session = client.session()
        session.system("You are an agent.")
        blocks: list[str] = []
        for _ in range(random_.randrange(2, 12)):
            blocks.append(session.observe("x = 1\n" * random_.randrange(1, 40), tool="bash"))
            if random_.random() < LEAVES:
                stream = session.stream(max_tokens=400, temperature=1.0)
                async for _ in stream:
                    break
                await stream.aclose()
                counts["left"] += 1
                break
            await session.complete(max_tokens=random_.randrange(1, 20), temperature=1.0)
            counts["answers"] += 1
            if random_.random() < DROPS:
                await session.drop(blocks=[blocks.pop(random_.randrange(len(blocks)))])
                counts["drops"] += 1
            if random_.random() < FORKS:
                fork = await session.fork()
                await fork.complete(max_tokens=3)
                await fork.delete()
                counts["forks"] += 1
            if random_.random() < ENDS or time.monotonic() > end_s:
                break
        await session.delete()


def resident_kb(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.timeout(DURATION_S + 120)
def test_load(tmp_path):
    counts = dict.fromkeys(("answers", "drops", "forks", "left"), 0)
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
            agents = (agent(client, random.Random(i), start + DURATION_S, counts) for i in range(SESSIONS))
            await asyncio.gather(*agents)
            watcher.cancel()
            for _ in range(500):
                stats = await client.stats()
                if not stats.running and not stats.waiting:
                    break
                await asyncio.sleep(0.02)
        assert (stats.running, stats.waiting, stats.sessions) == (0, 0, 0)
        assert stats.pages_free + stats.pages_used == stats.pages_total
        assert stats.pages_evictable == stats.pages_used

    with akv_serve("--model", str(tiny_model(tmp_path)), "--weights", "float32", "--pool-tokens", "16384") as (
        url,
        pid,
    ):
        asyncio.run(run(url, pid))
    assert min(counts.values()) > 0, counts
    assert counts["answers"] > 2 * SESSIONS
    if IS_SOAK:

        def minute(number: int) -> float:
            return statistics.mean(kb for t, kb in memory if 60 * (number - 1) <= t < 60 * number)

        assert minute(10) <= 1.03 * minute(3), f"{minute(3):.0f} kB in the third minute, {minute(10):.0f} in the last"
