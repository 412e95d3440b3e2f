"""Asking for messages with the real anthropic package, of a model that may be told what to answer.

It is told byte by byte: no tokenizer would cut a text up so, and an answer that the server does not know again when it
comes back is rendered anew, which shows in the tokens prefilled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from anthropic import Anthropic

from akv_server.completions import Completions
from akv_server.grammar import Constraint, Shape
from tests.server import Server

JSON = dict[str, Any]
HELLO: JSON = {"role": "user", "content": "Hello"}
READ: JSON = {
    "name": "read_file",
    "description": "Reads the beginning of a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "limit": {"type": "number"}},
        "required": ["path"],
    },
}
WEATHER: JSON = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
    },
}


def api_of(server: Server, **options: Any) -> Anthropic:
    return Anthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0, **options})


def create(api: Anthropic, streamed: bool, **fields: Any) -> tuple[Any, JSON]:
    """The message, put together by the SDK, and its `akv` object."""
    fields = {"model": "default", "max_tokens": 400, "messages": [HELLO], **fields}
    if not streamed:
        message = api.beta.messages.create(**fields)
        return message, message.akv  # type: ignore[attr-defined]
    akv: JSON = {}
    with api.beta.messages.stream(**fields) as stream:
        for event in stream:
            if event.type == "message_delta":
                akv = event.akv  # type: ignore[attr-defined]
        return stream.get_final_message(), akv


def content(message: Any) -> list[JSON]:
    """Its blocks as JSON has them, without ids."""
    keys = ("type", "text", "thinking", "name", "input")
    return [{key: getattr(block, key) for key in keys if hasattr(block, key)} for block in message.content]


def prompt_tokens(message: Any) -> int:
    usage = message.usage
    assert None not in (usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def says(monkeypatch: pytest.MonkeyPatch, server: Server, *answers: str) -> None:
    """What the server's model answers from now on."""
    monkeypatch.setattr(server.service, "_grammars", Script(server.service, answers))


class Script:
    """Stands where a server's grammars do: holds each answer to the next of the texts."""

    def __init__(self, service: Completions, answers: Sequence[str]) -> None:
        self._num_vocab = service._num_vocab
        self._end_id = min(service.chat.end_ids)
        names = ((service.tokenizer.token_bytes(token_id), token_id) for token_id in range(self._num_vocab))
        self._bytes = {name: token_id for name, token_id in names if len(name) == 1}
        self.answers = list(answers)

    def constraint(self, shape: Shape) -> Callable[[], Constraint]:
        ids = [self._bytes[bytes([byte])] for byte in self.answers.pop(0).encode()]
        return lambda: Said([*ids, self._end_id], self._num_vocab)


class Said(Constraint):
    def __init__(self, ids: list[int], num_vocab: int) -> None:
        self._left = ids[::-1]
        self._num_vocab = num_vocab

    def mask(self) -> Any:
        mask = np.zeros(self._num_vocab, np.bool_)
        mask[self._left[-1]] = True
        return mask

    def take(self, token_id: int) -> bool:
        assert token_id == self._left.pop()
        return not self._left
