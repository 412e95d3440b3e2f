"""Every Triton kernel against the truth, on any device; prints one JSON line per check.

    TRITON_INTERPRET=1 python -m tests.triton_cases [name …]    under the interpreter, on the CPU
    python -m tests.triton_cases [name …]                       on a GPU

Owns inputs, reference values and bounds of the checks; whoever runs it decides what a failure means. A check is
(name, measured, bound): it passes if measured <= bound. Mathematics is held to twice torch's own error in the same
dtype, data movement to zero.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

if __name__ == "__main__" and os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interpreter_rounding

    interpreter_rounding.install()

from akv_kernels import attention, gpu, reference, testing
from akv_kernels.testing import AttentionCase, error_bound, make_attention_case, relative_error

Check = tuple[str, float, float]  # name, measured, bound
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NARROW_CASES = (
    "mixed",
    "page_size_1",
    "head_dim_80",
    "head_dim_128",
    "head_dim_256",
    "interleaved_partial",
    "nine_heads",
)
MUTATED = "prefill_across_segments"  # the case that every mutation has to fail, but for those of MUTATED_ELSEWHERE


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_attention(device: str) -> Iterator[Check]:
    """All of testing's cases in float32, some in float16 and bfloat16; the two rotations take turns, both take some."""
    for dtype in FLOATS:
        for number, case in enumerate(testing.attention_cases(dtype)):
            if case.name in NARROW_CASES or (dtype == torch.float32 and case.name != "long_context"):  # see splits
                hows = ("query", "key") if case.name == "mixed" else (("query", "key")[number % 2],)
                for how in hows:
                    yield f"{case.name}/{short(dtype)}/{how}", *_attend(case.to(device), rotation=how)


def check_float8(device: str) -> Iterator[Check]:
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for how in ("query", "key"):
            case = make_attention_case("float8", dtype=torch.bfloat16, kv_dtype=kv_dtype, head_dim=128)
            yield f"{short(kv_dtype)}/{how}", *_attend(case.to(device), rotation=how)
    rotary, positions = testing.make_rotary(64), torch.tensor([3, 4, 5])
    rotation, slots = rotary.table(positions).to(device), torch.tensor([2, 3, 4], device=device)
    q, k, v = (_randn(seed, 3, 2, 64).to(torch.bfloat16).to(device) for seed in range(3))
    scales = torch.tensor([[0.02, 0.5], [0.3, 0.04]], device=device)  # of K and of V, by head
    pages, expected = (torch.zeros(2, 1, 16, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    kwargs = {"interleaved": False, "k_scale": scales[0], "v_scale": scales[1]}
    for backend, out in ((gpu, pages), (reference, expected)):
        backend.rope_and_write(q, k, v, *out, slots, rotation, **kwargs)
    exact = testing.rotate(k.double().cpu(), positions, rotary), v.double().cpu()
    for name, got, want, scale, truth in zip("kv", pages, expected, scales, exact, strict=True):
        back = got.flatten(0, 1)[2:5].double() * scale.double()[:, None]
        yield f"{name}_is_divided_by_its_scale", relative_error(back.cpu(), truth), 0.04
        eps = torch.finfo(torch.float8_e4m3fn).eps  # the reference rounds once, from float64: few ties fall otherwise
        yield f"{name}_as_by_reference", relative_error(got.double().cpu(), want.double().cpu()), eps / 16


def _attend(case: AttentionCase, **kwargs: object) -> tuple[float, float]:
    return relative_error(case.run(gpu, **kwargs), case.truth), error_bound(case)


def check_page_mass(device: str) -> Iterator[Check]:
    for dtype in (torch.float32, torch.bfloat16):
        case = make_attention_case("mass", rows=(1, 20, 2), segments=(2, 4, 9), dtype=dtype).to(device)
        mass = torch.ones(len(case.plan.page_table), device=device)
        out = case.run(gpu, page_mass=mass)
        bound = error_bound(case)
        yield f"added/{short(dtype)}", relative_error(mass - 1, case.mass), bound
        yield (
            f"every_row_and_head_once/{short(dtype)}",
            abs(float(mass.sum() - len(mass)) / out[..., 0].numel() - 1),
            bound,
        )
    case = make_attention_case("one row is blind", rows=(2,), segments=(2,), garbage=0.0)
    plan = testing.replace(case.plan, row_index=torch.tensor([-1, *case.plan.row_index[1:]], dtype=torch.int32))
    wanted, mass = (torch.zeros(len(plan.page_table)) for _ in range(2))
    case.run(reference, plan=plan, page_mass=wanted)
    mass = mass.to(device)
    case.to(device).run(gpu, plan=plan.to(device), page_mass=mass)
    yield "beside_a_blind_row", relative_error(mass.cpu(), wanted.double()), error_bound(case)


def check_placement(device: str) -> Iterator[Check]:
    """Data movement: where results go, and what no kernel may touch."""
    case = make_attention_case("placement", rows=(1, 9), segments=(3, 4)).to(device)
    k_before, v_before = case.k_pages.clone(), case.v_pages.clone()
    around = torch.full((case.q.numel() + 512,), 7.0, device=device)
    out = around[256:-256].view(case.q.shape)
    got = case.run(gpu, out=out)
    yield "out_is_returned", float(got.data_ptr() != out.data_ptr()), 0
    yield "nothing_beside_out", float((around[:256] != 7).sum() + (around[-256:] != 7).sum()), 0
    same = [
        torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0))
        for a, b in ((k_before, case.k_pages), (v_before, case.v_pages))
    ]
    yield "pages_unchanged", float(not all(same)), 0
    yield "garbage_is_never_read", float(not torch.equal(got, _with_garbage(case, 1e30).run(gpu))), 0
    yield (
        "no_rows",
        float(gpu.segment_batch_attention(case.q[:0], case.k_pages, case.v_pages, case.plan, scale=1.0).numel()),
        0,
    )


