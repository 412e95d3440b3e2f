"""`make quality`: what each way of making room costs the model, on real trajectories.

Each trajectory is replayed as it happened (teacher-forced) and every assistant turn is scored: the negative
log-likelihood, in nats per token, of what the agent wrote, given what each way leaves of the text before it.

    everything visible   nothing goes
    drop + repos         observations but the last `--keep` go from the cache, what follows moves up
    drop with gap        the same, positions stay
    forget               the same observations, deleted from the text: everything behind them is computed anew
    truncation           the oldest messages behind the task go once the text exceeds what dropping takes at its peak,
                         until three quarters of that are left
    summarisation        the same, with a summary by the same model in their place

Lower is better. Differences come with 95 % intervals from a bootstrap over turns (within each trajectory; with so few
trajectories they say nothing about others). Runs on the engine, without HTTP. Prints a table and writes
out/quality.{md,json,png}.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from akv_bench.trajectories import read
from rich.console import Console
from rich.table import Table

from akv_sdk import types
from akv_sdk.policies.summarise import REQUEST, SUMMARY_OPENING
from akv_server import loader
from akv_server.batch import Outcome, Request
from akv_server.chat import Chat
from akv_server.engine import Engine, EngineConfig
from akv_server.ops import History, Op, layout_at
from akv_server.prompts import render
from akv_server.sampler import SamplingParams
from akv_server.streams import Stream
from akv_server.tokenizer import Tokenizer

JSON = dict[str, Any]
TRAJECTORIES = Path(__file__).resolve().parents[3] / "shared" / "trajectories"
METHODS = ("everything visible", "drop + repos", "drop with gap", "forget", "truncation", "summarisation")
SUMMARY_TOKENS = 160
MIN_TURNS = 4
NUM_RESAMPLES = 4000


@dataclass(frozen=True)
class Trajectory:
    """Messages with their observations marked, how many come before the first answer and are kept by every way, their
    stream, and the assistant messages to be scored."""

    name: str
    messages: list[JSON]
    num_head: int
    stream: Stream
    turns: list[int]


@dataclass
class Scores:
    """Of one way on one trajectory: by turn the summed negative log-likelihood and the number of tokens, and the tokens
    that had to be computed for all of it."""

    nats: list[float]
    tokens: list[int]
    computed: int
    seconds: float

    @property
    def per_token(self) -> float:
        return sum(self.nats) / sum(self.tokens)


class Scorer:
    """Requests on an engine, one at a time; what has one salt shares its KV."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.chat, self._tokenizer = engine, Chat(tokenizer), tokenizer

    def stream(self, messages: Sequence[JSON], *, asks: bool = False) -> Stream:
        return render(types.RenderRequest(messages=list(messages), add_generation_prompt=asks), self.chat)

    def score(self, salt: str, tokens: list[int], history: History = (), *, start: int = 1) -> Outcome:
        """Scores the tokens from `start` on."""
        return self._run(salt, tokens, history, scores_from=start - 1, num_prompt_logprobs=0)

    def write(self, salt: str, messages: Sequence[JSON]) -> tuple[str, Outcome]:
        """The model's own answer, greedily."""
        outcome = self._run(salt, self.stream(messages, asks=True).tokens, max_tokens=SUMMARY_TOKENS)
        tokens = [token for token in outcome.tokens if token not in self.chat.end_ids]
        return self._tokenizer.decode(tokens).strip(), outcome

    def _run(self, salt: str, tokens: list[int], history: History = (), max_tokens: int = 0, **more: Any) -> Outcome:
        done: list[Outcome] = []
        sampling = SamplingParams(temperature=0)
        ends = frozenset(self.chat.end_ids)
        self.engine.submit(Request("quality", salt, tokens, history, sampling, max_tokens, ends, done.append, **more))
        while self.engine.step():
            pass
        assert done[0].error is None, done[0].error
        return done[0]


def chosen(parser: argparse.ArgumentParser, folder: Path, names: Sequence[str] | None) -> list[Path]:
    """The trajectories of a folder, or those of them that are named. Ends the program where there are none."""
    found = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if unknown := [name for name in names or () if name not in found]:
        parser.error(f"--only {unknown[0]}: {folder} has {', '.join(found) or 'no trajectories'}")
    if not found:
        parser.error(f"--trajectories: there are none in {folder}")
    return [path for name, path in found.items() if name in (names or found)]


