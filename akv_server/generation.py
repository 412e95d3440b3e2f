"""Running one completion on the engine: its choices, their text and calls, stop strings, and giving up early.

Owns the way from the engine's thread to the event loop, text cut at stop strings, where a grammar or a parser of calls
comes in, and aborting. Knows neither HTTP nor the shape of a reply, and of sessions only the prompt they hand it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from akv_server.attention import Attention
from akv_server.batch import GeneratedToken, Outcome, Request
from akv_server.calls import Call, CallDelta, Parser, in_order
from akv_server.grammar import Constraint
from akv_server.metrics import RequestMetrics, Watch
from akv_server.ops import Timeline
from akv_server.sampler import SamplingParams
from akv_server.tokenizer import Tokenizer
from akv_server.values import overlap


class Runs(Protocol):
    """The part of the engine that is used here."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class Work:
    """What to run: `num_choices` continuations of one prompt.

    `seed + i` seeds choice i, so that equal requests give equal choices and the choices differ. `num_known` is the
    number of prompt tokens that the session had computed before. `parser` finds calls, `constraint` holds a choice to a
    grammar: each makes a fresh one. `shown` are special tokens that the parser has to see.
    """

    salt: str
    tokens: list[int]
    timeline: Timeline
    num_known: int
    sampling: SamplingParams
    max_tokens: int
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    num_choices: int = 1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    scores_from: int | None = None  # prompt tokens behind this are scored even where their KV came from the cache
    attention: Attention | None = None  # what the prompt's tokens get while the first choice is written
    parser: Callable[[], Parser] | None = None
    constraint: Callable[[], Constraint] | None = None
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Piece:
    """A bit of a choice, in order. `token` is None for text that was held back and let go at the end; `outcome` is set
    on the last piece of a choice, and with it all its `calls` and the `stop` string that ended it."""

    choice: int
    text: str
    token: GeneratedToken | None = None
    deltas: Sequence[CallDelta] = ()
    outcome: Outcome | None = None
    calls: Sequence[Call] = ()
    stop: str | None = None


@dataclass
class Choice:
    """What came of one choice so far. `text` ends before the stop string and is without calls; `tokens` include those
    that made them. `calls`, and the `stop` string if one ended it, are known at the end."""

    index: int
    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    token_offsets: list[int] = field(default_factory=list)  # len(text) before each token's text
    outcome: Outcome | None = None
    calls: Sequence[Call] = ()
    stop: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class TextOut:
    """Generated text, piece by piece, without what may yet become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], shown: frozenset[int] = frozenset()) -> None:
        self._decoder = tokenizer.decode_stream(shown=shown)
        self._stops = stops
        self._held = ""
        self.stop: str | None = None
        """The stop string that was found."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """`(text that is certain now, whether a stop string is complete)`; text from the stop string on is gone."""
        self._held += self._decoder.push(token_id)
        found = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.stop = found
            text, self._held = self._held[:at], ""
            return text, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, False

    def finish(self) -> str:
        """What was held back; the end of the text."""
        text, self._held = self._held + self._decoder.finish(), ""
        return text


class Generation:
    """One completion on its way. Make it, `start()` it, iterate over its pieces; `abort()` it if nobody listens."""

    def __init__(
        self, engine: Runs, tokenizer: Tokenizer, work: Work, metrics: RequestMetrics, arrived_s: float
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._arrived_s = arrived_s  # of the metrics' clock
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.choices = [Choice(i) for i in range(work.num_choices)]
        self.attention = work.attention
        self._requests = [self._request(i, tokenizer, work) for i in range(work.num_choices)]
        self._num_running = 0

    def start(self) -> None:
        """Hands the work to the engine. Raises AkvError, with nothing left running, when it can never run."""
        try:
            for request in self._requests:
                self._engine.submit(request)
                self._num_running += 1
        except BaseException:
            self.abort()
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece of every choice, as they come, until all choices are done. Fills `choices` on the way.

        Raises the AkvError that ended a choice, having aborted the others.
        """
        while self._num_running:
            piece = await self._pieces.get()
            choice = self.choices[piece.choice]
            if piece.token is not None:
                choice.tokens.append(piece.token)
                choice.token_offsets.append(len(choice.text))
            choice.text += piece.text
            if piece.outcome is not None:
                choice.outcome, choice.calls, choice.stop = piece.outcome, piece.calls, piece.stop
                self._num_running -= 1
                if piece.outcome.error is not None:
                    self.abort()
                    raise piece.outcome.error
            yield piece

    def abort(self) -> None:
        """Ends what still runs, at once. Harmless when all is done."""
        for request, choice in zip(self._requests, self.choices, strict=True):
            if choice.outcome is None:
                self._engine.abort(request.request_id)

    def _request(self, index: int, tokenizer: Tokenizer, work: Work) -> Request:
        out = TextOut(tokenizer, work.stops, work.shown if work.parser else frozenset())
        parser = work.parser() if work.parser else None
        constraint = work.constraint() if work.constraint else None
        watch = Watch(self._metrics, self._arrived_s)
        seed = work.sampling.seed

        def put(piece: Piece) -> None:  # on the engine's thread; a loop that is closed has no listener left
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        def put_all(found: Iterable[tuple[str, list[CallDelta]]]) -> None:
            for text, deltas in found:
                put(Piece(index, text, None, deltas))

        def on_token(token: GeneratedToken) -> str | None:
            watch.on_token()
            is_over = constraint is not None and constraint.take(token.token_id)
            text, is_stop = out.push(token.token_id)
            if parser is None:
                put(Piece(index, text, token))
            else:
                (content, deltas), *rest = in_order(*parser.push(text))
                put(Piece(index, content, token, deltas))
                put_all(rest)
                is_over = is_over or parser.is_done
            return "stop" if is_stop or is_over else None

        def on_done(outcome: Outcome) -> None:
            watch.on_done(outcome)
            text = out.finish()
            if parser is None:
                put(Piece(index, text, outcome=outcome, stop=out.stop))
                return
            put_all([*in_order(*parser.push(text)), *in_order(*parser.finish())])
            put(Piece(index, "", None, (), outcome, tuple(parser.calls), out.stop))

        return Request(
            request_id=uuid.uuid4().hex,
            salt=work.salt,
            tokens=work.tokens,
            history=work.timeline.history,
            timeline=work.timeline,
            sampling=work.sampling if seed is None else replace(work.sampling, seed=seed + index),
            max_tokens=work.max_tokens,
            stop_token_ids=work.stop_token_ids,
            num_logprobs=work.num_logprobs,
            num_prompt_logprobs=work.num_prompt_logprobs if index == 0 else None,
            scores_from=work.scores_from,
            attention=work.attention if index == 0 else None,
            num_known=work.num_known if index == 0 else len(work.tokens),
            token_mask=constraint.mask if constraint else None,
            on_token=on_token,
            on_done=on_done,
        )
