"""How figures look wherever they are shown: a colour for each strategy, times in words, and the plot.

Owns presentation alone. matplotlib is imported once there is something to plot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = {
    "AKV": "#0072B2",
    "AKV + repos": "#0072B2",
    "AKV, gap": "#56B4E9",
    "Truncation": "#D55E00",
    "Summarisation": "#009E73",
    "Clearing by text": "#CC79A7",
    "Append-only": "#7A7A7A",
}
_FAILED = "#C00000"


def seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


@dataclass(frozen=True)
class Line:
    """A strategy in a plot: for each step the time to the first token, and how many tokens the model saw."""

    name: str
    label: str
    colour: str
    ttft_s: Sequence[float]
    visible_tokens: Sequence[float]
    has_failed: bool = False
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """One pair of plots. The first line lies on top; `stream_tokens` is the length of its whole stream at each step.
    `limits` are levels to be seen beside the tokens, by what they are called."""

    about: str  # its steps: stands below them
    lines: Sequence[Line]
    num_steps: int
    stream_tokens: Sequence[float]
    limits: dict[str, int]


def write_plot(path: Path, heading: str, panels: Sequence[Panel]) -> None:
    """TTFT per step, and below it how many tokens the model saw; a panel a column. PNG."""
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
        figure, axes = pyplot.subplots(
            2,
            len(panels),
            figsize=(10 * len(panels), 6.6),
            sharex="col",
            height_ratios=(3, 2),
            layout="constrained",
            squeeze=False,
        )
        for panel, above, below in zip(panels, *axes, strict=True):
            _draw(panel, above, below)
        figure.suptitle(heading, x=0.01, ha="left", fontweight="bold")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _draw(panel: Panel, above: Any, below: Any) -> None:
    for rank, line in enumerate(panel.lines):
        steps = range(1, len(line.ttft_s) + 1)
        look: dict[str, Any] = {
            "color": line.colour,
            "linestyle": line.style,
            "linewidth": 2.2 if rank == 0 else 1.6,
            "marker": "o",
            "markersize": 4,
            "zorder": 4 - rank * 0.1,
        }
        above.plot(steps, line.ttft_s, label=line.label, **look)
        below.plot(steps, line.visible_tokens, **look)
        if line.has_failed and line.ttft_s:
            for axes, value in ((above, line.ttft_s[-1]), (below, line.visible_tokens[-1])):
                axes.plot(len(line.ttft_s), value, "X", color=_FAILED, markersize=9, zorder=5)
            below.annotate(
                f"{line.name}: failed",
                (len(line.ttft_s), line.visible_tokens[-1]),
                textcoords="offset points",
                xytext=(9, -4),
                color=_FAILED,
                fontsize="small",
            )
    if panel.lines and panel.stream_tokens:
        first, stream = panel.lines[0], panel.stream_tokens
        below.plot(range(1, len(stream) + 1), stream, color=first.colour, linestyle=":", linewidth=2)
        _note(below, f"{first.name}: the whole stream", len(stream), stream[-1], first.colour, ha="right")
    for name, value in panel.limits.items():
        below.axhline(value, color="#555555", linewidth=1, linestyle="--")
        _note(below, f"{name}, {value:,}", 1, value, "#555555", ha="left")
    above.set_ylabel("seconds")
    above.set_ylim(bottom=0)
    above.set_xlim(0.5, panel.num_steps + 0.5)
    if panel.lines:
        above.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, borderaxespad=0.2)
    below.set_title("Tokens that the model sees", loc="left", fontsize="medium")
    below.set_ylabel("tokens")
    below.set_xlabel(panel.about)
    below.margins(y=0.18)  # room for what is written above the lines
    below.set_ylim(bottom=0)
    below.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _note(axes: Any, text: str, x: float, y: float, colour: str, *, ha: str) -> None:
    """A word above a point, beginning or ending at it."""
    axes.annotate(text, (x, y), textcoords="offset points", xytext=(0, 6), ha=ha, color=colour, fontsize="small")
