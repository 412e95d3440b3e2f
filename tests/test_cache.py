"""The cache, its tree and its pool: random use beside a naive model, mutations that this must catch, examples."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from akv_server import cache as cache_module
from akv_server import ops as ops_module
from akv_server.cache import Cache, Lease
from akv_server.ops import INFINITY, Op, Timeline
from akv_server.pool import Pool
from tests.naive_cache import drive

STEPS_PER_WORLD = 500
NUM_WORLDS = 200 if os.environ.get("AKV_SOAK") else 12


@pytest.fixture(scope="module")
def happened():
    """What happened in all worlds of this run."""
    return Counter()


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_random_use_against_the_naive_model(seed, happened):
    happened += drive(seed, STEPS_PER_WORLD, ops_module, cache_module)
    assert happened["found again"]


def test_random_use_reaches_what_it_should(happened):
    rare = {"copied", "adopted", "evicted", "no room", "hole computed", "found in other words"}
    rare |= {"compacted", "turned", "stored", "loaded"}
    edits = {"drop", "repos", "restore", "forget"}
    if not happened:
        pytest.skip("the random worlds were not run")
    assert {what: happened[what] for what in rare | edits if happened[what] < 10} == {}
    assert happened["load failed"]


# Can it fail? ------------------------------------------------------------------------------------------------------


def mutated(module: str = "", old: str = "", new: str = "") -> tuple[ModuleType, ModuleType]:
    """Fresh copies of `ops` and `cache`, and of what lies between them, one expression of one replaced."""
    folder = Path(cache_module.__file__).parent
    names = ["ops", "masks", "pool", "radix", "planning", "cache"]
    kept = {name: sys.modules.pop(f"akv_server.{name}", None) for name in names}
    try:
        for name in names:
            source = (folder / f"{name}.py").read_text()
            if name == module:
                assert source.count(old) == 1, f"the mutation does not apply: {old}"
                source = source.replace(old, new)
            fresh = ModuleType(f"akv_server.{name}")
            sys.modules[fresh.__name__] = fresh
            exec(compile(source, f"<mutated {name}.py>", "exec"), fresh.__dict__)
        return sys.modules["akv_server.ops"], sys.modules["akv_server.cache"]
    finally:
        for name, original in kept.items():
            del sys.modules[f"akv_server.{name}"]
            if original is not None:
                sys.modules[f"akv_server.{name}"] = original


MUTATIONS = {
    "match skips the comparison of ops": (
        "radix",
        "edge.children.get((timeline.signature_at(length), int(tokens[length])))",
        "next((c for (_, t), c in edge.children.items() if t == int(tokens[length])), None)",
    ),
    "match walks over an op inside an edge": ("radix", ", timeline.next_point(length) - length)", ")"),
    "raw ops are compared": (
        "ops",
        "if point := (self.points[-1] if self.points else _BEGINNING).then(before, layout):",
        "if point := Point(at, tuple(op for op in history if op.at == at), layout, 0, repr(history[:i]).encode()):",
    ),
    "ops are compared by their number": ("ops", "repr((at, signature))", "repr((at, len(signature)))"),
    "a place is known by its ops alone": ("radix", "if limit == point.at:", "if True:"),
    "a place is known by its tokens alone": ("radix", "return salt, point.digest, tokens", 'return salt, b"", tokens'),
    "salts share a tree": ("radix", "self._roots.get(salt)", "next(iter(self._roots.values()), None)"),
    "a lease does not count": ("cache", "        self.pool.lease(pages - lease.pages)\n", ""),
    "a lease is never given back": ("cache", "        self.pool.unlease(lease.pages)\n", ""),
    "the tree does not hold its pages": ("radix", "            self.pool.hold(page)\n", "            pass\n"),
    "the tree never lets go": ("radix", "        self.pool.unhold(page)\n", ""),
    "a split does not hold the shared page": ("radix", "        self._repage(upper)\n", ""),
    "a partial page is shared without a copy": (
        "cache",
        "in_place = used < size and self.pool.filled[before // size] == used",
        "in_place = used < size",
    ),
    "a copy lacks its last slot": (
        "cache",
        "self._copy_page(source, page, used)",
        "self._copy_page(source, page, used - 1)",
    ),
    "a page is free while the tree holds it": (
        "pool",
        "if was_held and not (self.leases[page] or self.edges[page]):",
        "if was_held and not self.leases[page]:",
    ),
    "eviction takes a leased page": (
        "pool",
        "if was_held and not (self.leases[page] or self.edges[page]):",
        "if was_held and not self.edges[page]:",
    ),
    "eviction takes a page that a history sees": (
        "pool",
        "if is_evictable and not self.views[page]:",
        "if is_evictable:",
    ),
    "pages are released a phase too early": ("cache", "(lease.last_need < phase)", "(lease.last_need <= phase)"),
    "the last need is one phase off": (
        "planning",
        "last_need[:top][seen & (last_need[:top] < phase)] = phase",
        "last_need[:top][seen & (last_need[:top] < phase)] = phase - 1",
    ),
    "a plan forgets what its first phases see": (
        "planning",
        "last_need[:top][seen & (last_need[:top] < phase)] = phase",
        "pass",
    ),
    "a hole is filled with the wrong slot": (
        "radix",
        "own[lacking] = given[lacking]",
        "own[lacking] = given[lacking][::-1]",
    ),
    "a moved token is not noticed": (
        "cache",
        "        if has_moved:\n            lease.version += 1\n",
        "        if has_moved:\n",
    ),
    "a key is written for another shift": (
        "cache",
        "lease.written[start:end] = written_shift",
        "lease.written[start:end] = 0",
    ),
    "compaction turns no key": (
        "cache",
        "move(found.slots, new_slots, found.delta)",
        "move(found.slots, new_slots, found.delta * 0)",
    ),
    "compaction turns a key again": (
        "cache",
        "np.where(was == fresh, shift - was, 0)",
        "(shift - was)",
    ),
    "compaction loses a survivor": (
        "cache",
        "move(found.slots, new_slots, found.delta)",
        "move(found.slots[:-1], new_slots[:-1], found.delta[:-1])",
    ),
    "compaction moves what another history sees": (
        "cache",
        " and self.pool.views[page] == 1 - others",
        "",
    ),
    "compaction does not tell the tree": (
        "cache",
        "            self.tree.relocate(found.slots, new_slots, found.written)\n            owner.pages",
        "            owner.pages",
    ),
    "compaction does not tell who runs": (
        "cache",
        "            owner.written[found.index] = found.written\n            owner.version += 1\n",
        "            owner.written[found.index] = found.written\n",
    ),
    "a moved key keeps its written shift": (
        "radix",
        "            edge.written[moved] = new_written[order[place[moved]]]\n",
        "",
    ),
    "a block is kept for all salts": ("planning", "name = salt.encode()", 'name = b""'),
    "a block is kept for all histories": (
        "planning",
        "            key.update(points[num_points - 1][1])\n",
        "            pass\n",
    ),
    "a block is kept under what comes after it": (
        "planning",
        "bisect_left(points, end, key=",
        "bisect_left(points, end + 1, key=",
    ),
    "a block is kept with a hole in it": (
        "cache",
        "if len(there) and not lost[inside].any() and key not in self._tier:",
        "if len(there) and key not in self._tier:",
    ),
    "what can be loaded is computed": ("planning", "missing = ~(resident | loadable)", "missing = ~resident"),
    "what cannot be loaded is left out": (
        "planning",
        "kind[needed & loadable[start:end]] = 3",
        "kind[needed & ~resident[start:end]] = 3",
    ),
}


def is_caught(ops: ModuleType, cache: ModuleType, *, worlds: range, self_check: bool) -> bool:
    """Whether the driver refuses a cache in one of these worlds."""
    for seed in worlds:
        try:
            drive(seed, STEPS_PER_WORLD, ops, cache, self_check=self_check)
        except Exception:  # a broken cache may break anywhere
            return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_caught(mutation):
    """By what is compared from outside: the cache's own check() is not even called."""
    assert is_caught(*mutated(*MUTATIONS[mutation]), worlds=range(48), self_check=False)


