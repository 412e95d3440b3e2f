"""Which marked observations the server lets go by itself, because the model has stopped looking at them.

Owns counting quiet turns, what is protected besides what every policy protects, and how it is told. Pure: knows
neither sessions nor the engine. What may go at all is for `akv_sdk.policies` to say.

An observation's *share* of a turn is the attention per token (the mean over all heads and layers, at the sampled decode
steps) of the loudest page of what would go of it, over that of an older visible token elsewhere. Older is what lies
before the recent window, which takes most of all attention and is kept anyway. The first page stays out of both sides:
the first tokens take half of all attention whatever they say. The loudest page and not the mean of all, since an answer
that needs one line of a long observation looks at that line: the mean hardly moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from akv_sdk import types
from akv_sdk.policies import Context, Drop, Target, decide
from akv_sdk.policies.context import Message, spans_of, subtract
from akv_server import streams
from akv_server.attention import Attention
from akv_server.errors import AkvError
from akv_server.streams import NamedSpan, Stream

NUM_SINK_TOKENS = 16  # a page: the sinks cannot be told apart from the other tokens in it
NUM_RECENT_TOKENS = 512  # at the stream's end, never dropped
MIN_TOKENS = 64  # what would free fewer is not worth a guess

EDIT_TYPE = "auto_drop"


@dataclass(frozen=True, slots=True)
class Judged:
    """A stream after a turn, what of it went, and what there is to say."""

    stream: Stream
    applied_edits: list[types.AppliedEdit]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Quiet:
    """The policy: observations that were quiet for long enough, and lie before the recent window."""

    quiet: dict[types.Span, int]
    turns: int
    recent: int

    def select(self, context: Context) -> Iterator[Drop]:
        for target in context.observations:
            turns = self.quiet.get((target.start, target.end), 0)
            is_large = target.num_tokens >= MIN_TOKENS
            if turns >= self.turns and is_large and target.end <= self.recent and not target.is_reread:
                yield Drop(target, f"quiet for {turns} turns")


def judge(
    stream: Stream,
    attention: Attention,
    settings: types.AutoDrop,
    messages: Sequence[Message],
    marks: Sequence[types.Mark],
) -> Judged:
    """What becomes of an answered stream. A turn in which nothing was sampled counts for nobody, and one whose answer
    is asked for again counts once, as it went last."""
    if not attention.num_steps:
        return Judged(stream, [], [])
    ops = [streams.wire_of(op) for op in stream.timeline.history]
    context = Context(messages, stream.spans(), ops, marks)
    num_prompt = len(attention.density)
    answer = (message.content_start for message in stream.messages if message.end > num_prompt)
    turn = next(answer, num_prompt)  # the same where an answer is asked for again, or goes on
    counted = (*(before for before in stream.counted if before < turn), turn)
    quiet_since = {(start, end): since for start, end, since in stream.quiet}
    quiet = tuple(
        (target.start, target.end, quiet_since.get((target.start, target.end), turn))
        for target, share in shares(context, attention)
        if share < settings.epsilon
    )
    stream = replace(stream, counted=counted, quiet=quiet)
    num_turns = {(start, end): sum(turn >= since for turn in counted) for start, end, since in quiet}
    drops = decide(_Quiet(num_turns, settings.turns, len(stream.tokens) - NUM_RECENT_TOKENS), context)
    if not drops:
        return Judged(stream, [], [])
    if settings.dry_run:
        return Judged(stream, [], [f"{EDIT_TYPE}: dry run, would drop {_listed(drops)}"])
    try:
        spans = [NamedSpan(EDIT_TYPE, *span) for span in spans_of(drops)]
        stream = streams.drop(stream, spans, repos=True, forget=False).stream
    except AkvError as error:  # a repos of the client's put something in the way
        return Judged(stream, [], [f"{EDIT_TYPE}: {error.message}"])
    num_tokens = sum(drop.target.num_tokens for drop in drops)
    edit = types.AppliedEdit(type=EDIT_TYPE, cleared_tool_uses=len(drops), cleared_input_tokens=num_tokens)
    return Judged(stream, [edit], [f"{EDIT_TYPE}: dropped {_listed(drops)}"])


def shares(context: Context, attention: Attention) -> list[tuple[Target, float]]:
    """The observations that the model sees, and may lose, with their shares of a turn's attention."""
    num_prompt = len(attention.density)
    older = subtract((NUM_SINK_TOKENS, max(NUM_SINK_TOKENS, num_prompt - NUM_RECENT_TOKENS)), context.dropped)
    found = []
    for target in context.observations:
        parts = [part for whole in target.parts for part in subtract(whole, [(0, NUM_SINK_TOKENS)])]
        if parts and target.end <= num_prompt:
            elsewhere = [part for span in older for part in subtract(span, [(target.start, target.end)])]
            found.append((target, attention.share(parts, elsewhere)))
    return found


def _listed(drops: Sequence[Drop]) -> str:
    named = [(drop.target.block or f"message {drop.target.message}", drop) for drop in drops]
    return ", ".join(f"{name} ({drop.target.num_tokens} tokens, {drop.reason})" for name, drop in named)
