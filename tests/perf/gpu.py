"""`make gpu`: the Triton kernels' tests for real on a GPU, then what a drop costs there.

Every figure is measured here, in this run: rivals and ceilings beside our own. Each stage runs in a process of its own
(`python -m tests.perf.gpu STAGE`) and adds what it has to gpu.json, in $OUT or in out/, as it goes: one that fails, or
is stopped, takes nothing from the others. What is wrong stands in a list at the end. Refuses where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from akv_kernels import select
from akv_kernels.testing import relative_error
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
LAUNCH_GOAL, REPOS_GOAL = 1.03, 0.85
GROUPS_AT_ONCE = 6  # of checks: nearly all of their time goes into compiling kernels, on one core each
CHECKS_S, STAGE_S, ALL_S = 300.0, 150.0, 570.0  # the longest that all checks, a stage, and everything may take
MAX_LOGITS_ERROR = 0.1  # of a graph against kernels launched one by one, relative: they split contexts at other places
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
) -> Iterator[dict[str, float]]:
    """Milliseconds of a whole decode step, launched kernel by kernel and as a graph: sequences of `stream` tokens with
    four drops each, one decoding step after another; the median. First, each step's logits are compared: they are what
    is judged, as of two tokens that are nearly as likely rounding picks one."""
    graphs = engine.graphs
    assert graphs is not None
    errors: list[float] = []

    def compared(step: StepInput) -> Tensor:
        before = graphs.num_replayed
        logits = graphs.forward(step).clone()
        if graphs.num_replayed > before:
            errors.append(relative_error(logits, engine.run_eagerly(step).double()))
        return logits

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
        errors.clear()
        run(num_seqs, compared)  # compiles and captures, too
        replayed.clear()
        graphs_ms, by_graph = run(num_seqs, graphs.forward)
        used = sum(replayed)
        eager_ms, eagerly = run(num_seqs, engine.run_eagerly)
        same = [a == b for a, b in zip(itertools.chain(*by_graph), itertools.chain(*eagerly), strict=True)]
        yield {
            "num_seqs": num_seqs,
            "eager_ms": eager_ms,
            "graphs_ms": graphs_ms,
            "steps_as_graphs": used,
            "logits_error": max(errors, default=math.inf),
            "same_tokens": sum(same) / len(same),
        }
    engine.forward = graphs.forward


def random_model(config: ModelConfig) -> Model:
    """A model that says nothing and takes the time of one that does."""
    shapes, generator = shapes_of(config), torch.Generator(DEVICE).manual_seed(0)

    def source(name: str) -> Tensor:
        shape = shapes[".".join(name.split(".")[-2:])]
        if len(shape) == 1:
            return torch.ones(shape, device=DEVICE)
        return torch.randn(shape, generator=generator, device=DEVICE) * shape[1] ** -0.5

    return Model(config, source, select(DEVICE), weights="bfloat16", device=DEVICE)


def default_model() -> Model | None:
    """Where its files can be had and read."""
    if importlib.util.find_spec("gguf") is None:
        print("without the default model: gguf is not installed")
        return None
    try:
        return loader.load_model(files.resolve("default"), weights_as="bfloat16", device=DEVICE)
    except AkvError as error:
        print(f"without the default model: {error.message}")
        return None


def large_model() -> Model | None:
    """Where there is memory."""
    has_room = torch.cuda.get_device_properties().total_memory > LARGE_BYTES
    return random_model(LARGE) if has_room else None


def engine_times(make: Callable[[], Model | None], _: gpu_attention.Ceilings | None) -> Iterator[dict[str, Any]]:
    """The engine in bfloat16: decode with and without graphs; the first token after a drop, without one, and prefilled
    again."""
    model = make()
    if model is None:
        return
    engine = Engine(model, EngineConfig(num_pages=6144))
    result: dict[str, Any] = {"model": model.config.name, "decode": []}
    for row in decode_times(engine):
        result["decode"].append(row)
        yield result
    yield result | {"end_to_end": drop_against_none(engine, rounds=5)}


def checks_of(group: str, end: float) -> tuple[list[dict[str, Any]], str]:
    """One group of tests/triton_cases.py, in a process of its own: a fault in a kernel ends no other. Its records, and
    what went wrong beside them. `end` is the last moment, in time.perf_counter()'s seconds."""
    command = [sys.executable, "-m", "tests.triton_cases", group]
    left_s = end - time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        return [], f"stopped after {max(left_s, 0):.0f} s"
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return records, done.stderr[-3000:] if done.returncode else ""


