"""What is on its way: requests, the sequences that run them, and the steps that these are put into.

Plain values, in integers and arrays, so that a step can be sent to other ranks. Knows neither who decides what goes
into a step nor the model that runs it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

import numpy as np

from akv_server.attention import Attention
from akv_server.cache import Lease
from akv_server.errors import AkvError
from akv_server.masks import Array, shifts, visible_mask
from akv_server.ops import History, Layout, Timeline
from akv_server.planning import Plan, Span

if TYPE_CHECKING:  # it lives beside the sampler, which is torch
    from akv_server.sampler import SamplingParams


@dataclass(slots=True)
class GeneratedToken:
    """One sampled token; `logprob` and the likeliest `(id, logprob)` only if the request asked."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


Score = tuple[float, list[tuple[int, float]]]
"""Log-probability of a token, and the likeliest `(id, logprob)` at its place."""


@dataclass(slots=True)
class Outcome:
    """How a request ended. The token counts are of the prompt: once that is computed, `cached + prefilled + replayed +
    absent` is all of it but what is forgotten. An absent token was let go while invisible, and nobody needs it.
    `computed_visible` counts those prefilled or replayed that the answer sees."""

    finish_reason: str  # "stop", "length", "abort", "error"
    error: AkvError | None
    tokens: list[int]
    cached_tokens: int
    prefilled_tokens: int
    replayed_tokens: int
    prompt_scores: list[Score | None]
    computed_visible: int = 0
    absent_tokens: int = 0


@dataclass(slots=True)
class Request:
    """One generation behind a stream. The engine owns it after `submit`.

    Callbacks run in the engine's thread and must not block. `on_token` may return a finish reason, which ends the
    generation with that token. `on_done` comes exactly once.
    """

    request_id: str
    salt: str  # root of the tree that it may share with
    tokens: list[int]  # the stream so far
    history: History  # ops with at <= len(tokens)
    sampling: SamplingParams
    max_tokens: int  # 0: compute (and score) only
    stop_token_ids: frozenset[int]
    on_done: Callable[[Outcome], None]
    on_token: Callable[[GeneratedToken], str | None] = lambda _: None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    scores_from: int | None = None  # with num_prompt_logprobs: score what stands behind this even where its KV is there
    num_known: int = 0  # tokens that this session computed before: computing them again counts as replayed
    token_mask: Callable[[], Array] | None = None  # bool [vocab]: what may be sampled behind the tokens heard so far
    attention: Attention | None = None  # the engine notes here what the stream's tokens get while this decodes
    timeline: Timeline | None = None  # the history worked out, if the caller has it


class Source(IntEnum):
    """Where a token of a prompt came from, as far as its outcome says so."""

    UNTOLD = 0  # yet; or absent, or forgotten
    POOL = 1
    TIER = 2
    COMPUTED = 3


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that holds nothing. One that was preempted has come to something already; the last fields say why it
    was not admitted, so that it is not planned anew at each step."""

    request: Request
    tokens: Array  # int32 [num_tokens]
    timeline: Timeline
    outcome: Outcome | None = None
    sources: Array | None = None
    carried: object = None
    behind: Running | None = None  # that is just computing a prefix of it
    num_common: int = 0  # tokens of that prefix
    num_obtainable: int = -1  # pages, when there was no room


class State(Enum):
    PREFILLING = 1
    DECODING = 2
    CLOSING = 3


class View:
    """What one sequence sees, as an attention plan has it: a page table and segments. Grows as tokens are written."""

    __slots__ = ("end", "page_size", "pages", "phase", "segments", "version")

    def __init__(self, lease: Lease, layout: Layout, phase: int, end: int, page_size: int) -> None:
        self.phase, self.version, self.end, self.page_size = phase, lease.version, end, page_size
        self.pages = array("i")
        self.segments: list[list[int]] = []  # (slot, length, start index, delta)
        index = np.flatnonzero(visible_mask(layout.feed(end - layout.num_tokens), end))
        slots = lease.slots[index]
        assert (slots >= 0).all(), "a visible token is not there"
        if not len(index):
            return
        pages, offsets = np.divmod(slots, page_size)
        turns = np.flatnonzero(np.diff(pages)) + 1
        self.pages.extend(pages[np.concatenate([[0], turns])].tolist())
        entry = np.zeros(len(index), np.int64)
        entry[turns] = 1
        logical = np.cumsum(entry) * page_size + offsets
        delta = shifts(layout, 0, end)[index] - lease.written[index]
        breaks = np.flatnonzero((np.diff(index) != 1) | (np.diff(logical) != 1) | (np.diff(delta) != 0)) + 1
        starts = np.concatenate([[0], breaks])
        lengths = np.diff(np.concatenate([starts, [len(index)]]))
        self.segments = np.stack([logical[starts], lengths, index[starts], delta[starts]], axis=1).tolist()

    def extend(self, lease: Lease, end: int, shift: int) -> None:
        """Adds the tokens `[self.end, end)`, all visible under the view's layout with this shift."""
        size = self.page_size
        for index in range(self.end, end):
            slot = int(lease.slots[index])
            page, offset = divmod(slot, size)
            if not self.pages or self.pages[-1] != page:
                self.pages.append(page)
            logical = (len(self.pages) - 1) * size + offset
            delta = shift - int(lease.written[index])
            last = self.segments[-1] if self.segments else None
            if last and last[0] + last[1] == logical and last[2] + last[1] == index and last[3] == delta:
                last[1] += 1
            else:
                self.segments.append([logical, 1, index, delta])
        self.end = end


@dataclass(eq=False, slots=True)
class Running:
    """A request that holds a lease."""

    request: Request
    lease: Lease
    plan: Plan
    order: int  # of admission: the youngest is preempted first
    todo: deque[Span]
    outcome: Outcome
    sources: Array  # int8 [num prompt tokens]: a `Source` for each
    limit: int  # tokens it may generate in all
    state: State = State.PREFILLING
    view: View | None = None
    carried: object = None  # the sampler's state, the engine's to keep
    is_counted: bool = False  # what was found of its prompt is in the counters


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `[first_row, first_row + end - start)` of a step: tokens `[start, end)` of one sequence, one layout."""

    running: Running
    start: int
    end: int
    first_row: int
    pages: array[int]
    segments: list[list[int]]
    samples: bool  # its last row is the one to sample from
    scores: bool  # every row's logits are wanted


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens `[start, end)` of one sequence that the tier has, and where they go."""

    running: Running
    lease: Lease
    start: int
    end: int
    slots: Array  # int32 [end - start]
    keys: list[bytes]  # of the blocks that they lie in


@dataclass(frozen=True, slots=True)
class Step:
    """Loads, then one forward pass (none where there are no chunks), in plain integers. Valid until it is committed;
    nothing else may be scheduled meanwhile."""

    loads: list[Load]
    chunks: list[Chunk]
    token_ids: Array  # int64 [num_rows]
    positions: Array  # int64 [num_rows]
    write_slots: Array  # int64 [num_rows], -1: its KV is there
    logit_rows: list[int]
