"""The reference kernels against a dense float64 truth that shares no code with them, and what that truth must catch."""

from __future__ import annotations

import pytest
import torch
from akv_kernels import reference, select, testing
from akv_kernels.plan import Rotary, SequencePlan, build_plan

CASES = {case.name: case for case in testing.attention_cases(torch.float64)}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_dense_truth(name: str) -> None:
    case = CASES[name]
    mass = torch.zeros(len(case.mass))
    got = case.run(reference, page_mass=mass)
    # The only float32 in the reference is the table of cosines and sines, half an ulp (3e-8) off in each entry.
    assert testing.relative_error(got, case.truth) < 2e-7
    assert testing.relative_error(mass, case.mass) < 1e-6


def test_attention_reads_float8_pages_by_their_scales() -> None:
    case = testing.make_attention_case("float8", dtype=torch.float32, kv_dtype=torch.float8_e4m3fn)
    assert testing.relative_error(case.run(reference), case.truth) < 2e-7
    unscaled = reference.segment_batch_attention(case.q, case.k_pages, case.v_pages, case.plan, scale=case.scale)
    assert testing.relative_error(unscaled, case.truth) > 0.1


@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_classic_mistake_misses_the_truth(interleaved: bool, garbage: float) -> None:
    case = testing.make_attention_case("mutants", seed=3, interleaved=interleaved, garbage=garbage)
    bound = testing.error_bound(case)
    assert testing.relative_error(case.run(reference), case.truth) < bound
    plans = testing.mutations(case)
    errors = {name: testing.relative_error(case.run(reference, plan), case.truth) for name, plan in plans.items()}
    assert len(errors) == 6
    assert all(error > 0.01 for error in errors.values()), errors


def test_a_row_that_sees_nothing_is_zero_and_out_is_written_in_place() -> None:
    case = testing.make_attention_case("blind", rows=(2,), segments=(2,))
    blind = build_plan(
        [SequencePlan([0, 10], [0], [(0, 4, 5, 3)])], case.rotary, page_size=16
    )  # row 0 comes before the only segment
    out = torch.full_like(case.q, float("nan"))
    got = case.run(reference, blind, out=out)
    assert got is out
    assert bool((out[0] == 0).all())


def test_the_table_takes_its_angles_in_float64() -> None:
    rotary = Rotary(inv_freq=torch.tensor([1.0, 0.1234567891], dtype=torch.float64))
    table = rotary.table(torch.tensor([0, 131_071, -131_071], dtype=torch.int32))
    angle = 131_071 * rotary.inv_freq
    assert table.dtype == torch.float32
    assert table.shape == (3, 2, 2)
    torch.testing.assert_close(table[1].double(), torch.stack((angle.cos(), angle.sin())), rtol=0, atol=6e-8)
    torch.testing.assert_close(table[2], table[1] * torch.tensor([[1.0], [-1.0]]), rtol=0, atol=0)


@pytest.mark.parametrize("rotary", [testing.make_rotary(16), testing.make_rotary(16, rotary_dim=8, interleaved=True)])
def test_rope_and_write_then_repos_equals_rope_at_the_new_position(rotary: Rotary) -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, 16, dtype=torch.float64, generator=gen) for heads in (4, 2, 2))
    k_pages, v_pages = torch.full((2, 5, 4, 2, 16), float("nan"), dtype=torch.float64)
    positions = torch.tensor([7, 8, 100, 3])
    slots = torch.tensor([13, 4, -1, 19])
    table = rotary.table(positions)
    half = 2 * len(rotary.inv_freq)
    turned = reference.rope_and_write(
        q, k, v, k_pages, v_pages, slots, table, interleaved=rotary.interleaved, scale=1.5
    )
    magnitude = torch.cat((torch.full((half,), 1.5), torch.ones(16 - half))).double()
    torch.testing.assert_close(turned, testing.rotate(q, positions, rotary) * magnitude, rtol=0, atol=1e-6)
    written = slots >= 0
    keys, values = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    torch.testing.assert_close(
        keys[slots[written]], (testing.rotate(k, positions, rotary) * magnitude)[written], rtol=0, atol=1e-6
    )
    assert torch.equal(values[slots[written]], v[written])
    assert int(keys.isnan().any(dim=-1).any(dim=-1).sum()) == 20 - 3

    delta = torch.tensor([-5, 12, 1000])
    moved = torch.tensor([0, 1, 18])
    reference.repos_pages(k_pages, v_pages, slots[written], moved, rotary.table(delta), interleaved=rotary.interleaved)
    at_new = testing.rotate(k[written], positions[written] + delta, rotary) * magnitude
    torch.testing.assert_close(keys[moved], at_new, rtol=0, atol=2e-6)
    assert torch.equal(values[moved], v[written])


def test_rms_norm_and_silu_mul_equal_torch() -> None:
    gen = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 5, 3, 24, dtype=torch.float64, generator=gen)
    weight = torch.randn(24, dtype=torch.float64, generator=gen)
    normed, total = reference.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x + residual, (24,), weight, 1e-5))
    torch.testing.assert_close(
        reference.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (24,), weight, 1e-5)
    )
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(reference.silu_mul(x), gate * gate.sigmoid() * up)


def test_select_refuses_a_device_without_kernels() -> None:
    with pytest.raises(ValueError, match="mps"):
        select("mps")