def test_the_own_check_catches_what_only_spoils_the_order_of_eviction():
    broken = mutated(
        "radix",
        "for edge in filled for leaf in self._leaves_below(edge)):\n            self._refresh_leaf(leaf)\n",
        "for edge in filled for leaf in self._leaves_below(edge)):\n            pass\n",
    )
    assert is_caught(*broken, worlds=range(8, 18), self_check=True)


def test_without_a_mutation_nothing_is_caught():
    """The control: it is the mutation that fails, not the copy of the modules."""
    assert not is_caught(*mutated(), worlds=range(2), self_check=True)


# Examples ----------------------------------------------------------------------------------------------------------

SIZE = 4  # of a page


class Desk:
    """A cache whose KV is the token ids themselves, and a few lines to run a stream through it."""

    def __init__(self, num_pages: int, **settings: float) -> None:
        self.cache = Cache(num_pages, SIZE, self._copy, **settings)
        self.kv: dict[int, int] = {}

    def _copy(self, source: int, target: int, num_slots: int) -> None:
        for offset in range(num_slots):
            self.kv[target * SIZE + offset] = self.kv[source * SIZE + offset]

    def move(self, sources: np.ndarray, targets: np.ndarray, deltas: np.ndarray) -> None:
        moved = [self.kv[source] for source in sources.tolist()]
        self.kv.update(zip(targets.tolist(), moved, strict=True))

    def open(self, tokens: list[int], *history: Op, salt: str = "") -> Lease:
        plan = self.cache.plan(salt, np.array(tokens, np.int32), Timeline(history), outputs="none")
        return self.cache.open(plan)

    def compute(self, lease: Lease, *spans: tuple[int, int]) -> Lease:
        for start, end in spans:
            shift = lease.timeline.layout_at(start).position(start) - start
            assert self.cache.reserve(lease, start, end, shift)
            for i in range(start, end):
                self.kv[int(lease.slots[i])] = int(lease.tokens[i])
        return lease

    def publish(self, lease: Lease) -> None:
        self.cache.publish(lease, lease.num_tokens)
        self.cache.close(lease)
        self.cache.check()

    def run(self, tokens: list[int], *history: Op) -> int:
        """Computes what is missing of a stream, publishes all, and returns how many tokens were missing."""
        plan = self.cache.plan("", np.array(tokens, np.int32), Timeline(history), outputs="none")
        lease = self.cache.open(plan)
        self.publish(self.compute(lease, *((span.start, span.end) for span in plan.todo)))
        return plan.num_computed

    def there(self, tokens: list[int], *history: Op, salt: str = "") -> list[int]:
        """Indexes of the stream that are in the tree under this history."""
        match = self.cache.tree.match(salt, np.array(tokens, np.int32), Timeline(history))
        return np.flatnonzero(match.slots >= 0).tolist()


