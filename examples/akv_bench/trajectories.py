"""Recorded agents: files of several formats, read into the one form in which they are replayed.

    {"messages": […]}                 messages of the chat API; `is_observation` marks reports of tools and environment
    […] or {"messages": […]}          mini-swe-agent's `*.traj.json`
    {"history": […]}                  SWE-agent's `*.traj`; without a history, its `trajectory` of steps

Where nothing is marked, tool results are the observations; where there are none, the user's messages behind the first
answer are, as agents without tool calls have it. Knows nothing of servers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from akv_sdk.policies.context import tags_of

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")  # of a message, as a request has them


class TrajectoryError(ValueError):
    """A file that holds no trajectory. The message names the file, the place in it, and what is wrong there."""

    code = "invalid_trajectory"


@dataclass(frozen=True)
class Trajectory:
    """What an agent said and saw.

    Attributes:
        num_head: messages before its first answer: the system prompt, demonstrations, the task.
        observations: indexes of messages that report what became of an action.
    """

    name: str
    messages: tuple[Message, ...]
    num_head: int
    observations: frozenset[int]

    @property
    def turns(self) -> list[int]:
        """Indexes of its answers, each to all the messages before it."""
        return [i for i, message in enumerate(self.messages) if i >= self.num_head and message["role"] == "assistant"]

    def cut(self, num_turns: int | None = None) -> Trajectory:
        """The first so many turns, or all, and nothing behind the last."""
        end = self.turns[:num_turns][-1] + 1
        return replace(self, messages=self.messages[:end], observations=self.observations & frozenset(range(end)))

    def tagged(self) -> list[Message]:
        """The messages, every observation in `<ephemeral_observation>` tags of its own."""
        return [
            {**m, "content": m["content"].join(tags_of(f"obs-{i}"))} if i in self.observations else m
            for i, m in enumerate(self.messages)
        ]


def read(path: Path) -> Trajectory:
    """The trajectory in a file. Raises TrajectoryError for what is none, OSError where there is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrajectoryError(f"{path}: is not JSON: {error}") from None
    try:
        place, found = _find(data)
        raw = [message for message in found if not _is_exit(message)]
        messages = tuple(_message(f"{place}[{i}]", message) for i, message in enumerate(raw))
        num_head = _num_head(place, messages, raw)
    except _Misfit as misfit:
        raise TrajectoryError(f"{path}: {misfit}") from None
    name = path.name.removesuffix(".json").removesuffix(".traj")
    return Trajectory(name, messages, num_head, _observations(messages, raw, num_head))


class _Misfit(Exception):
    """What is wrong, behind the place in the file."""


def _find(data: Any) -> tuple[str, list[Any]]:
    """The list of messages in a file of any format, and what it is called there."""
    if isinstance(data, list):
        return "", data
    if not isinstance(data, dict):
        raise _Misfit("holds neither an object nor a list of messages")
    for name in ("messages", "history"):
        if isinstance(data.get(name), list):
            return name, data[name]
    if isinstance(data.get("trajectory"), list):
        return "trajectory", _from_steps(data["trajectory"])
    raise _Misfit("has none of `messages`, `history` and `trajectory`")


def _from_steps(steps: list[Any]) -> list[Any]:
    """SWE-agent's steps as messages: what the first was asked with, then what each said and saw."""
    found: list[Any] = []
    for i, step in enumerate(steps):
        if not isinstance(step, dict):
            raise _Misfit(f"trajectory[{i}]: is not an object")
        if not found:
            found += step.get("query") or step.get("messages") or []
        if step.get("response"):
            found.append({"role": "assistant", "content": step["response"]})
            found.append({"role": "user", "content": step.get("observation") or "", "is_observation": True})
    return found


def _is_exit(message: Any) -> bool:
    """mini-swe-agent's last message, which no model ever saw."""
    return isinstance(message, dict) and message.get("role") == "exit"


def _message(place: str, raw: Any) -> Message:
    """A message as the chat API has it. SWE-agent's results name their calls in a list, and are the user's."""
    if not isinstance(raw, dict):
        raise _Misfit(f"{place}: is not an object")
    message = {key: raw[key] for key in FIELDS if raw.get(key)}
    if message.get("role") not in ROLES:
        raise _Misfit(f"{place}.role: {raw.get('role')!r} is none of {', '.join(ROLES)}")
    if ids := raw.get("tool_call_ids"):
        message |= {"role": "tool", "tool_call_id": ids[0]}
    message["content"] = _text(f"{place}.content", raw.get("content"))
    return message


def _text(place: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _Misfit(f"{place}: is neither text nor a list of parts")
    return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')} omitted]" for part in content)


def _num_head(place: str, messages: Sequence[Message], raw: Sequence[Message]) -> int:
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not raw[i].get("is_demo")]
    if not answers:
        raise _Misfit(f"{place or 'the list'}: has no message of an assistant")
    if answers[0] == 0:
        raise _Misfit(f"{place}[0]: is an answer, and nothing stands before it")
    return answers[0]


def _observations(messages: Sequence[Message], raw: Sequence[Message], num_head: int) -> frozenset[int]:
    if any("is_observation" in message for message in raw):
        return frozenset(i for i, message in enumerate(raw) if message.get("is_observation"))
    for role in ("tool", "user"):
        found = frozenset(i for i, message in enumerate(messages) if i > num_head and message["role"] == role)
        if found:
            return found
    return frozenset()
