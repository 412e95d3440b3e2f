"""What a strategy costs the model: the negative log-likelihood of what the agent really said, given what was left of
the context before it.

Scores with an AKV server's own route for it (`echo` with log-probabilities, nothing generated), which no other server
needs to have. Knows what was sent, not why. Never part of what is timed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from akv_bench.trajectories import Message
from akv_sdk import AsyncClient, ContextLengthExceeded, Op


@dataclass(frozen=True)
class Scene:
    """An answer, and what it was an answer to: the messages of a request, and the ops that held."""

    prompt: list[Message]
    ops: list[Op]
    answer: Message


@dataclass(frozen=True)
class Likelihood:
    """Over a number of answers: natural logarithms, summed, of so many tokens; what ends an answer is one of them."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def per_token(self) -> float | None:
        return self.nats / self.tokens if self.tokens else None

    def __add__(self, other: Likelihood) -> Likelihood:
        return Likelihood(self.nats + other.nats, self.tokens + other.tokens)


async def score(client: AsyncClient, scenes: Sequence[Scene]) -> list[Likelihood | None]:
    """Of each answer; None of one that has no room behind a prompt that had. Those whose prompts go on from one another
    are scored in one pass, which the ops divide as they did the run. Raises AkvError."""
    salt = uuid.uuid4().hex  # only what is computed is scored, so nothing of the run may be found in the cache
    return [found for each in _passes(scenes) for found in await _score_pass(client, salt, each)]


def _passes(scenes: Sequence[Scene]) -> Iterator[list[Scene]]:
    begun: list[Scene] = []
    for scene in scenes:
        if begun:
            said = [*begun[-1].prompt, begun[-1].answer]
            if scene.prompt[: len(said)] != said:
                yield begun
                begun = []
        begun.append(scene)
    if begun:
        yield begun


async def _score_pass(client: AsyncClient, salt: str, scenes: Sequence[Scene]) -> list[Likelihood | None]:
    last = scenes[-1]
    rendered = await client.render([*last.prompt, last.answer], add_generation_prompt=False)
    try:
        reply = await client.completions(
            rendered.tokens, ops=last.ops, max_tokens=0, echo=True, logprobs=0, cache_salt=salt
        )
    except ContextLengthExceeded:
        return [*(await _score_pass(client, salt, scenes[:-1]) if len(scenes) > 1 else []), None]
    assert reply.logprobs is not None
    scores = reply.logprobs["token_logprobs"]
    spans = [rendered.spans[len(scene.prompt)] for scene in scenes]
    answers = [scores[span.content_start : span.end] for span in spans]
    return [Likelihood(-sum(answer), len(answer)) for answer in answers]
