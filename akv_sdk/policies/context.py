"""What a policy sees, what it may drop, and the one guard that every policy's choice passes.

Owns reading markings (tags, `akv` objects, SWE-agent's tags, marks by place), the list of what is never dropped, and
interval arithmetic over stream indexes. Pure, over the wire's types alone: whoever holds the messages, spans and ops of
a stream, client or server, may use it. Knows no session and no single policy.

What is never dropped: system and user text, anything unmarked, a call's arguments without its result, what is pinned,
the first tokens of the stream, and what was dropped once before. The last makes a policy fire once per block: the
history of ops says what was dropped, so a resend, or a restart of the client, drops nothing again, and what the agent
restored stays. It all holds by construction: a policy chooses among targets, and a target's `parts` leave it out.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from akv_sdk.types import Block, Mark, Marking, MessageMarking, MessageSpan, Mode, Op, Span

Message = Mapping[str, Any]
Kind = Literal["observation", "thinking", "tool_input"]

NUM_SINK_TOKENS = 4  # attention leans on the first tokens whatever they say (StreamingLLM, arXiv:2309.17453)
KEEP_TAG, REMOVE_TAG = "keep_output", "remove_output"

_NOTE_OPENING = "[No longer shown: "
_NOTES = re.compile(rf"(?:{re.escape(_NOTE_OPENING)}[^\n]*\]\n)*")
_TAG = re.compile(r'<ephemeral_observation\s+id="(?P<id>[^"<>\n]*)"\s*>|</ephemeral_observation>')


def tags_of(block_id: str) -> tuple[str, str]:
    """What stands before and behind a text that is the observation of this id. Escapes nothing."""
    return f'<ephemeral_observation id="{block_id}">', "</ephemeral_observation>"


@dataclass(frozen=True, slots=True)
class Target:
    """A marked part of the stream. `[start, end)` is all of it, `parts` what a drop would take now: empty where nothing
    may go (any more).

    Attributes:
        message: index of its message.
        block: id of its block; None where a whole content or a span was marked.
        tool: name of the tool that the observation is of, or that is called.
        call: (assistant message, id) of the tool call that it answers or is of, where there is one.
        is_orphan: names a call that the assistant message before it does not have.
        text: what it says, for observations; empty where it is not known.
        dropped_at: stream length at which it, or a part of it, was first dropped.
        is_whole: none of it is dropped at present.
        is_reread: the newest copy of a text that the model read again after it had been dropped.
    """

    kind: Kind
    message: int
    block: str | None
    start: int
    end: int
    parts: tuple[Span, ...]
    tool: str | None = None
    call: tuple[int, str] | None = None
    is_orphan: bool = False
    text: str = field(default="", repr=False)
    tags: frozenset[str] = frozenset()
    dropped_at: int | None = None
    is_whole: bool = True
    is_reread: bool = False

    @property
    def place(self) -> tuple[str, int, int]:
        """Identifies the target within its stream."""
        return self.kind, self.start, self.end

    @property
    def num_tokens(self) -> int:
        """Tokens that a drop would free now."""
        return measure(self.parts)


@dataclass(frozen=True, slots=True)
class Drop:
    """A target that shall go, and why, in a few words for notes and logs."""

    target: Target
    reason: str


class Policy(Protocol):
    def select(self, context: Context) -> Iterable[Drop]:
        """What to drop now. Pure. Targets without parts may be named; `decide` leaves them out."""
        ...


@dataclass(frozen=True)
class Context:
    """A stream as a policy sees it. Counts what the server has seen: a message appended since has no span yet.

    Attributes:
        messages: the conversation; `MessageSpan.message` is an index into it.
        tool_results_marked: every tool result counts as marked, unless its marking says `ephemeral: false`. A policy
            whose very name says so (Anthropic's edits) sets it on the context that it chooses from.
        refused_summary_tokens: of the last summary that was written and freed nothing, so that it was left aside; 0
            where there was none since one was taken.
    """

    messages: Sequence[Message]
    spans: Sequence[MessageSpan]
    ops: Sequence[Op] = ()
    marks: Sequence[Mark] = ()
    tool_results_marked: bool = False
    refused_summary_tokens: int = 0

    @cached_property
    def dropped(self) -> list[Span]:
        """What the model does not see at present."""
        return dropped_spans(self.ops)

    @property
    def stream_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @property
    def visible_tokens(self) -> int:
        return self.stream_tokens - measure(self.dropped)

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """All marked parts, in stream order, also those that are gone already."""
        return tuple(_with_rereads(sorted(self._find_targets(), key=lambda target: target.start), self.ops))

    @property
    def observations(self) -> list[Target]:
        return [target for target in self.targets if target.kind == "observation"]

    def after(self, drops: Iterable[Drop]) -> Context:
        """The stream as it will be when these are dropped."""
        at = self.stream_tokens
        spans = [span for drop in drops for span in drop.target.parts]
        return replace(self, ops=[*self.ops, *(Op(op="drop", at=at, start=start, end=end) for start, end in spans)])

    def _find_targets(self) -> Iterator[Target]:
        once = ever_dropped(self.ops)
        pinned = [mark.span for mark in self.marks if mark.span is not None and mark.pinned]
        never = union([(0, NUM_SINK_TOKENS), *pinned, *((gone.start, gone.end) for gone in once)])
        calls = _calls(self.messages)
        for span in self.spans:
            message = self.messages[span.message] if span.message < len(self.messages) else {}
            if span.role in ("system", "developer") or message.get("is_demo"):
                continue
            caller, names = calls.get(span.message, (-1, {}))
            for block, marking in self._blocks(span, message):
                is_observation = block.kind == "observation"
                call_id = span.tool_call_id if is_observation else block.tool_call_id
                is_orphan = is_observation and call_id is not None and call_id not in names
                whole = block.start, block.end
                droppable = _droppable(block, marking)
                yield Target(
                    kind=block.kind,
                    message=span.message,
                    block=block.id or None,
                    start=block.start,
                    end=block.end,
                    parts=tuple(subtract(droppable, _within(never, droppable))),
                    tool=message.get("name") or (None if call_id is None else names.get(call_id)),
                    call=None if call_id is None or is_orphan else (caller, call_id),
                    is_orphan=is_orphan,
                    text=text_of(message, block.id or None) if is_observation else "",
                    tags=frozenset(marking.tags),
                    dropped_at=min((gone.at for gone in _within(once, whole)), default=None),
                    is_whole=not _within(self.dropped, whole),
                )

    def _blocks(self, span: MessageSpan, message: Message) -> Iterator[tuple[Block, Marking]]:
        """The marked parts of a message, whatever marks them, and all that is said of each. Those without tags around
        them have an empty id."""
        marks = [mark for mark in self.marks if mark.message == span.message]
        whole = marking_of(message, marks)
        has_tags = False
        for block in span.blocks:
            own = _merged([whole, *(mark for mark in marks if mark.block == block.id)])
            if block.kind != "observation" or own.ephemeral is not False:
                yield block, own
            has_tags |= block.kind == "observation"
        if whole.ephemeral is False:
            return
        is_result = span.role in ("tool", "function") and self.tool_results_marked
        if not has_tags and (whole.ephemeral or REMOVE_TAG in whole.tags or is_result):
            yield Block(id="", start=span.content_start, end=span.content_end, visible=True), whole
        for mark in self.marks:
            if mark.span is not None and mark.ephemeral:
                start, end = max(mark.span[0], span.content_start), min(mark.span[1], span.content_end)
                if start < end:
                    yield Block(id="", start=start, end=end, visible=True), mark


def _droppable(block: Block, marking: Marking) -> Span:
    """What its marking lets go of a block."""
    if marking.pinned or KEEP_TAG in marking.tags:
        return block.start, block.start
    if block.kind != "observation":
        return block.start, block.end
    start = min(block.end, block.start + marking.keep_head)
    return start, max(start, block.end - marking.keep_tail)


def decide(policy: Policy, context: Context) -> list[Drop]:
    """What the policy drops now, in stream order: its choice, held to the guard whoever wrote the policy."""
    drops = list(policy.select(context))
    own = {target.place: target for target in context.targets}
    if any(drop.target.place not in own for drop in drops):  # it took all tool results for marked, as it may
        context = replace(context, tool_results_marked=True)
        own = {target.place: target for target in context.targets}
    chosen: dict[tuple[str, int, int], Drop] = {}
    for drop in drops:
        target = own.get(drop.target.place)
        if target is not None and target.parts:
            chosen.setdefault(target.place, Drop(target, drop.reason))
    went = [target for target in context.observations if target.dropped_at is not None and not target.is_whole]
    goes = [drop.target for drop in chosen.values() if drop.target.kind == "observation"]
    answered = {target.call for target in [*went, *goes] if target.call is not None}
    kept = [drop for drop in chosen.values() if drop.target.kind != "tool_input" or drop.target.call in answered]
    return sorted(kept, key=lambda drop: drop.target.start)


def check_at_least(least: int, **arguments: int) -> None:
    """Raises ValueError that names the argument which is less."""
    for name, value in arguments.items():
        if value < least:
            raise ValueError(f"{name}: {value} is less than {least}")


def spans_of(drops: Iterable[Drop]) -> list[Span]:
    """What the drops take, as disjoint spans in stream order."""
    return union(part for drop in drops for part in drop.target.parts)


def note_of(drops: Sequence[Drop]) -> str:
    """One line for the model: what it no longer sees, how large it was, and how to get it back."""

    def name(target: Target) -> str:
        return target.block or f"{target.kind.replace('_', ' ')} in message {target.message}"

    listed = ", ".join(
        f"{name(drop.target)} ({drop.target.tool + ', ' if drop.target.tool else ''}"
        f"{drop.target.num_tokens} tokens, {drop.reason})"
        for drop in drops
    )
    note = f"{_NOTE_OPENING}{listed}. Ask for it by this name to have it restored.]"
    return " ".join(note.split())


def without_notes(text: str) -> str:
    """A text without the notes that stand before it, each on a line of its own."""
    return text[_NOTES.match(text).end() :]  # type: ignore[union-attr]


def still_dropped(drops: Iterable[Drop], dropped: list[Span]) -> list[Drop]:
    """What of these drops holds: no target, or part of one, that was restored. `dropped` as of `dropped_spans`."""
    left = []
    for drop in drops:
        parts = tuple(gone for part in drop.target.parts for gone in subtract(part, visible_parts(part, dropped)))
        if parts:
            left.append(Drop(replace(drop.target, parts=parts), drop.reason))
    return left


def text_of(message: Message, block: str | None) -> str:
    """An observation's own text: without tags, the notes before it, and outer whitespace."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    if not isinstance(content, str):
        return ""
    if block is not None:
        tags = list(_TAG.finditer(content))
        opening = next((i for i, tag in enumerate(tags) if tag["id"] == block), None)
        closings = [] if opening is None else [tag.start() for tag in tags[opening + 1 :] if tag["id"] is None]
        if opening is None or not closings:
            return ""
        is_result = message.get("role") in ("tool", "function")
        content = content[tags[opening].end() : closings[-1] if is_result else closings[0]]
    return without_notes(f"{content.strip()}\n").strip()


def _with_rereads(targets: Sequence[Target], ops: Sequence[Op]) -> Iterator[Target]:
    newest = {(t.tool, t.text): t for t in targets if t.kind == "observation" and t.text}
    first_drop: dict[tuple[str | None, str], int] = {}
    for target in targets:
        key = (target.tool, target.text)
        is_newest = newest.get(key) is target
        yield replace(target, is_reread=is_newest and key in first_drop and first_drop[key] <= target.start)
        if target.kind == "observation" and target.text and target.dropped_at is not None:
            first_drop[key] = min(target.dropped_at, first_drop.get(key, target.dropped_at))


def _calls(messages: Sequence[Message]) -> dict[int, tuple[int, dict[str, str]]]:
    """For each message, the assistant message before it, and the names of the tools that it calls by the calls' ids:
    ids repeat in real data, the newest assistant message is the one that counts."""
    found: dict[int, tuple[int, dict[str, str]]] = {}
    last: tuple[int, dict[str, str]] = (-1, {})
    for i, message in enumerate(messages):
        if message.get("role") == "assistant":
            calls = message.get("tool_calls") or []
            last = i, {call.get("id", ""): (call.get("function") or {}).get("name", "") for call in calls}
        found[i] = last
    return found


def marking_of(message: Message, marks: Iterable[Mark] = ()) -> Marking:
    """All that is said of a message as a whole. Raises pydantic.ValidationError where its `akv` or `tags` is none."""
    said: list[Marking] = []
    if (own := message.get("akv")) is not None:
        said.append(MessageMarking.model_validate(own))
    if (tags := message.get("tags")) is not None:
        said.append(Marking.model_validate({"tags": tags}))
    return _merged([*said, *(mark for mark in marks if mark.block is None)])


def _merged(markings: Iterable[Marking]) -> Marking:
    """The later of two that speak of the same thing counts; what is pinned stays so."""
    merged = Marking()
    for marking in markings:
        merged = Marking(
            ephemeral=merged.ephemeral if marking.ephemeral is None else marking.ephemeral,
            keep_head=marking.keep_head or merged.keep_head,
            keep_tail=marking.keep_tail or merged.keep_tail,
            pinned=merged.pinned or marking.pinned,
            tags=[*merged.tags, *marking.tags],
        )
    return merged


# --- intervals: half-open spans of stream indexes ---------------------------------------------------------------------


class Dropped(NamedTuple):
    """A part of the stream that was dropped at some time. `at`: the stream length of its first drop, `mode` is that
    drop's. `restored_at`: of the restore that holds; None where none does."""

    start: int
    end: int
    at: int
    mode: Mode
    restored_at: int | None


def ever_dropped(ops: Iterable[Op]) -> list[Dropped]:
    """All that a history dropped at some time, in disjoint ascending parts."""
    found: list[Dropped] = []
    for op in ops:  # ascending in `at`
        if op.op == "repos" or op.end is None or op.start >= op.end:
            continue
        span = op.start, op.end
        low, high = _places_within(found, span)
        touched: list[Dropped] = []
        for part in found[low:high]:
            touched += [part._replace(start=a, end=b) for a, b in subtract((part.start, part.end), [span])]
            start, end = max(part.start, op.start), min(part.end, op.end)
            restored_at = op.at if op.op == "restore" and part.mode == "mask" else None
            touched.append(part._replace(start=start, end=end, restored_at=restored_at))
        if op.op == "drop":
            known = [(part.start, part.end) for part in found[low:high]]
            touched += [Dropped(a, b, op.at, op.mode, None) for a, b in subtract(span, known)]
        found[low:high] = sorted(touched)
    return found


def dropped_spans(ops: Iterable[Op]) -> list[Span]:
    """What a history has made invisible by its end."""
    return union((part.start, part.end) for part in ever_dropped(ops) if part.restored_at is None)


def visible_parts(span: Span, dropped: list[Span]) -> list[Span]:
    """What is left of a span; `dropped` as `dropped_spans` gives it."""
    return subtract(span, _within(dropped, span))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same indexes in ascending spans that neither overlap nor touch."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def subtract(span: Span, holes: Iterable[Span]) -> list[Span]:
    """What is left of a span without the holes."""
    left, at = [], span[0]
    for start, end in union(holes):
        if at < min(start, span[1]):
            left.append((at, min(start, span[1])))
        at = max(at, end)
    if at < span[1]:
        left.append((at, span[1]))
    return left


def measure(spans: Iterable[Span]) -> int:
    """Number of indexes in disjoint spans."""
    return sum(end - start for start, end in spans)


P = TypeVar("P", bound=tuple[Any, ...])


def _within(parts: list[P], span: Span) -> list[P]:
    """Those of disjoint ascending parts `(start, end, …)` that share an index with the span."""
    low, high = _places_within(parts, span)
    return parts[low:high]


def _places_within(parts: list[P], span: Span) -> tuple[int, int]:
    """Where in the list they stand, `[low, high)`; an empty slice there where none does."""
    low = bisect_right(parts, span[0], key=lambda part: part[1])
    high = bisect_left(parts, span[1], key=lambda part: part[0])
    return low, max(low, high)
