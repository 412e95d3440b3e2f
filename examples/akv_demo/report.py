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

from akv_bench import look
from akv_bench.look import COLOURS, Line, Panel, seconds
from akv_bench.measure import Run
from rich.box import SIMPLE_HEAD
from rich.table import Table


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
    panel = Panel(
        about="step",
        lines=[
            Line(
                name=run.name,
                label=f"{run.name}:  P50 {seconds(run.ttft_s(50))},  P95 {seconds(run.ttft_s(95))}",
                colour=COLOURS[run.name],
                ttft_s=[turn.ttft_s for turn in run.turns],
                visible_tokens=[turn.visible_tokens for turn in run.turns],
                has_failed=run.failure is not None,
            )
            for run in runs
        ],
        num_steps=max(run.num_steps for run in runs),
        stream_tokens=[turn.stream_tokens for turn in runs[0].turns],
        limits={} if window_tokens is None else {"the model's window": window_tokens},
    )
    look.write_plot(path, "Time to first token at each step of the agent", [panel])
