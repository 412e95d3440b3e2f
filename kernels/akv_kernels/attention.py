"""segment_batch_attention in Triton: decode and prefill, any mix of both, over any number of segments, in one launch.

Owns the two kernels (attention over a slice of the context; reduction of the slices) and how work is cut for them.
Knows the plan's arrays and no layout, stream or pool.

    program (tile, kv head, split):   rows of one sequence times the query heads of one KV head   [BLOCK_M]
                                      x  the split's slice of the tokens these rows see, tile by tile [BLOCK_N]

The stored key of a segment must turn by R(delta). Since q . R(delta) k = (R(-delta) q) . k, the query is turned once
per segment instead of every key of it (`rotation="query"`); turning keys (`rotation="key"`) gives the same scores and
is there to be compared. Causality is by stream index: a moved segment stays before what came after it.
"""

# Parameters of Triton kernels have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from akv_kernels.pages import load_pairs, pair_columns
from akv_kernels.plan import AttentionPlan

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32
SEGMENT_BLOCK = tl.constexpr(64)  # segments, or sequences, looked through at once


@triton.jit
def seen_tokens(
    seg_length,
    seg_start,
    segment,  # int [N]
    ok,  # bool [N]
    last_index,
):
    """How many tokens of each segment have an index up to last_index; zero where not ok."""
    length = tl.load(seg_length + segment, mask=ok, other=0)
    start = tl.load(seg_start + segment, mask=ok, other=0)
    return tl.maximum(tl.minimum(last_index + 1 - start, length), 0)


@triton.jit
def store_rows(
    out,
    lse,  # or None
    lane,  # int64 [N], (row, head) numbers
    result,  # float32 [N, width]
    log_sum,  # float32 [N]
    live,  # bool [N]
    HEAD_DIM: tl.constexpr,
):
    c = tl.arange(0, result.shape[1])
    mask = live[:, None] & (c < HEAD_DIM)[None, :]
    tl.store(out + lane[:, None] * HEAD_DIM + c[None, :], result.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + lane, log_sum, mask=live)


