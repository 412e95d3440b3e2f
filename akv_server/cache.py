"""The cache of one model: what of a stream is there, what must be computed, and where new tokens go.

`plan()` decides and mutates nothing; `open`, `reserve`, `publish`, `release` and `close` alone mutate; `check()`
asserts the invariants. Owns leases (what running sequences hold). Knows pages as ids and KV through one function that
copies a page; knows neither torch nor requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from akv_server.masks import Array, shifts, states, visible_mask
from akv_server.ops import FORGOTTEN, INFINITY, Timeline
from akv_server.planning import Plan, Tier, block_keys, make_plan
from akv_server.pool import Pool
from akv_server.radix import Edge, RadixTree, fragmentation

CopyPage = Callable[[int, int, int], None]  # (source page, target page, number of leading slots)
Move = Callable[[Array, Array, Array], None]  # (source slots, target slots, what to turn each key by)


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
    edge: Edge | None = None  # the last edge of the tree that lies in its stream whole
    changed: list[tuple[int, int]] = field(default_factory=list)  # up to there, slots that the tree may not know of
    version: int = 0  # grows when a token that was there moves to another slot


@dataclass(frozen=True, slots=True)
class Compaction:
    """One bounded piece of work: tokens that a history sees, to be gathered into fewer pages. Valid until the cache is
    mutated."""

    owner: Edge | Lease
    num_pages: int  # that the owner lets go
    num_new: int  # that it gets for them
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

    def reset(self) -> None:
        """Forgets all, in whatever state it is; leases that are out count for nothing. Counters stay."""
        before = self.tree
        self.pool = Pool(self.pool.num_pages, self.page_size)
        self.tree = RadixTree(self.pool, before.sparse_above)
        self.tree.num_evicted_pages, self.tree.num_edges_walked = before.num_evicted_pages, before.num_edges_walked
        self.tree.on_loss = before.on_loss
        self._leases.clear()
        self._sparse_leases.clear()

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
        match = self.tree.match(salt, tokens, timeline)
        resident = np.zeros(len(tokens), bool)
        resident[: match.length] = match.slots >= 0
        loadable, keys = self.in_tier(salt, tokens, timeline, resident)
        return make_plan(
            salt,
            tokens,
            timeline,
            match,
            resident,
            loadable,
            keys,
            outputs=outputs,
            outputs_from=outputs_from,
        )

    def in_tier(self, salt: str, tokens: Array, timeline: Timeline, resident: Array) -> tuple[Array, dict[int, bytes]]:
        """Which tokens are not resident and can be brought back (bool [num_tokens]; a forgotten one among them means
        nothing), and the keys of their blocks by number. Mutates nothing."""
        size = self.page_size
        loadable, keys = np.zeros(len(tokens), bool), {}
        lacking = np.unique(np.flatnonzero(~resident) // size).tolist()
        if self._tier is not None and lacking and self._tier.is_faster:
            points = [(point.at, point.digest) for point in timeline.points]
            for block, key in block_keys(salt, tokens, points, size, lacking).items():
                if key in self._tier:
                    keys[block] = key
                    loadable[block * size : (block + 1) * size] = True
        return loadable & ~resident, keys

    def fits_alone(self, plan: Plan) -> bool:
        """Whether an otherwise empty pool could run the plan."""
        most = int((plan.last_need == plan.num_phases).sum())
        for span in plan.todo:
            most = max(most, int((plan.last_need[: span.end] >= span.phase).sum()))
        return most <= self.pool.num_pages * self.page_size

    @property
    def num_obtainable(self) -> int:
        """Pages that are free or that eviction could free."""
        return self.pool.num_free + self.pool.num_evictable

    def room_for(self, plan: Plan) -> bool:
        """Whether the plan's first tokens could be computed now, once what nobody runs on is evicted."""
        needed = self._pages_of(plan.match.slots[plan.last_need[: plan.match.length] >= 0])
        kept = sum(self.pool.edges[page] > 0 and not self.pool.leases[page] for page in needed)
        new = -(-(plan.num_computed + plan.num_loaded) // self.page_size) + 1
        return new <= self.num_obtainable - kept

    @property
    def is_sparse(self) -> bool:
        """Whether there may be something to compact."""
        return bool(self._sparse_leases or self.tree.sparse)

    def plan_compaction(self, max_tokens: int) -> Compaction | None:
        """The next piece of compaction, of at most `max_tokens` survivors, or None. Histories from which nothing can be
        gained are forgotten on the way, until they change, and in a full pool pages are evicted to gather into.

        Only pages that one history alone sees and nobody else runs on, and only if fewer pages come of them. A key is
        turned at most once in its life: one that was turned before is moved as it is, and read with its delta.
        """
        owners: list[Edge | Lease] = [*self._sparse_leases, *self.tree.sparse]
        for owner in owners:
            found = self.compaction_of(owner, max_tokens)
            if found and found.num_new > self._room_to_gather:
                self.tree.evict(found.num_new - self.pool.num_free)
                is_there = isinstance(owner, Lease) or owner in self.tree.sparse
                room = min(max_tokens, self._room_to_gather * self.page_size)
                found = self.compaction_of(owner, room) if is_there else None
            if found:
                return found
            if isinstance(owner, Lease):
                del self._sparse_leases[owner]
            else:
                self.tree.sparse.pop(owner, None)
        return None

    @property
    def _room_to_gather(self) -> int:
        """Pages that compaction may take: to evict any other can show a history what it did not see, and that changes
        what may be moved."""
        return self.pool.num_free + len(self.pool.dead)

    def compaction_of(self, owner: Edge | Lease, max_tokens: int) -> Compaction | None:
        """As `plan_compaction`, for one history: what a leaf sees, or what a lease holds."""
        if isinstance(owner, Lease):
            n = owner.num_tokens
            slots, written, layout = owner.slots[:n], owner.written[:n], owner.timeline.layout_at(n)
            kept = slots >= 0
        else:
            path = self.tree.path(owner)
            slots, written = (np.concatenate([getattr(e, name) for e in path]) for name in ("slots", "written"))
            n, layout = owner.end, owner.layout.feed(owner.end - owner.layout.num_tokens)
            kept = (slots >= 0) & visible_mask(layout, n)
        index = np.flatnonzero(kept)
        page_of = slots[index] // self.page_size
        pages, first, count = np.unique(page_of, return_index=True, return_counts=True)
        others = 1 if isinstance(owner, Lease) else 0  # the owner itself: a lease as a lease, a leaf as a view
        movable = [
            self.pool.leases[page] == others and self.pool.views[page] == 1 - others and page != page_of[-1]
            for page in pages.tolist()
        ]
        chosen = np.flatnonzero(np.array(movable) & (count < self.page_size))
        chosen = chosen[np.lexsort((first[chosen], count[chosen]))]  # where most is gained for least
        chosen = chosen[np.cumsum(count[chosen]) <= max_tokens]
        num_new = -(-int(count[chosen].sum()) // self.page_size)
        if num_new >= len(chosen):
            return None
        survivors = index[np.isin(page_of, pages[chosen])]
        if isinstance(owner, Lease):
            computed = [owner.timeline.phase_of(i)[2] for i in survivors.tolist()]
        else:
            place = np.searchsorted([e.start for e in path], survivors, side="right") - 1
            computed = [path[i].layout for i in place.tolist()]
        # the shift that each key was first written with
        fresh = np.array([phase.shift(i) for i, phase in zip(survivors.tolist(), computed, strict=True)], np.int32)
        shift, was = shifts(layout, 0, n)[survivors], written[survivors]
        delta = np.where(was == fresh, shift - was, 0).astype(np.int32)
        return Compaction(owner, len(chosen), num_new, survivors, slots[survivors], delta, was + delta)

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
        self._attach(lease, match.edge)
        if match.last is not None:
            self.tree.touch(match.last)
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
            self._note_change(lease, int(moved.argmax()), start)
            lease.version += 1
            if (moved == behind).all():
                lease.pages.remove(source)
                self.pool.unlease([source])
        slots: list[int] = list(range(page * size + used, (page + 1) * size)) if used < size else []
        slots += [fresh_page * size + offset for fresh_page in fresh for offset in range(size)]
        del slots[end - start :]
        lease.slots[start:end] = slots
        lease.written[start:end] = written_shift
        self._note_change(lease, start, end)
        for slot in slots:
            self.pool.filled[slot // size] = slot % size + 1
        return True

    def _note_change(self, lease: Lease, start: int, end: int) -> None:
        if lease.edge is not None and start < lease.edge.end:
            lease.changed.append((start, end))

    def publish(self, lease: Lease, end: int) -> None:
        """Gives the first `end` tokens of the lease's stream to the tree, so that others may go on from them. Tokens
        that the tree has already are read from there from now on, and the lease's own copy is let go."""
        n = max(end, lease.edge.end if lease.edge is not None else 0)
        if not n:
            return
        changed = [(start, min(stop, end)) for start, stop in lease.changed if start < end]
        lease.changed = [(max(start, end), stop) for start, stop in lease.changed if stop > end]
        edge, has_moved = self.tree.insert(
            lease.salt,
            lease.tokens[:n],
            lease.timeline,
            lease.slots[:n],
            lease.written[:n],
            behind=lease.edge,
            changed=changed,
        )
        self._attach(lease, edge)
        if has_moved:
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
        assert found.num_new <= self._room_to_gather
        self.tree.evict(max(0, found.num_new - self.pool.num_free))
        fresh = self.pool.take(found.num_new)
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
            self.tree.sparse[owner] = None  # once begun, it goes on for as long as anything is gained
            self.pool.unlease(fresh)
        self.num_compactions += 1
        self.num_tokens_moved += num_tokens
        self.num_pages_compacted += found.num_pages - found.num_new

    def close(self, lease: Lease) -> None:
        """Gives everything back. What was published stays in the tree until it is evicted."""
        self._detach(lease)
        self._sparse_leases.pop(lease, None)
        self.pool.unlease(lease.pages)
        lease.pages = set()
        self._leases.remove(lease)

    def evict_all(self) -> int:
        """Frees every page that nobody runs on and returns how many. Of edges that nobody runs on none is left."""
        return self.tree.evict(INFINITY)

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
        lost = absent & (states(edge.layout, stop * size) != FORGOTTEN)
        points = [(e.start, e.digest) for e in path if e.ops]
        for block, key in block_keys(edge.salt, tokens, points, size, range(first, stop)).items():
            inside = slice(block * size, (block + 1) * size)
            there = slots[inside][~absent[inside]]
            if len(there) and not lost[inside].any() and key not in self._tier:
                # a forgotten token has no KV and needs none: another's stands in its place
                self._tier.store(key, np.where(absent[inside], there[0], slots[inside]), written[inside])

    def _attach(self, lease: Lease, edge: Edge | None) -> None:
        if edge is not None and lease.edge is not edge:
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
            if lease.edge is not None:
                path = self.tree.path(lease.edge)
                assert lease.edge.alive and (path[-1].digest == lease.timeline.digest_at(path[-1].start))
                assert (np.concatenate([e.tokens for e in path]) == lease.tokens[: lease.edge.end]).all()
        assert leased == self.pool.leases
