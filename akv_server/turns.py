"""A conversation made ready for a template, and where each message and its content lie in the text it makes of them.

Owns refusing messages of the wrong shape, saying in words what a template has none for (tools, calls), and hiding
special tokens in what the caller wrote. Finds places by letting the template write the conversation once more with one
thing changed, so nothing is assumed about how it writes. Knows no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from akv_server.blocks import CallRange
from akv_server.errors import AkvError, invalid
from akv_server.identity import Message, calls_of, check_marking, has_input, role_of, text_of
from akv_server.nesting import check_unicode, strings_in
from akv_server.templates import Template


@dataclass(frozen=True, slots=True)
class Escape:
    """Hides special tokens in a caller's strings, so that only a template's own are parsed.

    `special_texts` has those whose text contains another's before it; each becomes its number there between two
    `letter`s, a noncharacter that none of the strings holds.
    """

    letter: str
    special_texts: Sequence[str]

    def hide(self, text: str) -> str:
        for i, special in enumerate(self.special_texts):
            if special in text:
                text = text.replace(special, f"{self.letter}{i}{self.letter}")
        return text

    def restore(self, text: str) -> str:
        if self.letter not in text:
            return text
        parts = text.split(self.letter)
        parts[1::2] = [self.special_texts[int(part)] if part.isdecimal() else part for part in parts[1::2]]
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, checked. `role` is as the template gets it, `given_role` as the caller wrote it; `text` is the
    content and `extra` what we add behind it, where the template has no words for it; `fields` are the others."""

    role: str
    given_role: str
    text: str = ""
    extra: str = ""
    calls: Sequence[Message] = ()
    fields: Message | None = None


