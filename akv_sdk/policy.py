"""When to drop: a policy looks at the stream's spans and names the blocks that shall go now.

Owns the choice alone. Knows neither session nor client; `Session.apply` does what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from akv_sdk.types import MessageSpan


class Policy(Protocol):
    def select(self, spans: Sequence[MessageSpan]) -> list[str]:
        """Ids of the blocks to drop now, oldest first; empty for none. Pure: `spans` is not changed, and a policy that
        is asked again after its blocks were dropped names none of them a second time."""
        ...


@dataclass(frozen=True, slots=True)
class LastNObservations:
    """Keeps the newest `n` blocks that are still visible and drops the older ones.

    Counts what the server has seen: an observation appended since the last reply is not among the spans yet.
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError(f"n: {self.n} is less than 0")

    def select(self, spans: Sequence[MessageSpan]) -> list[str]:
        visible = [block.id for span in spans for block in span.blocks if block.visible]
        return visible[: max(0, len(visible) - self.n)]
