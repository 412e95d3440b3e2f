"""The compiled CPU kernels: the truth within twice torch's error, and every row bitwise independent of its company.

The same source is compiled for narrower machines too, so that the paths for AVX2 and for plain C are run here as well.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from akv_kernels import cpu, reference, select, testing
from akv_kernels.plan import SequencePlan, build_plan
from torch import Tensor

_others = ["x86-64"] if platform.machine() == "x86_64" else []
_others += ["haswell"] if "avx2" in cpu._cpu_name() else []


@pytest.fixture(params=[("native", 1), ("native", 3), *((march, 2) for march in _others)], ids=str)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The kernels compiled for one kind of machine, and a number of threads."""
    march, threads = request.param
    compiled, before = cpu.library(march), torch.get_num_threads()
    monkeypatch.setattr(cpu, "library", lambda: compiled)
    torch.set_num_threads(threads)
    yield march, threads
    torch.set_num_threads(before)


CASES = {case.name: case for case in testing.attention_cases(torch.float32)}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_within_twice_torchs_error(name: str, build: tuple[str, int]) -> None:
    case = CASES[name]
    mass = torch.zeros(len(case.mass))
    case.run(cpu, page_mass=mass)
    got = case.run(cpu, page_mass=mass)  # added to
    assert testing.relative_error(got, case.truth) <= testing.error_bound(case)
    assert testing.relative_error(mass / 2, case.mass) < 2e-6


HALF_CASES = {
    f"{shape}_{str(kv_dtype)[6:]}": testing.make_attention_case(shape, kv_dtype=kv_dtype, **arguments)
    for kv_dtype in (torch.float16, torch.bfloat16)
    for shape, arguments in {
        "prefill": {"rows": (33, 1), "segments": (5, 2)},
        "head_dim_80": {"head_dim": 80},
        "interleaved": {"interleaved": True},
    }.items()
}


@pytest.mark.parametrize("name", HALF_CASES)
def test_attention_reads_half_pages_exactly(name: str, build: tuple[str, int]) -> None:
    case = HALF_CASES[name]
    assert testing.relative_error(case.run(cpu), case.truth) <= testing.error_bound(case)


def test_attention_in_bfloat16_is_within_twice_torchs_error() -> None:
    case = testing.make_attention_case("bfloat16", dtype=torch.bfloat16)
    got = case.run(cpu)
    assert got.dtype == torch.bfloat16
    assert testing.relative_error(got, case.truth) <= testing.error_bound(case)


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_classic_mistake_misses_the_truth(interleaved: bool) -> None:
    case = testing.make_attention_case("mutants", seed=3, interleaved=interleaved)
    errors = {name: testing.relative_error(case.run(cpu, m), case.truth) for name, m in testing.mutations(case).items()}
    assert len(errors) == 6
    assert all(error > 0.01 for error in errors.values()), errors


def test_attention_writes_its_output_and_nothing_else() -> None:
    case = CASES["mixed"]
    before = [x.clone() for x in (case.q, case.k_pages, case.v_pages)]
    out = torch.full_like(case.q, float("nan"))
    assert case.run(cpu, out=out) is out
    assert torch.equal(out, case.run(cpu))
    for now, then in zip((case.q, case.k_pages, case.v_pages), before, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))


def test_attention_takes_queries_that_are_a_view_and_no_rows_at_all() -> None:
    case = CASES["mixed"]
    wide = torch.cat((case.q, case.q), dim=1)
    assert torch.equal(replace(case, q=wide[:, : case.q.shape[1]]).run(cpu), case.run(cpu))
    empty = build_plan([], case.rotary, case.plan.page_size)
    assert replace(case, q=case.q[:0]).run(cpu, empty).shape == (0, *case.q.shape[1:])


def test_attention_of_a_row_that_sees_nothing_is_zero() -> None:
    case = testing.make_attention_case("blind", rows=(2,), segments=(2,), garbage=0.5)
    blind = build_plan([SequencePlan([0, 10], [0], [(0, 4, 5, 3)])], case.rotary, page_size=16)
    out = case.run(cpu, blind)
    assert bool((out[0] == 0).all())
    assert testing.relative_error(out, case.run(reference, blind).double()) < 1e-6


