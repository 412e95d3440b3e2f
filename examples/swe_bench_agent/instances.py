"""SWE-bench instances, from a file or from the hub.

Owns which fields are read and their checks. The reference patch, the tests and the hints are never read, so nothing
downstream can show them to the agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Names become folders, parts of addresses and of image names; a commit becomes an argument of git.
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Instance:
    instance_id: str
    repo: str  # "owner/name"
    base_commit: str
    problem_statement: str


def load(source: str, *, split: str = "test") -> list[Instance]:
    """Instances of a `.jsonl` or `.json` file, or else of the hub's data set of that id.

    Raises ValueError naming the entry and field at fault, or an id that stands there twice; RuntimeError where a hub id
    needs the `datasets` package and it is not installed.
    """
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source}: is no UTF-8: {error}") from None
        rows = _lines(text, source) if path.suffix == ".jsonl" else _json(text, source)
        if not isinstance(rows, list):
            raise ValueError(f"{source}: holds no list of instances")
    elif path.suffix in (".jsonl", ".json"):
        raise ValueError(f"{source}: no such file")
    else:
        rows = _from_hub(source, split)
    instances = [_parse(row, f"{source}: entry {number}") for number, row in enumerate(rows, 1)]
    seen: set[str] = set()
    for instance in instances:
        if instance.instance_id in seen:
            raise ValueError(f"{source}: {instance.instance_id} stands there twice")
        seen.add(instance.instance_id)
    return instances


def _lines(text: str, source: str) -> list[Any]:
    # not splitlines(), which also splits at characters that JSON strings may hold as they are
    lines = enumerate(text.split("\n"), 1)
    return [_json(line, f"{source}: line {number}") for number, line in lines if line.strip()]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: is no JSON: {error}") from None


def _from_hub(name: str, split: str) -> Iterable[Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise RuntimeError(
            f"{name}: is no file, and reading it from the hub needs `pip install datasets`; or give a .jsonl file"
        ) from None
    rows: Iterable[Any] = load_dataset(name, split=split)
    return rows


def _parse(row: Any, where: str) -> Instance:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: is no object")
    fields = {}
    for name, pattern in (("instance_id", _ID), ("repo", _REPO), ("base_commit", _COMMIT), ("problem_statement", None)):
        value = row.get(name)
        if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
            raise ValueError(f"{where}: {name}: {value!r} is none")
        fields[name] = value
    return Instance(**fields)
