"""Inputs for testing a backend, with a dense float64 truth that shares no code with `reference` or any kernel.

The truth never sees a page table or a delta. It undoes each stored key's rotation by the position it was written at,
rotates the bare key afresh for the position it has now, and takes a plain masked softmax. Rotations here are complex
multiplications; the kernels' are pairs of real ones. Owns no tolerance but the rule `error_bound`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from akv_kernels.plan import AttentionPlan, Rotary, SequencePlan, build_plan


@dataclass(frozen=True)
class AttentionCase:
    """One call of segment_batch_attention and what it has to come to."""

    name: str
    q: Tensor  # [num_rows, num_q_heads, head_dim]
    k_pages: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]; NaN, or huge, wherever no row may look
    v_pages: Tensor
    plan: AttentionPlan
    rotary: Rotary
    scale: float
    k_scale: Tensor | None  # float32 [num_kv_heads] for float8 pages, else None
    v_scale: Tensor | None
    truth: Tensor  # float64 [num_rows, num_q_heads, head_dim]
    torch_out: Tensor  # the same by torch's own attention in q's dtype, on dense keys rotated for their final positions
    mass: Tensor  # float64 [num_table_entries]
    by_position: AttentionPlan  # the wrong plan that masks by stored position; see `mutations`

    def run(self, backend: ModuleType, plan: AttentionPlan | None = None, **kwargs: Any) -> Tensor:
        """`backend.segment_batch_attention` on this case, with another plan if one is given."""
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale} if self.k_scale is not None else {}
        out: Tensor = backend.segment_batch_attention(
            self.q, self.k_pages, self.v_pages, plan or self.plan, scale=self.scale, **scales, **kwargs
        )
        return out

    def to(self, device: torch.device | str) -> AttentionCase:
        """The same case with every tensor on `device`, `rotary` excepted."""
        names = ("q", "k_pages", "v_pages", "k_scale", "v_scale", "truth", "torch_out", "mass", "plan", "by_position")
        moved = {name: getattr(self, name).to(device) for name in names if getattr(self, name) is not None}
        return replace(self, **moved)


def relative_error(got: Tensor, truth: Tensor) -> float:
    """|got - truth| / |truth| in the Frobenius norm; infinite where `got` has a NaN or an infinity."""
    got = got.double()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - truth).norm() / truth.norm().clamp_min(1e-300))


def error_bound(case: AttentionCase) -> float:
    """Twice the error that torch's attention makes in the same dtype against the same truth."""
    return 2 * relative_error(case.torch_out, case.truth)


def rotate(
    x: Tensor,  # float64 [N, heads, head_dim]
    positions: Tensor,  # int [N]
    rotary: Rotary,
) -> Tensor:
    """Rotate each token for its position, as a product of complex numbers; magnitude not applied."""
    half = len(rotary.inv_freq)
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    lead = x.shape[:-1]
    pairs = turning.reshape(*lead, half, 2) if rotary.interleaved else turning.reshape(*lead, 2, half).transpose(-1, -2)
    angle = positions.double()[:, None, None] * rotary.inv_freq
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    turned = turned.flatten(-2) if rotary.interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def dense_attention(
    q: Tensor,  # [rows, num_q_heads, head_dim]
    key: Tensor,  # [tokens, num_kv_heads, head_dim], rotated for their final positions
    value: Tensor,
    visible: Tensor,  # bool [rows, tokens]
    scale: float,
) -> tuple[Tensor, Tensor]:  # [rows, num_q_heads, head_dim], probabilities [num_q_heads, rows, tokens]
    """Plain masked softmax attention over dense tensors, in their dtype; every row sees something."""
    group = q.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))
    score = (q.transpose(0, 1) @ key.transpose(1, 2)) * scale
    probability = score.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (probability @ value).transpose(0, 1), probability


def make_rotary(head_dim: int, *, rotary_dim: int | None = None, interleaved: bool = False) -> Rotary:
    """A plain rotary embedding with base 10000 over the first `rotary_dim` dims (all of them by default)."""
    dim = rotary_dim or head_dim
    return Rotary(inv_freq=10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim), interleaved=interleaved)


