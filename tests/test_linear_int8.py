"""Int8Linear: exact integers, a small and measured error, and rows that do not know of each other."""

from __future__ import annotations

import platform

import pytest
import torch
from akv_kernels import cpu, testing

_is_avx2 = "avx2" in cpu._cpu_name()
MARCHES = ["native", *(["x86-64"] if platform.machine() == "x86_64" else []), *(["haswell"] if _is_avx2 else [])]


@pytest.fixture(params=MARCHES)
def march(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    compiled = cpu.library(request.param)
    monkeypatch.setattr(cpu, "library", lambda: compiled)
    return str(request.param)


def quantised(x: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs] as the kernel sees it: 64 inputs of a row share a step of largest / 127. float64."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 64)).unflatten(1, (-1, 64))
    largest = padded.abs().amax(dim=-1, keepdim=True)
    steps = (padded * torch.where(largest > 0, 127 / largest, 0)).round()
    return (steps.double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(1, 576, 576), (5, 100, 70), (130, 199, 576), (33, 16, 1)]
)
def test_the_product_of_the_quantised_values_is_exact_up_to_float32_sums(
    num_rows: int, num_outputs: int, num_inputs: int, march: str
) -> None:
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(num_rows, num_inputs, generator=gen), torch.randn(num_outputs, num_inputs, generator=gen)
    linear = cpu.Int8Linear(weight)
    want = quantised(x) @ linear.dequantised().double().T
    assert testing.relative_error(linear(x), want) < 3e-7


def test_error_against_float32() -> None:
    gen = torch.Generator().manual_seed(1)
    x, weight = torch.randn(64, 1536, generator=gen), torch.randn(300, 1536, generator=gen)
    x[:, 5] *= 30  # the outlier channel of a real model spoils its own group alone
    linear = cpu.Int8Linear(weight)
    want = x.double() @ weight.double().T
    step = (weight.abs().unflatten(1, (-1, 64)).amax(dim=-1, keepdim=True) / 127 * 1.01).expand(-1, -1, 64).flatten(1)
    assert bool(((linear.dequantised() - weight).abs() <= step / 2 * 1.01).all())
    assert testing.relative_error(linear(x), want) < 0.015  # measured: 0.0134, and 0.0085 without the outliers


def test_a_row_is_bitwise_the_same_in_any_company(march: str) -> None:
    gen = torch.Generator().manual_seed(2)
    x = torch.randn(230, 600, generator=gen)
    linear = cpu.Int8Linear(torch.randn(333, 600, generator=gen))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = linear(x)
        torch.set_num_threads(3)
        assert torch.equal(linear(x), want)
        for begin, end in ((0, 1), (7, 9), (100, 116), (0, 97), (229, 230)):
            assert torch.equal(linear(x[begin:end]), want[begin:end])
        company = x.clone()
        company[:100] *= 1e6
        assert torch.equal(linear(company)[100:], want[100:])
    finally:
        torch.set_num_threads(before)


def test_all_instruction_sets_agree_on_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    gen = torch.Generator().manual_seed(3)
    x, linear = torch.randn(40, 256, generator=gen), cpu.Int8Linear(torch.randn(64, 256, generator=gen))
    answers = []
    for march in MARCHES:
        compiled = cpu.library(march)
        monkeypatch.setattr(cpu, "library", lambda compiled=compiled: compiled)
        answers.append(linear(x))
        monkeypatch.undo()
    for other in answers[1:]:
        torch.testing.assert_close(other, answers[0], rtol=1e-6, atol=1e-5)


def test_zero_rows_zero_weights_views_and_nan() -> None:
    linear = cpu.Int8Linear(torch.zeros(20, 64))
    assert torch.equal(linear(torch.randn(3, 64)), torch.zeros(3, 20))
    linear = cpu.Int8Linear(torch.randn(20, 64))
    assert torch.equal(linear(torch.zeros(2, 64)), torch.zeros(2, 20))
    assert linear(torch.zeros(0, 64)).shape == (0, 20)
    wide = torch.randn(4, 128)
    assert torch.equal(linear(wide[:, 64:]), linear(wide[:, 64:].contiguous()))
    wide[1, 3] = float("nan")
    got = linear(wide[:, :64])
    assert bool(got[1].isnan().all())
    assert not bool(got[[0, 2, 3]].isnan().any())
