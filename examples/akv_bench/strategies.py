"""The rivals: ways to keep an agent's context within a budget, each as a class with a `turn`.

Owns what each does between an observation and the request. Knows nothing of where the messages come from, or of
display. A strategy is told what is new before each answer; what the model itself said is part of that, if anybody wants
it to be remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from akv_bench.chat import Endpoint, Reply, turn_of
from akv_bench.lengths import Lengths
from akv_bench.measure import Stopwatch, Turn
from akv_bench.trajectories import Message
from akv_sdk import AkvError, Context, Mark, MessageSpan, Op, RollingDrop, decide
from akv_sdk.policies.context import measure, spans_of, subtract, union
from akv_sdk.policies.summarise import REQUEST, SUMMARY_OPENING, groups

SUMMARY_TOKENS = 160
KEPT_RESULTS = 3  # that clearing leaves, as `clear_tool_uses_20250919` does
PLACEHOLDER = "[The output of this earlier step was cleared.]"


@dataclass(frozen=True)
class Limits:
    """`budget_tokens` are what prompt and answer may take together, `max_tokens` of them the answer."""

    budget_tokens: int
    max_tokens: int


class Strategy(Protocol):
    name: str
    how: str  # one line for the report

    async def turn(self, new: Sequence[Message]) -> Turn:
        """This was said and seen since the last turn; let the model go on. Raises AkvError."""
        ...

    async def close(self) -> None: ...


class OpenStrategy(Strategy, Protocol):
    """One that shows what it made of the conversation, so that its price in likelihood can be measured."""

    @property
    def prompt(self) -> list[Message]:
        """The messages of the last request."""
        ...

    @property
    def ops(self) -> list[Op]:
        """What was taken from it in the cache."""
        ...


class AppendOnly:
    """Never takes anything out. The other strategies over text are this one with something in `_make_room`.

    The head is all before the first answer. Nobody takes from it. With `remembers`, what the model says becomes part of
    the conversation by itself.
    """

    name = "Append-only"
    how = "nothing is taken out; ends at the model's window"

    def __init__(self, endpoint: Endpoint, lengths: Lengths, limits: Limits, *, remembers: bool = False) -> None:
        self._endpoint, self._lengths, self._limits, self._remembers = endpoint, lengths, limits, remembers
        self._head: list[Message] = []
        self._tail: list[Message] = []

    @property
    def prompt(self) -> list[Message]:
        return self._head + self._tail

    @property
    def ops(self) -> list[Op]:
        return []

    async def turn(self, new: Sequence[Message]) -> Turn:
        for message in new:
            in_head = not self._tail and message["role"] != "assistant"
            (self._head if in_head else self._tail).append(message)
        await self._lengths.learn(self.prompt)
        watch = Stopwatch()
        before = await self._make_room() if self._tail and self._over() > 0 else []
        reply = await self._endpoint.chat(self.prompt, max_tokens=self._limits.max_tokens, watch=watch)
        if self._remembers:
            self._tail.append({"role": "assistant", "content": reply.text})
        return turn_of(watch, reply, before)

    async def close(self) -> None:
        pass

    async def _make_room(self) -> list[Reply]:
        """Takes out of the tail what is too much. Returns the replies to requests that it took."""
        return []

    def _over(self, tail: Sequence[Message] | None = None) -> int:
        """By how many tokens a prompt with this tail, and its answer, pass the budget."""
        prompt = self._head + list(self._tail if tail is None else tail)
        return self._lengths.prompt(prompt) + self._limits.max_tokens - self._limits.budget_tokens


class Truncation(AppendOnly):
    """The usual sliding window: what is left starts elsewhere than before, so the cached prefix ends behind the task.
    A call goes with its results."""

    name = "Truncation"
    how = "sliding window: on each turn the oldest messages behind the task go until the rest fits"

    async def _make_room(self) -> list[Reply]:
        starts = [start for start, _ in groups(self._tail)]
        start = next((start for start in starts if self._over(self._tail[start:]) <= 0), starts[-1])
        self._tail = self._tail[start:]
        return []


class Summarisation(AppendOnly):
    """The same model writes a summary of the older messages, which takes their place. The newest stay as they are, as
    many as fit half the budget."""

    name = "Summarisation"
    how = f"past the budget the model puts a summary of {SUMMARY_TOKENS} tokens in the place of the older messages"

    async def _make_room(self) -> list[Reply]:
        starts = [start for start, _ in groups(self._tail)]
        half = self._limits.budget_tokens // 2
        start = next((start for start in starts if self._over(self._tail[start:]) <= -half), starts[-1])
        if start == 0:
            return []
        request = {"role": "user", "content": REQUEST}
        reply = await self._endpoint.chat([*self._head, *self._tail[:start], request], max_tokens=SUMMARY_TOKENS)
        self._tail = [{"role": "user", "content": SUMMARY_OPENING + reply.text.strip()}, *self._tail[start:]]
        return [reply]


class Clearing(AppendOnly):
    """What clients do without a server that can: the text of old results is replaced. `observations` are the indexes of
    results among all messages, which this strategy never takes away as a whole."""

    name = "Clearing by text"
    how = f"past the budget the text of all tool results but the newest {KEPT_RESULTS} is replaced by a placeholder"

    def __init__(
        self, endpoint: Endpoint, lengths: Lengths, limits: Limits, observations: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(endpoint, lengths, limits)
        self._observations = observations

    async def turn(self, new: Sequence[Message]) -> Turn:
        first = len(self.prompt)
        await self._lengths.learn([*self.prompt, *cleared(new, {i - first for i in self._observations})])
        return await super().turn(new)

    async def _make_room(self) -> list[Reply]:
        results = [i for i in range(len(self._tail)) if len(self._head) + i in self._observations]
        for num_kept in range(KEPT_RESULTS, 0, -1):
            self._tail = cleared(self._tail, results[:-num_kept])
            if self._over() <= 0:
                break
        return []


def cleared(messages: Sequence[Message], which: Container[int]) -> list[Message]:
    return [{**m, "content": PLACEHOLDER} if i in which else m for i, m in enumerate(messages)]


class Akv:
    """The prompt is append-only. Past the budget the oldest observations are dropped from the cache, just as many as
    have to go, and once there are none, the oldest messages behind the task; `repos` closes the gaps, so that positions
    do not run out. The ops travel with the request."""

    def __init__(
        self,
        endpoint: Endpoint,
        lengths: Lengths,
        limits: Limits,
        observations: frozenset[int],
        session: str,
        *,
        repos: bool,
    ) -> None:
        self.name = "AKV + repos" if repos else "AKV, gap"
        gap = "and the gap is closed" if repos else "and the gap stays open"
        self.how = f"past the budget the oldest observations are dropped in the cache {gap}"
        self._endpoint, self._lengths, self._limits = endpoint, lengths, limits
        self._observations, self._session, self._repos = observations, session, repos
        self._messages: list[Message] = []
        self._num_head = 0
        self._spans: list[MessageSpan] = []  # of the messages, once they were sent
        self._ops: list[Op] = []

    @property
    def prompt(self) -> list[Message]:
        return self._messages

    @property
    def ops(self) -> list[Op]:
        return self._ops

    async def turn(self, new: Sequence[Message]) -> Turn:
        await self._lengths.learn([*self._messages, *new])
        watch = Stopwatch()
        if self._spans:
            self._ops = [*self._ops, *self._drops(new)]
        else:
            self._num_head = len(new)
        self._messages = [*self._messages, *new]
        akv = {"session": self._session, "ops": [op.model_dump(mode="json") for op in self._ops]}
        reply = await self._endpoint.chat(self._messages, max_tokens=self._limits.max_tokens, watch=watch, akv=akv)
        self._spans = reply.spans[: len(self._messages)]
        return turn_of(watch, reply)

    async def close(self) -> None:
        assert self._endpoint.client is not None
        with suppress(AkvError):
            await self._endpoint.client.delete_session(self._session)

    def _drops(self, new: Sequence[Message]) -> list[Op]:
        """What has to go so that the new messages fit. It goes when the agent has spoken and before it sees what came
        of it, as with a session of the SDK: from the end of its message on."""
        at = self._spans[-1].end + self._lengths.of(new[0])
        room = self._limits.budget_tokens - self._limits.max_tokens - self._lengths.prompt(new)
        sent = range(len(self._messages))
        marks = tuple(Mark(message=i, ephemeral=True) for i in sorted(self._observations) if i in sent)
        context = Context(self._messages, self._spans, self._ops, marks)
        going = spans_of(decide(RollingDrop(max(0, room)), context))
        over = context.visible_tokens - measure(going) - room
        for span in self._spans[self._num_head :]:
            if over <= 0:
                break
            left = subtract((span.start, span.end), [*context.dropped, *going])
            over -= measure(left)
            going = union([*going, *left])
        return [Op(op="drop", at=at, start=start, end=end, repos=self._repos) for start, end in going]


Make = Callable[[Endpoint, Lengths, Limits, frozenset[int], str], OpenStrategy]

STRATEGIES: dict[str, Make] = {
    "append-only": lambda endpoint, lengths, limits, observations, session: AppendOnly(endpoint, lengths, limits),
    "truncation": lambda endpoint, lengths, limits, observations, session: Truncation(endpoint, lengths, limits),
    "summarisation": lambda endpoint, lengths, limits, observations, session: Summarisation(endpoint, lengths, limits),
    "clearing": lambda endpoint, lengths, limits, observations, session: Clearing(
        endpoint, lengths, limits, observations
    ),
    "akv-gap": lambda endpoint, lengths, limits, observations, session: Akv(
        endpoint, lengths, limits, observations, session, repos=False
    ),
    "akv-repos": lambda endpoint, lengths, limits, observations, session: Akv(
        endpoint, lengths, limits, observations, session, repos=True
    ),
}
"""By the name that the command line has for it, what makes a strategy for one agent: where, how long messages are, the
limits, which messages are observations, and a session's name."""

ON_AKV_ALONE = ("akv-gap", "akv-repos")
