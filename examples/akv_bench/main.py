"""`akv bench`: recorded agents, replayed against a server under several ways to keep their context small.

Owns options, the order of events, and exit statuses: 0 where it ran to its end (a strategy that fails is a result), 1
where nothing could be measured, 2 for options that make no sense, 130 when stopped, 141 where nobody reads on
(`| head`); either way the files have what was measured so far.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import shlex
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from akv_bench import likelihood, report
from akv_bench.chat import Endpoint
from akv_bench.lengths import Lengths, lengths_of
from akv_bench.replay import Group, jobs_of, replay, salted
from akv_bench.report import Prices
from akv_bench.server import Server
from akv_bench.strategies import ON_AKV_ALONE, STRATEGIES, Limits, OpenStrategy, cleared
from akv_bench.trajectories import Trajectory, TrajectoryError, read
from akv_bench.view import View
from akv_sdk import AkvError, InvalidRequest

MAIN = "akv"  # the name of the server that is not a rival
BUDGET_SHARE = 0.75  # of the window
POOL_TOKENS = 8192  # of our own server's cache, for each session


@dataclass(frozen=True)
class Settings:
    """What shall be run; `limits.budget_tokens` is 0 until the server's window is known."""

    sessions: tuple[int, ...]
    strategies: tuple[str, ...]
    limits: Limits
    prices: Prices | None
    scores: bool
    out: Path
    command: str


