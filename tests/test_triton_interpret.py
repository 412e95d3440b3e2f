"""Every Triton kernel under Triton's interpreter, in a process of its own, against the truth of akv_kernels.testing.

`triton_cases.py` holds the checks; `make gpu` runs the same ones on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (Linux on x86-64 only)")

GROUPS = (
    *("attention", "float8", "page_mass", "placement", "far_pages", "splits"),
    *("rope_and_write", "repos_pages", "neighbours", "sample", "padding", "engine"),
)
MUTATIONS = (
    *("plan/wrong_sign", "plan/delta_off_by_one", "plan/first_page_offset_ignored", "plan/one_delta_per_sequence"),
    *("plan/other_pairing", "plan/mask_by_position", "kernel/wrong_sign", "kernel/rotation_of_another_segment"),
    *("kernel/first_page_offset_ignored", "kernel/one_delta_per_sequence", "kernel/other_pairing"),
    *("kernel/mask_by_slot", "kernel/tail_not_masked"),
    *("kernel/segments_counted_within_a_block", "kernel/sequences_of_the_first_block"),
)


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """What triton_cases.py printed. One process for all groups: importing Triton costs more than most of them."""
    command = [sys.executable, "-m", "tests.triton_cases"]
    root = Path(__file__).resolve().parents[1]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_group_is_within_its_bounds(records: list[dict[str, Any]], group: str) -> None:
    checks = [record for record in records if record["group"] == group]
    assert len(checks) >= 2
    failed = [f"{c['name']}: {c['measured']:.3g} > {c['bound']:.3g}" for c in checks if not c["passed"]]
    assert not failed, "\n".join(failed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(records: list[dict[str, Any]], name: str) -> None:
    """A check of a mutation passes if the mutant misses the bound that the right kernel keeps on the same case."""
    (check,) = [record for record in records if record["group"] == "mutations" and record["name"] == name]
    error, bound = -check["measured"], -check["bound"]
    assert error > 1000 * bound
    case = {
        "kernel/segments_counted_within_a_block": "over_64_segments",
        "kernel/sequences_of_the_first_block": "over_64_sequences",
    }.get(name, "prefill_across_segments")
    right = [r for r in records if r["group"] == "attention" and r["name"].startswith(f"{case}/float32")]
    assert right
    assert all(record["measured"] <= bound for record in right)


def test_every_group_and_mutation_is_looked_at(records: list[dict[str, Any]]) -> None:
    assert {record["group"] for record in records} == {*GROUPS, "mutations"}
    assert {record["name"] for record in records if record["group"] == "mutations"} == set(MUTATIONS)


def test_interpreter_does_not_leak_into_this_process(records: list[dict[str, Any]]) -> None:
    assert records
    assert "TRITON_INTERPRET" not in os.environ


def test_make_gpu_refuses_where_there_is_none() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tests.perf.gpu"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "needs a CUDA or ROCm device" in done.stdout
