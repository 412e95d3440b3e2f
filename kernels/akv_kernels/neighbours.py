"""Triton kernels around attention: RMSNorm with its residual, SiLU and multiply, and sampling.

Owns only what would otherwise take several launches, or wait for the device: matrix products, embedding and argmax are
torch's. Knows no page and no request.
"""

# Parameters of Triton kernels have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x,  # [num_rows, WIDTH]
    weight,  # [WIDTH]
    residual,  # like x, or None
    out,
    total_out,  # like x, or None
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least WIDTH
):
    at = tl.program_id(0).to(tl.int64) * WIDTH
    c = tl.arange(0, BLOCK)
    ok = c < WIDTH
    total = tl.load(x + at + c, mask=ok, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + at + c, mask=ok, other=0.0).to(tl.float32)
        tl.store(total_out + at + c, total.to(total_out.dtype.element_ty), mask=ok)
    size = tl.rsqrt(tl.sum(total * total, 0) / WIDTH + eps)
    normed = total * size * tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at + c, normed.to(out.dtype.element_ty), mask=ok)


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor,  # [hidden]
    eps: float,
    residual: Tensor | None = None,  # like x
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dim; with `residual`: that of x + residual, and the sum."""
    width = x.shape[-1]
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    out = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(x.numel() // width,)](
            x, weight, residual, out, total, eps, WIDTH=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
        )
    return out if total is None else (out, total)


@triton.jit
def silu_mul_kernel(
    gate_up,  # [num_rows, 2 * width]
    out,  # [num_rows, width]
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < width
    gate = tl.load(gate_up + row * 2 * width + c, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + c, mask=ok, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + c, result.to(out.dtype.element_ty), mask=ok)


def silu_mul(
    gate_up: Tensor,  # [T, 2 * intermediate]: gate, then up
) -> Tensor:  # [T, intermediate]
    """silu(gate) * up."""
    num_rows, both = gate_up.shape
    assert gate_up.is_contiguous()
    out = torch.empty((num_rows, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(both // 2))
        silu_mul_kernel[(num_rows, triton.cdiv(both // 2, block))](gate_up, out, both // 2, BLOCK=block, num_warps=4)
    return out


@triton.jit
def ordered_key(x):
    """float32 -> int32 with the same order; its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def weight_above(
    logits,  # pointer to a row
    num_vocab,
    key,  # int32
    top,  # largest logit
    scale,  # 1 / temperature
    COUNT: tl.constexpr,  # count tokens instead of adding exp((logit - top) * scale)
    BLOCK: tl.constexpr,
):
    """What the tokens with a logit above that of `key` weigh."""
    total = 0.0
    for base in range(0, num_vocab, BLOCK):
        token = base + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < num_vocab, other=float("-inf"))
        weight = tl.full([BLOCK], 1.0, tl.float32) if COUNT else tl.exp((x - top) * scale)
        total += tl.sum(tl.where(ordered_key(x) > key, weight, 0.0), 0)
    return total


@triton.jit
def lowest_key(
    logits,
    num_vocab,
    low,  # int32 keys: the result lies in [low, high]
    high,
    allowed,  # float32
    top,
    scale,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least key of which the tokens above it weigh less than `allowed`, by bisection."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        if weight_above(logits, num_vocab, middle, top, scale, COUNT, BLOCK) < allowed:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def sample_kernel(
    logits,  # float32 [num_rows, num_vocab]
    temperature,  # float32 [num_rows]
    top_k,  # int32 [num_rows]
    top_p,  # float32 [num_rows]
    min_p,  # float32 [num_rows]
    uniform,  # float32 [num_rows]
    out,  # int64 [num_rows]
    num_vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * num_vocab
    heat = tl.load(temperature + row)
    greedy = heat == 0.0
    scale = 1.0 / tl.where(greedy, 1.0, heat)

    top = float("-inf")
    bottom = float("inf")
    for base in range(0, num_vocab, BLOCK):
        token = base + tl.arange(0, BLOCK)
        ok = token < num_vocab
        x = tl.load(logits + token, mask=ok, other=float("-inf"))
        top = tl.maximum(top, tl.max(x, 0))
        bottom = tl.minimum(bottom, tl.min(tl.where(ok, x, float("inf")), 0))
    low = ordered_key(bottom)
    high = ordered_key(top)
    low = tl.where(greedy, high, low)

    # Each filter keeps the logits from some value up: those of which fewer than k, or less mass than p, lie above.
    k = tl.load(top_k + row)
    if (k > 0) & (k < num_vocab):
        low = lowest_key(logits, num_vocab, low, high, k.to(tl.float32), top, scale, True, BLOCK)
    p = tl.load(top_p + row)
    if p < 1.0:
        kept = weight_above(logits, num_vocab, low - 1, top, scale, False, BLOCK)
        low = lowest_key(logits, num_vocab, low, high, p * kept, top, scale, False, BLOCK)
    floor = tl.load(min_p + row)

    total = 0.0
    for base in range(0, num_vocab, BLOCK):
        token = base + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < num_vocab, other=float("-inf"))
        weight = tl.exp((x - top) * scale)
        total += tl.sum(tl.where((ordered_key(x) >= low) & (weight >= floor), weight, 0.0), 0)
    goal = tl.load(uniform + row) * total

    # The first kept token whose cumulative weight passes the goal; the last kept one if rounding lets none.
    picked = num_vocab
    last = 0
    passed = 0.0
    for base in range(0, num_vocab, BLOCK):
        token = base + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < num_vocab, other=float("-inf"))
        weight = tl.exp((x - top) * scale)
        keep = (ordered_key(x) >= low) & (weight >= floor) & (weight > 0.0)
        weight = tl.where(keep, weight, 0.0)
        upto = passed + tl.cumsum(weight, 0)
        picked = tl.minimum(picked, tl.min(tl.where(keep & (upto > goal), token, num_vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(keep, token, 0), 0))
        passed += tl.sum(weight, 0)
    tl.store(out + row, tl.where((picked < num_vocab), picked, last).to(tl.int64))


def sample(
    logits: Tensor,  # float32 [R, vocab]; -inf for what must not be drawn, at least one finite
    temperature: Tensor,  # float32 [R]; 0: greedy
    top_k: Tensor,  # int32 [R]; 0: off
    top_p: Tensor,  # float32 [R]; 1: off
    min_p: Tensor,  # float32 [R]; 0: off
    uniform: Tensor,  # float32 [R] in [0, 1): the draws
) -> Tensor:  # int64 [R]
    """One token per row in one launch, without sorting and without waiting for the device.

    Filters apply in the order temperature, top_k, top_p, min_p, as in transformers; equal logits are kept or dropped
    together, so ties at the edge of top_k all stay. The draw is the token, in order of ids, at which the cumulative
    weight of what is left passes `uniform` of its total. Greedy takes the lowest id of equals.
    """
    num_rows, num_vocab = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(4096, triton.next_power_of_2(num_vocab))
        sample_kernel[(num_rows,)](
            logits, temperature, top_k, top_p, min_p, uniform, out, num_vocab, BLOCK=block, num_warps=8
        )
    return out
