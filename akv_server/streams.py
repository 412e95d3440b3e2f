"""One session's stream as a value: its tokens, the messages in it, its ops; and what each request makes of them.

Owns continuing a stream with a prompt (and what goes when the two differ), working out `drop`, `restore` and `repos`
on it, and naming blocks and pages as spans. Pure: every function returns a new stream or raises and changes nothing.
Knows neither the engine nor sessions, names and waiting.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from akv_sdk import types
from akv_server.blocks import Block
from akv_server.errors import AkvError
from akv_server.ops import DROPPED, VISIBLE, History, Layout, Op, Timeline, common_prefix

LOGICAL_PAGE = 16  # tokens; what `pages` counts in a drop, whatever the pool's page size


@dataclass(frozen=True, slots=True)
class Message:
    """A message in a stream. `[start, end)` includes what the template puts around it; `identity` is what a message
    of a later request must have to be taken for this one. `is_open`: it was generated, and what the template puts
    behind it does not stand in the stream yet. Blocks, too, count in the stream."""

    identity: Hashable
    role: str
    start: int
    end: int
    content_start: int
    content_end: int
    tool_call_id: str | None = None
    blocks: tuple[Block, ...] = ()
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokens of a session with what is known of them. Immutable; `tokens` is never changed in place.

    `num_known` counts the first tokens whose KV was computed under this history before: computing one of them again is
    a replay. `head` identifies what the template makes of a request besides its messages (its tools). `closes_gaps`: a
    drop with repos "auto" left its gap open, to be closed once positions run out, as all were last at `closed_at`.
    `counted` are the turns whose attention was judged, each by where its answer begins, ascending; `quiet` has
    `(start, end, since)` of blocks that got little attention in all of them from the turn `since` on.
    """

    tokens: list[int] = field(default_factory=list)
    messages: tuple[Message, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)
    num_known: int = 0
    head: Hashable = None
    closes_gaps: bool = False
    closed_at: int = 0
    counted: tuple[int, ...] = ()
    quiet: tuple[tuple[int, int, int], ...] = ()

    @property
    def layout(self) -> Layout:
        return self.timeline.layout_at(len(self.tokens))

    def spans(self) -> list[types.MessageSpan]:
        """The messages with their blocks, as the wire shows them."""
        layout = self.layout
        return [
            types.MessageSpan(
                message=i,
                role=m.role,
                start=m.start,
                end=m.end,
                content_start=m.content_start,
                content_end=m.content_end,
                tool_call_id=m.tool_call_id,
                blocks=[
                    types.Block(
                        id=b.id,
                        start=b.start,
                        end=b.end,
                        visible=b.start == b.end or layout.num_visible_in(b.start, b.end) > 0,
                        kind=b.kind,
                        tool_call_id=b.tool_call_id,
                    )
                    for b in m.blocks
                ],
            )
            for i, m in enumerate(self.messages)
        ]

    def with_history(self, history: History) -> Stream:
        """The same tokens under another history. Raises AkvError with `param` = `ops[i]` where it cannot hold."""
        for i, op in enumerate(history):
            if op.at > len(self.tokens) or (op.end or 0) > len(self.tokens):
                message = f"ops[{i}] lies beyond the stream, which has {len(self.tokens)} tokens"
                raise AkvError("span_out_of_range", message, param=f"ops[{i}]")
        timeline = Timeline(history, self.timeline)
        num_known = common_prefix(self.timeline, timeline, self.num_known)
        return replace(self, timeline=timeline, num_known=num_known)

    def truncated(self, num_tokens: int) -> tuple[Stream, int]:
        """The first `num_tokens` tokens, and how many ops went because they took effect behind that.

        What was forgotten before that stays forgotten, as far as it reaches.
        """
        kept: list[Op] = []
        for op in self.timeline.history:
            if op.mode == "forget" and op.end is not None and op.end > num_tokens:
                op = replace(op, end=num_tokens)
                if op.start >= num_tokens:
                    continue
            if op.at <= num_tokens:
                kept.append(op)
        timeline = self.timeline
        while tuple(kept) != timeline.history:
            try:
                timeline = Timeline(tuple(kept))
            except AkvError:  # a forget cut short can leave a later op without room
                kept.pop()
        stream = replace(
            self,
            tokens=self.tokens[:num_tokens],
            messages=tuple(m for m in self.messages if m.end <= num_tokens),
            timeline=timeline,
            num_known=min(num_tokens, common_prefix(self.timeline, timeline, self.num_known)),
            closes_gaps=self.closes_gaps or num_tokens < self.closed_at,
            counted=tuple(turn for turn in self.counted if turn <= num_tokens),
            quiet=tuple(block for block in self.quiet if max(block[1:]) <= num_tokens),
        )
        return stream, len(self.timeline.history) - len(kept)


