"""Drop from the cache or rewrite the text: which of the two, when, and what it costs.

Owns the decision, choosing which messages a summary may stand for, and putting it in their place. Calls and their
results stay together. Knows no session; `Session.manage` carries out what is decided here and measures it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any, Literal

from akv_sdk.policies.context import (
    KEEP_TAG,
    Context,
    Drop,
    Message,
    Policy,
    check_at_least,
    decide,
    dropped_spans,
    ever_dropped,
    marking_of,
    measure,
    visible_parts,
)
from akv_sdk.policies.observations import RollingDrop
from akv_sdk.types import Mark, MessageSpan, Op, Span

REQUEST = (
    "Summarise the work so far for yourself: what was asked, what was done and found, what is still to do. "
    "Keep file names, commands, identifiers and figures exactly as they are."
)
SUMMARY_OPENING = "Summary of the work so far:\n"

_MIN_GAIN = 0.25  # of the visible tokens: what a summary shall free, so that there is long none after it

_KEYS = {  # of OpenAI's messages, by role; an answer's calls are told apart
    "assistant": ("role", "content", "name", "refusal"),
    "tool": ("role", "content", "tool_call_id"),
}
_OTHER_KEYS = "role", "content", "name"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a summariser wrote, and what that took: tokens of its prompt that were not cached, and of its answer."""

    text: str
    prefilled_tokens: int = 0
    generated_tokens: int = 0


Summariser = Callable[[list[dict[str, Any]]], Summary | Awaitable[Summary]]


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about a stream, why, and, once it was done, what it took.

    Attributes:
        kind: "nothing", "drop" or "summarise". A summary that was written, and left aside since it would have freed
            nothing, comes to "nothing", too.
        visible_tokens: before.
        freed_tokens: that the drops make invisible; for a summary, by how much fewer are visible after it.
        replaced: messages `[start, end)` that the summary stands for, less those that are pinned.
        prefilled_tokens: that had to be computed for it, by the summariser and again behind the rewritten text.
        elapsed_ms: of carrying it out.
    """

    kind: Literal["nothing", "drop", "summarise"]
    reason: str
    visible_tokens: int
    freed_tokens: int = 0
    drops: tuple[Drop, ...] = ()
    replaced: tuple[int, int] = (0, 0)
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    elapsed_ms: float = 0.0

    @property
    def took_something(self) -> bool:
        return self.kind != "nothing" or self.elapsed_ms > 0

    def __str__(self) -> str:
        if not self.took_something:
            return f"{self.kind}: {self.reason}"
        tokens = (
            f"freed {self.freed_tokens}, prefilled {self.prefilled_tokens}, generated {self.generated_tokens} tokens"
        )
        return f"{self.kind}: {self.reason}; {tokens}, {self.elapsed_ms:.0f} ms"


@dataclass(frozen=True, slots=True)
class CacheOrSummarise:
    """Up to `threshold_tokens` visible tokens, nothing. Above, what `drop` names goes from the cache, if that is
    enough; if not, a summary takes the place of the older messages.

    A summary has to pay: it is asked for where a quarter of what is visible would go by it, taking it to be as long as
    the last one was, and taken where it frees anything. So none follows on each turn where a system prompt, pinned or
    newest messages hold more than the threshold by themselves, or where summaries come out too long; the context then
    goes beyond the threshold.

    Attributes:
        summarise: given messages that end with the request for it, gives the summary; see `summariser`.
        drop: names what may go from the cache; by default the oldest observations, down to the threshold.
        keep_messages: the newest messages that a summary leaves as they are, and those that belong to them.
    """

    threshold_tokens: int
    summarise: Summariser
    drop: Policy | None = None
    keep_messages: int = 6

    def __post_init__(self) -> None:
        check_at_least(0, threshold_tokens=self.threshold_tokens, keep_messages=self.keep_messages)

    def decide(self, context: Context) -> Decision:
        visible = context.visible_tokens
        if visible <= self.threshold_tokens:
            return Decision("nothing", f"{visible} visible tokens, no more than {self.threshold_tokens}", visible)
        drops = tuple(decide(self.drop or RollingDrop(self.threshold_tokens), context))
        freed = sum(drop.target.num_tokens for drop in drops)
        over = f"{visible} visible tokens, more than {self.threshold_tokens}"
        if visible - freed <= self.threshold_tokens:
            return Decision("drop", f"{over}; {len(drops)} marked parts free {freed}", visible, freed, drops)
        replaced = summarisable(context, self.keep_messages)
        gain = _expected_gain(context, replaced)
        if gain >= max(1, _MIN_GAIN * visible):
            reason = f"{over}; marked parts free {freed}, which is not enough"
            return Decision("summarise", reason, visible, replaced=replaced)
        if drops:
            return Decision("drop", f"{over}; all {len(drops)} marked parts free {freed}", visible, freed, drops)
        if replaced[0] == replaced[1]:
            return Decision("nothing", f"{over}, but nothing may go and nothing is left to summarise", visible)
        little = f"nothing may go, and a summary would free about {max(0, gain)}, which is too little"
        return Decision("nothing", f"{over}, but {little}", visible)


def summariser(chat: Callable[..., Any], **params: Any) -> Summariser:
    """A summariser from a chat call: `Client.chat`, `AsyncClient.chat`, or `chat.completions.create` of the openai
    package's clients with any server behind it. `params` go with each call (`model`, `max_tokens`, …)."""

    def summarise(messages: list[dict[str, Any]]) -> Summary | Awaitable[Summary]:
        reply = chat(messages=messages, **params)
        return _later(reply) if isawaitable(reply) else _summary_of(reply)

    return summarise


