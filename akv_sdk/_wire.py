"""The pure half of the client: builds calls, reads replies and event streams, decides whether to try again.

Does no I/O, never sleeps, reads no clock, and draws randomness only from a generator it is given. `client.py` moves the
bytes; it is the only file that knows both this one and httpx.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from akv_sdk import types
from akv_sdk.errors import (
    ERROR_OF_CODE,
    AkvError,
    ApiError,
    BadReply,
    ConnectionFailed,
    InvalidRequest,
    SessionBusy,
)

T = TypeVar("T")
Message = Mapping[str, Any]

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0
MAX_RETRY_AFTER_S = 60.0  # a longer one is the caller's to wait out: it stands in the error


class SessionParams(TypedDict, total=False):
    """Fields of a completion request that a session may set, with OpenAI's (and vLLM's) names and meaning."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    logprobs: bool | int | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    context_management: Mapping[str, Any] | None
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    cache_salt: str | None


class Params(SessionParams, total=False):
    """Fields of any completion request. `n`: how many continuations; `echo` is for text completions only."""

    n: int
    echo: bool


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, ready to be sent. `parse` turns the body of a reply into a value and raises ValueError.

    `is_repeatable` says that sending it twice comes to the same as once, so that it may be sent again when the reply
    was lost. Ops are so because they are `keyed`: every attempt carries the same Idempotency-Key, and the server
    applies only the first that arrives.
    """

    method: str
    path: str
    parse: Callable[[bytes], T]
    body: bytes | None = None
    is_repeatable: bool = True
    keyed: bool = False


# --- requests ---------------------------------------------------------------------------------------------------------


def chat(
    messages: Iterable[Message],
    *,
    model: str | None,
    session: str | None,
    ops: Iterable[types.Op] | None,
    on_miss: types.OnMiss,
    params: Mapping[str, Any],
    stream: bool = False,
    marks: Iterable[types.Mark] = (),
) -> Call[types.Completion]:
    fields = {"messages": _objects("messages", messages)}
    return _completion("/v1/chat/completions", fields, model, session, ops, on_miss, params, stream, marks)


def completions(
    prompt: str | Sequence[int],
    *,
    model: str | None,
    session: str | None,
    ops: Iterable[types.Op] | None,
    on_miss: types.OnMiss,
    params: Mapping[str, Any],
    stream: bool = False,
) -> Call[types.Completion]:
    fields = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return _completion("/v1/completions", fields, model, session, ops, on_miss, params, stream)


def _completion(
    path: str,
    fields: dict[str, Any],
    model: str | None,
    session: str | None,
    ops: Iterable[types.Op] | None,
    on_miss: types.OnMiss,
    params: Mapping[str, Any],
    stream: bool,
    marks: Iterable[types.Mark] = (),
) -> Call[types.Completion]:
    if unknown := params.keys() - Params.__optional_keys__:
        raise TypeError(f"{min(unknown)}: not a field of a completion request")
    fields |= {name: value for name, value in params.items() if value is not None}
    if model is not None:
        fields["model"] = model
    marked = list(marks) or None
    if session is not None or ops is not None or marked is not None:
        history = None if ops is None else list(ops)
        fields["akv"] = _fields(types.AkvRequest, "akv", session=session, ops=history, on_miss=on_miss, marks=marked)
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return Call("POST", path, types.Completion.model_validate_json, encode(fields))


def render(
    messages: Iterable[Message],
    *,
    model: str | None,
    tools: Iterable[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
) -> Call[types.RenderReply]:
    return _post(
        "/v1/render",
        types.RenderReply,
        types.RenderRequest,
        model=model,
        messages=_objects("messages", messages),
        tools=None if tools is None else _objects("tools", tools),
        add_generation_prompt=add_generation_prompt,
    )


def tokenize(
    prompt: str, *, model: str | None, add_special_tokens: bool, parse_special: bool
) -> Call[types.TokenizeReply]:
    return _post(
        "/tokenize",
        types.TokenizeReply,
        types.TokenizeRequest,
        model=model,
        prompt=prompt,
        add_special_tokens=add_special_tokens,
        parse_special=parse_special,
    )


def detokenize(tokens: Iterable[int], *, model: str | None) -> Call[types.DetokenizeReply]:
    return _post("/detokenize", types.DetokenizeReply, types.DetokenizeRequest, model=model, tokens=list(tokens))


def tokenizer() -> Call[types.TokenizerReply]:
    return Call("GET", "/v1/tokenizer", types.TokenizerReply.model_validate_json)


def models() -> Call[list[types.ModelCard]]:
    return Call("GET", "/v1/models", lambda body: types.ModelList.model_validate_json(body).data)


def health() -> Call[None]:
    return Call("GET", "/health", _nothing)


def stats() -> Call[types.CacheStats]:
    return Call("GET", "/v1/cache/stats", types.CacheStats.model_validate_json)


def drop(
    session: str,
    *,
    spans: Iterable[Sequence[int]] | None,
    blocks: Iterable[str] | None,
    pages: Iterable[int] | None,
    repos: types.Repos,
    mode: types.Mode,
) -> Call[types.LayoutReply]:
    return _op(
        "/v1/cache/drop",
        types.DropRequest,
        session=session,
        spans=spans,
        blocks=blocks,
        pages=pages,
        repos=repos,
        mode=mode,
    )


def restore(
    session: str, *, spans: Iterable[Sequence[int]] | None, blocks: Iterable[str] | None, repos: types.Repos
) -> Call[types.LayoutReply]:
    return _op("/v1/cache/restore", types.RestoreRequest, session=session, spans=spans, blocks=blocks, repos=repos)


def repos(session: str, *, start: int, end: int | None, delta: int) -> Call[types.LayoutReply]:
    return _op("/v1/cache/repos", types.ReposRequest, session=session, start=start, end=end, delta=delta)


def fork(session: str, *, name: str | None) -> Call[types.SessionInfo]:
    fields = _fields(types.ForkRequest, "", session=name)
    path = f"{_session_path(session)}/fork"
    return Call("POST", path, types.SessionInfo.model_validate_json, encode(fields), is_repeatable=False)


def sessions() -> Call[list[types.SessionInfo]]:
    return Call("GET", "/v1/cache/sessions", lambda body: types.SessionList.model_validate_json(body).data)


def session_info(session: str) -> Call[types.SessionInfo]:
    return Call("GET", _session_path(session), types.SessionInfo.model_validate_json)


def delete_session(session: str) -> Call[None]:
    return Call("DELETE", _session_path(session), _nothing, is_repeatable=False)


def _session_path(session: str) -> str:
    name = quote(session, safe="")
    if set(name) == {"."}:
        name = name.replace(".", "%2E")  # else "." and ".." would be taken for directions
    return f"/v1/cache/sessions/{name}"


def _nothing(body: bytes) -> None:
    return None


M = TypeVar("M", bound=BaseModel)


def _post(path: str, reply: type[M], request: type[BaseModel], /, **fields: Any) -> Call[M]:
    return Call("POST", path, reply.model_validate_json, encode(_fields(request, "", **fields)))


def _op(path: str, request: type[BaseModel], /, **fields: Any) -> Call[types.LayoutReply]:
    body = encode(_fields(request, "", **fields))
    return Call("POST", path, types.LayoutReply.model_validate_json, body, keyed=True)


def _fields(kind: type[BaseModel], prefix: str, /, **fields: Any) -> dict[str, Any]:
    """The JSON object of a request body, checked as the server would; raises InvalidRequest that names the field."""
    try:
        return kind(**fields).model_dump(mode="json", exclude_none=True)
    except ValidationError as error:
        param, message = _fault(error)
        raise InvalidRequest(message, param=".".join(filter(None, (prefix, param))) or None) from None


def _objects(name: str, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    objects = []
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"is a {type(item).__name__}, not an object", param=f"{name}[{i}]")
        objects.append(dict(item))
    return objects


def _fault(error: ValidationError) -> tuple[str | None, str]:
    """The field at fault, as a caller would write it (`spans[2][0]`, `akv.ops[1].end`), and what is wrong with it.

    Speaks of the first of the errors. The validators of `types` open their message with the field's name. Pydantic puts
    the tag of a union's branch into the path; no caller would recognise it, so it is left out.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path, message = list(first["loc"]), first["msg"]
    if first["type"] == "value_error":
        field, _, message = message.removeprefix("Value error, ").partition(": ")
        path.append(field)
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("bool", "int", "str"):
            name += f".{part}" if name else part
    return name or None, message


