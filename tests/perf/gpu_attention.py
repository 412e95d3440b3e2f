"""What `make gpu` times of the kernels: attention with and without drops beside its rivals, `repos_pages`, a graph.

Owns the shapes that are timed, how bytes and operations are counted, and what the timed calls have to come to: each
timed result is compared with dense attention in float64 first. Knows no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from akv_kernels.plan import AttentionPlan, SequencePlan, build_plan
from akv_kernels.testing import dense_attention, make_rotary, relative_error, rotate
from torch import Tensor

from akv_server.graphs import capture_cuda_graphs

DEVICE = "cuda"  # ROCm calls itself so too
DROPS = (0, 4, 40)
GAP = 200  # tokens of each drop
ROUNDS = 3
MAX_ERROR = 0.01  # of bfloat16 against float64, relative; wrong results miss it by far

Timed = Callable[[], Any]
MakeTimed = Callable[[Tensor, Tensor, Tensor], Timed]  # of q, k_pages and v_pages
Ceilings = dict[str, float]
OURS = ("query", "key")  # rotations
A_LAUNCH_A_SEGMENT = "a launch a segment"


@dataclass(frozen=True)
class Workload:
    """A batch of equal sequences with random pages: the timed call of segment_batch_attention."""

    num_seqs: int
    rows: int  # new tokens of each sequence, the last of its visible ones
    visible: int  # tokens that each sequence sees, new ones among them
    drops: int  # all of them before the new tokens
    layers: int = 1  # one after the other, each with pages of its own
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def segments(self) -> list[tuple[int, int, int, int]]:
        """(slot, length, start index, delta): the visible tokens in `drops + 1` parts, GAP tokens dropped in between.

        Slots equal indexes, so parts start and end in the middle of pages. The new tokens all lie in the last part.
        """
        old = self.visible - self.rows
        cuts = [old * part // (self.drops + 1) for part in range(self.drops + 1)] + [self.visible]
        parts = enumerate(itertools.pairwise(cuts))
        return [(begin + GAP * n, end - begin, begin + GAP * n, -GAP * n) for n, (begin, end) in parts]

    def page_ids(self) -> Tensor:
        """int64 [num_seqs, pages of one]: a random permutation of the pool."""
        slot, length, *_ = self.segments()[-1]
        pages = -(-(slot + length) // self.page_size)
        order = torch.randperm(self.num_seqs * pages, generator=torch.Generator().manual_seed(0))
        return order.view(self.num_seqs, -1)

    def plan(self, segment: int | None = None) -> AttentionPlan:
        """The plan on the CPU; of one segment of each sequence and its pages only, if given."""
        parts, ids = self.segments(), self.page_ids()
        slot, length, start, _ = parts[-1]
        rows = range(start + length - self.rows, start + length)
        if segment is not None:
            slot, length, start, delta = parts[segment]
            first, offset = divmod(slot, self.page_size)
            ids = ids[:, first : -(-(slot + length) // self.page_size)]
            parts = [(offset, length, start, delta)]
        sequences = [SequencePlan(rows, table, parts) for table in ids.tolist()]
        return build_plan(sequences, make_rotary(self.head_dim), self.page_size)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k_pages and v_pages with random content."""
        shape = (self.page_ids().numel(), self.page_size, self.num_kv_heads, self.head_dim)
        q = (self.num_seqs * self.rows, self.num_q_heads, self.head_dim)
        return tuple(torch.randn(s, dtype=self.dtype, device=DEVICE) for s in (q, shape, shape))  # type: ignore[return-value]

    def error(self, out: Tensor, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> float:
        """Of some rows of the first and the last sequence against dense attention in float64."""
        rotary, worst = make_rotary(self.head_dim).to(DEVICE), 0.0
        slot, index, delta = (
            torch.cat([torch.arange(length) * step + value for length, step, value in column]).to(DEVICE)
            for column in (
                [(length, 1, slot) for slot, length, _, _ in self.segments()],
                [(length, 1, start) for _, length, start, _ in self.segments()],
                [(length, 0, delta) for _, length, _, delta in self.segments()],
            )
        )
        for seq in {0, self.num_seqs - 1}:
            pages = self.page_ids()[seq].to(DEVICE)[slot // self.page_size]
            key, value = (x[pages, slot % self.page_size].double() for x in (k_pages, v_pages))
            rows = torch.tensor(sorted({0, self.rows // 3, self.rows - 1}), device=DEVICE)
            visible = index <= index[len(index) - self.rows + rows][:, None]
            rows = rows + seq * self.rows
            truth, _ = dense_attention(q[rows].double(), rotate(key, delta, rotary), value, visible, self.scale)
            worst = max(worst, relative_error(out[rows], truth))
        return worst

    def pairs(self) -> int:
        """How many (row, visible token) pairs one sequence has."""
        return sum(self.visible - self.rows + 1 + row for row in range(self.rows))

    def flops(self) -> int:
        """Of a layer's two matrix products: q k and p v, two operations a multiply-add."""
        return 4 * self.head_dim * self.num_q_heads * self.pairs() * self.num_seqs

    def bytes_moved(self) -> int:
        """In a layer: K, V, q, out, page ids and the segments' tables, each once. Less cannot be moved."""
        size = self.dtype.itemsize
        kv = 2 * self.visible * self.num_kv_heads * self.head_dim * size
        q_out = 2 * self.rows * self.num_q_heads * self.head_dim * size
        tables = 4 * (-(-self.visible // self.page_size) + (self.drops + 1) * (4 + self.head_dim))
        return self.num_seqs * (kv + q_out + tables)


def decode(drops: int, num_seqs: int = 32, layers: int = 1) -> Workload:
    return Workload(num_seqs, rows=1, visible=8192, drops=drops, layers=layers)


def prefill(drops: int) -> Workload:
    return Workload(num_seqs=1, rows=2048, visible=8192, drops=drops)


# One sequence's layer takes microseconds, about as long as a graph takes to start, which would bring every ratio closer
# to 1: its graph has as many layers as a model has. Nothing is subtracted from any time.
SHAPES: dict[str, Callable[[int], Workload]] = {
    "decode, 32 sequences": decode,
    "decode, 1 sequence, 32 layers": lambda drops: decode(drops, 1, layers=32),
    "prefill of 2,048": prefill,
}


def time_ms(function: Timed) -> float:
    """Median of many runs, the second-level cache emptied before each."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=50, rep=200, return_mode="median"))


def take_turns(rivals: Sequence[Timed]) -> list[float]:
    """Milliseconds of each rival: the median of ROUNDS in which all of them run, so that the clock hits all alike."""
    times = torch.tensor([[time_ms(rival) for rival in rivals] for _ in range(ROUNDS)])
    return times.median(dim=0).values.tolist()


def as_graph(functions: Sequence[Timed]) -> Timed:
    """Their kernels without the Python that launches them, which takes longer than a small one runs. Each graph has
    memory of its own: a rival's capture that fails leaves nothing behind in another's."""

    def run() -> None:
        for function in functions:
            function()

    return capture_cuda_graphs()(run)


def ceilings(num_elements: int = 2**29, width: int = 8192) -> Ceilings:
    """What this GPU does at best: bytes of a large copy, operations of a large matrix product."""
    a = torch.zeros(num_elements, dtype=torch.bfloat16, device=DEVICE)
    b = torch.empty_like(a)
    x = torch.randn(width, width, dtype=torch.bfloat16, device=DEVICE)
    copy, product = take_turns([lambda: b.copy_(a), lambda: x @ x])
    return {
        "copy_gb_per_s": 2 * a.numel() * a.element_size() / copy / 1e6,
        "matmul_tflop_per_s": 2 * width**3 / product / 1e9,
    }


def attention_times(name: str, ceiling: Ceilings | None) -> Iterator[list[dict[str, Any]]]:
    """A shape with 0, 4 and 40 drops and the same number of visible tokens, by both rotations; then all that once more
    in turns with its rivals. A rival that does not run here, or not as a graph, or wrongly, is left out."""
    shape = SHAPES[name]
    works = {drops: shape(drops) for drops in DROPS}
    plans = {drops: work.plan().to(DEVICE) for drops, work in works.items()}
    layers = {drops: [work.tensors() for _ in range(work.layers)] for drops, work in works.items()}
    replays: dict[tuple[int, str], Timed] = {}
    errors: dict[tuple[int, str], float] = {}

    def prepare(drops: int, how: str, make: MakeTimed) -> None:
        functions = [make(*tensors) for tensors in layers[drops]]
        if how != A_LAUNCH_A_SEGMENT:
            errors[drops, how] = works[drops].error(functions[0](), *layers[drops][0])
            if how not in OURS and not errors[drops, how] <= MAX_ERROR:
                raise ArithmeticError(f"its result is off by {errors.pop((drops, how)):.3g}")
        replays[drops, how] = as_graph(functions)

    def rows() -> Iterator[dict[str, Any]]:
        times = dict(zip(replays, take_turns(list(replays.values())), strict=True))
        for (drops, how), all_layers_ms in times.items():
            work = works[drops]
            ms = all_layers_ms / work.layers
            gb_per_s, tflop_per_s = work.bytes_moved() / ms / 1e6, work.flops() / ms / 1e9
            yield {
                "shape": name,
                "drops": drops,
                "how": how,
                "ms": ms,
                "error": errors.get((drops, how)),
                "over_no_drop": all_layers_ms / times[0, how if how in OURS else "query"],
                "gb_per_s": gb_per_s,
                "tflop_per_s": tflop_per_s,
                "roofline": ceiling
                and max(gb_per_s / ceiling["copy_gb_per_s"], tflop_per_s / ceiling["matmul_tflop_per_s"]),
            }

    for drops in DROPS:
        for how, make in ours(works[drops], plans[drops]).items():
            prepare(drops, how, make)
    yield list(rows())
    for drops in DROPS:
        for how, make in rivals(works[drops], plans[drops]).items():
            try:
                prepare(drops, how, make)
            except ImportError:
                continue
            except Exception as error:
                print(f"{name}: {how} does not run here: {type(error).__name__} {error}")
    yield list(rows())


def ours(work: Workload, plan: AttentionPlan) -> dict[str, MakeTimed]:
    from akv_kernels import gpu

    def of_layer(how: str, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Timed:
        return partial(gpu.segment_batch_attention, q, k_pages, v_pages, plan, scale=work.scale, rotation=how)

    return {how: partial(of_layer, how) for how in OURS}


def rivals(work: Workload, plan: AttentionPlan) -> dict[str, MakeTimed]:
    """With drops a launch a segment. Decode without one by others: torch on keys and values laid out densely, and the
    paged kernels of FlashInfer and FlashAttention on the same bytes, where they are installed."""
    if work.drops:
        return {A_LAUNCH_A_SEGMENT: partial(one_launch_a_segment, work)}
    if work.rows > 1:
        return {}
    return {
        "torch, not paged": partial(torch_attention, work),
        "FlashInfer": partial(flashinfer, work, plan),
        "FlashInfer, tensor cores": partial(flashinfer, work, plan, use_tensor_cores=True),
        "FlashAttention": partial(flash_attention, work),
    }


def dense(work: Workload, pages: Tensor) -> Tensor:  # [num_seqs, visible, num_kv_heads, head_dim]
    tokens = pages[work.page_ids().to(DEVICE)].view(work.num_seqs, -1, work.num_kv_heads, work.head_dim)
    return tokens[:, : work.visible]


def one_launch_a_segment(work: Workload, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Timed:
    """The rival: every segment by a call of its own, then one merge.

    The merge takes log-sum-exps that are there already: what a kernel would spend on writing them is given to the
    rival. It is our own reduction, with the segments for splits.
    """
    import triton
    from akv_kernels import gpu
    from akv_kernels.attention import reduce_splits_kernel

    plans = [work.plan(segment).to(DEVICE) for segment in range(work.drops + 1)]
    parts = q.new_empty((len(plans), *q.shape))
    log_sums = torch.randn(len(plans), *q.shape[:2], device=DEVICE)
    out = torch.empty_like(q)

    def run() -> Tensor:
        for plan, part in zip(plans, parts, strict=True):
            gpu.segment_batch_attention(q, k_pages, v_pages, plan, scale=work.scale, out=part)
        reduce_splits_kernel[q.shape[:2]](
            parts,
            log_sums,
            plans[0].row_seq,
            plans[0].seq_rows,
            out,
            None,
            work.num_seqs,
            len(plans),
            HEAD_DIM=work.head_dim,
            PAIRS=work.head_dim // 2,
            TILE_ROWS=work.rows,
            SPLIT_BLOCK=triton.next_power_of_2(len(plans)),
            num_warps=4,
        )
        return out

    return run


def torch_attention(work: Workload, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Timed:
    key, value = (dense(work, pages).transpose(1, 2).contiguous() for pages in (k_pages, v_pages))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q.unsqueeze(2), key, value, enable_gqa=True).squeeze(2)


def flashinfer(
    work: Workload, plan: AttentionPlan, q: Tensor, k_pages: Tensor, v_pages: Tensor, *, use_tensor_cores: bool = False
) -> Timed:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    workspace = torch.zeros(2**27, dtype=torch.uint8, device=DEVICE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
    last = torch.full((work.num_seqs,), (work.visible - 1) % work.page_size + 1, dtype=torch.int32, device=DEVICE)
    heads = (work.num_q_heads, work.num_kv_heads, work.head_dim, work.page_size)
    wrapper.plan(plan.seq_pages, plan.page_table, last, *heads, q_data_type=q.dtype, kv_data_type=q.dtype)
    return lambda: wrapper.run(q, (k_pages, v_pages))


def flash_attention(work: Workload, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Timed:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    large = 256  # the least page of FlashAttention 2: the same bytes, in pages of its size
    pages = [dense(work, x).reshape(-1, large, work.num_kv_heads, work.head_dim) for x in (k_pages, v_pages)]
    blocks = torch.arange(len(pages[0]), dtype=torch.int32, device=DEVICE).view(work.num_seqs, -1)
    lengths = torch.full((work.num_seqs,), work.visible, dtype=torch.int32, device=DEVICE)
    rows = q.unsqueeze(1)
    return lambda: flash_attn_with_kvcache(
        rows, *pages, cache_seqlens=lengths, block_table=blocks, causal=True
    ).squeeze(1)


def repos_times(ceiling: Ceilings | None, num_tokens: int = 2**17) -> list[dict[str, Any]]:
    """The compactor's copy of what survives of a stream, each token read and written once, beside a device copy: of one
    part of it, and of every second block of 16. Parts start within a page; pages, old and new, lie in no order."""
    from akv_kernels import gpu

    num_kv_heads, head_dim, page_size, block, begin = 8, 128, 16, 16, 5
    num_pages = 3 * num_tokens // page_size + 1
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    pages = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    slots = (torch.randperm(num_pages)[:, None] * page_size + torch.arange(page_size)).flatten()
    stream, target = slots[:-num_tokens], slots[-num_tokens:].to(DEVICE)
    rotation = make_rotary(head_dim).table(torch.arange(num_tokens) % 4000 - 2000).to(DEVICE)
    place = torch.arange(num_tokens)
    survivors = {"contiguous": begin + place, "scattered": begin + place + place // block * block}
    moves = [
        partial(gpu.repos_pages, *pages, stream[places].to(DEVICE), target, rotation, interleaved=False)
        for places in survivors.values()
    ]
    moved = 2 * 2 * num_tokens * num_kv_heads * head_dim * 2 + rotation.numel() * 4 + 2 * 8 * num_tokens
    return [
        {
            "survivors": name,
            "ms": ms,
            "gb_per_s": moved / ms / 1e6,
            "over_copy": ceiling and moved / ms / 1e6 / ceiling["copy_gb_per_s"],
        }
        for name, ms in zip(survivors, take_turns(moves), strict=True)
    ]


def graph_times() -> dict[str, float]:
    """A CUDA graph of one decode step's attention: replayed with other deltas it has to give their result."""
    from akv_kernels import gpu

    work = decode(4, 8)
    plan, (q, k_pages, v_pages) = work.plan().to(DEVICE), work.tensors()
    out = torch.empty_like(q)

    def attend(plan: AttentionPlan = plan) -> Tensor:
        return gpu.segment_batch_attention(q, k_pages, v_pages, plan, scale=work.scale, out=out)

    replay = as_graph([attend])
    rotation = make_rotary(work.head_dim).table(plan.seg_delta.cpu() + 77).to(DEVICE)
    expected = attend(replace(plan, seg_rotation=rotation)).clone()
    plan.seg_rotation.copy_(rotation)
    out.zero_()
    replay()
    assert torch.equal(out, expected), "a replayed graph did not see the new deltas"
    eager, replayed = take_turns([attend, replay])
    return {"eager_ms": eager, "graph_ms": replayed}
