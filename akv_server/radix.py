"""The extended radix tree: an ordinary radix tree over one alphabet of tokens *and* ops.

A cached token's KV is a function of the tokens up to it and of the ops with `at <=` its index, so the key of a
sequence is `t_0 … t_{L-1}, {ops at L}, t_L, …`. Ops appear by their canonical signature (`ops.Signature`), at the
start of an edge only. Owns edges, their pages' tree references, and the order of eviction. Knows pages only as ids
in a `Pool`, and neither torch nor requests.

    root ──[t0 … t159]──┬──[ops: drop 32..128, repos -96][t160 …]──   session A, after its drop
                        └──[t160 …]────────────────────────────────   session B, same text, no drop

A token's `slot` is `page * page_size + offset`, or -1: a hole, its KV was let go because no history that ends in the
tree sees it. `written` is the shift its stored key is rotated by.

A history of many ops is a path of many edges, and the next turn of its stream adds one. So that a turn need not walk
all of them, the tree remembers where points lie, and who publishes goes on from the edge that it is attached to.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from akv_server.masks import Array, visible_mask
from akv_server.ops import Layout, Point, Signature, Timeline
from akv_server.pool import Pool

Key = tuple[Signature, int]
Place = tuple[str, bytes, bytes]

_PLACE_TOKENS = 8  # before a point: with its digest they tell nearly all places apart


class Edge:
    """A run of tokens computed under one layout, with the ops that take effect at its start."""

    __slots__ = (
        "alive",
        "children",
        "digest",
        "fragmentation",
        "last_use",
        "layout",
        "leases",
        "ops",
        "pages",
        "parent",
        "place",
        "salt",
        "seen",
        "slots",
        "start",
        "ticket",
        "tokens",
        "written",
    )

    def __init__(
        self, parent: Edge | None, start: int, ops: Signature, layout: Layout, digest: bytes, salt: str
    ) -> None:
        self.parent = parent
        self.salt = salt
        self.start = start  # stream index of its first token
        self.ops = ops
        self.layout = layout  # in force for its tokens
        self.digest = digest  # of all ops up to its start
        self.tokens: Array = np.empty(0, np.int32)
        self.slots: Array = np.empty(0, np.int32)  # -1: a hole
        self.written: Array = np.empty(0, np.int32)
        self.pages: set[int] = set()  # those that `slots` lie in; the edge holds each once
        self.children: dict[Key, Edge] = {}
        self.last_use = 0
        self.leases = 0  # running sequences that go on from its end
        self.seen: list[int] | None = None  # a leaf's view: pages its history sees
        self.fragmentation = 0.0  # of a leaf's history, as it was when `seen` was worked out
        self.alive = True
        self.place: Place | None = None  # of the point at its start
        self.ticket = -1  # of its entry in the order of eviction

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def key(self) -> Key:
        return self.ops, int(self.tokens[0])


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix in the tree computed under the asked history. Valid until the tree is next mutated."""

    length: int
    slots: Array  # int32 [length], -1 where there is a hole
    written: Array  # int32 [length]
    edge: Edge | None  # the last one that lies in it whole
    last: Edge | None  # that it ends in: this, or one below that lies in it in part