def too_short(num_answers: int, max_tokens: int) -> str:
    """Why a trajectory is left aside."""
    return f"{num_answers} of its answers end within {max_tokens:,} tokens, at least {MIN_TURNS} are needed"


def load(paths: Sequence[Path], scorer: Scorer, max_tokens: int, console: Console) -> Iterator[Trajectory]:
    """Each trajectory, cut behind the last answer that ends within `max_tokens`; says so where few answers are left,
    and leaves it aside."""
    for path in paths:
        recorded = read(path)
        messages = recorded.tagged()
        stream = scorer.stream(messages)
        turns = [i for i in recorded.turns if stream.messages[i].end <= max_tokens]
        if len(turns) < MIN_TURNS:
            console.print(f"[dim]{recorded.name}: skipped, {too_short(len(turns), max_tokens)}")
            continue
        messages = messages[: turns[-1] + 1]
        yield Trajectory(recorded.name, messages, recorded.num_head, scorer.stream(messages), turns)


# --- the ways of making room ------------------------------------------------------------------------------------------


def drops_before(trajectory: Trajectory, turn: int, keep: int) -> list[types.Span]:
    """The insides of all observations before a turn but the last `keep`."""
    blocks = [b for m in trajectory.stream.messages[:turn] for b in m.blocks if b.kind == "observation"]
    return [(b.start, b.end) for b in blocks[: max(0, len(blocks) - keep)] if b.start < b.end]


def history_of(trajectory: Trajectory, keep: int, *, repos: bool) -> History:
    """Each observation goes when the first turn that shall not see it begins."""
    ops: list[Op] = []
    gone: set[types.Span] = set()
    for turn in trajectory.turns:
        for span in drops_before(trajectory, turn, keep):
            if span not in gone:
                gone.add(span)
                ops.append(Op("drop", trajectory.stream.messages[turn].start, *span, repos=repos))
    return tuple(ops)


def nothing_goes(keep: int) -> str:
    """Why all ways come to the same on a trajectory with an empty history."""
    return (
        f"no turn has more than {keep} observations before it, so nothing goes and all rows are the same (see --keep)"
    )


def budget_of(trajectory: Trajectory, keep: int) -> int:
    """The most tokens that are visible to any turn when old observations are dropped."""
    history = history_of(trajectory, keep, repos=True)
    ends = [trajectory.stream.messages[turn].end for turn in trajectory.turns]
    return max(layout_at(tuple(op for op in history if op.at < end), end).num_visible for end in ends)


def masked(trajectory: Trajectory, scorer: Scorer, salt: str, history: History) -> Scores:
    """All turns in one pass: the engine computes each under the ops that hold when it begins."""
    outcome = scorer.score(salt, trajectory.stream.tokens, history)
    scored = [_turn(outcome, trajectory.stream, turn) for turn in trajectory.turns]
    return Scores([n for n, _ in scored], [t for _, t in scored], _computed(outcome), 0)


def forgotten(trajectory: Trajectory, scorer: Scorer, salt: str, keep: int) -> Scores:
    scores = Scores([], [], 0, 0)
    for turn in trajectory.turns:
        message = trajectory.stream.messages[turn]
        spans = drops_before(trajectory, turn, keep)
        history = tuple(Op("drop", start, start, end, repos=True, mode="forget") for start, end in spans)
        tokens = trajectory.stream.tokens[: message.end]
        _add(scores, scorer.score(salt, tokens, history, start=message.content_start), trajectory.stream, turn)
    return scores


