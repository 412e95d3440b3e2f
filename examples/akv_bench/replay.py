"""Replays agents, so many at once, under one strategy: each step has the recorded messages before it, whatever the
model said just now.

Owns who is replayed when, what counts as failure, and keeping what was measured if it is stopped. Knows neither the
command line nor display.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from akv_bench.likelihood import Likelihood, Scene
from akv_bench.measure import Measured, Run, Turn
from akv_bench.strategies import OpenStrategy
from akv_bench.trajectories import Message, Trajectory
from akv_sdk import AkvError


@dataclass
class Group(Measured):
    """What came of one strategy on one server, with so many sessions at once.

    Attributes:
        key: the strategy by its name on the command line.
        turns: of all runs, as they came.
        wall_s: from the first request to the last token.
        scenes: by name of a trajectory, the steps of its first run, to be scored.
        scores: of each of these steps, what the agent said; None where it was not measured.
    """

    server: str
    key: str
    name: str
    how: str
    sessions: int
    num_steps: int
    runs: list[Run] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    wall_s: float = 0.0
    scenes: dict[str, list[Scene]] = field(default_factory=dict)
    scores: dict[str, list[Likelihood | None]] | None = None

    @property
    def failures(self) -> list[Run]:
        return [run for run in self.runs if run.failure is not None]

    @property
    def is_complete(self) -> bool:
        return len(self.turns) == self.num_steps

    @property
    def outcome(self) -> str:
        """`13/13`; where runs failed, the codes of their errors behind it."""
        codes = sorted({str(run.failure_code) for run in self.failures})
        failed = f" {len(self.failures)}x " + ", ".join(codes) if codes else ""
        return f"{len(self.turns)}/{self.num_steps}{failed}"


def jobs_of(trajectories: Sequence[Trajectory], sessions: int) -> list[Trajectory]:
    """Who is replayed: every trajectory once, and again from the first until each session has one."""
    num_jobs = max(sessions, len(trajectories))
    return [trajectories[i % len(trajectories)] for i in range(num_jobs)]


def salted(trajectory: Trajectory, salt: str) -> Trajectory:
    return replace(trajectory, messages=(salt_into(trajectory.messages[0], salt), *trajectory.messages[1:]))


def salt_into(first: Message, salt: str) -> Message:
    """A conversation's first message with a line of its own at the very beginning: no server has computed a prefix of
    it before, whatever was replayed there."""
    return {**first, "content": f"[{salt}]\n{first['content']}"}


async def replay(
    group: Group,
    jobs: Sequence[Trajectory],
    make: Callable[[Trajectory, int], OpenStrategy],
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Fills the group in: `group.sessions` of the jobs at a time, each with a strategy of its own. What a server
    refuses ends that run, and no other. Cancelled, it leaves in the group what was measured."""
    waiting = iter(enumerate(jobs))
    started_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(group.sessions, len(jobs))):
                tasks.create_task(_work(group, waiting, make, on_step))
    finally:
        group.wall_s = time.perf_counter() - started_s


async def _work(
    group: Group,
    waiting: Iterator[tuple[int, Trajectory]],
    make: Callable[[Trajectory, int], OpenStrategy],
    on_step: Callable[[], None],
) -> None:
    for number, trajectory in waiting:
        run = Run(trajectory.name, group.how, len(trajectory.turns))
        group.runs.append(run)
        scenes: list[Scene] = []
        group.scenes.setdefault(trajectory.name, scenes)
        strategy = make(trajectory, number)
        try:
            seen = 0
            for turn in trajectory.turns:
                measured = await strategy.turn(trajectory.messages[seen:turn])
                run.turns.append(measured)
                group.turns.append(measured)
                scenes.append(Scene(strategy.prompt, strategy.ops, trajectory.messages[turn]))
                seen = turn
                on_step()
        except AkvError as error:
            run.failure, run.failure_code = str(error), error.code
        finally:
            await strategy.close()
