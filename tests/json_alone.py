"""A plain openai client and its messages: what any OpenAI-compatible agent sends, and reading what AKV adds to replies.

Knows nothing of the SDK: tests over HTTP by JSON alone use it.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

JSON = dict[str, Any]
SYSTEM: JSON = {"role": "system", "content": "You run the tests of a repository."}
TASK: JSON = {"role": "user", "content": "Find out why the tests fail."}


def chat(api: OpenAI, messages: list[JSON], *, max_tokens: int = 2, **extra: Any) -> Any:
    return api.chat.completions.create(
        model="default",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        extra_body=extra,
    )


def calling(number: int, **arguments: Any) -> JSON:
    function = {"name": "sh", "arguments": json.dumps(arguments or {"command": f"pytest tests/test_{number}.py"})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }


def result(number: int, text: str | None = None, **fields: Any) -> JSON:
    text = f"output {number}: " + "1 failed, 2 passed " * 3 if text is None else text
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text, **fields}


def talk(num_uses: int) -> list[JSON]:
    return [SYSTEM, TASK, *(part for i in range(num_uses) for part in (calling(i), result(i)))]


def clearing(keep: int = 1, trigger: int = 0, **fields: Any) -> JSON:
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": trigger},
        "keep": {"type": "tool_uses", "value": keep},
        **fields,
    }
    return {"edits": [edit]}


def gone(akv: JSON) -> list[tuple[int, int]]:
    """The spans that a reply's history made invisible."""
    return [(op["start"], op["end"]) for op in akv["ops"] if op["op"] == "drop"]


def content(akv: JSON, message: int) -> tuple[int, int]:
    span = akv["spans"][message]
    return span["content_start"], span["content_end"]


def refusal(call: Any) -> tuple[str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        call()
    return refused.value.code, refused.value.param
