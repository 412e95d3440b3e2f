"""Tool calls: what a request allows, and finding the calls in what a model writes, while it writes.

Owns `tools`, `tool_choice` and `parallel_tool_calls`, and a parser for each way in which the supported families write a
call. Pure text: knows neither tokens nor grammars (`grammar.py`), and of templates only the call that one wrote.

    hermes    <tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>        one after the other
    json      {"name": "f", "parameters": {"x": 1}}; {"name": …}                     the whole answer
    pythonic  [f(x=1), g()]                                                          the whole answer

The last two may stand behind `<|python_tag|>` anywhere; without it they have nothing that marks them, so an answer
counts as one only if it calls a function that the request has.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from akv_server.errors import AkvError

Style = Literal["hermes", "json", "pythonic"]

OPENING, CLOSING, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
THINK_OPENING, THINK_CLOSING = "<think>", "</think>"
MARKERS = (OPENING, CLOSING, PYTHON_TAG, THINK_OPENING, THINK_CLOSING)
EXAMPLE_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: the style, and what it calls the arguments."""

    style: Style
    key: str = "arguments"


HERMES = CallFormat("hermes")


def format_of(written: str) -> CallFormat:
    """The format in which a template wrote `EXAMPLE_CALL`. Hermes where it has none of these."""
    if OPENING not in written:
        if re.search(r"\bf\(x=1\)", written):
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
            raise _bad("tool_choice", 'an object is {"type": "function", "function": {"name": …}}')
        named = tuple(function for function in functions if function.name == name)[:1]
        if not named:
            raise _bad("tool_choice", f"tools has no function {name[:100]!r}")
        return ToolUse(named, "required", many=False)
    if choice not in ("none", "auto", "required"):
        raise _bad("tool_choice", "is none, auto, required, or names a function")
    if choice == "required" and not functions:
        raise _bad("tool_choice", "cannot be required without tools")
    return ToolUse(functions, choice if functions else "none", many=parallel is not False)


def _function(tool: Any, at: str) -> Function:
    if not isinstance(tool, dict):
        raise _bad(at, "a tool is an object")
    if tool.get("type", "function") != "function":
        raise _bad(f"{at}.type", "only tools of type function are supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _bad(f"{at}.function", "a tool has a function")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.:/-]{1,128}", name, re.ASCII):
        raise _bad(f"{at}.function.name", "1 to 128 letters, digits and _ . : / -")
    if not isinstance(strict, bool | None):
        raise _bad(f"{at}.function.strict", "is true or false")
    at = f"{at}.function.parameters"
    if not isinstance(parameters, dict | None):
        raise _bad(at, "is a JSON schema, an object")
    if (parameters or {}).get("type", "object") != "object":
        raise _bad(at, "arguments are an object, so the schema has type object")
    return Function(name, {"type": "object", "properties": {}, **(parameters or {})}, bool(strict), at)


def _bad(param: str, message: str) -> AkvError:
    return AkvError("invalid_request", f"{param}: {message}", param=param)