def drop(start: int, end: int, at: int) -> Op:
    return Op("drop", at, start, end, repos=True)


def test_same_text_under_two_histories():
    desk, text = Desk(16), list(range(20))
    assert desk.run(text, drop(4, 12, 16)) == 20
    assert desk.there(text, drop(4, 12, 16)) == list(range(20))
    assert desk.there(text) == list(range(16)), "up to the op both are one"
    assert desk.there(text, drop(4, 8, 16)) == list(range(16))
    assert desk.there(text, drop(4, 8, 16), drop(8, 12, 16)) == list(range(16)), "another meaning: 8..12 moved, too"
    assert desk.there(text, Op("drop", 16, 4, 8), Op("drop", 16, 8, 12), Op("repos", 16, 12, None, -8)) == [*range(20)]
    assert desk.there(text, drop(4, 12, 16), salt="another tenant") == []
    assert desk.run(text) == 4
    assert desk.cache.tree.num_edges == 3
    assert sum(desk.cache.pool.edges) == 6, "four pages of the common text, one for each end"


def test_an_op_later_than_the_match_does_not_spoil_it():
    desk, text = Desk(16), list(range(12))
    desk.run(text)
    assert desk.there([*text, 90, 91], drop(2, 6, 12), drop(8, 9, 13)) == list(range(12))
    assert desk.run([*text, 90, 91], drop(2, 6, 12)) == 2


