"""The CPU backend: the C sources beside this file, compiled on first use and called with tensors' addresses.

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
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from akv_kernels.plan import AttentionPlan

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_GROUP, _LANES = 64, 16  # as in cpu_int8.c
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
    "akv_rms_norm": "pppfppiii",
    "akv_silu_mul": "ppiii",
    "akv_int8_linear": "pliippipi",
    "akv_int8_pack": "piippi",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}


def _cpu_name() -> str:
    """What the compiler's -march=native depends on: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


_UNUSED_S = 60 * 24 * 3600.0


@cache
def library(march: str = "native") -> ctypes.CDLL:
    """The compiled kernels for one -march; compiled once per source, compiler flags and machine, then cached.

    Raises RuntimeError where there is no C compiler, or it fails.
    """
    sources = [Path(__file__).with_name(name) for name in ("cpu_attention.c", "cpu_int8.c", "cpu_neighbours.c")]
    flags = ["-std=gnu11", "-O3", f"-march={march}", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]
    read = [*sources, Path(__file__).with_name("cpu.h")]
    identity = [*(source.read_bytes() for source in read), " ".join(flags).encode(), _cpu_name().encode()]
    key = hashlib.sha256(b"\0".join(identity)).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "akv"
    path = folder / f"kernels-{key}.so"
    if not path.exists():
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("AKV's CPU kernels are compiled on first use and need a C compiler: install gcc")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            built = Path(temporary) / "kernels.so"
            command = [compiler, *flags, *map(str, sources), "-o", str(built), "-lm"]
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} could not compile AKV's CPU kernels:\n{done.stderr.decode()}")
            os.replace(built, path)  # whole or not at all, also with two processes at it
        _remove_unused(folder)
    with suppress(OSError):
        os.utime(path)  # it is in use
    loaded = ctypes.CDLL(str(path))
    for name, letters in _SIGNATURES.items():
        getattr(loaded, name).argtypes = [_TYPES[letter] for letter in letters]
        getattr(loaded, name).restype = ctypes.c_int
    return loaded


def _remove_unused(folder: Path) -> None:
    """Removes compiled kernels that nobody loaded for a long time; a process that has them loaded keeps them."""
    for old in folder.glob("kernels-*.so"):
        with suppress(OSError):  # somebody else was quicker, or may and we may not
            if time.time() - old.stat().st_mtime > _UNUSED_S:
                old.unlink()


def _kind(k_pages: Tensor, v_pages: Tensor) -> int:
    dtype = k_pages.dtype
    kind = _KINDS.get(dtype)
    if kind is None or (kind == 1 and not library().akv_has_float16()):
        raise ValueError(f"the CPU kernels have no pages of {dtype} on this machine")
    assert v_pages.dtype is dtype and k_pages.is_contiguous() and v_pages.is_contiguous()
    return kind


def _heads(x: Tensor, head_dim: int) -> tuple[Tensor, int]:
    """x [rows, heads, head_dim] in float32, each row's heads side by side, and the floats from row to row.

    Rows may lie apart, as those of a view into a larger tensor do.
    """
    if x.dtype is not torch.float32:
        x = x.float()
    stride = x.stride()
    if stride[2] != 1 or stride[1] != head_dim:
        x = x.contiguous()
        stride = x.stride()
    return x, stride[0]


def _dense(x: Tensor) -> Tensor:
    """x in float32, contiguous."""
    if x.dtype is not torch.float32:
        x = x.float()
    return x if x.is_contiguous() else x.contiguous()


def _check(status: int) -> None:
    if status:
        raise MemoryError("the CPU kernels could not get memory for their work")


_last_plan: tuple[AttentionPlan, object, int] | None = None


