"""The default model behind a real server: golden cases, restarts, memory. What a newcomer's first hour relies on."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import akv_sdk
from akv_server import loader
from akv_server.engine import Engine, EngineConfig
from akv_server.loader import LoadedModel
from tests.clients import Client, drop, idle, run
from tests.processes import Forge
from tests.server import akv_serve, serving_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loader.load("default", weights="float32")


def test_golden_cases_through_the_api(loaded, shared):
    with serving_model(loaded, pool_tokens=4096) as server:
        done = subprocess.run(
            [sys.executable, shared / "tools" / "golden_http.py", server.url, shared / "golden" / "cases.json"],
            capture_output=True,
            text=True,
        )
        server.engine.check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong greedy runs 0" in done.stdout


def conversation(url: str, restart) -> list[list[int]]:
    """Three turns of an agent that drops what it has read; `restart`, if given, follows each turn."""
    answers = []
    with akv_sdk.Client(url) as client:
        session = client.session("agent")
        session.system("You are a coding agent.")
        session.user("Find the failing test.")
        blocks = []
        for turn in range(3):
            lines = (f"tests/test_{turn}.py::test_{i} {'FAILED' if i == 7 else 'PASSED'}" for i in range(25))
            blocks.append(session.observe("\n".join(lines), tool="bash"))
            reply = session.complete(max_tokens=8, temperature=0)
            answers.append(reply.token_ids)
            assert reply.akv.replayed_tokens == 0 or restart
            if turn == 0:
                session.drop(blocks=[blocks[0]])
            if restart:
                restart()
    return answers


def test_a_restarted_server_replays_and_answers_the_same(loaded):
    """A process without `--state` that is killed after each turn, and started again at its address."""
    with serving_model(loaded, pool_tokens=4096) as server:
        undisturbed = conversation(server.url, None)
    with Forge("--weights", "float32", "--pool-tokens", "4096") as forge:

        def restart() -> None:
            with akv_sdk.Client(forge.url) as client:  # a server that knows nothing sees the stream as new
                assert client.stats().tokens_replayed == 0
            forge.kill()
            forge.start()

        assert conversation(forge.start(), restart) == undisturbed


def test_evicting_everything_between_turns_changes_no_answer(loaded):
    with serving_model(loaded, pool_tokens=4096) as server:
        undisturbed = conversation(server.url, None)
    with serving_model(loaded, pool_tokens=4096) as server:

        def evict() -> None:
            """Once the answer's last token is computed, too: until then its pages are in use."""
            while server.engine.stats()["running"]:
                time.sleep(0.01)
            assert server.engine.evict_all() > 0

        assert conversation(server.url, evict) == undisturbed
        assert server.engine.stats()["tokens_replayed"] > 0


def test_compaction_off_on_and_forced_write_the_same(loaded):
    """Every second of 40 blocks goes; keys turned on the way leave log-probabilities where they were, but for the
    rounding of one rotation."""
    random_ = random.Random(0)
    tokens = random_.choices(range(1000, 40_000), k=400)
    history = tuple(drop(start, start + 10, 400) for start in range(10, 400, 20))
    written, logprobs = [], []
    for above, per_step in ((1.0, 0), (0.4, 256), (0.0, 256)):
        config = EngineConfig(num_pages=80, compact_above=above, compact_tokens_per_step=per_step)
        engine = Engine(loaded.model, config)
        run(engine, Client(tokens))
        run(engine, Client([*tokens, 500, 501], history))
        idle(engine)
        assert (engine.stats()["tokens_moved"] > 150) == (per_step > 0)
        client = run(engine, Client([*tokens, 500, 501, 502], history, max_tokens=8))
        assert client.outcome.prefilled_tokens == 1
        written.append(client.ids)
        logprobs.append([token.logprob for token in client.generated])
    assert written[0] == written[1] == written[2]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-3)
    assert logprobs[2] == pytest.approx(logprobs[0], abs=1e-3)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_memory_stays_small(weights):
    with akv_serve("--weights", weights, "--pool-tokens", "8192") as (url, pid), akv_sdk.Client(url) as client:
        prompt = [300 + i % 5000 for i in range(7000)]
        reply = client.completions(prompt=prompt, max_tokens=4, temperature=0)
        assert reply.akv.prefilled_tokens == 7000
        peak_kb = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])
        assert peak_kb < 1.6e6
        stats = client.stats()
        assert stats.pages_total * stats.page_size == 8192


def test_ctrl_c_in_the_middle_of_an_answer_ends_it_cleanly():
    question = [{"role": "user", "content": "Go on."}]
    with (
        akv_serve("--weights", "int8", "--pool-tokens", "2048") as (url, pid),
        akv_sdk.Client(url) as client,
        client.chat_stream(question, max_tokens=1500, ignore_eos=True) as stream,
    ):
        next(iter(stream))
        os.kill(pid, signal.SIGINT)
        with pytest.raises(akv_sdk.AkvError):
            for _ in stream:
                pass
