"""`akv demo`: one agent, the same steps, several ways to keep its context small, measured side by side.

Owns the order of events: server, sandbox, one strategy after the other, report. Everything that it prints was measured
in this run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from akv_bench.chat import Endpoint
from akv_bench.lengths import Lengths
from akv_bench.measure import Run
from akv_bench.replay import salt_into
from akv_bench.server import Server
from akv_bench.strategies import AppendOnly, Limits, Strategy, Summarisation, Truncation
from rich.console import Console

from akv_demo import report
from akv_demo.sandbox import Sandbox
from akv_demo.script import STEPS, SYSTEM, TASK, Recording
from akv_demo.strategies import GENERATED_TOKENS, Akv
from akv_demo.view import View
from akv_sdk import AkvError, ApiError, InvalidRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 0 where AKV and truncation went through all steps."""
    arguments = _parse(argv)
    console = Console()
    before = signal.signal(signal.SIGTERM, _end)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            url = arguments.url or stack.enter_context(Server(console, arguments.out / "server.log")).url
            recording = Recording(stack.enter_context(Sandbox()), STEPS[: arguments.steps])
            return asyncio.run(demo(console, url, recording, arguments.out, is_full=arguments.full))
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    except (AkvError, OSError, RuntimeError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="akv demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="also run append-only and LLM summarisation")
    parser.add_argument("--url", help="use a running server instead of starting one")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where results go (default: out/demo)")
    parser.add_argument(
        "--steps", type=int, default=len(STEPS), help=f"only the first of the agent's {len(STEPS)} steps"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.steps <= len(STEPS):
        parser.error(f"--steps: from 1 to {len(STEPS)}")
    return arguments


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # unwinds, so that the server is stopped


async def demo(console: Console, url: str, recording: Recording, out: Path, *, is_full: bool) -> int:
    """All strategies against one server, then the report. Returns the exit status."""
    started, started_s = datetime.now(UTC), time.monotonic()
    num_steps = len(recording.steps)
    names = ["AKV", "Truncation", *(["Summarisation", "Append-only"] if is_full else [])]
    runs: list[Run] = []
    async with Endpoint("demo", url) as endpoint:
        await endpoint.connect()
        if endpoint.client is None:
            raise InvalidRequest("is no AKV server", param="--url")
        console.print(
            f"A scripted agent repairs a small repository in {num_steps} steps, once per strategy: the same commands, "
            f"the same output, the same model ({endpoint.model}, window {endpoint.window_tokens or 0:,}). After each "
            "step the model itself goes on for a few tokens.\n",
            highlight=False,
        )
        run_id = uuid.uuid4().hex[:8]
        with View(console, names, num_steps) as view:
            runs.append(await play(Akv(endpoint.client, f"demo-{run_id}"), recording, view, salt=f"0.{run_id}"))
            # The rivals may see as much at once as AKV did at its peak.
            limits = Limits(runs[0].peak_visible_tokens, GENERATED_TOKENS)
            for number, rival in enumerate([Truncation, Summarisation, AppendOnly] if is_full else [Truncation], 1):
                strategy = rival(endpoint, Lengths(endpoint.client), limits, remembers=True)
                runs.append(await play(strategy, recording, view, salt=f"{number}.{run_id}"))
    wall_s = time.monotonic() - started_s

    about = {
        "model": endpoint.model,
        "window_tokens": endpoint.window_tokens,
        "started": started.isoformat(timespec="seconds"),
        "wall_s": wall_s,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    report.write_json(out / "demo.json", runs, about)
    report.write_plot(out / "ttft.png", runs, window_tokens=endpoint.window_tokens)
    console.print(report.table(runs))
    for run in runs:
        console.print(f"  [bold]{run.name}[/]: {run.how}", highlight=False)
        if run.failure is not None:
            console.print(
                f"    step {len(run.turns) + 1} of {run.num_steps}: {run.failure}",
                style="red",
                markup=False,
                highlight=False,
            )
    console.print(f"\nwritten: {out / 'ttft.png'}, {out / 'demo.json'}  ({wall_s:.0f} s)", highlight=False)
    if any(run.failure is not None for run in runs[:2]):
        return 1
    console.print(f"\n[bold]{report.closing_line(runs[0], runs[1])}[/]", highlight=False)
    return 0


async def play(strategy: Strategy, recording: Recording, view: View, *, salt: str) -> Run:
    """One strategy through all steps, or to the first that the server refuses. `salt` keeps it from what another one
    computed."""
    run = Run(strategy.name, strategy.how, len(recording.steps))
    head = [salt_into({"role": "system", "content": SYSTEM}, salt), {"role": "user", "content": TASK}]
    try:
        for number, step in enumerate(recording.steps):
            view.step(run, step.thought, step.command)
            output = recording.observation(number)
            view.observed(output)
            said_and_saw = [
                {"role": "assistant", "content": step.text},
                {"role": "tool", "name": "sh", "content": output},
            ]
            try:
                run.turns.append(await strategy.turn([*head, *said_and_saw] if number == 0 else said_and_saw))
            except ApiError as error:
                run.failure = str(error)
            view.done(run)
            if run.failure is not None:
                break
    finally:
        await strategy.close()
    return run


if __name__ == "__main__":
    sys.exit(main())
