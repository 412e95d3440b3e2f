"""Conversations for tests of policies: real trajectories with their observations marked, and spans for any messages.

A token is a character here, and the template writes `<role>` before and `</>` behind each message, so that what a span
means can be read off the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from akv_sdk.policies import Context, Drop
from akv_sdk.types import Block, MessageSpan, Op

JSON = dict[str, Any]
_BLOCK = re.compile(r'<ephemeral_observation id="([^"]*)">(.*)</ephemeral_observation>', re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def trajectories(shared: Path) -> dict[str, list[JSON]]:
    """All of them by name, every observation marked with tags of its own."""
    found = {}
    for path in sorted((shared / "trajectories").glob("*.json")):
        messages = json.loads(path.read_text())["messages"]
        found[path.stem] = [
            {**m, "content": tagged(f"obs-{i}", m["content"])} if m.get("is_observation") else m
            for i, m in enumerate(messages)
        ]
    return found


def tagged(block: str, text: str) -> str:
    return f'<ephemeral_observation id="{block}">{text}</ephemeral_observation>'


def call(tool: str, call_id: str, **arguments: Any) -> JSON:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(call_id: str, text: str, **fields: Any) -> JSON:
    return {"role": "tool", "tool_call_id": call_id, "content": text, **fields}


def text_of(messages: Sequence[JSON]) -> str:
    """The stream: a character is a token. The arguments of calls follow an assistant's content."""
    return "".join(f"<{m['role']}>{m['content'] or ''}{_calls(m)}</>" for m in messages)


def _calls(message: JSON) -> str:
    return "".join(f"@{c['function']['arguments']}" for c in message.get("tool_calls") or [])


def spans_of(messages: Sequence[JSON]) -> list[MessageSpan]:
    spans, at = [], 0
    for i, message in enumerate(messages):
        content = message["content"] or ""
        content_start = at + len(f"<{message['role']}>")
        content_end = content_start + len(content)
        blocks = []
        for kind, pattern, group in (("observation", _BLOCK, 2), ("thinking", _THINK, 1)):
            for n, found in enumerate(pattern.finditer(content)):
                if kind == "thinking" and message["role"] != "assistant":
                    continue
                start, end = (content_start + edge for edge in found.span(group))
                name = found[1] if kind == "observation" else f"thinking-{n}"
                blocks.append(Block(id=name, start=start, end=end, visible=True, kind=kind))
        end = content_end
        for called in message.get("tool_calls") or []:
            start, end = end + 1, end + 1 + len(called["function"]["arguments"])
            blocks.append(
                Block(id="", start=start, end=end, visible=True, kind="tool_input", tool_call_id=called["id"])
            )
        spans.append(
            MessageSpan(
                message=i,
                role=message["role"],
                start=at,
                end=end + len("</>"),
                content_start=content_start,
                content_end=content_end,
                tool_call_id=message.get("tool_call_id"),
                blocks=blocks,
            )
        )
        at = end + len("</>")
    return spans


def context_of(messages: Sequence[JSON], ops: Iterable[Op] = (), **fields: Any) -> Context:
    return Context(messages, spans_of(messages), tuple(ops), **fields)


def ops_of(drops: Iterable[Drop], at: int) -> list[Op]:
    return [Op(op="drop", at=at, start=s, end=e, repos=True) for drop in drops for s, e in drop.target.parts]


def visible_text(messages: Sequence[JSON], ops: Iterable[Op]) -> str:
    """What the model sees, worked out character by character."""
    text = text_of(messages)
    seen = [True] * len(text)
    for op in ops:
        if op.op in ("drop", "restore") and op.end is not None:
            seen[op.start : op.end] = [op.op == "restore"] * (op.end - op.start)
    return "".join(letter for letter, is_seen in zip(text, seen, strict=True) if is_seen)
