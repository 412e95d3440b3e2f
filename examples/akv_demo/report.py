"""What a run comes to: the table, the JSON, the plot, and the one sentence at the end.

Owns presentation of finished runs. Knows nothing of how they were made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from akv_demo.measure import Run

COLOURS = {"AKV": "#0072B2", "Truncation": "#D55E00", "Append-only": "#7A7A7A", "Summarisation": "#009E73"}


def table(runs: Sequence[Run]) -> Table:
    result = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    result.add_column("\nstrategy", no_wrap=True)
    for head in (
        "TTFT\nP50",
        "TTFT\nP95",
        "inter-token\nP95",
        "tokens\nprefilled",
        "tokens\nreused",
        "peak\nvisible",
        "\nsteps",
    ):
        result.add_column(head, justify="right", no_wrap=True)
    for run in runs:
        result.add_row(
            f"[bold {COLOURS[run.name]}]{run.name}[/]",
            seconds(run.ttft_s(50)),
            seconds(run.ttft_s(95)),
            seconds(run.inter_token_s(95)),
            f"{run.prefilled_tokens:,}",
            f"{run.reused_tokens:,}",
            f"{run.peak_visible_tokens:,}",
            f"[bold red]{run.outcome}[/]" if run.failure else run.outcome,
        )
    return result


def seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def closing_line(akv: Run, rival: Run) -> str:
    """What the newcomer just saw, in one sentence, from the figures of this run."""
    return (
        f"You just saw one agent work through the same {akv.num_steps} steps twice. With AKV the cache let go of old "
        f"observations, and a stream of {akv.stream_tokens:,} tokens cost {akv.prefilled_tokens:,} prefilled; "
        f"{rival.name.lower()} edited the prompt instead, prefilled {rival.prefilled_tokens:,} and waited "
        f"{rival.waited_s / akv.waited_s:.1f} times as long for its first tokens "
        f"({rival.waited_s:.0f} s against {akv.waited_s:.0f} s)."
    )


def write_json(path: Path, runs: Sequence[Run], about: dict[str, Any]) -> None:
    """Every figure of the table and every turn behind it; times in seconds, NaN as null."""
    strategies = [
        {
            "name": run.name,
            "how": run.how,
            "completed_steps": len(run.turns),
            "num_steps": run.num_steps,
            "failure": run.failure,
            "ttft_p50_s": _or_null(run.ttft_s(50)),
            "ttft_p95_s": _or_null(run.ttft_s(95)),
            "inter_token_p95_s": _or_null(run.inter_token_s(95)),
            "prefilled_tokens": run.prefilled_tokens,
            "reused_tokens": run.reused_tokens,
            "peak_visible_tokens": run.peak_visible_tokens,
            "mean_visible_tokens": run.mean_visible_tokens,
            "turns": [asdict(turn) for turn in run.turns],
        }
        for run in runs
    ]
    path.write_text(json.dumps({**about, "strategies": strategies}, indent=1, allow_nan=False) + "\n")


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_plot(path: Path, runs: Sequence[Run], *, window_tokens: int | None) -> None:
    """TTFT per step, and below it how many tokens the model saw. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "font.size": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#888888",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#E6E6E6",
        "axes.axisbelow": True,
        "xtick.color": "#444444",
        "ytick.color": "#444444",
    }
    with pyplot.rc_context(style):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(10, 6.6), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        for rank, run in enumerate(runs):
            steps = range(1, len(run.turns) + 1)
            look: dict[str, Any] = {
                "color": COLOURS[run.name],
                "linewidth": 2.2 if rank == 0 else 1.6,
                "marker": "o",
                "markersize": 4,
                "zorder": 4 - rank * 0.1,  # the first strategy lies on top
            }
            label = f"{run.name}:  P50 {seconds(run.ttft_s(50))},  P95 {seconds(run.ttft_s(95))}"
            above.plot(steps, [turn.ttft_s for turn in run.turns], label=label, **look)
            below.plot(steps, [turn.visible_tokens for turn in run.turns], **look)
            if run.failure is not None and run.turns:
                last = run.turns[-1]
                for axes, value in ((above, last.ttft_s), (below, last.visible_tokens)):
                    axes.plot(len(run.turns), value, "X", color="#C00000", markersize=9, zorder=5)
                below.annotate(
                    f"{run.name}: failed",
                    (len(run.turns), last.visible_tokens),
                    textcoords="offset points",
                    xytext=(9, -4),
                    color="#C00000",
                    fontsize="small",
                )
        akv = runs[0]
        streams = [turn.stream_tokens for turn in akv.turns]
        if streams:
            below.plot(range(1, len(streams) + 1), streams, color=COLOURS[akv.name], linestyle=":", linewidth=2)
            _note(below, f"{akv.name}: the whole stream", len(streams), streams[-1], COLOURS[akv.name], ha="right")
        if window_tokens is not None:
            below.axhline(window_tokens, color="#555555", linewidth=1, linestyle="--")
            _note(below, f"the model's window, {window_tokens:,}", 1, window_tokens, "#555555", ha="left")
        figure.suptitle("Time to first token at each step of the agent", x=0.01, ha="left", fontweight="bold")
        above.set_ylabel("seconds")
        above.set_ylim(bottom=0)
        above.set_xlim(0.5, max(run.num_steps for run in runs) + 0.5)
        above.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, borderaxespad=0.2)
        below.set_title("Tokens that the model sees", loc="left", fontsize="medium")
        below.set_ylabel("tokens")
        below.set_xlabel("step")
        below.set_ylim(bottom=0)
        below.margins(y=0.12)
        below.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _note(axes: Any, text: str, x: float, y: float, colour: str, *, ha: str) -> None:
    """A word above a point, beginning or ending at it."""
    axes.annotate(text, (x, y), textcoords="offset points", xytext=(0, 6), ha=ha, color=colour, fontsize="small")
