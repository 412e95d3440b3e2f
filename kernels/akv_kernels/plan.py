"""The two values that every backend reads: the model's rotation, and the plan of one attention call.

Owns how sequences, segments and page tables become flat int32 arrays. Knows no kernel, no pool and no op.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The model's own rotary embedding. `2 * len(inv_freq)` may be less than head_dim: only the first dims rotate."""

    inv_freq: Tensor  # float64 [rotary_dim // 2]; already scaled (llama-3, linear, YaRN)
    interleaved: bool = False  # False: dims i and i + rotary_dim/2 are a pair; True: dims 2i and 2i + 1
    scale: float = 1.0  # YaRN's magnitude; applied once, when q and k are first rotated; never in a delta

    def table(self, positions: Tensor) -> Tensor:
        """Cosine and sine of each position (or delta, of either sign), `scale` not applied.

        positions int [N], any device -> float32 [N, 2, rotary_dim // 2] on that device. The product is taken in
        float64: in float32 the angle alone would be off by 6e-3 rad at position 131072. Waits for the device unless
        the frequencies are there already (`to`).
        """
        angles = positions.to(torch.float64)[:, None] * self.inv_freq.to(positions.device)
        return torch.stack((angles.cos(), angles.sin()), dim=1).to(torch.float32)

    def to(self, device: torch.device | str) -> Rotary:
        """The same rotation with its frequencies on `device`."""
        return replace(self, inv_freq=self.inv_freq.to(device))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one attention call reads besides q and the pages. All tensors are on the device of the pages.

    Slots count along a sequence's page table: slot s is token `s % page_size` of page `page_table[first + s //
    page_size]`. Segment g of a sequence holds `seg_length[g]` consecutive slots from `seg_slot[g]`; its t-th token has
    stream index `seg_start[g] + t`. A row sees exactly the slots of its own sequence's segments whose index is at most
    its own.
    """

    row_seq: Tensor  # int32 [num_rows] sequence of each query row; its rows are adjacent, ascending in index
    row_index: Tensor  # int32 [num_rows] stream index of each row
    seq_rows: Tensor  # int32 [num_seqs + 1] row range of each sequence
    seq_segments: Tensor  # int32 [num_seqs + 1] segment range of each sequence
    seq_pages: Tensor  # int32 [num_seqs + 1] page-table range of each sequence
    page_table: Tensor  # int32 [num_table_entries] page ids
    seg_slot: Tensor  # int32 [num_segs] first slot of the segment
    seg_length: Tensor  # int32 [num_segs] tokens, at least 1
    seg_start: Tensor  # int32 [num_segs] stream index of its first token; ascending within a sequence
    seg_delta: Tensor  # int32 [num_segs] how far its stored keys have to turn, either sign
    seg_rotation: Tensor  # float32 [num_segs, 2, rotary_dim // 2] cosine and sine of seg_delta * inv_freq
    page_size: int
    max_rows: int  # largest number of rows of one sequence
    max_segments: int  # largest number of segments of one sequence
    interleaved: bool

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`; self where they are there already."""
        if self.row_seq.device == torch.device(device):
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's part of a plan, in plain integers."""

    row_index: Sequence[int]  # stream indexes of its query rows, ascending
    pages: Sequence[int]  # its page table; fastest as array("i")
    segments: Sequence[tuple[int, int, int, int]]  # (slot, length, start index, delta) each, ascending in start


def build_plan(sequences: Sequence[SequencePlan], rotary: Rotary, page_size: int) -> AttentionPlan:
    """Flatten `sequences` in their order into a plan on the CPU; `.to(device)` moves it."""
    row_seq: list[int] = []
    row_index: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    pages = array("i")  # int32; thousands of them a sequence, so that lists of objects would cost more than a launch
    seq_rows, seq_segments, seq_pages = [0], [0], [0]
    for number, sequence in enumerate(sequences):
        row_seq += [number] * len(sequence.row_index)
        row_index += sequence.row_index
        segments += sequence.segments
        pages.extend(sequence.pages)
        seq_rows.append(len(row_index))
        seq_segments.append(len(segments))
        seq_pages.append(len(pages))
    columns = torch.tensor(segments, dtype=torch.int32).reshape(-1, 4).t().contiguous()

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return AttentionPlan(
        row_seq=ints(row_seq),
        row_index=ints(row_index),
        seq_rows=ints(seq_rows),
        seq_segments=ints(seq_segments),
        seq_pages=ints(seq_pages),
        page_table=torch.frombuffer(pages, dtype=torch.int32) if pages else ints([]),
        seg_slot=columns[0],
        seg_length=columns[1],
        seg_start=columns[2],
        seg_delta=columns[3],
        seg_rotation=rotary.table(columns[3]),
        page_size=page_size,
        max_rows=max((len(s.row_index) for s in sequences), default=0),
        max_segments=max((len(s.segments) for s in sequences), default=0),
        interleaved=rotary.interleaved,
    )
