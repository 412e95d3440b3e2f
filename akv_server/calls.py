"""Parting what a model writes into content and calls, while it writes.

Owns what all ways of writing a call have in common; each of them is a parser in `call_formats.py`. Pure text: knows
neither tokens nor grammars (`grammar.py`).
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from akv_server.tools import FUNCTION, MAX_NAME, TEXT_MARKS, THINK_CLOSING, THINK_OPENING, Function
from akv_server.values import Brackets, overlap


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
    """What call number `index` got: some of its arguments, or its beginning. `at`: of the content that was found with
    it, so many characters stand before it."""

    index: int
    arguments: str = ""
    opens: Call | None = None
    at: int = 0

    def body(self) -> dict[str, Any]:
        """As it stands in a chunk of a stream."""
        if self.opens is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.opens.name, "arguments": ""}
        return {"index": self.index, "id": self.opens.id, "type": "function", "function": function}


def in_order(content: str, deltas: Sequence[CallDelta]) -> Iterator[tuple[str, list[CallDelta]]]:
    """What a parser found at once, as it stood in the answer: content, and what of calls is behind it."""
    done = 0
    for at, together in groupby(deltas, key=lambda delta: delta.at):
        yield content[done:at], list(together)
        done = at
    if done < len(content) or not deltas:
        yield content[done:], []


class Parser(ABC):
    """Parts an answer into content and calls, as it comes. What it finds does not depend on how the text is cut up.

    Space around a call belongs to nobody. What turns out to be no call is content. Whatever the model thinks first,
    between `<think>` and `</think>`, is content, too; `is_thinking`: the template opened that. `is_held`: a grammar
    admits nothing but calls behind it, so what the end of the answer cuts off is the beginning of one, and no content.

    A piece costs what it is long: what is looked at again with the next one has a bound.
    """

    _marks: ClassVar[tuple[str, ...]]
    """What opens calls anywhere in an answer."""
    _closing: ClassVar[str] = ""
    """What may stand behind them."""
    _quotes: ClassVar[str] = '"'
    _first: ClassVar[str] = ""
    """The letter with which an answer begins that is calls without a mark; they have to be of functions it has."""

    def __init__(
        self, functions: Sequence[Function], *, many: bool, is_thinking: bool = False, is_held: bool = False
    ) -> None:
        self.calls: list[Call] = []
        self.is_done = False
        """The only call that may be made is complete."""
        self._answer_id = uuid.uuid4().hex[:22]
        self._functions = {function.name: function for function in functions}
        self._many = many
        self._is_held = is_held
        self._buffer = ""  # what no state has consumed
        self._at = 0  # characters consumed
        self._aside = ""  # consumed, and content after all if what follows is no call
        self._is_marked = False  # whether what may be a call has a mark
        self._is_sure = False  # whether it is one
        self._is_after_call = self._has_content = False
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
        if not self.is_done:
            if not self._is_sure and (not self._is_held or self._state == self._thought):
                self._say(self._aside)
                self._say(self._buffer)
            self._cut_off()
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

    def _skip_space(self) -> None:
        """It belongs to what follows if that is content."""
        self._aside += self._consume(len(self._buffer) - len(self._buffer.lstrip()))

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
        self._skip_space()
        if len(self._buffer) < len(THINK_OPENING) and THINK_OPENING.startswith(self._buffer):
            return False
        if self._buffer.startswith(THINK_OPENING):
            self._say(self._aside)
            self._aside = ""
            self._state = self._thought
        elif self._buffer[0] == self._first:
            self._await(self._calls, self._aside, is_marked=False)
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
        self._skip_space()
        found = [(at, mark) for mark in self._marks if (at := self._buffer.find(mark)) >= 0]
        held = max(overlap(self._buffer, mark) for mark in self._marks)
        at, mark = min(found, default=(len(self._buffer) - held, ""))
        if text := self._consume(len(self._buffer[:at].rstrip())):
            self._say(self._aside + text)
            self._aside = ""
        self._skip_space()
        if not mark:
            return False
        self._consume(len(mark))
        aside = self._aside + mark if mark in TEXT_MARKS else self._aside
        self._await(self._behind(mark), aside, is_marked=mark != FUNCTION)
        return True

    def _behind(self, mark: str) -> Callable[[], bool]:
        """The state behind a mark."""
        return self._calls

    @abstractmethod
    def _calls(self) -> bool:
        """The state in which a call may begin: behind a mark, or at the beginning of an answer."""

    def _await(self, state: Callable[[], bool], aside: str, *, is_marked: bool) -> None:
        """A call may follow; `aside` was consumed."""
        self._aside, self._is_marked, self._is_sure = aside, is_marked, False
        self._brackets = Brackets(self._quotes)
        self._state = state

    def _may_call(self, name: str) -> bool:
        return name in self._functions or (self._is_marked and 0 < len(name) <= MAX_NAME)

    def _give_up(self) -> bool:
        said = self._aside.rstrip()
        self._say(said)
        self._aside = self._aside[len(said) :]
        self._state = self._text
        return True

    def _open(self, name: str) -> Call:
        call = Call(name, self._new_id())
        self.calls.append(call)
        self._found(opens=call)
        self._aside, self._is_sure = "", True
        return call

    def _new_id(self) -> str:
        return f"call_{self._answer_id}{len(self.calls):02x}"  # smolagents sorts calls by their ids

    def _add(self, arguments: str) -> None:
        if arguments:
            self.calls[-1].arguments += arguments
            self._found(arguments)

    def _found(self, arguments: str = "", opens: Call | None = None) -> None:
        self._deltas.append(CallDelta(len(self.calls) - 1, arguments, opens, sum(map(len, self._content))))

    def _cut_off(self) -> None:  # noqa: B027  (most have nothing to do)
        """The answer ends, perhaps within a call."""

    def _another(self, state: Callable[[], bool]) -> bool:
        """Behind a call in a list: a comma and the next one, or its end."""
        self._skip_space()
        if not self._buffer:
            return False
        if self._buffer[0] == "," and self._many:
            self._is_after_call = True
            self._await(state, self._consume(1), is_marked=self._is_marked)
            return True
        if self._buffer[0] in ",]":
            self._consume(1)
        return self._end_calls()

    def _end_calls(self) -> bool:
        self._is_after_call = True
        self._is_sure = self._closing in TEXT_MARKS
        self.is_done = not self._many and not self._is_sure
        self._state = self._closed
        return True

    def _closed(self) -> bool:
        """The state behind calls."""
        self._skip_space()
        if len(self._buffer) < len(self._closing) and self._closing.startswith(self._buffer):
            return False
        if self._buffer.startswith(self._closing):
            self._consume(len(self._closing))
        self._is_sure = False
        self.is_done = not self._many
        self._state = self._text
        return True
