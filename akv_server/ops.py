"""The algebra of cache ops: what `drop`, `repos` and `restore` do to a layout. Integers in, layout out.

Owns the meaning of an op, of a history and of a point's signature. Pure: knows neither torch nor numpy, no page, no
tree. A layout is a step function over *all* indexes, those not yet computed included:

    index    0 ......... 32 ........ 128 ....... num_tokens ......... infinity
    state    | visible   | dropped   | visible   :  visible            |
    shift    | 0         | 0         | -96       :  -96                |

so an op on "everything computed later" and a token that is forgotten before it comes need no special case.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from akv_server.errors import AkvError

INFINITY = 2**62
VISIBLE, DROPPED, FORGOTTEN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of a history. Holds from stream length `at` on: token `at` is the first that it shows in.

    `repos` on a drop also moves what follows left by the tokens that became invisible; on a restore, right by those
    that become visible, before they do. A drop with `mode="forget"` has `at == start`: the span was never there.
    `end` is None only for a repos that moves everything computed later, too.
    """

    kind: Literal["drop", "repos", "restore"]
    at: int
    start: int
    end: int | None
    delta: int = 0
    repos: bool = False
    mode: Literal["mask", "forget"] = "mask"


History = tuple[Op, ...]
"""Ops ascending in `at`; at one point they apply in order."""


class Segment(NamedTuple):
    """A maximal run of visible tokens that moved together: `position = index + shift`, keys stored for
    `index + written_shift`."""

    start: int
    end: int
    shift: int
    written_shift: int


class Run(NamedTuple):
    """A piece of the step function. `written` is None while it still equals `shift` because no op came since."""

    start: int
    end: int
    shift: int
    state: int
    written: int | None

    @property
    def written_shift(self) -> int:
        return self.shift if self.written is None else self.written


class Change(NamedTuple):
    """One piece of a signature: in `[start, end)` shifts grew by `delta` and the state became `state`."""

    start: int
    end: int
    delta: int
    state: int


