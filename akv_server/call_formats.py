"""The ways in which models write calls, each with its parser.

Owns one parser per `Style` of `tools.py`; a new one is a class here, a line in `format_of` and a rule in `grammar.py`.

    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>               anywhere, and several
    xml           <tool_call><function=f><parameter=x>1</parameter></function></tool_call>  anywhere, and several
    mistral_args  [TOOL_CALLS]f[ARGS]{"x": 1}                                               anywhere, and several
    mistral_list  [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, …]                    anywhere
    json          {"name": "f", "parameters": {"x": 1}}; {"name": …}                        the whole answer
    pythonic      [f(x=1), g()]                                                             the whole answer

`json` and `pythonic` may stand behind `<|python_tag|>` or, with `<|python_end|>` after them, `<|python_start|>`
anywhere; without those nothing marks them, so an answer counts as one only if it calls a function that the request has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from akv_server.calls import Parser
from akv_server.tools import (
    CLOSING,
    FUNCTION,
    FUNCTION_END,
    MAX_NAME,
    OPENING,
    PARAMETER,
    PARAMETER_END,
    PYTHON_END,
    PYTHON_START,
    PYTHON_TAG,
    TOOL_CALLS,
    CallFormat,
    Function,
    Style,
)
from akv_server.values import TEXT, Brackets, argument_of, keywords_of, overlap, types_of, value_of


def parser_of(
    written: CallFormat,
    functions: Sequence[Function],
    *,
    many: bool,
    is_thinking: bool = False,
    is_held: bool = False,
) -> Parser:
    """A parser for one answer of a model that writes calls so. `many`: it may make more than one; the rest as `Parser`
    has it."""
    return _PARSERS[written.style](functions, many=many, is_thinking=is_thinking, is_held=is_held)


class _Hermes(Parser):
    """Objects that name a function and its arguments, each between tags."""

    _marks: ClassVar[tuple[str, ...]] = (OPENING,)
    _closing = CLOSING

    def _calls(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        if self._buffer[0] != "{":
            return self._give_up()
        if head := _JSON_HEAD.match(self._buffer):
            return self._open_arguments(value_of(head[1]), head.end())
        if _LONG_JSON_NAME.match(self._buffer):
            return self._give_up()
        if not self._is_marked and _OTHER_JSON_KEY.match(self._buffer):
            return self._give_up()  # so that an answer in JSON is not held back
        end = self._brackets.scan(self._buffer)
        if end is None:
            return False
        found = value_of(self._buffer[:end])
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or not self._may_call(name):
            return self._give_up()
        arguments = found.get("arguments", found.get("parameters"))
        self._open(name)
        self._add(arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False))
        self._consume(end)
        self._state = self._behind_call
        return True

    def _open_arguments(self, name: str, at: int) -> bool:
        """The object of the arguments begins in the buffer at `at`."""
        if not self._may_call(name):
            return self._give_up()
        self._open(name).begin = self._at + at + 1
        self._consume(at)
        self._brackets = Brackets(self._quotes)
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        end, at = self._brackets.scan(self._buffer), self._at
        self._add(self._consume(len(self._buffer) if end is None else end))
        self.calls[-1].end = self._at
        if end is None:
            self._brackets.forget(self._at - at)
            return False
        self.calls[-1].end -= 1
        self._brackets = Brackets(self._quotes, depth=1)
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        """What the object has behind the arguments; most often nothing."""
        end = self._brackets.scan(self._buffer)
        closing = self._buffer.find(CLOSING) if self._closing == CLOSING else -1  # models forget the last brace
        found = [at for at in (end, closing) if at is not None and at >= 0]
        if not found:
            done = len(self._buffer) - overlap(self._buffer, CLOSING)
            self._consume(done)
            self._brackets.forget(done)
            return False
        self._consume(min(found))
        self._state = self._behind_call
        return True

    def _behind_call(self) -> bool:
        return self._end_calls()


class _Json(_Hermes):
    """The same without tags."""

    _marks = (PYTHON_TAG, PYTHON_START)
    _closing = PYTHON_END
    _first = "{"

    def _behind_call(self) -> bool:
        if not self._many:
            return self._end_calls()
        self._skip_space()
        behind = self._buffer[1:].lstrip() if self._buffer[:1] in (";", ",") else self._buffer
        if not behind:
            return False
        if behind[0] != "{":
            return self._end_calls()
        self._is_after_call = True
        self._await(self._calls, self._consume(len(self._buffer) - len(behind)), is_marked=False)
        return True


class _MistralList(_Hermes):
    """The same in a list."""

    _marks = (TOOL_CALLS,)
    _closing = ""

    def _behind(self, mark: str) -> Callable[[], bool]:
        return self._list

    def _list(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        if self._buffer[0] == "[":
            self._aside += self._consume(1)
        self._state = self._calls
        return True

    def _behind_call(self) -> bool:
        return self._another(self._calls)

    def _new_id(self) -> str:
        return f"{self._answer_id[:7]}{len(self.calls):02x}"  # the templates refuse any but 9 letters and digits


class _MistralArgs(_MistralList):
    """A name and an object of arguments, and before each the mark."""

    def _behind(self, mark: str) -> Callable[[], bool]:
        return self._calls

    def _calls(self) -> bool:
        self._skip_space()
        if head := _MISTRAL_HEAD.match(self._buffer):
            return self._open_arguments(head[1], head.end())
        return not _MISTRAL_HEAD_BEGUN.fullmatch(self._buffer) and self._give_up()

    def _rest(self) -> bool:
        return self._end_calls()


class _Python(Parser):
    """A list of calls as Python has them, with arguments by name."""

    _marks = (PYTHON_TAG, PYTHON_START)
    _closing = PYTHON_END
    _first = "["
    _quotes = "\"'"

    def _calls(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        if self._buffer[0] != "[":
            return self._give_up()
        self._aside += self._consume(1)
        self._state = self._call
        return True

    def _call(self) -> bool:
        self._skip_space()
        head = _PYTHON_HEAD.match(self._buffer)
        if head is None:
            return not _PYTHON_HEAD_BEGUN.fullmatch(self._buffer) and self._give_up()
        if not self._may_call(head[1]):
            return self._give_up()
        end = self._brackets.scan(self._buffer)
        if end is None:
            return False
        arguments = keywords_of(self._buffer[head.end() : end - 1])
        if arguments is None:
            return self._give_up()
        self._open(head[1])
        self._add(arguments)
        self._consume(end)
        self._state = self._behind_call
        return True

    def _behind_call(self) -> bool:
        return self._another(self._call)


class _Xml(Parser):
    """Functions and parameters as tags. What a parameter's text stands for, its schema says. A model that is in a
    hurry leaves out the outer tag, or writes several functions into one."""

    _marks = (OPENING, FUNCTION)
    _closing = CLOSING

    def _behind(self, mark: str) -> Callable[[], bool]:
        return self._name if mark == FUNCTION else self._calls

    def _calls(self) -> bool:
        self._skip_space()
        if self._buffer.startswith(FUNCTION):
            self._aside += self._consume(len(FUNCTION))
            self._state = self._name
            return True
        return not FUNCTION.startswith(self._buffer) and self._give_up()

    def _name(self) -> bool:
        if _NAME_BEGUN.fullmatch(self._buffer):
            return False
        head = _NAME_HEAD.match(self._buffer)
        name = head[1] if head else ""
        if not self._may_call(name):
            return self._give_up()
        self._open(name)
        self._schema = self._functions[name].parameters if name in self._functions else {}
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._add("{")
        self._separator = ""
        self._consume(len(name) + 1)
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Before a parameter, or behind the last one."""
        self._skip_space()
        text = self._buffer
        if head := _PARAMETER_HEAD.match(text):
            self._consume(head.end())
            self._add(f"{self._separator}{json.dumps(head[1], ensure_ascii=False)}: ")
            self._separator = ", "
            self._types = types_of(self._properties.get(head[1]), self._schema)
            self._state = self._begin_value
        elif text.startswith(FUNCTION_END):
            self._consume(len(FUNCTION_END))
            self._add("}")
            self._state = self._behind_call
        elif text.startswith(CLOSING):
            self._add("}")
            return self._end_calls()
        elif _PARAMETER_BEGUN.fullmatch(text) or any(tag.startswith(text) for tag in _TAGS):
            return False
        else:  # means nothing
            at = text.find("<", 1)
            self._consume(at if at > 0 else len(text))
        return True

    def _begin_value(self) -> bool:
        """A line end on either side of a value belongs to the tags."""
        if not self._buffer:
            return False
        self._consume(self._buffer.startswith("\n"))
        self._add('"' if self._types == TEXT else "")
        self._held = ""
        self._state = self._value
        return True

    def _value(self) -> bool:
        at = self._buffer.find(PARAMETER_END)
        if at < 0:
            held = max(overlap(self._buffer, mark) for mark in (PARAMETER_END, "\n" + PARAMETER_END))
            self._take(self._consume(len(self._buffer) - held))
            return False
        self._take(self._consume(at).removesuffix("\n"))
        self._consume(len(PARAMETER_END))
        self._add('"' if self._types == TEXT else argument_of(self._held, self._types))
        self._state = self._between
        return True

    def _take(self, text: str) -> None:
        if self._types == TEXT:
            self._add(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._held += text

    def _cut_off(self) -> None:
        if self._state == self._value:
            self._take(self._buffer)

    def _behind_call(self) -> bool:
        self._skip_space()
        if self._many and self._buffer.startswith(FUNCTION):
            self._is_after_call = True
            self._await(self._name, self._consume(len(FUNCTION)), is_marked=self._is_marked)
            return True
        return not (self._many and FUNCTION.startswith(self._buffer)) and self._end_calls()


_PARSERS: dict[Style, type[Parser]] = {
    "hermes": _Hermes,
    "xml": _Xml,
    "json": _Json,
    "pythonic": _Python,
    "mistral_list": _MistralList,
    "mistral_args": _MistralArgs,
}
# Names and space have bounds, so that what is matched again with each piece has.
_SPACE = r"\s{0,64}"
_NAME = rf"[\w.:/-]{{1,{MAX_NAME}}}"
_PYTHON_NAME = rf"[A-Za-z_][\w.:/-]{{0,{MAX_NAME - 1}}}"
_JSON_NAME = rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}'
_JSON_CHAR = r'(?:[^"\\]|\\.)'
_JSON_HEAD = re.compile(
    rf'{_JSON_NAME}("{_JSON_CHAR}{{0,{MAX_NAME}}}"){_SPACE},{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
_LONG_JSON_NAME = re.compile(rf'{_JSON_NAME}"{_JSON_CHAR}{{{MAX_NAME + 1}}}')
_OTHER_JSON_KEY = re.compile(rf'\{{{_SPACE}"(?!(?:name|type|id|arguments|parameters)")(?:[^"\\]{{0,10}}"|[^"\\]{{11}})')
_MISTRAL_HEAD = re.compile(rf"({_NAME}){_SPACE}(?:\[CALL_ID\]{_SPACE}\w{{0,64}}{_SPACE})?(?:\[ARGS\]{_SPACE})?(?=\{{)")
_MISTRAL_HEAD_BEGUN = re.compile(rf"(?:{_NAME}{_SPACE}(?:\[[\w\s\]\[]{{0,300}})?)?")
_PYTHON_HEAD = re.compile(rf"({_PYTHON_NAME}){_SPACE}\(")
_PYTHON_HEAD_BEGUN = re.compile(rf"(?:{_PYTHON_NAME}{_SPACE})?")
_NAME_HEAD = re.compile(rf"({_NAME})>")
_NAME_BEGUN = re.compile(rf"(?:{_NAME})?")
_TAGS = (PARAMETER, FUNCTION_END, CLOSING)
_PARAMETER_HEAD = re.compile(PARAMETER + r"([^>\n]{1,1024})>")
_PARAMETER_BEGUN = re.compile(PARAMETER + r"[^>\n]{0,1024}")