def rewritten(trajectory: Trajectory, scorer: Scorer, salt: str, budget: int, *, summarises: bool) -> Scores:
    """Truncation, or summarisation: once the text is longer than the budget, its oldest messages go."""
    scores = Scores([], [], 0, 0)
    head, begin = trajectory.messages[: trajectory.num_head], trajectory.num_head
    summary: list[JSON] = []
    room = budget * 3 // 4 - (SUMMARY_TOKENS if summarises else 0)
    for turn in trajectory.turns:
        now = scorer.stream(head + summary + trajectory.messages[begin : turn + 1])
        if len(now.tokens) > budget and begin < turn:
            sizes = [len(scorer.stream(head + trajectory.messages[i : turn + 1]).tokens) for i in range(begin, turn)]
            goes = next((i for i, size in enumerate(sizes) if i > 0 and size <= room), turn - begin)
            if summarises:
                old = head + summary + trajectory.messages[begin : begin + goes]
                text, outcome = scorer.write(salt, [*old, {"role": "user", "content": REQUEST}])
                scores.computed += _computed(outcome)
                summary = [{"role": "user", "content": SUMMARY_OPENING + text}]
            begin += goes
            now = scorer.stream(head + summary + trajectory.messages[begin : turn + 1])
        last = len(now.messages) - 1
        outcome = scorer.score(salt, now.tokens, start=now.messages[last].content_start)
        _add(scores, outcome, now, last)
    return scores


def _add(scores: Scores, outcome: Outcome, stream: Stream, turn: int) -> None:
    nats, tokens = _turn(outcome, stream, turn)
    scores.nats.append(nats)
    scores.tokens.append(tokens)
    scores.computed += _computed(outcome)


def _turn(outcome: Outcome, stream: Stream, turn: int) -> tuple[float, int]:
    """Nats and tokens of an answer, what ends it included."""
    message = stream.messages[turn]
    found = outcome.prompt_scores[message.content_start : message.end]
    assert found and all(score is not None for score in found)
    return -sum(score[0] for score in found if score is not None), len(found)


def _computed(outcome: Outcome) -> int:
    return outcome.prefilled_tokens + outcome.replayed_tokens + len(outcome.tokens)


def all_methods(trajectory: Trajectory, scorer: Scorer, keep: int) -> dict[str, Scores]:
    budget = budget_of(trajectory, keep)
    ways: dict[str, Callable[[str], Scores]] = {
        "everything visible": lambda salt: masked(trajectory, scorer, salt, ()),
        "drop + repos": lambda salt: masked(trajectory, scorer, salt, history_of(trajectory, keep, repos=True)),
        "drop with gap": lambda salt: masked(trajectory, scorer, salt, history_of(trajectory, keep, repos=False)),
        "forget": lambda salt: forgotten(trajectory, scorer, salt, keep),
        "truncation": lambda salt: rewritten(trajectory, scorer, salt, budget, summarises=False),
        "summarisation": lambda salt: rewritten(trajectory, scorer, salt, budget, summarises=True),
    }
    found = {}
    for method in METHODS:
        begun = time.perf_counter()
        scorer.engine.evict_all()
        found[method] = ways[method](method)  # the name as salt: no way finds what another computed
        found[method].seconds = time.perf_counter() - begun
    assert len({tuple(scores.tokens) for scores in found.values()}) == 1, "all ways score the same tokens"
    return found


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference(results: dict[str, dict[str, Scores]], method: str, rng: np.random.Generator) -> Interval:
    """How many nats per token a way costs against everything visible, over all turns of all trajectories."""
    sums = np.zeros(NUM_RESAMPLES + 1)
    counts = np.zeros(NUM_RESAMPLES + 1)
    for scores in results.values():
        delta = np.array(scores[method].nats) - np.array(scores[METHODS[0]].nats)
        tokens = np.array(scores[method].tokens)
        drawn = rng.integers(len(delta), size=(NUM_RESAMPLES, len(delta)))
        sums += np.append(delta[drawn].sum(1), delta.sum())
        counts += np.append(tokens[drawn].sum(1), tokens.sum())
    values = sums / counts
    low, high = np.percentile(values[:-1], (2.5, 97.5))
    return Interval(float(values[-1]), float(low), float(high))


def markdown(results: dict[str, dict[str, Scores]], differences: dict[str, Interval]) -> str:
    names = list(results)
    lines = [
        "| nats per assistant token | " + " | ".join(names) + " | all | against everything visible | tokens computed |",
        "|---" * (len(names) + 4) + "|",
    ]
    for method in METHODS:
        all_scores = [results[name][method] for name in names]
        pooled = sum(sum(s.nats) for s in all_scores) / sum(sum(s.tokens) for s in all_scores)
        cells = [f"{s.per_token:.3f}" for s in all_scores]
        against = "" if method == METHODS[0] else str(differences[method])
        computed = f"{sum(s.computed for s in all_scores):,}"
        lines.append(f"| {method} | " + " | ".join([*cells, f"**{pooled:.3f}**", against, computed]) + " |")
    return "\n".join(lines) + "\n"


