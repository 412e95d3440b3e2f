"""Requests timed on an engine, rivals in turns, and what a drop costs the next answer: for `make bench` and `make gpu`.

Owns how a rival is timed. Imports no more of the server than runs an engine, so that it needs torch and little else.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable

from akv_server.batch import GeneratedToken, Outcome, Request
from akv_server.engine import Engine
from akv_server.ops import History, Op, Timeline
from akv_server.sampler import SamplingParams

STREAM, DROP, NEW = 4000, (1000, 3500), 64


class Run:
    """One request on an engine, with the time of each token since it was submitted."""

    def __init__(
        self,
        engine: Engine,
        tokens: list[int],
        history: History = (),
        *,
        max_tokens: int = 1,
        salt: str = "",
        timeline: Timeline | None = None,
    ) -> None:
        self.token_times_s: list[float] = []
        self.outcome: Outcome | None = None
        start = time.perf_counter()

        def on_token(token: GeneratedToken) -> None:
            self.token_times_s.append(time.perf_counter() - start)

        def on_done(outcome: Outcome) -> None:
            self.outcome = outcome

        engine.submit(
            Request(
                request_id=str(id(self)),
                salt=salt,
                tokens=tokens,
                history=history,
                timeline=timeline,
                sampling=SamplingParams(temperature=0),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(),
                on_token=on_token,
                on_done=on_done,
            )
        )
        while engine.step():
            pass
        assert self.outcome is not None
        assert self.outcome.error is None, self.outcome.error

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def inter_token_s(self) -> float:
        times = self.token_times_s
        return statistics.median(b - a for a, b in itertools.pairwise(times))


def some_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=count)


def take_turns(rounds: int, *rivals: Callable[[int], float]) -> list[float]:
    """Medians of what each rival returned; every round runs all of them, in an order that rotates."""
    results: list[list[float]] = [[] for _ in rivals]
    for round_ in range(rounds):
        for i in range(len(rivals)):
            which = (i + round_) % len(rivals)
            results[which].append(rivals[which](round_))
    return [statistics.median(r) for r in results]


def drop_against_none(engine: Engine, rounds: int) -> dict[str, float]:
    """TTFT of 64 new tokens: after a drop of 2,500 of 4,000; with the same number visible and no drop; re-prefilled."""
    engine.evict_all()
    stream = some_tokens(STREAM, seed=1)
    survivors = stream[: DROP[0]] + stream[DROP[1] :]
    history = (Op("drop", STREAM, *DROP, repos=True),)
    Run(engine, stream, max_tokens=0)
    Run(engine, survivors, max_tokens=0, salt="no drop")

    def dropped(round_: int) -> float:
        run = Run(engine, stream + some_tokens(NEW, 100 + round_), history)
        assert run.outcome.prefilled_tokens == NEW
        return run.ttft_s

    def not_dropped(round_: int) -> float:
        run = Run(engine, survivors + some_tokens(NEW, 100 + round_), salt="no drop")
        assert run.outcome.prefilled_tokens == NEW
        return run.ttft_s

    def re_prefilled(round_: int) -> float:
        run = Run(engine, survivors + some_tokens(NEW, 100 + round_), salt=f"again {round_}")
        assert run.outcome.prefilled_tokens == len(survivors) + NEW
        return run.ttft_s

    dropped(-2), not_dropped(-2)  # the first writer of a shared page goes on in place, later ones copy it: as agents do
    after_drop, without = take_turns(3 * rounds, dropped, not_dropped)
    re_prefilled(-2)  # its steps are of other sizes, which may have to be compiled
    # In turns of their own, with new tokens again: the others' turns are not behind a prefill that takes far longer.
    beside_it, again = take_turns(max(3, rounds // 2), lambda round_: dropped(3 * rounds + round_), re_prefilled)
    return {
        "ttft_after_drop_ms": after_drop * 1e3,
        "ttft_no_drop_ms": without * 1e3,
        "ttft_re_prefill_ms": again * 1e3,
        "after_drop_over_no_drop": after_drop / without,
        "re_prefill_over_after_drop": again / beside_it,
    }
