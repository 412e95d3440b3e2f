"""Runs all of `make gpu` without a GPU, on small shapes: `TRITON_INTERPRET=1 python -m tests.gpu_dry_run`.

What torch would ask of CUDA goes to the CPU, kernels run under Triton's interpreter, a graph is the function once more,
and all stages share this process. Owns the stand-ins and the sizes; no time in it means anything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton.testing

from akv_server import engine
from akv_server.graphs import DecodeGraphs
from tests import clients, interpreter_rounding, models, triton_cases, truth
from tests.perf import gpu, gpu_attention, runs


def do_bench(function: Callable[[], Any], warmup: int, rep: int, return_mode: str) -> float:
    assert return_mode == "median"
    begun = time.perf_counter()
    function()
    return (time.perf_counter() - begun) * 1e3


def capture_again(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return run


class Engine(engine.Engine):
    """With graphs, which an engine on the CPU has none of."""

    def __init__(self, model: Any, config: engine.EngineConfig) -> None:
        super().__init__(model, replace(config, num_pages=600))
        pages = self.kv.k_pages, self.kv.v_pages
        self.graphs = DecodeGraphs(model, *pages, capture_again, max_rows=config.max_running)
        self.forward = self.graphs.forward


def stand_in_for_cuda() -> None:
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda: "no GPU",
        "get_device_capability": lambda: (9, 0),
        "get_device_properties": lambda: SimpleNamespace(total_memory=1e12),
    }.items():
        setattr(torch.cuda, name, value)
    triton.testing.do_bench = do_bench
    gpu_attention.capture_cuda_graphs = lambda: capture_again


def make_small() -> None:
    def small(num_seqs: int, rows: int, drops: int) -> gpu_attention.Workload:
        shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 32}
        return gpu_attention.Workload(num_seqs, rows, visible=50, drops=drops, **shape)

    gpu.DEVICE = gpu_attention.DEVICE = "cpu"
    gpu_attention.GAP, gpu_attention.ROUNDS = 20, 1
    gpu_attention.DROPS = (0, 1)
    gpu_attention.decode = lambda drops, num_seqs=2: small(min(num_seqs, 2), 1, drops)
    many, one, prefill = gpu_attention.SHAPES
    gpu_attention.SHAPES |= {
        many: gpu_attention.decode,
        one: lambda drops: replace(small(1, 1, drops), layers=2),
        prefill: lambda drops: small(1, 20, drops),
    }
    gpu_attention.ceilings.__defaults__ = (2**16, 64)
    gpu_attention.repos_times.__defaults__ = (2**6,)
    widths: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_q_heads": 2, "num_kv_heads": 1}
    sizes = {"num_layers": 1, "head_dim": 16, "rotary_dim": 16, "vocab_size": 40_000, "max_positions": 8192}
    gpu.LARGE = replace(gpu.LARGE, **widths, **sizes)
    gpu.Engine = Engine
    gpu.in_a_process = lambda name, timeout_s: gpu.run_stage(name)
    gpu.decode_times = partial(gpu.decode_times, sizes=(1, 3), stream=100, gap=5, steps=3)
    runs.STREAM, runs.DROP = 400, (100, 350)
    triton_cases.CHECKS = {"sample": None}
    assert clients and models and truth  # what the checks of the engine import


if __name__ == "__main__":
    torch.set_num_threads(1)
    interpreter_rounding.install()
    stand_in_for_cuda()
    make_small()
    sys.exit(gpu.main())
