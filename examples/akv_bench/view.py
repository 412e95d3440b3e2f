"""What is seen while a benchmark runs: a bar for each group; where the output is no terminal, a line once it ended.

Owns the terminal until it is left.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from akv_bench import report
from akv_bench.look import seconds
from akv_bench.replay import Group


class View:
    """Use as a context manager; one group after the other."""

    def __init__(self, console: Console, main: str, num_groups: int) -> None:
        self._console, self._main, self._num_groups = console, main, num_groups
        self._number = 0
        self._progress = Progress(
            SpinnerColumn(finished_text="·"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}", style="dim", markup=False),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> View:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, group: Group) -> Callable[[], None]:
        """A group begins; what is returned is to be called after each of its steps."""
        self._number += 1
        task = self._progress.add_task(self._name(group), total=group.num_steps, figures="")

        def stepped() -> None:
            self._progress.update(task, completed=len(group.turns), figures=_figures(group))

        return stepped

    def scoring(self, group: Group) -> None:
        """Its answers are being scored, which may take as long as it did."""
        self._tell(f"{self._name(group)}: scoring what the agents said")

    def end(self, group: Group) -> None:
        """A group is over, or was cut short."""
        for run in group.failures:
            at = f"step {len(run.turns) + 1} of {run.num_steps}"
            self._tell(f"{self._name(group)}: {run.name} failed at {at}: {run.failure}")
        if not self._console.is_terminal:
            self._tell(f"{self._name(group)}: {group.outcome} steps, {_figures(group)}, {group.wall_s:.0f} s")

    def _name(self, group: Group) -> str:
        return f"{self._number}/{self._num_groups} {report.title_of(group, self._main)} x{group.sessions}"

    def _tell(self, line: str) -> None:
        self._progress.console.print(Text(line, style="dim"), soft_wrap=True)


def _figures(group: Group) -> str:
    return f"TTFT P50 {seconds(group.ttft_s(50))}, prefilled {group.prefilled_tokens:,}, reused {group.reused_tokens:,}"
