"""Bodies of completion requests, checked: what OpenAI names, what vLLM adds to it, and the `akv` object.

Owns names, bounds and defaults of the fields of `/v1/chat/completions` and `/v1/completions`, reading JSON, and turning
any misfit into an `invalid_request` that names the field. Knows neither HTTP nor sessions nor the engine.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from akv_sdk.types import AkvRequest, ContextManagement, Items
from akv_server.errors import AkvError, invalid
from akv_server.nesting import MAX_DEPTH, check_unicode, is_deep, strings_in
from akv_server.sampler import SamplingParams

MAX_CHOICES = 32
MAX_LOGPROBS = 20
MAX_FIELDS = 10_000

# Fields of the OpenAI API that change nothing in what a self-hosted model answers: taken and left aside without a word.
SILENT_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "parallel_tool_calls",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "verbosity",
        "modalities",
        "reasoning_effort",
    }
)
# Fields that would change the answer if they were supported, with the values that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "context_management": (None, {}, {"edits": []}),
}

TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class CompletionFields(BaseModel):
    """What both completion routes share. `None` always means "not given"."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[Items[StopText], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=1000)] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    akv: AkvRequest | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
        )

    def warnings(self) -> list[str]:
        """One line for each field that was given and has no effect here."""
        extra = self.model_extra or {}
        unsupported = [name for name, neutral in NEUTRAL_VALUES.items() if name in extra and extra[name] not in neutral]
        unknown = [name for name in extra if name not in SILENT_FIELDS and name not in NEUTRAL_VALUES]
        return [f"{name}: not supported, left aside" for name in unsupported] + [
            f"{name[:100]}: not a field of this request, left aside" for name in unknown
        ]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`json_schema` is that of the answer; of type json_object, any JSON object will do."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: type json_schema needs one")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """None where any text will do."""
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatBody(CompletionFields):
    """Body of `POST /v1/chat/completions`. `messages` are checked where they are rendered, `tools` and `tool_choice`
    in `tools.py`."""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=100_000)]
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    context_management: ContextManagement | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    add_generation_prompt: bool = True
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_ones_are_asked_for(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(CompletionFields):
    """Body of `POST /v1/completions`. One prompt: a text, or the token ids of the whole stream."""

    prompt: str | Annotated[Items[TokenId], Field(max_length=10_000_000)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _echo_is_whole(self) -> CompletionBody:
        if self.echo and self.stream:
            raise ValueError("echo: cannot be streamed, its scores are known only at the end")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def max_new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # the API's own default


M = TypeVar("M", bound=BaseModel)


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; anything else is an `invalid_request`, halves of surrogate pairs among it."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AkvError("invalid_request", f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        body = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_fields)
    except RecursionError:
        raise AkvError("invalid_request", "the body is nested too deeply") from None
    except ValueError as error:
        raise AkvError("invalid_request", f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise AkvError("invalid_request", f"the body must be a JSON object, not {_json_type(body)}")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _refuse_deep(body)
    if "\\ud" in text or "\\uD" in text:
        for at, string in strings_in(body):
            check_unicode(string, at)
    return body


def parse(kind: type[M], body: dict[str, Any]) -> M:
    """`body` as a `kind`, or an error that names the deepest field at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = [
            (_path(item["loc"], body, is_missing=item["type"] == "missing"), item)
            for item in error.errors(include_url=False, include_context=False)
        ]

    def rank(entry: tuple[str, Any]) -> tuple[int, bool]:
        """The deepest first; of the kinds that a field may have, the one of which only the value is wrong."""
        path, item = entry
        return path.count("[") + path.count("."), not item["type"].endswith("_type")

    param, item = max(found, key=rank)
    message = item["msg"].removeprefix("Value error, ")
    head, colon, rest = message.partition(": ")
    if (
        item["type"] == "value_error" and colon and head.isidentifier()
    ):  # the contract's validators begin with the field
        param, message = f"{param}.{head}" if param else head, rest
    is_range = item["type"] in ("less_than", "greater_than_equal") and _names_an_index(param)
    raise AkvError("span_out_of_range" if is_range else "invalid_request", f"{param or 'body'}: {message}", param=param)


def _names_an_index(param: str) -> bool:
    name = param.rpartition(".")[2].partition("[")[0]
    return name in ("spans", "pages", "start", "end", "at")


def _path(loc: tuple[int | str, ...], body: Any, *, is_missing: bool) -> str:
    """`("spans", 0, 1)` as `spans[0][1]`, leaving out the names that pydantic puts between for unions, also where a
    part has a field of its type's name besides the one at fault."""
    path, here = "", body
    for i, step in enumerate(loc):
        is_tag = isinstance(here, dict) and here.get("type") == step and i + 1 < len(loc) and loc[i + 1] in here
        if is_tag:
            continue
        if isinstance(step, int) and isinstance(here, list | tuple):
            path, here = f"{path}[{step}]", here[step] if step < len(here) else None
        elif isinstance(here, dict) and (step in here or (is_missing and i + 1 == len(loc))):
            path, here = f"{path}.{step}" if path else str(step), here.get(step)
    return path


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in a body, bounded, since each of its fields may be one to complain about."""
    if len(pairs) > MAX_FIELDS:
        raise AkvError("invalid_request", f"an object in the body has more than {MAX_FIELDS} fields")
    return dict(pairs)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _refuse_deep(body: dict[str, Any]) -> None:
    for key, value in body.items():
        if is_deep(value):
            raise invalid(key[:100], f"lists and objects nest more than {MAX_DEPTH} deep")


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
