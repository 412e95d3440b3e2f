"""Decode steps as graphs, without a GPU: a graph is a tape of tensor operations, so that what is baked in shows.

The tape stands in for a CUDA graph: it records every operation and kernel call on the tensors they ran on, and its
replay runs them again on the very same tensors, without the Python that had led to them. A number or a tensor that was
read when the tape was made, instead of from a graph's buffers, is stale in the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from akv_kernels import reference, select
from akv_kernels.plan import SequencePlan, build_plan
from akv_kernels.testing import make_attention_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from akv_server import files, loader
from akv_server.engine import Engine, EngineConfig
from akv_server.graphs import DecodeGraphs, capture_cuda_graphs, pad_rows
from akv_server.model import StepInput
from akv_server.sampler import SamplingParams, sample
from tests.clients import Client, assert_right, drop, run, some_tokens
from tests.models import tiny_model
from tests.perf import gpu
from tests.truth import Truth

KERNELS = ("segment_batch_attention", "rope_and_write", "rms_norm", "silu_mul")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")  # wait for the device


class Tape(TorchDispatchMode):
    """Captures as `akv_server.graphs.Capture` has it. Kernels are recorded if they are those of `backend`."""

    def __init__(self, kernels) -> None:
        super().__init__()
        self.calls: list | None = None  # of the tape in the making
        self.captured: list[list] = []
        self.backend = SimpleNamespace(repos_pages=kernels.repos_pages)
        for name in KERNELS:
            setattr(self.backend, name, self._recorded(getattr(kernels, name)))

    def _recorded(self, kernel: Callable) -> Callable:
        def call(*args, **kwargs):
            calls, self.calls = self.calls, None
            result = kernel(*args, **kwargs)
            self.calls = calls
            if calls is not None:
                calls.append((kernel, args, kwargs, result))
            return result

        return call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.calls is not None:
            name = function.__name__.split(".")[0]
            assert name not in READS, f"{name} reads a value on the host"
            self.calls.append((function, args, kwargs or {}, result))
        return result

    def __call__(self, run_: Callable[[], None]) -> Callable[[], None]:
        run_()
        self.calls = calls = []
        with self:
            run_()
        self.calls = None
        self.captured.append(calls)
        return lambda: self.replay(calls)

    @staticmethod
    def replay(calls: list) -> None:
        for function, args, kwargs, recorded in calls:
            inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            result = function(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def truth(path):
    return Truth(path)


def taped(path, kernels, **config) -> tuple[Engine, DecodeGraphs, Tape]:
    """An engine whose decode steps run as tapes."""
    tape = Tape(kernels)
    engine = Engine(loader.load_model(files.resolve(str(path)), backend=tape.backend), EngineConfig(**config))
    pages = engine.kv.k_pages, engine.kv.v_pages
    engine.graphs = graphs = DecodeGraphs(engine.model, *pages, tape, max_rows=engine.config.max_running)
    engine.forward = graphs.forward
    return engine, graphs, tape


def compared(engine: Engine, graphs: DecodeGraphs) -> Callable[[StepInput], Tensor]:
    """The graphs' forward, whose logits and pages are compared with the eager model's in every step."""

    def forward(step: StepInput) -> Tensor:
        pages = (engine.kv._k, engine.kv._v)
        before = [x.clone() for x in pages]
        logits = graphs.forward(step).clone()
        after = [x.clone() for x in pages]
        for x, y in zip(pages, before, strict=True):
            x.copy_(y)
        wanted = engine.run_eagerly(step)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        for got, x, old in zip(after, pages, before, strict=True):
            torch.testing.assert_close(got, x, atol=1e-5, rtol=1e-5, equal_nan=True)
            others = torch.ones(old[0].shape[:2].numel(), dtype=torch.bool)
            others[step.write_slots[step.write_slots >= 0]] = False
            bits = [t.flatten(1, 2)[:, others].view(torch.int32) for t in (got, old)]
            assert torch.equal(*bits), "a slot was written that is not the step's"
        return logits

    return forward


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_replayed_steps_equal_eager_ones_and_the_truth(path, truth, kernels):
    """Streams of every size grow, drop and fork in company: each size is captured once, for all their steps."""
    engine, graphs, tape = taped(path, reference if kernels == "reference" else select("cpu"), num_pages=96)
    engine.forward = compared(engine, graphs)
    streams = [some_tokens(60 + 9 * i, seed=i) for i in range(5)]
    for round_ in range(2):
        clients = []
        for i, tokens in enumerate(streams):
            history = (drop(5 + i, 30 + 2 * i, len(tokens) - 3),) if i or round_ else ()
            clients.append(Client(tokens, history, max_tokens=3 + 2 * i))
        run(engine, *clients)
        for i, client in enumerate(clients):
            assert client.outcome.error is None
            assert_right(client, truth)
            streams[i] = client.tokens + client.ids + some_tokens(4, seed=round_)
    assert {rows for rows, _ in graphs._replays} == {1, 2, 4, 8}
    assert len(tape.captured) == len(graphs._replays) <= 5
    assert graphs.num_replayed > 20
    engine.check()


@pytest.mark.parametrize("kept", ["seg_rotation", "page_table", "seg_length", "seq_segments"])
def test_a_baked_in_value_would_be_seen(path, kept, caplog):
    """The same comparison fails where attention keeps the array of the plan that it met when it was captured."""
    engine, graphs, tape = taped(path, select("cpu"), num_pages=64)
    attend = tape.backend.segment_batch_attention

    def bake(q, k_pages, v_pages, plan, **options):
        if calls := tape.calls:
            tape.calls = None
            plan = replace(plan, **{kept: getattr(plan, kept).clone()})
            tape.calls = calls
        return attend(q, k_pages, v_pages, plan, **options)

    tape.backend.segment_batch_attention = bake
    engine.forward = compared(engine, graphs)
    tokens = some_tokens(80)
    first = run(engine, Client(tokens, max_tokens=2))
    assert first.outcome.error is None, "the captured step itself is right"
    other = run(engine, Client(tokens, (drop(10, 40, 60),), max_tokens=8))
    assert other.outcome.error is not None
    assert "Tensor-likes are not close" in caplog.text


def decode_step(seed: int) -> tuple[StepInput, tuple[Tensor, ...]]:
    """A step of five rows (the second and the last want no logits) on a case of the kernels' own tests."""
    case = make_attention_case(
        "decode", seed=seed, rows=(1, 1, 1, 1), segments=(3, 1, 6, 2), num_q_heads=4, head_dim=16
    )
    num_rows = len(case.q)
    slots = torch.arange(num_rows) + 16 * len(case.k_pages)  # in pages of their own, behind the case's
    step = StepInput(
        token_ids=torch.arange(num_rows) + 40 + seed,
        positions=torch.tensor([7, 0, 1900, 42, 300])[:num_rows],
        write_slots=slots.where(torch.arange(num_rows) != 3, -1),
        plan=case.plan,
        logit_rows=torch.tensor([0, 2, 3]),
    )
    pages = tuple(torch.cat((x.nan_to_num(0), torch.zeros_like(x[:1]))) for x in (case.k_pages, case.v_pages))
    return step, pages


