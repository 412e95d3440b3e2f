"""Anthropic's Messages API as a way to answer: the chunks of a chat completion as its events, and these as a message.

Owns content blocks: where a thought ends and the text begins, and where a call stands between texts. What comes back of
them (`messages.py`) is the text that the model wrote, so that its turn is known again. Pure: knows neither HTTP nor
sessions.

A thought at the beginning of an answer becomes a thinking block, without the space within and behind its tags:

    <think> \\n the thought \\n </think> \\n\\n the answer
    [ opening ][ thinking  ][   closing    ][ text ...

`opening` and `closing` travel in the block's signature.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from akv_server.errors import AkvError
from akv_server.messages import Asked, Body, signature_of
from akv_server.nesting import is_deep
from akv_server.tools import THINK_CLOSING, THINK_OPENING
from akv_server.values import overlap

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


class Reply:
    """One answer on its way. `message` is all of it, once every chunk was given to `events`."""

    def __init__(self, asked: Asked, *, num_prompt_tokens: int, is_thinking: bool) -> None:
        """`num_prompt_tokens` are those that the model sees; `is_thinking`: the template opened its thought."""
        self.message: Body = {}
        self._asked = asked
        self._num_prompt_tokens = num_prompt_tokens
        self._content: list[Body] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the call that is open
        self._finish: tuple[str, str | None] = ("", None)
        self._state: Literal["before", "thought", "behind", "text"] = "thought" if is_thinking else "before"
        self._opening = self._closing = ""  # around the thought
        self._held = ""  # text of which it is not certain yet what it belongs to

    def events(self, chunk: Body) -> Iterator[Body]:
        """What a chunk of the chat completion comes to. Raises AkvError where the answer was broken off."""
        if not self.message:
            yield from self._begin(chunk)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("content"):
                yield from self._write(delta["content"])
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)
            if choice.get("finish_reason"):
                self._finish = choice["finish_reason"], choice.get("stop_reason")
        if chunk.get("usage"):
            yield from self._end(chunk)

    def _begin(self, chunk: Body) -> Iterator[Body]:
        self.message = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": chunk["model"],
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            # How much of the prompt came from the cache is known, and said, at the end.
            "usage": {
                "input_tokens": self._num_prompt_tokens,
                "cache_creation_input_tokens": None,
                "cache_read_input_tokens": None,
                "output_tokens": 0,
            },
        }
        yield {"type": "message_start", "message": {**self.message, "content": []}}

    def _end(self, chunk: Body) -> Iterator[Body]:
        yield from self._settle()
        yield from self._close()
        reason, stop_sequence = self._finish
        if reason not in _STOP_REASONS:
            raise AkvError("internal_error", f"the answer was broken off ({reason})")
        usage = _usage(chunk["usage"])
        stop_reason = "stop_sequence" if stop_sequence is not None else _STOP_REASONS[reason]
        if reason == "length" and usage["output_tokens"] < (self._asked.body.max_tokens or 0):
            stop_reason = "model_context_window_exceeded"
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        akv = {**chunk["akv"], "warnings": [*self._asked.warnings, *chunk["akv"]["warnings"]]}
        more: Body = {"usage": usage, "akv": akv}
        if "context_management" in chunk:
            more["context_management"] = chunk["context_management"]
        self.message |= {**delta, **more}
        yield {"type": "message_delta", "delta": delta, **more}
        yield {"type": "message_stop"}

    # Text, which may begin with a thought.

    def _write(self, text: str) -> Iterator[Body]:
        """Some more text; what may yet belong elsewhere is held back."""
        self._held += text
        if self._state == "before":
            rest = self._held.lstrip()
            if len(rest) < len(THINK_OPENING) and THINK_OPENING.startswith(rest):
                return
            self._state = "text"
            if rest.startswith(THINK_OPENING):
                self._state = "thought"
                self._opening = self._take(len(self._held) - len(rest) + len(THINK_OPENING))
                yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
        if self._state == "thought":
            at = self._held.find(THINK_CLOSING)
            until = len(self._held) - overlap(self._held, THINK_CLOSING) if at < 0 else at
            yield from self._think(self._take(len(self._held[:until].rstrip())))
            if at >= 0:
                self._state = "behind"
                self._closing = self._take(self._held.find(THINK_CLOSING) + len(THINK_CLOSING))
                yield from self._think("")
        if self._state == "behind":
            self._closing += self._take(len(self._held) - len(self._held.lstrip()))
            if self._held:
                yield from self._close()
                self._state = "text"
        if self._state == "text":
            yield from self._say(self._take(len(self._held)))

    def _settle(self) -> Iterator[Body]:
        """No more text belongs together with what is held."""
        held = self._take(len(self._held))
        if self._state == "thought" and held.strip():
            yield from self._think(held.rstrip())
        elif self._state == "before" and held.strip():
            yield from self._say(held)
        self._state = "text"

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _think(self, text: str) -> Iterator[Body]:
        """Some more of the thought; with no text, it is one all the same."""
        block = self._content[-1] if self._content else {"thinking": ""}
        if not block["thinking"]:
            rest = text.lstrip()
            self._opening += text[: len(text) - len(rest)]
            text = rest
        if not self._content and (text or self._closing):
            yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
        if text:
            self._content[-1]["thinking"] += text
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _say(self, text: str) -> Iterator[Body]:
        if not self._is_open or self._content[-1]["type"] != "text":
            if any(block["type"] != "tool_use" for block in self._content) and self._content[-1]["type"] == "tool_use":
                text = text.removeprefix("\n")  # between texts around a call; blocks are put together with one
            yield from self._open({"type": "text", "text": ""})
        self._content[-1]["text"] += text
        yield self._delta({"type": "text_delta", "text": text})

    # Calls. Where nothing holds them to JSON, their arguments come when they are whole: a client may trust them to be.

    def _call(self, call: Body) -> Iterator[Body]:
        if "id" in call:
            yield from self._settle()
            yield from self._open({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
        if arguments := call["function"]["arguments"]:
            self._arguments += arguments
            if self._asked.is_held:
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    # Blocks.

    def _open(self, block: Body) -> Iterator[Body]:
        yield from self._close()
        self._is_open = True
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**block}}

    def _close(self) -> Iterator[Body]:
        if not self._is_open:
            return
        block, self._is_open = self._content[-1], False
        if block["type"] == "thinking":
            block["signature"] = signature_of(self._opening, self._closing)
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            found = _input(self._arguments)
            block["input"] = found or {}
            if not self._asked.is_held:
                written = "{}" if found is None else self._arguments
                yield self._delta({"type": "input_json_delta", "partial_json": written})
            self._arguments = ""
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, delta: Body) -> Body:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}


def _usage(usage: Body) -> Body:
    """The prompt that the model saw, in three parts: read from the cache, computed and kept there, and neither. The
    last is empty here: all that is computed is kept, until it is evicted."""
    num_read = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": 0,
        "cache_creation_input_tokens": usage["prompt_tokens"] - num_read,
        "cache_read_input_tokens": num_read,
        "output_tokens": usage["completion_tokens"],
    }


def _input(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call as a value; None where they are no JSON object (an answer that was cut off, or a model
    that writes what it likes), or one that JSON cannot carry back."""
    try:
        found = json.loads(arguments, parse_constant=_finite, parse_float=_finite)
        if isinstance(found, dict) and not is_deep(found):
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair cannot be
            return found
    except (ValueError, RecursionError):
        pass
    return None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