class RadixTree:
    """All cached sequences of all salts (a salt is a root of its own: tenants share nothing)."""

    def __init__(self, pool: Pool, sparse_above: float = 1.0) -> None:
        self.pool = pool
        self.sparse_above = sparse_above  # a leaf whose fragmentation exceeds this is `sparse`
        self.clock = 0  # logical time: a counter of uses
        self.num_edges = 0
        self.num_evicted_pages = 0
        self.num_edges_walked = 0  # compared with a stream, to match or to publish
        self.num_by_fragmentation = [0] * 10  # leaves with a view, by tenths of fragmentation
        self.sparse: dict[Edge, None] = {}  # leaves that see little of the pages they keep
        # Told, before it happens, that eviction takes the KV of the edge's tokens with index [start, end).
        self.on_loss: Callable[[Edge, int, int], None] = lambda edge, start, end: None
        self._roots: dict[str, Edge] = {}
        self._places: dict[Place, Edge] = {}  # an edge that starts with a point
        self._holders: dict[int, set[Edge]] = {}  # page -> edges that hold it
        self._leaves: list[tuple[int, int, Edge]] = []  # heap by last use; stale entries are skipped
        self._tickets = itertools.count()

    def match(self, salt: str, tokens: Array, timeline: Timeline) -> Match:
        """Walks tokens and ops together. An op later than the matched prefix does not spoil it. Mutates nothing.

        Args:
            tokens: int32 [num_tokens].
        """
        known = self._known_path(salt, tokens, timeline)
        top = known[-1] if known else self._roots.get(salt)
        below = self._walk(top, tokens, timeline) if top is not None else []
        path = [(edge, len(edge.tokens)) for edge in known] + below
        empty = [np.empty(0, np.int32)]
        whole = [edge for edge, common in path[-2:] if common == len(edge.tokens)]
        return Match(
            sum(common for _, common in path),
            np.concatenate([edge.slots[:common] for edge, common in path] or empty),
            np.concatenate([edge.written[:common] for edge, common in path] or empty),
            whole[-1] if whole else None,
            path[-1][0] if path else None,
        )

    def _known_path(self, salt: str, tokens: Array, timeline: Timeline) -> list[Edge]:
        """The path to where the tree knows the last of the stream's points to lie, or nothing."""
        limit = len(tokens)
        for point in timeline.points_down_from(limit):
            edge = self._places.get(_place(salt, tokens, point)) if point.at <= limit else None
            if edge is not None and edge.parent is not None:
                path = self.path(edge.parent)
                limit = _common_prefix(np.concatenate([e.tokens for e in path]), tokens[: point.at])
                if limit == point.at:
                    return path
        return []

    def _walk(self, edge: Edge, tokens: Array, timeline: Timeline) -> list[tuple[Edge, int]]:
        """The edges below this one, at whose end the stream is, that go on as the stream does, and how many tokens of
        each: all, but for the last one."""
        found = []
        length, common = edge.end, len(edge.tokens)
        while length < len(tokens) and common == len(edge.tokens):
            child = edge.children.get((timeline.signature_at(length), int(tokens[length])))
            if child is None:
                break
            edge = child
            limit = min(len(edge.tokens), len(tokens) - length, timeline.next_point(length) - length)
            common = _common_prefix(edge.tokens[:limit], tokens[length : length + limit])
            found.append((edge, common))
            length += common
        self.num_edges_walked += len(found)
        return found

    def insert(
        self,
        salt: str,
        tokens: Array,
        timeline: Timeline,
        slots: Array,
        written: Array,
        behind: Edge | None = None,
        changed: Iterable[tuple[int, int]] = (),
    ) -> tuple[Edge | None, bool]:
        """Publishes a computed prefix of at least one token. Returns the last edge that lies in it whole, which the
        caller then attaches itself to, and whether any of its slots were changed.

        Where the tree has a token already, its slot stays and takes the place of the given one; where the tree has a
        hole, the given slot fills it. The tree takes references of its own; the caller keeps its lease.

        Args:
            tokens, slots, written: int32 [num_tokens]; a slot of -1 gives the token without KV. The latter two are
                brought in line with the tree.
            behind: an edge that the caller is attached to, which lies in the prefix whole, with all above it.
            changed: spans of tokens that may have got other slots since that edge was published or matched; behind it
                all are looked at.
        """
        top = behind or self._root(salt)
        places = list(self._parts_above(top, changed))
        walked = self._walk(top, tokens, timeline)
        places += [(edge, edge.start, edge.start + common) for edge, common in walked]
        filled, is_changed = [], False
        for edge, lo, hi in places:
            own, given = edge.slots[lo - edge.start : hi - edge.start], slots[lo:hi]
            lacking = (own < 0) & (given >= 0)
            if lacking.any():
                own[lacking] = given[lacking]
                edge.written[lo - edge.start : hi - edge.start][lacking] = written[lo:hi][lacking]
                self._repage(edge)
                filled.append(edge)
            other = (given >= 0) & (given != own)
            if other.any():
                given[other] = own[other]
                written[lo:hi][other] = edge.written[lo - edge.start : hi - edge.start][other]
                is_changed = True
        for leaf in dict.fromkeys(leaf for edge in filled for leaf in self._leaves_below(edge)):
            self._refresh_leaf(leaf)
        last, common = walked[-1] if walked else (top, len(top.tokens))
        start = last.start + common
        if common < len(last.tokens) and start == len(tokens):
            self.touch(last)
            above = last.parent
            return (above if above is not None and above.parent is not None else None), is_changed
        if common < len(last.tokens):
            last = self._split(last, common)
        while start < len(tokens):
            end = min(len(tokens), timeline.next_point(start))
            last = self._extend(last, timeline, tokens, slots[start:end], written[start:end], is_own=last is behind)
            start = end
        self.touch(last)
        return last, is_changed

    def _parts_above(self, edge: Edge, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[Edge, int, int]]:
        """Which parts of the path down to an edge the spans cover."""
        left = [(start, min(end, edge.end)) for start, end in spans if start < edge.end]
        above: Edge | None = edge
        while left and above is not None:
            yield from ((above, max(start, above.start), end) for start, end in left if end > above.start)
            left = [(start, min(end, above.start)) for start, end in left if start < above.start]
            above = above.parent

    def touch(self, edge: Edge) -> None:
        """Marks an edge as just used. Those above it count as used then when they become leaves."""
        self.clock += 1
        edge.last_use = self.clock
        if edge.seen is not None:
            self._enqueue(edge)

    def attach(self, edge: Edge) -> None:
        """A running sequence goes on from the end of `edge`; its lease, not the edge, now says what is seen."""
        edge.leases += 1
        self._refresh_leaf(edge)

    def detach(self, edge: Edge) -> None:
        edge.leases -= 1
        assert edge.leases >= 0
        self._refresh_leaf(edge)

    def evict(self, num_pages: int) -> int:
        """Frees up to that many pages and returns how many: dead ones first, then the tails of the least recently used
        leaves. Never one that a running sequence holds; where it holds all of a leaf, that goes only to get at pages
        above it."""
        freed = 0
        held: deque[Edge] = deque()
        while freed < num_pages:
            if self.pool.dead:
                self._punch(next(iter(self.pool.dead)))
                freed += 1
            elif (leaf := self._least_recently_used()) is not None:
                if leaf.pages and all(self.pool.leases[page] for page in leaf.pages):
                    held.append(leaf)
                else:
                    freed += self._trim(leaf, num_pages - freed)
            elif held and self.pool.num_evictable:
                freed += self._trim(held.popleft(), num_pages - freed)
            else:
                break
        for leaf in held:
            self._enqueue(leaf)
        self.num_evicted_pages += freed
        return freed

    def edges(self) -> Iterator[Edge]:
        """Every edge, roots left out; parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            edge = stack.pop()
            yield edge
            stack.extend(edge.children.values())

    def _leaves_below(self, edge: Edge) -> list[Edge]:
        leaves, stack = [], [edge]
        while stack:
            edge = stack.pop()
            stack.extend(edge.children.values())
            if edge.seen is not None:
                leaves.append(edge)
        return leaves

    def reaching(self, edge: Edge, index: int) -> Iterator[Edge]:
        """The edges, at `edge` or below, that hold a token with this index (which is no less than its start)."""
        stack = [edge]
        while stack:
            edge = stack.pop()
            if edge.end > index:
                yield edge
            else:
                stack.extend(edge.children.values())

    @contextmanager
    def refreshing(self, leaf: Edge) -> Iterator[None]:
        """While the block runs, the leaf sees nothing; after it, what its slots then say."""
        self._unsee(leaf)
        yield
        self._refresh_leaf(leaf)

    def path(self, leaf: Edge) -> list[Edge]:
        """The edges down to `leaf`, the root left out."""
        edges: list[Edge] = []
        edge: Edge | None = leaf
        while edge is not None and edge.parent is not None:
            edges.append(edge)
            edge = edge.parent
        return edges[::-1]

    def relocate(self, slots: Array, new_slots: Array, new_written: Array) -> None:
        """The tokens in `slots` are found in `new_slots` from now on. Tokens beside them, which no history sees, stay
        where they are: their pages are dead now, the first to be evicted, and till then they can be restored.

        Args:
            slots, new_slots, new_written: int32 [num_tokens].
        """
        order = np.argsort(slots)
        ascending = slots[order]
        holders = {
            edge for page in set((slots // self.pool.page_size).tolist()) for edge in self._holders.get(page, ())
        }
        for edge in holders:
            place = np.searchsorted(ascending, edge.slots).clip(max=len(slots) - 1)
            moved = ascending[place] == edge.slots
            edge.slots[moved] = new_slots[order[place[moved]]]
            edge.written[moved] = new_written[order[place[moved]]]
            self._repage(edge)

    # Structure -----------------------------------------------------------------------------------------------------

    def _root(self, salt: str) -> Edge:
        if salt not in self._roots:
            self._roots[salt] = Edge(None, 0, (), Layout(), b"", salt)
        return self._roots[salt]

    def _extend(
        self, last: Edge, timeline: Timeline, stream: Array, slots: Array, written: Array, *, is_own: bool
    ) -> Edge:
        """Adds the stream's next tokens, computed under one layout, behind `last`: in place where that is a leaf, no op
        comes between, and nobody but who publishes (`is_own`: it is attached, too) goes on from its end."""
        start = last.end
        ops = timeline.signature_at(start)
        edge = last
        if last.parent is None or last.children or ops or last.leases > is_own:
            self._unsee(last)  # it is no leaf any more
            layout = timeline.layout_at(start)
            edge = Edge(last, start, ops, layout, timeline.digest_at(start), last.salt)
            self.num_edges += 1
            if ops and start:
                edge.place = _place(edge.salt, stream, next(timeline.points_down_from(start)))
                self._places[edge.place] = edge
        edge.tokens = np.concatenate([edge.tokens, stream[start : start + len(slots)]])
        edge.slots = np.concatenate([edge.slots, slots])
        edge.written = np.concatenate([edge.written, written])
        if edge is not last:
            last.children[edge.key] = edge
        self._repage(edge)
        return edge

    def _split(self, lower: Edge, at: int) -> Edge:
        """Cuts an edge in two and returns the new upper half; pages under the cut are shared by reference."""
        parent = lower.parent
        assert parent is not None and 0 < at < len(lower.tokens)
        upper = Edge(parent, lower.start, lower.ops, lower.layout, lower.digest, lower.salt)
        upper.tokens, lower.tokens = lower.tokens[:at], lower.tokens[at:]
        upper.slots, lower.slots = lower.slots[:at].copy(), lower.slots[at:].copy()
        upper.written, lower.written = lower.written[:at].copy(), lower.written[at:].copy()
        parent.children[upper.key] = upper
        upper.place, lower.place = lower.place, None
        if upper.place is not None and self._places.get(upper.place) is lower:
            self._places[upper.place] = upper
        lower.parent, lower.start, lower.ops = upper, upper.end, ()
        upper.children[lower.key] = lower
        self.num_edges += 1
        self._repage(upper)
        self._repage(lower)
        return upper

    def _remove(self, leaf: Edge, key: Key) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children and not leaf.pages
        del parent.children[key]
        leaf.alive = False
        if leaf.place is not None and self._places.get(leaf.place) is leaf:
            del self._places[leaf.place]
        self.num_edges -= 1
        parent.last_use = max(parent.last_use, leaf.last_use)
        if parent.parent is not None:
            self._refresh_leaf(parent)
        elif not parent.children:
            del self._roots[parent.salt]

    def _repage(self, edge: Edge) -> None:
        """Makes the edge hold exactly the pages that its slots lie in."""
        pages = set(np.unique(edge.slots[edge.slots >= 0] // self.pool.page_size).tolist())
        for page in pages - edge.pages:
            self._holders.setdefault(page, set()).add(edge)
            self.pool.hold(page)
        for page in edge.pages - pages:
            self._let_go(edge, page)
        edge.pages = pages

    def _let_go(self, edge: Edge, page: int) -> None:
        self._holders[page].remove(edge)
        if not self._holders[page]:
            del self._holders[page]
        self.pool.unhold(page)

    # Views and eviction --------------------------------------------------------------------------------------------

    def _refresh_leaf(self, edge: Edge) -> None:
        """Brings a leaf's view, and its place in the order of eviction, up to date."""
        self._unsee(edge)
        if edge.alive and edge.parent is not None and not edge.children and not edge.leases:
            edge.seen, num_visible = self._visible_pages(edge)
            self.pool.view(edge.seen)
            edge.fragmentation = fragmentation(num_visible, len(edge.seen) * self.pool.page_size)
            self.num_by_fragmentation[_tenth(edge.fragmentation)] += 1
            if edge.fragmentation > self.sparse_above:
                self.sparse.setdefault(edge)
            self._enqueue(edge)

    def _enqueue(self, leaf: Edge) -> None:
        """Gives a leaf its place in the order of eviction."""
        if len(self._leaves) > 2 * self.num_edges + 64:
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapq.heapify(self._leaves)
        leaf.ticket = next(self._tickets)
        heapq.heappush(self._leaves, (leaf.last_use, leaf.ticket, leaf))

    def _unsee(self, edge: Edge) -> None:
        if edge.seen is not None:
            self.pool.unview(edge.seen)
            self.num_by_fragmentation[_tenth(edge.fragmentation)] -= 1
            self.sparse.pop(edge, None)
            edge.seen = None

    def _visible_pages(self, leaf: Edge) -> tuple[list[int], int]:
        """Pages with a token that the leaf's history sees at its end, and the number of such tokens."""
        slots = np.concatenate([edge.slots for edge in self.path(leaf)])
        visible = visible_mask(leaf.layout.feed(leaf.end - leaf.layout.num_tokens), leaf.end)
        seen = slots[visible & (slots >= 0)]
        pages: list[int] = np.unique(seen // self.pool.page_size).tolist()
        return pages, len(seen)

    def _is_current(self, entry: tuple[int, int, Edge]) -> bool:
        _, ticket, edge = entry
        return edge.seen is not None and edge.ticket == ticket

    def _least_recently_used(self) -> Edge | None:
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_current(entry):
                return entry[2]
        return None

    def _punch(self, page: int) -> None:
        """Lets go of a dead page: its tokens become holes."""
        inside = {edge: edge.slots // self.pool.page_size == page for edge in self._holders[page]}
        for edge, lost in inside.items():
            offsets = np.flatnonzero(lost)
            self.on_loss(edge, edge.start + int(offsets[0]), edge.start + int(offsets[-1]) + 1)
        for edge, lost in inside.items():
            edge.slots[lost] = -1
            edge.pages.remove(page)
            self._let_go(edge, page)

    def _trim(self, leaf: Edge, num_pages: int) -> int:
        """Cuts pages off the end of a leaf until that many are freed, or all that a running sequence does not hold;
        where it holds all of them, the leaf goes whole. Returns how many were freed."""
        key = leaf.key
        free_before = self.pool.num_free
        self._unsee(leaf)
        page_of = leaf.slots // self.pool.page_size  # a hole gives -1
        pages, first = np.unique(page_of, return_index=True)
        first_of = {p: i for p, i in zip(pages.tolist(), first.tolist(), strict=True) if p >= 0}
        idle = [page for page in first_of if not self.pool.leases[page]]
        freed = sorted((first_of[page] for page in idle if self.pool.edges[page] == 1), reverse=True)
        cut = freed[num_pages - 1] if len(freed) >= num_pages else min((first_of[page] for page in idle), default=0)
        there = np.flatnonzero(page_of[:cut] >= 0)
        cut = int(there[-1]) + 1 if len(there) else 0  # holes at the end are worth nothing
        self.on_loss(leaf, leaf.start + cut, leaf.end)
        leaf.tokens, leaf.slots, leaf.written = leaf.tokens[:cut], leaf.slots[:cut].copy(), leaf.written[:cut].copy()
        self._repage(leaf)
        if cut:
            self._refresh_leaf(leaf)
        else:
            self._remove(leaf, key)
        return self.pool.num_free - free_before

    def check(self) -> None:
        """Asserts what must hold between any two calls."""
        holders: dict[int, set[Edge]] = {}
        views = [0] * self.pool.num_pages
        by_fragmentation = [0] * 10
        count = 0
        for edge in self.edges():
            count += 1
            assert (edge.place is not None) == bool(edge.ops and edge.start)
            parent = edge.parent
            assert parent is not None and parent.children[edge.key] is edge and edge.start == parent.end
            assert len(edge.tokens) == len(edge.slots) == len(edge.written) > 0
            used = edge.slots[edge.slots >= 0] // self.pool.page_size
            assert edge.pages == set(used.tolist())
            for page in edge.pages:
                holders.setdefault(page, set()).add(edge)
            assert (edge.seen is None) == bool(edge.children or edge.leases)
            if edge.seen is not None:
                assert edge.seen == self._visible_pages(edge)[0], "a leaf's view is out of date"
                assert any(e is edge and t == edge.ticket for _, t, e in self._leaves), "a leaf cannot be evicted"
                by_fragmentation[_tenth(edge.fragmentation)] += 1
                for page in edge.seen:
                    views[page] += 1
        assert count == self.num_edges
        assert all(edge.alive and edge.place == place for place, edge in self._places.items())
        assert by_fragmentation == self.num_by_fragmentation
        assert holders == self._holders
        assert views == self.pool.views
        for page in range(self.pool.num_pages):
            assert self.pool.edges[page] == len(holders.get(page, ()))


def _place(salt: str, tokens: Array, point: Point) -> Place:
    return salt, point.digest, tokens[max(0, point.at - _PLACE_TOKENS) : point.at].tobytes()


def _tenth(part: float) -> int:
    return min(int(part * 10), 9)


def fragmentation(num_visible: int, num_slots: int) -> float:
    """The part of the held slots that nobody sees: 1 - visible tokens / slots."""
    return 1 - num_visible / num_slots if num_slots else 0.0


def _common_prefix(a: Array, b: Array) -> int:
    different = a != b
    return int(different.argmax()) if different.any() else len(a)
