"""Anthropic's Messages API as a way to ask: its body as that of a chat completion, and errors in its words.

Owns the fields and blocks of `/v1/messages`, and which of them each part of the chat request came from. Pure: knows
neither HTTP nor sessions; answers are for `messages_reply.py`. Sampling, tools, edits and `akv` are checked where the
chat route has them checked.

    system                          a system message
    user: texts                     a user message for each run of them
    user: tool_result               a tool message
    assistant: thinking, text       the content: thoughts stand in it as the model wrote them, between <think> tags
    assistant: tool_use             the tool calls
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from akv_sdk.types import Items
from akv_server.errors import AkvError
from akv_server.requests import ChatBody, parse
from akv_server.tools import THINK_CLOSING, THINK_OPENING

Body = dict[str, Any]

# Fields that mean the same to the chat route; the last three are not Anthropic's.
_SHARED = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "context_management"),
    *("akv", "cache_salt", "seed"),
)
# Fields that change nothing here. Whether the model thinks is for its chat template to say. `metadata.user_id` is no
# session: it names who asks, who may well hold several conversations at once, and a session is one conversation. Taken
# for one, each of them would make the stream of all others diverge.
_SILENT = frozenset({"metadata", "thinking", "cache_control", "service_tier", "inference_geo"})

_ERROR_KINDS = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 413: "request_too_large"}


class _Part(BaseModel):
    """What else a part says (`cache_control`, `citations`) has no meaning here."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Text(_Part):
    type: Literal["text"]
    text: str


class Thinking(_Part):
    """`signature` is what we gave it, or another server's, or empty: see `signature_of`."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(_Part):
    """Another server's, which nobody else can read: left out."""

    type: Literal["redacted_thinking"]


class ToolUse(_Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(_Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[Text] | None = None
    is_error: bool | None = None


UserBlock = Annotated[Text | ToolResult, Field(discriminator="type")]
AssistantBlock = Annotated[Text | Thinking | RedactedThinking | ToolUse, Field(discriminator="type")]


class UserMessage(_Part):
    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantMessage(_Part):
    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class Tool(_Part):
    """A tool of the client's own. Those of which Anthropic's models know the schema by heart are refused by type."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(_Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_its_tool(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("name: the choice of a tool names it")
        return self


class CountBody(BaseModel):
    """Body of `POST /v1/messages/count_tokens`: the prompt."""

    model_config = ConfigDict(extra="allow", strict=True)

    system: str | Items[Text] | None = None
    messages: Annotated[
        Items[Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]],
        Field(min_length=1, max_length=100_000),
    ]
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesBody(CountBody):
    """Body of `POST /v1/messages`. What is not declared here is checked by the chat route."""

    max_tokens: int
    stop_sequences: Items[str] | None = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> MessagesBody:
        if self.messages[-1].role != "user":
            raise ValueError("messages: the last one is the user's; an answer cannot be begun for the model (prefill)")
        return self


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the chat route takes it.

    Attributes:
        homes: of each message of `body`, the field that it was made from.
        is_held: calls in the answer are held to a grammar, so that their arguments are JSON as far as they go.
        warnings: one line for each field that was given and has no effect here.
    """

    body: ChatBody
    homes: tuple[str, ...]
    is_held: bool
    warnings: tuple[str, ...]

    def renamed(self, error: AkvError) -> AkvError:
        """The error of the chat route, naming the field as the caller knows it."""
        return _renamed(error, self.homes)


def asked(raw: Body, kind: type[CountBody] = MessagesBody) -> Asked:
    """What a body asks for. Raises AkvError that names the field at fault."""
    body = parse(kind, raw)
    extra = body.model_extra or {}
    if extra.get("thread") is not None:
        message = "thread: there are no threads here: send the whole history (akv.session keeps it from being computed)"
        raise AkvError("invalid_request", message, param="thread")
    messages, homes = zip(*_messages(body), strict=True)
    chat: Body = {name: raw[name] for name in _SHARED if name in raw}
    chat["messages"] = list(messages)
    chat["stream_options"] = {"include_usage": True}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = named if choice.type == "tool" else "required" if choice.type == "any" else choice.type
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesBody) and body.stop_sequences:
        chat["stop"] = body.stop_sequences
    try:
        parsed = parse(ChatBody, chat)
    except AkvError as error:
        raise _renamed(error, homes) from None
    is_held = bool(choice and choice.type in ("any", "tool")) or any(tool.strict for tool in body.tools or ())
    unknown = [name for name in extra if name not in _SHARED and name not in _SILENT]
    warnings = (f"{name[:100]}: not a field of this request, left aside" for name in unknown)
    return Asked(parsed, homes, is_held, tuple(warnings))


def signature_of(opening: str, closing: str) -> str:
    """What a thinking block carries so that it can be put back as the model wrote it: what stood around the thought.
    A template that opens the thought itself leaves no tag in `opening`, an answer cut off none in `closing`."""
    return json.dumps([opening, closing])


def counted(asked: Asked, num_visible: int, num_tokens: int) -> Body:
    """The answer to a count: what the model would see, and where there are edits, what it would have seen without."""
    if asked.body.context_management is None:
        return {"input_tokens": num_visible}
    return {"input_tokens": num_visible, "context_management": {"original_input_tokens": num_tokens}}


def error_body(error: AkvError) -> Body:
    """Anthropic's envelope, with the stable code and the field. Fields are written with dots, as Anthropic does."""
    kind = _ERROR_KINDS.get(error.status, "invalid_request_error")
    if error.status >= 500:
        kind = "overloaded_error" if error.status == 503 else "api_error"
    inner: Body = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    if error.param is not None:
        dotted = re.sub(r"\[(\d+)\]", r".\1", error.param)
        inner["param"] = dotted
        inner["message"] = _led_by(error.message, error.param, dotted)
    if error.param == "thread":  # by this Anthropic's SDK knows that it has to do without, and does
        inner["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": inner}


def _messages(body: CountBody) -> Iterator[tuple[Body, str]]:
    """The messages for the chat route, each with the field that it comes from. Messages of one role that follow one
    another stay apart, so that each can be addressed."""
    if body.system:
        yield {"role": "system", "content": _text(body.system)}, "system"
    for i, message in enumerate(body.messages):
        home = f"messages[{i}]"
        if isinstance(message, AssistantMessage):
            yield _answer(message.content), f"{home}.content"
        elif isinstance(message.content, str) or not message.content:
            yield {"role": "user", "content": message.content or ""}, f"{home}.content"
        else:
            yield from _user(message.content, f"{home}.content")


def _user(blocks: Sequence[Text | ToolResult], home: str) -> Iterator[tuple[Body, str]]:
    for is_text, group in groupby(enumerate(blocks), key=lambda entry: isinstance(entry[1], Text)):
        run = list(group)
        if is_text:
            texts = [block for _, block in run if isinstance(block, Text)]
            yield {"role": "user", "content": _text(texts)}, f"{home}[{run[0][0]}]"
            continue
        for k, block in run:
            assert isinstance(block, ToolResult)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}, f"{home}[{k}]"