def _plan_struct(plan: AttentionPlan) -> tuple[AttentionPlan, object, int]:
    """The plan, a reference to it as C sees it, and its number of rows; a model asks for the same one in each layer."""
    global _last_plan
    last = _last_plan
    if last is None or last[0] is not plan:
        for name in _Plan._pointers_:
            assert getattr(plan, name).is_contiguous() and getattr(plan, name).device.type == "cpu"
        addresses = [getattr(plan, name).data_ptr() for name in _Plan._pointers_]
        half_dim = plan.seg_rotation.shape[-1]
        struct = _Plan(*addresses, len(plan.seq_rows) - 1, plan.page_size, half_dim, plan.interleaved)
        _last_plan = last = (plan, ctypes.byref(struct), len(plan.row_index))
    return last


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
    _, page_size, num_kv_heads, page_head_dim = page_shape = k_pages.shape
    if k_scale is not None or v_scale is not None:
        raise ValueError("scales belong to float8 pages, which the CPU kernels do not have")
    kind = _kind(k_pages, v_pages)
    _, struct, num_plan_rows = _plan_struct(plan)
    assert num_rows == num_plan_rows and page_size == plan.page_size and page_shape == v_pages.shape
    assert head_dim == page_head_dim <= _MAX_HEAD_DIM
    assert num_q_heads % num_kv_heads == 0 and num_q_heads // num_kv_heads <= _MAX_GROUP
    assert page_mass is None or (page_mass.dtype == torch.float32 and page_mass.shape == plan.page_table.shape)
    rows, row_stride = _heads(q, head_dim)
    can_write = out is not None and out.dtype == torch.float32 and out.is_contiguous()
    result = out if can_write and out is not None else torch.empty(num_rows, num_q_heads, head_dim)
    assert result.shape == q.shape
    _check(
        library().akv_attention(
            struct,
            rows.data_ptr(),
            row_stride,
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
        return result if q.dtype is torch.float32 else result.to(q.dtype)
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
    num_kv_heads = k.shape[1]
    kind = _kind(k_pages, v_pages)
    assert v.shape == k.shape and k.shape[2] == head_dim <= _MAX_HEAD_DIM
    assert slots.dtype is torch.int64 and slots.is_contiguous() and slots.numel() == num_tokens
    assert rotation.dtype is torch.float32 and rotation.is_contiguous()
    rows, row_stride = _heads(q, head_dim)
    keys, key_stride = _heads(k, head_dim)
    values, value_stride = _heads(v, head_dim)
    library().akv_rope_and_write(
        rows.data_ptr(),
        row_stride,
        keys.data_ptr(),
        key_stride,
        values.data_ptr(),
        value_stride,
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        slots.data_ptr(),
        rotation.data_ptr(),
        num_tokens,
        num_q_heads,
        num_kv_heads,
        head_dim,
        rotation.shape[2],
        interleaved,
        scale,
        kind,
        torch.get_num_threads(),
    )
    return rows if q.dtype is torch.float32 else rows.to(q.dtype)


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
    kind = _kind(k_pages, v_pages)
    assert v_pages.shape == k_pages.shape and head_dim <= _MAX_HEAD_DIM
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
        kind,
        torch.get_num_threads(),
    )


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor,  # [hidden]
    eps: float,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See reference.rms_norm."""
    hidden = x.shape[-1]
    rows, weight = _dense(x), _dense(weight)
    assert weight.numel() == hidden
    normed, added, total = torch.empty_like(rows), None, None
    if residual is not None:
        assert residual.shape == x.shape
        added, total = _dense(residual), torch.empty_like(rows)
    library().akv_rms_norm(
        rows.data_ptr(),
        None if added is None else added.data_ptr(),
        weight.data_ptr(),
        eps,
        normed.data_ptr(),
        None if total is None else total.data_ptr(),
        rows.numel() // hidden,
        hidden,
        torch.get_num_threads(),
    )
    if x.dtype is not torch.float32:
        normed, total = normed.to(x.dtype), None if total is None else total.to(x.dtype)
    return normed if total is None else (normed, total)


def silu_mul(
    gate_up: Tensor,  # [T, 2 * intermediate]
) -> Tensor:  # [T, intermediate]
    """See reference.silu_mul."""
    pairs = _dense(gate_up)
    num_rows, width = pairs.shape
    out = torch.empty(num_rows, width // 2)
    library().akv_silu_mul(pairs.data_ptr(), out.data_ptr(), num_rows, width // 2, torch.get_num_threads())
    return out if gate_up.dtype is torch.float32 else out.to(gate_up.dtype)


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
        self.weights = torch.empty(num_blocks, num_groups, _GROUP // 4, _LANES, 4, dtype=torch.int8)
        self.scales = torch.empty(num_blocks, num_groups, _LANES, dtype=torch.bfloat16)
        dense = _dense(weight)
        library().akv_int8_pack(
            dense.data_ptr(),
            self.num_outputs,
            self.num_inputs,
            self.weights.data_ptr(),
            self.scales.data_ptr(),
            torch.get_num_threads(),
        )

    def __call__(
        self,
        x: Tensor,  # [T, num_inputs]
    ) -> Tensor:  # [T, num_outputs]
        """The product, in x's dtype. Writes nothing but its result."""
        num_rows, num_inputs = x.shape
        assert num_inputs == self.num_inputs
        rows = x if x.dtype is torch.float32 else x.float()
        stride = rows.stride()
        if stride[1] != 1:
            rows = rows.contiguous()
            stride = rows.stride()
        out = torch.empty(num_rows, self.num_outputs)
        _check(
            library().akv_int8_linear(
                rows.data_ptr(),
                stride[0],
                num_rows,
                num_inputs,
                self.weights.data_ptr(),
                self.scales.data_ptr(),
                self.num_outputs,
                out.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def dequantised(self) -> Tensor:  # float32 [num_outputs, num_inputs]
        """The weight that the integers and scales stand for."""
        num_blocks, num_groups = self.scales.shape[:2]
        steps = self.weights.permute(0, 3, 1, 2, 4).reshape(num_blocks * _LANES, num_groups, _GROUP).float()
        scale = self.scales.transpose(1, 2).reshape(num_blocks * _LANES, num_groups, 1).float()
        return (steps * scale).flatten(1)[: self.num_outputs, : self.num_inputs]