def run_checks(console: Console) -> dict[str, Any]:
    """Every check of tests/triton_cases.py on the GPU."""
    from tests.triton_cases import CHECKS

    can_float8 = torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 9)
    groups = [group for group in CHECKS if can_float8 or group != "float8"]
    failed, total, end = [], 0, time.perf_counter() + CHECKS_S
    with ThreadPoolExecutor(GROUPS_AT_ONCE) as pool:
        for group, (records, problem) in zip(groups, pool.map(lambda g: checks_of(g, end), groups), strict=True):
            total += len(records) + bool(problem)
            failed += [
                f"{group} {r['name']}: {r['measured']:.3g} > {r['bound']:.3g}" for r in records if not r["passed"]
            ]
            failed += [f"{group} ended early: {problem}"] if problem else []
    console.print(f"{total - len(failed)} of {total} checks passed on {torch.cuda.get_device_name()}")
    return {"total": total, "failed": failed, "float8": can_float8}


def report_ceilings(console: Console, ceiling: gpu_attention.Ceilings) -> None:
    console.print(
        f"ceilings: copy {ceiling['copy_gb_per_s']:.0f} GB/s, product {ceiling['matmul_tflop_per_s']:.0f} TFLOP/s"
    )


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def report_attention(console: Console, rows: list[dict[str, Any]]) -> None:
    shape = rows[0]["shape"]
    table = Table(title=f"{shape}; 8,192 visible tokens a sequence, bfloat16, 32 heads over 8, pages of 16; ms a layer")
    for column in ("drops", "how", "ms", "over no drop", "GB/s", "TFLOP/s", "of roofline"):
        table.add_column(column, justify="left" if column == "how" else "right", no_wrap=True)
    for row in rows:
        numbers = f"{row['over_no_drop']:.2f}", f"{row['gb_per_s']:.0f}", f"{row['tflop_per_s']:.1f}"
        table.add_row(str(row["drops"]), row["how"], f"{row['ms']:.4f}", *numbers, percent(row["roofline"]))
    console.print(table)
    worst = max((r for r in rows if r["how"] == "query"), key=lambda r: r["over_no_drop"])
    console.print(
        f"a drop costs at most {worst['over_no_drop']:.3f} times the same visible tokens without one "
        f"({shape}, {worst['drops']} drops; goal {LAUNCH_GOAL})"
    )


def report_repos(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        console.print(
            f"repos_pages, {row['survivors']} survivors: {row['gb_per_s']:.0f} GB/s, {percent(row['over_copy'])} of a "
            f"copy (goal {REPOS_GOAL:.0%})"
        )


def report_graph(console: Console, graph: dict[str, float]) -> None:
    console.print(
        f"one layer's decode attention: {graph['eager_ms']:.4f} ms, {graph['graph_ms']:.4f} ms as a CUDA graph"
    )


def report_engine(console: Console, engine: dict[str, Any]) -> None:
    console.print(f"{engine['model']}:")
    for row in engine["decode"]:
        console.print(
            f"  a decode step of {row['num_seqs']} sequences with 4 drops each: {row['eager_ms']:.2f} ms, "
            f"{row['graphs_ms']:.2f} ms as a CUDA graph (logits off by at most {row['logits_error']:.2g}, "
            f"{row['same_tokens']:.1%} of the tokens are the same)"
        )
    if e2e := engine.get("end_to_end"):
        console.print(
            f"  first token after a drop {e2e['ttft_after_drop_ms']:.1f} ms, with no drop "
            f"{e2e['ttft_no_drop_ms']:.1f} ms, prefilled again {e2e['ttft_re_prefill_ms']:.1f} ms"
        )


@dataclass(frozen=True)
class Stage:
    """What is timed in one process."""

    measure: Callable[[gpu_attention.Ceilings | None], Iterator[Any]]  # yields all that it has so far, each time more
    report: Callable[[Console, Any], None]


ENGINES = {"engine, default model": default_model, "engine, large model": large_model}
STAGES = {
    "ceilings": Stage(lambda _: iter([gpu_attention.ceilings()]), report_ceilings),
    **{
        shape: Stage(lambda ceiling, shape=shape: gpu_attention.attention_times(shape, ceiling), report_attention)
        for shape in gpu_attention.SHAPES
    },
    "repos_pages": Stage(lambda ceiling: iter([gpu_attention.repos_times(ceiling)]), report_repos),
    "graph": Stage(lambda _: iter([gpu_attention.graph_times()]), report_graph),
    **{name: Stage(partial(engine_times, make), report_engine) for name, make in ENGINES.items()},
}


def results_file() -> Path:
    return Path(os.environ.get("OUT") or "out") / "gpu.json"


def read_results() -> dict[str, Any]:
    path = results_file()
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


def write_results(results: dict[str, Any]) -> None:
    """Whole or not at all: a stage may be stopped at any time."""
    path = results_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1))
    part.replace(path)


