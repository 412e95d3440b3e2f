"""Sampling: filters against transformers' own, frequencies against the softmax, and rows that do not see each other."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from akv_server.sampler import SamplingParams, logprobs, sample

GREEDY = SamplingParams(temperature=0)


def draws(logits: torch.Tensor, how: SamplingParams, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(sample(logits[None], [how], [generator])) for _ in range(count)]


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -3.0, -2.0, 0.0]])
    assert sample(logits, [GREEDY] * 3, [None] * 3).tolist() == [1, 0, 3]
    wide = torch.zeros(2, 49152)
    wide[0, [40000, 12345]] = 5.0
    assert sample(wide, [GREEDY] * 2, [None] * 2).tolist() == [12345, 0]


@pytest.mark.parametrize(
    "how",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.7, min_p=0.15),
    ],
)
def test_frequencies_follow_the_filtered_distribution(how):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    scores = TemperatureLogitsWarper(how.temperature)(None, logits[None].double())
    if how.top_k:
        scores = TopKLogitsWarper(how.top_k)(None, scores)
    if how.top_p < 1:
        scores = TopPLogitsWarper(how.top_p)(None, scores)
    if how.min_p:
        scores = MinPLogitsWarper(how.min_p)(None, scores)
    want = scores[0].softmax(-1)
    count = 4000
    got = torch.tensor(draws(logits, how, count)).bincount(minlength=40) / count
    assert not got[want == 0].any(), "a token that the filters removed was drawn"
    assert (got - want).abs().max() < 4 * (0.25 / count) ** 0.5  # four standard deviations of a frequency


def test_top_p_of_a_flat_distribution_needs_the_whole_vocabulary():
    logits = torch.zeros(5000)
    logits[4321] = 1.0
    picked = draws(logits, SamplingParams(top_p=0.5), 400)
    assert len(set(picked)) > 300
    assert max(picked) <= 4321  # the likelier one, then the lowest ids of equals up to half the mass
    assert sum(token != 4321 and token > 2500 for token in picked) == 0


def test_a_row_never_depends_on_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 300, generator=generator)
    params = [SamplingParams(temperature=0.5 + 0.1 * row, top_p=0.9, seed=row) for row in range(6)] + [GREEDY]
    together = sample(logits, params, [how.generator() for how in params]).tolist()
    for order in ([3], [6, 1, 0], [5, 4, 3, 2, 1, 0, 6]):
        rows = [params[row] for row in order]
        assert sample(logits[order], rows, [how.generator() for how in rows]).tolist() == [together[i] for i in order]


def test_a_seed_repeats_and_seeds_differ():
    def run(seed: int) -> list[int]:
        how = SamplingParams(seed=seed)
        generator = how.generator()
        return [int(sample(torch.zeros(1, 1000), [how], [generator])) for _ in range(8)]

    assert run(11) == run(11)
    assert run(11) != run(12)
    assert run(-1) == run(-1)
    assert SamplingParams().generator().initial_seed() != SamplingParams().generator().initial_seed()


def test_extreme_values_leave_one_token_or_all():
    logits = torch.tensor([1.0, 80.0, -1e4, 79.0])
    assert draws(logits, SamplingParams(top_p=0.0), 3) == [1, 1, 1]
    assert draws(logits, SamplingParams(temperature=9.0, top_k=1), 3) == [1, 1, 1]
    assert draws(logits, SamplingParams(temperature=9.0, min_p=1.0), 3) == [1, 1, 1]
    assert draws(logits, SamplingParams(temperature=1e-300), 3) == [1, 1, 1]
    assert set(draws(logits, SamplingParams(temperature=1e9), 200)) == {0, 1, 2, 3}


def test_logprobs_equal_log_softmax_and_leave_logits_alone():
    logits = torch.randn(150, 500, generator=torch.Generator().manual_seed(1)) * 5
    before, ids = logits.clone(), torch.arange(150)
    chosen, top_ids, top = logprobs(logits, ids, 4)
    want = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), want[ids, ids], atol=1e-5, rtol=0)
    torch.testing.assert_close(top.double(), want.topk(4).values, atol=1e-5, rtol=0)
    assert torch.equal(top_ids, want.topk(4).indices)
    assert torch.equal(logits, before)
    assert logprobs(logits, ids, 0)[1].shape == (150, 0)
    assert logprobs(logits[:0], ids[:0], 2)[2].shape == (0, 2)