def _with_garbage(case: AttentionCase, value: float) -> AttentionCase:
    fields = {"k_pages": case.k_pages.nan_to_num(value), "v_pages": case.v_pages.nan_to_num(value)}
    return AttentionCase(**{**{f: getattr(case, f) for f in case.__dataclass_fields__}, **fields})


def check_far_pages(device: str) -> Iterator[Check]:
    """K and V pages whose elements lie over 2**32 behind the pools' beginnings: no place is computed in 32 bits."""
    dtype, behind = torch.bfloat16, 2**32
    case = make_attention_case("far", rows=(1, 5), segments=(2, 3), dtype=dtype, garbage=0.0).to(device)
    shape, size = case.k_pages.shape, case.k_pages.numel()
    try:
        memory = _memory(2 * behind + 4 * size, device)
    except (OSError, RuntimeError) as error:
        print(f"far_pages is left out, memory is short: {error}", file=sys.stderr)
        return

    def pages(offset: int) -> Tensor:  # alone in its storage on the CPU: the interpreter copies whole storages
        if isinstance(memory, Tensor):
            return memory[offset : offset + size].view(shape)
        return torch.frombuffer(memory, dtype=dtype, count=size, offset=2 * offset).view(shape)

    near, far = ([pages(begin), pages(begin + size)] for begin in (0, behind))
    for pool, original in zip((*near, *far), (case.k_pages, case.v_pages) * 2, strict=True):
        pool.copy_(original if pool is far[0] or pool is far[1] else torch.zeros_like(original))
    num_pages = behind // case.k_pages[0].numel()
    moved = testing.replace(case.plan, page_table=case.plan.page_table + num_pages)
    for how in ("query", "key"):
        there = testing.replace(case, k_pages=near[0], v_pages=near[1])
        yield f"attention/{how}", *_attend(there, plan=moved, rotation=how)

    src, dst = torch.arange(8, device=device), torch.arange(20, 28, device=device)
    rotation = case.rotary.table(torch.arange(8) - 4).to(device)
    behind_slots = num_pages * shape[1]
    q, k, v = (_randn(seed, 8, 2, shape[3]).to(dtype).to(device) for seed in range(3))
    expected = [x.clone() for x in far]
    gpu.rope_and_write(q, k, v, *near, src + behind_slots, rotation, interleaved=False)
    gpu.rope_and_write(q, k, v, *expected, src, rotation, interleaved=False)
    gpu.repos_pages(*near, src + behind_slots, dst + behind_slots, rotation, interleaved=False)
    gpu.repos_pages(*expected, src, dst, rotation, interleaved=False)
    same = all(torch.equal(a, b) for a, b in zip(far, expected, strict=True))
    yield "rope_and_write_and_repos_pages", float(not same or any(bool(x.any()) for x in near)), 0


