"""The CPU backend: cpu.c compiled for this machine on first use, and called with the addresses of tensors.

Owns shape checks, the compiled library and its cache, and the packing of int8 weights. `reference` has the contracts.
Rows are bitwise independent of each other, of how a prompt is cut into calls, and of the number of threads, which
follows torch.get_num_threads(). Activations are float32 inside (other dtypes are converted at the door); pages are
float32, float16 or bfloat16.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from akv_kernels.plan import AttentionPlan

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_GROUP, _LANES = 64, 16  # as in cpu.c
_MAX_HEAD_DIM, _MAX_GROUP = 256, 192


class _Plan(ctypes.Structure):
    _pointers_ = (
        *("row_index", "seq_rows", "seq_segments", "seq_pages", "page_table"),
        *("seg_slot", "seg_length", "seg_start", "seg_delta", "seg_rotation"),
    )
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _pointers_),
        *((name, ctypes.c_int32) for name in ("num_seqs", "page_size", "half_dim", "interleaved")),
    )


_SIGNATURES = {  # p: address, i: int, l: int64, f: float
    "akv_has_float16": "",
    "akv_attention": "pplppiiiifppi",
    "akv_rope_and_write": "plplplppppiiiiiifii",
    "akv_repos_pages": "pppppiiiiiii",
    "akv_rms_norm": "pppfpplii",
    "akv_silu_mul": "pplii",
    "akv_int8_linear": "pliippipi",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}


def _cpu_name() -> str:
    """What the compiler's -march=native depends on: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


@cache
def library(march: str = "native") -> ctypes.CDLL:
    """The compiled kernels for one -march; compiled once per source, compiler flags and machine, then cached.

    Raises RuntimeError where there is no C compiler, or it fails.
    """
    source = Path(__file__).with_name("cpu.c").read_bytes()
    flags = ["-std=gnu11", "-O3", f"-march={march}", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]
    key = hashlib.sha256(b"\0".join((source, " ".join(flags).encode(), _cpu_name().encode()))).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "akv"
    path = folder / f"kernels-{key}.so"
    if not path.exists():
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("AKV's CPU kernels are compiled on first use and need a C compiler: install gcc")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            built = Path(temporary) / "kernels.so"
            command = [compiler, *flags, "-x", "c", "-", "-o", str(built), "-lm"]
            done = subprocess.run(command, input=source, capture_output=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} could not compile AKV's CPU kernels:\n{done.stderr.decode()}")
            os.replace(built, path)  # whole or not at all, also with two processes at it
    loaded = ctypes.CDLL(str(path))
    for name, letters in _SIGNATURES.items():
        getattr(loaded, name).argtypes = [_TYPES[letter] for letter in letters]
        getattr(loaded, name).restype = ctypes.c_int
    return loaded


def _kind(pages: Tensor) -> int:
    kind = _KINDS.get(pages.dtype)
    if kind is None or (kind == 1 and not library().akv_has_float16()):
        raise ValueError(f"the CPU kernels have no pages of {pages.dtype} on this machine")
    assert pages.is_contiguous()
    return kind


def _rows(x: Tensor) -> Tensor:
    """x in float32 with each row's elements side by side; rows may lie further apart, as views into a larger one."""
    x = x.float()
    inner = x[0] if len(x) else x
    return x if inner.is_contiguous() else x.contiguous()


def _check(status: int) -> None:
    if status:
        raise MemoryError("the CPU kernels could not get memory for their work")


_last_plan: tuple[AttentionPlan, _Plan] | None = None


def _plan_struct(plan: AttentionPlan) -> _Plan:
    """The plan as C sees it; a model asks for the same one once per layer."""
    global _last_plan
    last = _last_plan
    if last is not None and last[0] is plan:
        return last[1]
    for name in _Plan._pointers_:
        assert getattr(plan, name).is_contiguous() and getattr(plan, name).device.type == "cpu"
    addresses = [getattr(plan, name).data_ptr() for name in _Plan._pointers_]
    half_dim = plan.seg_rotation.shape[-1]
    struct = _Plan(*addresses, len(plan.seq_rows) - 1, plan.page_size, half_dim, plan.interleaved)
    _last_plan = (plan, struct)
    return struct


