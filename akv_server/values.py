"""Values as models write them: JSON or something like it, Python's literals, and text whose meaning a schema decides.

Owns reading one and finding where one ends in a text that grows. Knows nothing of calls.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

TEXT = frozenset({"string"})  # the types of an argument that is a text as it stands


class Brackets:
    """Finds where a value in brackets ends, in a text that grows. Brackets within strings are none."""

    def __init__(self, quotes: str, depth: int = 0) -> None:
        self._quotes = quotes
        self._depth = depth
        self._string = ""  # the quote that opened one
        self._at = 0
        self._num_escaped = 0  # characters to come that a backslash took their meaning from

    def forget(self, length: int) -> None:
        """So many characters, all of them scanned, are consumed: the text begins behind them now."""
        self._at -= length

    def scan(self, text: str) -> int | None:
        """The end of the value; None while it is open."""
        if self._num_escaped and self._at < len(text):
            self._at, self._num_escaped = self._at + 1, 0
        while found := _MARK.search(text, self._at):
            mark = found[0]
            self._at = found.end()
            if mark == "\\":
                if self._string and self._at == len(text):
                    self._num_escaped = 1
                self._at += bool(self._string)
            elif self._string:
                if mark == self._string:
                    self._string = ""
            elif mark in self._quotes:
                self._string = mark
            elif mark in "{[(":
                self._depth += 1
            elif mark in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        self._at = len(text)
        return None


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`, short of all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def value_of(text: str) -> Any:
    """A value as JSON or, where it is none, as Python writes it; None where it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        try:
            return _literal(_parse(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None


def keywords_of(text: str) -> str | None:
    """The arguments of a Python call as JSON; None where they are not all literals given by name."""
    try:
        call = _parse(f"_({text})")
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        named: Mapping[str | None, Any] = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        return None if None in named else json.dumps(named, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that a schema admits, as it names them; None where it does not say. `root` has its `$defs`."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#/").split("/"):
            schema = schema.get(step) if isinstance(schema, dict) else None
    else:
        return None
    said = schema.get("type")
    if isinstance(said, str | list):
        return frozenset([said] if isinstance(said, str) else (one for one in said if isinstance(one, str)))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(type_of, values))
    cases = schema.get("anyOf") or schema.get("oneOf")
    found = [types_of(case, root) for case in cases] if isinstance(cases, list) else [None]
    return None if None in found else frozenset[str]().union(*filter(None, found))


def type_of(value: Any) -> str:
    """The JSON type of a value, as a schema names it."""
    return _TYPES[type(value)]


def argument_of(text: str, types: frozenset[str] | None) -> str:
    """A bare text as the JSON of the argument that it stands for: a value of one of `types` where it reads as one, or
    else a string. Numbers and the like may be as Python prints them, as templates do."""
    if types != TEXT:
        bare = text.strip()
        try:
            value = _NAMES[bare] if bare in _NAMES else json.loads(bare, parse_constant=_refuse)
            fits = types is None or type_of(value) in types or (type_of(value) == "integer" and "number" in types)
            if fits and not isinstance(value, str):
                return json.dumps(value, ensure_ascii=False)
        except (ValueError, RecursionError):
            if types and "string" not in types and (value := value_of(bare)) is not None:
                return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _refuse(_: str) -> NoReturn:
    raise ValueError("JSON has no such number")


def _parse(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the model's strings
        return ast.parse(text.strip(), mode="eval").body


def _literal(node: ast.expr) -> Any:
    """The value of a literal in which true, false and null may stand for what they are in JSON."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("a key that is no string")
        return {ast.literal_eval(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("a value that JSON does not have")
    return value


_NAMES = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_MAX_REFERENCES = 8
_MARK = re.compile(r"""["'\\{}\[\]()]""")
