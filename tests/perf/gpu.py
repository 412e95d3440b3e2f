"""`make gpu`: the Triton kernels' tests for real on a GPU, then what a drop costs there.

Every figure is measured here, in this run: rivals and ceilings beside our own. Prints tables and writes out/gpu.json.
Owns the shapes that are timed and how bytes and operations are counted. Refuses where there is no GPU.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from akv_kernels.plan import AttentionPlan, SequencePlan, build_plan
from akv_kernels.testing import make_rotary
from rich.console import Console
from rich.table import Table
from torch import Tensor

from akv_server.engine import Engine, EngineConfig
from akv_server.model import StepInput
from akv_server.ops import Op
from akv_server.sampler import SamplingParams
from akv_server.scheduler import GeneratedToken, Request

OUT = Path("out/gpu.json")
DEVICE = "cuda"  # ROCm calls itself so too
DROPS = (0, 4, 40)
GAP = 200  # tokens of each drop
LAUNCH_GOAL, REPOS_GOAL = 1.03, 0.85


@dataclass(frozen=True)
class Workload:
    """A batch of equal sequences with random pages: the timed call of segment_batch_attention."""

    num_seqs: int
    rows: int  # new tokens of each sequence, the last of its visible ones
    visible: int  # tokens that each sequence sees, new ones among them
    drops: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def segments(self) -> list[tuple[int, int, int, int]]:
        """(slot, length, start index, delta): the visible tokens in `drops + 1` parts, GAP tokens dropped in between.

        Slots equal indexes, so parts start and end in the middle of pages.
        """
        cuts = [self.visible * part // (self.drops + 1) for part in range(self.drops + 2)]
        parts = enumerate(itertools.pairwise(cuts))
        return [(begin + GAP * n, end - begin, begin + GAP * n, -GAP * n) for n, (begin, end) in parts]

    def plans(self, segment: int | None = None) -> AttentionPlan:
        """The plan on the CPU; of one segment of each sequence only, if given."""
        parts = self.segments()
        slot, length, start, _ = parts[-1]
        pages = -(-(slot + length) // self.page_size)
        ids = torch.randperm(self.num_seqs * pages, generator=torch.Generator().manual_seed(0)).view(self.num_seqs, -1)
        rows = range(start + length - self.rows, start + length)
        kept = parts if segment is None else [parts[segment]]
        return build_plan(
            [SequencePlan(rows, table, kept) for table in ids.tolist()], make_rotary(self.head_dim), self.page_size
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k_pages and v_pages with random content."""
        num_pages = len(self.plans().page_table)
        shape = (num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        q = (self.num_seqs * self.rows, self.num_q_heads, self.head_dim)
        return tuple(torch.randn(s, dtype=self.dtype, device=DEVICE) for s in (q, shape, shape))  # type: ignore[return-value]

    def pairs(self) -> int:
        """How many (row, visible token) pairs one sequence has."""
        return sum(self.visible - self.rows + 1 + row for row in range(self.rows))

    def flops(self) -> int:
        """Of the two matrix products: q k and p v, two operations a multiply-add."""
        return 4 * self.head_dim * self.num_q_heads * self.pairs() * self.num_seqs

    def rotation_flops(self, rotation: str, tile_rows: int) -> int:
        """Four products and two sums a pair of dims: of each query row in each segment, or of each key in each tile."""
        turned = 3 * self.head_dim * self.num_seqs
        if rotation == "query":
            return turned * self.rows * self.num_q_heads * (self.drops + 1)
        return turned * self.visible * self.num_kv_heads * -(-self.rows // tile_rows)

    def bytes_moved(self) -> int:
        """Each K and V once, q and out once, page ids and the segments' tables once: the least there is to move."""
        size = self.dtype.itemsize
        kv = 2 * self.visible * self.num_kv_heads * self.head_dim * size
        q_out = 2 * self.rows * self.num_q_heads * self.head_dim * size
        tables = 4 * (-(-self.visible // self.page_size) + (self.drops + 1) * (4 + self.head_dim))
        return self.num_seqs * (kv + q_out + tables)


def decode(drops: int, num_seqs: int = 32) -> Workload:
    return Workload(num_seqs, rows=1, visible=8192, drops=drops)


def prefill(drops: int) -> Workload:
    return Workload(num_seqs=1, rows=2048, visible=8192, drops=drops)


SHAPES: dict[str, Callable[[int], Workload]] = {
    "decode, 32 sequences": decode,
    "decode, 1 sequence": lambda drops: decode(drops, 1),
    "prefill of 2,048": prefill,
}


def time_ms(function: Callable[[], Any]) -> float:
    """Median of many runs, the second-level cache emptied before each."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=50, rep=200, return_mode="median"))


def take_turns(rounds: int, rivals: Sequence[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each rival: the median of rounds in which all of them run, so that the clock hits all alike."""
    times = torch.tensor([[time_ms(rival) for rival in rivals] for _ in range(rounds)])
    return times.median(dim=0).values.tolist()


def ceilings() -> dict[str, float]:
    """What this GPU does at best: bytes of a large copy, operations of a large matrix product."""
    a = torch.empty(2**29, dtype=torch.bfloat16, device=DEVICE)
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    copy, product = take_turns(3, [lambda: b.copy_(a), lambda: x @ x])
    return {
        "copy_gb_per_s": 2 * a.numel() * a.element_size() / copy / 1e6,
        "matmul_tflop_per_s": 2 * 8192**3 / product / 1e9,
    }


def attention_times(ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Each shape with 0, 4 and 40 drops and the same number of visible tokens, by both rotations, and its rivals."""
    from akv_kernels import gpu

    for name, shape in SHAPES.items():
        functions: dict[tuple[int, str], Callable[[], Any]] = {}
        for drops in DROPS:
            work = shape(drops)
            plan, (q, k_pages, v_pages) = work.plans().to(DEVICE), work.tensors()
            for rotation in ("query", "key"):
                functions[drops, rotation] = partial(
                    gpu.segment_batch_attention,
                    *(q, k_pages, v_pages, plan),
                    scale=work.head_dim**-0.5,
                    rotation=rotation,
                )
            if drops:
                functions[drops, "one launch a segment"] = one_launch_a_segment(work, q, k_pages, v_pages)
            elif work.rows == 1:
                functions |= {(0, rival): run for rival, run in libraries(work, plan, q, k_pages, v_pages)}
        times = dict(zip(functions, take_turns(3, list(functions.values())), strict=True))
        for (drops, how), ms in times.items():
            work = shape(drops)
            yield {
                "shape": name,
                "drops": drops,
                "how": how,
                "ms": ms,
                "over_no_drop": ms / times[0, how if how in ("query", "key") else "query"],
                "gb_per_s": work.bytes_moved() / ms / 1e6,
                "tflop_per_s": work.flops() / ms / 1e9,
                "roofline": max(
                    work.bytes_moved() / ms / 1e6 / ceiling["copy_gb_per_s"],
                    work.flops() / ms / 1e9 / ceiling["matmul_tflop_per_s"],
                ),
            }


def one_launch_a_segment(work: Workload, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Callable[[], Tensor]:
    """The rival: every segment by a call of its own, then one merge.

    The merge takes weights that are there already: what a kernel would spend on writing them is given to the rival.
    """
    from akv_kernels import gpu

    plans = [work.plans(segment).to(DEVICE) for segment in range(work.drops + 1)]
    parts = q.new_empty((len(plans), *q.shape))
    weights = torch.randn(len(plans), *q.shape[:2], device=DEVICE)

    def run() -> Tensor:
        for plan, part in zip(plans, parts, strict=True):
            gpu.segment_batch_attention(q, k_pages, v_pages, plan, scale=work.head_dim**-0.5, out=part)
        return torch.einsum("srhd,srh->rhd", parts.float(), weights.softmax(dim=0)).to(q.dtype)

    return run


def libraries(
    work: Workload, plan: AttentionPlan, q: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Paged decode of FlashInfer and FlashAttention, where installed, on the same pages and no drop."""
    lengths = torch.full((work.num_seqs,), work.visible, dtype=torch.int32, device=DEVICE)
    table = plan.page_table.view(work.num_seqs, -1)
    try:
        import flashinfer  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        workspace = torch.empty(2**27, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        last = (lengths - 1) % work.page_size + 1
        heads = (work.num_q_heads, work.num_kv_heads, work.head_dim, work.page_size)
        wrapper.plan(plan.seq_pages, plan.page_table, last, *heads, q_data_type=q.dtype, kv_data_type=q.dtype)
        yield "FlashInfer", lambda: wrapper.run(q, (k_pages, v_pages))
    try:
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        large = 256  # the least page of FlashAttention 2: the same bytes, in pages of its size
        shape = (-1, large, work.num_kv_heads, work.head_dim)
        keys, values = (x[table.flatten().long()].view(shape) for x in (k_pages, v_pages))
        blocks = torch.arange(len(keys), dtype=torch.int32, device=DEVICE).view(work.num_seqs, -1)
        rows = q.unsqueeze(1)
        yield (
            "FlashAttention",
            lambda: flash_attn_with_kvcache(rows, keys, values, cache_seqlens=lengths, block_table=blocks, causal=True),
        )


def repos_times(ceiling: dict[str, float]) -> dict[str, float]:
    """The compactor's copy of scattered tokens, each read and written once, beside a device copy."""
    from akv_kernels import gpu

    num_tokens, num_kv_heads, head_dim = 2**17, 8, 128
    pages = [
        torch.randn(2 * num_tokens // 16, 16, num_kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2)
    ]
    order = torch.randperm(2 * num_tokens // 16, device=DEVICE)[:, None] * 16 + torch.arange(16, device=DEVICE)
    src, dst = order.flatten().chunk(2)
    rotation = make_rotary(head_dim).table(torch.arange(num_tokens) % 4000 - 2000).to(DEVICE)
    ms = time_ms(lambda: gpu.repos_pages(*pages, src, dst, rotation, interleaved=False))
    moved = 2 * 2 * num_tokens * num_kv_heads * head_dim * 2 + rotation.numel() * 4 + 2 * 8 * num_tokens
    return {"ms": ms, "gb_per_s": moved / ms / 1e6, "over_copy": moved / ms / 1e6 / ceiling["copy_gb_per_s"]}


def graph_times() -> dict[str, float]:
    """A CUDA graph of one decode step's attention: replayed with other deltas it has to give their result."""
    from akv_kernels import gpu

    work = decode(4, 8)
    plan, (q, k_pages, v_pages) = work.plans().to(DEVICE), work.tensors()
    out = torch.empty_like(q)

    def attend(plan: AttentionPlan = plan) -> Tensor:
        return gpu.segment_batch_attention(q, k_pages, v_pages, plan, scale=work.head_dim**-0.5, out=out)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    rotation = make_rotary(work.head_dim).table(plan.seg_delta.cpu() + 77).to(DEVICE)
    expected = attend(replace(plan, seg_rotation=rotation)).clone()
    plan.seg_rotation.copy_(rotation)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected), "a replayed graph did not see the new deltas"
    eager, replayed = take_turns(3, [attend, graph.replay])
    return {"eager_ms": eager, "graph_ms": replayed}


def decode_times(
    engine: Engine, sizes: Sequence[int] = (1, 8, 32), *, stream: int = 2000, gap: int = 40, steps: int = 40
) -> list[dict[str, float]]:
    """Milliseconds of a whole decode step, launched kernel by kernel and as a graph: sequences of `stream` tokens with
    four drops each, one decoding step after another; the median. What both ways generate is compared, too."""
    graphs, results = engine.graphs, []
    assert graphs is not None

    def run(num_seqs: int, forward: Callable[[StepInput], Tensor]) -> tuple[float, list[list[int]]]:
        engine.forward = forward
        generated: list[list[int]] = [[] for _ in range(num_seqs)]

        def listener(number: int) -> Callable[[GeneratedToken], None]:
            return lambda token: generated[number].append(token.token_id)

        for number in range(num_seqs):
            tokens = random.Random(number).choices(range(3, 300), k=stream)
            starts = range(stream // 5, stream, stream // 5)
            history = tuple(Op("drop", stream - 1, start, start + gap, repos=True) for start in starts)
            request = Request(
                request_id=f"decode {number}",
                salt="",
                tokens=tokens,
                history=history,
                sampling=SamplingParams(temperature=0),
                max_tokens=4 + steps,
                stop_token_ids=frozenset(),
                on_token=listener(number),
                on_done=lambda _: None,
            )
            engine.submit(request)
        times = []
        while engine.scheduler.running or engine.scheduler.waiting:
            is_timed = len(generated[-1]) > 2 and all(len(ids) < 4 + steps for ids in generated) and len(times) < steps
            before, begun = graphs.num_replayed, time.perf_counter()
            engine.step()
            if is_timed:
                times.append(time.perf_counter() - begun)
                replayed.append(graphs.num_replayed - before)
        return statistics.median(times) * 1e3, generated

    for num_seqs in sizes:
        replayed: list[int] = []
        run(num_seqs, graphs.forward)  # compiles and captures
        replayed.clear()
        graphs_ms, by_graph = run(num_seqs, graphs.forward)
        used = sum(replayed)
        eager_ms, eagerly = run(num_seqs, engine.run_eagerly)
        pairs = zip(itertools.chain(*by_graph), itertools.chain(*eagerly), strict=True)
        same = [a == b for a, b in pairs]
        results.append(
            {
                "num_seqs": num_seqs,
                "eager_ms": eager_ms,
                "graphs_ms": graphs_ms,
                "steps_as_graphs": used,
                "same_tokens": sum(same) / len(same),
            }
        )
    engine.forward = graphs.forward
    return results


def engine_times() -> dict[str, Any]:
    """The engine with the default model in bfloat16: decode with and without graphs; the first token after a drop,
    without one, and prefilled again."""
    from akv_server import files, loader
    from tests.perf.bench import drop_against_none

    model = loader.load_model(files.resolve("default"), weights_as="bfloat16", device=DEVICE)
    engine = Engine(model, EngineConfig(num_pages=8192))
    return {"engine_decode": decode_times(engine), "end_to_end": drop_against_none(engine, rounds=5)}


def tests(console: Console) -> bool:
    """Every check of tests/triton_cases.py on the GPU; prints those that fail."""
    from tests import triton_cases

    can_float8 = torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 9)
    groups = [group for group in triton_cases.CHECKS if can_float8 or group != "float8"]
    failed = total = 0
    for check in triton_cases.run(DEVICE, groups):
        total += 1
        if not check["passed"]:
            failed += 1
            console.print(
                f"[red]failed[/] {check['group']} {check['name']}: {check['measured']:.3g} > {check['bound']:.3g}"
            )
    console.print(f"{total - failed} of {total} checks passed on {torch.cuda.get_device_name()}")
    return failed == 0


def report(console: Console, results: dict[str, Any]) -> None:
    table = Table(
        title="segment_batch_attention, 8,192 visible tokens a sequence, bfloat16, 32 heads over 8, pages of 16"
    )
    for column in ("shape", "drops", "how", "ms", "over no drop", "GB/s", "TFLOP/s", "of roofline"):
        table.add_column(column, justify="left" if column in ("shape", "how") else "right")
    for row in results["attention"]:
        numbers = f"{row['over_no_drop']:.2f}", f"{row['gb_per_s']:.0f}", f"{row['tflop_per_s']:.1f}"
        table.add_row(
            row["shape"], str(row["drops"]), row["how"], f"{row['ms']:.4f}", *numbers, f"{row['roofline']:.0%}"
        )
    console.print(table)
    ceiling, repos, graph = results["ceilings"], results["repos_pages"], results["graph"]
    console.print(f"goal: a drop costs at most {LAUNCH_GOAL} times the same visible tokens without one")
    console.print(
        f"ceilings: copy {ceiling['copy_gb_per_s']:.0f} GB/s, product {ceiling['matmul_tflop_per_s']:.0f} TFLOP/s"
    )
    console.print(
        f"repos_pages: {repos['gb_per_s']:.0f} GB/s, {repos['over_copy']:.0%} of a copy (goal {REPOS_GOAL:.0%})"
    )
    console.print(
        f"one layer's decode attention: {graph['eager_ms']:.4f} ms, {graph['graph_ms']:.4f} ms as a CUDA graph"
    )
    for row in results["engine_decode"]:
        console.print(
            f"a decode step of {row['num_seqs']} sequences with 4 drops each: {row['eager_ms']:.2f} ms, "
            f"{row['graphs_ms']:.2f} ms as a CUDA graph ({row['same_tokens']:.1%} of the tokens are the same)"
        )
    e2e = results["end_to_end"]
    console.print(
        f"first token after a drop {e2e['ttft_after_drop_ms']:.1f} ms, with no drop {e2e['ttft_no_drop_ms']:.1f} ms, "
        f"prefilled again {e2e['ttft_re_prefill_ms']:.1f} ms"
    )


def main() -> int:
    console = Console()
    if not torch.cuda.is_available():
        console.print(
            "make gpu needs a CUDA or ROCm device and a torch built for it; this one has none "
            f"(torch {torch.__version__}). The same checks run without a GPU in `make test`."
        )
        return 2
    if not tests(console):
        return 1
    ceiling = ceilings()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": ceiling,
        "attention": list(attention_times(ceiling)),
        "repos_pages": repos_times(ceiling),
        "graph": graph_times(),
        **engine_times(),
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1))
    report(console, results)
    console.print(f"all figures in {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
