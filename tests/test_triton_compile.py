"""Every Triton kernel compiled ahead of time for GPUs that are not here: sm_90, sm_80 and gfx942.

Asserts what can be read without running: matrix instructions, no spilled register, shared memory within the limit, and
that stores end in the output arguments only. Instruction counts decide which rotation is the default.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed (Linux on x86-64 only)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: kernels cannot be compiled in this process", allow_module_level=True)

import triton
from akv_kernels import attention, neighbours, pages

from tests.triton_aot import TARGETS, Compiled, compile_kernel, written

PLAN = ("row_index", "seq_rows", "seq_segments", "seq_pages", "page_table", "seg_slot", "seg_length", "seg_start")


@cache
def attend(
    target: str,
    *,
    max_rows: int,
    head_dim: int = 128,
    group: int = 8,
    page_size: int = 16,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    rotate_key: bool = False,
    interleaved: bool = False,
    split: bool = True,
    mass: bool = False,
    one_sequence: bool = False,
    tiling: attention.Tiling | None = None,
) -> Compiled:
    """segment_batch_kernel as segment_batch_attention would launch it for such a call."""
    kv_dtype = kv_dtype or dtype
    element_size = {"fp8": 1, "fp3": 4}.get(kv_dtype[:3], 2)
    limit = TARGETS[target][1]
    tiling = tiling or attention.choose_tiling(max_rows, group, head_dim, element_size, limit, interleaved, rotate_key)
    types = {"q": "*" + dtype, "k_pages": "*" + kv_dtype, "v_pages": "*" + kv_dtype, "out": "*" + dtype}
    types |= dict.fromkeys(PLAN, "*i32")
    types |= {"seg_rotation": "*fp32", "score_scale": "fp32"} | ({} if one_sequence else {"num_seqs": "i32"})
    optional = {"k_scale": element_size == 1, "v_scale": element_size == 1, "lse": mass, "page_mass": mass}
    optional |= {"partial_out": split, "partial_lse": split}
    types |= {name: "*fp32" for name, given in optional.items() if given}
    constants: dict[str, Any] = {name: None for name, given in optional.items() if not given}
    constants |= {"num_seqs": 1} if one_sequence else {}  # as the just-in-time compiler takes every 1
    constants |= {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "ROTARY_DIM": head_dim}
    constants |= {"PAGE_SIZE": page_size, "INTERLEAVED": interleaved, "ROTATE_KEY": rotate_key}
    constants |= {"ONE_ROW": max_rows == 1, "PAIRS": triton.next_power_of_2(head_dim // 2)}
    constants |= {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n}
    return compile_kernel(attention.segment_batch_kernel, target, types, constants, tiling.num_warps, tiling.num_stages)


DECODE, PREFILL = {"max_rows": 1}, {"max_rows": 512}
ATTENTION: list[tuple[str, dict[str, Any], set[str]]] = [
    (target, shape, {"out", "partial_out", "partial_lse"}) for target in TARGETS for shape in (DECODE, PREFILL)
] + [
    ("sm_90", DECODE | {"split": False, "head_dim": 64, "group": 3, "dtype": "fp16", "page_size": 1}, {"out"}),
    ("sm_90", DECODE | {"split": False, "head_dim": 80, "group": 1, "page_size": 64, "interleaved": True}, {"out"}),
    ("sm_90", DECODE | {"split": False, "kv_dtype": "fp8e4nv"}, {"out"}),
    ("sm_90", DECODE | {"split": False, "mass": True}, {"page_mass"}),
    ("sm_90", PREFILL | {"split": False, "head_dim": 256, "group": 2}, {"out"}),
    ("sm_90", PREFILL | {"split": False, "kv_dtype": "fp8e4nv"}, {"out"}),
    ("sm_90", DECODE | {"rotate_key": True}, {"out", "partial_out", "partial_lse"}),
    ("sm_90", PREFILL | {"rotate_key": True}, {"out", "partial_out", "partial_lse"}),
    ("sm_90", DECODE | {"rotate_key": True, "head_dim": 256, "group": 4, "split": False}, {"out"}),
    ("sm_90", PREFILL | {"rotate_key": True, "head_dim": 256, "group": 4, "split": False}, {"out"}),
    ("sm_80", DECODE | {"rotate_key": True, "head_dim": 256, "group": 4, "split": False}, {"out"}),
    ("sm_80", PREFILL | {"rotate_key": True, "head_dim": 256, "group": 4, "split": False}, {"out"}),
    ("sm_80", DECODE | {"split": False, "head_dim": 256, "group": 2}, {"out"}),
    ("sm_80", PREFILL | {"split": False, "head_dim": 96, "group": 4}, {"out"}),
    ("gfx942", PREFILL | {"split": False, "head_dim": 80, "group": 4, "dtype": "fp16"}, {"out"}),
    ("sm_90", DECODE | {"one_sequence": True}, {"out", "partial_out", "partial_lse"}),
    ("sm_90", PREFILL | {"one_sequence": True}, {"out", "partial_out", "partial_lse"}),
    ("sm_90", PREFILL | {"split": False, "interleaved": True}, {"out"}),
    ("sm_80", PREFILL | {"split": False, "kv_dtype": "fp8e5"}, {"out"}),
    ("gfx942", DECODE | {"split": False, "kv_dtype": "fp8e4nv"}, {"out"}),
    ("gfx942", PREFILL | {"split": False, "kv_dtype": "fp8e4nv"}, {"out"}),
]


def label(value: object) -> str:
    if isinstance(value, dict):
        return "-".join(f"{k}={v}" for k, v in value.items())
    return "+".join(sorted(value)) if isinstance(value, set) else str(value)


@pytest.mark.parametrize(("target", "shape", "outputs"), ATTENTION, ids=label)
def test_attention(target: str, shape: dict[str, Any], outputs: set[str]) -> None:
    kernel = attend(target, **shape)
    assert kernel.matrix_instructions > 0
    assert kernel.loop.total() > 0, "no inner loop with matrix instructions"
    assert kernel.spills == 0, kernel
    assert kernel.shared_bytes <= TARGETS[target][1]
    assert kernel.writes == outputs


@pytest.mark.parametrize("head_dim", [128, 256])
def test_float32_stays_in_registers(head_dim: int) -> None:
    """Full precision has no matrix instruction; unrolled, tiles of the usual size spill kilobytes."""
    kernel = attend("sm_90", **PREFILL, dtype="fp32", group=4, head_dim=head_dim, split=False)
    assert kernel.spills == 0, kernel
    assert kernel.shared_bytes <= TARGETS["sm_90"][1]
    assert kernel.writes == {"out"}


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=label)
def test_turning_the_query_costs_less_than_turning_keys(shape: dict[str, int]) -> None:
    """The reason for the default: fewer instructions a tile, no more registers."""
    query, key = (attend("sm_90", **shape, rotate_key=rotate_key) for rotate_key in (False, True))
    assert query.loop.total() < 0.9 * key.loop.total()
    assert query.registers <= key.registers


def test_prefill_on_hopper_uses_warpgroup_instructions() -> None:
    assert any(op.startswith("HGMMA") for op in attend("sm_90", **PREFILL).loop)


PAIRING = {"HEAD_DIM": 128, "ROTARY_DIM": 128, "INTERLEAVED": False, "PAIRS": 64}
OTHERS: dict[str, tuple[Any, dict[str, str], dict[str, Any], set[str]]] = {
    "reduce_splits": (
        attention.reduce_splits_kernel,
        {"partial_out": "*fp32", "partial_lse": "*fp32", "row_seq": "*i32", "seq_rows": "*i32", "out": "*bf16"}
        | {"num_seqs": "i32", "num_splits": "i32"},
        {"lse": None, "HEAD_DIM": 128, "PAIRS": 64, "TILE_ROWS": 2, "SPLIT_BLOCK": attention.MAX_SPLITS},
        {"out"},
    ),
    "repos_pages": (
        pages.repos_pages_kernel,
        {"k_pages": "*bf16", "v_pages": "*bf16", "src_slots": "*i64", "dst_slots": "*i64", "rotation": "*fp32"}
        | {"num_tokens": "i32"},
        PAIRING | {"NUM_KV_HEADS": 8, "BLOCK": pages.BLOCK_LANES},
        {"k_pages", "v_pages"},
    ),
    "rope_and_write": (
        pages.rope_and_write_kernel,
        dict.fromkeys(("q", "k", "v", "q_out", "k_pages", "v_pages"), "*bf16")
        | {"slots": "*i64", "rotation": "*fp32", "num_tokens": "i32", "magnitude": "fp32"}
        | dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32"),
        PAIRING | {"k_scale": None, "v_scale": None, "NUM_Q_HEADS": 64, "NUM_KV_HEADS": 8, "BLOCK": pages.BLOCK_LANES},
        {"q_out", "k_pages", "v_pages"},
    ),
    "rope_and_write, one token": (  # a decode step of one sequence: the just-in-time compiler takes a 1 for a constant
        pages.rope_and_write_kernel,
        dict.fromkeys(("q", "k", "v", "q_out", "k_pages", "v_pages"), "*bf16")
        | {"slots": "*i64", "rotation": "*fp32", "magnitude": "fp32"}
        | dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32"),
        PAIRING
        | {"num_tokens": 1, "k_scale": None, "v_scale": None, "NUM_Q_HEADS": 64, "NUM_KV_HEADS": 8}
        | {"BLOCK": pages.BLOCK_LANES},
        {"q_out", "k_pages", "v_pages"},
    ),
    "rms_norm": (
        neighbours.rms_norm_kernel,
        dict.fromkeys(("x", "weight", "residual", "out", "total_out"), "*bf16") | {"eps": "fp32"},
        {"WIDTH": 4096, "BLOCK": 4096},
        {"out", "total_out"},
    ),
    "silu_mul": (
        neighbours.silu_mul_kernel,
        {"gate_up": "*bf16", "out": "*bf16", "width": "i32"},
        {"BLOCK": 1024},
        {"out"},
    ),
    "sample": (
        neighbours.sample_kernel,
        dict.fromkeys(("logits", "temperature", "top_p", "min_p", "uniform"), "*fp32")
        | {"top_k": "*i32", "out": "*i64", "num_vocab": "i32"},
        {"BLOCK": 4096},
        {"out"},
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", OTHERS)
def test_neighbour(name: str, target: str) -> None:
    kernel, types, constants, outputs = OTHERS[name]
    built = compile_kernel(kernel, target, types, constants, num_warps=8 if name in ("rms_norm", "sample") else 4)
    assert built.spills == 0, built
    assert built.shared_bytes <= TARGETS[target][1]
    assert built.writes == outputs


@pytest.mark.parametrize(("target", "kv_dtype"), [("sm_90", "fp8e4nv"), ("sm_80", "fp8e5"), ("gfx942", "fp8e4nv")])
@pytest.mark.parametrize("name", ["repos_pages", "rope_and_write"])
def test_float8_pages(name: str, target: str, kv_dtype: str) -> None:
    kernel, types, constants, outputs = OTHERS[name]
    types = types | dict.fromkeys(("k_pages", "v_pages"), "*" + kv_dtype)
    if name == "rope_and_write":
        types |= {"k_scale": "*fp32", "v_scale": "*fp32"}
        constants = {key: value for key, value in constants.items() if key not in types}
    built = compile_kernel(kernel, target, types, constants)
    assert built.spills == 0, built
    assert built.writes == outputs


def test_spills_are_seen() -> None:
    """The check can fail: one warp cannot hold a row of 16,384."""
    kernel, types, _, _ = OTHERS["rms_norm"]
    assert compile_kernel(kernel, "sm_90", types, {"WIDTH": 16384, "BLOCK": 16384}, num_warps=1).spills > 0


def test_writes_are_followed_to_the_argument() -> None:
    """Through pointer arithmetic, past names that a later region uses again, and failing closed in loops."""
    ttir = """
  tt.func public @f(%a: !tt.ptr<f32> loc("a"), %b: !tt.ptr<f32> loc("b"), %n: i32 loc("n")) {
    %0 = tt.splat %a : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %p = tt.addptr %0, %r : tensor<4x!tt.ptr<f32>>, tensor<4xi32>
    scf.if %c {
      %1 = tt.addptr %b, %n : !tt.ptr<f32>, i32
      %2 = tt.atomic_rmw fadd, relaxed, gpu, %1, %x, %m : (!tt.ptr<f32>, f32, i1) -> f32
    } else {
      %1 = arith.constant 0 : i32
      tt.store %p, %x, %m : tensor<4x!tt.ptr<f32>>
    }
"""
    assert written(ttir) == {"a", "b"}
    looped = ttir + "    scf.for %i = %l to %u step %s iter_args(%q = %p) {\n      tt.store %q, %x : !tt.ptr<f32>\n"
    assert written(looped) == {"a", "b", "?"}
