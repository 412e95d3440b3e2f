"""Policies over marked observations: keep the last n, stay within a budget, let repeats go.

Knows the context and nothing else. Where a policy goes by count, an observation that the model had to read again after
it was dropped stays: letting go by count what is still in use would make the agent read the same files for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from akv_sdk.policies.context import REMOVE_TAG, Context, Drop, Policy, check_at_least, decide


@dataclass(frozen=True, slots=True)
class LastNObservations:
    """Keeps the newest `n` observations, as SWE-agent's processor of this name.

    With `polling` p the older ones go in steps of p, so that between `n` and `n + p - 1` stay. As there, the task
    counts as an observation when the steps are counted, what was dropped still counts, `keep_output` keeps one for
    good and `remove_output` lets one go at once. Counts what the server has seen: an observation appended since the
    last reply is not among the spans yet.
    """

    n: int
    polling: int = 1

    def __post_init__(self) -> None:
        check_at_least(0, n=self.n)
        check_at_least(1, polling=self.polling)

    def select(self, context: Context) -> Iterator[Drop]:
        observations = context.observations
        num_seen = len(observations) + 1
        num_old = max(0, num_seen // self.polling * self.polling - (self.n + 1))
        for i, target in enumerate(observations):
            if REMOVE_TAG in target.tags:
                yield Drop(target, f"tagged {REMOVE_TAG}")
            elif i < num_old and not target.is_reread:
                yield Drop(target, f"older than the last {self.n}")


@dataclass(frozen=True, slots=True)
class RollingDrop:
    """Once more than `window_tokens` are visible, the oldest observations go until the rest fits, or none is left.

    What the model read again after it was dropped goes last.
    """

    window_tokens: int

    def __post_init__(self) -> None:
        check_at_least(0, window_tokens=self.window_tokens)

    def select(self, context: Context) -> Iterator[Drop]:
        over = context.visible_tokens - self.window_tokens
        for target in sorted(context.observations, key=lambda target: target.is_reread):
            if over <= 0:
                return
            if target.parts:
                over -= target.num_tokens
                yield Drop(target, f"more than {self.window_tokens} tokens were visible")


@dataclass(frozen=True, slots=True)
class DropRepeats:
    """An observation that says word for word what an earlier one of the same tool said (a status poll, a file read
    twice) lets the earlier go. One repeat stays as long as it is wholly visible."""

    def select(self, context: Context) -> Iterator[Drop]:
        newest = {(target.tool, target.text): target for target in context.observations if target.text}
        for target in context.observations:
            last = newest.get((target.tool, target.text))
            if last is not None and last is not target and last.is_whole:
                yield Drop(target, f"repeated in {last.block or f'message {last.message}'}")


@dataclass(frozen=True, slots=True, init=False)
class InTurn:
    """Several policies as one: each sees the stream as those before it leave it."""

    policies: tuple[Policy, ...]

    def __init__(self, *policies: Policy) -> None:
        object.__setattr__(self, "policies", policies)

    def select(self, context: Context) -> Iterable[Drop]:
        drops: list[Drop] = []
        for policy in self.policies:
            found = decide(policy, context)
            drops += found
            context = context.after(found)
        return drops
