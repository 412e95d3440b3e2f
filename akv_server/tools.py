"""What a request allows of tools, and the marks and styles in which the supported families write calls.

Owns `tools`, `tool_choice` and `parallel_tool_calls`, and telling a template's style from a call that it wrote. Reading
a style is `call_formats.py`'s, holding a model to it `grammar.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from akv_server.errors import invalid

Style = Literal["hermes", "xml", "json", "pythonic", "mistral_list", "mistral_args"]  # shown in call_formats.py

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
MAX_NAME = 128  # characters in the name of a function
TEXT_MARKS = frozenset({OPENING, CLOSING, FUNCTION})  # the others have a meaning in every text
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK_OPENING, THINK_CLOSING = "<think>", "</think>"
MARKERS = (
    *(OPENING, CLOSING, THINK_OPENING, THINK_CLOSING),
    *(PYTHON_TAG, PYTHON_START, PYTHON_END, TOOL_CALLS, CALL_ID, ARGS),
)
EXAMPLE_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: the style, and what it calls the arguments."""

    style: Style
    key: str = "arguments"


HERMES = CallFormat("hermes")


def format_of(written: str) -> CallFormat:
    """The format in which a template wrote `EXAMPLE_CALL`. Hermes where it has none of these."""
    if TOOL_CALLS in written:
        return CallFormat("mistral_args" if re.search(r"\[TOOL_CALLS\]\s*f\b", written) else "mistral_list")
    if f"{FUNCTION}f>" in written:
        return CallFormat("xml")
    if OPENING not in written:
        if re.search(r"""\bf\(x=(["']?)1\1\)""", written):
            return CallFormat("pythonic")
        if found := re.search(r'\{\s*"name"\s*:\s*"f"\s*,\s*"(parameters|arguments)"\s*:', written):
            return CallFormat("json", found[1])
    return HERMES


# What a request allows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called; `param` is where the request defines it. `parameters` is a schema of objects."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request allows: none of its functions, any or none, or at least one; and several calls at once, or not."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    many: bool = True


NO_TOOLS = ToolUse()


def tool_use(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a request, checked. A function chosen by name is the only
    one, and has to be called, once. Raises AkvError("invalid_request") naming the field."""
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if choice is None:
        choice = "auto"
    if isinstance(choice, dict):
        chosen = choice.get("function")
        name = chosen.get("name") if choice.get("type") == "function" and isinstance(chosen, dict) else None
        if not isinstance(name, str):
            raise invalid("tool_choice", 'an object is {"type": "function", "function": {"name": …}}')
        named = tuple(function for function in functions if function.name == name)[:1]
        if not named:
            raise invalid("tool_choice", f"tools has no function {name[:100]!r}")
        return ToolUse(named, "required", many=False)
    if choice not in ("none", "auto", "required"):
        raise invalid("tool_choice", "is none, auto, required, or names a function")
    if choice == "required" and not functions:
        raise invalid("tool_choice", "cannot be required without tools")
    return ToolUse(functions, choice if functions else "none", many=parallel is not False)


def _function(tool: Any, at: str) -> Function:
    if not isinstance(tool, dict):
        raise invalid(at, "a tool is an object")
    if tool.get("type", "function") != "function":
        raise invalid(f"{at}.type", "only tools of type function are supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{at}.function", "a tool has a function")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not re.fullmatch(rf"[\w.:/-]{{1,{MAX_NAME}}}", name, re.ASCII):
        raise invalid(f"{at}.function.name", f"1 to {MAX_NAME} letters, digits and _ . : / -")
    if not isinstance(strict, bool | None):
        raise invalid(f"{at}.function.strict", "is true or false")
    at = f"{at}.function.parameters"
    if not isinstance(parameters, dict | None):
        raise invalid(at, "is a JSON schema, an object")
    if (parameters or {}).get("type", "object") != "object":
        raise invalid(at, "arguments are an object, so the schema has type object")
    return Function(name, {"type": "object", "properties": {}, **(parameters or {})}, bool(strict), at)