@dataclass(frozen=True, slots=True)
class Continued:
    """A stream that went on with a prompt. `num_common` tokens were there before; `num_lost` ops lay behind them and
    are gone; `first_different` is the first message that differs from the stream's own, if one does. `warnings` say
    what of the prompt was left aside."""

    stream: Stream
    num_common: int
    num_lost: int
    first_different: int | None = None
    warnings: tuple[str, ...] = ()


def continued(
    stream: Stream,
    tokens: list[int],
    messages: tuple[Message, ...] = (),
    head: Hashable = None,
    first_different: int | None = None,
) -> Continued:
    """The stream of a new prompt, which keeps the ops that hold within what both have in common."""
    common = num_common(stream.tokens, tokens)
    kept, num_lost = stream.truncated(common)
    after = replace(kept, tokens=tokens, messages=messages or kept.messages, head=head)
    return Continued(after, common, num_lost, first_different)


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])


@dataclass(frozen=True, slots=True)
class Edited:
    """A stream after an op request: what it made invisible, visible or moved, and the ops that now stand for it."""

    stream: Stream
    changed: int
    applied: list[Op]


def drop(stream: Stream, spans: Sequence[NamedSpan], *, repos: bool, forget: bool) -> Edited:
    """Drops each span, all or nothing. `forget` takes effect where each span starts, as if it had never been there."""
    n = len(stream.tokens)
    if not forget:
        return _appended(stream, [(s.param, Op("drop", n, s.start, s.end, repos=repos)) for s in spans])
    before = stream.layout.num_visible
    history, applied = stream.timeline.history, []
    for span in spans:
        if span.start == span.end:
            continue
        op = Op("drop", span.start, span.start, span.end, repos=repos, mode="forget")
        history, previous = tuple(sorted((*history, op), key=lambda op: op.at)), history
        try:
            if Timeline(history).points == Timeline(previous).points:
                history = previous  # it was forgotten already
                continue
        except AkvError as error:
            raise AkvError(error.code, error.message, param=span.param) from error
        applied.append(op)
    if not applied:
        return Edited(stream, 0, [])
    after = stream.with_history(history)
    return Edited(after, before - after.layout.num_visible, applied)


def drop_ahead(stream: Stream, spans: Sequence[types.Span], *, known: int, until: int, num_fitting: int) -> Stream:
    """Drops disjoint spans of a prompt that still has to run, and closes their gaps.

        0 ......... known ................. until ... len(tokens)
        | computed  | messages to compute   | the answer's opening

    Those among the tokens computed before take effect at `known`, so that nothing new sees them; the others at `until`,
    once they are computed, or, where so much has no room at once, as if they had never been there.
    """
    history = stream.timeline.history
    known = max(known, history[-1].at if history else 0)
    early = [Op("drop", known, start, end, repos=True) for start, end in spans if end <= known]
    late = [(start, end) for start, end in spans if end > known]
    before = stream.with_history((*history, *early))
    peak = before.timeline.layout_at(until)
    if max(peak.next_position, peak.num_visible) > num_fitting:
        with suppress(AkvError):  # an op that follows leaves no room for it; then the engine says what does not fit
            return drop(before, [NamedSpan("", *span) for span in late], repos=True, forget=True).stream
    until = max(known, until)
    return before.with_history((*history, *early, *(Op("drop", until, *span, repos=True) for span in late)))


