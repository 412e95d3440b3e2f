"""The command: instances one after the other, resumable, each to a prediction and a trajectory.

Owns options, order and exit statuses: 0 where every instance has a prediction, 1 where some failed, 2 for options that
make no sense, 130 when stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from akv_sdk import AkvError, Client, TransportError
from swe_bench_agent import agent, instances
from swe_bench_agent.agent import Attempt, Config, Limits, Prices
from swe_bench_agent.commands import CommandFailed
from swe_bench_agent.instances import Instance
from swe_bench_agent.patches import Patch
from swe_bench_agent.records import Predictions, write_trajectory
from swe_bench_agent.workspace import (
    DEFAULT_IMAGE,
    DEFAULT_SOURCE,
    DockerWorkspace,
    LocalWorkspace,
    Workspace,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """`policy_name` is the flag that the policy came from, for the record; without `model` the server chooses."""

    out: Path
    agent: Config
    policy_name: str
    model: str | None = None
    model_name: str = "akv"  # in the predictions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.max_cost is not None and not any(options.prices):
        parser.error("--max-cost: needs --prices")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        asked = [
            i for i in instances.load(options.instances, split=options.split) if options.only.search(i.instance_id)
        ]
        with Client(options.url, api_key=os.environ.get("AKV_API_KEY"), timeout_s=options.max_seconds) as client:
            model = options.model or client.models()[0].id
            settings = Settings(
                out=options.out,
                agent=Config(
                    policy=agent.parse_policy(options.policy),
                    limits=Limits(options.max_steps, options.max_seconds, options.max_cost, options.command_timeout),
                    prices=Prices(*options.prices),
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                ),
                policy_name=options.policy,
                model=model,
                model_name=options.model_name or f"akv-{model}-{options.policy.replace(':', '-')}",
            )

            def prepare(instance: Instance) -> Workspace:
                if options.docker:
                    return DockerWorkspace(instance, options.docker_image)
                return LocalWorkspace(instance, options.repos)

            return 1 if run(client, asked, settings, prepare) else 0
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
        return 130
    except (AkvError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(
    client: Client, asked: Sequence[Instance], settings: Settings, prepare: Callable[[Instance], Workspace]
) -> list[str]:
    """Works on every instance that `preds.json` does not have yet. Returns the ids of those that failed: they get no
    prediction, so the next run tries them again. One that was interrupted begins anew.

    Raises the SDK's TransportError once the server cannot be reached.
    """
    predictions = Predictions(settings.out / "preds.json")
    failed = []
    for number, instance in enumerate(asked, 1):
        name = instance.instance_id
        where = f"[{number}/{len(asked)}] {name}"
        if name in predictions:
            print(f"{where}: done before", flush=True)
            continue
        try:
            attempt, patch = _work_on(client, instance, settings, prepare)
        except TransportError:
            raise
        except (AkvError, CommandFailed, OSError) as error:
            failed.append(name)
            print(f"{where}: failed: {error}", flush=True)
            continue
        predictions.add(name, settings.model_name, patch.text)
        problem = f"; {patch.problem}" if patch.problem else ""
        print(
            f"{where}: {attempt.ending} after {len(attempt.steps)} steps, {attempt.elapsed_s:.0f} s, "
            f"${attempt.cost_usd:.2f}; patch of {patch.text.count(chr(10))} lines{problem}",
            flush=True,
        )
    return failed


def _work_on(
    client: Client, instance: Instance, settings: Settings, prepare: Callable[[Instance], Workspace]
) -> tuple[Attempt, Patch]:
    path = settings.out / "trajectories" / f"{instance.instance_id}.json"
    about = {
        "instance_id": instance.instance_id,
        "model": settings.model,
        "model_name_or_path": settings.model_name,
        "policy": settings.policy_name,
        "max_tokens": settings.agent.max_tokens,
        "temperature": settings.agent.temperature,
        "limits": asdict(settings.agent.limits),
        "prices": asdict(settings.agent.prices),
    }
    # A session of its own, whose name nobody used before: an old one would bring its history of ops along.
    with prepare(instance) as workspace, client.session(model=settings.model) as session:
        attempt = agent.solve(
            session,
            workspace,
            instance.problem_statement,
            settings.agent,
            on_step=lambda attempt: write_trajectory(path, session, attempt, about),
        )
        patch = workspace.patch()
        write_trajectory(path, session, attempt, about, patch=patch)
    return attempt, patch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swe_bench_agent", description="A bash agent for SWE-bench over an AKV server."
    )
    add = parser.add_argument
    add("--instances", required=True, help="a .jsonl or .json file, or a hub id such as SWE-bench/SWE-bench_Lite")
    add("--split", default="test", help="of the hub's data set (default: %(default)s)")
    add("--only", type=_pattern, default=re.compile(""), metavar="REGEX", help="instances whose id it is found in")
    add("--out", type=Path, required=True, help="folder for preds.json and trajectories; one that has them is resumed")
    add("--url", default="http://127.0.0.1:8000", help="the AKV server (default: %(default)s); its key: AKV_API_KEY")
    add("--model", help="default: the first that the server has")
    add("--model-name", help="model_name_or_path in preds.json (default: from the model and the policy)")
    add(
        "--policy", type=_policy, default="last:5", help="none, last:N, rolling:TOKENS, repeats, or several joined by +"
    )
    add("--max-steps", type=_positive, default=50, help="answers of the model (default: %(default)s)")
    add("--max-seconds", type=_above_zero, default=1800.0, help="for one instance (default: %(default)s)")
    add("--max-cost", type=_above_zero, metavar="USD", help="for one instance; needs --prices")
    add(
        "--prices",
        type=_not_below_zero,
        nargs=3,
        default=(0.0, 0.0, 0.0),
        metavar=("INPUT", "CACHED", "OUTPUT"),
        help="USD for a million tokens",
    )
    add("--command-timeout", type=_above_zero, default=120.0, metavar="SECONDS", help="(default: %(default)s)")
    add("--max-tokens", type=_positive, default=1024, help="of one answer (default: %(default)s)")
    add("--temperature", type=_not_below_zero, default=0.0)
    add(
        "--repos",
        default=DEFAULT_SOURCE,
        help="where repositories come from, an address or path (default: %(default)s)",
    )
    add("--docker", action="store_true", help="run commands in the instance's image instead of on this machine")
    add("--docker-image", default=DEFAULT_IMAGE, help="(default: %(default)s)")
    return parser


def _policy(text: str) -> str:
    try:
        agent.parse_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 999999999")
    return int(text)


def _above_zero(text: str) -> float:
    if _not_below_zero(text) == 0:
        raise argparse.ArgumentTypeError("has to be above 0")
    return float(text)


def _not_below_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e9:  # nor is NaN
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1e9")
    return number


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
