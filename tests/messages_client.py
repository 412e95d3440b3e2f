"""Asking for messages with the real anthropic package, of a model that may be told what to answer."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic

from tests.scripted import Script
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
    left = list(answers)
    monkeypatch.setattr(server.service, "_grammars", Script(server.service, lambda: (left.pop(0), lambda: None)))