@pytest.mark.parametrize("weights", ["int8", "float32", "reference"])
def test_padding_changes_nothing(path, weights):
    """Bit for bit where a row's arithmetic depends on no other row, which torch's own products do not promise."""
    kernels = reference if weights == "reference" else select("cpu")
    weights_as = "float32" if weights == "reference" else weights
    model = loader.load_model(files.resolve(str(path)), weights_as=weights_as, backend=kernels)
    for seed in range(3):
        step, (k, v) = decode_step(seed)
        pages = [[x.clone() for _ in range(model.config.num_layers)] for x in (k, v)]
        wanted = model.forward(step, *pages)
        for num_rows in (5, 8, 16):
            padded = pad_rows(step, num_rows)
            assert len(padded.token_ids) == len(padded.logit_rows) == num_rows == len(padded.plan.seq_rows) - 1
            again = [[x.clone() for _ in range(model.config.num_layers)] for x in (k, v)]
            logits = model.forward(padded, *again)[:3]
            exact = weights == "int8"
            torch.testing.assert_close(logits, wanted, atol=0 if exact else 1e-4, rtol=0 if exact else 1e-4)
            for got, want in zip([*again[0], *again[1]], [*pages[0], *pages[1]], strict=True):
                torch.testing.assert_close(got, want, atol=0 if exact else 1e-5, rtol=0 if exact else 1e-5)


