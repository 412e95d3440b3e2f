"""One stream on a bare model, without pool, tree or scheduler: its pages lie in a shuffled order, slot = index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from akv_kernels.plan import SequencePlan, build_plan

from akv_server.model import Model, StepInput
from akv_server.ops import Layout, Op

PAGE_SIZE = 16


class BareStream:
    """Feeds tokens and applies ops. What is not yet written in the pages is NaN, so that reading it shows."""

    def __init__(self, model: Model, max_tokens: int, seed: int = 0) -> None:
        config = model.config
        self.model, self.layout = model, Layout()
        self.table = torch.randperm(-(-max_tokens // PAGE_SIZE), generator=torch.Generator().manual_seed(seed)).tolist()
        shape = (len(self.table), PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.k_pages, self.v_pages = (
            [torch.full(shape, torch.nan, dtype=model.kv_dtype) for _ in range(config.num_layers)] for _ in range(2)
        )

    def feed(self, tokens: Sequence[int], logit_rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logits [R, vocab] of the new tokens, or of those of `logit_rows` (counted from the first new one)."""
        begin = self.layout.num_tokens
        self.layout = self.layout.feed(len(tokens))
        rows = range(begin, begin + len(tokens))
        segments = [(s.start, s.end - s.start, s.start, s.shift - s.written_shift) for s in self.layout.segments]
        plan = build_plan([SequencePlan(rows, self.table, segments)], self.model.rotary, PAGE_SIZE)
        step = StepInput(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor([self.layout.position(index) for index in rows]),
            write_slots=torch.tensor([self.table[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in rows]),
            plan=plan,
            logit_rows=torch.tensor(range(len(tokens)) if logit_rows is None else logit_rows, dtype=torch.int64),
        )
        return self.model.forward(step, self.k_pages, self.v_pages)

    def apply(self, kind: str, start: int, end: int | None, delta: int = 0) -> None:
        self.layout, _ = self.layout.apply(Op(kind, self.layout.num_tokens, start, end, delta))  # type: ignore[arg-type]