def segment_batch_attention(
    q: Tensor,  # [num_rows, num_q_heads, head_dim]
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    out: Tensor | None = None,
    page_mass: Tensor | None = None,  # float32 [num_table_entries]
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See reference.segment_batch_attention. Pages are walked in place; the query is turned once per segment.

    Raises ValueError for float8 pages (those need a GPU).
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    kind = _kind(k_pages)
    if k_scale is not None or v_scale is not None:
        raise ValueError("scales belong to float8 pages, which the CPU kernels do not have")
    assert head_dim <= _MAX_HEAD_DIM and num_q_heads % num_kv_heads == 0 and num_q_heads // num_kv_heads <= _MAX_GROUP
    assert v_pages.dtype == k_pages.dtype and v_pages.is_contiguous() and v_pages.shape == k_pages.shape
    assert k_pages.shape[1] == plan.page_size and k_pages.shape[3] == head_dim and len(plan.row_index) == num_rows
    assert page_mass is None or (page_mass.dtype == torch.float32 and page_mass.shape == plan.page_table.shape)
    rows = _rows(q)
    can_write = out is not None and out.dtype == torch.float32 and out.is_contiguous()
    result = out if can_write and out is not None else torch.empty(q.shape, dtype=torch.float32)
    _check(
        library().akv_attention(
            ctypes.byref(_plan_struct(plan)),
            rows.data_ptr(),
            rows.stride(0),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            kind,
            num_q_heads,
            num_kv_heads,
            head_dim,
            scale,
            result.data_ptr(),
            None if page_mass is None else page_mass.data_ptr(),
            torch.get_num_threads(),
        )
    )
    if out is None:
        return result.to(q.dtype)
    return out if can_write else out.copy_(result)


def rope_and_write(
    q: Tensor,  # [T, num_q_heads, head_dim]
    k: Tensor,  # [T, num_kv_heads, head_dim]
    v: Tensor,
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: Tensor,
    slots: Tensor,  # int64 [T], -1: do not write
    rotation: Tensor,  # float32 [T, 2, rotary_dim // 2]
    *,
    interleaved: bool,
    scale: float = 1.0,
) -> Tensor:
    """See reference.rope_and_write. A float32 q is turned in place and returned."""
    num_tokens, num_q_heads, head_dim = q.shape
    rows, keys, values = _rows(q), _rows(k), _rows(v)
    assert slots.dtype == torch.int64 and slots.is_contiguous() and len(slots) == num_tokens
    assert rotation.dtype == torch.float32 and rotation.is_contiguous() and len(rotation) == num_tokens
    assert v_pages.is_contiguous() and k_pages.dtype == v_pages.dtype and head_dim <= _MAX_HEAD_DIM
    library().akv_rope_and_write(
        rows.data_ptr(),
        rows.stride(0),
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        slots.data_ptr(),
        rotation.data_ptr(),
        num_tokens,
        num_q_heads,
        k.shape[1],
        head_dim,
        rotation.shape[2],
        interleaved,
        scale,
        _kind(k_pages),
        torch.get_num_threads(),
    )
    return rows.to(q.dtype)


def repos_pages(
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: Tensor,
    src_slots: Tensor,  # int64 [N]
    dst_slots: Tensor,  # int64 [N]
    rotation: Tensor,  # float32 [N, 2, rotary_dim // 2]
    *,
    interleaved: bool,
) -> None:
    """See reference.repos_pages."""
    _, _, num_kv_heads, head_dim = k_pages.shape
    assert all(slots.dtype == torch.int64 and slots.is_contiguous() for slots in (src_slots, dst_slots))
    assert rotation.dtype == torch.float32 and rotation.is_contiguous() and len(rotation) == len(src_slots)
    assert v_pages.is_contiguous() and k_pages.dtype == v_pages.dtype and head_dim <= _MAX_HEAD_DIM
    library().akv_repos_pages(
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        src_slots.data_ptr(),
        dst_slots.data_ptr(),
        rotation.data_ptr(),
        len(src_slots),
        num_kv_heads,
        head_dim,
        rotation.shape[2],
        interleaved,
        _kind(k_pages),
        torch.get_num_threads(),
    )


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor,  # [hidden]
    eps: float,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See reference.rms_norm."""
    dtype, hidden = x.dtype, x.shape[-1]
    x, weight = x.float().contiguous(), weight.float().contiguous()
    other = None if residual is None else residual.float().contiguous()
    assert len(weight) == hidden and (other is None or other.shape == x.shape)
    normed = torch.empty_like(x)
    total = None if other is None else torch.empty_like(x)
    library().akv_rms_norm(
        x.data_ptr(),
        None if other is None else other.data_ptr(),
        weight.data_ptr(),
        eps,
        normed.data_ptr(),
        None if total is None else total.data_ptr(),
        x.numel() // hidden,
        hidden,
        torch.get_num_threads(),
    )
    return normed.to(dtype) if total is None else (normed.to(dtype), total.to(dtype))


def silu_mul(
    gate_up: Tensor,  # [T, 2 * intermediate]
) -> Tensor:  # [T, intermediate]
    """See reference.silu_mul."""
    pairs = gate_up.float().contiguous()
    num_rows, width = pairs.shape
    out = torch.empty(num_rows, width // 2)
    library().akv_silu_mul(pairs.data_ptr(), out.data_ptr(), num_rows, width // 2, torch.get_num_threads())
    return out.to(gate_up.dtype)


class Int8Linear:
    """y = x W^T with W and x in int8, summed in integers, for a weight that is read far more often than written.

    W is quantised once, symmetrically, with one bfloat16 scale for every 64 inputs of an output (1.03 bytes a weight);
    x is quantised in each call, with one float32 scale for every 64 inputs of a row. A row of y depends on its own row
    of x alone, bit for bit.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight float [num_outputs, num_inputs]; not kept."""
        self.num_outputs, self.num_inputs = weight.shape
        num_blocks, num_groups = -(-self.num_outputs // _LANES), -(-self.num_inputs // _GROUP)
        padded = torch.zeros(num_blocks * _LANES, num_groups * _GROUP)
        padded[: self.num_outputs, : self.num_inputs] = weight
        groups = padded.view(num_blocks * _LANES, num_groups, _GROUP)
        largest = groups.abs().amax(dim=-1)
        scale = (largest / 127).bfloat16()
        scale = (scale.view(torch.int16) + (scale.float() * 127 < largest)).view(torch.bfloat16)  # up: nothing clips
        steps = (groups / scale.float().clamp_min(1e-30)[..., None]).round_().clamp_(-127, 127).to(torch.int16)
        tiles = (steps + 128).to(torch.uint8).view(num_blocks, _LANES, num_groups, _GROUP // 4, 4)
        self.weights = tiles.permute(0, 2, 3, 1, 4).contiguous()  # uint8 [blocks, groups, quads, lanes, 4]
        self.scales = scale.view(num_blocks, _LANES, num_groups).transpose(1, 2).contiguous()  # [blocks, groups, lanes]

    def __call__(
        self,
        x: Tensor,  # [T, num_inputs]
    ) -> Tensor:  # [T, num_outputs]
        """The product, in x's dtype. Writes nothing but its result."""
        num_rows, num_inputs = x.shape
        assert num_inputs == self.num_inputs
        rows = _rows(x)
        out = torch.empty(num_rows, self.num_outputs)
        _check(
            library().akv_int8_linear(
                rows.data_ptr(),
                rows.stride(0),
                num_rows,
                num_inputs,
                self.weights.data_ptr(),
                self.scales.data_ptr(),
                self.num_outputs,
                out.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return out.to(x.dtype)

    def dequantised(self) -> Tensor:  # float32 [num_outputs, num_inputs]
        """The weight that the integers and scales stand for."""
        num_blocks, num_groups = self.scales.shape[:2]
        steps = self.weights.permute(0, 3, 1, 2, 4).reshape(num_blocks * _LANES, num_groups, _GROUP).float() - 128
        scale = self.scales.transpose(1, 2).reshape(num_blocks * _LANES, num_groups, 1).float()
        return (steps * scale).flatten(1)[: self.num_outputs, : self.num_inputs]
