"""The cache of one model: what of a stream is there, what must be computed, and where new tokens go.

`plan()` decides and mutates nothing; `open`, `reserve`, `publish`, `release` and `close` alone mutate; `check()`
asserts the invariants. Owns leases (what running sequences hold). Knows pages as ids and KV through one function that
copies a page; knows neither torch nor requests.

The rule behind `plan` (DESIGN section 4): to compute token i, every token that the layout *at i* sees must be there.
So the tokens that must be computed are found backwards, phase by phase, from those that the end needs:

    phases      |------ 0 ------|-- 1 --|---- 2 ----|   an op between each two
    needed at the end:  visible after the last op, and not there
    needed by phase 2:  + what layout 2 sees, below its last token to be computed
    needed by phase 1:  + ...

For a plain continuation that is just the new tokens; for a stream whose KV was lost, all of it in the same phases; for
one whose dropped span was evicted, nothing; for a restored span that is gone, the span alone. Tokens that nobody needs
are never computed.

What eviction takes may be kept in a *tier*: host memory or a file, behind a small interface. It keeps blocks, of
`page_size` tokens aligned to the stream's index, under a key that says what the tree's key says: the salt and every
symbol, token or op, up to the block's end. A token that a block brings back asks for nothing before it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from akv_server.errors import AkvError
from akv_server.ops import FORGOTTEN, Layout, Signature, Timeline
from akv_server.pool import Pool
from akv_server.radix import Array, Edge, Match, RadixTree, fragmentation, shifts, visible_mask

CopyPage = Callable[[int, int, int], None]  # (source page, target page, number of leading slots)
Move = Callable[[Array, Array, Array], None]  # (source slots, target slots, what to turn each key by)


class Tier(Protocol):
    """Where blocks of evicted KV may be kept. It may lose any of them at any time."""

    @property
    def is_faster(self) -> bool:
        """Whether to bring a block back takes less time, as things stand, than to compute it."""

    def __contains__(self, key: bytes) -> bool: ...

    def store(self, key: bytes, slots: Array, written: Array) -> None:
        """Copies what is in the slots now, or does nothing. int32 [page_size] each."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch `[start, end)` of indexes to run through the model under one layout. Where `resident`, its KV is there
    and only the output of its last token is wanted; where `loads`, the tier has it and nothing need be run."""

    start: int
    end: int
    layout: Layout
    phase: int
    resident: bool
    loads: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What it takes to have a stream's KV, and the output behind its last token. Valid until the cache is mutated."""

    salt: str
    tokens: Array  # int32 [num_tokens]
    timeline: Timeline
    match: Match
    todo: tuple[Span, ...]  # ascending
    last_need: (
        Array  # int32 [num_tokens]: the last phase that reads the token, num_phases for "still visible at the end"
    )
    num_phases: int
    num_computed: int  # tokens in `todo` whose KV is nowhere
    num_forgotten: int
    num_loaded: int  # tokens in `todo` whose KV the tier has
    keys: dict[int, bytes]  # of blocks that the tier has, by number

    @property
    def computed_indexes(self) -> Array:
        """int64 [num_computed], ascending."""
        return span_indexes(self.todo)