def test_attention_refuses_float8_pages() -> None:
    case = testing.make_attention_case("float8", kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8"):
        case.run(cpu)
    with pytest.raises(ValueError, match="float8"):
        replace(case, k_scale=None).run(cpu)


class Stream:
    """One sequence of 1,300 visible tokens in four segments, all in the pages; any rows of it can be asked for."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(5)
        self.rotary = testing.make_rotary(32)
        self.q = torch.randn(1300, 9, 32, generator=gen)
        self.k_pages, self.v_pages = torch.randn(2, 90, 16, 3, 32, generator=gen)
        self.pages = torch.randperm(90, generator=gen).tolist()
        self.segments = [(5, 700, 0, 0), (705, 3, 800, -90), (720, 97, 803, 40), (817, 500, 1000, -123)]
        self.indexes = [start + t for _, length, start, _ in self.segments for t in range(length)]

    def sequence(self, begin: int, end: int, *, cuts: int = 0) -> SequencePlan:
        """The plan for visible tokens [begin, end), knowing of no later token; segments cut at every `cuts` tokens."""
        segments, left = [], end
        for slot, length, start, delta in self.segments:
            length = min(length, left)
            left -= length
            step = cuts or length
            segments += [(slot + t, min(step, length - t), start + t, delta) for t in range(0, length, step or 1)]
        return SequencePlan(self.indexes[begin:end], self.pages, segments)

    def attend(self, *sequences: SequencePlan, rows: Tensor) -> Tensor:
        plan = build_plan(sequences, self.rotary, 16)
        return cpu.segment_batch_attention(self.q[rows], self.k_pages, self.v_pages, plan, scale=32**-0.5)


def test_a_row_is_bitwise_the_same_however_it_is_computed(build: tuple[str, int]) -> None:
    stream = Stream()
    everything = torch.arange(1300)
    torch.set_num_threads(1)
    want = stream.attend(stream.sequence(0, 1300), rows=everything)
    torch.set_num_threads(build[1])
    assert torch.equal(stream.attend(stream.sequence(0, 1300), rows=everything), want)
    assert torch.equal(stream.attend(stream.sequence(0, 1300, cuts=37), rows=everything), want)
    chunks = [
        stream.attend(stream.sequence(t, min(t + 211, 1300)), rows=everything[t : t + 211]) for t in range(0, 1300, 211)
    ]
    assert torch.equal(torch.cat(chunks), want)
    for t in (0, 1, 63, 64, 511, 512, 699, 700, 702, 703, 1299):
        assert torch.equal(stream.attend(stream.sequence(t, t + 1), rows=everything[t : t + 1]), want[t : t + 1])
    company = stream.attend(
        stream.sequence(40, 41),
        stream.sequence(600, 623),
        stream.sequence(1299, 1300),
        rows=torch.cat((everything[40:41], everything[600:623], everything[1299:])),
    )
    assert torch.equal(company, torch.cat((want[40:41], want[600:623], want[1299:])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rotary_dim", "interleaved"), [(40, False), (40, True), (16, False)])
def test_rope_and_write(dtype: torch.dtype, rotary_dim: int, interleaved: bool, build: tuple[str, int]) -> None:
    gen = torch.Generator().manual_seed(2)
    num_tokens = 97
    qkv = torch.randn(num_tokens, 10 * 40, generator=gen)
    q, k, v = (part.unflatten(1, (-1, 40)) for part in qkv.split([240, 80, 80], dim=1))
    rotary = testing.make_rotary(40, rotary_dim=rotary_dim, interleaved=interleaved)
    table = rotary.table(torch.randint(0, 5000, (num_tokens,), generator=gen))
    slots = torch.randperm(160, generator=gen)[:num_tokens]
    slots[::7] = -1
    pages = [torch.full((10, 16, 2, 40), 7.0).to(dtype) for _ in range(4)]
    want = reference.rope_and_write(q, k, v, pages[0], pages[1], slots, table, interleaved=interleaved, scale=1.25)
    given = k.clone()
    got = cpu.rope_and_write(q, k, v, pages[2], pages[3], slots, table, interleaved=interleaved, scale=1.25)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    spacing = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(pages[2].float(), pages[0].float(), rtol=spacing, atol=1e-6)
    assert torch.equal(pages[3], pages[1])
    assert torch.equal(k, given)
    written = torch.zeros(160, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    assert bool((pages[2].flatten(0, 1)[~written] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_repos_pages_moves_values_exactly_and_turns_keys(dtype: torch.dtype, build: tuple[str, int]) -> None:
    gen = torch.Generator().manual_seed(3)
    rotary = testing.make_rotary(80, rotary_dim=32)
    k_pages, v_pages = torch.randn(2, 40, 16, 3, 80, generator=gen).to(dtype)
    v_pages[3, 2, 1] = float("nan")
    places = torch.randperm(640, generator=gen)
    src, dst = places[:300], places[300:600]
    delta = torch.randint(-2000, 2000, (300,), generator=gen)
    delta[::3] = 0
    want_k, want_v = k_pages.clone(), v_pages.clone()
    reference.repos_pages(want_k, want_v, src, dst, rotary.table(delta), interleaved=False)
    cpu.repos_pages(k_pages, v_pages, src, dst, rotary.table(delta), interleaved=False)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(v_pages.view(bits), want_v.view(bits))
    still = dst[::3]
    assert torch.equal(k_pages.flatten(0, 1)[still], k_pages.flatten(0, 1)[src[::3]])
    spacing = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(k_pages.float(), want_k.float(), rtol=spacing, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 576), (3, 5, 67), (200, 576), (0, 64)])
def test_rms_norm(shape: tuple[int, ...], build: tuple[str, int]) -> None:
    gen = torch.Generator().manual_seed(4)
    x, residual = torch.randn(2, *shape, generator=gen) * 3
    weight = torch.randn(shape[-1], generator=gen)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=1e-6, atol=1e-6)
    normed, total = cpu.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, reference.rms_norm(total, weight, 1e-5), rtol=1e-6, atol=1e-6)
    if len(x) > 1:
        assert torch.equal(cpu.rms_norm(x[1:2], weight, 1e-5), cpu.rms_norm(x, weight, 1e-5)[1:2])


@pytest.mark.parametrize("shape", [(1, 3072), (7, 38), (90, 3072)])
def test_silu_mul(shape: tuple[int, int], build: tuple[str, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 20
    x[0, :6] = torch.tensor([0.0, -1e4, 1e4, -88.0, 88.0, 1e-30])
    # The exponent's rounding weighs up to |x| log2(e) half ulps, for |x| <= 88 where the result has all but vanished.
    torch.testing.assert_close(cpu.silu_mul(x), reference.silu_mul(x), rtol=8e-6, atol=1e-30)
    moderate = x.clamp(-4, 4)
    torch.testing.assert_close(cpu.silu_mul(moderate), reference.silu_mul(moderate), rtol=1e-6, atol=1e-30)
    assert torch.equal(cpu.silu_mul(x[-1:]), cpu.silu_mul(x)[-1:])


def test_select_gives_this_backend_for_the_cpu() -> None:
    assert select("cpu") is cpu


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="need a C compiler: install gcc"):
        cpu.library.__wrapped__()


def test_two_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes its time and hands out the library that the real one made."""
    made = cpu.library()._name
    compiler = tmp_path / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text(
        "#!/bin/sh\necho run >> $RUNS\nwhile [ $1 != -o ]; do shift; done\n"
        f'head -c 1000 "{made}" > $2\nsleep 0.5\ncat "{made}" > $2\n'
    )
    compiler.chmod(0o755)
    runs = tmp_path / "runs"
    (tmp_path / "akv").mkdir()
    for name, age_days in (("kernels-0.so", 70), ("kernels-1.so", 50), ("model.gguf", 70)):
        (tmp_path / "akv" / name).touch()
        os.utime(tmp_path / "akv" / name, (then := time.time() - age_days * 24 * 3600, then))
    monkeypatch.setenv("RUNS", str(runs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: cpu.library.__wrapped__().akv_has_float16(), range(4)))
    assert loaded == [cpu.library().akv_has_float16()] * 4
    assert runs.read_text().count("run") > 1  # they did meet
    kept = {file.name for file in (tmp_path / "akv").iterdir()}
    assert kept == {Path(made).name, "kernels-1.so", "model.gguf"}, "only what nobody used for long is gone"
