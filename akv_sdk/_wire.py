"""The pure half of the client: builds calls, reads replies, decides whether to try again.

Does no I/O, never sleeps, reads no clock, and draws randomness only from a generator it is given. `client.py` moves the
bytes; `_events.py` reads those of a stream.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Turn:
    """A completion to be sent, and who takes its reply in."""

    call: Call[types.Completion]
    take: Callable[[types.Completion], None] = lambda reply: None


# --- requests ---------------------------------------------------------------------------------------------------------


def chat(
    messages: Iterable[Message],
    *,
    model: str | None,
    session: str | None,
    ops: Iterable[types.Op] | None,
    on_miss: types.OnMiss,
    params: Mapping[str, Any],
    auto_drop: types.AutoDrop | bool | None = None,
    stream: bool = False,
    marks: Iterable[types.Mark] = (),
) -> Call[types.Completion]:
    akv = {"session": session, "ops": _listed(ops), "marks": list(marks) or None, "auto_drop": auto_drop}
    fields = {"messages": _objects("messages", messages)}
    return _completion("/v1/chat/completions", fields, model, akv, on_miss, params, stream)


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
    akv = {"session": session, "ops": _listed(ops)}
    fields = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return _completion("/v1/completions", fields, model, akv, on_miss, params, stream)


def _completion(
    path: str,
    fields: dict[str, Any],
    model: str | None,
    akv: dict[str, Any],
    on_miss: types.OnMiss,
    params: Mapping[str, Any],
    stream: bool,
) -> Call[types.Completion]:
    check_names(params)
    fields |= {name: value for name, value in params.items() if value is not None}
    if model is not None:
        fields["model"] = model
    if any(value is not None for value in akv.values()):
        fields["akv"] = _fields(types.AkvRequest, "akv", on_miss=on_miss, **akv)
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return Call("POST", path, types.Completion.model_validate_json, encode(fields))


def check_names(params: Mapping[str, Any]) -> None:
    """Raises TypeError for what is no field of a completion request."""
    if unknown := params.keys() - Params.__optional_keys__:
        raise TypeError(f"{min(unknown)}: not a field of a completion request")


def _listed(ops: Iterable[types.Op] | None) -> list[types.Op] | None:
    return None if ops is None else list(ops)


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
        param, message = fault(error)
        raise InvalidRequest(message, param=".".join(filter(None, (prefix, param))) or None) from None


def _objects(name: str, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    objects = []
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"is a {type(item).__name__}, not an object", param=f"{name}[{i}]")
        objects.append(dict(item))
    return objects


def fault(error: ValidationError) -> tuple[str | None, str]:
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
        elif part.isidentifier() and part not in ("bool", "int", "str", "AutoDrop"):
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
        param, message = fault(error)
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
    return api_error(
        error,
        status=status,
        retry_after_s=parse_retry_after(headers.get("retry-after"), now=now),
        request_id=headers.get("x-request-id"),
    )


def api_error(
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
