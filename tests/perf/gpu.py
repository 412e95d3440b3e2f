"""`make gpu`: the Triton kernels' tests for real on a GPU, then what a drop costs there.

Every figure is measured here, in this run: rivals and ceilings beside our own. Prints tables and writes out/gpu.json,
which grows with every stage: one that fails takes nothing from the others. Refuses where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from akv_kernels import select
from rich.console import Console
from rich.table import Table
from torch import Tensor

from akv_server import files, loader
from akv_server.batch import GeneratedToken, Request
from akv_server.engine import Engine, EngineConfig
from akv_server.errors import AkvError
from akv_server.estimate import SHAPES
from akv_server.model import Model, ModelConfig, StepInput
from akv_server.ops import Op
from akv_server.sampler import SamplingParams
from akv_server.weights import shapes_of
from tests.perf import gpu_attention
from tests.perf.gpu_attention import DEVICE, MAX_ERROR
from tests.perf.runs import drop_against_none

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("out/gpu.json")
LAUNCH_GOAL, REPOS_GOAL = 1.03, 0.85
GROUPS_AT_ONCE = 6  # of checks: nearly all of their time goes into compiling kernels, on one core each
GROUP_TIMEOUT_S = 400
LARGE = ModelConfig(
    **{**asdict(SHAPES["llama-3.1-8b"]), "name": "random weights in the shape of Llama 3.1 8B"},
    architecture="llama",
    rotary_dim=SHAPES["llama-3.1-8b"].head_dim,
    max_positions=131_072,
    rms_norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    rope_theta=500_000.0,
    rope_scaling=None,
    eos_token_ids=(),
    bos_token_id=None,
)
LARGE_BYTES = 45e9  # its weights, the pool below, and room


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


def random_model(config: ModelConfig) -> Model:
    """A model that says nothing and takes the time of one that does."""
    shapes, generator = shapes_of(config), torch.Generator(DEVICE).manual_seed(0)

    def source(name: str) -> Tensor:
        shape = shapes[".".join(name.split(".")[-2:])]
        if len(shape) == 1:
            return torch.ones(shape, device=DEVICE)
        return torch.randn(shape, generator=generator, device=DEVICE) * shape[1] ** -0.5

    return Model(config, source, select(DEVICE), weights="bfloat16", device=DEVICE)


def models() -> Iterator[Model]:
    """The default model, where its files can be had and read; and a large one, where there is memory."""
    if importlib.util.find_spec("gguf") is None:
        print("without the default model: gguf is not installed")
    else:
        try:
            yield loader.load_model(files.resolve("default"), weights_as="bfloat16", device=DEVICE)
        except AkvError as error:
            print(f"without the default model: {error.message}")
    if torch.cuda.get_device_properties().total_memory > LARGE_BYTES:
        yield random_model(LARGE)


def engine_times() -> list[dict[str, Any]]:
    """The engine in bfloat16: decode with and without graphs; the first token after a drop, without one, and prefilled
    again."""
    results = []
    for model in models():
        engine = Engine(model, EngineConfig(num_pages=6144))
        decode = decode_times(engine)
        results.append(
            {"model": model.config.name, "decode": decode, "end_to_end": drop_against_none(engine, rounds=5)}
        )
        del engine, model
    return results


def checks_of(group: str) -> tuple[list[dict[str, Any]], str]:
    """One group of tests/triton_cases.py, in a process of its own: a fault in a kernel ends no other. Its records, and
    what went wrong beside them."""
    command = [sys.executable, "-m", "tests.triton_cases", group]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=GROUP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"took more than {GROUP_TIMEOUT_S} s"
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return records, done.stderr[-3000:] if done.returncode else ""


def tests(console: Console) -> dict[str, Any]:
    """Every check of tests/triton_cases.py on the GPU; prints those that fail."""
    from tests.triton_cases import CHECKS

    can_float8 = torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 9)
    groups = [group for group in CHECKS if can_float8 or group != "float8"]
    failed, total = [], 0
    with ThreadPoolExecutor(GROUPS_AT_ONCE) as pool:
        for group, (records, problem) in zip(groups, pool.map(checks_of, groups), strict=True):
            total += len(records) + bool(problem)
            failed += [
                f"{group} {r['name']}: {r['measured']:.3g} > {r['bound']:.3g}" for r in records if not r["passed"]
            ]
            failed += [f"{group} ended early: {problem}"] if problem else []
    for line in failed:
        console.print(f"failed: {line}", style="red", markup=False)
    console.print(f"{total - len(failed)} of {total} checks passed on {torch.cuda.get_device_name()}")
    return {"total": total, "failed": failed, "float8": can_float8}


def report_attention(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(
        title="segment_batch_attention, 8,192 visible tokens a sequence, bfloat16, 32 heads over 8, pages of 16"
    )
    for column in ("shape", "drops", "how", "ms", "over no drop", "GB/s", "TFLOP/s", "of roofline"):
        table.add_column(column, justify="left" if column in ("shape", "how") else "right", no_wrap=True)
    shape = None
    for row in rows:
        if row["shape"] != shape:
            table.add_section()
            shape = row["shape"]
        numbers = f"{row['over_no_drop']:.2f}", f"{row['gb_per_s']:.0f}", f"{row['tflop_per_s']:.1f}"
        table.add_row(
            row["shape"], str(row["drops"]), row["how"], f"{row['ms']:.4f}", *numbers, f"{row['roofline']:.0%}"
        )
    console.print(table)
    worst = max((r for r in rows if r["how"] == "query"), key=lambda r: r["over_no_drop"])
    console.print(
        f"a drop costs at most {worst['over_no_drop']:.3f} times the same visible tokens without one "
        f"({worst['shape']}, {worst['drops']} drops; goal {LAUNCH_GOAL})"
    )


def report(console: Console, results: dict[str, Any]) -> None:
    """What there is: a stage that failed is left out."""
    if ceiling := results.get("ceilings"):
        console.print(
            f"ceilings: copy {ceiling['copy_gb_per_s']:.0f} GB/s, product {ceiling['matmul_tflop_per_s']:.0f} TFLOP/s"
        )
    if rows := results.get("attention"):
        report_attention(console, rows)
    if repos := results.get("repos_pages"):
        console.print(
            f"repos_pages: {repos['gb_per_s']:.0f} GB/s, {repos['over_copy']:.0%} of a copy (goal {REPOS_GOAL:.0%})"
        )
    if graph := results.get("graph"):
        console.print(
            f"one layer's decode attention: {graph['eager_ms']:.4f} ms, {graph['graph_ms']:.4f} ms as a CUDA graph"
        )
    for engine in results.get("engine", ()):
        console.print(f"{engine['model']}:")
        for row in engine["decode"]:
            console.print(
                f"  a decode step of {row['num_seqs']} sequences with 4 drops each: {row['eager_ms']:.2f} ms, "
                f"{row['graphs_ms']:.2f} ms as a CUDA graph ({row['same_tokens']:.1%} of the tokens are the same)"
            )
        e2e = engine["end_to_end"]
        console.print(
            f"  first token after a drop {e2e['ttft_after_drop_ms']:.1f} ms, with no drop "
            f"{e2e['ttft_no_drop_ms']:.1f} ms, prefilled again {e2e['ttft_re_prefill_ms']:.1f} ms"
        )


def wrong_results(rows: list[dict[str, Any]]) -> list[str]:
    """Of the timed calls: those that miss float64 by more than rounding."""
    wrong = [row for row in rows if row["error"] is not None and not row["error"] <= MAX_ERROR]
    return [f"{row['shape']}, {row['drops']} drops, {row['how']}: off by {row['error']:.3g}" for row in wrong]


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not torch.cuda.is_available():
        console.print(
            "make gpu needs a CUDA or ROCm device and a torch built for it; this one has none "
            f"(torch {torch.__version__}). The same checks run without a GPU in `make test`."
        )
        return 2
    from triton import __version__ as triton_version

    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton_version,
        "failed": {},
        "seconds": {},
    }

    def stage(name: str, run: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        try:
            results[name] = run()
        except Exception as error:
            results["failed"][name] = f"{type(error).__name__}: {error}"
            console.print(f"{name} failed:", style="red")
            console.print_exception()
        results["seconds"][name] = round(time.perf_counter() - begun, 1)
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()

    stage("checks", lambda: tests(console))
    stage("ceilings", gpu_attention.ceilings)
    stage("attention", lambda: list(gpu_attention.attention_times(results["ceilings"])))
    stage("repos_pages", lambda: gpu_attention.repos_times(results["ceilings"]))
    stage("graph", gpu_attention.graph_times)
    stage("engine", engine_times)
    report(console, results)
    for line in (wrong := wrong_results(results.get("attention", []))):
        console.print(f"wrong: {line}", style="red")
    console.print(f"all figures in {OUT}, after {sum(results['seconds'].values()):.0f} s")
    return int(bool(results["failed"] or wrong or results.get("checks", {}).get("failed")))


if __name__ == "__main__":
    sys.exit(main())
