"""What a message is known by when it comes back: two spellings of one message have one identity.

Owns the normal form of a message's role, content and tool calls, how frameworks write calls as text, and refusing what
has no normal form. Knows neither templates nor tokens.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Hashable
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from akv_sdk.types import MessageMarking
from akv_server.errors import AkvError, invalid
from akv_server.nesting import is_deep
from akv_server.tools import THINK_CLOSING, THINK_OPENING

Message = dict[str, Any]


def normalise_for_matching(message: Message, ending: str = "") -> Hashable:
    """The identity of a message: two that compare equal are the same message, sent twice.

    Role, text (parts joined, line ends and outer whitespace aside), and function and arguments of each call, by value
    and not by spelling. Ids of calls are left out, frameworks make them anew; so is a tool result's `name`. Reasoning
    is the same before an answer's text and in a field of its own. `ending` does not count where the text ends with it.
    """
    role = role_of(message.get("role"))
    calls = [call["function"] for call in calls_of(message, "tool_calls")]
    text = text_of(message, "content").replace("\r\n", "\n").strip()
    if role == "assistant":
        if not calls:
            text, calls = _without_transcript(text)
        text = _with_reasoning(text, message.get("reasoning_content"))
    called = tuple((call["name"], _canonical(call["arguments"])) for call in calls)
    return role, text.removesuffix(ending).strip(), called, None if role == "tool" else message.get("name")


def named_as(identity: Hashable, other: Hashable) -> Hashable:
    """The identity that a generated answer has when it comes back under the name of `other`: a framework puts its
    agent's there, the model wrote none. An answer that was sent keeps its name: a template may write that."""
    assert isinstance(identity, tuple) and isinstance(other, tuple)
    return (*identity[:-1], other[-1])


def without_torn_arguments(identity: Hashable) -> set[Hashable]:
    """The identities that an answer has when it comes back from a client of objects: arguments that are no JSON, since
    the answer was cut off there or the model wrote them so, are left out, or read as far as they go."""
    assert isinstance(identity, tuple)
    role, text, called, *rest = identity
    return {
        (role, text, tuple((name, read(written)) for name, written in called), *rest) for read in (_emptied, _begun)
    }


def without_reasoning(identity: Hashable) -> Hashable:
    """The identity that a message has when it comes back from a framework that keeps no reasoning."""
    assert isinstance(identity, tuple)
    role, text, *rest = identity
    return (role, text.partition(THINK_CLOSING)[2] if text.startswith(THINK_OPENING) else text, *rest)


def ids_of_inputs(message: Message) -> list[str | None]:
    """The ids of a message's calls whose arguments are an object that is not empty: those with a block of their own."""
    return [call.get("id") for call in calls_of(message, "tool_calls") if has_input(call)]


def has_input(call: Message) -> bool:
    """Whether the arguments of a call in its normal form are an object that is not empty."""
    arguments = call["function"]["arguments"]
    return isinstance(arguments, dict) and bool(arguments)


def role_of(role: Any) -> Any:
    """OpenAI's newer name for the system role means the same."""
    return "system" if role == "developer" else role