def test_padding_rows_see_nothing():
    """Attention over padded plans is that over the plan itself, and zero behind it; and nobody's page gains mass."""
    case = make_attention_case("decode", rows=(1, 1, 1), segments=(4, 9, 1))
    num_rows = len(case.q)
    rows = torch.zeros(num_rows, dtype=torch.int64)
    plan = pad_rows(StepInput(rows, rows, rows, case.plan, rows), 16).plan
    q = torch.cat((case.q, torch.randn(16 - num_rows, *case.q.shape[1:])))
    for kernels in (select("cpu"), reference):
        mass = [torch.zeros(len(case.plan.page_table)) for _ in range(2)]
        wanted = case.run(kernels, page_mass=mass[0])
        got = kernels.segment_batch_attention(q, case.k_pages, case.v_pages, plan, scale=case.scale, page_mass=mass[1])
        assert torch.equal(got[:num_rows], wanted)
        assert not got[num_rows:].any()
        assert torch.equal(*mass)


class OnDevice(TorchDispatchMode):
    """No operation touches a tensor of the host: the meta device stands in for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        assert devices <= {"meta"}, f"{function} reads the host"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rotary", ["there", "on the host"])
def test_a_step_never_reads_the_host(path, rotary):
    """Neither of which a capture would bear: a copy of the model's frequencies in each step, a table left behind."""
    backend = SimpleNamespace(
        segment_batch_attention=lambda q, k, v, plan, **_: torch.empty_like(q),
        rope_and_write=lambda q, k, v, ks, vs, slots, rotation, **_: q * rotation.sum() + slots.sum(),
        rms_norm=lambda x, weight, eps, residual=None: x * weight if residual is None else (x * weight, x + residual),
        silu_mul=lambda x: x.chunk(2, dim=-1)[0],
    )
    model = loader.load_model(files.resolve(str(path)), backend=backend, device="meta")
    if rotary == "on the host":
        model._rotary_here = model.rotary
    step, (k, v) = decode_step(0)
    pages = [[x.to("meta")] * model.config.num_layers for x in (k, v)]

    def capture(run_: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            with OnDevice():
                run_()

        return guarded

    graphs = DecodeGraphs(model, *pages, capture, max_rows=8)
    if rotary == "there":
        assert graphs.forward(step).shape == (3, model.config.vocab_size)
        assert graphs.num_replayed == 1
    else:
        with pytest.raises(AssertionError, match="reads the host"):
            graphs.forward(step)


def test_what_fits_no_graph_runs_without(path, truth):
    engine, graphs, tape = taped(path, select("cpu"), num_pages=300, max_running=4, max_step_tokens=64)
    steps = []

    def forward(step: StepInput) -> Tensor:
        before = graphs.num_replayed
        logits = graphs.forward(step)
        steps.append((step, graphs.num_replayed > before))
        return logits

    engine.forward = forward
    client = run(engine, Client(some_tokens(200), max_tokens=3))
    assert_right(client, truth)
    assert [replayed for _, replayed in steps] == [False] * 4 + [True] * 3
    assert not tape.captured or len(tape.captured) == 1
    step = steps[-1][0]
    rotary, size = engine.model.rotary, 16

    def of(num_rows: int, pages: int, segments: int) -> StepInput:
        cut = [(size * i, 1, i, 0) for i in range(segments)]
        plan = build_plan([SequencePlan([5000], [0] * pages, cut)] * num_rows, rotary, size)
        ids = torch.zeros(num_rows, dtype=torch.int64)
        return StepInput(ids, ids, ids - 1, plan, ids)

    assert graphs._size_of(step) == (1, 16)
    assert graphs._size_of(of(3, 16, 2)) == (4, 64)
    assert graphs._size_of(of(3, 22, 2)) == (4, 256)
    assert graphs._size_of(of(1, 300, 2)) == (1, 4 * 2048 // size)
    assert graphs._size_of(of(4, 128, 2)) == (4, 4 * 2048 // size)
    assert graphs._size_of(of(4, 129, 2)) is None
    assert graphs._size_of(of(5, 1, 1)) is None
    assert graphs._size_of(of(1, 16, 4 * 256 + 1)) is None
    wide = of(5, 20, 3)
    assert torch.equal(graphs.forward(wide), engine.run_eagerly(wide))


def test_a_capture_that_fails_is_served_without_a_graph(path, truth, caplog):
    engine, _, _ = taped(path, select("cpu"), num_pages=64)
    tries = []

    def fails(run_: Callable[[], None]) -> Callable[[], None]:
        tries.append(run_)
        raise RuntimeError("out of memory")

    graphs = DecodeGraphs(engine.model, engine.kv.k_pages, engine.kv.v_pages, fails, max_rows=8)
    engine.forward = graphs.forward
    client = run(engine, Client(some_tokens(40), max_tokens=5))
    assert_right(client, truth)
    assert (len(tries), graphs.num_replayed) == (1, 0)
    assert "captured" in caplog.text


class FakeCuda:
    """As much of torch.cuda as a capture uses; says what ran, and in which stream and mode."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.here = "main"
        self.mode: tuple = ("run",)

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self):
        return SimpleNamespace(name="side", wait_stream=lambda other: self.log.append(("side waits", other.name)))

    def current_stream(self):
        return SimpleNamespace(name=self.here, wait_stream=lambda other: self.log.append(("main waits", other.name)))

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.log.append(("replayed",)))

    @contextmanager
    def stream(self, stream) -> Iterator[None]:
        before, self.here = self.here, stream.name
        try:
            yield
        finally:
            self.here = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode) -> Iterator[None]:
        self.here, self.mode = stream.name, ("captured", pool, capture_error_mode)
        yield
        self.here, self.mode = "main", ("run",)  # not after an error: as torch leaves it

    def run(self) -> None:
        self.log.append((*self.mode, self.here))


def test_a_capture_warms_up_first_and_comes_back_to_its_stream(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    capture = capture_cuda_graphs()
    replay = capture(cuda.run)
    captured = ("captured", "pool", "thread_local", "side")
    warm_up = [("side waits", "main"), ("run", "side"), ("run", "side"), ("main waits", "side")]
    assert cuda.log == [*warm_up, captured]
    replay()
    assert cuda.log[-1] == ("replayed",)

    def fails() -> None:
        if cuda.mode[0] == "captured":
            raise RuntimeError("not in a capture")

    with pytest.raises(RuntimeError, match="not in a capture"):
        capture(fails)
    assert cuda.here == "main"


def test_a_cpu_runs_without_graphs(path):
    engine = Engine(loader.load_model(files.resolve(str(path))), EngineConfig(num_pages=8))
    assert engine.graphs is None
    assert engine.forward == engine.run_eagerly
    assert engine._draw is None


def test_the_benchmark_of_decode_runs_both_ways(path):
    """`make gpu` times it on a GPU; here it only has to run, and to use what it says."""
    engine, _, _ = taped(path, select("cpu"), num_pages=200)
    rows = gpu.decode_times(engine, sizes=(1, 3), stream=300, gap=20, steps=4)
    assert [(row["num_seqs"], row["steps_as_graphs"]) for row in rows] == [(1, 4), (3, 4)]
    assert all(row["eager_ms"] > 0 and row["graphs_ms"] > 0 for row in rows)
    assert all(row["same_tokens"] == 1 for row in rows)
    engine.check()
    assert engine.scheduler.is_idle


# Sampling by a kernel -----------------------------------------------------------------------------------------------


def plain_draw(logits, temperature, top_k, top_p, min_p, uniform) -> Tensor:
    """What `akv_kernels.gpu.sample` says it does, row by row in float64. (Its own tests hold the kernel to it.)"""
    assert all(x.dtype == torch.float32 for x in (logits, temperature, top_p, min_p, uniform))
    assert top_k.dtype == torch.int32
    picked = []
    for x, heat, k, p, least, u in zip(logits.double(), temperature, top_k, top_p, min_p, uniform, strict=True):
        assert 0 <= float(u) < 1
        weight = (x == x.max()).double() if heat == 0 else ((x - x.max()) / heat.double()).exp()
        if 0 < k < len(x):
            weight = weight * (x >= x.topk(int(k)).values[-1])
        if p < 1:
            order = x.argsort(descending=True)
            before = weight[order].cumsum(0) - weight[order]
            weight = weight * (x >= x[order][before < max(float(p) * weight.sum(), 5e-324)][-1])
        weight = weight * (weight >= least)
        upto = weight.cumsum(0)
        place = int(torch.searchsorted(upto, u.double() * upto[-1], right=True))
        picked.append(min(place, int(weight.nonzero()[-1])))
    return torch.tensor(picked)


MANNERS = [
    SamplingParams(temperature=0, top_p=0.5),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.2, min_p=0.05, seed=2),
    SamplingParams(temperature=1e-300, seed=3),
    SamplingParams(temperature=0.9, top_k=1, seed=4),
    SamplingParams(temperature=2.0, top_p=0.0, seed=5),
]


def test_a_kernel_draws_what_the_host_draws_and_from_the_same_numbers():
    logits = torch.randn(len(MANNERS), 300, generator=torch.Generator().manual_seed(5)) * 2
    logits[0, [17, 99]] = logits[0].max() + 1  # equals
    ours, theirs = ([how.generator() for how in MANNERS] for _ in range(2))
    for _ in range(60):
        wanted = sample(logits, MANNERS, ours)
        assert torch.equal(sample(logits, MANNERS, theirs, plain_draw), wanted)
    assert wanted[0] == 17
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(a.get_state(), b.get_state())


def test_a_row_drawn_by_a_kernel_never_depends_on_the_others():
    manners = [SamplingParams(temperature=1.1, top_p=0.9, top_k=40, seed=row) for row in range(7)]
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(6))
    together = sample(logits, manners, [how.generator() for how in manners], plain_draw)
    for row, how in enumerate(manners):
        assert sample(logits[row : row + 1], [how], [how.generator()], plain_draw) == together[row]


def test_a_draw_next_to_one_stays_below_it(monkeypatch):
    """In float32 a number so near to 1 is 1, and no token's stretch holds that."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1 - 2**-53, dtype=torch.float64))
    assert sample(torch.zeros(1, 10), [SamplingParams()], [None], plain_draw).tolist() == [9]


def test_an_engine_samples_by_its_backends_kernel(path):
    """One call for all rows of a step, and a seed repeats whoever is there."""
    backend = SimpleNamespace(**{name: getattr(select("cpu"), name) for name in (*KERNELS, "repos_pages")})
    widths = []

    def counted(logits, *columns):
        widths.append(len(logits))
        return plain_draw(logits, *columns)

    backend.sample = counted
    model = loader.load_model(files.resolve(str(path)), backend=backend)
    hot = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
    alone = run(Engine(model, EngineConfig(num_pages=64)), Client(some_tokens(50), max_tokens=20, sampling=hot))
    widths.clear()
    others = [Client(some_tokens(30, seed=i + 1), max_tokens=20) for i in range(3)]
    company = run(Engine(model, EngineConfig(num_pages=64)), *others, Client(alone.tokens, max_tokens=20, sampling=hot))
    assert company.ids == alone.ids
    assert len(set(alone.ids)) > 5
    assert max(widths) == 4
    assert len(widths) < 40
