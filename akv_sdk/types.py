"""The wire contract: every body that AKV adds to the OpenAI API, as pydantic models, and what the SDK reads of
OpenAI's own replies.

Owns names, defaults and bounds of JSON fields. Knows neither HTTP nor the server; the server imports this module and
nothing else of the SDK. Spans are half-open `[start, end)` ranges of stream *indexes* (never positions).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    model_serializer,
    model_validator,
)

Index = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Span = tuple[Index, Index]
Repos = StrictBool | Literal["auto"]
Mode = Literal["mask", "forget"]
OnMiss = Literal["replay", "forget"]
BlockKind = Literal["observation", "thinking", "tool_input"]

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in a request. Its first misfit is the one that is named: looking for more would take as long as it is."""


class Wire(BaseModel):
    """Base of request bodies: an unknown field is an error that names it, never silently ignored."""

    model_config = ConfigDict(extra="forbid")


class Reply(BaseModel):
    """Base of reply bodies: a newer server may add fields without breaking an older client."""

    model_config = ConfigDict(extra="ignore")


class Op(Wire):
    """One entry of a stream's history, exactly as the server applied it.

    `at` is the stream length from which it holds. For a drop with `mode="forget"`, `at == start`. `repos` on a drop
    or restore says that the gap was closed (or opened again) in the same breath. `end` is None only for a repos that
    also moves everything computed later.
    """

    op: Literal["drop", "repos", "restore"]
    at: Index
    start: Index
    end: Index | None = None
    delta: StrictInt = Field(default=0, gt=-(2**31), lt=2**31)
    repos: StrictBool = False
    mode: Mode = "mask"

    @model_validator(mode="after")
    def _fields_fit_the_op(self) -> Op:
        if self.op != "repos" and self.end is None:
            raise ValueError(f"end: a {self.op} needs one")
        if self.op != "repos" and self.delta:
            raise ValueError(f"delta: a {self.op} has none")
        if self.op == "repos" and self.repos:
            raise ValueError("repos: only a drop or a restore carries this flag")
        if self.op != "drop" and self.mode != "mask":
            raise ValueError("mode: only a drop has one")
        return self


class Marking(Wire):
    """What a caller says about a message: the `akv` object of a message, where a framework lets it through.

    `ephemeral`: its observation may be dropped (true), may not (false), or its tags decide (left out). Of an
    observation that is dropped, the first `keep_head` and the last `keep_tail` tokens stay. `pinned`: never dropped.
    `tags` are SWE-agent's: `keep_output` pins, `remove_output` marks and is dropped at once by `LastNObservations`.
    """

    ephemeral: StrictBool | None = None
    keep_head: Index = 0
    keep_tail: Index = 0
    pinned: StrictBool = False
    tags: Items[str] = []


class MessageMarking(Marking):
    """The whole `akv` object of a message. `token_ids` are those that an assistant message was generated as, the end
    token included: a server that has no such message in its stream takes them as they are, if they decode to the
    message, so that its tokens lie where they lay. Text that a model wrote need not tokenize as it did.
    """

    token_ids: Items[Index] | None = Field(default=None, max_length=1_000_000)


class Mark(Marking):
    """A marking with the place it speaks of: a message by its index (`tool_call_id`, if given, has to be that
    message's own; an id alone may stand in several), one of its blocks, or a span of the stream."""

    message: Index | None = None
    tool_call_id: str | None = None
    block: str | None = None
    span: Span | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Mark:
        if (self.message is None) == (self.span is None):
            raise ValueError("message: give exactly one of message and span")
        if self.span is not None and (self.tool_call_id is not None or self.block is not None):
            raise ValueError("span: a span stands alone, without tool_call_id or block")
        return self


class AutoDrop(Wire):
    """When the server lets a marked observation go by itself: once none of its pages got as much as `epsilon` of the
    attention that an older token gets on average, in each of the last `turns` turns. `dry_run`: it only says so."""

    epsilon: float = Field(default=0.25, gt=0, le=10, allow_inf_nan=False)
    turns: Annotated[StrictInt, Field(ge=1, le=1000)] = 3
    dry_run: StrictBool = False