class Turns:
    """One conversation for one template. `turns` are the caller's messages. Strings that `run` gives, and indexes into
    them, are of the escaped text: `escape.restore` makes it what the template would have written."""

    def __init__(
        self,
        template: Template,
        special_texts: Sequence[str],
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> None:
        """Raises AkvError("invalid_request") naming the field that has the wrong shape or is no Unicode."""
        if not messages:
            raise invalid("messages", "a conversation needs at least one message")
        self.turns = [_turn(message, f"messages[{i}]", template) for i, message in enumerate(messages)]
        for i, tool in enumerate(tools or ()):
            if not isinstance(tool, dict):
                raise invalid(f"tools[{i}]", "a tool is an object")
        strings = list(strings_in(list(tools or ()), "tools"))
        for i, turn in enumerate(self.turns):
            at = f"messages[{i}]"
            strings += strings_in(turn.fields, at)
            strings += strings_in(turn.calls, f"{at}.tool_calls")
            strings.append((f"{at}.content", turn.text))
        for at, text in strings:
            check_unicode(text, at)
        letters = map(chr, chain(_NONCHARACTERS, _PRIVATE_USE))
        unused = (letter for letter in letters if not any(letter in text for _, text in strings))
        try:
            letter, self._mark, self._sentinel = islice(unused, 3)
        except ValueError:
            raise invalid("messages", "the text uses up every private character") from None
        self.escape = Escape(letter, special_texts)
        self._template = template
        self._all = self.turns if template.knows_tools or not tools else _with_tools(self.turns, tools)
        self._num_own = len(self._all) - len(self.turns)  # messages of ours before the caller's first
        self._tools = _map(list(tools), self.escape.hide) if tools else None
        self._messages = [self._message(turn) for turn in self._all]

    def _message(self, turn: Turn) -> Message:
        message = {**(turn.fields or {}), "role": turn.role}
        if turn.calls and self._template.knows_calls:
            message["tool_calls"] = turn.calls
        hidden: Message = _map({**message, "content": turn.text + turn.extra}, self.escape.hide)
        return hidden

    def run(
        self, messages: Sequence[Message] | None = None, *, add_generation_prompt: bool = False, marks: bool = False
    ) -> str:
        """The template's text, with a mark before each message if asked. `messages` stand in for those of the
        conversation. Raises AkvError where the template fails."""
        messages = self._messages if messages is None else messages
        index_of = {id(message): i - self._num_own for i, message in enumerate(messages)}

        def mark(item: object) -> str:
            index = index_of.get(id(item), -1)
            return f"{self._mark}{index}{self._mark}" if index >= 0 else ""

        return self._template.run(
            messages, self._tools, add_generation_prompt=add_generation_prompt, mark=mark if marks else None
        )

    def starts(self, whole: str, messages: Sequence[Message] | None = None) -> list[int]:
        """Where in `whole` the text of each message starts, and at last where that of the last one ends."""
        messages = self._messages if messages is None else messages
        found: dict[int, int] = {}
        plain: list[str] = []
        length = 0
        for i, part in enumerate(self.run(messages, marks=True).split(self._mark)):
            if i % 2:
                found[int(part)] = length
            else:
                plain.append(part)
                length += len(part)
        text = "".join(plain)
        if not whole.startswith(text):  # the marks changed what the template did, or its end depends on the prompt
            text = self.run(messages)
            found = {}
        starts = [0]
        for i in range(1, len(self.turns)):
            at = found[i] if i in found else self._start_by_prefix(whole, messages[: self._num_own + i])
            starts.append(max(at, starts[-1]))
        return [*starts, max(_num_common(whole, text), starts[-1])]

    def _start_by_prefix(self, whole: str, before: Sequence[Message]) -> int:
        """For templates that do not simply go over the messages in a loop."""
        try:
            return _num_common(whole, self.run(before))
        except AkvError:
            return 0

    def contents(self, whole: str, starts: list[int]) -> list[tuple[int, int]]:
        """Where in `whole` the content of each message lies, whatever the template made of it: between what it writes
        before and after a content that is a mere sentinel."""
        sentinels = [f"{self._sentinel}{i}{self._sentinel}" for i in range(-self._num_own, len(self.turns))]
        stand_ins = [
            {**message, "content": sentinel + self.escape.hide(turn.extra)}
            for message, sentinel, turn in zip(self._messages, sentinels, self._all, strict=True)
        ]
        try:
            model = self.run(stand_ins)
            model_starts = self.starts(model, stand_ins)
        except AkvError:  # the template looks into the content
            model, model_starts = "", [0] * len(starts)
        found: list[tuple[int, int]] = []
        for i, turn in enumerate(self.turns):
            low, high = starts[i], starts[i + 1]
            written = whole[low:high]
            before, sentinel, after = model[model_starts[i] : model_starts[i + 1]].partition(
                sentinels[self._num_own + i]
            )
            if sentinel:
                begin = _num_common(written, before)
                end = len(written) - _num_common(written[::-1], after[::-1])
            else:
                text = self.escape.hide(turn.text.strip())
                begin = written.rfind(text) if text else len(written)
                begin, end = (len(written), len(written)) if begin < 0 else (begin, begin + len(text))
            found.append((low + begin, low + max(begin, end)))
        return found

    def inputs(self, whole: str) -> dict[int, list[CallRange]]:
        """By message, `(id, begin, end)` of each of its tool calls: where in `whole` the inside of its arguments lies.

        Only those that the template writes as a JSON object; others have no place of their own in the text. Found by
        letting it write the conversation with other arguments: what is the same in both surrounds them.
        """
        if not any(turn.calls for turn in self._all):
            return {}
        try:
            model = self.run([self._with_other_inputs(i) for i in range(len(self._all))])
        except AkvError:  # the template looks into the arguments
            return {}
        found: dict[int, list[CallRange]] = {}
        at = past = 0  # how far both texts are the same, arguments aside
        for match in re.finditer(f"{self._sentinel}([0-9]+),([0-9]+){self._sentinel}", model):
            begin = model.rfind("{", past, match.start())
            end = _end_of_object(model, begin)
            around = model[past:begin]
            here = at + len(around)
            stop = _end_of_object(whole, here) if begin >= 0 and whole.startswith(around, at) else None
            if end is None or stop is None:
                break
            call = self._all[int(match[1])].calls[int(match[2])]
            found.setdefault(int(match[1]) - self._num_own, []).append((call.get("id"), here + 1, stop - 1))
            at, past = stop, end
        return found

    def _with_other_inputs(self, i: int) -> Message:
        """A message as the template gets it, with a sentinel for each call's arguments."""
        turn, hide = self._all[i], self.escape.hide
        if not turn.calls:
            return self._messages[i]
        calls = [
            {**call, "function": {**call["function"], "arguments": {f"{self._sentinel}{i},{j}{self._sentinel}": 0}}}
            if has_input(call)
            else call
            for j, call in enumerate(_map(turn.calls, hide))
        ]
        if self._template.knows_calls:
            return {**self._messages[i], "tool_calls": calls}
        return {**self._messages[i], "content": hide(turn.text) + _calls_text(turn.text, calls)}


def _turn(message: Message, at: str, template: Template) -> Turn:
    if not isinstance(message, dict):
        raise invalid(at, "a message is an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{at}.role", "a message has a role")
    text = text_of(message, f"{at}.content")
    for key in ("tool_call_id", "name"):
        if not isinstance(message.get(key), str | None):
            raise invalid(f"{at}.{key}", f"a {key} is a string")
    calls = calls_of(message, f"{at}.tool_calls")
    check_marking(message, at)
    return Turn(
        role=role if template.knows_developer else role_of(role),
        given_role=role,
        text=text,
        extra="" if template.knows_calls else _calls_text(text, calls),
        calls=calls,
        fields={key: value for key, value in message.items() if key not in _NOT_FOR_TEMPLATES},
    )


def _with_tools(turns: list[Turn], tools: Sequence[Message]) -> list[Turn]:
    """The messages for a template that has no words for tools: they stand in the system message."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and a JSON object of arguments:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
    first = turns[0]
    if first.role != "system":
        return [Turn("system", "system", extra=text), *turns]
    return [replace(first, extra=first.extra + ("\n\n" if first.text else "") + text), *turns[1:]]


def _calls_text(text: str, calls: Sequence[Message]) -> str:
    """What stands behind a content for a template that has no words for calls."""
    lines = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return "\n".join(([""] if text and lines else []) + lines)


def _num_common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _end_of_object(text: str, begin: int) -> int | None:
    """Where the JSON object that starts at `begin` ends."""
    if not text.startswith("{", begin):
        return None
    try:
        return _DECODER.raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return None


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map(inner, change) for key, inner in value.items()}
    return [_map(inner, change) for inner in value] if isinstance(value, list) else value


_NONCHARACTERS = range(0xFDD0, 0xFDF0)
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_NOT_FOR_TEMPLATES = frozenset({"content", "tool_calls", "akv", "tags", "is_demo"})
_DECODER = json.JSONDecoder()