Signature = tuple[Change, ...]
"""What all ops of one point come to, in a canonical form; `()` for nothing. Equal signatures on equal layouts give
equal layouts, whatever ops were written down."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens are visible and where they sit, at one stream length. Immutable: methods return new ones."""

    num_tokens: int = 0
    runs: tuple[Run, ...] = (Run(0, INFINITY, 0, VISIBLE, None),)

    def feed(self, num_tokens: int) -> Layout:
        """The layout after `num_tokens` more tokens were computed under it."""
        return Layout(self.num_tokens + num_tokens, self.runs)

    @property
    def segments(self) -> list[Segment]:
        """Maximal runs of visible tokens, ascending."""
        found: list[Segment] = []
        for run in self.runs:
            end = min(run.end, self.num_tokens)
            if run.state != VISIBLE or run.start >= end:
                continue
            if found and found[-1].end == run.start and found[-1][2:] == (run.shift, run.written_shift):
                found[-1] = found[-1]._replace(end=end)
            else:
                found.append(Segment(run.start, end, run.shift, run.written_shift))
        return found

    @property
    def num_visible(self) -> int:
        return self.num_visible_in(0, self.num_tokens)

    @property
    def next_position(self) -> int:
        """Rotary position of the next token that will be visible (it lies beyond all visible ones)."""
        for run in self.runs[self._at(self.num_tokens) :]:
            if run.state == VISIBLE:
                return max(run.start, self.num_tokens) + run.shift
        raise AssertionError("the last run is open and visible")

    def is_visible(self, index: int) -> bool:
        return self.runs[self._at(index)].state == VISIBLE

    def position(self, index: int) -> int:
        return index + self.shift(index)

    def shift(self, index: int) -> int:
        """How far a token sits from its index."""
        return self.runs[self._at(index)].shift

    def runs_in(self, start: int, end: int) -> tuple[Run, ...]:
        """The runs that share an index with `[start, end)`, not cut to it."""
        return self.runs[self._at(start) : self._at(end - 1) + 1] if start < end else ()

    def num_visible_in(self, start: int, end: int) -> int:
        """Visible tokens with an index in `[start, end)`; those not yet computed count too."""
        return self._num_in_state(start, end, VISIBLE)

    def num_forgotten_in(self, start: int, end: int) -> int:
        """Forgotten tokens with an index in `[start, end)`."""
        return self._num_in_state(start, end, FORGOTTEN)

    def apply(self, op: Op) -> tuple[Layout, int]:
        """The layout after `op`, and the number of tokens that it made invisible, made visible, or (a repos) moved.

        Raises AkvError `span_out_of_range` or `position_conflict`; a layout never changes, so nothing is lost.
        """
        self._check_span(op)
        if op.kind == "repos":
            return self._shifted(op.start, op.end, op.delta)
        assert op.end is not None
        if op.kind == "drop":
            gone = self.num_visible_in(op.start, op.end)
            state = FORGOTTEN if op.mode == "forget" else DROPPED
            layout = self._frozen()._mapped(
                op.start, op.end, lambda r: r._replace(state=state) if r.state == VISIBLE else r
            )
            return (layout._shifted(op.end, None, -gone)[0] if op.repos else layout), gone
        back = self._num_in_state(op.start, op.end, DROPPED)
        layout = self._shifted(op.end, None, back)[0] if op.repos else self
        layout = layout._frozen()._mapped(
            op.start, op.end, lambda r: r._replace(state=VISIBLE) if r.state == DROPPED else r
        )
        layout._check_positions(op.start, op.end)
        return layout, back

    def change_to(self, after: Layout) -> Signature:
        """The canonical difference between this layout and `after`, both at the same stream length."""
        changes: list[Change] = []
        pairs = enumerate(zip(self.runs, after.runs, strict=False))
        i = j = next((place for place, (a, b) in pairs if a is not b), len(self.runs))  # an op leaves most runs as is
        start = self.runs[i].start if i < len(self.runs) else INFINITY
        while start < INFINITY:
            a, b = self.runs[i], after.runs[j]
            end = min(a.end, b.end)
            delta = b.shift - a.shift
            if delta or a.state != b.state:
                last = changes[-1] if changes else None
                if last and last.end == start and (last.delta, last.state) == (delta, b.state):
                    changes[-1] = last._replace(end=end)
                else:
                    changes.append(Change(start, end, delta, b.state))
            i, j, start = i + (a.end == end), j + (b.end == end), end
        return tuple(changes)

    def _at(self, index: int) -> int:
        """Which run holds `index`."""
        return bisect_right(self.runs, index, key=lambda run: run.start) - 1

    def _num_in_state(self, start: int, end: int, state: int) -> int:
        runs = self.runs_in(start, end)
        total = sum([last - first for first, last, _, found, _ in runs if found == state])
        if runs and runs[0].state == state:
            total -= start - runs[0].start
        if runs and runs[-1].state == state:
            total -= runs[-1].end - end
        return total

    def _check_span(self, op: Op) -> None:
        n, end = self.num_tokens, op.end
        # A forgotten span lies in the future of the point where it is forgotten; its end is checked by the stream.
        limit = INFINITY if op.mode == "forget" and op.at == op.start == n else n
        if not 0 <= op.start <= (n if end is None else end) or (end is not None and end > limit):
            shown = f"[{op.start}, {'the end' if end is None else end})"
            raise AkvError(
                "span_out_of_range", f"{op.kind} {shown} does not lie in a stream of {n} tokens", param="spans"
            )

    def _frozen(self) -> Layout:
        """The same layout with a run boundary at `num_tokens` and every computed token's written shift nailed down."""
        n = self.num_tokens
        first = len(self.runs)
        while first > 0 and self.runs[first - 1].written is None:
            first -= 1
        pieces: list[Run] = []
        for run in self.runs[first:]:
            if run.start < n:
                pieces.append(run._replace(end=min(run.end, n), written=run.shift))
            if run.end > n:
                pieces.append(run._replace(start=max(run.start, n)))
        return Layout(n, _merged(self.runs[:first], pieces, ()))

    def _mapped(self, start: int, end: int, change: Callable[[Run], Run]) -> Layout:
        """The same layout with `change` applied to the runs of `[start, end)`, cut to it."""
        if start >= end:
            return self
        first, last = self._at(start), self._at(end - 1)
        pieces: list[Run] = []
        for run in self.runs[first : last + 1]:
            if run.start < start:
                pieces.append(run._replace(end=start))
            inner = run._replace(start=max(run.start, start), end=min(run.end, end))
            pieces.append(change(inner))
            if run.end > end:
                pieces.append(run._replace(start=end))
        return Layout(self.num_tokens, _merged(self.runs[:first], pieces, self.runs[last + 1 :]))

    def _shifted(self, start: int, end: int | None, delta: int) -> tuple[Layout, int]:
        if delta == 0:
            return self, 0
        moved = self.num_visible_in(start, self.num_tokens if end is None else end)
        stop = INFINITY if end is None else end
        layout = self._frozen()._mapped(start, stop, lambda r: r._replace(shift=r.shift + delta))
        layout._check_positions(start, stop)
        return layout, moved

    def _check_positions(self, start: int, end: int) -> None:
        """Visible positions must rise strictly and none be negative; only runs touching `[start, end)` can break it."""
        first, last = self._at(start), self._at(min(end, INFINITY) - 1)
        while first > 0 and self.runs[first].start >= start:
            first -= 1
        while first > 0 and self.runs[first].state != VISIBLE:
            first -= 1
        while last + 1 < len(self.runs) and self.runs[last].start < end:
            last += 1
        while last + 1 < len(self.runs) and self.runs[last].state != VISIBLE:
            last += 1
        floor = -1  # the last position taken so far
        for run in self.runs[first : last + 1]:
            if run.state != VISIBLE:
                continue
            if run.start + run.shift <= floor:
                raise AkvError(
                    "position_conflict",
                    f"token {run.start} would get position {run.start + run.shift}, "
                    + (f"not beyond {floor}, which an earlier token has" if floor >= 0 else "below zero"),
                    param="delta",
                )
            floor = run.end - 1 + run.shift