def make_attention_case(
    name: str,
    *,
    seed: int = 0,
    rows: Sequence[int] = (
        1,
        7,
        1,
    ),  # of each sequence: its last visible tokens, over as many segments as it takes
    segments: Sequence[int] = (1, 4, 3),  # number of segments of each sequence
    max_length: int = 40,  # tokens of a segment: 1 to max_length
    max_position: int = 4000,
    page_size: int = 16,
    head_dim: int = 64,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,  # of the pages, if not `dtype`; float8 brings scales
    garbage: float = float("nan"),  # what lies in slots that no row may see
) -> AttentionCase:
    """Random sequences over shuffled pages; the last sequence also shares the first one's pages, with other deltas.

    Segments start and end anywhere in a page and several may share one; tokens keep increasing positions but were
    written at others, so deltas have both signs and no segment is spared one.
    """
    gen = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    is_float8 = kv_dtype.itemsize == 1
    rotary = make_rotary(head_dim, rotary_dim=rotary_dim, interleaved=interleaved)

    def randint(low: int, high: int) -> int:  # low <= result <= high
        return int(torch.randint(low, high + 1, (1,), generator=gen))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=gen)

    # Plain integers first: where each token of each sequence lies, and its index and two positions.
    specs: list[list[tuple[int, int, int, int, int]]] = []  # (slot, length, index, position, written position)
    for number, num_rows in enumerate(rows):
        spec = []
        slot = randint(0, 2 * page_size)
        index = randint(0, 50)
        position = randint(0, 50)
        for _ in range(segments[number]):
            length = randint(1, max_length)
            spec.append((slot, length, index, position, randint(0, max_position)))
            slot += length + (randint(0, 1) and randint(1, 2 * page_size))
            index += length + randint(1, 300)
            position += length + randint(0, max_position // 50)
        missing = num_rows - sum(length for _, length, *_ in spec)
        if missing > 0:  # as many visible tokens as rows
            slot, length, *rest = spec[-1]
            spec[-1] = (slot, length + missing, rest[0], rest[1], rest[2])
        specs.append(spec)
    if len(specs) > 1:
        forked = [(s, n, i, p + 11, w) for s, n, i, p, w in specs[0]]
        specs.append(forked)
        rows = (*rows, 1)

    pages_of = [-(-(spec[-1][0] + spec[-1][1]) // page_size) for spec in specs]
    own = len(pages_of) - (len(specs) > 1)
    ids = torch.randperm(sum(pages_of[:own]) + 3, generator=gen).tolist()
    tables: list[list[int]] = []
    for count in pages_of[:own]:
        tables.append([ids.pop() for _ in range(count)])
    if own < len(specs):
        tables.append(tables[0])

    num_pages = sum(pages_of[:own]) + 3
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    k_pages, v_pages = (torch.full(shape, garbage).to(kv_dtype) for _ in range(2))
    k_scale = v_scale = None
    if is_float8:
        k_scale = (0.01 + 0.02 * torch.rand(num_kv_heads, generator=gen)).float()
        v_scale = (0.01 + 0.02 * torch.rand(num_kv_heads, generator=gen)).float()

    def stored(x: Tensor, scale: Tensor | None) -> Tensor:  # rounded as the pages round it
        return x.to(kv_dtype) if scale is None else (x / scale.double()[:, None]).to(kv_dtype)

    def loaded(x: Tensor, scale: Tensor | None) -> Tensor:
        return x.double() if scale is None else x.double() * scale.double()[:, None]

    plans, by_position, qs, truths, torch_outs, masses = [], [], [], [], [], []
    for number, (spec, num_rows) in enumerate(zip(specs, rows, strict=True)):
        table = torch.tensor(tables[number])
        slots, indexes, positions, written = (
            torch.cat([torch.arange(part[column], part[column] + part[1]) for part in spec]) for column in (0, 2, 3, 4)
        )
        page, offset = table[slots // page_size], slots % page_size
        if number < own:
            k_pages[page, offset] = stored(rotate(randn(len(slots), num_kv_heads, head_dim), written, rotary), k_scale)
            v_pages[page, offset] = stored(randn(len(slots), num_kv_heads, head_dim), v_scale)
        bare = rotate(loaded(k_pages[page, offset], k_scale), -written, rotary)
        key, value = rotate(bare, positions, rotary), loaded(v_pages[page, offset], v_scale)

        row_index, row_position = indexes[-num_rows:], positions[-num_rows:]
        q = (2 * randn(num_rows, num_q_heads, head_dim)).to(dtype)
        visible = indexes <= row_index[:, None]
        truth, probability = dense_attention(q.double(), key, value, visible, head_dim**-0.5)
        torch_out, _ = dense_attention(q, key.to(dtype), value.to(dtype), visible, head_dim**-0.5)
        mass = torch.zeros(len(table), dtype=torch.float64)
        mass.index_add_(0, slots // page_size, probability.sum(dim=(0, 1)))
        qs.append(q)
        truths.append(truth)
        torch_outs.append(torch_out)
        masses.append(mass)
        right = [(slot, length, start, now - then) for slot, length, start, now, then in spec]
        wrong = [(slot, length, then, now - then) for slot, length, start, now, then in spec]
        plans.append(SequencePlan(row_index.tolist(), tables[number], right))
        by_position.append(SequencePlan(row_position.tolist(), tables[number], wrong))

    return AttentionCase(
        name=name,
        q=torch.cat(qs),
        k_pages=k_pages,
        v_pages=v_pages,
        plan=build_plan(plans, rotary, page_size),
        rotary=rotary,
        scale=head_dim**-0.5,
        k_scale=k_scale,
        v_scale=v_scale,
        truth=torch.cat(truths),
        torch_out=torch.cat(torch_outs),
        mass=torch.cat(masses),
        by_position=build_plan(by_position, rotary, page_size),
    )


def attention_cases(dtype: torch.dtype = torch.float32, **common: Any) -> list[AttentionCase]:
    """The cases every backend has to pass. `common` overrides, for example kv_dtype or garbage."""
    one_group = {"num_q_heads": 2, "num_kv_heads": 1}
    shapes: dict[str, dict[str, Any]] = {
        "mixed": {},
        "one_segment_decode": {"rows": (1,), "segments": (1,)},
        "prefill_across_segments": {"rows": (33, 1, 20), "segments": (5, 2, 3), "max_length": 24},
        "many_short_segments": {"rows": (1, 3), "segments": (40, 25), "max_length": 5},
        "page_size_1": {"page_size": 1, "rows": (1, 9)},
        "page_size_64": {"page_size": 64, "max_length": 150},
        "far_deltas": {"max_position": 100_000},
        "head_dim_80": {"head_dim": 80},
        "head_dim_96": {"head_dim": 96, "num_q_heads": 4, "num_kv_heads": 4},
        "head_dim_128": {"head_dim": 128, "num_q_heads": 8, "num_kv_heads": 2},
        "head_dim_256": {"head_dim": 256, "num_q_heads": 2, "num_kv_heads": 1, "max_length": 20},
        "partial_rotary": {"head_dim": 80, "rotary_dim": 32},
        "interleaved": {"interleaved": True},
        "interleaved_partial": {"head_dim": 128, "rotary_dim": 64, "interleaved": True, "num_q_heads": 2},
        "nine_heads": {"num_q_heads": 9, "num_kv_heads": 3, "rows": (12, 1), "segments": (3, 6)},
        "long_context": {"rows": (2, 1), "segments": (3, 1), "max_length": 600, "num_q_heads": 3, "num_kv_heads": 1},
        # more than the Triton kernel looks through at once
        "over_64_segments": {"rows": (1, 3), "segments": (150, 90), "max_length": 3, **one_group},
        "over_64_sequences": {"rows": (2,) * 70, "segments": (1,) * 70, "max_length": 4, **one_group},
    }
    return [
        make_attention_case(name, seed=seed, dtype=dtype, **{**shape, **common})
        for seed, (name, shape) in enumerate(shapes.items())
    ]


def mutations(case: AttentionCase) -> dict[str, AttentionPlan]:
    """Plans with one classic mistake each; on a case whose segments share pages, each of them misses the truth."""
    plan, table = case.plan, case.rotary.table
    first = torch.repeat_interleave(plan.seq_segments[:-1], plan.seq_segments.diff()).long()
    flipped = torch.stack((plan.seg_rotation[:, 0], -plan.seg_rotation[:, 1]), dim=1)
    return {
        "wrong_sign": replace(plan, seg_rotation=flipped),
        "delta_off_by_one": replace(plan, seg_rotation=table(plan.seg_delta + 1)),
        "first_page_offset_ignored": replace(plan, seg_slot=plan.seg_slot // plan.page_size * plan.page_size),
        "one_delta_per_sequence": replace(plan, seg_rotation=plan.seg_rotation[first]),
        "other_pairing": replace(plan, interleaved=not plan.interleaved),
        "mask_by_position": case.by_position,
    }
