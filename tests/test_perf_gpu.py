"""`make gpu` without a GPU: all of its Python runs once, on small shapes, and its shapes are what it says they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.perf import gpu, gpu_attention, runs

ROOT = Path(__file__).resolve().parents[1]
# What a Python that was set up for GPUs, and not for AKV, does not have: `make gpu` takes it as it is.
ABSENT = ("akv_bench", "akv_sdk", "pydantic", "fastapi", "httpx", "gguf", "llguidance")
DRY_RUN = f"""
import runpy, sys
sys.modules |= dict.fromkeys({ABSENT})
runpy.run_module("tests.gpu_dry_run", run_name="__main__", alter_sys=True)
"""
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (Linux on x86-64 only)")


@pytest.mark.parametrize("shape", gpu_attention.SHAPES)
@pytest.mark.parametrize("drops", gpu_attention.DROPS)
def test_a_drop_changes_nothing_but_the_number_of_segments(shape, drops):
    """Each row sees as many tokens as without one: only then is the time of one over the other what drops cost."""
    work = gpu_attention.SHAPES[shape](drops)
    plan, num_seqs = work.plan(), work.num_seqs
    assert len(plan.seg_length) == num_seqs * (drops + 1)
    length, start = (x[: drops + 1] for x in (plan.seg_length, plan.seg_start))
    seen = (plan.row_index[: work.rows, None] + 1 - start).clamp(min=0).minimum(length).sum(dim=1)
    assert seen.tolist() == list(range(work.visible - work.rows + 1, work.visible + 1))
    assert int(seen.sum()) == work.pairs()


def test_one_segments_plan_has_the_same_slots_in_fewer_pages():
    work = gpu_attention.Workload(num_seqs=3, rows=2, visible=500, drops=4)
    whole = work.plan()
    tables = whole.page_table.view(3, -1)

    def slots(plan, seq: int, segment: int) -> list[tuple[int, int]]:
        table = plan.page_table[plan.seq_pages[seq] : plan.seq_pages[seq + 1]]
        slot = torch.arange(int(plan.seg_length[segment])) + plan.seg_slot[segment]
        return list(zip(table[slot // 16].tolist(), (slot % 16).tolist(), strict=True))

    for segment in range(5):
        part = work.plan(segment)
        assert len(part.page_table) < tables.numel() / 3
        for seq in range(3):
            assert slots(part, seq, seq) == slots(whole, seq, seq * 5 + segment)


def test_a_group_of_checks_that_dies_keeps_what_it_had(monkeypatch):
    def dies(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=-11, stdout='{"passed": true}\nnoise\n', stderr="illegal memory access")

    def hangs(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("checks", timeout)

    end = time.perf_counter() + 300
    monkeypatch.setattr(subprocess, "run", dies)
    assert gpu.checks_of("attention", end) == ([{"passed": True}], "illegal memory access")
    monkeypatch.setattr(subprocess, "run", hangs)
    assert gpu.checks_of("attention", end) == ([], "stopped after 300 s")


def stand_in(monkeypatch, folder, **stages):
    """`make gpu` with stages that take no time, all in this process, its results in `folder`."""
    for name, value in {"is_available": True, "get_device_name": "no GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(gpu, "run_checks", lambda console: {"total": 2, "failed": []})
    known = {name: replace(stage, measure=stages[name]) for name, stage in gpu.STAGES.items() if name in stages}
    monkeypatch.setattr(gpu, "STAGES", known)
    monkeypatch.setattr(gpu, "in_a_process", lambda name, timeout_s: gpu.run_stage(name))


def attention_row(**changes):
    row = {"shape": "prefill of 2,048", "drops": 4, "how": "query", "ms": 1.0, "over_no_drop": 1.01, "gb_per_s": 1.0}
    return row | {"tflop_per_s": 1.0, "roofline": None, "error": 1e-4} | changes


@needs_triton
def test_a_stage_that_fails_takes_nothing_from_the_others(monkeypatch, tmp_path, capsys):
    def ceilings(_):
        raise RuntimeError("out of memory")
        yield

    def halfway(ceiling):
        assert ceiling is None  # its stage has failed
        yield [attention_row()]
        yield [attention_row(), attention_row(drops=40, over_no_drop=1.02)]
        raise RuntimeError("illegal memory access")

    stages = {"ceilings": ceilings, "prefill of 2,048": halfway}
    repos = [{"survivors": "scattered", "gb_per_s": 90.0, "over_copy": None}]
    stages["repos_pages"] = lambda ceiling: iter([repos])
    stand_in(monkeypatch, tmp_path, **stages)
    assert gpu.main() == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["failed"] == {
        "ceilings": "RuntimeError: out of memory",
        "prefill of 2,048": "RuntimeError: illegal memory access",
    }
    assert set(results["seconds"]) == {"checks", "ceilings", "prefill of 2,048", "repos_pages"}
    assert [row["drops"] for row in results["prefill of 2,048"]] == [4, 40]
    assert results["repos_pages"] == repos
    shown = capsys.readouterr().out
    assert "scattered survivors: 90 GB/s, - of a copy (goal 85%)" in shown
    assert "at most 1.020 times" in shown
    assert shown.splitlines()[-2:] == [
        "wrong: ceilings: RuntimeError: out of memory",
        "wrong: prefill of 2,048: RuntimeError: illegal memory access",
    ]


@needs_triton
@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_timed_call_that_is_wrong_fails_the_run(monkeypatch, tmp_path, capsys, error):
    stand_in(monkeypatch, tmp_path, **{"prefill of 2,048": lambda _: iter([[attention_row(error=error)]])})
    assert gpu.main() == 1
    assert f"wrong: prefill of 2,048, 4 drops, query: off by {error:.3g}" in capsys.readouterr().out
    stand_in(monkeypatch, tmp_path, **{"prefill of 2,048": lambda _: iter([[attention_row()]])})
    assert gpu.main() == 0


def test_a_stage_whose_process_dies_or_hangs_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))

    def hangs(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("stage", timeout)

    done = SimpleNamespace(returncode=-11, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match="exit status -11"):
        gpu.in_a_process("graph", 150)
    done.stderr = "illegal memory access"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu.in_a_process("graph", 150)
    done.returncode = 0
    gpu.in_a_process("graph", 150)  # a warning alone is no failure, but is shown
    assert capsys.readouterr().err == 2 * "illegal memory access"
    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(RuntimeError, match="stopped after 150 s"):
        gpu.in_a_process("graph", 150)


@needs_triton
def test_no_stage_gets_more_time_than_is_left(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, ceilings=None, graph=None)
    given: list[float] = []
    monkeypatch.setattr(gpu, "in_a_process", lambda name, timeout_s: given.append(timeout_s))
    monkeypatch.setattr(gpu, "ALL_S", 40.0)
    assert gpu.main() == 0
    assert [39 < s <= 40 for s in given] == [True, True]
    monkeypatch.setattr(gpu, "ALL_S", 570.0)
    assert gpu.main() == 0
    assert given[2:] == [150, 150]


def test_rivals_that_fail_take_nothing_from_our_times(monkeypatch):
    def gives(error: float):
        return lambda *_: lambda: error

    def fails(kind: type[Exception]):
        def make(*_):
            raise kind("not here")

        return make

    def no_capture(functions):
        if functions[0]() == 0.002:
            raise RuntimeError("operation not permitted when stream is capturing")
        return functions[0]

    rivals = {
        "absent": fails(ImportError),
        "broken": fails(RuntimeError),
        "wrong": gives(0.5),
        "uncaptured": gives(0.002),
    }
    monkeypatch.setattr(gpu_attention, "ours", lambda *_: {"query": gives(0.0), "key": gives(0.0)})
    monkeypatch.setattr(gpu_attention, "rivals", lambda work, _: {} if work.drops else rivals | {"right": gives(0.001)})
    monkeypatch.setattr(gpu_attention.Workload, "error", lambda self, out, *_: out)
    monkeypatch.setattr(gpu_attention, "as_graph", no_capture)
    monkeypatch.setattr(gpu_attention, "take_turns", lambda replays: [1.0 + n for n in range(len(replays))])
    monkeypatch.setattr(gpu_attention, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_attention, "DROPS", (0, 1))
    small = {"small": lambda drops: gpu_attention.Workload(1, rows=1, visible=50, drops=drops, layers=2)}
    monkeypatch.setattr(gpu_attention, "SHAPES", small)
    first, last = ({(r["drops"], r["how"]): r for r in rows} for rows in gpu_attention.attention_times("small", None))
    own = [(0, "query"), (0, "key"), (1, "query"), (1, "key")]
    assert list(first) == own
    assert list(last) == [*own, (0, "right")]
    assert all(row["roofline"] is None for row in last.values())
    assert first[1, "query"]["over_no_drop"] == 3
    assert first[1, "query"]["ms"] == 1.5  # of one layer of two


@needs_triton
def test_survivors_are_one_part_of_a_stream_or_every_second_block(monkeypatch):
    from akv_kernels import gpu as kernels

    calls = []
    monkeypatch.setattr(kernels, "repos_pages", lambda k, v, src, dst, *_, **__: calls.append((src, dst)))
    monkeypatch.setattr(gpu_attention, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_attention, "take_turns", lambda moves: [move() or 1.0 for move in moves])
    monkeypatch.setattr(torch, "randperm", torch.arange)  # a slot is then a place in the stream
    rows = gpu_attention.repos_times(None, num_tokens=64)
    assert [(row["survivors"], row["over_copy"]) for row in rows] == [("contiguous", None), ("scattered", None)]
    (contiguous, target), (scattered, _) = calls
    assert contiguous.tolist() == list(range(5, 69))
    assert scattered.tolist() == [begin + n for begin in (5, 37, 69, 101) for n in range(16)]
    assert target.tolist() == list(range(144, 208))


def test_prefilling_again_is_warm_and_takes_turns_with_a_drop(monkeypatch):
    """Its first run compiles, and a machine that slows down meanwhile has to slow both sides of the ratio."""
    runs_made: list[str] = []

    class Run:
        def __init__(self, engine, tokens, history=(), *, max_tokens=1, salt=""):
            kind = salt.split(" ")[0] or "drop"
            if max_tokens:
                runs_made.append(kind)
            compiles = kind == "again" and runs_made.count("again") == 1
            slow = 2.0 if "again" in runs_made else 1.0
            self.ttft_s = 100.0 if compiles else slow * {"drop": 1.0, "no": 1.0, "again": 15.0}[kind]
            prefilled = len(tokens) if kind == "again" else runs.NEW
            self.outcome = SimpleNamespace(prefilled_tokens=prefilled)

    monkeypatch.setattr(runs, "Run", Run)
    figures = runs.drop_against_none(SimpleNamespace(evict_all=lambda: None), rounds=1)
    assert runs_made[-7:] == ["again", "drop", "again", "again", "drop", "drop", "again"]
    assert figures["re_prefill_over_after_drop"] == 15
    assert figures["ttft_after_drop_ms"] == figures["ttft_no_drop_ms"] == 1000


@needs_triton
def test_every_stage_runs(tmp_path):
    command = [sys.executable, "-c", DRY_RUN]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["failed"] == {}
    assert list(results["seconds"]) == ["checks", *gpu.STAGES]
    assert results["checks"] == {"total": 4, "failed": [], "float8": True}
    for shape in gpu_attention.SHAPES:
        rows = results[shape]
        assert {row["how"] for row in rows if row["drops"] == 1} == {"query", "key", "a launch a segment"}
        assert all(row["error"] < gpu_attention.MAX_ERROR for row in rows if row["error"] is not None)
        assert all(row["roofline"] is not None for row in rows)
    assert [row["survivors"] for row in results["repos_pages"]] == ["contiguous", "scattered"]
    assert "engine, default model" not in results
    assert results["engine, large model"]["model"].startswith("random weights")
    for text in ("without the default model", "goal 1.03", "goal 85%", "first token after a drop"):
        assert text in done.stdout
