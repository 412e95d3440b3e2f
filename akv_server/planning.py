"""What it takes to have a stream's KV: which tokens are there, which a tier has, which must be computed. Pure.

The rule (DESIGN section 4): to compute token i, every token that the layout *at i* sees must be there. So the tokens
that must be computed are found backwards, phase by phase, from those that the end needs:

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
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from akv_server.errors import AkvError
from akv_server.masks import Array, states, visible_mask
from akv_server.ops import FORGOTTEN, VISIBLE, Layout, Timeline
from akv_server.radix import Match


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
    resident: Array  # bool [num_tokens]: its KV is in the pool
    loadable: Array  # bool [num_tokens]: not there, but in the tier
    todo: tuple[Span, ...]  # ascending
    last_need: Array  # int32 [num_tokens]: the last phase that reads the token; num_phases: it is visible at the end
    num_phases: int
    num_computed: int  # tokens in `todo` whose KV is nowhere
    num_forgotten: int
    num_loaded: int  # tokens in `todo` whose KV the tier has
    keys: dict[int, bytes]  # of blocks that the tier has, by number

    @property
    def computed_indexes(self) -> Array:
        """int64 [num_computed], ascending."""
        found = [np.arange(s.start, s.end) for s in self.todo if not (s.resident or s.loads)]
        return np.concatenate(found) if found else np.empty(0, np.int64)


def make_plan(
    salt: str,
    tokens: Array,
    timeline: Timeline,
    match: Match,
    resident: Array,
    loadable: Array,
    keys: dict[int, bytes],
    *,
    outputs: str,
    outputs_from: int | None,
) -> Plan:
    """See `Cache.plan`.

    Args:
        tokens: int32 [num_tokens].
        resident, loadable: bool [num_tokens], what the tree and the tier have; the latter may hold more than is of use.
        keys: of the blocks that the tier has, by number.
    """
    n = len(tokens)
    at_end = states(timeline.layout_at(n), n)
    forgotten, visible = at_end == FORGOTTEN, at_end == VISIBLE
    wanted = np.zeros(n, bool)
    if outputs == "all":
        wanted = ~resident & ~forgotten
        if outputs_from is not None:
            wanted[outputs_from:] = ~forgotten[outputs_from:]
    if outputs != "none":
        last = _last(~forgotten)
        if last < 0:
            raise AkvError("invalid_request", "all tokens of the stream are forgotten", param="akv.ops")
        wanted[last] = True
    loadable = loadable & ~(forgotten | wanted)
    missing = ~(resident | loadable)
    num_phases = timeline.phase_of(n - 1)[0] + 1 if n else 0
    last_need = np.where(visible, num_phases, -1).astype(np.int32)
    left = wanted | (visible & ~resident)  # to be run or loaded, of the phases that the loop has not come to
    todo: list[Span] = []
    end = n
    while (last := _last(left[:end])) >= 0:  # most phases of a long history are passed over
        end = last + 1
        phase, start, layout = timeline.phase_of(last)
        run = np.flatnonzero(wanted[start:end] | ((last_need[start:end] >= 0) & missing[start:end]))
        if len(run):
            top = start + int(run[-1]) + 1
            seen = visible_mask(layout.feed(top - layout.num_tokens), top)
            last_need[:top][seen & (last_need[:top] < phase)] = phase
            left[:top] |= seen & ~resident[:top]
        needed = last_need[start:end] >= 0
        kind = np.where(wanted[start:end] | (needed & missing[start:end]), np.where(resident[start:end], 2, 1), 0)
        kind[needed & loadable[start:end]] = 3
        todo += [Span(s, e, layout, phase, k == 2, k == 3) for s, e, k in reversed(_stretches(kind, start))]
        end = start
    todo.reverse()
    return Plan(
        salt,
        tokens,
        timeline,
        match,
        resident,
        loadable,
        tuple(todo),
        last_need,
        num_phases,
        sum(span.end - span.start for span in todo if not (span.resident or span.loads)),
        int(forgotten.sum()),
        sum(span.end - span.start for span in todo if span.loads),
        keys,
    )


def _last(mask: Array) -> int:
    """The last place where the mask is true; -1 where it is true nowhere."""
    place = len(mask) - 1 - int(mask[::-1].argmax()) if len(mask) else -1
    return place if place >= 0 and mask[place] else -1


def _stretches(kind: Array, start: int) -> list[tuple[int, int, int]]:
    """Maximal `(start, end, kind)` stretches of one kind each; those of kind 0 are left out."""
    cuts = np.flatnonzero(np.diff(kind)) + 1
    edges = [0, *cuts.tolist(), len(kind)]
    return [(start + a, start + b, int(kind[a])) for a, b in itertools.pairwise(edges) if kind[a]]


def block_keys(
    salt: str, tokens: Array, points: Sequence[tuple[int, bytes]], page_size: int, blocks: Iterable[int]
) -> dict[int, bytes]:
    """Keys of whole blocks by their number: a hash of the salt and all symbols up to the block's end.

    Args:
        tokens: int32 [num_tokens].
        points: stream lengths at which ops take effect, ascending, with the digest of all ops up to there.
        blocks: numbers, ascending; one that the tokens do not fill has no key.
    """
    name = salt.encode()
    symbols = hashlib.blake2b(np.int64(len(name)).tobytes() + name, digest_size=32)
    keys = {}
    at = 0
    for block in blocks:
        end = (block + 1) * page_size
        if end > len(tokens):
            break
        symbols.update(tokens[at:end].tobytes())
        at, key = end, symbols.copy()
        num_points = bisect_left(points, end, key=lambda point: point[0])  # one at the end is of the next block
        if num_points:
            key.update(points[num_points - 1][1])
        keys[block] = key.digest()
    return keys
