"""The live display: a row for each strategy, and what the agent is doing right now.

Owns the terminal while the demo runs. Where the output is no terminal it prints one line per step instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from akv_bench.look import COLOURS, seconds
from akv_bench.measure import Run
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_OTHER_COLUMNS = 63  # characters of the table without the bars


class View:
    """Use as a context manager; `show` after every change."""

    def __init__(self, console: Console, names: Sequence[str], num_steps: int) -> None:
        self._console = console
        self._names = names
        self._num_steps = num_steps
        self._runs: dict[str, Run] = {}
        self._spinner = Spinner("dots", text="")
        self._said = Text("")
        self._live = Live(self._render(), console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._said = Text("")
            self._spinner = Spinner("dots", text="")
            self._live.update(self._table())
            self._live.stop()

    def step(self, run: Run, thought: str, command: str) -> None:
        """A step begins."""
        self._runs[run.name] = run
        self._spinner.update(
            text=Text.assemble(
                (run.name, f"bold {COLOURS[run.name]}"),
                f"  step {len(run.turns) + 1}/{run.num_steps}  ",
                (thought, "dim"),
                no_wrap=True,
                overflow="ellipsis",
            )
        )
        self._said = Text(f"$ {command.splitlines()[0]}", style="bold", no_wrap=True, overflow="ellipsis")
        self._refresh()

    def observed(self, output: str) -> None:
        """The command of the step has printed its output."""
        lines = output.splitlines()
        shown = "\n".join(lines[:6]) + (f"\n… {len(lines) - 6} more lines" if len(lines) > 6 else "")
        self._said = Text.assemble(self._said, "\n", (shown, "dim"), no_wrap=True, overflow="ellipsis")
        self._refresh()

    def done(self, run: Run) -> None:
        """The step is over, or the run failed in it."""
        self._refresh()
        if self._live is None:
            if run.failure is not None:
                self._console.print(f"{run.name}: {run.outcome}: {run.failure}", markup=False, highlight=False)
            else:
                turn = run.turns[-1]
                self._console.print(
                    f"{run.name} {len(run.turns)}/{run.num_steps}: TTFT {seconds(turn.ttft_s)}, "
                    f"prefilled {turn.prefilled_tokens:,}, reused {turn.reused_tokens:,}, "
                    f"visible {turn.visible_tokens:,}",
                    highlight=False,
                )

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Group:
        said = Panel(self._said, title="agent", title_align="left", border_style="dim", height=10)
        return Group(self._table(), said, self._spinner)

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for head in ("strategy", "step"):
            table.add_column(head, no_wrap=True)
        num_bars = max(8, min(self._num_steps, self._console.width - _OTHER_COLUMNS))
        table.add_column("TTFT of each step", no_wrap=True, min_width=num_bars)
        for head in ("P50", "prefilled", "reused", "visible"):
            table.add_column(head, justify="right", no_wrap=True)
        slowest_s = max((turn.ttft_s for run in self._runs.values() for turn in run.turns), default=0.0)
        for name in self._names:
            run = self._runs.get(name)
            if run is None or not run.turns:
                table.add_row(Text(name, style=f"bold {COLOURS[name]}"), "…" if run else "waits")
                continue
            turn = run.turns[-1]
            table.add_row(
                Text(name, style=f"bold {COLOURS[name]}"),
                Text(run.outcome, style="bold red" if run.failure else ""),
                Text(sparkline([each.ttft_s for each in run.turns[-num_bars:]], slowest_s), style=COLOURS[name]),
                seconds(run.ttft_s(50)),
                f"{run.prefilled_tokens:,}",
                f"{run.reused_tokens:,}",
                f"{turn.visible_tokens:,}",
            )
        return table


def sparkline(values: Sequence[float], largest: float) -> str:
    """One character per value, from nothing to the largest."""
    if largest <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / largest * len(_BARS)))] for value in values)