def _merged(before: tuple[Run, ...], pieces: Iterable[Run], after: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs in order, equal neighbours joined. Only the seams around `pieces` are looked at."""
    middle: list[Run] = list(before[-1:])
    for run in (*pieces, *after[:1]):
        if middle and middle[-1][2:] == run[2:]:
            middle[-1] = middle[-1]._replace(end=run.end)
        else:
            middle.append(run)
    return (*before[:-1], *middle, *after[1:])


@dataclass(frozen=True, slots=True)
class Point:
    """A stream length at which a history changes something, with what it changes and what comes of it.

    `peak` is the highest `next_position` that the tokens before it came to. `digest` names all that changed up to here,
    this point included: equal for histories that mean the same.
    """

    at: int
    signature: Signature
    layout: Layout = field(repr=False)
    peak: int = 0
    digest: bytes = b""

    def then(self, before: Layout, after: Layout) -> Point | None:
        """The next point, where `before` becomes `after`; None if that is no change."""
        at, signature = before.num_tokens, before.change_to(after)
        if not signature:
            return None
        digest = hashlib.blake2b(self.digest + repr((at, signature)).encode(), digest_size=16).digest()
        return Point(at, signature, after, max(self.peak, before.next_position), digest)


_BEGINNING = Point(0, (), Layout())


class Timeline:
    """A history worked out: the points at which the layout changes. Immutable.

    Points whose ops come to nothing are left out, so that two histories with one meaning have equal points.
    Raises AkvError as `Layout.apply` does, with `param` naming the op (`ops[3]`), when a history cannot hold.
    """

    __slots__ = ("history", "points")

    def __init__(self, history: History = (), known: Timeline | None = None) -> None:
        """`known`, if given, is the timeline of an earlier history; where this one only goes on from it, just the new
        ops are worked out."""
        self.history = history
        self.points: list[Point] = []
        i = 0
        if known is not None and known.history and history[: len(known.history)] == known.history:
            # what stands at the last point may go on there, so that point is worked out again
            last_at = known.history[-1].at
            i = bisect_left(known.history, last_at, key=lambda op: op.at)
            self.points = known.points[: known._num_points(last_at - 1)]
        layout = self.points[-1].layout if self.points else Layout()
        while i < len(history):
            at = history[i].at
            if at < layout.num_tokens:
                raise AkvError("invalid_request", f"ops[{i}].at: ops must ascend in at", param=f"ops[{i}].at")
            before = layout = layout.feed(at - layout.num_tokens)
            while i < len(history) and history[i].at == at:
                try:
                    layout, _ = layout.apply(history[i])
                except AkvError as error:
                    raise AkvError(error.code, f"ops[{i}]: {error.message}", param=f"ops[{i}]") from error
                i += 1
            if point := (self.points[-1] if self.points else _BEGINNING).then(before, layout):
                self.points.append(point)

    def layout_at(self, num_tokens: int) -> Layout:
        """The layout of the first `num_tokens` tokens with every op of `at <= num_tokens` applied: what the token with
        index `num_tokens` is computed under."""
        layout = self._last_point(num_tokens).layout
        return layout.feed(num_tokens - layout.num_tokens)

    def signature_at(self, num_tokens: int) -> Signature:
        """What changes exactly at `num_tokens`; `()` for nothing."""
        point = self._last_point(num_tokens)
        return point.signature if point.at == num_tokens else ()

    def next_point(self, num_tokens: int) -> int:
        """The first point beyond `num_tokens`, or INFINITY."""
        i = self._num_points(num_tokens)
        return self.points[i].at if i < len(self.points) else INFINITY

    def points_down_from(self, num_tokens: int) -> Iterator[Point]:
        """The points up to `num_tokens`, the last one first."""
        for i in range(self._num_points(num_tokens) - 1, -1, -1):
            yield self.points[i]

    def digest_at(self, num_tokens: int) -> bytes:
        """Names all that changed up to `num_tokens`, it included."""
        return self._last_point(num_tokens).digest

    def peak(self, num_tokens: int) -> int:
        """The highest `next_position` that the first `num_tokens` tokens come to while they are computed, one phase
        after the other."""
        point = self._last_point(num_tokens - 1)
        return max(point.peak, point.layout.feed(num_tokens - point.at).next_position)

    def _num_points(self, num_tokens: int) -> int:
        """How many points lie at or before `num_tokens`."""
        return bisect_right(self.points, num_tokens, key=lambda p: p.at)

    def _last_point(self, num_tokens: int) -> Point:
        i = self._num_points(num_tokens)
        return self.points[i - 1] if i else _BEGINNING

    def phase_of(self, index: int) -> tuple[int, int, Layout]:
        """`(number, start, layout)` of the phase that a token is computed in. Numbers ascend with the stream."""
        number = self._num_points(index)
        point = self.points[number - 1] if number else _BEGINNING
        return number, point.at, point.layout


def layout_at(history: History, num_tokens: int) -> Layout:
    """The layout that `history` comes to after `num_tokens` tokens. See `Timeline.layout_at`."""
    return Timeline(history).layout_at(num_tokens)


def common_prefix(a: Timeline, b: Timeline, num_tokens: int) -> int:
    """The largest length up to `num_tokens` such that tokens below it were computed under the same ops in both."""
    for p, q in zip(a.points, b.points, strict=False):
        if p is not q and p.digest != q.digest:
            return min(p.at, q.at, num_tokens)
    i = min(len(a.points), len(b.points))
    rest = a.points[i:] or b.points[i:]
    return min(rest[0].at, num_tokens) if rest else num_tokens
