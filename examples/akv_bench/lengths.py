"""How many tokens messages take in a prompt, so that a strategy can keep to a budget.

Owns what was counted so far. An AKV server counts exactly, by rendering; for any other server the number of characters
has to do, at the rate of tokens per character that one request to it showed. Counting is never part of what is timed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from akv_bench.chat import Endpoint
from akv_bench.trajectories import Message
from akv_sdk import AsyncClient

PROBE_CHARS = 8000


class Lengths:
    """Tokens of messages with what a chat template puts around them. Knows those that `learn` was given."""

    def __init__(self, client: AsyncClient | None, tokens_per_char: float = 0.0) -> None:
        self._client = client
        self._tokens_per_char = tokens_per_char
        self._lengths: dict[str, int] = {}
        self._num_opening = 0  # tokens that open an answer

    async def learn(self, messages: Sequence[Message]) -> None:
        """Counts what was not counted yet, among its neighbours."""
        keys = [_key(message) for message in messages]
        if all(key in self._lengths for key in keys):
            return
        if self._client is None:
            self._lengths |= {key: 1 + round(len(key) * self._tokens_per_char) for key in keys}
            return
        rendered = await self._client.render(messages)
        self._num_opening = len(rendered.tokens) - rendered.spans[-1].end
        for key, span in zip(keys, rendered.spans, strict=True):
            self._lengths.setdefault(key, span.end - span.start)

    def of(self, message: Message) -> int:
        return self._lengths[_key(message)]

    def prompt(self, messages: Iterable[Message]) -> int:
        """Tokens of a prompt that these messages make."""
        return sum(map(self.of, messages)) + self._num_opening


async def lengths_of(endpoint: Endpoint, sample: Sequence[Message]) -> Lengths:
    """Counts as that server does. Where it cannot be asked, one request with some of the sample shows the rate."""
    if endpoint.client is not None:
        return Lengths(endpoint.client)
    chosen: list[Message] = []
    for message in sample:
        if chosen and sum(len(_key(each)) for each in [*chosen, message]) > PROBE_CHARS:
            break
        chosen.append(message)
    reply = await endpoint.chat(chosen, max_tokens=1)
    return Lengths(None, reply.prompt_tokens / sum(len(_key(message)) for message in chosen))


def _key(message: Message) -> str:
    return json.dumps(message, sort_keys=True, ensure_ascii=False)
