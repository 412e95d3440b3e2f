"""Decode steps as CUDA graphs: one captured forward pass for each size, replayed without Python between its kernels.

Owns the buffers that every graph reads its step from, and which sizes there are. Knows no request and no pool, and of
CUDA only what `capture_cuda_graphs` does: a capture is any function that runs another one and gives back its replay.

    step (values on the host)  ->  padded to a size  ->  copied into the buffers  ->  replay  ->  logits

Nothing of a step is baked into a graph but its size: token ids, positions, slots, page tables, segments with their
deltas, and the rows whose logits are wanted are all read from the buffers. A padding row is a sequence of its own that
has no segment, writes nowhere (slot -1), and whose result nobody reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from akv_kernels.plan import AttentionPlan
from torch import Tensor

from akv_server.model import Model, StepInput

log = logging.getLogger("akv")

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function as often as it likes and returns its replay: the same kernels on the same tensors. The function reads
and writes tensors in place, returns nothing, and running it twice comes to the same as once."""

_SEGMENTS_PER_ROW = 256  # on average, of the largest step: half a kilobyte each
_TABLE_TOKENS = (256, 1024, 4096)  # a row, on average: the kernel splits long contexts by it, up to some 4,096 tokens
_WARM_UP_RUNS = 2  # the first one compiles kernels, which a capture must not meet