def _memory(num_bytes: int, device: str) -> Tensor | mmap.mmap:
    """As bfloat16 on a GPU; on the CPU as addresses, of which only what is touched becomes memory."""
    if device == "cpu":
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)


def check_splits(device: str) -> Iterator[Check]:
    """A row that sees nothing is zero; a batch of one long decode is split, its slices end inside segments."""
    case = make_attention_case("long", rows=(1,), segments=(7,), max_length=150, num_q_heads=8, num_kv_heads=1).to(
        device
    )
    yield "long_decode", *_attend(case)
    blind = case.plan.row_index.new_full((1,), -1)
    plan = testing.replace(case.plan, row_index=blind)
    yield "blind_row_is_zero", float(case.run(gpu, plan=plan).abs().max()), 0


def check_mutations(device: str) -> Iterator[Check]:
    """Wrong plans and wrong kernels against the same case and bound as the right ones: each has to miss it."""
    cases = {case.name: case.to(device) for case in testing.attention_cases()}
    case = cases[MUTATED]
    for name, plan in testing.mutations(case).items():
        error = relative_error(case.run(gpu, plan=plan), case.truth)
        yield f"plan/{name}", -error, -error_bound(case)
    for name, (old, new) in SOURCE_MUTATIONS.items():
        case = cases[MUTATED_ELSEWHERE.get(name, MUTATED)]
        with mutated_attention(old, new) as module:
            error = relative_error(case.run(module, out=torch.zeros_like(case.q)), case.truth)
            yield f"kernel/{name}", -error, -error_bound(case)


SOURCE_MUTATIONS = {  # name -> (text of attention.py, what a slip would make of it)
    "wrong_sign": (
        "q_second.to(tl.float32) * cos - q_first.to(tl.float32) * sin",
        "q_second.to(tl.float32) * cos + q_first.to(tl.float32) * sin",
    ),
    "rotation_of_another_segment": (
        "angles = seg_rotation + seg * ROTARY_DIM + i",
        "angles = seg_rotation + tl.maximum(seg - 1, 0) * ROTARY_DIM + i",
    ),
    "first_page_offset_ignored": (
        "first_slot = tl.load(seg_slot + seg)",
        "first_slot = tl.load(seg_slot + seg) // PAGE_SIZE * PAGE_SIZE",
    ),
    "one_delta_per_sequence": (
        "angles = seg_rotation + seg * ROTARY_DIM + i",
        "angles = seg_rotation + seg_begin * ROTARY_DIM + i",
    ),
    "other_pairing": ("turned = tl.permute(turned, (0, 2, 1))", "turned = turned"),
    "mask_by_slot": ("start + t[None, :] <= index[:, None]", "first_slot + t[None, :] <= index[:, None]"),
    "tail_not_masked": (
        "        stop = tl.minimum(end - passed, seen)",
        "        stop = tl.minimum(end - passed, seen) + 1",
    ),
    "segments_counted_within_a_block": ("        counted += tl.sum(seen)\n", "        counted += 0\n"),
    "sequences_of_the_first_block": ("range(0, num_seqs, SEGMENT_BLOCK)", "range(0, 1, SEGMENT_BLOCK)"),
}
MUTATED_ELSEWHERE = {
    "segments_counted_within_a_block": "over_64_segments",
    "sequences_of_the_first_block": "over_64_sequences",
}


