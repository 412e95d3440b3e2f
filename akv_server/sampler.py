"""From logits to token ids and log-probabilities. Owns the order in which the filters apply. Each row is drawn alone
with its own generator, on the host whatever the device: what it draws never depends on which other rows share the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NUM_CANDIDATES = 512  # of top-p before the whole vocabulary is sorted
_ROWS_AT_ONCE = 64  # of log-probabilities, so that scoring a long prompt needs no second copy of its logits
_LARGEST_DRAW = 1 - 2**-24  # in float32, in which a draw nearer to 1 would be 1
_LEAST_TEMPERATURE = 1e-30  # that is not greedy, in float32

Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`akv_kernels.gpu.sample`: logits, temperature, top_k, top_p, min_p and uniform draws, a row each -> token ids."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks tokens. Filters apply in the order temperature, top_k, top_p, min_p, as in transformers.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `min_p` is relative to the likeliest token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        assert self.temperature >= 0, "temperature"
        assert 0 <= self.top_p <= 1, "top_p"
        assert self.top_k >= 0, "top_k"
        assert 0 <= self.min_p <= 1, "min_p"

    def generator(self) -> torch.Generator:
        """A fresh generator on the CPU: from `seed` if there is one, else from chance."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed % 2**63)
        return generator


def sample(
    logits: Tensor,  # float32 [R, vocab]
    params: Sequence[SamplingParams],  # R of them
    generators: Sequence[
        torch.Generator | None
    ],  # R, on the CPU; each row that is not greedy draws one number from its own
    draw: Draw | None = None,  # the kernel that picks all rows at once, where the device has one
) -> Tensor:  # int64 [R], on the CPU
    """One token per row. Greedy rows take the largest logit, the lowest id among equals. Leaves `logits` alone."""
    assert logits.shape[0] == len(params) == len(generators)
    if draw is not None:
        return _draw_all(logits, params, generators, draw)
    picked = logits.argmax(dim=-1).cpu()
    for row, (how, generator) in enumerate(zip(params, generators, strict=True)):
        if how.temperature > 0:
            u = torch.rand((), dtype=torch.float64, generator=generator)
            picked[row] = _draw(logits[row], how, u.item())
    return picked


def _draw_all(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None], draw: Draw
) -> Tensor:
    """The same by one launch and two transfers: the rows' parameters there, their ids back. `draw` takes the tokens in
    order of their ids, so that a seed repeats, but does not give what it gives on a CPU where top_k or top_p sort."""
    rows = []
    for how, generator in zip(params, generators, strict=True):
        if how.temperature > 0:
            u = torch.rand((), dtype=torch.float64, generator=generator).item()
            temperature = max(how.temperature, _LEAST_TEMPERATURE)
            rows.append((min(u, _LARGEST_DRAW), temperature, min(how.top_k, logits.shape[1]), how.top_p, how.min_p))
        else:
            rows.append((0.0, 0.0, 0, 1.0, 0.0))  # of equals, the draw 0 is the first
    rows += rows[-1:] * (-len(rows) % 4)  # so that every column begins where a kernel likes it: at 16 bytes
    columns = torch.tensor(rows, dtype=torch.float32).view(-1, 5).t().contiguous()
    columns = columns.to(logits.device, non_blocking=True)[:, : len(params)]
    uniform, temperature, top_k, top_p, min_p = columns
    return draw(logits, temperature, top_k.int(), top_p, min_p, uniform).cpu()


def _draw(
    logits: Tensor,  # float32 [vocab]
    how: SamplingParams,
    u: float,  # in [0, 1)
) -> int:
    """The token whose stretch of the filtered cumulative distribution holds `u`."""
    scaled = logits.double()
    probs = ((scaled - scaled.max()) / how.temperature).softmax(dim=-1)
    ids = None
    if how.top_k or how.top_p < 1:
        num_vocab = probs.shape[0]
        top, ids = probs.topk(min(how.top_k or _NUM_CANDIDATES, num_vocab))
        if not how.top_k and top.sum() < how.top_p:
            top, ids = probs.sort(descending=True, stable=True)
        if how.top_p < 1:
            before = top.cumsum(dim=0) - top  # a token stays if the likelier ones fall short of top_p
            mass = how.top_p * (float(top.sum()) if how.top_k else 1.0)
            top = top[before < max(mass, 5e-324)]  # the likeliest one always stays
        probs = top
    if how.min_p > 0:
        probs = probs.where(probs >= how.min_p * probs.max(), 0)
    cumulative = probs.cumsum(dim=0)
    place = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True).clamp(max=cumulative.shape[0] - 1))
    return place if ids is None else int(ids[place])


def logprobs(
    logits: Tensor,  # float32 [R, vocab]
    token_ids: Tensor,  # int64 [R]
    num_top: int,
) -> tuple[Tensor, Tensor, Tensor]:  # float32 [R], int64 [R, num_top], float32 [R, num_top], on the CPU
    """The log-probability of each row's token, and the ids and log-probabilities of its likeliest, best first.

    Of the model's own distribution, before temperature and filters. Leaves `logits` alone.
    """
    chosen, top_ids, top = [], [], []
    for begin in range(0, max(1, len(logits)), _ROWS_AT_ONCE):
        part = logits[begin : begin + _ROWS_AT_ONCE]
        ids = token_ids[begin : begin + _ROWS_AT_ONCE].to(logits.device)
        norm = part.logsumexp(dim=-1, keepdim=True)
        best, best_ids = part.topk(min(num_top, part.shape[1]), dim=-1)
        chosen.append((part.gather(1, ids[:, None]) - norm)[:, 0])
        top_ids.append(best_ids)
        top.append(best - norm)
    return torch.cat(chosen).cpu(), torch.cat(top_ids).cpu(), torch.cat(top).cpu()