class DecodeGraphs:
    """Runs steps of a model: those of one row a sequence through graphs, all others as they come."""

    def __init__(
        self,
        model: Model,
        k_pages: list[Tensor],  # per layer [num_pages, page_size, num_kv_heads, head_dim]; never to be replaced
        v_pages: list[Tensor],
        capture: Capture,
        *,
        max_rows: int,
    ) -> None:
        """Captures nothing yet: a size's graph is made when the first step needs it."""
        self._model, self._k_pages, self._v_pages, self._capture = model, k_pages, v_pages, capture
        page_size, device = k_pages[0].shape[1], model.device
        self._max_rows = 1 << (max_rows - 1).bit_length()
        num_entries = self._max_rows * -(-model.config.max_positions // page_size)
        num_segments = self._max_rows * _SEGMENTS_PER_ROW

        def ints(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        num_rows = self._max_rows
        self._buffers = StepInput(
            token_ids=ints(num_rows, torch.int64),
            positions=ints(num_rows, torch.int64),
            write_slots=ints(num_rows, torch.int64),
            logit_rows=ints(num_rows, torch.int64),
            plan=AttentionPlan(
                row_seq=ints(num_rows),
                row_index=ints(num_rows),
                seq_rows=ints(num_rows + 1),
                seq_segments=ints(num_rows + 1),
                seq_pages=ints(num_rows + 1),
                page_table=ints(num_entries),
                seg_slot=ints(num_segments),
                seg_length=ints(num_segments),
                seg_start=ints(num_segments),
                seg_delta=ints(num_segments),
                seg_rotation=torch.zeros(num_segments, 2, len(model.rotary.inv_freq), device=device),
                page_size=page_size,
                max_rows=1,
                max_segments=num_segments,
                interleaved=model.rotary.interleaved,
            ),
        )
        # All graphs write here, so that nothing in the memory they share has to outlive a replay.
        self._logits = torch.empty(num_rows, model.config.vocab_size, device=device)
        self._replays: dict[tuple[int, int], Callable[[], None] | None] = {}
        self.num_replayed = 0  # steps that ran as a graph

    def forward(
        self,
        step: StepInput,  # on the host
    ) -> Tensor:  # float32 [R, vocab_size], on the device
        """What `Model.forward` gives for this step. Valid until the next call."""
        size = self._size_of(step)
        if size is None:
            return self._run(step.to(self._model.device))
        num_rows, num_entries = size
        for buffer, tensor in zip(_tensors(self._buffers), _tensors(pad_rows(step, num_rows)), strict=True):
            buffer[: len(tensor)].copy_(tensor, non_blocking=True)  # from pageable memory: read when this returns
        if size not in self._replays:
            self._replays[size] = self._make(num_rows, num_entries)
        replay = self._replays[size]
        if replay is None:
            return self._run(step.to(self._model.device))
        replay()
        self.num_replayed += 1
        return self._logits[: len(step.logit_rows)]

    def _size_of(self, step: StepInput) -> tuple[int, int] | None:
        """The rows and page-table entries of the graph that fits the step; None where none does."""
        plan, num_rows = step.plan, len(step.token_ids)
        if plan.max_rows != 1 or num_rows > self._max_rows or len(plan.seg_slot) > len(self._buffers.plan.seg_slot):
            return None
        num_rows, num_entries = 1 << (num_rows - 1).bit_length(), len(self._buffers.plan.page_table)
        sizes = [num_rows * tokens // plan.page_size for tokens in _TABLE_TOKENS]
        fitting = [size for size in (*sizes, num_entries) if len(plan.page_table) <= size <= num_entries]
        return (num_rows, fitting[0]) if fitting else None

    def _make(self, num_rows: int, num_entries: int) -> Callable[[], None] | None:
        buffers, plan = self._buffers, self._buffers.plan
        step = StepInput(
            buffers.token_ids[:num_rows],
            buffers.positions[:num_rows],
            buffers.write_slots[:num_rows],
            replace(
                plan,
                row_seq=plan.row_seq[:num_rows],
                row_index=plan.row_index[:num_rows],
                seq_rows=plan.seq_rows[: num_rows + 1],
                seq_segments=plan.seq_segments[: num_rows + 1],
                seq_pages=plan.seq_pages[: num_rows + 1],
                page_table=plan.page_table[:num_entries],
            ),
            buffers.logit_rows[:num_rows],
        )
        logits = self._logits[:num_rows]

        def run() -> None:
            logits.copy_(self._run(step))

        try:
            return self._capture(run)
        except RuntimeError:  # slower, but served
            log.exception("no graph of %d rows could be captured: such steps run without one", num_rows)
            return None

    def _run(self, step: StepInput) -> Tensor:
        return self._model.forward(step, self._k_pages, self._v_pages)


def pad_rows(step: StepInput, num_rows: int) -> StepInput:
    """The same step, of one row a sequence and on the host, with padding sequences behind it up to `num_rows` rows.

    `logit_rows` grows to `num_rows` too: the first of them are the step's.
    """
    plan = step.plan
    assert plan.max_rows == 1
    assert len(step.token_ids) <= num_rows

    def padded(tensor: Tensor, count: int, value: int) -> Tensor:
        return F.pad(tensor, (0, count - len(tensor)), value=value)

    return StepInput(
        token_ids=padded(step.token_ids, num_rows, 0),
        positions=padded(step.positions, num_rows, 0),
        write_slots=padded(step.write_slots, num_rows, -1),
        logit_rows=padded(step.logit_rows, num_rows, 0),
        plan=replace(
            plan,
            row_seq=torch.arange(num_rows, dtype=torch.int32),
            row_index=padded(plan.row_index, num_rows, 0),
            seq_rows=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_segments=padded(plan.seq_segments, num_rows + 1, len(plan.seg_slot)),
            seq_pages=padded(plan.seq_pages, num_rows + 1, len(plan.page_table)),
        ),
    )


def _tensors(step: StepInput) -> Iterator[Tensor]:
    for part in (step, step.plan):
        yield from (value for f in fields(part) if isinstance(value := getattr(part, f.name), Tensor))


def capture_cuda_graphs() -> Capture:
    """Captures as CUDA graphs that share one pool of memory: they must run one at a time, in one stream, and leave
    nothing in it that is read later."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(current):  # back to it also from a capture that failed half way
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_RUNS):
                    run()
            current.wait_stream(stream)
            # Only this thread is held to what a capture allows; others may go on waiting for copies of theirs.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        return graph.replay

    return capture