def close_gaps(stream: Stream, at: int) -> Edited:
    """Closes, from stream length `at` or the last op on, the gaps that drops left open: what follows invisible tokens
    moves up to the visible ones before them. A gap wider than those tokens is a repos's, and what it is wider by stays.
    """
    history = stream.timeline.history
    at = max(at, history[-1].at if history else 0)
    ops: list[Op] = []
    end = position = 0  # behind the last visible token
    for run in stream.timeline.layout_at(at).runs:
        if run.state == VISIBLE:
            gap = min(run.start + run.shift - position, run.start - end)
            if gap > 0 and end < at:
                ops.append(Op("repos", at, min(run.start, at), None, delta=-gap))
            end, position = run.end, run.end + run.shift
    return Edited(replace(stream.with_history((*history, *ops)), closes_gaps=False, closed_at=at), 0, ops)


def restore(stream: Stream, spans: Sequence[NamedSpan], *, repos: bool) -> Edited:
    """Makes each span visible again, all or nothing. With `repos` what follows moves away by what is missing for that:
    by all of it where the gap was closed, not at all where it was left. Without, a closed gap is `position_conflict`.
    """
    n = len(stream.tokens)
    if not repos:
        try:
            return _appended(stream, [(s.param, Op("restore", n, s.start, s.end)) for s in spans])
        except AkvError as error:
            if error.code == "position_conflict":
                error.message += "; with repos, what follows makes room"
            raise
    layout, ops = stream.layout, list[tuple[str, Op]]()
    for span in sorted(spans, key=lambda span: span.start, reverse=True):  # from the end, where little follows to move
        for start, end in reversed(_dropped_in(layout, span.start, span.end)):
            for op in _bring_back(layout, start, end):
                layout, _ = layout.apply(op)
                ops.append((span.param, op))
    return _appended(stream, ops)


def _dropped_in(layout: Layout, start: int, end: int) -> list[tuple[int, int]]:
    """The dropped tokens of a span, in parts that moved together."""
    parts: list[tuple[int, int]] = []
    shift = 0
    for run in layout.runs_in(start, end):
        if run.state == DROPPED:
            part = max(run.start, start), min(run.end, end)
            if parts and parts[-1][1] == part[0] and shift == run.shift:
                part = parts.pop()[0], part[1]
            parts.append(part)
            shift = run.shift
    return parts


def _bring_back(layout: Layout, start: int, end: int) -> list[Op]:
    """The ops that make dropped tokens of one shift visible: as near to where they sat as fits behind the visible token
    before them. The gap that follows goes as far as the next visible token, or to dropped ones that moved up: theirs
    was closed, and what is open lies behind them."""
    n, num_tokens = layout.num_tokens, end - start
    before = next((run for run in reversed(layout.runs) if run.state == VISIBLE and run.start < start), None)
    after = next(run for run in layout.runs if run.state == VISIBLE and run.end > end)
    floor = min(before.end, start) + before.shift if before else 0
    behind = [max(run.start, end) for run in layout.runs if run.end > end and run.state in (VISIBLE, DROPPED)]
    up_to_visible = [i for i in behind if i <= max(after.start, end)]
    ceiling = min(max(layout.position(i), floor) for i in up_to_visible)
    place = max(floor, min(layout.position(start), ceiling))
    missing = max(0, place + num_tokens - ceiling)
    # Dropped tokens behind whose gap is still as wide as they are stay there: only what had moved up gives way.
    first = next((i for i in behind if layout.position(i) < place + num_tokens), end)
    is_whole = missing == num_tokens and first == end
    ops = [
        Op("repos", n, start, end, delta=place - layout.position(start)),
        Op("repos", n, first, None, delta=0 if is_whole else missing),
        Op("restore", n, start, end, repos=is_whole),
    ]
    return [op for op in ops if op.kind == "restore" or op.delta]


def reposition(stream: Stream, start: int, end: int | None, delta: int) -> Edited:
    """Moves `[start, end)` (`None`: and everything computed later) by `delta` positions."""
    n = len(stream.tokens)
    if start > n or (end is not None and not start <= end <= n):
        param, name = ("start", start) if start > n else ("end", end)
        message = f"{param}: {name} is not between {0 if start > n else start} and {n}, the length of the stream"
        raise AkvError("span_out_of_range", message, param=param)
    return _appended(stream, [("", Op("repos", len(stream.tokens), start, end, delta=delta))])


