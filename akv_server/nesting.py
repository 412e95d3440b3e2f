"""Walking JSON: how deep it may nest, and the strings in it. What is too deep is refused or left a text, so that
nothing that walks a value recurses far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from akv_server.errors import invalid

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


def strings_in(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, keys among them, behind the name of the field it lies in: `at` is the value's."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield at, key
            yield from strings_in(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from strings_in(inner, f"{at}[{i}]")


def check_unicode(text: str, at: str) -> None:
    """Raises AkvError("invalid_request") naming `at` where a text holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(at, "holds half a surrogate pair, which is no character") from None
