"""How deep JSON may nest. What is deeper is refused or left a text, so that nothing that walks a value recurses far."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 100  # lists and objects, each within the one before


def is_deep(value: Any) -> bool:
    """Whether lists and objects in a JSON value nest deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