def _appended(stream: Stream, ops: Sequence[tuple[str, Op]]) -> Edited:
    """The stream with these ops at its end, those that change nothing left out."""
    layout, changed, applied = stream.layout, 0, []
    for param, op in ops:
        before = layout
        try:
            layout, count = layout.apply(op)
        except AkvError as error:
            raise AkvError(error.code, error.message, param=param or error.param) from error
        changed += count
        if before.change_to(layout):
            applied.append(op)
    if not applied:
        return Edited(stream, 0, [])
    return Edited(stream.with_history((*stream.timeline.history, *applied)), changed, applied)


@dataclass(frozen=True, slots=True)
class NamedSpan:
    """A span with the name its caller gave it (`spans[2]`, `blocks[0]`), for errors."""

    param: str
    start: int
    end: int


def named_spans(stream: Stream, spans: Sequence[tuple[int, int]]) -> list[NamedSpan]:
    """The spans of a request, checked against the stream and one another. Spans that touch stay apart: each can be
    restored by itself."""
    return _checked(stream, [NamedSpan(f"spans[{i}]", start, end) for i, (start, end) in enumerate(spans)])


def spans_of_blocks(stream: Stream, names: Sequence[str]) -> list[NamedSpan]:
    """The insides of blocks named by id, or by `message:id` where an id stands in several messages."""
    by_name: dict[str, list[Block]] = {}
    for i, message in enumerate(stream.messages):
        for block in message.blocks:
            by_name.setdefault(block.id, []).append(block)
            by_name.setdefault(f"{i}:{block.id}", []).append(block)
    found = []
    for i, name in enumerate(names):
        blocks = by_name.get(name, [])
        if len(blocks) != 1:
            places = ", ".join(f"[{block.start}, {block.end}]" for block in blocks[:10])
            several = (
                f"{len(blocks)} blocks have this id; say message:id, or where a message has several, spans: {places}"
            )
            hint = several if blocks else "no block has this id"
            raise AkvError("invalid_request", f"blocks[{i}]: {name[:100]!r}: {hint}", param=f"blocks[{i}]")
        found.append(NamedSpan(f"blocks[{i}]", blocks[0].start, blocks[0].end))
    return _checked(stream, found)


def spans_of_pages(stream: Stream, pages: Sequence[int]) -> list[NamedSpan]:
    """Logical pages of 16 tokens as spans, neighbours joined. The stream's last page may be a part of one."""
    n = len(stream.tokens)
    for i, page in enumerate(pages):
        if page * LOGICAL_PAGE >= n:
            message = f"pages[{i}]: page {page} lies beyond a stream of {n} tokens"
            raise AkvError("span_out_of_range", message, param=f"pages[{i}]")
    joined: list[NamedSpan] = []
    for page, i in sorted({page: i for i, page in enumerate(pages)}.items()):
        start, end = page * LOGICAL_PAGE, min((page + 1) * LOGICAL_PAGE, n)
        if joined and joined[-1].end == start:
            joined[-1] = replace(joined[-1], end=end)
        else:
            joined.append(NamedSpan(f"pages[{i}]", start, end))
    return joined


def _checked(stream: Stream, spans: list[NamedSpan]) -> list[NamedSpan]:
    n = len(stream.tokens)
    for span in spans:
        if not 0 <= span.start <= span.end <= n:
            message = f"{span.param}: [{span.start}, {span.end}) does not lie in a stream of {n} tokens"
            raise AkvError("span_out_of_range", message, param=span.param)
    for a, b in pairwise(sorted((s for s in spans if s.start < s.end), key=lambda s: s.start)):
        if b.start < a.end:
            message = f"{b.param}: [{b.start}, {b.end}) overlaps {a.param}, [{a.start}, {a.end})"
            raise AkvError("invalid_request", message, param=b.param)
    return spans


def op_of(wire: types.Op) -> Op:
    """An op as the wire writes it, as the algebra does."""
    return Op(wire.op, wire.at, wire.start, wire.end, wire.delta, wire.repos, wire.mode)


def wire_of(op: Op) -> types.Op:
    return types.Op(op=op.kind, at=op.at, start=op.start, end=op.end, delta=op.delta, repos=op.repos, mode=op.mode)
