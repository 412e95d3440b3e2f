"""Triton kernels that move keys and values into pages, turning keys on the way: RoPE and write, and `repos_pages`.

Owns the pairing of head dims that the attention kernel shares. Knows slots, not who holds the pages. Every token is
read once and written once; angles arrive as float32 cosines and sines, so no kernel calls a sine.
"""

# Parameters of Triton kernels have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_LANES = 16  # (token, head) pairs of one program


@triton.jit
def pair_columns(
    i,  # int [PAIRS], pair numbers
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The two head dims of each pair. Dims beyond ROTARY_DIM are paired among themselves: they turn by nothing."""
    if INTERLEAVED:
        first = 2 * i
        second = 2 * i + 1
    elif ROTARY_DIM == HEAD_DIM:
        first = i
        second = i + HEAD_DIM // 2
    else:
        turns = i < ROTARY_DIM // 2
        first = tl.where(turns, i, i + ROTARY_DIM // 2)
        second = tl.where(turns, i + ROTARY_DIM // 2, i + HEAD_DIM // 2)
    return first, second


@triton.jit
def load_pairs(
    lanes,  # pointers [N], to dim 0 of each lane's vector
    ok,  # bool [N]
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,  # power of two, at least HEAD_DIM // 2
):
    """Both halves of every lane's pairs, [N, PAIRS] each; zero where not `ok` and in the padding."""
    if INTERLEAVED:  # one contiguous read, parted in registers
        c = tl.arange(0, 2 * PAIRS)
        x = tl.load(lanes[:, None] + c[None, :], mask=ok[:, None] & (c < HEAD_DIM)[None, :], other=0.0)
        first, second = tl.split(tl.reshape(x, [lanes.shape[0], PAIRS, 2]))
    else:
        i = tl.arange(0, PAIRS)
        mask = ok[:, None] & (i < HEAD_DIM // 2)[None, :]
        one, two = pair_columns(i, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        first = tl.load(lanes[:, None] + one[None, :], mask=mask, other=0.0)
        second = tl.load(lanes[:, None] + two[None, :], mask=mask, other=0.0)
    return first, second


@triton.jit
def store_pairs(
    lanes,  # pointers [N]
    ok,  # bool [N]
    first,  # [N, PAIRS]
    second,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The inverse of `load_pairs`, converted to the type pointed to."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * PAIRS)
        x = tl.reshape(tl.join(first, second), [lanes.shape[0], 2 * PAIRS])
        x = x.to(lanes.dtype.element_ty)
        tl.store(lanes[:, None] + c[None, :], x, mask=ok[:, None] & (c < HEAD_DIM)[None, :])
    else:
        i = tl.arange(0, PAIRS)
        mask = ok[:, None] & (i < HEAD_DIM // 2)[None, :]
        one, two = pair_columns(i, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        tl.store(lanes[:, None] + one[None, :], first.to(lanes.dtype.element_ty), mask=mask)
        tl.store(lanes[:, None] + two[None, :], second.to(lanes.dtype.element_ty), mask=mask)


@triton.jit
def turn_lanes(
    first,  # [N, PAIRS]
    second,
    angles,  # pointers [N], to each lane's row of a [_, 2, ROTARY_DIM // 2] table
    ok,  # bool [N]
    magnitude,  # of the dims that turn
    ROTARY_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """R(angle) of each lane in float32: (a, b) -> (a cos - b sin, b cos + a sin)."""
    i = tl.arange(0, PAIRS)
    mask = ok[:, None] & (i < ROTARY_DIM // 2)[None, :]
    cos = tl.load(angles[:, None] + i[None, :], mask=mask, other=1.0)
    sin = tl.load(angles[:, None] + ROTARY_DIM // 2 + i[None, :], mask=mask, other=0.0)
    size = tl.where(mask, magnitude, 1.0)
    first = first.to(tl.float32) * size
    second = second.to(tl.float32) * size
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def repos_pages_kernel(
    k_pages,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    v_pages,
    src_slots,  # int64 [num_tokens]
    dst_slots,
    rotation,  # float32 [num_tokens, 2, ROTARY_DIM // 2]
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,  # lanes; a lane is one (token, head)
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = lane // NUM_KV_HEADS
    ok = token < num_tokens
    head = lane % NUM_KV_HEADS
    src = (tl.load(src_slots + token, mask=ok, other=0) * NUM_KV_HEADS + head) * HEAD_DIM
    dst = (tl.load(dst_slots + token, mask=ok, other=0) * NUM_KV_HEADS + head) * HEAD_DIM

    first, second = load_pairs(k_pages + src, ok, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)
    c = tl.arange(0, 2 * PAIRS)
    mask = ok[:, None] & (c < HEAD_DIM)[None, :]
    value = tl.load(v_pages + src[:, None] + c[None, :], mask=mask)
    first, second = turn_lanes(first, second, rotation + token * ROTARY_DIM, ok, 1.0, ROTARY_DIM, PAIRS)
    store_pairs(k_pages + dst, ok, first, second, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)
    tl.store(v_pages + dst[:, None] + c[None, :], value, mask=mask)


def repos_pages(
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], contiguous
    v_pages: Tensor,
    src_slots: Tensor,  # int64 [N]: page_id * page_size + offset
    dst_slots: Tensor,  # int64 [N]: distinct, and none of them in src_slots
    rotation: Tensor,  # float32 [N, 2, rotary_dim // 2] = rotary.table(delta of each token)
    *,
    interleaved: bool,
) -> None:
    """Copy tokens to other slots, turning each key by its own row of `rotation`; values are copied bit for bit."""
    num_kv_heads, head_dim = k_pages.shape[2:]
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and rotation.is_contiguous()
    num_tokens = len(src_slots)
    if num_tokens == 0:
        return
    repos_pages_kernel[(triton.cdiv(num_tokens * num_kv_heads, BLOCK_LANES),)](
        k_pages,
        v_pages,
        src_slots,
        dst_slots,
        rotation,
        num_tokens,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=2 * rotation.shape[2],
        INTERLEAVED=interleaved,
        PAIRS=triton.next_power_of_2(head_dim // 2),
        BLOCK=BLOCK_LANES,
        num_warps=4,
    )


@triton.jit
def rope_and_write_kernel(
    q,  # [num_tokens, NUM_Q_HEADS, HEAD_DIM], rows q_stride apart
    k,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], rows k_stride apart
    v,
    slots,  # int64 [num_tokens], -1: do not write
    rotation,  # float32 [num_tokens, 2, ROTARY_DIM // 2]
    k_scale,  # float32 [NUM_KV_HEADS] or None
    v_scale,
    q_out,  # [num_tokens, NUM_Q_HEADS, HEAD_DIM]
    k_pages,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    v_pages,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    magnitude,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    q_programs = tl.cdiv(num_tokens * NUM_Q_HEADS, BLOCK)
    if program < q_programs:
        lane = program * BLOCK + tl.arange(0, BLOCK)
        token = (lane // NUM_Q_HEADS).to(tl.int64)
        head = lane % NUM_Q_HEADS
        ok = token < num_tokens
        first, second = load_pairs(q + token * q_stride + head * HEAD_DIM, ok, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)
        first, second = turn_lanes(first, second, rotation + token * ROTARY_DIM, ok, magnitude, ROTARY_DIM, PAIRS)
        store_pairs(
            q_out + (token * NUM_Q_HEADS + head) * HEAD_DIM, ok, first, second, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS
        )
    else:
        lane = (program - q_programs) * BLOCK + tl.arange(0, BLOCK)
        token = (lane // NUM_KV_HEADS).to(tl.int64)
        head = lane % NUM_KV_HEADS
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        ok = slot >= 0
        first, second = load_pairs(k + token * k_stride + head * HEAD_DIM, ok, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)
        first, second = turn_lanes(first, second, rotation + token * ROTARY_DIM, ok, magnitude, ROTARY_DIM, PAIRS)
        c = tl.arange(0, 2 * PAIRS)
        mask = ok[:, None] & (c < HEAD_DIM)[None, :]
        value = tl.load(v + (token * v_stride + head * HEAD_DIM)[:, None] + c[None, :], mask=mask)
        if k_scale is not None:
            size = tl.load(k_scale + head)[:, None]
            first = first / size
            second = second / size
            value = value.to(tl.float32) / tl.load(v_scale + head)[:, None]
        dst = (slot * NUM_KV_HEADS + head) * HEAD_DIM
        store_pairs(k_pages + dst, ok, first, second, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)
        tl.store(v_pages + dst[:, None] + c[None, :], value.to(v_pages.dtype.element_ty), mask=mask)


def rope_and_write(
    q: Tensor,  # [T, num_q_heads, head_dim], not rotated; q, k and v may be slices of one projection
    k: Tensor,  # [T, num_kv_heads, head_dim], not rotated
    v: Tensor,  # like k
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], contiguous
    v_pages: Tensor,
    slots: Tensor,  # int64 [T]: page_id * page_size + offset, or -1: resident already, do not write
    rotation: Tensor,  # float32 [T, 2, rotary_dim // 2] = rotary.table(positions)
    *,
    interleaved: bool,
    scale: float = 1.0,  # the rotary's magnitude
    k_scale: Tensor | None = None,  # float32 [num_kv_heads], only for float8 pages: keys are stored divided by it
    v_scale: Tensor | None = None,
) -> Tensor:  # like q, contiguous
    """Rotate new queries and keys for their positions; write the keys and values into their slots. One launch.

    Returns the rotated q in a new tensor; q, k and v are left alone. Slots of one call are distinct.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and rotation.is_contiguous()
    assert all(x.stride()[1:] == (head_dim, 1) or num_tokens == 0 for x in (q, k, v))
    assert (k_scale is None) == (v_scale is None)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    programs = sum(triton.cdiv(num_tokens * heads, BLOCK_LANES) for heads in (num_q_heads, num_kv_heads))
    rope_and_write_kernel[(programs,)](
        q,
        k,
        v,
        slots,
        rotation,
        k_scale,
        v_scale,
        q_out,
        k_pages,
        v_pages,
        num_tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        float(scale),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=2 * rotation.shape[2],
        INTERLEAVED=interleaved,
        PAIRS=triton.next_power_of_2(head_dim // 2),
        BLOCK=BLOCK_LANES,
        num_warps=4,
    )
    return q_out
