"""AKV as an agent uses it: a session of the SDK that drops its old observations. Its rivals are the benchmark's.

Knows nothing of the sandbox or of display.
"""

from __future__ import annotations

from collections.abc import Sequence

from akv_bench.measure import Stopwatch, Turn
from akv_bench.trajectories import Message

from akv_sdk import AsyncClient, LastNObservations

KEPT_OBSERVATIONS = 3
GENERATED_TOKENS = 8  # what the model itself says after each observation


class Akv:
    """The prompt is append-only; old observations are dropped from the cache and the gap is closed (repos)."""

    name = "AKV"
    how = f"drop + repos in the cache; the last {KEPT_OBSERVATIONS} observations stay visible"

    def __init__(self, client: AsyncClient, session: str) -> None:
        self._session = client.session(session)
        # The new observation is one of those kept, and the policy is asked before it is sent.
        self._policy = LastNObservations(KEPT_OBSERVATIONS - 1)

    async def turn(self, new: Sequence[Message]) -> Turn:
        """What was said and seen since the last turn; the last of it is the observation. What the model said, the
        session remembers by itself."""
        *said, saw = new
        self._session.messages += said
        watch = Stopwatch()
        self._session.observe(saw["content"], tool=saw["name"])
        await self._session.apply(self._policy)
        stream = self._session.stream(max_tokens=GENERATED_TOKENS, temperature=0.0, return_token_ids=True)
        async for event in stream:
            watch.saw(len(event.token_ids))
        reply = stream.final
        return Turn(
            ttft_s=watch.ttft_s,
            gaps_s=tuple(watch.gaps_s),
            prefilled_tokens=reply.akv.prefilled_tokens + reply.akv.replayed_tokens,
            reused_tokens=reply.usage.cached_tokens,
            visible_tokens=reply.akv.visible_tokens,
            stream_tokens=reply.akv.stream_tokens,
            generated_tokens=reply.usage.completion_tokens,
        )

    async def close(self) -> None:
        await self._session.delete()
