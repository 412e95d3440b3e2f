"""The extended radix tree: an ordinary radix tree over one alphabet of tokens *and* ops.

A cached token's KV is a function of the tokens up to it and of the ops with `at <=` its index, so the key of a
sequence is `t_0 … t_{L-1}, {ops at L}, t_L, …`. Ops appear by their canonical signature (`ops.Signature`), at the
start of an edge only. Owns edges, their pages' tree references, and the order of eviction. Knows pages only as ids
in a `Pool`, and neither torch nor requests.

    root ──[t0 … t159]──┬──[ops: drop 32..128, repos -96][t160 …]──   session A, after its drop
                        └──[t160 …]────────────────────────────────   session B, same text, no drop

A token's `slot` is `page * page_size + offset`, or -1: a hole, its KV was let go because no history that ends in the
tree sees it. `written` is the shift its stored key is rotated by.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from akv_server.ops import VISIBLE, Layout, Signature, Timeline
from akv_server.pool import Pool

Array = np.ndarray
Key = tuple[Signature, int]


class Edge:
    """A run of tokens computed under one layout, with the ops that take effect at its start."""

    __slots__ = (
        "alive",
        "children",
        "fragmentation",
        "last_use",
        "layout",
        "leases",
        "ops",
        "pages",
        "parent",
        "salt",
        "seen",
        "slots",
        "start",
        "ticket",
        "tokens",
        "written",
    )

    def __init__(self, parent: Edge | None, start: int, ops: Signature, layout: Layout, salt: str) -> None:
        self.parent = parent
        self.salt = salt
        self.start = start  # stream index of its first token
        self.ops = ops
        self.layout = layout  # in force for its tokens
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
    edges: tuple[Edge, ...]  # the path, the last one possibly matched in part
    ends_on_edge: bool  # the prefix ends where the last edge does


class RadixTree:
    """All cached sequences of all salts (a salt is a root of its own: tenants share nothing)."""

    def __init__(self, pool: Pool, sparse_above: float = 1.0) -> None:
        self.pool = pool
        self.sparse_above = sparse_above  # a leaf whose fragmentation exceeds this is `sparse`
        self.clock = 0  # logical time: a counter of uses
        self.num_edges = 0
        self.num_evicted_pages = 0
        self.num_by_fragmentation = [0] * 10  # leaves with a view, by tenths of fragmentation
        self.sparse: dict[Edge, None] = {}  # leaves that see little of the pages they keep
        # Told, before it happens, that eviction takes the KV of the edge's tokens with index [start, end).
        self.on_loss: Callable[[Edge, int, int], None] = lambda edge, start, end: None
        self._roots: dict[str, Edge] = {}
        self._holders: dict[int, set[Edge]] = {}  # page -> edges that hold it
        self._leaves: list[tuple[int, int, Edge]] = []  # heap by last use; stale entries are skipped
        self._tickets = itertools.count()

    def match(self, salt: str, tokens: Array, timeline: Timeline) -> Match:
        """Walks tokens and ops together. An op later than the matched prefix does not spoil it. Mutates nothing.

        Args:
            tokens: int32 [num_tokens].
        """
        edge = self._roots.get(salt)
        length, path, whole = 0, [], True
        while edge is not None and whole and length < len(tokens):
            edge = edge.children.get((timeline.signature_at(length), int(tokens[length])))
            if edge is None:
                break
            limit = min(len(edge.tokens), len(tokens) - length, timeline.next_point(length) - length)
            common = _common_prefix(edge.tokens[:limit], tokens[length : length + limit])
            whole = common == len(edge.tokens)
            path.append((edge, common))
            length += common
        empty = [np.empty(0, np.int32)]
        return Match(
            length,
            np.concatenate([e.slots[:k] for e, k in path] or empty),
            np.concatenate([e.written[:k] for e, k in path] or empty),
            tuple(e for e, _ in path),
            bool(path) and whole,
        )

    def insert(self, salt: str, tokens: Array, timeline: Timeline, slots: Array, written: Array) -> Edge | None:
        """Publishes a computed prefix and returns the edge that it ends with (None for an empty one).

        Where the tree has a token already, its slot stays and the given one is not used; where the tree has a hole,
        the given slot fills it. The tree takes references of its own; the caller keeps its lease.

        Args:
            tokens, slots, written: int32 [num_tokens]; a slot of -1 gives the token without KV.
        """
        if not len(tokens):
            return None
        match = self.match(salt, tokens, timeline)
        for edge in match.edges:
            common = min(edge.end, match.length) - edge.start
            holes = edge.slots[:common] < 0
            given = slots[edge.start : edge.start + common]
            filled = holes & (given >= 0)
            if filled.any():
                edge.slots[:common][filled] = given[filled]
                edge.written[:common][filled] = written[edge.start : edge.start + common][filled]
                self._repage(edge)
                for leaf in self._leaves_below(edge):
                    self._refresh_leaf(leaf)
        last = match.edges[-1] if match.edges else self._root(salt)
        if match.edges and not match.ends_on_edge:
            last = self._split(last, match.length - last.start)
        start = match.length
        while start < len(tokens):
            end = min(len(tokens), timeline.next_point(start))
            last = self._extend(last, timeline, tokens[start:end], slots[start:end], written[start:end])
            start = end
        self.touch(last)
        return last

    def touch(self, edge: Edge) -> None:
        """Marks the path down to `edge` as just used."""
        self.clock += 1
        above: Edge | None = edge
        while above is not None:
            above.last_use = self.clock
            above = above.parent
        self._refresh_leaf(edge)

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
        leaves. Never one that a running sequence holds."""
        freed = 0
        while freed < num_pages:
            if self.pool.dead:
                self._punch(next(iter(self.pool.dead)))
                freed += 1
            elif (leaf := self._least_recently_used()) is not None:
                freed += self._trim(leaf, num_pages - freed)
            else:
                break
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
            self._roots[salt] = Edge(None, 0, (), Layout(), salt)
        return self._roots[salt]

    def _extend(self, last: Edge, timeline: Timeline, tokens: Array, slots: Array, written: Array) -> Edge:
        """Adds tokens computed under one layout behind `last`: in place where it is a leaf and no op comes between."""
        ops = timeline.signature_at(last.end)
        edge = last
        if last.parent is None or last.children or ops:
            self._unsee(last)  # it is no leaf any more
            edge = Edge(last, last.end, ops, timeline.layout_at(last.end), last.salt)
            self.num_edges += 1
        edge.tokens = np.concatenate([edge.tokens, tokens])
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
        upper = Edge(parent, lower.start, lower.ops, lower.layout, lower.salt)
        upper.tokens, lower.tokens = lower.tokens[:at], lower.tokens[at:]
        upper.slots, lower.slots = lower.slots[:at].copy(), lower.slots[at:].copy()
        upper.written, lower.written = lower.written[:at].copy(), lower.written[at:].copy()
        upper.last_use = lower.last_use
        parent.children[upper.key] = upper
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
        self.num_edges -= 1
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
            if len(self._leaves) > 2 * self.num_edges + 64:
                self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
                heapq.heapify(self._leaves)
            edge.ticket = next(self._tickets)
            heapq.heappush(self._leaves, (edge.last_use, edge.ticket, edge))

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
        """Cuts pages off the end of a leaf until that many are freed or nothing of it is left. Returns how many."""
        key = leaf.key
        free_before = self.pool.num_free
        self._unsee(leaf)
        cut, gained = len(leaf.tokens), 0
        page_of = leaf.slots // self.pool.page_size  # a hole gives -1
        while cut > 0 and gained < num_pages:
            page = int(page_of[cut - 1])
            while cut > 0 and page_of[cut - 1] == page:
                cut -= 1
            gained += page >= 0 and self.pool.edges[page] == 1 and not self.pool.leases[page]
        while cut > 0 and page_of[cut - 1] < 0:
            cut -= 1  # holes at the end are worth nothing
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
        assert by_fragmentation == self.num_by_fragmentation
        assert holders == self._holders
        assert views == self.pool.views
        for page in range(self.pool.num_pages):
            assert self.pool.edges[page] == len(holders.get(page, ()))


def _tenth(part: float) -> int:
    return min(int(part * 10), 9)


def fragmentation(num_visible: int, num_slots: int) -> float:
    """The part of the held slots that nobody sees: 1 - visible tokens / slots."""
    return 1 - num_visible / num_slots if num_slots else 0.0


def shifts(layout: Layout, start: int, end: int) -> Array:
    """int32 [end - start]: how far each token sits from its index."""
    out = np.zeros(end - start, np.int32)
    for run in layout.runs_in(start, end):
        out[max(run.start - start, 0) : run.end - start] = run.shift
    return out


def visible_mask(layout: Layout, num_tokens: int) -> Array:
    """bool [num_tokens]: which tokens a layout sees, those that it has not computed yet included."""
    mask = np.zeros(num_tokens, bool)
    for run in layout.runs:
        if run.state == VISIBLE:
            mask[run.start : run.end] = True
    return mask


def _common_prefix(a: Array, b: Array) -> int:
    different = a != b
    return int(different.argmax()) if different.any() else len(a)