class AkvRequest(Wire):
    """The `akv` object in the body of a completion request (`extra_body` of the openai client).

    `ops`, if given, is the stream's whole history and replaces what the server has, with a warning where that undoes
    ops; left out, the server's journal holds. That way either side may lose its state. `marks` speak for this request
    alone: send those that shall hold with each. `auto_drop` turns server-driven drops on or off for this request; left
    out, the server's start decides.
    """

    session: str | None = Field(default=None, min_length=1, max_length=200)
    ops: Items[Op] | None = Field(default=None, max_length=100_000)
    on_miss: OnMiss = "replay"
    marks: Items[Mark] | None = Field(default=None, max_length=100_000)
    auto_drop: AutoDrop | StrictBool | None = None


class Block(Reply):
    """A marked part of a message. `[start, end)` is its inside: the tags around it stay visible.

    `visible`: any of it is. Besides marked observations (`id` is theirs), a server names the model's reasoning, between
    `<think>` and `</think>` (`thinking-0`, …), and the arguments of a tool call (`input-0`, …, with the call's id),
    between their braces; a chat template that does not write them as a JSON object has no such blocks.
    """

    id: str
    start: int
    end: int
    visible: bool
    kind: BlockKind = "observation"
    tool_call_id: str | None = None


class MessageSpan(Reply):
    """Where one message lies in the stream. `[start, end)` includes what the chat template puts around it;
    `[content_start, content_end)` is its content alone."""

    message: int
    role: str
    start: int
    end: int
    content_start: int
    content_end: int
    tool_call_id: str | None = None
    blocks: list[Block] = []


class InputTokens(Wire):
    type: Literal["input_tokens"] = "input_tokens"
    value: Index


class ToolUses(Wire):
    type: Literal["tool_uses"] = "tool_uses"
    value: Index


class ThinkingTurns(Wire):
    type: Literal["thinking_turns"] = "thinking_turns"
    value: Annotated[Index, Field(ge=1)]


class AllThinking(Wire):
    type: Literal["all"] = "all"


class ClearToolUses20250919(Wire):
    """Anthropic's `clear_tool_uses_20250919`. Past `trigger`, all tool results but the newest `keep` go. When they
    hold fewer tokens than `clear_at_least`, nothing goes. `clear_tool_inputs`: of every call, or of these tools."""

    type: Literal["clear_tool_uses_20250919"] = "clear_tool_uses_20250919"
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] = InputTokens(value=100_000)
    keep: ToolUses = ToolUses(value=3)
    clear_at_least: InputTokens | None = None
    exclude_tools: Items[str] | None = None
    clear_tool_inputs: StrictBool | Items[str] | None = None


class ClearThinking20251015(Wire):
    """Anthropic's `clear_thinking_20251015`: of the assistant messages that hold reasoning, the newest keep it."""

    type: Literal["clear_thinking_20251015"] = "clear_thinking_20251015"
    keep: Literal["all"] | Annotated[ThinkingTurns | AllThinking, Field(discriminator="type")] = ThinkingTurns(value=1)


class ClearToolUsesEdit(Wire):
    """As LangChain has it, see the policy of this name: `clear_at_least` is a stop point."""

    type: Literal["ClearToolUsesEdit"]
    trigger: Index = 100_000
    keep: Index = 3
    clear_at_least: Index = 0
    exclude_tools: Items[str] = []
    clear_tool_inputs: StrictBool = False
    placeholder: str = "[cleared]"


class LastNObservations(Wire):
    type: Literal["LastNObservations"]
    n: Index
    polling: Annotated[Index, Field(ge=1)] = 1


class RollingDrop(Wire):
    type: Literal["RollingDrop"]
    window_tokens: Index


class DropThinking(Wire):
    type: Literal["DropThinking"]
    keep: Index | Literal["all"] = 1


class DropRepeats(Wire):
    type: Literal["DropRepeats"]


OwnEdit = ClearToolUsesEdit | LastNObservations | RollingDrop | DropThinking | DropRepeats
"""A policy of `akv_sdk.policies` as JSON: its name, and its arguments."""
Edit = Annotated[ClearToolUses20250919 | ClearThinking20251015 | OwnEdit, Field(discriminator="type")]


class ContextManagement(Wire):
    """Anthropic's `context_management` object, as a completion request may carry it. Its list takes AKV's policies,
    too."""

    edits: Items[Edit] = Field(default=[], max_length=100)

    @model_validator(mode="after")
    def _thinking_first(self) -> ContextManagement:
        if any(isinstance(edit, ClearThinking20251015) for edit in self.edits[1:]):
            raise ValueError("edits: clear_thinking_20251015 comes first, and once")
        return self