def run_stage(name: str) -> None:
    """Adds to the results what the stage has, as often as it has more."""
    for result in STAGES[name].measure(read_results().get("ceilings")):
        write_results(read_results() | {name: result})


def in_a_process(name: str, timeout_s: float) -> None:
    """Runs a stage. Raises RuntimeError with what went wrong: a fault in a kernel, after which nothing runs in its
    process, ends no other stage."""
    command = [sys.executable, "-m", "tests.perf.gpu", name]
    env = os.environ | {"OUT": str(results_file().parent.resolve())}
    sys.stdout.flush()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"stopped after {max(timeout_s, 0):.0f} s") from None
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:].strip() or f"exit status {done.returncode}")


def wrong_results(results: dict[str, Any]) -> list[str]:
    """The timed calls that miss float64, or the same step launched kernel by kernel, by more than rounding."""
    wrong = [
        f"{row['shape']}, {row['drops']} drops, {row['how']}: off by {row['error']:.3g}"
        for shape in gpu_attention.SHAPES
        for row in results.get(shape, ())
        if row["error"] is not None and not row["error"] <= MAX_ERROR
    ]
    return wrong + [
        f"{name}, {row['num_seqs']} sequences: logits of a CUDA graph off by {row['logits_error']:.3g}"
        for name in ENGINES
        for row in results.get(name, {}).get("decode", ())
        if not row["logits_error"] <= MAX_LOGITS_ERROR
    ]


def run_all(console: Console) -> list[str]:
    """Checks, then stages, each reported as it ends; what is wrong in them. Whatever has no time left is so, too."""
    from triton import __version__ as triton_version

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton_version}
    write_results(about | {"failed": {}, "seconds": {}})
    end = time.perf_counter() + ALL_S
    for name in ("checks", *STAGES):
        begun = time.perf_counter()
        problem = None
        try:
            if name == "checks":
                write_results(read_results() | {name: run_checks(console)})
            else:
                in_a_process(name, min(STAGE_S, end - begun))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            console.print(f"{name} failed", style="red")
        results = read_results()
        results["seconds"][name] = round(time.perf_counter() - begun, 1)
        if problem is not None:
            results["failed"][name] = problem
        write_results(results)
        if name in STAGES and name in results:  # also of a stage that was stopped half way
            STAGES[name].report(console, results[name])
    console.print(f"all figures in {results_file()}, after {sum(results['seconds'].values()):.0f} s")
    failed_checks = [f"check {line}" for line in results.get("checks", {}).get("failed", ())]
    failed_stages = [f"{name}: {problem}" for name, problem in results["failed"].items()]
    return failed_checks + failed_stages + wrong_results(results)


def main(stage: str | None = None) -> int:
    """All stages, or one of them, whose results are added to those there are."""
    if stage is not None:
        run_stage(stage)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not torch.cuda.is_available():
        console.print(
            "make gpu needs a CUDA or ROCm device and a torch built for it; this one has none "
            f"(torch {torch.__version__}). The same checks run without a GPU in `make test`."
        )
        return 2
    wrong = run_all(console)
    for line in wrong:
        console.print(f"wrong: {line}", style="red", markup=False)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
