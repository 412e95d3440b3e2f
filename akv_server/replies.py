"""Bodies of OpenAI replies, whole and in chunks, from what a generation made.

Owns the JSON shapes of chat and text completions, of their log-probabilities and of usage. `stop_reason` of a choice
is the stop string that ended it, or null, as vLLM has it. Pure: knows neither HTTP nor sessions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from akv_server.batch import GeneratedToken, Outcome
from akv_server.calls import CallDelta
from akv_server.generation import Choice
from akv_server.tokenizer import Tokenizer

Body = dict[str, Any]


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> Body:
    """`num_prompt_tokens` are those the model sees: a dropped token is not part of the prompt. Those of them that were
    not computed for the first choice came from the cache."""
    num_generated = sum(len(choice.tokens) for choice in choices)
    outcome = choices[0].outcome
    num_computed = outcome.computed_visible if outcome else 0
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_prompt_tokens - num_computed},
    }


class Replies:
    """Builds the bodies of one completion: the same id, time and model in all of them."""

    def __init__(self, tokenizer: Tokenizer, model: str, *, chat: bool, token_ids: bool, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._token_ids = token_ids
        self._tokens_as_ids = tokens_as_ids
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Body], usage: Body, more: Body) -> Body:
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices), "usage": usage, **more}

    def chunk(self, choices: Sequence[Body], **more: Any) -> Body:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices), **more}

    def choice(self, choice: Choice, prompt: Echo | None, num_logprobs: int | None) -> Body:
        """A finished choice. `prompt` stands before the text where the caller asked for an echo."""
        body: Body = {"index": choice.index, "finish_reason": _finish_reason(choice), "stop_reason": choice.stop}
        if self._chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                body["message"]["content"] = choice.text or None
                body["message"]["tool_calls"] = [call.body() for call in choice.calls]
            logprobs = None if num_logprobs is None else self._chat_logprobs(choice.tokens, num_logprobs)
        else:
            echoed = prompt.text if prompt else ""
            body["text"] = echoed + choice.text
            logprobs = None
            if num_logprobs is not None:
                logprobs = self._text_logprobs(
                    choice.tokens, [len(echoed) + at for at in choice.token_offsets], num_logprobs
                )
                if prompt:
                    logprobs = _joined(self._echo_logprobs(prompt, num_logprobs), logprobs)
        body["logprobs"] = logprobs
        if self._token_ids:
            body["token_ids"] = (prompt.tokens if prompt else []) + choice.token_ids
        return body

    def first(self, index: int) -> Body:
        """What opens a choice in a chat stream."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, text: str, tokens: list[GeneratedToken], offset: int, num_logprobs: int | None) -> Body:
        """Some more text of a streamed choice. `offset` is where the text of `tokens` starts in the whole text."""
        body: Body = {"index": index, "logprobs": None, "finish_reason": None}
        if self._chat:
            body["delta"] = {"content": text}
            if num_logprobs is not None:
                body["logprobs"] = self._chat_logprobs(tokens, num_logprobs)
        else:
            body["text"] = text
            if num_logprobs is not None:
                body["logprobs"] = self._text_logprobs(tokens, [offset] * len(tokens), num_logprobs)
        if self._token_ids:
            body["token_ids"] = [token.token_id for token in tokens]
        return body

    def calls(self, index: int, delta: CallDelta, *, is_first: bool) -> Body:
        """Some more of a call in a chat stream. `is_first`: nothing opened the choice yet."""
        opening = {"role": "assistant", "content": None} if is_first else {}
        body = {**opening, "tool_calls": [delta.body()]}
        return {"index": index, "delta": body, "logprobs": None, "finish_reason": None}

    def last(self, choice: Choice) -> Body:
        """What closes a streamed choice."""
        body: Body = {"index": choice.index, "logprobs": None, "finish_reason": _finish_reason(choice)}
        body["stop_reason"] = choice.stop
        return {**body, "delta": {}} if self._chat else {**body, "text": ""}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokens_as_ids else self._tokenizer.decode([token_id], skip_special=False)

    def _chat_logprobs(self, tokens: Sequence[GeneratedToken], num_top: int) -> Body:
        def entry(token_id: int, logprob: float | None) -> Body:
            raw = self._tokenizer.token_bytes(token_id)
            return {"token": self._name(token_id), "logprob": logprob, "bytes": list(raw)}

        content = [
            {**entry(t.token_id, t.logprob), "top_logprobs": [entry(*top) for top in t.top[:num_top]]} for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, tokens: Sequence[GeneratedToken], offsets: list[int], num_top: int) -> Body:
        return {
            "tokens": [self._name(t.token_id) for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [self._tops(t.token_id, t.logprob, t.top[:num_top]) for t in tokens],
            "text_offset": offsets,
        }

    def _echo_logprobs(self, prompt: Echo, num_top: int) -> Body:
        """Entry i is the distribution that prompt token i was drawn from; null where it was not computed just now."""
        return {
            "tokens": [self._name(token_id) for token_id in prompt.tokens],
            "token_logprobs": [score[0] if score else None for score in prompt.scores],
            "top_logprobs": [
                self._tops(token_id, score[0], score[1][:num_top]) if score else None
                for token_id, score in zip(prompt.tokens, prompt.scores, strict=True)
            ],
            "text_offset": prompt.offsets,
        }

    def _tops(self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The best tokens and the one that was taken. Two tokens may decode to one name: the better one keeps it."""
        named: dict[str, float] = {}
        taken = [] if logprob is None else [(token_id, logprob)]
        for other, value in [*top, *taken]:
            named.setdefault(self._name(other), value)
        return named


class Echo:
    """The prompt of a text completion that asked to have it back.

    `scores[i]` is the log-probability of token i and the best tokens at its place, or None.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[int], outcome: Outcome | None) -> None:
        self.tokens = tokens
        self.scores = (outcome.prompt_scores if outcome else None) or [None] * len(tokens)
        decoder = tokenizer.decode_stream()
        self.offsets: list[int] = []
        parts: list[str] = []
        length = 0
        for token_id in tokens:
            self.offsets.append(length)
            parts.append(decoder.push(token_id))
            length += len(parts[-1])
        self.text = "".join(parts) + decoder.finish()


def _finish_reason(choice: Choice) -> str | None:
    reason = choice.outcome.finish_reason if choice.outcome else None
    return "tool_calls" if reason == "stop" and choice.calls else reason


def _joined(a: Body, b: Body) -> Body:
    return {key: a[key] + b[key] for key in a}