def span_indexes(spans: Iterable[Span]) -> Array:
    """int64, ascending: the indexes of those tokens that have to be computed."""
    found = [np.arange(s.start, s.end) for s in spans if not (s.resident or s.loads)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


@dataclass(eq=False, slots=True)
class Lease:
    """What one running sequence holds. `slots[i]` is -1 where it does not hold token i."""

    salt: str
    timeline: Timeline
    num_tokens: int
    tokens: Array  # int32 [capacity >= num_tokens]
    slots: Array  # int32 [capacity]
    written: Array  # int32 [capacity]
    last_need: Array  # int32 [num prompt tokens]
    num_phases: int
    pages: set[int] = field(default_factory=set)
    edge: Edge | None = None  # the edge it goes on from
    version: int = 0  # grows when a token that was there moves to another slot


@dataclass(frozen=True, slots=True)
class Compaction:
    """One bounded piece of work: tokens that a history sees, to be gathered into fewer pages. Valid until the cache is
    mutated."""

    owner: Edge | Lease
    num_pages: int  # that the owner lets go
    index: Array  # int64 [num_tokens]: stream indexes of the survivors, ascending
    slots: Array  # int32 [num_tokens]: where they are
    delta: Array  # int32 [num_tokens]: what their keys have to be turned by on the way
    written: Array  # int32 [num_tokens]: the shift their keys stand for afterwards


class Cache:
    """Pages, the tree and the leases of one model."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        copy_page: CopyPage,
        *,
        compact_above: float = 1.0,
        tier: Tier | None = None,
    ) -> None:
        self.pool = Pool(num_pages, page_size)
        self.tree = RadixTree(self.pool, compact_above)
        self.page_size = page_size
        self.num_pages_copied = 0
        self.num_compactions = 0
        self.num_tokens_moved = 0
        self.num_pages_compacted = 0  # pages that histories see, saved by it
        self._sparse_leases: dict[Lease, None] = {}
        self._copy_page = copy_page
        self._leases: set[Lease] = set()
        self._tier = tier
        if tier is not None:
            self.tree.on_loss = self._keep

    # Decide --------------------------------------------------------------------------------------------------------

    def plan(
        self,
        salt: str,
        tokens: Array,
        timeline: Timeline,
        *,
        outputs: str = "last",
        outputs_from: int | None = None,
    ) -> Plan:
        """What of a stream is there and what must be computed. Mutates nothing.

        Args:
            tokens: int32 [num_tokens].
            outputs: "last" also wants the model's output behind the last token (to sample from), "all" wants it behind
                every token that is not there (to score a prompt), "none" wants the KV alone.
            outputs_from: with "all", behind every token from this index on, even where its KV is there.

        Raises AkvError `invalid_request` when all of the stream is forgotten, so that there is nothing to go on from.
        """
        n = len(tokens)
        match = self.tree.match(salt, tokens, timeline)
        resident = np.zeros(n, bool)
        resident[: match.length] = match.slots >= 0
        forgotten = _forgotten_mask(timeline.layout_at(n), n)
        phases = list(timeline.phases(n))
        last_need = np.full(n, -1, np.int32)
        last_need[visible_mask(timeline.layout_at(n), n)] = len(phases)
        wanted = np.zeros(n, bool)
        if outputs == "all":
            wanted = ~resident & ~forgotten
            if outputs_from is not None:
                wanted[outputs_from:] = ~forgotten[outputs_from:]
        if outputs != "none":
            sources = np.flatnonzero(~forgotten)
            if not len(sources):
                raise AkvError("invalid_request", "all tokens of the stream are forgotten", param="akv.ops")
            wanted[sources[-1]] = True
        loadable, keys = self.in_tier(salt, tokens, timeline, resident)
        loadable &= ~(forgotten | wanted)
        missing = ~(resident | loadable)
        todo: list[Span] = []
        for phase in range(len(phases) - 1, -1, -1):
            start, end, layout = phases[phase]
            if not (wanted[start:end] | ((last_need[start:end] >= 0) & ~resident[start:end])).any():
                continue  # all that is needed of it is there: most phases of a long history
            run = wanted[start:end] | ((last_need[start:end] >= 0) & missing[start:end])
            if run.any():
                top = start + int(np.flatnonzero(run)[-1]) + 1
                seen = visible_mask(layout.feed(top - layout.num_tokens), top)
                last_need[:top][seen & (last_need[:top] < phase)] = phase
            needed = last_need[start:end] >= 0
            kind = np.where(wanted[start:end] | (needed & missing[start:end]), np.where(resident[start:end], 2, 1), 0)
            kind[needed & loadable[start:end]] = 3
            todo += [Span(s, e, layout, phase, k == 2, k == 3) for s, e, k in reversed(_stretches(kind, start))]
        todo.reverse()
        return Plan(
            salt,
            tokens,
            timeline,
            match,
            tuple(todo),
            last_need,
            len(phases),
            len(span_indexes(todo)),
            int(forgotten.sum()),
            sum(span.end - span.start for span in todo if span.loads),
            keys,
        )

    def in_tier(self, salt: str, tokens: Array, timeline: Timeline, resident: Array) -> tuple[Array, dict[int, bytes]]:
        """Which tokens are not resident and can be brought back (bool [num_tokens]; a forgotten one among them means
        nothing), and the keys of their blocks by number. Mutates nothing."""
        size = self.page_size
        loadable, keys = np.zeros(len(tokens), bool), {}
        lacking = np.unique(np.flatnonzero(~resident) // size).tolist()
        if self._tier is not None and lacking and self._tier.is_faster:
            known = block_keys(salt, tokens, [(p.at, p.signature) for p in timeline.points], size, lacking[0])
            for block in lacking:
                if block < len(tokens) // size and (key := known[block - lacking[0]]) in self._tier:
                    keys[block] = key
                    loadable[block * size : (block + 1) * size] = True
        return loadable & ~resident, keys

    def fits_alone(self, plan: Plan) -> bool:
        """Whether an otherwise empty pool could run the plan."""
        most = int((plan.last_need == plan.num_phases).sum())
        for span in plan.todo:
            most = max(most, int((plan.last_need[: span.end] >= span.phase).sum()))
        return most <= self.pool.num_pages * self.page_size

    def room_for(self, plan: Plan) -> bool:
        """Whether the plan's first tokens could be computed now, once what nobody runs on is evicted."""
        needed = self._pages_of(plan.match.slots[plan.last_need[: plan.match.length] >= 0])
        kept = sum(self.pool.edges[page] > 0 and not self.pool.leases[page] for page in needed)
        new = -(-(plan.num_computed + plan.num_loaded) // self.page_size) + 1
        return new <= self.pool.num_free + self.pool.num_evictable - kept

    @property
    def is_sparse(self) -> bool:
        """Whether there may be something to compact."""
        return bool(self._sparse_leases or self.tree.sparse)

    def plan_compaction(self, max_tokens: int) -> Compaction | None:
        """The next piece of compaction, of at most `max_tokens` survivors, or None. Mutates nothing.

        Only pages that one history alone sees and nobody else runs on, and only if fewer pages come of them. A key is
        turned at most once in its life: one that was turned before is moved as it is, and read with its delta.
        """
        owners: list[Edge | Lease] = [*self._sparse_leases, *self.tree.sparse]
        for owner in owners:
            if found := self.compaction_of(owner, max_tokens):
                return found
        return None

    def compaction_of(self, owner: Edge | Lease, max_tokens: int) -> Compaction | None:
        """As `plan_compaction`, for one history: what a leaf sees, or what a lease holds."""
        if isinstance(owner, Lease):
            n = owner.num_tokens
            slots, written, layout = owner.slots[:n], owner.written[:n], owner.timeline.layout_at(n)
            computed = [(start, end, phase) for start, end, phase in owner.timeline.phases(n)]
        else:
            path = self.tree.path(owner)
            slots, written = (np.concatenate([getattr(e, name) for e in path]) for name in ("slots", "written"))
            layout, computed = owner.layout, [(edge.start, edge.end, edge.layout) for edge in path]
        n = len(slots)
        kept = slots >= 0
        if isinstance(owner, Edge):
            kept &= visible_mask(layout.feed(n - layout.num_tokens), n)
        index = np.flatnonzero(kept)
        page_of = slots[index] // self.page_size
        pages, first, count = np.unique(page_of, return_index=True, return_counts=True)
        others = 1 if isinstance(owner, Lease) else 0  # the owner itself: a lease as a lease, a leaf as a view
        movable = [
            self.pool.leases[page] == others and self.pool.views[page] == 1 - others and page != page_of[-1]
            for page in pages.tolist()
        ]
        chosen = np.flatnonzero(np.array(movable) & (count < self.page_size))
        chosen = chosen[np.argsort(first[chosen])]  # in the order of the stream
        # a lease's own pages cannot be evicted to make room for it; those of a leaf could
        to_evict = self.pool.num_evictable if isinstance(owner, Lease) else len(self.pool.dead)
        room = (self.pool.num_free + to_evict) * self.page_size
        chosen = chosen[np.cumsum(count[chosen]) <= min(max_tokens, room)]
        num_tokens = int(count[chosen].sum())
        if -(-num_tokens // self.page_size) >= len(chosen):
            return None
        survivors = index[np.isin(page_of, pages[chosen])]
        fresh = np.zeros(n, np.int32)  # the shift that each key was first written with
        for start, end, phase in computed:
            fresh[start:end] = shifts(phase, start, end)
        shift, was = shifts(layout, 0, n)[survivors], written[survivors]
        delta = np.where(was == fresh[survivors], shift - was, 0).astype(np.int32)
        return Compaction(owner, len(chosen), survivors, slots[survivors], delta, was + delta)

    # Mutate --------------------------------------------------------------------------------------------------------

    def open(self, plan: Plan) -> Lease:
        """Takes a lease on what the plan found. No page of it can be evicted until it is released or closed."""
        n, match = len(plan.tokens), plan.match
        capacity = n + max(n // 4, 64)
        ids, slots = np.zeros(capacity, np.int32), np.full(capacity, -1, np.int32)
        written = np.zeros(capacity, np.int32)
        ids[:n] = plan.tokens
        held = plan.last_need[: match.length] >= 0
        slots[: match.length][held] = match.slots[held]
        written[: match.length] = match.written
        lease = Lease(plan.salt, plan.timeline, n, ids, slots, written, plan.last_need, plan.num_phases)
        self._leases.add(lease)
        self._repage(lease)
        if match.edges:
            self.tree.touch(match.edges[-1])
            if match.ends_on_edge:
                self._attach(lease, match.edges[-1])
        return lease

    def append(self, lease: Lease, token: int) -> None:
        """Adds a token, not computed yet, at the end of the lease's stream."""
        if lease.num_tokens == len(lease.tokens):
            lease.tokens = np.concatenate([lease.tokens, np.empty_like(lease.tokens)])
            lease.slots = np.concatenate([lease.slots, np.full_like(lease.slots, -1)])
            lease.written = np.concatenate([lease.written, np.zeros_like(lease.written)])
        lease.tokens[lease.num_tokens] = token
        lease.num_tokens += 1

    def reserve(self, lease: Lease, start: int, end: int, written_shift: int) -> bool:
        """Gives the tokens `[start, end)` slots to be written, evicting what nobody runs on; False, and nothing
        changed but evicted pages, where there is no room.

        New tokens go behind the one before them where its page has space. If somebody else wrote there first, the page
        is copied (copy on write) and the copy goes on; that is the only copy there is.
        """
        size = self.page_size
        assert (lease.slots[start:end] < 0).all()
        before = int(lease.slots[start - 1]) if start else -1
        used = before % size + 1 if before >= 0 else size  # slots taken in the page to go on with
        in_place = used < size and self.pool.filled[before // size] == used
        copy = used < size and not in_place
        num_pages = -(-max(0, end - start - (size - used)) // size) + copy
        if self.pool.num_free < num_pages:
            self.tree.evict(num_pages - self.pool.num_free)
        fresh = self.pool.take(num_pages)
        if fresh is None:
            return False
        lease.pages.update(fresh)
        page = before // size
        if copy:
            source, page = page, fresh.pop(0)
            self._copy_page(source, page, used)
            self.num_pages_copied += 1
            behind = lease.slots // size == source
            moved = behind & (lease.slots % size < used)  # what lies behind a hole stays where it is
            lease.slots[moved] += (page - source) * size
            lease.version += 1
            if (moved == behind).all():
                lease.pages.remove(source)
                self.pool.unlease([source])
        slots: list[int] = list(range(page * size + used, (page + 1) * size)) if used < size else []
        slots += [fresh_page * size + offset for fresh_page in fresh for offset in range(size)]
        del slots[end - start :]
        lease.slots[start:end] = slots
        lease.written[start:end] = written_shift
        for slot in slots:
            self.pool.filled[slot // size] = slot % size + 1
        return True

    def publish(self, lease: Lease, end: int) -> None:
        """Gives the first `end` tokens of the lease's stream to the tree, so that others may go on from them. Tokens
        that the tree has already are read from there from now on, and the lease's own copy is let go."""
        ids = lease.tokens[:end]
        edge = self.tree.insert(lease.salt, ids, lease.timeline, lease.slots[:end], lease.written[:end])
        if edge is None:
            return
        self._attach(lease, edge)
        match = self.tree.match(lease.salt, ids, lease.timeline)
        assert match.length == end
        adopt = (lease.slots[:end] >= 0) & (match.slots != lease.slots[:end])
        if adopt.any():
            lease.slots[:end][adopt] = match.slots[adopt]
            lease.written[:end][adopt] = match.written[adopt]
            lease.version += 1
            self._repage(lease)

    def release(self, lease: Lease, phase: int) -> None:
        """Lets go of pages with no token that `phase` or a later one reads."""
        n = len(lease.last_need)
        idle = (lease.slots[:n] >= 0) & (lease.last_need < phase)
        if idle.any():
            lease.slots[:n][idle] = -1
            self._repage(lease)
        if phase == lease.num_phases:
            held = int((lease.slots >= 0).sum())
            if fragmentation(held, len(lease.pages) * self.page_size) > self.tree.sparse_above:
                self._sparse_leases[lease] = None

    def settle(self) -> None:
        """Forgets who is sparse: nothing can be gained from them until they change."""
        self._sparse_leases.clear()
        self.tree.sparse.clear()

    def compact(self, found: Compaction, move: Move) -> None:
        """Does a piece of compaction: `move` copies the survivors, then every edge and lease finds them there. The
        pages that they leave hold only what nobody sees: dead, they are the first to be evicted."""
        num_tokens, size = len(found.slots), self.page_size
        num_new = -(-num_tokens // size)
        self.tree.evict(max(0, num_new - self.pool.num_free))
        fresh = self.pool.take(num_new)
        assert fresh is not None
        new_slots = (np.repeat(np.array(fresh, np.int32) * size, size) + np.tile(np.arange(size), len(fresh)))[
            :num_tokens
        ]
        for page in fresh:
            self.pool.filled[page] = size
        self.pool.filled[fresh[-1]] = int(new_slots[-1]) % size + 1
        try:
            move(found.slots, new_slots, found.delta)
        except BaseException:
            self.pool.unlease(fresh)
            raise
        owner = found.owner
        if isinstance(owner, Lease):
            owner.slots[found.index] = new_slots
            owner.written[found.index] = found.written
            owner.version += 1
            self.tree.relocate(found.slots, new_slots, found.written)
            owner.pages |= set(fresh)  # `take` leased them
            self._repage(owner)
        else:
            with self.tree.refreshing(owner):
                self.tree.relocate(found.slots, new_slots, found.written)
            self.pool.unlease(fresh)
        self.num_compactions += 1
        self.num_tokens_moved += num_tokens
        self.num_pages_compacted += found.num_pages - num_new

    def close(self, lease: Lease) -> None:
        """Gives everything back. What was published stays in the tree until it is evicted."""
        self._detach(lease)
        self._sparse_leases.pop(lease, None)
        self.pool.unlease(lease.pages)
        lease.pages = set()
        self._leases.remove(lease)

    def evict_all(self) -> int:
        """Frees every page that nobody runs on and returns how many."""
        return self.tree.evict(self.pool.num_pages)

    def _keep(self, edge: Edge, start: int, end: int) -> None:
        """Offers the tier those blocks that tokens `[start, end)` of the edge are part of, and that are all there."""
        assert self._tier is not None
        if start >= end or not self._tier.is_faster:
            return
        first, stop = start // self.page_size, -(-end // self.page_size)
        self._keep_blocks(edge, first, min(stop, edge.end // self.page_size))
        if stop * self.page_size > edge.end:
            for below in self.tree.reaching(edge, stop * self.page_size - 1):
                self._keep_blocks(below, stop - 1, stop)

    def _keep_blocks(self, edge: Edge, first: int, stop: int) -> None:
        if first >= stop:
            return
        assert self._tier is not None
        size, path = self.page_size, self.tree.path(edge)
        tokens, slots, written = (
            np.concatenate([getattr(e, name) for e in path])[: stop * size] for name in ("tokens", "slots", "written")
        )
        absent = slots < 0
        lost = absent & ~_forgotten_mask(edge.layout, stop * size)
        keys = block_keys(edge.salt, tokens, [(e.start, e.ops) for e in path if e.ops], size, first)
        for block, key in zip(range(first, stop), keys, strict=True):
            inside = slice(block * size, (block + 1) * size)
            there = slots[inside][~absent[inside]]
            if len(there) and not lost[inside].any() and key not in self._tier:
                # a forgotten token has no KV and needs none: another's stands in its place
                self._tier.store(key, np.where(absent[inside], there[0], slots[inside]), written[inside])

    def _attach(self, lease: Lease, edge: Edge) -> None:
        if lease.edge is not edge:
            self._detach(lease)
            lease.edge = edge
            self.tree.attach(edge)

    def _detach(self, lease: Lease) -> None:
        if lease.edge is not None:
            self.tree.detach(lease.edge)
            lease.edge = None

    def _pages_of(self, slots: Array) -> set[int]:
        pages: list[int] = np.unique(slots[slots >= 0] // self.page_size).tolist()
        return set(pages)

    def _repage(self, lease: Lease) -> None:
        pages = self._pages_of(lease.slots)
        self.pool.lease(pages - lease.pages)
        self.pool.unlease(lease.pages - pages)
        lease.pages = pages

    def check(self) -> None:
        """Asserts what must hold between any two calls: every page accounted for, none with two owners of one slot."""
        self.pool.check()
        self.tree.check()
        leased = [0] * self.pool.num_pages
        for lease in self._leases:
            assert lease.pages == self._pages_of(lease.slots)
            for page in lease.pages:
                leased[page] += 1
        assert leased == self.pool.leases


def _forgotten_mask(layout: Layout, num_tokens: int) -> Array:
    mask = np.zeros(num_tokens, bool)
    for run in layout.runs:
        if run.state == FORGOTTEN:
            mask[run.start : run.end] = True
    return mask


def _stretches(kind: Array, start: int) -> list[tuple[int, int, int]]:
    """Maximal `(start, end, kind)` stretches of one kind each; those of kind 0 are left out."""
    cuts = np.flatnonzero(np.diff(kind)) + 1
    edges = [0, *cuts.tolist(), len(kind)]
    return [(start + a, start + b, int(kind[a])) for a, b in itertools.pairwise(edges) if kind[a]]


def block_keys(
    salt: str, tokens: Array, points: Sequence[tuple[int, Signature]], page_size: int, first: int
) -> list[bytes]:
    """Keys of the whole blocks from number `first` on: a hash of the salt and all symbols up to the block's end.

    Args:
        tokens: int32 [num_tokens].
        points: stream lengths at which ops take effect, ascending, with their canonical signature.
    """
    name = salt.encode()
    symbols = hashlib.blake2b(np.int64(len(name)).tobytes() + name, digest_size=32)
    keys = []
    at = num_points = 0
    for end in range((first + 1) * page_size, len(tokens) + 1, page_size):
        while num_points < len(points) and points[num_points][0] < end:
            point, signature = points[num_points]
            symbols.update(tokens[at:point].tobytes())
            symbols.update(np.int32(-len(signature)).tobytes())  # below zero: no token
            symbols.update(np.array(signature, np.int64).tobytes())
            at, num_points = point, num_points + 1
        symbols.update(tokens[at:end].tobytes())
        keys.append(symbols.copy().digest())
        at = end
    return keys