def show(console: Console, results: dict[str, dict[str, Scores]], differences: dict[str, Interval]) -> None:
    table = Table(title="Negative log-likelihood of the assistant turns, nats per token")
    for column in ("", *(f"{i + 1}" for i in range(len(results))), "all", "against everything visible", "computed"):
        table.add_column(column, justify="right" if column else "left")
    for line in markdown(results, differences).splitlines()[2:]:
        table.add_row(*(cell.strip().replace("**", "").replace("[", r"\[") for cell in line.strip("|").split("|")))
    console.print(table)
    for i, (name, scores) in enumerate(results.items()):
        first = scores[METHODS[0]]
        console.print(f"[dim]{i + 1}  {name}: {len(first.tokens)} turns, {sum(first.tokens)} tokens scored")


def plot(path: Path, results: dict[str, dict[str, Scores]], differences: dict[str, Interval]) -> None:
    """The differences with their intervals, and each trajectory as a dot. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for row, method in enumerate(METHODS[1:]):
        interval = differences[method]
        dots = [scores[method].per_token - scores[METHODS[0]].per_token for scores in results.values()]
        axes.plot(dots, [row + 0.16] * len(dots), "o", color="#9AA5B1", markersize=5, alpha=0.8)
        below, above = interval.value - interval.low, interval.high - interval.value
        axes.errorbar(interval.value, row, xerr=[[below], [above]], fmt="s", color="#1F4E79", capsize=4, markersize=7)
    axes.axvline(0, color="#555555", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(METHODS) - 1), METHODS[1:])
    axes.invert_yaxis()
    axes.set_xlabel("nats per assistant token against everything visible (left is better)")
    axes.set_title(
        "What making room costs: all turns with 95 % intervals, and each trajectory", loc="left", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=Path, default=TRAJECTORIES, help="folder (default: ../shared's)")
    parser.add_argument("--only", action="append", metavar="NAME", help="of these names alone; repeatable")
    parser.add_argument("--limit", type=int, help="at most so many trajectories")
    parser.add_argument("--max-tokens", type=int, default=6500, help="cut each to so many (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=2, help="observations that stay (default: %(default)s)")
    parser.add_argument("--weights", choices=("float32", "int8"), default="int8", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    paths = chosen(parser, options.trajectories, options.only)
    console = Console()
    loaded = loader.load("default", weights=options.weights)
    num_pages = (loaded.config.max_positions + 2 * options.max_tokens) // 16
    engine = Engine(loaded.model, EngineConfig(num_pages, compact_tokens_per_step=0))
    scorer = Scorer(engine, loaded.tokenizer)
    results: dict[str, dict[str, Scores]] = {}
    for trajectory in islice(load(paths, scorer, options.max_tokens, console), options.limit):
        if not history_of(trajectory, options.keep, repos=True):
            console.print(f"[dim]{trajectory.name}: {nothing_goes(options.keep)}")
        begun = time.perf_counter()
        results[trajectory.name] = all_methods(trajectory, scorer, options.keep)
        took = {method: round(scores.seconds) for method, scores in results[trajectory.name].items()}
        console.print(f"[dim]{trajectory.name}: {time.perf_counter() - begun:.0f} s, of these {took}")
    if not results:
        parser.exit(1, "there is no trajectory to score\n")
    rng = np.random.default_rng(0)
    differences = {method: difference(results, method, rng) for method in METHODS[1:]}
    show(console, results, differences)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quality.md").write_text(markdown(results, differences))
    plot(options.out / "quality.png", results, differences)
    about = {"model": loaded.config.name, "weights": options.weights, "max_tokens": options.max_tokens}
    figures = {name: {m: vars(scores) for m, scores in by.items()} for name, by in results.items()}
    against = {method: vars(interval) for method, interval in differences.items()}
    body = {**about, "keep": options.keep, "against_everything_visible": against, "trajectories": figures}
    (options.out / "quality.json").write_text(json.dumps(body, indent=1))
    console.print(f"[dim]{loaded.config.name}, {options.weights} weights; quality.md, .json and .png in {options.out}/")


if __name__ == "__main__":
    main()
