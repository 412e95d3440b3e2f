"""The reading half of a streamed completion: bytes to server-sent events, to what each adds, to the whole reply.

Does no I/O: `streams.py` hands over the bytes as they come. Knows the shape of a chunk, and no session.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from akv_sdk import types
from akv_sdk._wire import api_error, fault
from akv_sdk.errors import BadReply


class SSEParser:
    """Cuts bytes into the data of server-sent events, however the bytes were split (WHATWG HTML, section 9.2).

    Lines end with CR, LF or CRLF; comments and fields other than `data` are skipped; an event that no blank line ended
    is dropped with the parser.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # begun, not ended
        self._data: list[str] = []  # of the event begun
        self._after_cr = False
        self._is_first_line = True

    def push(self, chunk: bytes) -> list[str]:
        """Data of the events that `chunk` completes."""
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        *ended, rest = re.split(rb"\r\n|\r|\n", chunk)
        events: list[str] = []
        for tail in ended:
            self._line += tail
            line = self._line.decode(errors="replace")
            self._line.clear()
            if self._is_first_line:
                line = line.removeprefix("\ufeff")
                self._is_first_line = False
            name, _, value = line.partition(":")
            if line == "":
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif name == "data":
                self._data.append(value.removeprefix(" "))
        self._line += rest
        return events


@dataclass(frozen=True, slots=True)
class Event:
    """What one chunk of a stream adds to one choice. Tool calls come in pieces and are whole only in the end."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    choice: int = 0
    logprobs: dict[str, Any] | None = None


class _FunctionDelta(types.Reply):
    name: str | None = None
    arguments: str | None = None


class _ToolCallDelta(types.Reply):
    index: int
    id: str | None = None
    function: _FunctionDelta | None = None


class _Delta(types.Reply):
    content: str | None = None
    tool_calls: list[_ToolCallDelta] | None = None


class _ChunkChoice(types.Reply):
    index: int = 0
    text: str | None = None  # of a text completion
    delta: _Delta | None = None  # of a chat
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: dict[str, list[Any] | None] | None = None


class _Chunk(types.Reply):
    id: str | None = None
    model: str | None = None
    choices: list[_ChunkChoice] | None = None
    usage: types.Usage | None = None
    akv: types.AkvReply | None = None
    error: types.ErrorBody | None = None


class StreamReader:
    """Reads the bytes of a streamed completion: events as they come, and at the end the same Completion that the
    request would have had without streaming."""

    def __init__(self) -> None:
        self._parser = SSEParser()
        self._head: dict[str, Any] = {}  # id, model, usage, akv
        self._choices: dict[int, _ChoiceParts] = {}
        self.final: types.Completion | None = None  # set once the stream has ended well

    def push(self, chunk: bytes) -> list[Event]:
        """Events that `chunk` completes. Raises the server's error where one stands in the stream, and BadReply."""
        events: list[Event] = []
        for data in self._parser.push(chunk):
            if self.final is not None:
                break
            if data == "[DONE]":
                self.final = self._assemble()
            else:
                events += self._read(data)
        return events

    def _read(self, data: str) -> list[Event]:
        try:
            chunk = _Chunk.model_validate_json(data)
        except ValidationError as error:
            param, message = fault(error)
            raise BadReply(f"a chunk of the stream is not one of this API: {param or 'body'}: {message}") from None
        if chunk.error is not None:
            raise api_error(chunk.error)
        head = {name: getattr(chunk, name) for name in ("id", "model", "usage", "akv")}
        self._head |= {name: value for name, value in head.items() if value is not None}
        for choice in chunk.choices or ():
            self._choices.setdefault(choice.index, _ChoiceParts()).add(choice)
        return [_event(choice) for choice in chunk.choices or ()]

    def _assemble(self) -> types.Completion:
        choices = [parts.whole(index) for index, parts in sorted(self._choices.items())]
        try:
            return types.Completion.model_validate({**self._head, "choices": choices})
        except ValidationError as error:
            param, message = fault(error)
            raise BadReply(f"the stream as a whole is not a completion: {param}: {message}") from None


def _event(choice: _ChunkChoice) -> Event:
    text = choice.text if choice.delta is None else choice.delta.content
    return Event(text or "", choice.token_ids or [], choice.finish_reason, choice.index, choice.logprobs)


@dataclass(slots=True)
class _ChoiceParts:
    is_chat: bool = False
    text: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    token_ids: list[int] | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish_reason: str | None = None

    def add(self, choice: _ChunkChoice) -> None:
        self.text.append(_event(choice).text)
        if choice.delta is not None:
            self.is_chat = True
            for call in choice.delta.tool_calls or ():
                self._add_tool_call(call)
        if choice.token_ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids.extend(choice.token_ids)
        for name, values in (choice.logprobs or {}).items():
            if values is not None:
                self.logprobs.setdefault(name, []).extend(values)
        self.finish_reason = choice.finish_reason or self.finish_reason

    def _add_tool_call(self, delta: _ToolCallDelta) -> None:
        """The first piece of a call carries its id and name, later ones more of the arguments."""
        call = self.tool_calls.setdefault(delta.index, {"type": "function", "function": {"name": "", "arguments": ""}})
        if delta.id is not None:
            call["id"] = delta.id
        if delta.function is not None:
            call["function"]["name"] += delta.function.name or ""
            call["function"]["arguments"] += delta.function.arguments or ""

    def whole(self, index: int) -> dict[str, Any]:
        """The choice as a reply without streaming has it."""
        text = "".join(self.text)
        choice: dict[str, Any] = {"index": index, "finish_reason": self.finish_reason, "token_ids": self.token_ids}
        if self.logprobs:
            choice["logprobs"] = self.logprobs
        if not self.is_chat:
            return choice | {"text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.tool_calls:
            message["content"] = text or None
            message["tool_calls"] = [call for _, call in sorted(self.tool_calls.items())]
        return choice | {"message": message}
