"""What a run leaves on disk: `preds.json`, and a trajectory for each instance. Every write is whole or not at all.

    OUT/preds.json                            [{"instance_id", "model_name_or_path", "model_patch"}, …]
    OUT/trajectories/INSTANCE_ID.json         messages, spans, ops, steps with timings, and how it ended

Knows nothing of how they came about.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from akv_sdk import Session
from swe_bench_agent.agent import Attempt
from swe_bench_agent.patches import Patch


class Predictions:
    """`preds.json` as `swebench.harness.run_evaluation --predictions_path` reads it. An instance that stands in it is
    done, and that is all that a resumed run goes by.

    Raises ValueError with its path where the file is there and is none of ours, or not whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._rows: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        except ValueError as error:
            raise ValueError(f"{path}: is no JSON: {error}") from None
        if not isinstance(self._rows, list) or not all(isinstance(r, dict) and "instance_id" in r for r in self._rows):
            raise ValueError(f"{path}: holds no list of predictions")

    def __contains__(self, instance_id: object) -> bool:
        return any(row["instance_id"] == instance_id for row in self._rows)

    def add(self, instance_id: str, model: str, patch: str) -> None:
        assert instance_id not in self
        self._rows.append({"instance_id": instance_id, "model_name_or_path": model, "model_patch": patch})
        _write_json(self._path, self._rows)


def write_trajectory(
    path: Path, session: Session, attempt: Attempt, about: dict[str, Any], *, patch: Patch | None = None
) -> None:
    """The attempt as it stands. `patch` is None until it is over. Spans are those of the last reply, so what was said
    after it has none yet."""
    steps = [asdict(step) for step in attempt.steps]
    sums = ("prompt_tokens", "cached_tokens", "completion_tokens", "prefilled_tokens", "replayed_tokens")
    info = {
        **about,
        "ending": attempt.ending,
        "steps": len(steps),
        "elapsed_s": attempt.elapsed_s,
        "cost_usd": attempt.cost_usd,
        **{name: sum(step[name] for step in steps) for name in sums},
        "peak_visible_tokens": max((step["visible_tokens"] for step in steps), default=0),
        "stream_tokens": steps[-1]["stream_tokens"] if steps else 0,
        "model_patch": None if patch is None else patch.text,
        "patch_problem": None if patch is None else patch.problem,
    }
    trajectory = {
        "info": info,
        "messages": session.messages,
        "spans": [span.model_dump() for span in session.spans],
        "ops": [op.model_dump() for op in session.ops],
        "steps": steps,
    }
    _write_json(path, trajectory)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)