class AppliedEdit(Reply):
    """One entry of `applied_edits`: an edit of `context_management` that did something to this request, or what the
    server dropped by itself behind the answer (`auto_drop`). As JSON it has the counts of its kind alone."""

    type: str
    cleared_tool_uses: int = 0
    cleared_thinking_turns: int = 0
    cleared_input_tokens: int = 0

    @model_serializer(mode="wrap")
    def _of_its_kind(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialise(self).items() if name in self.model_fields_set}


class AkvReply(Reply):
    """The `akv` object in every completion (in the last chunk, when streaming).

    `prefilled_tokens` are tokens computed for the first time; `replayed_tokens` were computed before and had to be
    computed again because their KV was gone. Neither counts tokens that came from the cache.
    """

    session: str | None = None
    stream_tokens: int
    visible_tokens: int
    dropped_tokens: int
    prefilled_tokens: int
    replayed_tokens: int
    next_position: int
    spans: list[MessageSpan] = []
    ops: list[Op] = []
    applied_edits: list[AppliedEdit] = []
    warnings: list[str] = []


class DropRequest(Wire):
    """Body of `POST /v1/cache/drop`. Exactly one of `spans`, `blocks`, `pages` (logical pages of 16 tokens).

    `repos`: whether what follows moves up into the gap. "auto" leaves gaps open while at most three quarters of the
    model's window are used. The drop, or the completion, that goes beyond closes them all; the history then shows what
    was done (`repos` ops with their deltas), never the word.
    """

    session: str = Field(min_length=1, max_length=200)
    spans: Items[Span] | None = Field(default=None, max_length=10_000)
    blocks: Items[str] | None = Field(default=None, max_length=10_000)
    pages: Items[Index] | None = Field(default=None, max_length=100_000)
    repos: Repos = True
    mode: Mode = "mask"

    @model_validator(mode="after")
    def _one_way_to_say_what(self) -> DropRequest:
        if sum(given is not None for given in (self.spans, self.blocks, self.pages)) != 1:
            raise ValueError("spans: give exactly one of spans, blocks and pages")
        return self


class RestoreRequest(Wire):
    """Body of `POST /v1/cache/restore`. Exactly one of `spans` and `blocks`.

    `repos` (true and "auto" alike): what follows moves away by as much as the drop's gap was closed, by nothing where
    it was left open. False moves nothing, and is refused (`position_conflict`) where the gap was closed.
    """

    session: str = Field(min_length=1, max_length=200)
    spans: Items[Span] | None = Field(default=None, max_length=10_000)
    blocks: Items[str] | None = Field(default=None, max_length=10_000)
    repos: Repos = True

    @model_validator(mode="after")
    def _one_way_to_say_what(self) -> RestoreRequest:
        if (self.spans is None) == (self.blocks is None):
            raise ValueError("spans: give exactly one of spans and blocks")
        return self


class ReposRequest(Wire):
    """Body of `POST /v1/cache/repos`. `end: null` also moves everything computed later."""

    session: str = Field(min_length=1, max_length=200)
    start: Index
    end: Index | None = None
    delta: StrictInt = Field(gt=-(2**31), lt=2**31)


class SegmentInfo(Reply):
    """A run of visible tokens that moved together; `position = index + shift`."""

    start: int
    end: int
    shift: int
    written_shift: int


class LayoutReply(Reply):
    """What a session's history comes to now. Answer of the ops routes and part of `GET /v1/cache/sessions/{id}`.

    `changed` counts the tokens that the op made invisible, made visible or moved (visible ones). `applied` are the
    ops that this call added to the history, with the values the server resolved (`at`, spans of blocks, "auto").
    """

    session: str
    stream_tokens: int
    visible_tokens: int
    dropped_tokens: int
    next_position: int
    changed: int = 0
    applied: list[Op] = []
    ops: list[Op] = []
    segments: list[SegmentInfo] = []


class SessionInfo(LayoutReply):
    """`GET /v1/cache/sessions/{id}`. `fragmentation` is 1 - visible tokens / slots held by resident pages."""

    spans: list[MessageSpan] = []
    resident_tokens: int
    pages: int
    fragmentation: float
    generating: bool
    idle_s: float


class SessionList(Reply):
    object: Literal["list"] = "list"
    data: list[SessionInfo]


class ForkRequest(Wire):
    """Body of `POST /v1/cache/sessions/{id}/fork`. The name of the copy; a fresh one is made up when left out."""

    session: str | None = Field(default=None, min_length=1, max_length=200)


