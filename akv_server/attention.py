"""How much attention the tokens of a stream get while its answer is decoded.

Owns the way from mass per page-table entry, as the kernels give it, to density per token, and what a share is. Knows
numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SAMPLED_EVERY = 20  # decode steps: a sampled one takes up to half as long again, so this costs 2.5 % at a full window


class Attention:
    """Attention density by token, summed over the sampled decode steps of one answer, their heads and layers.

    A page's mass is dealt out evenly to the tokens in it that are seen: a page is as fine as it gets.
    """

    __slots__ = ("density", "num_steps")

    def __init__(self, num_tokens: int) -> None:
        self.density = np.zeros(num_tokens)  # float64; of the tokens that stood there when the answer began
        self.num_steps = 0

    def add(self, mass: Array, segments: Sequence[Sequence[int]], page_size: int) -> None:
        """Takes one step in. `mass` float [num_entries] of the sequence's page table; `segments` are its rows'
        `(slot, length, start index, delta)`."""
        slot, length, start, _ = np.asarray(segments, np.int64).T
        offset = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        entry = (np.repeat(slot, length) + offset) // page_size
        index = np.repeat(start, length) + offset
        density = (mass / np.maximum(np.bincount(entry, minlength=len(mass)), 1))[entry]
        old = index < len(self.density)
        self.density[index[old]] += density[old]
        self.num_steps += 1

    def share(self, spans: Iterable[tuple[int, int]], reference: Iterable[tuple[int, int]]) -> float:
        """Density of the loudest page of `spans` over the mean density of `reference`: the number of steps, heads and
        layers does not bear on it. At least 1.0 where some of it gets as much as the rest does on average; 1.0 where
        that is nothing."""
        rest = np.concatenate([np.zeros(0), *(self.density[start:end] for start, end in reference)])
        loudest = max((float(self.density[start:end].max()) for start, end in spans), default=0.0)
        return loudest / float(rest.mean()) if rest.any() else 1.0