def _result(block: ToolResult) -> str:
    """Chat templates know no failed results: the text says so, within the tags of an observation where it is one."""
    text = _text(block.content or "")
    if not block.is_error:
        return text
    begin = _OBSERVATION.match(text).end()  # type: ignore[union-attr]  # it matches the empty text, too
    return f"{text[:begin]}Error: {text[begin:]}"


def _answer(content: str | Sequence[Text | Thinking | RedactedThinking | ToolUse]) -> Body:
    """An answer that comes back, in the very text that it was made from (`messages_reply.py`)."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text, is_behind_thought = "", False
    calls: list[Body] = []
    for block in content:
        if isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, Text | Thinking):
            more = block.text if isinstance(block, Text) else _thought(block)
            text += more if is_behind_thought or not text else f"\n{more}"
        is_behind_thought = isinstance(block, Thinking)
    message: Body = {"role": "assistant", "content": text}
    return {**message, "tool_calls": calls} if calls else message


def _thought(block: Thinking) -> str:
    opening, closing = f"{THINK_OPENING}\n", f"\n{THINK_CLOSING}\n\n"
    try:
        signed = json.loads(block.signature)
    except (ValueError, RecursionError):
        signed = None
    match signed:
        case [str(before), str(after)] if _BEFORE.fullmatch(before) and _AFTER.fullmatch(after):
            opening, closing = before, after
    return f"{opening}{block.thinking}{closing}"


def _text(content: str | Sequence[Text]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: Tool) -> Body:
    function: Body = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _renamed(error: AkvError, homes: Sequence[str]) -> AkvError:
    if error.param is None:
        return error
    param = error.param
    if found := re.match(r"messages\[(\d+)\]", param):
        param = homes[int(found[1])]
    for chat, ours in _RENAMED:
        param = re.sub(chat, ours, param)
    message = _led_by(error.message, error.param, param)
    return AkvError(error.code, message, param=param, retry_after_s=error.retry_after_s)


def _led_by(message: str, param: str, other: str) -> str:
    """The message with another name for the field that it begins with, if it does."""
    return other + message[len(param) :] if message.startswith(f"{param}:") else message


_RENAMED = (
    (r"^stop\b", "stop_sequences"),
    (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function", r"\1"),
)
_OBSERVATION = re.compile(r"\s*(<ephemeral_observation\s[^<>]*>)?")
_BEFORE = re.compile(rf"\s*({THINK_OPENING}\s*)?")
_AFTER = re.compile(rf"(\s*{THINK_CLOSING}\s*)?")
