"""The rivals: four ways to keep an agent's context small, each as one class with a `turn`.

Owns what each does between an observation and the request. Knows nothing of the sandbox or of display. Every strategy
has a session or a salt of its own, so that nothing one computes is ever reused by another.
"""

from __future__ import annotations

from typing import Any, Protocol

from akv_demo.measure import Stopwatch, Turn
from akv_sdk import Client, Completion, LastNObservations, Stream

KEPT_OBSERVATIONS = 3
GENERATED_TOKENS = 8  # what the model itself says after each observation
SUMMARY_TOKENS = 96


class Strategy(Protocol):
    name: str
    how: str  # one line for the report

    def turn(self, said: str, saw: str) -> Turn:
        """The agent said something and saw what came of it; let the model go on. Raises the SDK's AkvError."""
        ...

    def close(self) -> None: ...


class Akv:
    """The prompt is append-only; old observations are dropped from the cache and the gap is closed (repos)."""

    name = "AKV"
    how = f"drop + repos in the cache; the last {KEPT_OBSERVATIONS} observations stay visible"

    def __init__(self, client: Client, salt: str, system: str, task: str) -> None:
        self._salt = salt
        self._session = client.session(salt)
        self._session.system(system)
        self._session.user(task)
        # The new observation is one of those kept, and the policy is asked before it is sent.
        self._policy = LastNObservations(KEPT_OBSERVATIONS - 1)

    def turn(self, said: str, saw: str) -> Turn:
        self._session.assistant(said)
        watch = Stopwatch()
        self._session.observe(saw, tool="sh")
        self._session.apply(self._policy)
        stream = self._session.stream(
            max_tokens=GENERATED_TOKENS, temperature=0.0, return_token_ids=True, cache_salt=self._salt
        )
        return _turn(watch, stream)

    def close(self) -> None:
        self._session.delete()


class _Stateless:
    """Sends all its messages each time, and relies on the server's prefix cache alone. Subclasses edit the messages."""

    def __init__(self, client: Client, salt: str, system: str, task: str) -> None:
        self._client = client
        self._salt = salt
        self._head = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        self._tail: list[dict[str, Any]] = []
        self._num_head_tokens = 0  # with the opening of the reply; 0 until counted
        self._lengths: dict[tuple[str, str], int] = {}  # in tokens, by role and content

    def turn(self, said: str, saw: str) -> Turn:
        self._tail.append({"role": "assistant", "content": said})
        self._tail.append({"role": "tool", "name": "sh", "content": saw})
        return self._go_on(Stopwatch())

    def close(self) -> None:
        pass

    def _go_on(self, watch: Stopwatch) -> Turn:
        stream = self._client.chat_stream(
            self._head + self._tail,
            max_tokens=GENERATED_TOKENS,
            temperature=0.0,
            return_token_ids=True,
            cache_salt=self._salt,
        )
        turn = _turn(watch, stream)
        self._tail.append(stream.final.message)
        return turn

    def _num_tokens(self, tail: list[dict[str, Any]]) -> int:
        """Tokens of the prompt that these messages make behind the head. Each message is counted once, ever."""
        if self._num_head_tokens == 0:
            self._num_head_tokens = len(self._client.render(self._head).tokens)
        num_tokens = self._num_head_tokens
        for message in tail:
            key = (message["role"], message["content"])
            if key not in self._lengths:
                span = self._client.render([*self._head, message]).spans[-1]
                self._lengths[key] = span.end - span.start
            num_tokens += self._lengths[key]
        return num_tokens


class AppendOnly(_Stateless):
    """Never takes anything out."""

    name = "Append-only"
    how = "nothing is taken out; ends at the model's window"


class Truncation(_Stateless):
    """The usual sliding window: the system prompt and the task stay, and on every turn the oldest messages go until the
    rest fits the budget. What is left starts elsewhere than before, so the cached prefix ends behind the task."""

    name = "Truncation"

    def __init__(self, client: Client, salt: str, system: str, task: str, *, budget_tokens: int) -> None:
        super().__init__(client, salt, system, task)
        self._budget_tokens = budget_tokens
        self.how = f"sliding window: on each turn the oldest messages go until the rest fits {budget_tokens:,} tokens"

    def turn(self, said: str, saw: str) -> Turn:
        self._tail.append({"role": "assistant", "content": said})
        self._tail.append({"role": "tool", "name": "sh", "content": saw})
        self._num_tokens(self._tail)  # counting is not part of what is timed
        watch = Stopwatch()
        while len(self._tail) > 2 and self._num_tokens(self._tail) + GENERATED_TOKENS > self._budget_tokens:
            self._tail.pop(0)
        return self._go_on(watch)


class Summarisation(_Stateless):
    """When the messages pass the budget, the same model writes a summary of the older ones, which takes their place.
    The newest stay as they are, as many as fit half the budget."""

    name = "Summarisation"

    def __init__(self, client: Client, salt: str, system: str, task: str, *, budget_tokens: int) -> None:
        super().__init__(client, salt, system, task)
        self._budget_tokens = budget_tokens
        self.how = f"past {budget_tokens:,} tokens the model summarises the older messages in {SUMMARY_TOKENS} tokens"

    def turn(self, said: str, saw: str) -> Turn:
        new = [{"role": "assistant", "content": said}, {"role": "tool", "name": "sh", "content": saw}]
        self._num_tokens(self._tail + new)  # counting is not part of what is timed
        watch = Stopwatch()
        summary = None
        if self._num_tokens(self._tail + new) + GENERATED_TOKENS > self._budget_tokens and self._tail:
            summary = self._summarise(new)
        self._tail += new
        turn = self._go_on(watch)
        if summary is None:
            return turn
        return Turn(
            turn.ttft_s,
            turn.gaps_s,
            turn.prefilled_tokens + _prefilled(summary),
            turn.reused_tokens + summary.usage.cached_tokens,
            max(turn.visible_tokens, summary.akv.visible_tokens),
            turn.stream_tokens,
        )

    def _summarise(self, new: list[dict[str, Any]]) -> Completion:
        """Puts a summary in the place of the oldest messages; what is behind it, and the new, fits half the budget."""
        limit, num_kept = self._budget_tokens // 2, 0
        while num_kept < len(self._tail) and self._num_tokens(self._tail[-num_kept - 1 :] + new) <= limit:
            num_kept += 1
        num_old = max(1, len(self._tail) - num_kept)
        request = {"role": "user", "content": "Summarise what was done and found so far, with file names and figures."}
        reply = self._client.chat(
            [*self._head, *self._tail[:num_old], request],
            max_tokens=SUMMARY_TOKENS,
            temperature=0.0,
            cache_salt=self._salt,
        )
        note = {"role": "user", "content": f"Summary of the work so far: {reply.text}"}
        self._tail = [note, *self._tail[num_old:]]
        return reply


def _turn(watch: Stopwatch, stream: Stream) -> Turn:
    ttft_s, gaps_s = watch.read(stream)
    reply = stream.final
    return Turn(
        ttft_s=ttft_s,
        gaps_s=gaps_s,
        prefilled_tokens=_prefilled(reply),
        reused_tokens=reply.usage.cached_tokens,
        visible_tokens=reply.akv.visible_tokens,
        stream_tokens=reply.akv.stream_tokens,
    )


def _prefilled(reply: Completion) -> int:
    """Tokens that the server computed for the prompt, whether for the first time or again."""
    return reply.akv.prefilled_tokens + reply.akv.replayed_tokens