async def _later(reply: Awaitable[Any]) -> Summary:
    return _summary_of(await reply)


def _summary_of(reply: Any) -> Summary:
    message, usage = reply.choices[0].message, reply.usage
    content = message.get("content") if isinstance(message, dict) else message.content
    details = getattr(usage, "prompt_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    return Summary((content or "").strip(), usage.prompt_tokens - cached, usage.completion_tokens)


def groups(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Ranges of messages that only make sense together: an assistant message and the tool results that follow it."""
    found: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if found and message.get("role") in ("tool", "function"):
            found[-1] = found[-1][0], i + 1
        else:
            found.append((i, i + 1))
    return found


def summarisable(context: Context, keep_messages: int) -> tuple[int, int]:
    """Messages `[start, end)` that a summary may stand for: not the system prompt and the task before the first answer,
    and not the newest. `(0, 0)` where that is nothing but an earlier summary or pinned."""
    messages = context.messages
    head = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    if head and _is_summary(messages[head - 1]):
        head -= 1
    newest = max(0, len(messages) - keep_messages)
    if messages and messages[-1].get("role") in ("assistant", "tool", "function"):
        newest = min(newest, groups(messages)[-1][0])  # results of its calls may still be to come
    end = max((end for _, end in groups(messages) if end <= newest), default=0)
    pinned = _pinned(context)
    goes = [i for i in range(head, end) if i not in pinned and not _is_summary(messages[i])]
    return (head, end) if goes else (0, 0)


def _expected_gain(context: Context, replaced: tuple[int, int]) -> int:
    """Visible tokens of the messages that a summary would take the place of, less those of the last one."""
    pinned = _pinned(context)
    spans = [span for span in context.spans[slice(*replaced)] if span.message not in pinned]
    sizes = [measure(visible_parts((span.start, span.end), context.dropped)) for span in spans]
    earlier = [size for size, span in zip(sizes, spans, strict=True) if _is_summary(context.messages[span.message])]
    return sum(sizes) - max(context.refused_summary_tokens, *earlier, 0)


def partly_visible(context: Context, end: int) -> dict[int, list[Span]]:
    """The messages before `end` of whose content something is dropped, with what the model still sees of it."""
    contents = {span.message: (span.content_start, span.content_end) for span in context.spans[:end]}
    left = {message: visible_parts(content, context.dropped) for message, content in contents.items()}
    return {message: parts for message, parts in left.items() if measure(parts) < measure([contents[message]])}


def request(context: Context, replaced: tuple[int, int], texts: Mapping[int, str]) -> list[dict[str, Any]]:
    """The messages for the summariser: all up to the end of what it shall replace, as the model still sees them, and
    the request. `texts` has what is left of the contents that are `partly_visible`; where it is not known, nothing of
    them is told. Only what any chat API takes: OpenAI's own keys, no call that nobody answered, and a result without a
    call as a user message."""
    asked = []
    partly = partly_visible(context, replaced[1])
    for start, end in groups(context.messages[: replaced[1]]):
        group = context.messages[start:end]
        results = {message["tool_call_id"] for message in group[1:] if message.get("tool_call_id") is not None}
        calls = [call for call in group[0].get("tool_calls") or () if call.get("id") in results]
        ids = {call["id"] for call in calls}
        for i, message in enumerate(group, start):
            role = message.get("role", "")
            told = {key: message[key] for key in _KEYS.get(role, _OTHER_KEYS) if message.get(key) is not None}
            told["content"] = texts.get(i, "") if i in partly else _plain(message.get("content"))
            if role in ("tool", "function") and message.get("tool_call_id") not in ids:
                told = {"role": "user", "content": told["content"]}
            if i == start and calls:
                told["tool_calls"] = [_told_call(call, context, i) for call in calls]
            asked.append(told)
    return [*asked, {"role": "user", "content": REQUEST}]


def _plain(content: Any) -> Any:
    """A content without what other APIs write into its parts; an answer of calls alone has none."""
    if not isinstance(content, list):
        return content or ""
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    return [{"type": "text", "text": part.get("text") or ""} for part in parts] or ""


def _told_call(call: Mapping[str, Any], context: Context, message: int) -> dict[str, Any]:
    """A call as OpenAI has it, without its arguments where the model does not see all of them."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    for span in context.spans[message : message + 1]:
        for block in span.blocks:
            inside = block.start, block.end
            if block.kind == "tool_input" and block.tool_call_id == call["id"]:
                arguments = arguments if measure(visible_parts(inside, context.dropped)) == measure([inside]) else "{}"
    return {"id": call["id"], "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def rewritten(context: Context, replaced: tuple[int, int], summary: str) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The conversation with the summary in the place of the messages, and where each that stays comes to stand. Groups
    with something pinned stay, behind the summary."""
    pinned = _pinned(context)
    kept = [i for i in range(len(context.messages)) if not replaced[0] <= i < replaced[1] or i in pinned]
    messages = [dict(context.messages[i]) for i in kept]
    messages.insert(replaced[0], {"role": "user", "content": f"{SUMMARY_OPENING}{summary}"})
    return messages, {old: new + (new >= replaced[0]) for new, old in enumerate(kept)}


@dataclass(frozen=True, slots=True)
class Moves:
    """Where the tokens of a conversation lie once it was rewritten.

    Attributes:
        places: where each message that stayed stands now, by its index before.
        before: the spans of all messages that were in the stream; none of those that were appended since.
        after: the spans of the rewritten conversation.
    """

    places: Mapping[int, int]
    before: Sequence[MessageSpan]
    after: Sequence[MessageSpan]

    def parts(self, start: int, end: int) -> list[Span]:
        """Of a span of the stream, what stayed, at its new place: a part for each message."""
        first = bisect_right(self.before, start, key=lambda span: span.end)
        last = bisect_left(self.before, end, key=lambda span: span.start)
        moved = [
            (_moved(max(start, old.start), old, new), _moved(min(end, old.end), old, new))
            for old in self.before[first:last]
            if (new := self._home(old)) is not None
        ]
        return [(a, b) for a, b in moved if a < b]

    def at(self, at: int) -> int:
        """The stream length that stands for an earlier one: behind the last token before it that stayed."""
        for old in reversed(self.before[: bisect_left(self.before, at, key=lambda span: span.start)]):
            if (new := self._home(old)) is not None:
                return _moved(min(at, old.end), old, new)
        return 0

    def visible_tokens(self, ops: Sequence[Op]) -> int:
        """Visible tokens after it under these ops, in what was in the stream before, and the summary."""
        appended = {new for old, new in self.places.items() if old >= len(self.before)}
        spans = [(span.start, span.end) for span in self.after if span.message not in appended]
        dropped = dropped_spans(ops)
        return sum(measure(visible_parts(span, dropped)) for span in spans)

    def _home(self, old: MessageSpan) -> MessageSpan | None:
        return self.after[self.places[old.message]] if old.message in self.places else None


def _moved(index: int, old: MessageSpan, new: MessageSpan) -> int:
    """An index, or the end of a span, within a message at its new place. Where the message tokenizes otherwise than
    before, as text that the model wrote may, it lies as far behind the edge before it as there is room."""
    edges = [(old.start, new.start), (old.content_start, new.content_start)]
    if [(block.kind, block.id) for block in old.blocks] == [(block.kind, block.id) for block in new.blocks]:
        for a, b in zip(old.blocks, new.blocks, strict=True):
            edges += [(a.start, b.start), (a.end, b.end)]
    edges = sorted([*edges, (old.content_end, new.content_end), (old.end, new.end)])
    at = bisect_right(edges, index, key=lambda edge: edge[0])
    edge, moved = edges[at - 1]
    return min(moved + index - edge, edges[min(at, len(edges) - 1)][1])


def moved_ops(ops: Sequence[Op], moves: Moves) -> list[Op]:
    """The history of a rewritten conversation: what was dropped of the messages that stayed is dropped again, as early
    as it was, and restored again where it was. Positions close up behind each drop, whatever they did before."""
    moved = []
    for part in ever_dropped(ops):
        for start, end in moves.parts(part.start, part.end):
            at = start if part.mode == "forget" else max(end, moves.at(part.at))
            moved.append(Op(op="drop", at=at, start=start, end=end, repos=True, mode=part.mode))
            if part.restored_at is not None:
                at = max(at, moves.at(part.restored_at))
                moved.append(Op(op="restore", at=at, start=start, end=end, repos=True))
    return sorted(moved, key=lambda op: op.at)


def moved_drops(drops: Sequence[Drop], moves: Moves) -> list[Drop]:
    """The drops of a rewritten conversation that a note is still to tell of: those of messages that stayed."""
    moved = []
    for drop in drops:
        target = drop.target
        if whole := moves.parts(target.start, target.end):
            parts = tuple(part for own in target.parts for part in moves.parts(*own))
            (start, end), place = whole[0], moves.places[target.message]
            moved.append(Drop(replace(target, message=place, start=start, end=end, parts=parts), drop.reason))
    return moved


def moved_marks(marks: Sequence[Mark], moves: Moves) -> list[Mark]:
    """The marks of a rewritten conversation; those of messages that went go with them. Text that the model wrote may
    tokenize otherwise when it is rendered again: a span in such a message becomes all of its content."""
    moved = []
    for mark in marks:
        if mark.message is not None:
            if mark.message in moves.places:
                moved.append(mark.model_copy(update={"message": moves.places[mark.message]}))
            continue
        assert mark.span is not None
        home = next((span for span in moves.before if span.start <= mark.span[0] < span.end), None)
        if home is not None and home.message in moves.places:
            new = moves.after[moves.places[home.message]]
            span = mark.span[0] + new.start - home.start, mark.span[1] + new.start - home.start
            if new.end - new.start != home.end - home.start or span[1] > new.end:
                span = new.content_start, new.content_end
            moved.append(mark.model_copy(update={"span": span}))
    return moved


def refused(decision: Decision, summary: Summary, num_tokens: int, freed_tokens: int) -> Decision:
    """The decision to leave a summary of `num_tokens` aside, with what it took."""
    grown = f"its summary of {num_tokens} tokens would free {freed_tokens} and is left aside"
    return replace(
        measured(decision, summary, decision.visible_tokens, 0),
        kind="nothing",
        reason=f"{decision.reason}, but {grown}",
        replaced=(0, 0),
    )


def measured(decision: Decision, summary: Summary, visible_tokens: int, prefilled_tokens: int) -> Decision:
    """The decision to summarise with what is visible after it, and what it took besides the summary itself."""
    return replace(
        decision,
        freed_tokens=decision.visible_tokens - visible_tokens,
        prefilled_tokens=summary.prefilled_tokens + prefilled_tokens,
        generated_tokens=summary.generated_tokens,
    )


def _is_summary(message: Message) -> bool:
    return message.get("role") == "user" and str(message.get("content")).startswith(SUMMARY_OPENING)


def _pinned(context: Context) -> set[int]:
    """Messages of groups in which something is pinned."""
    spans = [mark.span for mark in context.marks if mark.pinned and mark.span is not None]
    pinned = {mark.message for mark in context.marks if mark.pinned and mark.message is not None}
    pinned |= {s.message for s in context.spans for start, end in spans if start < s.end and s.start < end}
    markings = [marking_of(message) for message in context.messages]
    pinned |= {i for i, marking in enumerate(markings) if marking.pinned or KEEP_TAG in marking.tags}
    ranges = [range(start, end) for start, end in groups(context.messages)]
    return {i for group in ranges if not pinned.isdisjoint(group) for i in group}