def text_of(message: Message, at: str) -> str:
    """A message's content as one string; parts are joined by line ends. A part of type thinking, with which an answer
    may begin, is its reasoning, before the text. Raises AkvError naming the field, which is `at`."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(at, "content is a string, null or a list of parts")
    thought, texts = "", []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        begins_answer = j == 0 and message.get("role") == "assistant"
        if kind != "text" and not (kind == "thinking" and begins_answer):
            which = "text, and thinking as an answer's first," if kind == "thinking" else "text"
            raise invalid(f"{at}[{j}].type", f"only parts of type {which} are supported, not {kind!r}")
        text = part.get(kind)
        if not isinstance(text, str):
            raise invalid(f"{at}[{j}].{kind}", f"a {kind} part has a {kind}, a string")
        if kind == "text":
            texts.append(text)
        elif text.strip():
            thought = f"{THINK_OPENING}\n{text.strip()}\n{THINK_CLOSING}\n\n"
    return thought + "\n".join(texts)


def calls_of(message: Message, at: str) -> list[Message]:
    """The tool calls of a message, copied, with their arguments as values. Raises AkvError naming the field."""
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise invalid(at, "tool_calls is a list")
    return [_call(call, f"{at}[{j}]") for j, call in enumerate(calls)]


def check_marking(message: Message, at: str) -> None:
    """What a message says of itself to policies is held to the contract; the template never sees it."""
    own, tags = message.get("akv"), message.get("tags")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise invalid(f"{at}.tags", 'tags are a list of strings, as in ["keep_output"]')
    if own is not None and not isinstance(own, dict):
        raise invalid(f"{at}.akv", "the akv of a message is an object")
    try:
        MessageMarking.model_validate(own or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise invalid(f"{at}.akv{path}", first["msg"]) from None


def _call(call: Any, at: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise invalid(f"{at}.function", "a tool call has a function")
    if not isinstance(call.get("id"), str | None):
        raise invalid(f"{at}.id", "the id of a tool call is a string")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{at}.function.name", "a tool call has the name of a function")
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {"name": function["name"], "arguments": {} if arguments is None else arguments}}


def _arguments(arguments: Any) -> Any:
    """Arguments as a value, also where they were encoded twice; a string that is no JSON object stays what it is."""
    value = arguments
    for _ in range(2):
        value = _json_in(value, (dict, str)) if isinstance(value, str) else value
    return arguments if isinstance(value, str) else value


def _json_in(text: str, kinds: tuple[type, ...]) -> Any:
    """The value of one of these kinds that a text is the JSON of, or the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, kinds) and not is_deep(value) else text


def _without_transcript(text: str) -> tuple[str, list[Message]]:
    """What an answer says and the functions it calls, where smolagents wrote its calls into the text: as Python writes
    a list of them, behind a heading. The call that it makes up for the code in an answer is none of the model's."""
    said, heading, written = text.rpartition("Calling tools:\n")
    if not heading:
        return text, []
    try:
        calls = calls_of(json.loads(json.dumps({"tool_calls": ast.literal_eval(written)})), "")
    except (AkvError, ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text, []
    if not calls:
        return text, []
    functions = [call["function"] for call in calls]
    is_code = [f["name"] == "python_interpreter" and isinstance(f["arguments"], str) for f in functions]
    return said.rstrip(), [f for f, skip in zip(functions, is_code, strict=True) if not skip]


def _with_reasoning(text: str, reasoning: Any) -> str:
    """An answer's text with its reasoning before it, wherever that stood, and without the space around both."""
    thought, closing, rest = text.partition(THINK_CLOSING)
    if not closing:
        thought, rest = reasoning if isinstance(reasoning, str) else "", text
    thought = thought.removeprefix(THINK_OPENING).replace("\r\n", "\n").strip()
    return f"{THINK_OPENING}{thought}{THINK_CLOSING}{rest.lstrip()}" if thought else rest.lstrip()


def _emptied(canonical: str) -> str:
    """Canonical arguments, none where they are no object."""
    return canonical if canonical[:1] == "{" else "{}"


def _begun(canonical: str) -> str:
    """Canonical arguments; where they are the beginning of an object, what is complete of it, as SDKs read a stream."""
    written = json.loads(canonical)
    if isinstance(written, str):
        try:
            value = from_json(written, allow_partial=True)
        except ValueError:
            value = {}
        canonical = _canonical(value if not is_deep(value) else {})
    return _emptied(canonical)


def _canonical(value: Any) -> str:
    def plain(item: Any) -> Any:
        if isinstance(item, str):
            value = _json_in(item, (dict, list)) if item[:1] in ("{", "[") else item
            return item if value is item else plain(value)  # smolagents sends back the value
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [plain(inner) for inner in item]
        return int(item) if isinstance(item, float) and item.is_integer() else item  # JavaScript writes 1.0 as 1

    return json.dumps(plain(value), sort_keys=True)
