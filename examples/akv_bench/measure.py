"""What is measured, at the client: one `Turn` per step, one `Run` per agent and strategy.

Owns the clock and the arithmetic of percentiles. Knows nothing of servers, of what a strategy does, or of display.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Turn:
    """One step. Times in seconds.

    `ttft_s` runs from the moment at which the observation is there to the first generated token, so it holds all that
    the strategy does in between (dropping, cutting, summarising). `gaps_s` are the times between tokens.
    `prefilled_tokens` were computed for prompts, whether for the first time or again, `reused_tokens` were not.
    `visible_tokens` is the most that the model saw at once in this step, `stream_tokens` the length of what was sent.
    `generated_tokens` are those of the answer, and of a summary.
    """

    ttft_s: float
    gaps_s: tuple[float, ...]
    prefilled_tokens: int
    reused_tokens: int
    visible_tokens: int
    stream_tokens: int
    generated_tokens: int


class Measured:
    """Figures over a number of turns. NaN where there are none."""

    turns: list[Turn]

    def ttft_s(self, percent: float) -> float:
        return percentile([turn.ttft_s for turn in self.turns], percent)

    def inter_token_s(self, percent: float) -> float:
        return percentile([gap for turn in self.turns for gap in turn.gaps_s], percent)

    @property
    def waited_s(self) -> float:
        """Time to the first token, summed over all steps."""
        return sum(turn.ttft_s for turn in self.turns)

    @property
    def prefilled_tokens(self) -> int:
        return sum(turn.prefilled_tokens for turn in self.turns)

    @property
    def reused_tokens(self) -> int:
        return sum(turn.reused_tokens for turn in self.turns)

    @property
    def generated_tokens(self) -> int:
        return sum(turn.generated_tokens for turn in self.turns)

    @property
    def peak_visible_tokens(self) -> int:
        return max((turn.visible_tokens for turn in self.turns), default=0)

    @property
    def mean_visible_tokens(self) -> int:
        return round(sum(turn.visible_tokens for turn in self.turns) / max(1, len(self.turns)))


@dataclass
class Run(Measured):
    """All steps of one agent under one strategy so far. `failure` is the error that ended it early, in words,
    `failure_code` its stable code."""

    name: str
    how: str
    num_steps: int
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None
    failure_code: str | None = None

    @property
    def outcome(self) -> str:
        if self.failure is not None:
            return "Failed"
        return f"{len(self.turns)}/{self.num_steps}"

    @property
    def stream_tokens(self) -> int:
        return self.turns[-1].stream_tokens if self.turns else 0


class Stopwatch:
    """Started when made; told of tokens as they come.

    Attributes:
        gaps_s: seconds between tokens; those that came at once share the time since the one before them.
    """

    def __init__(self) -> None:
        self._started_s = self._last_s = time.perf_counter()
        self._ttft_s: float | None = None
        self.gaps_s: list[float] = []

    def saw(self, num_tokens: int) -> None:
        """So many tokens came just now. None of them is no news."""
        if num_tokens == 0:
            return
        now_s = time.perf_counter()
        if self._ttft_s is None:
            self._ttft_s = now_s - self._started_s
        else:
            self.gaps_s += [(now_s - self._last_s) / num_tokens] * num_tokens
        self._last_s = now_s

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, which has to have come."""
        assert self._ttft_s is not None, "a stream that ends well has at least one token"
        return self._ttft_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