@triton.jit
def segment_batch_kernel(
    q,  # [num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_pages,  # [num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM]
    v_pages,
    k_scale,  # float32 [NUM_KV_HEADS] or None
    v_scale,
    row_index,  # the plan's arrays
    seq_rows,
    seq_segments,
    seq_pages,
    page_table,
    seg_slot,
    seg_length,
    seg_start,
    seg_rotation,
    out,  # like q
    lse,  # float32 [num_rows, num_q_heads] or None; log2 of each row's sum of exponentials
    partial_out,  # float32 [num_splits, num_seqs, rows of a tile, num_q_heads, HEAD_DIM] or None
    partial_lse,  # float32 [num_splits, num_seqs, rows of a tile, num_q_heads] or None
    page_mass,  # float32 [num_table_entries] or None; if given, `lse` is read and only page_mass is written
    num_seqs,
    score_scale,  # in units of log2
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTATE_KEY: tl.constexpr,
    ONE_ROW: tl.constexpr,  # no sequence has more than one row: nothing to mask but the end
    PAIRS: tl.constexpr,  # power of two, at least HEAD_DIM // 2
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # Which sequence? Its tiles begin at seq_rows // TILE_ROWS + its number, which leaves room for every partial tile.
    if ONE_ROW:
        seq = tile
        seq_begin = tl.load(seq_rows + seq)
        first_row = seq_begin
    else:
        seq = -1
        for base in range(0, num_seqs, SEGMENT_BLOCK):
            number = base + tl.arange(0, SEGMENT_BLOCK)
            begin = tl.load(seq_rows + number, mask=number < num_seqs, other=2147483647 // 2)
            seq += tl.sum(((begin // TILE_ROWS + number <= tile) & (number < num_seqs)).to(tl.int32))
        seq_begin = tl.load(seq_rows + seq)
        first_row = seq_begin + (tile - seq_begin // TILE_ROWS - seq) * TILE_ROWS
    seq_end = tl.load(seq_rows + seq + 1)
    # Only a sequence of a single tile is split over the context: longer ones fill the machine with tiles.
    num_splits = tl.where(seq_end - seq_begin > TILE_ROWS, 1, tl.num_programs(2))
    if (first_row >= seq_end) | (split >= num_splits):
        return

    m = tl.arange(0, BLOCK_M)
    row = first_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = (row < seq_end) & (m < TILE_ROWS * GROUP)
    index = tl.load(row_index + row, mask=live, other=-1)
    last_index = tl.load(row_index + tl.minimum(first_row + TILE_ROWS, seq_end) - 1)
    lane = row.to(tl.int64) * NUM_Q_HEADS + head

    # This split's slice [begin, end) of the tokens that the tile sees, counted over all its segments.
    seg_begin = tl.load(seq_segments + seq)
    seg_end = tl.load(seq_segments + seq + 1)
    total = 0
    for base in range(seg_begin, seg_end, SEGMENT_BLOCK):
        number = base + tl.arange(0, SEGMENT_BLOCK)
        total += tl.sum(seen_tokens(seg_length, seg_start, number, number < seg_end, last_index))
    share = tl.cdiv(tl.cdiv(total, BLOCK_N), num_splits) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, total)

    # The segments [first_seg, last_seg) it touches; `passed` tokens lie before the first of them.
    first_seg = seg_begin
    last_seg = seg_begin
    passed = 0
    counted = 0
    for base in range(seg_begin, seg_end, SEGMENT_BLOCK):
        number = base + tl.arange(0, SEGMENT_BLOCK)
        seen = seen_tokens(seg_length, seg_start, number, number < seg_end, last_index)
        upto = counted + tl.cumsum(seen, 0)
        before = (upto <= begin) & (seen > 0)
        first_seg += tl.sum(before.to(tl.int32))
        last_seg += tl.sum(((upto - seen < end) & (seen > 0)).to(tl.int32))
        passed = tl.maximum(passed, tl.max(tl.where(before, upto, 0)))
        counted += tl.sum(seen)

    # Columns of a K tile: as they lie in memory if pairs are interleaved, else all first halves and all second halves.
    c = tl.arange(0, 2 * PAIRS)
    i = tl.arange(0, PAIRS)
    if INTERLEAVED:
        k_column = c
        k_column_ok = c < HEAD_DIM
    else:
        one, two = pair_columns(c % PAIRS, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        k_column = tl.where(c < PAIRS, one, two)
        k_column_ok = c % PAIRS < HEAD_DIM // 2
        if 2 * PAIRS == HEAD_DIM and ROTARY_DIM == HEAD_DIM:
            k_column = c
    if ROTATE_KEY:
        q_first, q_second = load_pairs(q + lane * HEAD_DIM, live, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)

    if k_scale is not None:
        score_scale *= tl.load(k_scale + kv_head)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # largest score so far, before scaling
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 2 * PAIRS], tl.float32)
    if page_mass is not None:
        row_lse = tl.load(lse + lane, mask=live, other=float("inf"))
    pages = page_table + tl.load(seq_pages + seq)

    for seg in range(first_seg, last_seg):
        start = tl.load(seg_start + seg)
        seen = tl.maximum(tl.minimum(last_index + 1 - start, tl.load(seg_length + seg)), 0)
        first_slot = tl.load(seg_slot + seg)
        angles = seg_rotation + seg * ROTARY_DIM + i
        cos = tl.load(angles, mask=i < ROTARY_DIM // 2, other=1.0)[None, :]
        sin = tl.load(angles + ROTARY_DIM // 2, mask=i < ROTARY_DIM // 2, other=0.0)[None, :]
        if not ROTATE_KEY:  # R(-delta) q, rounded once
            # Zero, but not to the compiler: else it would read q only once and hold it in registers through the tiles.
            zero = tl.multiple_of(tl.minimum(seg, 0), 16)
            lanes = q + lane * HEAD_DIM + zero
            q_first, q_second = load_pairs(lanes, live, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)
            turned_first = q_first.to(tl.float32) * cos + q_second.to(tl.float32) * sin
            turned_second = q_second.to(tl.float32) * cos - q_first.to(tl.float32) * sin
            turned = tl.join(turned_first.to(q.dtype.element_ty), turned_second.to(q.dtype.element_ty))
            if not INTERLEAVED:
                turned = tl.permute(turned, (0, 2, 1))
            turned = tl.reshape(turned, [BLOCK_M, 2 * PAIRS])

        stop = tl.minimum(end - passed, seen)
        for token in range(tl.maximum(begin - passed, 0), stop, BLOCK_N):
            t = token + tl.arange(0, BLOCK_N)
            ok = t < stop
            slot = (first_slot + t).to(tl.uint32)
            page = tl.load(pages + slot // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
            place = ((page * PAGE_SIZE + slot % PAGE_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
            if ROTATE_KEY:
                k_first, k_second = load_pairs(k_pages + place, ok, HEAD_DIM, ROTARY_DIM, INTERLEAVED, PAIRS)
                near = k_first.to(tl.float32) * cos - k_second.to(tl.float32) * sin
                far = k_second.to(tl.float32) * cos + k_first.to(tl.float32) * sin
                score = tl.dot(q_first, tl.trans(near.to(q.dtype.element_ty)), input_precision="ieee")
                score = tl.dot(q_second, tl.trans(far.to(q.dtype.element_ty)), score, input_precision="ieee")
            else:
                mask = ok[:, None] if 2 * PAIRS == HEAD_DIM else ok[:, None] & k_column_ok[None, :]
                k = tl.load(k_pages + place[:, None] + k_column[None, :], mask=mask, other=0.0)
                score = tl.dot(turned, tl.trans(k.to(q.dtype.element_ty)), input_precision="ieee")
            visible = ok[None, :] if ONE_ROW else ok[None, :] & (start + t[None, :] <= index[:, None])
            score = tl.where(visible, score, float("-inf"))

            if page_mass is not None:
                # A row that sees nothing has no sum to divide by: -inf minus -inf.
                p = tl.where(visible, tl.exp2(score * score_scale - row_lse[:, None]), 0.0)
                entry = tl.load(seq_pages + seq) + slot // PAGE_SIZE
                tl.atomic_add(page_mass + entry, tl.sum(p, 0), mask=ok, sem="relaxed")
            else:
                mask = ok[:, None] if 2 * PAIRS == HEAD_DIM else ok[:, None] & (c < HEAD_DIM)[None, :]
                v = tl.load(v_pages + place[:, None] + c[None, :], mask=mask, other=0.0)
                new_top = tl.maximum(top, tl.max(score, 1))
                finite_top = tl.where(new_top == float("-inf"), 0.0, new_top) * score_scale
                p = tl.exp2(score * score_scale - finite_top[:, None])
                fade = tl.exp2(top * score_scale - finite_top)
                norm = norm * fade + tl.sum(p, 1)
                acc = acc * fade[:, None]
                acc = tl.dot(p.to(q.dtype.element_ty), v.to(q.dtype.element_ty), acc, input_precision="ieee")
                top = new_top
        passed += seen

    if page_mass is None:
        result = acc * (1.0 / tl.where(norm > 0, norm, 1.0))[:, None]
        if v_scale is not None:
            result *= tl.load(v_scale + kv_head)
        log_sum = tl.where(norm > 0, top * score_scale + tl.log2(tl.where(norm > 0, norm, 1.0)), float("-inf"))
        if partial_out is None:  # noqa: SIM114 - decided when compiling
            store_rows(out, lse, lane, result, log_sum, live, HEAD_DIM)
        elif num_splits == 1:
            store_rows(out, lse, lane, result, log_sum, live, HEAD_DIM)
        else:
            place = ((split * num_seqs + seq).to(tl.int64) * TILE_ROWS + row - seq_begin) * NUM_Q_HEADS + head
            store_rows(partial_out, partial_lse, place, result, log_sum, live, HEAD_DIM)


@triton.jit
def reduce_splits_kernel(
    partial_out,  # float32 [num_splits, num_seqs, TILE_ROWS, num_q_heads, HEAD_DIM]
    partial_lse,  # float32 [num_splits, num_seqs, TILE_ROWS, num_q_heads]
    row_seq,
    seq_rows,
    out,  # [num_rows, num_q_heads, HEAD_DIM]
    lse,  # float32 [num_rows, num_q_heads] or None
    num_seqs,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,  # power of two, at least num_splits
):
    """out = sum over splits of 2**(lse - lse of all) * partial_out, for rows of sequences that were split."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_q_heads = tl.num_programs(1)
    seq = tl.load(row_seq + row)
    seq_begin = tl.load(seq_rows + seq)
    if tl.load(seq_rows + seq + 1) - seq_begin > TILE_ROWS:
        return
    split = tl.arange(0, SPLIT_BLOCK)
    place = ((split * num_seqs + seq).to(tl.int64) * TILE_ROWS + row - seq_begin) * num_q_heads + head
    log_sum = tl.load(partial_lse + place, mask=split < num_splits, other=float("-inf"))
    top = tl.max(log_sum, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(log_sum - top)
    norm = tl.sum(weight, 0)
    c = tl.arange(0, 2 * PAIRS)
    mask = (log_sum > float("-inf"))[:, None] & (c < HEAD_DIM)[None, :]
    part = tl.load(partial_out + place[:, None] * HEAD_DIM + c[None, :], mask=mask, other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(norm > 0, norm, 1.0)
    lane = row.to(tl.int64) * num_q_heads + head
    tl.store(out + lane * HEAD_DIM + c, result.to(out.dtype.element_ty), mask=c < HEAD_DIM)
    if lse is not None:
        tl.store(lse + lane, tl.where(norm > 0, top + tl.log2(norm), float("-inf")))


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one launch of `segment_batch_kernel` is cut."""

    block_m: int  # (row, query head) pairs of a program
    block_n: int  # tokens of a tile
    num_warps: int
    num_stages: int


def choose_tiling(
    max_rows: int,
    group: int,
    head_dim: int,
    element_size: int,  # bytes of a stored key's element
    shared_limit: int,  # bytes of shared memory a program may have
    interleaved: bool,
    turns_keys: bool,
) -> Tiling:
    """Decode packs one KV head's query heads into the smallest tensor-core tile; prefill fills as many rows as the
    registers hold (found by compiling: the next larger tile spills). Then the deepest pipeline whose K and V tiles fit
    beside the queries.
    """
    width = triton.next_power_of_2(head_dim)
    block_m, num_warps = max(16, triton.next_power_of_2(group)), 4
    if element_size == 4:  # float32 has no tensor cores: its products are unrolled, and registers hold few of them
        return Tiling(block_m, 32, 4, 2) if width <= 128 else Tiling(block_m, 16, 8, 2)
    is_hopper = shared_limit > 200 * 1024
    wide = True
    if max_rows * group > block_m:
        converts = element_size == 1 and not is_hopper  # float8, which takes many registers there
        if shared_limit < 128 * 1024:
            block_m = max(64, block_m)
        else:
            block_m, num_warps = (128 if width <= 128 else max(16 if turns_keys else 32, block_m)), 8
            block_m = min(block_m, max(64, triton.next_power_of_2(group))) if converts else block_m
        wide = (num_warps == 4 or width > 128 or is_hopper) and not converts and not interleaved
    # Turned keys are held in float32. At head_dim 256 tiles of 64 tokens spill on sm_90 and sm_80 under Triton 3.6 and
    # 3.9, in decode and prefill. Of 32 (and in prefill of 16 lanes: 32 spill on sm_80 under 3.9) prefill spills under
    # neither; decode nowhere but on sm_90 under 3.6 with groups of 4, where it is not the default.
    wide = wide and not (turns_keys and width > 128)
    for block_n, num_stages in (((64, 3), (64, 2)) if wide else ()) + ((32, 2), (16, 2)):
        buffers = max(2, num_stages - 1)  # of K and V each, as Triton allots them
        if 2 * block_n * width * element_size * buffers + 2 * block_m * width <= shared_limit * 0.9:
            break
    return Tiling(block_m, block_n, num_warps, num_stages)


def _device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of a program; those of an H100 where there is no GPU."""
    if device.type == "cpu":  # the interpreter
        return 132, 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


def segment_batch_attention(
    q: Tensor,  # [num_rows, num_q_heads, head_dim], rotated for each row's position
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], rotated for the position they were written at
    v_pages: Tensor,  # like k_pages
    plan: AttentionPlan,
    *,
    scale: float,  # of the scores, usually head_dim ** -0.5
    out: Tensor | None = None,  # like q; written and returned if given
    page_mass: Tensor | None = None,  # float32 [num_table_entries]; added to
    k_scale: Tensor | None = None,  # float32 [num_kv_heads], only for float8 pages: the key is stored * k_scale
    v_scale: Tensor | None = None,
    rotation: Literal["query", "key"] = "query",  # which side of the score turns
) -> Tensor:  # like q
    """Attention of every row over the visible slots of its own sequence, keys turned by their segment's delta.

    Means what `reference.segment_batch_attention` says. One launch, and one to reduce where the context was split;
    `page_mass` costs a second pass over the keys, after the softmax is known. Never waits for the device, and takes
    lengths, segments and deltas from device memory: a CUDA graph captured for a shape of the plan's arrays holds for
    any of their values that keep max_rows.
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    group = num_q_heads // num_kv_heads
    assert q.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous()
    assert k_pages.shape[1] == plan.page_size and num_q_heads % num_kv_heads == 0 and head_dim % 2 == 0
    assert scale > 0 and (k_scale is None) == (v_scale is None)
    out = torch.empty_like(q) if out is None else out
    num_seqs = len(plan.seq_rows) - 1
    if num_rows == 0:
        return out

    num_multiprocessors, shared_limit = _device_limits(q.device)
    tiling = choose_tiling(
        plan.max_rows, group, head_dim, k_pages.element_size(), shared_limit, plan.interleaved, rotation == "key"
    )
    tile_rows = tiling.block_m // group
    num_tiles = num_seqs if plan.max_rows == 1 else num_rows // tile_rows + num_seqs
    slots = len(plan.page_table) * plan.page_size // num_seqs  # at least what a sequence sees, on average
    # Enough programs to fill the machine twice, each with at least two tiles of tokens.
    wanted = triton.cdiv(2 * num_multiprocessors, num_tiles * num_kv_heads)
    num_splits = max(1, min(wanted, slots // (2 * tiling.block_n), MAX_SPLITS))

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    lse = empty(num_rows, num_q_heads) if page_mass is not None else None
    partial_out = partial_lse = None
    if num_splits > 1:
        partial_out = empty(num_splits, num_seqs, tile_rows, num_q_heads, head_dim)
        partial_lse = empty(num_splits, num_seqs, tile_rows, num_q_heads)
    pairs = triton.next_power_of_2(head_dim // 2)

    def launch(mass: Tensor | None) -> None:
        segment_batch_kernel[(num_tiles, num_kv_heads, num_splits)](
            q,
            k_pages,
            v_pages,
            k_scale,
            v_scale,
            plan.row_index,
            plan.seq_rows,
            plan.seq_segments,
            plan.seq_pages,
            plan.page_table,
            plan.seg_slot,
            plan.seg_length,
            plan.seg_start,
            plan.seg_rotation,
            out,
            lse,
            partial_out if mass is None else None,
            partial_lse if mass is None else None,
            mass,
            num_seqs,
            scale * LOG2_E,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            ROTARY_DIM=2 * plan.seg_rotation.shape[2],
            PAGE_SIZE=plan.page_size,
            INTERLEAVED=plan.interleaved,
            ROTATE_KEY=rotation == "key",
            ONE_ROW=plan.max_rows == 1,
            PAIRS=pairs,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )

    launch(None)
    if num_splits > 1:
        reduce_splits_kernel[(num_rows, num_q_heads)](
            partial_out,
            partial_lse,
            plan.row_seq,
            plan.seq_rows,
            out,
            lse,
            num_seqs,
            num_splits,
            HEAD_DIM=head_dim,
            PAIRS=pairs,
            TILE_ROWS=tile_rows,
            SPLIT_BLOCK=triton.next_power_of_2(num_splits),
            num_warps=4,
        )
    if page_mass is not None:
        launch(page_mass)
    return out
