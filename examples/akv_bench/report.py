"""What a benchmark comes to: tables, ratios, JSON, CSV, Markdown and the plot.

Owns presentation of groups, finished or cut short, and over which steps their likelihoods compare. Every form shows the
same figures, those of `figures`. Knows nothing of how they were made.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from akv_bench.likelihood import Likelihood
from akv_bench.look import COLOURS, Line, Panel, seconds, write_plot
from akv_bench.measure import Measured, Turn
from akv_bench.replay import Group

HERO = "akv-repos"
MAX_WIDTH = 1000  # characters of a table
NUM_NAMES = 2  # columns that say what a row is of
CLAIMS = {
    "summarisation": "5.9 (P95, 64k, 70B on 8 H100)",
    "truncation": "2.3 (P50, 64k, 70B on 8 H100)",
}
"""By how much AKV is faster in the write-up, and on what: 2,420 against 410 ms, and 420 against 185 ms."""


@dataclass(frozen=True)
class Prices:
    """USD for a million tokens: of input, of input that came from the cache, of output."""

    input: float
    cached: float
    output: float

    def cost_usd(self, measured: Measured) -> float:
        """What these very requests cost; the agent's recorded words count as input, where they are not cached."""
        micros = (
            measured.prefilled_tokens * self.input
            + measured.reused_tokens * self.cached
            + measured.generated_tokens * self.output
        )
        return micros / 1e6


Steps = frozenset[tuple[str, int]]  # names of trajectories, and numbers of their steps


def figures(groups: Sequence[Group], prices: Prices | None) -> list[dict[str, Any]]:
    """Every figure of each group, by name; None where it was not measured. Times in seconds. Likelihoods are over the
    steps that all scored groups have, so that they are of the same words."""
    steps = _common_steps(groups)
    return [_figures(group, prices, steps) for group in groups]


def _common_steps(groups: Sequence[Group]) -> Steps:
    """Those that every group with any has scored."""
    scored = [set(_scored(group)) for group in groups]
    return frozenset(set.intersection(*filter(None, scored))) if any(scored) else frozenset()


def _scored(group: Group) -> dict[tuple[str, int], Likelihood]:
    scores = group.scores or {}
    return {(name, i): found for name, each in scores.items() for i, found in enumerate(each) if found is not None}