class mutated_attention:
    """The attention module with one piece of its source replaced, as a context manager; its file goes when it does."""

    def __init__(self, old: str, new: str) -> None:
        source = Path(attention.__file__).read_text()
        assert source.count(old) == 1, f"{source.count(old)} times in attention.py: {old!r}"
        self.source = source.replace(old, new)

    def __enter__(self) -> ModuleType:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "mutated_attention.py"
        path.write_text(self.source)
        spec = importlib.util.spec_from_file_location("mutated_attention", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["mutated_attention"] = module
        spec.loader.exec_module(module)
        return module

    def __exit__(self, *exc: object) -> None:
        del sys.modules["mutated_attention"]
        self.folder.cleanup()


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _pages(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return tuple(_randn(seed + i, *shape).to(dtype).to(device) for i in range(2))


PAIRINGS = {"half": (64, 64, False), "partial": (80, 32, False), "interleaved": (96, 96, True), "both": (128, 64, True)}


def check_rope_and_write(device: str) -> Iterator[Check]:
    for dtype in FLOATS:
        for name, (head_dim, rotary_dim, interleaved) in PAIRINGS.items():
            rotary = testing.make_rotary(head_dim, rotary_dim=rotary_dim, interleaved=interleaved)
            tokens, heads, kv_heads = 11, 5, 2
            qkv = _randn(1, tokens, heads + 2 * kv_heads, head_dim).to(dtype).to(device)  # as one projection makes them
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
            positions = torch.tensor([0, 1, 7, 100, 4095, 70_000, 5, 6, 8, 9, 131_071])
            slots = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(2))[:tokens]
            slots[3] = slots[7] = -1
            rotation, slots = rotary.table(positions).to(device), slots.to(device)
            pages, expected = (_pages(3, (5, 16, kv_heads, head_dim), dtype, device) for _ in range(2))
            kwargs = {"interleaved": interleaved, "scale": 1.25}
            got = gpu.rope_and_write(q, k, v, *pages, slots, rotation, **kwargs)
            want = reference.rope_and_write(q, k, v, *expected, slots, rotation, **kwargs)
            exact = (1.25 * testing.rotate(q[..., :rotary_dim].double().cpu(), positions, rotary)).to(dtype).double()
            label = f"{name}/{short(dtype)}"
            bound = 2 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps / 2
            yield f"q/{label}", relative_error(got.cpu(), want.double().cpu()), bound
            yield f"q_truth/{label}", relative_error(got[..., :rotary_dim].cpu(), exact), bound
            yield f"k/{label}", relative_error(pages[0].cpu(), expected[0].double().cpu()), bound
            yield f"v/{label}", float(not torch.equal(pages[1], expected[1])), 0
            written = torch.zeros(80, dtype=torch.bool, device=device)
            written[slots[slots >= 0]] = True
            untouched = torch.equal(pages[0].flatten(0, 1)[~written], expected[0].flatten(0, 1)[~written])
            yield f"other_slots/{label}", float(not untouched), 0


def check_repos_pages(device: str) -> Iterator[Check]:
    for dtype in FLOATS:
        for name, (head_dim, rotary_dim, interleaved) in PAIRINGS.items():
            rotary = testing.make_rotary(head_dim, rotary_dim=rotary_dim, interleaved=interleaved)
            pages, expected = (_pages(5, (9, 16, 3, head_dim), dtype, device) for _ in range(2))
            order = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(6))
            src, dst = order[:37].to(device), order[40:77].to(device)
            deltas = torch.randint(-100_000, 100_000, (37,), generator=torch.Generator().manual_seed(7))
            rotation = rotary.table(deltas).to(device)
            gpu.repos_pages(*pages, src, dst, rotation, interleaved=interleaved)
            reference.repos_pages(*expected, src, dst, rotation, interleaved=interleaved)
            label = f"{name}/{short(dtype)}"
            bound = 2 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps / 2
            yield f"k/{label}", relative_error(pages[0].cpu(), expected[0].double().cpu()), bound
            yield f"v/{label}", float(not torch.equal(pages[1], expected[1])), 0
            keep = torch.ones(9 * 16, dtype=torch.bool, device=device)
            keep[dst] = False
            yield (
                f"other_slots/{label}",
                float(not torch.equal(*(x[0].flatten(0, 1)[keep] for x in (pages, expected)))),
                0,
            )


