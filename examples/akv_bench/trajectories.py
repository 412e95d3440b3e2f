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
from typing import Any, TypeVar

from akv_sdk.policies.context import tags_of

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
FLAGS = ("is_demo", "is_observation")  # of a message; no model sees them


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
        text = path.read_bytes().decode()
        data = json.loads(text)
    except UnicodeDecodeError as error:
        raise TrajectoryError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise TrajectoryError(f"{path}: is not JSON: {error}") from None
    except RecursionError:
        raise TrajectoryError(f"{path}: is nested too deeply") from None
    try:
        home, found = _find(data)
        found = [(place, message) for place, message in found if not _is_exit(message)]
        places, raw = [place for place, _ in found], [message for _, message in found]
        messages = tuple(map(_message, places, raw))
        num_head = _num_head(home, places, messages, raw)
    except _Misfit as misfit:
        raise TrajectoryError(f"{path}: {misfit}") from None
    name = path.name.removesuffix(".json").removesuffix(".traj")
    return Trajectory(name, messages, num_head, _observations(messages, raw, num_head))


class _Misfit(Exception):
    """What is wrong, behind the place in the file."""


Placed = tuple[str, Any]  # what stands in a file, behind where it stands
Kind = TypeVar("Kind")
KINDS: dict[type, str] = {str: "text", list: "a list", dict: "an object", bool: "true or false"}


def _get(place: str, raw: dict[str, Any], name: str, kind: type[Kind]) -> Kind | None:
    """A field of an object; None where it is not there, or null."""
    value = raw.get(name)
    if value is not None and not isinstance(value, kind):
        raise _Misfit(f"{place}.{name}: is not {KINDS[kind]}".removeprefix("."))
    return value


def _find(data: Any) -> tuple[str, list[Placed]]:
    """The messages in a file of any format, and what they are called there. An empty list gives way to the next."""
    if isinstance(data, list):
        return "the list", _each("", data)
    if not isinstance(data, dict):
        raise _Misfit("holds neither an object nor a list of messages")
    present = [name for name in ("messages", "history", "trajectory") if _get("", data, name, list) is not None]
    if not present:
        raise _Misfit("has none of `messages`, `history` and `trajectory`")
    name = next((name for name in present if data[name]), present[0])
    return name, _from_steps(data[name]) if name == "trajectory" else _each(name, data[name])


def _each(place: str, values: list[Any]) -> list[Placed]:
    return [(f"{place}[{i}]", value) for i, value in enumerate(values)]


def _from_steps(steps: list[Any]) -> list[Placed]:
    """SWE-agent's steps as messages: what the first was asked with, then what each said and saw."""
    found: list[Placed] = []
    for place, step in _each("trajectory", steps):
        if not isinstance(step, dict):
            raise _Misfit(f"{place}: is not an object")
        for name in ("query", "messages"):
            asked = _get(place, step, name, list)
            if not found and asked:
                found = _each(f"{place}.{name}", asked)
        response, observation = (_get(place, step, name, str) for name in ("response", "observation"))
        if response:
            seen = {"role": "user", "content": observation or "", "is_observation": True}
            said = {"role": "assistant", "content": response}
            found += [(f"{place}.response", said), (f"{place}.observation", seen)]
    return found


def _is_exit(message: Any) -> bool:
    """mini-swe-agent's last message, which no model ever saw."""
    return isinstance(message, dict) and message.get("role") == "exit"


def _message(place: str, raw: Any) -> Message:
    """A message as the chat API has it. SWE-agent's results name their calls in a list, and are the user's."""
    if not isinstance(raw, dict):
        raise _Misfit(f"{place}: is not an object")
    kinds: dict[str, type] = {"role": str, "name": str, "tool_calls": list, "tool_call_id": str}
    message: Message = {name: value for name, kind in kinds.items() if (value := _get(place, raw, name, kind))}
    if message.get("role") not in ROLES:
        raise _Misfit(f"{place}.role: {raw.get('role')!r} is none of {', '.join(ROLES)}")
    for flag in FLAGS:
        _get(place, raw, flag, bool)
    if ids := _get(place, raw, "tool_call_ids", list):
        if not isinstance(ids[0], str):
            raise _Misfit(f"{place}.tool_call_ids[0]: is not text")
        message |= {"role": "tool", "tool_call_id": ids[0]}
    message["content"] = _text(f"{place}.content", raw.get("content"))
    for name, value in message.items():
        try:  # half a surrogate pair or an infinity, which JSON can spell, and no request can hold
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise _Misfit(f"{place}.{name}: no request can hold it: {error}") from None
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(where, call) for where, call in _each(f"{place}.tool_calls", calls)]
    return message


def _call(place: str, call: Any) -> Message:
    """A call with its arguments as text: most servers take them as nothing else."""
    if not isinstance(call, dict):
        raise _Misfit(f"{place}: is not an object")
    for name in ("id", "type"):
        _get(place, call, name, str)
    function = _get(place, call, "function", dict)
    if function is None or _get(f"{place}.function", function, "name", str) is None:
        raise _Misfit(f"{place}.function.name: is missing")
    arguments = function.get("arguments")
    if isinstance(arguments, str | None):
        return {**call, "function": {**function, "arguments": arguments or "{}"}}
    if not isinstance(arguments, dict):
        raise _Misfit(f"{place}.function.arguments: is neither text nor an object")
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _text(place: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Misfit(f"{place}: is neither text nor a list of parts")
    return "\n".join(_text_of_part(where, part) for where, part in _each(place, content))


def _text_of_part(place: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise _Misfit(f"{place}: is not an object")
    kind, text = _get(place, part, "type", str), _get(place, part, "text", str)
    if text is not None:
        return text
    if kind is None or kind == "text":
        raise _Misfit(f"{place}.text: is not text")
    return f"[{kind} omitted]"


def _num_head(home: str, places: Sequence[str], messages: Sequence[Message], raw: Sequence[Message]) -> int:
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not raw[i].get("is_demo")]
    if not answers:
        raise _Misfit(f"{home}: has no message of an assistant")
    if answers[0] == 0:
        raise _Misfit(f"{places[0]}: is an answer, and nothing stands before it")
    return answers[0]


def _observations(messages: Sequence[Message], raw: Sequence[Message], num_head: int) -> frozenset[int]:
    if any("is_observation" in message for message in raw):
        return frozenset(i for i, message in enumerate(raw) if message.get("is_observation"))
    for role in ("tool", "user"):
        found = frozenset(i for i, message in enumerate(messages) if i > num_head and message["role"] == role)
        if found:
            return found
    return frozenset()