@dataclass
class Bench:
    """One run. `groups` fills up as it goes on, `notes` with what a reader has to know."""

    settings: Settings
    trajectories: Sequence[Trajectory]
    console: Console
    endpoints: Sequence[Endpoint]
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    salt: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = self.settings.limits

    @property
    def main(self) -> Endpoint:
        return self.endpoints[0]

    async def run(self) -> None:
        """Every group, one after the other. Cancelled, it leaves what was measured. Raises AkvError where it cannot
        begin."""
        for endpoint in self.endpoints:
            await endpoint.connect()
        counts = next((endpoint for endpoint in self.endpoints if endpoint.client is not None), self.main)
        lengths = await lengths_of(counts, self.trajectories[0].messages)
        for trajectory in self.trajectories:
            await lengths.learn(trajectory.messages)
            await lengths.learn(cleared(trajectory.messages, trajectory.observations))
        self.limits = self._limits(lengths)
        self._note_windows(lengths)
        planned = list(self._planned())
        self._introduce(planned)
        with View(self.console, MAIN, len(planned)) as view:
            for endpoint, key, sessions in planned:
                await self._freshen(endpoint, sessions)
                await self._run_group(view, endpoint, key, sessions, lengths)
        for endpoint in self.endpoints:
            if endpoint.hides_reuse:
                self.notes.append(f"{endpoint.name} does not say what it reuses: all of its prompts count as prefilled")

    def _limits(self, lengths: Lengths) -> Limits:
        limits, window = self.settings.limits, self.main.window_tokens
        budget = limits.budget_tokens
        if not budget:
            if window is None:
                raise InvalidRequest("the server does not say its window, so it has to be given", param="--budget")
            budget = int(window * BUDGET_SHARE)
        if window is not None and budget > window:
            raise InvalidRequest(f"{budget} tokens are more than the model's window of {window}", param="--budget")
        for trajectory in self.trajectories:
            needed = lengths.prompt(trajectory.messages[: trajectory.num_head]) + limits.max_tokens
            if needed > budget:
                message = f"{trajectory.name} begins with {needed} tokens, more than the {budget} that there may be"
                raise InvalidRequest(message, param="--budget")
        longest = max(lengths.prompt(trajectory.messages) for trajectory in self.trajectories)
        if longest <= budget:
            self.notes.append(
                f"no trajectory is longer than the budget of {budget:,} tokens (the longest has {longest:,}): all "
                "strategies do the same"
            )
        return Limits(budget, limits.max_tokens)

    def _note_windows(self, lengths: Lengths) -> None:
        """What a reader has to know of strategies that fail."""
        needed = {
            each.name: lengths.prompt(each.messages[: each.turns[-1]]) + self.limits.max_tokens
            for each in self.trajectories
        }
        for endpoint in self.endpoints:
            window = endpoint.window_tokens
            beyond = [name for name, num_tokens in needed.items() if window is not None and num_tokens > window]
            if beyond:
                self.notes.append(
                    f"{', '.join(beyond)}: beyond the model's window of {window:,} tokens on {endpoint.name} (up to "
                    f"{max(needed.values()):,}); a strategy that keeps all of it visible, or leaves gaps, fails there"
                )

    def _planned(self) -> Iterator[tuple[Endpoint, str, int]]:
        for endpoint in self.endpoints:
            skipped = [key for key in self.settings.strategies if key in ON_AKV_ALONE and endpoint.client is None]
            if skipped:
                self.notes.append(f"{endpoint.name} is no AKV server: {', '.join(skipped)} left out")
        for sessions in self.settings.sessions:
            for endpoint in self.endpoints:
                for key in self.settings.strategies:
                    if key not in ON_AKV_ALONE or endpoint.client is not None:
                        yield endpoint, key, sessions

    def _introduce(self, planned: Sequence[Any]) -> None:
        num_steps = [len(trajectory.turns) for trajectory in self.trajectories]
        names = ", ".join(
            f"{each.name} ({count} steps)" for each, count in zip(self.trajectories, num_steps, strict=True)
        )
        where = ", ".join(f"{each.name} ({each.model})" for each in self.endpoints)
        self._print(
            f"Replaying {names} on {where}: {len(planned)} groups, a budget of {self.limits.budget_tokens:,} "
            f"tokens, {self.limits.max_tokens} generated a step."
        )
        for note in self.notes:
            self._print(f"Note: {note}.", style="yellow")

    async def _freshen(self, endpoint: Endpoint, sessions: int) -> None:
        """Short requests, as many at once as there will be sessions. A server that just started is warm after them; and
        one that shifts pieces of any old prompt into a new one (llama.cpp's --cache-reuse) does not find those of the
        group before in its slots. A line of salt keeps it only from a prefix."""
        shorts = [[{"role": "user", "content": f"[{i}.{self.salt}] Say yes."}] for i in range(sessions)]
        await asyncio.gather(*(endpoint.chat(short, max_tokens=1) for short in shorts))

    async def _run_group(self, view: View, endpoint: Endpoint, key: str, sessions: int, lengths: Lengths) -> None:
        salt = f"{len(self.groups)}.{self.salt}"

        def make(trajectory: Trajectory, number: int) -> OpenStrategy:
            return STRATEGIES[key](endpoint, lengths, self.limits, trajectory.observations, f"bench-{number}.{salt}")

        jobs = [salted(job, f"{i}.{salt}") for i, job in enumerate(jobs_of(self.trajectories, sessions))]
        likeness = make(jobs[0], 0)
        num_steps = sum(len(job.turns) for job in jobs)
        group = Group(endpoint.name, key, likeness.name, likeness.how, sessions, num_steps)
        self.groups.append(group)
        try:
            await replay(group, jobs, make, view.begin(group))
            # What the model sees does not depend on how many sessions there are, so it is scored once.
            if self.settings.scores and sessions == self.settings.sessions[0] and endpoint.client is not None:
                view.scoring(group)
                group.scores = {
                    name: await likelihood.score(endpoint.client, scenes) for name, scenes in group.scenes.items()
                }
        except AkvError as error:
            self.notes.append(f"{report.title_of(group, MAIN)} was not scored: {error}")
        finally:
            self.write()
            view.end(group)

    def write(self) -> None:
        """The files, of what was measured so far."""
        report.write(self.settings.out, self.groups, self.about, MAIN, self.settings.prices)

    @property
    def about(self) -> dict[str, Any]:
        return {
            "command": self.settings.command,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "servers": {
                each.name: {"model": each.model, "window_tokens": each.window_tokens} for each in self.endpoints
            },
            "trajectories": {each.name: len(each.turns) for each in self.trajectories},
            "budget_tokens": self.limits.budget_tokens,
            "max_tokens": self.limits.max_tokens,
            "notes": self.notes,
        }

    def show(self) -> None:
        """Tables, plot, and where everything is."""
        measured = [group for group in self.groups if group.turns]
        if not measured:
            return
        report.show(self.console, report.rows(measured, MAIN, self.settings.prices))
        if found := report.ratios(measured):
            self.console.print()
            report.show(self.console, found)
        for key in dict.fromkeys(group.key for group in measured):
            group = next(group for group in measured if group.key == key)
            self._print(f"  {group.name}: {group.how}")
        for note in self.notes:
            self._print(f"Note: {note}.", style="yellow")
        files = [self.settings.out / f"bench.{kind}" for kind in ("md", "csv", "json")]
        if importlib.util.find_spec("matplotlib") is None:
            self._print("No plot: matplotlib is not installed (pip install 'akv[demo]').", style="yellow")
        else:
            files.append(self.settings.out / "bench.png")
            levels = {"the budget": self.limits.budget_tokens, "the model's window": self.main.window_tokens or 0}
            report.plot(files[-1], measured, MAIN, {name: level for name, level in levels.items() if level})
        self._print(f"written: {', '.join(map(str, files))}")

    def _print(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style=style), soft_wrap=True)


