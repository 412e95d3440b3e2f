"""The specification: each kernel as plainly as it can be said, in float64, rounded once at the end.

Owns the meaning that `cpu` and `gpu` are tested against, and the docstrings of their interface. Slow on purpose.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from akv_kernels.plan import AttentionPlan


def _turn(
    x: Tensor,  # float64 [..., head_dim]
    rotation: Tensor,  # [..., 2, rotary_dim // 2], broadcast against x's leading dims
    interleaved: bool,
    scale: float = 1.0,
) -> Tensor:
    """R(angle) x: each pair (a, b) of the first rotary_dim dims becomes (a cos - b sin, b cos + a sin) * scale."""
    half = rotation.shape[-1]
    cos, sin = rotation.double().unbind(-2)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    turned = x.clone()
    turned[..., first] = (a * cos - b * sin) * scale
    turned[..., second] = (b * cos + a * sin) * scale
    return turned


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
) -> Tensor:  # like q
    """Attention of every row over the visible slots of its own sequence, keys turned by their segment's delta.

    out[r, h] = sum_j p_j v_j with p = softmax_j(scale * q[r, h] . R(delta_j) k_j) over the slots j that row r sees
    (AttentionPlan says which); zeros for a row that sees none. Query head h reads KV head
    h * num_kv_heads // num_q_heads. `page_mass[e]` grows by the p of the slots of page-table entry e, summed over rows
    and heads.
    Writes only `out` and `page_mass`; never reads a slot that no row sees.
    """
    group = q.shape[1] // k_pages.shape[2]
    result = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    ranges = zip(
        *(pairwise(bounds.tolist()) for bounds in (plan.seq_rows, plan.seq_segments, plan.seq_pages)), strict=True
    )
    for (row_begin, row_end), (segment_begin, segment_end), (page_begin, _) in ranges:
        keys, values, indexes, entries = [], [], [], []
        for segment in range(segment_begin, segment_end):
            token = torch.arange(int(plan.seg_length[segment]), device=q.device)
            slot = plan.seg_slot[segment] + token
            entry = page_begin + slot // plan.page_size
            page, offset = plan.page_table[entry].long(), slot % plan.page_size
            keys.append(_turn(k_pages[page, offset].double(), plan.seg_rotation[segment], plan.interleaved))
            values.append(v_pages[page, offset].double())
            indexes.append(plan.seg_start[segment] + token)
            entries.append(entry)
        if not keys:
            continue
        key, value = torch.cat(keys), torch.cat(values)  # [num_slots, num_kv_heads, head_dim]
        if k_scale is not None:
            key = key * k_scale.double()[:, None]
        if v_scale is not None:
            value = value * v_scale.double()[:, None]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        index, entry = torch.cat(indexes), torch.cat(entries)
        for row in range(row_begin, row_end):
            seen = index <= plan.row_index[row]
            if not seen.any():
                continue
            score = scale * torch.einsum("hd,nhd->nh", q[row].double(), key[seen])
            probability = score.softmax(dim=0)
            result[row] = torch.einsum("nh,nhd->hd", probability, value[seen])
            if page_mass is not None:
                page_mass.index_add_(0, entry[seen], probability.sum(dim=1).to(page_mass.dtype))
    if out is None:
        return result.to(q.dtype)
    return out.copy_(result)


def rope_and_write(
    q: Tensor,  # [T, num_q_heads, head_dim], not rotated
    k: Tensor,  # [T, num_kv_heads, head_dim], not rotated
    v: Tensor,  # like k
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: Tensor,
    slots: Tensor,  # int64 [T]: page_id * page_size + offset, or -1: resident already, do not write
    rotation: Tensor,  # float32 [T, 2, rotary_dim // 2] = rotary.table(positions)
    *,
    interleaved: bool,
    scale: float = 1.0,  # the rotary's magnitude
    k_scale: Tensor | None = None,  # float32 [num_kv_heads], only for float8 pages: keys are stored divided by it
    v_scale: Tensor | None = None,
) -> Tensor:  # like q
    """Rotate new queries and keys for their positions; write the keys and values into their slots.

    Returns the rotated q, which in other backends may be `q` itself, overwritten; k and v are left alone. Slots of
    one call are distinct.
    """
    turn = rotation[:, None]  # over the heads
    kept = slots >= 0
    key, value = _turn(k.double(), turn, interleaved, scale), v.double()
    if k_scale is not None:
        key = key / k_scale.double()[:, None]
    if v_scale is not None:
        value = value / v_scale.double()[:, None]
    k_pages.flatten(0, 1)[slots[kept]] = key[kept].to(k_pages.dtype)
    v_pages.flatten(0, 1)[slots[kept]] = value[kept].to(v_pages.dtype)
    return _turn(q.double(), turn, interleaved, scale).to(q.dtype)


def repos_pages(
    k_pages: Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: Tensor,
    src_slots: Tensor,  # int64 [N]: page_id * page_size + offset
    dst_slots: Tensor,  # int64 [N]: distinct, and none of them in src_slots
    rotation: Tensor,  # float32 [N, 2, rotary_dim // 2] = rotary.table(delta of each token)
    *,
    interleaved: bool,
) -> None:
    """Copy tokens to other slots, turning each key by its own row of `rotation`; values are copied bit for bit."""
    keys, values = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    keys[dst_slots] = _turn(keys[src_slots].double(), rotation[:, None], interleaved).to(k_pages.dtype)
    values[dst_slots] = values[src_slots]


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor,  # [hidden]
    eps: float,
    residual: Tensor | None = None,  # like x
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dim; with `residual`: that of x + residual, and the sum."""
    total = x.double() if residual is None else x.double() + residual.double()
    normed = (total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps) * weight.double()).to(x.dtype)
    return normed if residual is None else (normed, total.to(x.dtype))


def silu_mul(
    gate_up: Tensor,  # [T, 2 * intermediate]: gate, then up
) -> Tensor:  # [T, intermediate]
    """silu(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