def check_neighbours(device: str) -> Iterator[Check]:
    for dtype in FLOATS:
        bound = torch.finfo(dtype).eps if dtype != torch.float32 else 4 * torch.finfo(dtype).eps
        for width in (64, 576, 1000):
            x, residual = (_randn(seed, 3, width).to(dtype).to(device) for seed in (1, 2))
            weight = (1 + 0.1 * _randn(3, width)).to(dtype).to(device)
            label = f"{width}/{short(dtype)}"
            want = reference.rms_norm(x, weight, 1e-5)
            yield f"rms_norm/{label}", relative_error(gpu.rms_norm(x, weight, 1e-5), want.double()), bound
            want, total = reference.rms_norm(x, weight, 1e-5, residual)
            got, got_total = gpu.rms_norm(x, weight, 1e-5, residual)
            yield f"rms_norm_residual/{label}", relative_error(got, want.double()), bound
            yield f"residual_sum/{label}", relative_error(got_total, total.double()), bound
            gate_up = (3 * _randn(4, 3, 2 * width)).to(dtype).to(device)
            want = reference.silu_mul(gate_up)
            yield f"silu_mul/{label}", relative_error(gpu.silu_mul(gate_up), want.double()), bound


def kept_tokens(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """float64 [vocab]: the distribution that `sample` has to draw from, by sorting."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    weight = ((logits.double() - logits.double().max()) / temperature).exp()
    if 0 < top_k < len(logits):
        weight = weight * (logits >= logits.topk(top_k).values[-1])
    if top_p < 1:
        order = logits.argsort(descending=True)
        before = weight[order].cumsum(0) - weight[order]
        weight = weight * (logits >= logits[order][before < top_p * weight.sum()][-1])
    weight = weight * (weight >= min_p)
    return weight / weight.sum()


SAMPLING = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.9, 40, 0.9, 0.02),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 100_000, 1.0, 0.0),
]


def check_sample(device: str) -> Iterator[Check]:
    for num_vocab, draws in ((97, 3), (5000, 1)):
        logits = (2.5 * _randn(8, len(SAMPLING), num_vocab)).float().round(decimals=4)
        logits[1, 5:9] = logits[1].max()  # ties
        logits[2:6, num_vocab // 2 :] = float("-inf")
        logits[7:, 11:] = float("-inf")
        uniform = torch.rand(draws, len(SAMPLING), generator=torch.Generator().manual_seed(9))
        columns = [torch.tensor(column) for column in zip(*SAMPLING, strict=True)]
        columns[1] = columns[1].int()
        wrong, filtered = 0, 0
        for u in uniform:
            ids = gpu.sample(logits.to(device), *(c.to(device) for c in columns), u.to(device)).cpu()
            for row, how in enumerate(SAMPLING):
                chances = kept_tokens(logits[row], *how)
                upto = chances.cumsum(0)
                token = int(ids[row])
                low, high = float(upto[token] - chances[token]), float(upto[token])
                wrong += not low - 1e-5 <= float(u[row]) * (how[0] > 0) <= high + 1e-5
                filtered += float(chances[token]) == 0
        yield f"draws_the_token_at_u/{num_vocab}", wrong, 0
        yield f"never_a_filtered_token/{num_vocab}", filtered, 0


def check_padding(device: str) -> Iterator[Check]:
    """The plan of a decode step with padding sequences behind it, as CUDA graphs have it, split over the context."""
    from akv_server.graphs import pad_rows
    from akv_server.model import StepInput

    for name, segments, how in (("several", (3, 1), "query"), ("one", (7,), "key")):
        case = make_attention_case(name, rows=(1,) * len(segments), segments=segments, num_q_heads=2)
        rows = torch.zeros(len(case.q), dtype=torch.int64)
        plan = pad_rows(StepInput(rows, rows, rows, case.plan, rows), 8).plan
        room = torch.zeros(40 * 8, dtype=torch.int32)  # entries that nobody's table reaches
        plan = testing.replace(plan, page_table=torch.cat((plan.page_table, room))).to(device)
        case, q = case.to(device), torch.cat((case.q, _randn(1, 8 - len(rows), *case.q.shape[1:]).float())).to(device)
        mass = torch.zeros(len(plan.page_table), device=device)
        got = gpu.segment_batch_attention(
            q, case.k_pages, case.v_pages, plan, scale=case.scale, page_mass=mass, rotation=how
        )
        yield f"{name}/rows", relative_error(got[: len(rows)], case.truth), error_bound(case)
        yield f"{name}/nothing_seen", float(got[len(rows) :].abs().max()), 0
        yield f"{name}/mass", relative_error(mass[: len(case.mass)], case.mass), error_bound(case)
        yield f"{name}/mass_of_nobody", float(mass[len(case.mass) :].abs().max()), 0


def check_engine(device: str) -> Iterator[Check]:
    """The engine on these kernels: prefill, drops, decode in company (as CUDA graphs on a GPU), sampling by the kernel.

    float32 is held to the dense float64 truth as tests/test_engine.py does; bfloat16 to four times the error of the
    same model over the reference kernels, which round only their results.
    """
    from akv_server import files, loader
    from akv_server.engine import Engine, EngineConfig
    from akv_server.graphs import DecodeGraphs
    from akv_server.model import StepInput
    from akv_server.sampler import SamplingParams
    from tests.clients import Client, drop, some_tokens
    from tests.clients import run as run_engine
    from tests.models import tiny_model
    from tests.truth import Truth

    def tried(path: Path, backend: ModuleType, on: str, dtype: str) -> tuple[list[Client], list[float]]:
        model = loader.load_model(files.resolve(str(path)), weights_as=dtype, device=on, backend=backend)
        engine = Engine(model, EngineConfig(num_pages=24, max_running=4))
        graphs, gaps = engine.graphs, []
        if graphs is None:  # no GPU: a "graph" is the function once more
            graphs = DecodeGraphs(model, engine.kv.k_pages, engine.kv.v_pages, lambda run: run, max_rows=4)

        def compared(step: StepInput) -> Tensor:
            before = graphs.num_replayed
            logits = graphs.forward(step).clone()
            if step.plan.max_rows == 1 and len(step.logit_rows):
                gaps.append(relative_error(logits, engine.run_eagerly(step).double()))
                if graphs.num_replayed == before:  # not captured
                    gaps.append(float("inf"))
            return logits

        engine.forward = compared
        tokens, clients = some_tokens(30, seed=2), []
        run_engine(engine, Client(tokens[:22]))
        for number, history in enumerate([(drop(5, 19, 22),), (), (drop(2, 9, 22), drop(12, 20, 27))]):
            hot = SamplingParams(temperature=0.8 * number, top_p=0.9, seed=number)
            clients.append(Client(tokens[: 30 - number], history, max_tokens=2 + number, sampling=hot))
        run_engine(engine, *clients)
        return clients, gaps

    def error(clients: list[Client], truth: Truth) -> float:
        """Of the log-probabilities of the generated tokens, on average."""
        gaps = []
        for client in clients:
            logprobs = truth.logits(client.tokens + client.ids, client.history).log_softmax(-1)
            for i, token in enumerate(client.generated):
                right = logprobs[len(client.tokens) + i - 1, token.token_id]
                gaps.append(abs(float(right) - (token.logprob or 0.0)))
        return sum(gaps) / len(gaps)

    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(Path(folder), "llama")
        truth = Truth(path)
        for dtype in ("float32", "bfloat16"):
            clients, gaps = tried(path, gpu, device, dtype)
            bound = 2e-4
            if dtype == "bfloat16":
                bound = 4 * error(tried(path, reference, "cpu", dtype)[0], truth)
            yield f"logprobs/{dtype}", error(clients, truth), bound
            yield f"all_tokens_came/{dtype}", float([len(c.ids) for c in clients] != [2, 3, 4]), 0
            yield f"graph_against_eager/{dtype}", max(gaps), 1e-4 if dtype == "float32" else 0.03


CHECKS: dict[str, Callable[[str], Iterator[Check]]] = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if name.startswith("check_")
}


def run(device: str, names: list[str] | None = None) -> Iterator[dict[str, object]]:
    """Run the named groups of checks (all by default) on `device`; one record each."""
    for group in names or CHECKS:
        begin = time.perf_counter()
        for name, measured, bound in CHECKS[group](device):
            now = time.perf_counter()
            passed = measured <= bound
            yield {
                "group": group,
                "name": name,
                "measured": measured,
                "bound": bound,
                "passed": passed,
                "s": now - begin,
            }
            begin = now


if __name__ == "__main__":
    torch.set_num_threads(1)
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    for record in run(device, sys.argv[1:]):
        print(json.dumps(record), flush=True)
