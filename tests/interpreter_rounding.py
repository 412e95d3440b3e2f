"""Makes Triton's interpreter compute with bfloat16 and float8 as a GPU does. For tests; `install` it before any kernel.

The interpreter keeps bfloat16 as raw 16-bit integers, which dots and arithmetic then multiply as such, and it truncates
where hardware rounds to nearest even. Here every such operand is widened to float32 first and every result is rounded
by torch. Also lets loops whose bounds were loaded run under Triton 3.6 with a numpy that no longer turns a
one-element array into an integer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
NARROW = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8, np.uint8),
}


def widen(handle: Any) -> Any:
    """The same values as a float32 handle, if they are kept as raw bits."""
    kind = handle.dtype.scalar
    if kind not in NARROW or handle.data.dtype.kind == "f":
        return handle
    dtype, bits, _ = NARROW[kind]
    raw = np.ascontiguousarray(handle.data)
    values = torch.from_numpy(raw.view(np.int16) if bits is torch.int16 else raw).view(dtype).float().numpy()
    return Handle(values, tl.float32)


def narrow(values: np.ndarray, kind: Any) -> Any:
    """float32 values rounded to nearest even into a handle of `kind`."""
    dtype, bits, raw = NARROW[kind]
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(dtype).view(bits).numpy()
    return Handle(rounded.view(raw), kind)


def install() -> None:
    """Patch the interpreter of this process."""
    dot, binary, unary, lang = Builder.create_dot, Builder.binary_op, Builder.unary_op, interpreter._patch_lang_tensor
    casts = {name: getattr(Builder, name) for name in ("create_fp_trunc", "create_fp_to_fp", "create_fp_ext")}

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), d, *rest)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        kind = left.dtype.scalar
        bitwise = op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
        if kind not in NARROW or bitwise:
            return binary(self, left, right, op)
        result = op(widen(left).data, widen(right).data)
        return Handle(result, tl.int1) if result.dtype == np.bool_ else narrow(result, kind)

    def unary_op(self: Any, value: Any, op: Any) -> Any:
        kind = value.dtype.scalar
        return narrow(op(widen(value).data), kind) if kind in NARROW else unary(self, value, op)

    def cast(name: str) -> Any:
        def convert(self: Any, value: Any, dtype: Any, *rest: Any) -> Any:
            wide = widen(value)
            if dtype.scalar in NARROW:
                return narrow(wide.data.astype(np.float32), dtype.scalar)
            if wide is not value:
                return Handle(wide.data.astype(interpreter._get_np_dtype(dtype)), dtype.scalar)
            return casts[name](self, value, dtype, *rest)

        return convert

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        lang(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    Builder.create_dot, Builder.binary_op, Builder.unary_op = create_dot, binary_op, unary_op
    for name in casts:
        setattr(Builder, name, cast(name))
    interpreter._patch_lang_tensor = patch_lang_tensor
