"""The order of eviction where a use does not show in what is stored: one that computes nothing, one that lies below."""

from __future__ import annotations

import numpy as np

from akv_server.planning import block_keys
from tests.test_cache import SIZE, Desk

OLD, OTHER = list(range(8)), list(range(20, 28))


def test_to_go_on_from_what_is_there_is_to_use_it():
    """Somebody takes a lease on the older of two streams, and leaves without having added a token."""
    desk = Desk(16)
    desk.run(OLD)
    desk.run(OTHER)
    desk.cache.close(desk.open(OLD))
    assert desk.cache.tree.evict(1) == 1
    assert (len(desk.there(OLD)), len(desk.there(OTHER))) == (8, 4)


def test_to_go_on_from_a_part_of_an_edge_is_to_use_it():
    desk = Desk(16)
    desk.run(OLD)
    desk.run(OTHER)
    desk.cache.close(desk.open([*OLD[:6], 99]))
    assert desk.cache.tree.evict(1) == 1
    assert (len(desk.there(OLD)), len(desk.there(OTHER))) == (8, 4)


def test_what_lay_above_counts_as_used_when_its_last_branch_was():
    """A beginning that was stored first, cut in two by a split, and used through its branches alone ever since. They
    go while somebody runs on the other stream; once that is over, the other is the older one."""
    desk = Desk(16)
    branches = [[*OLD, *range(start, start + 4)] for start in (40, 60)]
    for stream in (*branches, OTHER):
        desk.run(stream)
    lease = desk.open(OTHER)
    for stream in branches:
        desk.run(stream)
    assert desk.cache.tree.evict(2) == 2
    assert [len(desk.there(stream)) for stream in (*branches, OTHER)] == [8, 8, 8]
    desk.cache.close(lease)
    assert desk.cache.tree.evict(1) == 1
    assert (len(desk.there(OLD)), len(desk.there(OTHER))) == (8, 4)
    desk.cache.check()


def test_the_end_of_a_salt_is_not_taken_for_the_beginning_of_a_text():
    """A salt and the tokens behind it, cut at two places of one and the same row of bytes."""
    common = list(range(5, 5 + SIZE))
    names = [97] * SIZE  # as bytes: "a", NUL, NUL, NUL, four times
    salt = bytes(np.array(names, np.int32)).decode()
    (salted,) = block_keys(salt, np.array(common, np.int32), [], SIZE, [0]).values()
    _, spelled = block_keys("", np.array([*names, *common], np.int32), [], SIZE, [0, 1]).values()
    assert salted != spelled