def _figures(group: Group, prices: Prices | None, steps: Steps) -> dict[str, Any]:
    wall_s, scored = group.wall_s, _scored(group)
    likelihood = sum([scored[step] for step in steps], Likelihood()) if scored else None
    num_tokens = group.prefilled_tokens + group.generated_tokens
    return {
        "server": group.server,
        "strategy": group.key,
        "sessions": group.sessions,
        "runs": len(group.runs),
        "completed_steps": len(group.turns),
        "num_steps": group.num_steps,
        "failed_runs": len(group.failures),
        "failure_codes": " ".join(sorted({str(run.failure_code) for run in group.failures})),
        "ttft_p50_s": _or_none(group.ttft_s(50)),
        "ttft_p95_s": _or_none(group.ttft_s(95)),
        "ttft_mean_s": group.waited_s / len(group.turns) if group.turns else None,
        "inter_token_p95_s": _or_none(group.inter_token_s(95)),
        "tokens_per_s": num_tokens / wall_s if wall_s else None,
        "steps_per_s": len(group.turns) / wall_s if wall_s else None,
        "prefilled_tokens": group.prefilled_tokens,
        "reused_tokens": group.reused_tokens,
        "generated_tokens": group.generated_tokens,
        "peak_visible_tokens": group.peak_visible_tokens,
        "cost_per_run_usd": prices.cost_usd(group) / len(group.runs) if prices and group.runs else None,
        "nats_per_token": likelihood.per_token if likelihood else None,
        "scored_tokens": likelihood.tokens if likelihood else None,
        "scored_steps": len(steps) if likelihood else None,
        "wall_s": wall_s,
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


# --- tables -----------------------------------------------------------------------------------------------------------


def title_of(group: Group, main: str) -> str:
    """The strategy's, with the server's before it where that is a rival."""
    return group.name if group.server == main else f"{group.server}: {group.name}"


def rows(groups: Sequence[Group], main: str, prices: Prices | None) -> list[dict[str, str]]:
    """The table, a row for each group, its cells by the head of their column. A column that nobody could fill, because
    no price was given or nothing scored, is left out."""
    found = []
    for group, values in zip(groups, figures(groups, prices), strict=True):
        nats, cost = values["nats_per_token"], values["cost_per_run_usd"]
        found.append(
            {
                "strategy": title_of(group, main),
                "sessions": str(group.sessions),
                "TTFT P50": seconds(group.ttft_s(50)),
                "TTFT P95": seconds(group.ttft_s(95)),
                "inter-token P95": seconds(group.inter_token_s(95)),
                "tokens/s": _rate(values["tokens_per_s"], 0),
                "steps/s": _rate(values["steps_per_s"], 2),
                "prefilled": f"{group.prefilled_tokens:,}",
                "reused": f"{group.reused_tokens:,}",
                "peak visible": f"{group.peak_visible_tokens:,}",
                "$ per run": "" if cost is None else f"{cost:.4f}",
                "NLL/token": "" if nats is None else f"{nats:.3f}",
                "NLL steps": "" if nats is None else str(values["scored_steps"]),
                "steps": group.outcome,
            }
        )
    empty = {head for head in ("$ per run", "NLL/token", "NLL steps") if not any(row[head] for row in found)}
    return [{head: cell for head, cell in row.items() if head not in empty} for row in found]


def ratios(groups: Sequence[Group]) -> list[dict[str, str]]:
    """How many times as long as with AKV and repos, on whichever server, the first token took under each other strategy
    that went through all steps with as many sessions; beside it what the write-up claims of one server."""
    found = []
    for hero in groups:
        if hero.key != HERO or not hero.is_complete:
            continue
        for group in groups:
            if group is hero or group.sessions != hero.sessions or not group.is_complete:
                continue
            found.append(
                {
                    "strategy": f"{group.server}: {group.name}",
                    "against": f"{hero.server}: {hero.name}",
                    "sessions": str(hero.sessions),
                    "TTFT P50": f"{group.ttft_s(50) / hero.ttft_s(50):.1f}x",
                    "TTFT P95": f"{group.ttft_s(95) / hero.ttft_s(95):.1f}x",
                    "TTFT mean": f"{group.waited_s / hero.waited_s:.1f}x",
                    "claimed": CLAIMS.get(group.key, "") if group.server == hero.server else "",
                }
            )
    return found


def _rate(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:,.{num_digits}f}"


def show(console: Console, found: Sequence[dict[str, str]]) -> None:
    """On a terminal, in as many tables below one another as it is too narrow for one; each names its rows anew. Where
    it is too narrow for any, and where there is no terminal, lines go on rather than lose something."""
    heads = list(found[0])
    width = console.width if console.is_terminal else MAX_WIDTH
    options = console.options.update(max_width=MAX_WIDTH)
    rest = heads[NUM_NAMES:]
    while rest:
        for num_shown in range(len(rest), 0, -1):
            table = _table(found, [*heads[:NUM_NAMES], *rest[:num_shown]])
            if console.measure(table, options=options).maximum <= width:
                break
        console.print(Segments(list(console.render(table, options))), crop=False, soft_wrap=True)
        if rest := rest[num_shown:]:
            console.print()


def _table(found: Sequence[dict[str, str]], heads: Sequence[str]) -> Table:
    result = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        result.add_column(head.replace(" ", "\n", 1), justify="right", no_wrap=True, vertical="bottom")
    result.columns[0].header, result.columns[0].justify = heads[0], "left"
    for row in found:
        first, *rest = (row[head] for head in heads)
        colour = COLOURS.get(first.split(": ")[-1], "")
        result.add_row(Text(first, style=f"bold {colour}"), *rest)
    return result


def markdown(found: Sequence[dict[str, str]]) -> str:
    lines = [list(found[0]), [":--", *["--:"] * (len(found[0]) - 1)], *(list(row.values()) for row in found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# --- files ------------------------------------------------------------------------------------------------------------


def write(out: Path, groups: Sequence[Group], about: dict[str, Any], main: str, prices: Prices | None) -> None:
    """`bench.json`, `bench.csv` and `bench.md`, of all that was measured so far."""
    flat = figures(groups, prices)
    whole = [{**values, **_details(group)} for group, values in zip(groups, flat, strict=True)]
    body = {**about, "groups": whole}
    (out / "bench.json").write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    with (out / "bench.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(flat[0]) if flat else [])
        writer.writeheader()
        writer.writerows(flat)
    parts = [f"`{about['command']}`\n"]
    for found in (rows(groups, main, prices), ratios(groups)):
        if found:
            parts.append(markdown(found))
    parts += [f"- {note}\n" for note in about["notes"]]
    (out / "bench.md").write_text("\n".join(parts), encoding="utf-8")


def _details(group: Group) -> dict[str, Any]:
    runs = [
        {
            "trajectory": run.name,
            "completed_steps": len(run.turns),
            "num_steps": run.num_steps,
            "failure": run.failure,
            "failure_code": run.failure_code,
            "turns": [asdict(turn) for turn in run.turns],
        }
        for run in group.runs
    ]
    return {"how": group.how, "run_details": runs}


def plot(path: Path, groups: Sequence[Group], main: str, limits: dict[str, int]) -> None:
    """TTFT and visible tokens of each step, the median over runs; a column for each number of sessions. PNG."""
    panels = []
    for sessions in sorted({group.sessions for group in groups}):
        shown = [group for group in groups if group.sessions == sessions and group.turns]
        shown.sort(key=lambda group: group.key != HERO)
        if not shown:
            continue
        stream = [median(turn.stream_tokens for turn in step) for step in _steps(shown[0])]
        panels.append(
            Panel(
                about=f"step, with {sessions} session{'s' if sessions > 1 else ''} at once",
                lines=[_line(group, main) for group in shown],
                num_steps=max(run.num_steps for group in shown for run in group.runs),
                stream_tokens=stream if shown[0].key == HERO else [],
                limits=limits,
            )
        )
    if panels:
        write_plot(path, "Time to first token at each step of the agent", panels)


def _line(group: Group, main: str) -> Line:
    name = title_of(group, main)
    return Line(
        name=name,
        label=f"{name}:  P50 {seconds(group.ttft_s(50))},  P95 {seconds(group.ttft_s(95))}",
        colour=COLOURS[group.name],
        ttft_s=[median(turn.ttft_s for turn in step) for step in _steps(group)],
        visible_tokens=[median(turn.visible_tokens for turn in step) for step in _steps(group)],
        has_failed=bool(group.failures),
        style="-" if group.server == main else "--",
    )


def _steps(group: Group) -> list[list[Turn]]:
    """The turns of all runs, by the number of their step."""
    longest = max((len(run.turns) for run in group.runs), default=0)
    return [[run.turns[i] for run in group.runs if i < len(run.turns)] for i in range(longest)]