def test_a_split_shares_the_page_under_the_cut():
    desk = Desk(16)
    desk.run([1, 2, 3, 4, 5, 6, 7, 8])
    desk.run([1, 2, 3, 4, 5, 6, 9])
    upper, *lower = sorted(desk.cache.tree.edges(), key=lambda edge: edge.start)
    assert (upper.tokens.tolist(), sorted(edge.tokens.tolist() for edge in lower)) == (
        [1, 2, 3, 4, 5, 6],
        [[7, 8], [9]],
    )
    old = next(edge for edge in lower if edge.tokens[0] == 7)
    assert upper.pages & old.pages == {int(old.slots[0]) // SIZE}
    assert desk.cache.num_pages_copied == 1


def test_a_fork_copies_one_partial_page_and_only_when_somebody_writes():
    desk, text = Desk(16), list(range(10))
    desk.run(text)
    first, second = desk.open([*text, 50]), desk.open([*text, 60])
    assert desk.cache.num_pages_copied == 0
    assert desk.cache.pool.num_free == 16 - 3
    desk.compute(first, (10, 11))
    assert desk.cache.num_pages_copied == 0, "the first to write goes on in place"
    desk.compute(second, (10, 11))
    assert desk.cache.num_pages_copied == 1
    assert first.slots[:8].tolist() == second.slots[:8].tolist()
    assert not set(first.slots[10:11]) & set(second.slots[8:11])
    for lease, last in ((first, 50), (second, 60)):
        assert [desk.kv[slot] for slot in lease.slots[:11].tolist()] == [*text, last]
        desk.publish(lease)
    assert desk.cache.pool.num_free == 16 - 4


def test_what_lies_behind_a_hole_does_not_move_with_a_copy():
    """A tree that knows tokens 0, 2 and 3 of a page but not 1; token 1 is computed again behind a copy of 0."""
    desk, text = Desk(16), list(range(8))
    hidden = Op("drop", 6, 1, 2)
    lease = desk.compute(desk.open([*text[:6], 99], hidden), (0, 6))
    desk.cache.release(lease, 1)
    desk.publish(desk.compute(lease, (6, 7)))
    assert desk.there([*text[:6], 99], hidden) == [0, 2, 3, 4, 5, 6]
    again = desk.open([*text[:6], 99], hidden, Op("restore", 7, 1, 2))
    desk.compute(again, (1, 2))
    assert [desk.kv[slot] for slot in again.slots[:7].tolist()] == [*text[:6], 99]
    desk.cache.check()


def test_dead_pages_go_first():
    desk = Desk(16)
    old, edited = list(range(12)), list(range(50, 66))
    desk.run(old)
    desk.run([*edited, 70], drop(4, 12, 16))
    assert len(desk.cache.pool.dead) == 2
    assert desk.cache.tree.evict(2) == 2
    assert desk.there(old) == list(range(12)), "though it was used longer ago"
    assert desk.there([*edited, 70], drop(4, 12, 16)) == [*range(4), *range(12, 17)]
    assert desk.run([*edited, 70, 71], drop(4, 12, 16)) == 1, "what nobody sees is not missed"


def test_the_least_recently_used_goes_first_and_from_its_end():
    desk = Desk(16)
    streams = [list(range(start, start + 8)) for start in (0, 20, 40)]
    for stream in streams:
        desk.run(stream)
    desk.run(streams[0])
    desk.cache.tree.evict(1)
    assert [len(desk.there(stream)) for stream in streams] == [8, 4, 8]
    desk.cache.tree.evict(2)
    assert [len(desk.there(stream)) for stream in streams] == [8, 0, 4]


def test_what_somebody_runs_on_is_not_cut_in_vain():
    """Somebody runs on all of the stream that was used longest ago, and on a part of another."""
    desk, held, other = Desk(16), list(range(8)), list(range(20, 32))
    desk.run(held)
    desk.run(other)
    leases = [desk.open(held), desk.open([*other[:6], 99])]
    assert desk.cache.tree.evict(1) == 1
    assert desk.there(held) == list(range(8)), "nothing is gained by it, though it was used longer ago"
    assert desk.there(other) == list(range(8))
    assert desk.cache.tree.evict(1) == 0
    assert desk.there(other) == list(range(8)), "not even where nothing else is left"
    for lease in leases:
        desk.cache.close(lease)
    assert desk.cache.evict_all() == 4
    desk.cache.check()


def test_a_leaf_that_somebody_runs_on_goes_where_it_hides_other_pages():
    desk = Desk(8)
    desk.run(list(range(8)))
    desk.run([*range(4), 50, 51, 52, 53])
    lease = desk.open([*range(7), 99], Op("drop", 7, 0, 4))  # holds the second page, which ends in a leaf
    assert desk.cache.pool.num_evictable == 2
    assert desk.cache.tree.evict(2) == 2
    assert desk.there(list(range(8))) == []
    assert [desk.kv[slot] for slot in lease.slots[4:7].tolist()] == [4, 5, 6]
    desk.cache.check()
    desk.cache.close(lease)
    assert desk.cache.evict_all() == 0
    assert (desk.cache.pool.num_free, desk.cache.tree.num_edges) == (8, 0)


def test_evict_all_leaves_no_edge():
    """Not even where all pages of the pool go before the last edge is reached."""
    desk = Desk(2)
    lease = desk.compute(desk.open([1, 2, 3], Op("drop", 2, 0, 2)), (0, 2), (2, 3))
    desk.publish(lease)
    lease = desk.open([1, 2, 3, 4, 5, 6, 7], Op("drop", 2, 0, 2), Op("drop", 3, 2, 3))
    desk.publish(desk.compute(lease, (3, 7)))
    assert desk.cache.pool.num_free == 0
    assert desk.cache.evict_all() == 2
    assert (desk.cache.pool.num_free, desk.cache.tree.num_edges) == (2, 0)


def test_what_was_lost_unseen_is_neither_resident_nor_computed():
    desk, text = Desk(16), list(range(16))
    desk.run([*text, 70], drop(4, 12, 16))
    desk.cache.tree.evict(1)
    plan = desk.cache.plan("", np.array([*text, 70, 71], np.int32), Timeline((drop(4, 12, 16),)), outputs="none")
    assert np.flatnonzero(~plan.resident).tolist() == [4, 5, 6, 7, 17]
    assert plan.computed_indexes.tolist() == [17]


def test_a_place_is_not_known_by_its_ops_and_last_tokens_alone():
    """Two texts that differ at their beginning only, with one history."""
    desk = Desk(64)
    texts = [[first, *range(30)] for first in (100, 200)]
    for text in texts:
        desk.run(text, drop(5, 10, 20), drop(12, 15, 28))
    for text in texts:
        assert desk.there([*text, 1], drop(5, 10, 20), drop(12, 15, 28)) == list(range(31))
    assert desk.there([300, *range(30)], drop(5, 10, 20), drop(12, 15, 28)) == []
    # the place of a point is forgotten with the last edge that starts there
    desk.cache.evict_all()
    assert desk.cache.tree._places == {}


def test_a_leased_page_is_never_evicted():
    desk, text = Desk(3), list(range(8))
    desk.run(text)
    lease = desk.open(text)
    assert desk.cache.evict_all() == 0
    other = desk.open(list(range(20, 28)))
    assert not desk.cache.reserve(other, 0, 8, 0)
    desk.cache.close(lease)
    desk.compute(other, (0, 8))
    assert desk.there(text) == list(range(4))
    desk.cache.check()


def test_compaction_begins_where_most_is_gained_and_goes_on_to_the_end():
    """Eight pages of which three of four tokens are seen, then eight with one: two pages' worth of work at a time."""
    desk, text = Desk(64, compact_above=0.4), list(range(64))
    unseen = [(4 * page + (3 if page < 8 else 1), 4 * page + 4) for page in range(16)]
    history = [Op("drop", 64, start, end, repos=True) for start, end in unseen]
    desk.run([*text, 99], *history)
    gains = []
    while (found := desk.cache.plan_compaction(8)) is not None:
        desk.cache.compact(found, desk.move)
        desk.cache.check()
        gains.append((len(found.slots), found.num_pages))
    assert gains[0] == (8, 8), "eight tokens empty eight pages; of the first pages, six would not empty one"
    pages = len({int(slot) // SIZE for slot in desk.open([*text, 99], *history).slots if slot >= 0})
    assert pages == 1 + 2 + 8, "with the last token's own"
    assert not desk.cache.is_sparse


def test_compaction_in_a_full_pool_evicts_before_it_decides_what_to_move():
    """A leaf that sees nothing of a prefix is evicted to make room; what it hid is seen again, and stays there."""

    def crowded(num_pages: int) -> tuple[Desk, Lease]:
        desk, prefix = Desk(num_pages, compact_above=0.4), list(range(10))
        desk.run([*prefix, 90])
        fork = [*prefix, *range(50, 58)]
        desk.run(fork)
        desk.run([*fork, *range(60, 64)], drop(0, 10, 18))  # the only leaf behind the fork, once 90 is gone
        (last,) = (edge for edge in desk.cache.tree.edges() if edge.tokens.tolist() == [90])
        desk.cache.tree._trim(last, INFINITY)
        lease = desk.open([*prefix, *range(70, 75)], drop(0, 3, 10), drop(4, 7, 10))  # sees 3, 7, 8 and 9 of it
        desk.compute(lease, (10, 15))
        desk.cache.publish(lease, 15)
        desk.cache.release(lease, lease.num_phases)
        return desk, lease

    desk, _ = crowded(32)
    desk, lease = crowded(32 - desk.cache.pool.num_free)
    pool = desk.cache.pool
    assert (pool.num_free, len(pool.dead), pool.num_evictable > 0) == (0, 0, True)
    while (found := desk.cache.plan_compaction(64)) is not None:
        desk.cache.compact(found, desk.move)
        desk.cache.check()
    held = np.flatnonzero(lease.slots[:15] >= 0).tolist()
    assert [desk.kv[slot] for slot in lease.slots[held].tolist()] == lease.tokens[held].tolist()
    desk.cache.close(lease)
    desk.cache.evict_all()
    assert desk.cache.pool.num_free == desk.cache.pool.num_pages


def test_the_pool_counts_its_holders():
    pool = Pool(3, SIZE)
    assert pool.take(4) is None
    page = pool.take(1)[0]
    pool.hold(page)
    pool.unlease([page])
    assert (pool.num_free, pool.num_evictable, list(pool.dead)) == (2, 1, [page])
    pool.view([page])
    assert list(pool.dead) == []
    with pytest.raises(AssertionError, match="freed while a history sees it"):
        pool.unhold(page)
    with pytest.raises(AssertionError, match="given back more often than taken"):
        Pool(1, SIZE).unlease([0])