class CacheStats(Reply):
    """`GET /v1/cache/stats`: counters since start-up, and the pool as it is now. Token counts unless named pages.
    `sessions` are the caller's own; all else is the server's, whoever its tenants are.

    Of the used pages, `shared` are those that several histories see or hold, `evictable` those that no running request
    holds, `dead` those of these that no history sees. `fragmentation[i]` counts the histories at rest in the tree that
    do not see between i and i + 1 tenths of their pages' slots. Cached tokens are those of prompts that need not be
    computed: the same `session` had computed them, they are `shared` with another one that had, or the host `tier` has
    them. `tokens_loaded` were brought back from there, for prompts and for requests that had been preempted.
    """

    page_size: int
    pages_total: int
    pages_free: int
    pages_used: int
    pages_shared: int
    pages_evictable: int
    pages_dead: int
    tree_edges: int
    fragmentation: list[int]
    sessions: int
    sessions_expired: int
    running: int
    waiting: int
    tokens_cached: int
    tokens_cached_session: int
    tokens_cached_shared: int
    tokens_cached_tier: int
    tokens_loaded: int
    tokens_stored: int
    tier_blocks: int  # of page_size tokens
    tier_damaged: int  # blocks that did not pass their checksum
    tokens_prefilled: int
    tokens_replayed: int
    tokens_generated: int
    pages_copied: int
    pages_evicted: int
    compactions: int
    tokens_moved: int
    pages_compacted: int
    preemptions: int
    steps: int
    attention_launches: int


class RenderRequest(Wire):
    """Body of `POST /v1/render`: the tokens and spans a chat request would have, without running it."""

    model: str | None = None
    messages: Items[dict[str, Any]]
    tools: Items[dict[str, Any]] | None = None
    add_generation_prompt: StrictBool = True


class RenderReply(Reply):
    tokens: list[int]
    text: str
    spans: list[MessageSpan]


class TokenizeRequest(Wire):
    """Body of `POST /tokenize`. Text is never parsed for special tokens unless `parse_special` says so."""

    model: str | None = None
    prompt: str
    add_special_tokens: StrictBool = False
    parse_special: StrictBool = False


class TokenizeReply(Reply):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Items[Index] = Field(max_length=1_000_000)


class DetokenizeReply(Reply):
    prompt: str


class TokenizerReply(Reply):
    """`GET /v1/tokenizer`: what tiktoken needs to build the same encoding, or `tiktoken: null` where it cannot.

    `mergeable_ranks` maps base64 of a token's bytes to its rank. Where a rank is not the token's id, `rank_to_id`
    lists the ids by rank; otherwise it is null.
    """

    name: str
    num_vocab: int
    eos_token_id: int
    special_tokens: dict[str, int]
    tiktoken: TiktokenSpec | None = None


class TiktokenSpec(Reply):
    """Text is cut at `added_tokens` (ordinary text that is one token wherever it stands); what lies between is brought
    to the normal form `normalizer`, cut by `pattern`, and merged. A byte without a rank has no token at all."""

    pattern: str
    mergeable_ranks: dict[str, int]
    rank_to_id: list[int] | None = None
    added_tokens: dict[str, int] = {}
    normalizer: Literal["NFC"] | None = None


class ErrorBody(Reply):
    """The OpenAI error object. `code` is one of the stable codes, `param` names the field at fault."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply):
    error: ErrorBody


class PromptTokensDetails(Reply):
    cached_tokens: int = 0


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class Choice(Reply):
    """One continuation. A chat has `message`, a text completion has `text`."""

    index: int = 0
    text: str = ""
    message: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Completion(Reply):
    """Reply of both completion routes; a stream is assembled into one as well. The properties speak of the first
    choice, which is the only one unless `n` was given."""

    id: str = ""
    model: str = ""
    choices: list[Choice] = Field(min_length=1)
    usage: Usage
    akv: AkvReply

    @property
    def text(self) -> str:
        """What the model wrote; empty where it only called tools."""
        choice = self.choices[0]
        return choice.text if choice.message is None else choice.message.get("content") or ""

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message, ready to be sent back as it is."""
        message = self.choices[0].message
        return {"role": "assistant", "content": self.choices[0].text} if message is None else message

    @property
    def token_ids(self) -> list[int] | None:
        """Ids of the generated tokens, or None where `return_token_ids` was not asked for."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> dict[str, Any] | None:
        return self.choices[0].logprobs


class ModelCard(Reply):
    """One entry of `GET /v1/models`."""

    id: str
    max_model_len: int | None = None


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelCard]