# Finding calls -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """A call that the model made. `[begin, end)` are the characters between the braces of its arguments in the model's
    text; empty where they are not written as a JSON object. A call that was cut off has arguments that are."""

    name: str
    id: str
    arguments: str = ""
    begin: int = 0
    end: int = 0

    def body(self) -> dict[str, Any]:
        """As it stands in a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What call number `index` got: some of its arguments, or its beginning."""

    index: int
    arguments: str = ""
    opens: Call | None = None

    def body(self) -> dict[str, Any]:
        """As it stands in a chunk of a stream."""
        if self.opens is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.opens.name, "arguments": ""}
        return {"index": self.index, "id": self.opens.id, "type": "function", "function": function}


class Parser:
    """Parts an answer into content and calls, as it comes. What it finds does not depend on how the text is cut up.

    Space around a call belongs to nobody. What turns out to be no call is content. Whatever the model thinks first,
    between `<think>` and `</think>`, is content, too; `is_thinking`: the template opened that.
    """

    def __init__(
        self, written: CallFormat, functions: Sequence[Function], *, many: bool, is_thinking: bool = False
    ) -> None:
        self.calls: list[Call] = []
        self.is_done = False
        """The only call that may be made is complete."""
        self._answer_id = uuid.uuid4().hex[:22]
        self._style = written.style
        self._names = frozenset(function.name for function in functions)
        self._many = many
        self._marker = OPENING if self._style == "hermes" else PYTHON_TAG
        self._buffer = ""  # what no state has consumed
        self._at = 0  # characters consumed
        self._aside = ""  # consumed, and content after all if what follows is no call
        self._is_marked = False
        self._is_after_call = self._has_content = False
        self._brackets = _Brackets('"')
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._state: Callable[[], bool] = self._thought if is_thinking else self._start

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """What is certain of the content, and of the calls, with this much more text."""
        self._buffer += text
        while not self.is_done and self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, list[CallDelta]]:
        """What was held back; the end of the answer."""
        if self._state in (self._json_call, self._python_call):
            self._say(self._aside)
        may_be_content = (self._start, self._thought, self._text, self._json_call, self._python_call)
        if self._state in may_be_content and not self.is_done:
            self._say(self._buffer)
        self._consume(len(self._buffer))
        return self._taken()

    def _taken(self) -> tuple[str, list[CallDelta]]:
        found = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return found

    def _consume(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._at += length
        return taken

    def _say(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
            if text and self._has_content:
                text = "\n" + text
            self._is_after_call = not text
        if text:
            self._has_content = True
            self._content.append(text)

    # States. Each consumes what it is sure of and returns whether another shall go on.

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if THINK_OPENING.startswith(text):
            self._state = self._thought if text == THINK_OPENING else self._start
            return text == THINK_OPENING
        space = len(self._buffer) - len(text)
        if text.startswith(THINK_OPENING):
            self._state = self._thought
        elif self._style == "json" and text[0] == "{":
            self._aside, self._is_marked = self._consume(space), False
            self._await_json()
        elif self._style == "pythonic" and text[0] == "[":
            self._aside, self._is_marked = self._consume(space + 1), False
            self._await_python()
        else:
            self._state = self._text
        return True

    def _thought(self) -> bool:
        at = self._buffer.find(THINK_CLOSING)
        if at < 0:
            self._say(self._consume(len(self._buffer) - overlap(self._buffer, THINK_CLOSING)))
            return False
        self._say(self._consume(at + len(THINK_CLOSING)))
        self._state = self._start
        return True

    def _text(self) -> bool:
        at = self._buffer.find(self._marker)
        if at < 0:
            sure = self._buffer[: len(self._buffer) - overlap(self._buffer, self._marker)].rstrip()
            self._say(self._consume(len(sure)))
            return False
        self._say(self._consume(len(self._buffer[:at].rstrip())))
        space_and_marker = self._consume(self._buffer.find(self._marker) + len(self._marker))
        self._aside = space_and_marker if self._style == "hermes" else space_and_marker[: -len(PYTHON_TAG)]
        self._is_marked = True
        if self._style == "pythonic":
            self._state = self._list
        else:
            self._await_json()
        return True

    def _give_up(self) -> bool:
        self._say(self._aside)
        self._state = self._text
        return True

    def _open(self, name: str) -> Call:
        call = Call(name, f"call_{self._answer_id}{len(self.calls):02x}")  # smolagents sorts calls by their ids
        self.calls.append(call)
        self._deltas.append(CallDelta(len(self.calls) - 1, opens=call))
        return call

    def _add(self, arguments: str) -> None:
        if arguments:
            self.calls[-1].arguments += arguments
            self._deltas.append(CallDelta(len(self.calls) - 1, arguments))

    def _end_calls(self) -> bool:
        self._is_after_call = True
        self.is_done = not self._many
        self._state = self._text
        return True

    # JSON, within tags or not.

    def _await_json(self) -> None:
        self._brackets = _Brackets('"')
        self._state = self._json_call

    def _may_call(self, name: str) -> bool:
        return name in self._names or (self._is_marked and bool(name))

    def _json_call(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._give_up()
        if head := _JSON_HEAD.match(self._buffer):
            name = _value(head[1])
            if not self._may_call(name):
                return self._give_up()
            self._open(name).begin = self._at + head.end() + 1
            self._consume(head.end())
            self._brackets = _Brackets('"')
            self._state = self._arguments
            return True
        if not self._is_marked and (key := _JSON_FIRST_KEY.match(self._buffer)) and key[1] not in _CALL_KEYS:
            return self._give_up()  # so that an answer in JSON is not held back
        end = self._brackets.scan(self._buffer)
        if end is None:
            return False
        found = _value(self._buffer[:end])
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or not self._may_call(name):
            return self._give_up()
        arguments = found.get("arguments", found.get("parameters"))
        self._open(name)
        self._add(arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False))
        self._consume(end)
        self._state = self._after_json
        return True

    def _arguments(self) -> bool:
        end = self._brackets.scan(self._buffer)
        self._add(self._consume(len(self._buffer) if end is None else end))
        self.calls[-1].end = self._at
        self._brackets.forget()
        if end is None:
            return False
        self.calls[-1].end -= 1
        self._brackets = _Brackets('"', depth=1)
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        """What the object has behind the arguments; most often nothing."""
        ends = [self._brackets.scan(self._buffer)]
        if self._style == "hermes":
            ends.append(self._buffer.find(CLOSING))  # models forget the last brace
        found = [end for end in ends if end is not None and end >= 0]
        if not found:
            return False
        self._consume(min(found))
        self._state = self._after_json
        return True

    def _after_json(self) -> bool:
        if self._style == "json" and not self._many:
            return self._end_calls()
        text = self._buffer.lstrip()
        space = len(self._buffer) - len(text)
        if self._style == "hermes":
            if len(text) < len(CLOSING) and CLOSING.startswith(text):
                return False
            if text.startswith(CLOSING):
                self._consume(space + len(CLOSING))
            return self._end_calls()
        behind = text[1:].lstrip() if text[:1] in (";", ",") else text
        if not behind:
            return False
        if behind[0] != "{":
            return self._end_calls()
        self._is_after_call = True
        self._aside, self._is_marked = self._consume(space + len(text) - len(behind)), False
        self._await_json()
        return True

    # A Python list.

    def _list(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] != "[":
            return self._give_up()
        self._aside += self._consume(len(self._buffer) - len(text) + 1)
        self._await_python()
        return True

    def _await_python(self) -> None:
        self._brackets = _Brackets("\"'", depth=1)
        self._state = self._python_call

    def _python_call(self) -> bool:
        head = _PYTHON_HEAD.match(self._buffer)
        if head is None:
            return bool(_NO_PYTHON_HEAD.match(self._buffer)) and self._give_up()
        if not self._may_call(head[1]):
            return self._give_up()
        self._brackets.skip(head.end())
        end = self._brackets.scan(self._buffer)
        if end is None:
            return False
        arguments = _keywords(self._buffer[head.end() : end - 1])
        if arguments is None:
            return self._give_up()
        self._open(head[1])
        self._add(arguments)
        self._consume(end)
        self._state = self._after_python
        return True

    def _after_python(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] == "," and self._many:
            self._is_after_call = True
            self._aside = self._consume(len(self._buffer) - len(text) + 1)
            self._await_python()
            return True
        if text[0] in ",]":
            self._consume(len(self._buffer) - len(text) + 1)
        return self._end_calls()


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`, short of all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


class _Brackets:
    """Finds where a value in brackets ends, in a text that grows. Brackets within strings are none."""

    def __init__(self, quotes: str, depth: int = 0) -> None:
        self._quotes = quotes
        self._depth = depth
        self._string = ""  # the quote that opened one
        self._at = 0
        self._num_escaped = 0  # characters to come that a backslash took their meaning from

    def skip(self, at: int) -> None:
        """What is before this need not be scanned."""
        self._at = max(self._at, at)

    def forget(self) -> None:
        """All that was scanned is consumed; the text goes on behind it."""
        self._at = 0

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


def _value(text: str) -> Any:
    """A value as JSON or, where it is none, as Python writes it; None where it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        try:
            return _literal(_parse(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None


def _keywords(text: str) -> str | None:
    """The arguments of a Python call as JSON; None where they are not all literals given by name."""
    try:
        call = _parse(f"_({text})")
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        named: Mapping[str | None, Any] = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        return None if None in named else json.dumps(named, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _parse(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the model's strings
        return ast.parse(text.strip(), mode="eval").body


def _literal(node: ast.expr) -> Any:
    """The value of a literal in which true, false and null may stand for what they are in JSON."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
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


_JSON_NAMES = {"true": True, "false": False, "null": None}
_CALL_KEYS = frozenset({"name", "type", "id", "arguments", "parameters"})
_MARK = re.compile(r"""["'\\{}\[\]()]""")
_JSON_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_JSON_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_PYTHON_HEAD = re.compile(r"\s*([A-Za-z_][\w.:/-]*)\s*\(")
_NO_PYTHON_HEAD = re.compile(r"\s*(?:[^\sA-Za-z_]|[A-Za-z_][\w.:/-]*(?:\s+[^\s(]|[^\s\w.:/(-]))")