class _Output(Console):
    """One that leaves it to `main` what happens when nobody reads on, as older ones do; rich would exit by itself."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise  # the BrokenPipeError that this is called for


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        return _main(argv)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be flushed at the exit
        return 128 + signal.SIGPIPE


def _main(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(given)
    settings = _settings(parser, options, "akv bench " + shlex.join(given))
    console = _Output()
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # a stop is a stop
    try:
        trajectories = [read(path).cut(options.limit_steps) for path in options.trajectories]
        settings.out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            url = options.url
            if url is None:
                pool = options.pool_tokens or POOL_TOKENS * max(settings.sessions)
                own = ["--model", options.model, "--pool-tokens", str(pool)]
                url = stack.enter_context(Server(console, settings.out / "server.log", own)).url
            endpoints = [Endpoint(MAIN, url, options.api_key), *(Endpoint(*rival) for rival in options.rival)]
            return asyncio.run(_bench(Bench(settings, trajectories, console, endpoints)))
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    except BrokenPipeError:
        raise
    except (AkvError, TrajectoryError, OSError, RuntimeError, ValueError) as error:
        console.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


async def _bench(bench: Bench) -> int:
    async with AsyncExitStack() as stack:
        for endpoint in bench.endpoints:
            await stack.enter_async_context(endpoint)
        status = 0
        try:
            await bench.run()
        except asyncio.CancelledError:
            bench.notes.append("stopped before the end")
            status = 130
        except AkvError as error:
            if not bench.groups:
                raise
            bench.notes.append(f"ended early: {error}")
            status = 1
        bench.write()
        bench.show()
        return status if any(group.turns for group in bench.groups) else status or 1


# --- options ----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="akv bench",
        description="Replays recorded agents against a server, under several ways to keep their context small.",
    )
    add = parser.add_argument
    add(
        "trajectories",
        nargs="+",
        type=Path,
        metavar="FILE",
        help='a recorded agent: {"messages": […]}, a *.traj.json of mini-swe-agent, or a *.traj of SWE-agent',
    )
    add("--url", help="of a running server, AKV or any other of the OpenAI API (default: start `akv serve`)")
    add("--api-key", help="for the server of --url")
    add("--model", default="default", help="that a server of our own loads (default: %(default)s)")
    add(
        "--pool-tokens",
        type=_positive,
        metavar="N",
        help=f"size of our own server's cache (default: {POOL_TOKENS} for each session at once)",
    )
    add(
        "--rival",
        type=_name_and_url,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server of the OpenAI API for the strategies over text to run on, too; repeatable",
    )
    add(
        "--strategies",
        type=_strategies,
        default=tuple(STRATEGIES),
        metavar="NAME,…",
        help=f"some of {','.join(STRATEGIES)} (default: all)",
    )
    add(
        "--sessions",
        type=_counts,
        default=(1, 4, 16),
        metavar="N,…",
        help="how many agents at once, one number after the other (default: 1,4,16)",
    )
    add("--budget", type=_positive, default=0, metavar="N", help="tokens to keep to (default: 3/4 of the window)")
    add("--max-tokens", type=_positive, default=16, metavar="N", help="generated at each step (default: %(default)s)")
    add("--limit-steps", type=_positive, metavar="N", help="only the first steps of each agent")
    add("--no-nll", action="store_true", help="do not score what the agents said, which takes about as long again")
    add("--price-input", type=_price, metavar="USD", help="for a million tokens of input")
    add("--price-cached", type=_price, metavar="USD", help="for a million that were cached (default: as any input)")
    add("--price-output", type=_price, metavar="USD", help="for a million tokens of output")
    add("--out", type=Path, default=Path("out/bench"), help="where results go (default: %(default)s)")
    return parser


def _settings(parser: argparse.ArgumentParser, options: argparse.Namespace, command: str) -> Settings:
    prices = None
    if any(price is not None for price in (options.price_input, options.price_cached, options.price_output)):
        if options.price_input is None or options.price_output is None:
            parser.error("--price-input and --price-output: one needs the other")
        cached = options.price_input if options.price_cached is None else options.price_cached
        prices = Prices(options.price_input, cached, options.price_output)
    names = [MAIN, *(name for name, _ in options.rival)]
    if len(set(names)) < len(names):
        parser.error(f"--rival: every server needs a name of its own, other than {MAIN}")
    return Settings(
        sessions=options.sessions,
        strategies=options.strategies,
        limits=Limits(options.budget, options.max_tokens),
        prices=prices,
        scores=not options.no_nll,
        out=options.out,
        command=command,
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(part) for part in text.split(",")))


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no price")
    return price


def _strategies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(STRATEGIES)}")
    return names


def _name_and_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, with an http or https address")
    return name, url


if __name__ == "__main__":
    sys.exit(main())