def encode(body: dict[str, Any]) -> bytes:
    """JSON in UTF-8. Raises InvalidRequest that names the field which JSON cannot carry."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        param, reason = _not_json(body) or (None, str(error))
        raise InvalidRequest(reason, param=param) from None


def _not_json(value: object, path: str = "") -> tuple[str, str] | None:
    """Where in a body the first value stands that JSON cannot carry, and why."""
    found: tuple[str, str] | None = None
    if isinstance(value, dict):
        for key, item in value.items():
            found = found or _not_json(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            found = found or _not_json(item, f"{path}[{i}]")
    elif isinstance(value, str):
        if lone := re.search("[\ud800-\udfff]", value):
            found = path, f"holds the lone surrogate {lone[0]!r}, which is not text (decode with errors='replace')"
    elif isinstance(value, float) and not math.isfinite(value):
        found = path, f"is {value}, which JSON has no word for"
    elif value is not None and not isinstance(value, bool | int | float):
        found = path, f"is a {type(value).__name__}, which JSON has no word for"
    return found


# --- replies ----------------------------------------------------------------------------------------------------------


def read(call: Call[T], body: bytes, *, status: int, request_id: str | None) -> T:
    """The value of a good reply. Raises BadReply where it is not what this call answers."""
    try:
        return call.parse(body)
    except ValidationError as error:
        param, message = _fault(error)
        reason = f"{param}: {message}" if param else message
    except ValueError as error:
        reason = str(error)
    raise BadReply(f"{call.method} {call.path}: {reason}", status=status, request_id=request_id)


def error_of_reply(status: int, headers: Mapping[str, str], body: bytes, *, now: datetime) -> ApiError:
    """The exception for a reply that is not a success, whoever wrote it (a proxy's page has no code of ours)."""
    try:
        error = types.ErrorReply.model_validate_json(body).error
    except ValidationError:
        text = " ".join(body[:200].decode(errors="replace").split())
        error = types.ErrorBody(message=f"HTTP {status}: {text or 'empty reply'}")
    return _api_error(
        error,
        status=status,
        retry_after_s=parse_retry_after(headers.get("retry-after"), now=now),
        request_id=headers.get("x-request-id"),
    )


def _api_error(
    error: types.ErrorBody,
    *,
    status: int | None = None,
    retry_after_s: float | None = None,
    request_id: str | None = None,
) -> ApiError:
    return ERROR_OF_CODE.get(error.code or "", ApiError)(
        error.message,
        code=error.code or (f"http_{status}" if status else None),
        param=error.param,
        status=status,
        retry_after_s=retry_after_s,
        request_id=request_id,
    )


def parse_retry_after(header: str | None, *, now: datetime) -> float | None:
    """Seconds from `now` (timezone-aware) that a Retry-After header asks for: a number or an HTTP date. None: nothing
    usable was asked."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = max(0.0, (parsedate_to_datetime(header) - now).total_seconds())
        except (ValueError, TypeError):  # no date either, or one without a zone
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def retry_delay_s(
    error: AkvError, *, num_failures: int, max_retries: int, is_repeatable: bool, rng: Random
) -> float | None:
    """How long to wait before the call is sent again, or None to give up. Asked only before a reply has begun.

    Sent again are: what cannot have arrived; what got no reply, if it may be repeated; what the server put off (429,
    503; `session_busy` only if it says until when). A Retry-After is the least that is waited.

    Args:
        num_failures: how often it has failed, counting this time (>= 1).
    """
    if num_failures > max_retries:
        return None
    if isinstance(error, ConnectionFailed):
        if error.sent and not is_repeatable:
            return None
    elif isinstance(error, SessionBusy):
        if error.retry_after_s is None:
            return None
    elif error.status not in (429, 503):
        return None
    if error.retry_after_s is not None:
        if error.retry_after_s > MAX_RETRY_AFTER_S:
            return None
        return error.retry_after_s * rng.uniform(1.0, 1.25)  # those told the same moment shall not all come at it
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 30)) * rng.uniform(0.5, 1.0)


# --- event streams ----------------------------------------------------------------------------------------------------


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
            param, message = _fault(error)
            raise BadReply(f"a chunk of the stream is not one of this API: {param or 'body'}: {message}") from None
        if chunk.error is not None:
            raise _api_error(chunk.error)
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
            param, message = _fault(error)
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
