"""What is measured, at the client: one `Turn` per step of a strategy, one `Run` per strategy.

Owns the clock and the arithmetic of percentiles. Knows nothing of sandboxes, of what a strategy does, or of display.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from akv_sdk import Event


@dataclass(frozen=True)
class Turn:
    """One step. Times in seconds.

    `ttft_s` runs from the moment at which the observation is there to the first generated token, so it holds all that
    the strategy does in between (dropping, cutting, summarising). `gaps_s` are the times between tokens.
    `visible_tokens` is the most that the model saw at once in this step, `stream_tokens` the length of what was sent.
    """

    ttft_s: float
    gaps_s: tuple[float, ...]
    prefilled_tokens: int
    reused_tokens: int
    visible_tokens: int
    stream_tokens: int


@dataclass
class Run:
    """All steps of one strategy so far. `failure` is the server's refusal that ended it early, in words."""

    name: str
    how: str
    num_steps: int
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None

    @property
    def outcome(self) -> str:
        if self.failure is not None:
            return "Failed"
        return f"{len(self.turns)}/{self.num_steps}"

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
    def peak_visible_tokens(self) -> int:
        return max((turn.visible_tokens for turn in self.turns), default=0)

    @property
    def mean_visible_tokens(self) -> int:
        return round(sum(turn.visible_tokens for turn in self.turns) / max(1, len(self.turns)))

    @property
    def stream_tokens(self) -> int:
        return self.turns[-1].stream_tokens if self.turns else 0


class Stopwatch:
    """Started when made. `read` drains a stream of events and notes when each token came."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    def read(self, events: Iterable[Event]) -> tuple[float, tuple[float, ...]]:
        """Seconds to the first token, and between the later ones. Events without tokens (a role, the end) are not
        counted; tokens that came in one event share its gap."""
        ttft_s: float | None = None
        gaps_s: list[float] = []
        last_s = self._started_s
        for event in events:
            if not event.token_ids:
                continue
            now_s = time.perf_counter()
            if ttft_s is None:
                ttft_s = now_s - self._started_s
            else:
                gaps_s += [(now_s - last_s) / len(event.token_ids)] * len(event.token_ids)
            last_s = now_s
        assert ttft_s is not None, "a stream that ends well has at least one token"
        return ttft_s, tuple(gaps_s)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
