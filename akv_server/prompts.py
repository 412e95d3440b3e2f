"""From the body of a request to the stream that it asks for: where rendered messages meet a session's stream.

Owns which of a request's messages a stream has already, and what an answer adds to it. What messages look like to the
model is `chat.py`'s; what becomes of ops is `streams.py`'s. Knows neither engine nor HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from akv_sdk import types
from akv_server import streams
from akv_server.answers import claimed_ids, claimed_piece, identity_of
from akv_server.calls import Call
from akv_server.chat import Chat, Piece
from akv_server.errors import AkvError, invalid
from akv_server.grammar import Shape
from akv_server.identity import (
    ids_of_inputs,
    named_as,
    normalise_for_matching,
    without_reasoning,
    without_torn_arguments,
)
from akv_server.requests import ChatBody, CompletionBody
from akv_server.streams import Continued, Message, Stream
from akv_server.tokenizer import Tokenizer
from akv_server.tools import NO_TOOLS, Function, tool_use


class TextPrompt:
    """A prompt that is the whole stream, as a text or as token ids. What is new in it has to be no more than
    `num_fitting` tokens, if that is given: a text that is surely longer is refused before it is tokenized."""

    shape = Shape()

    def __init__(
        self, body: CompletionBody, tokenizer: Tokenizer, num_vocab: int, num_fitting: int | None = None
    ) -> None:
        self.stop_ids = tokenizer.eos_token_ids
        self._prompt = body.prompt
        self._tokenizer = tokenizer
        self._num_vocab = num_vocab
        self._num_fitting = num_fitting

    def continued(self, stream: Stream) -> Continued:
        """What becomes of a session's stream."""
        tokens = self._prompt
        if isinstance(tokens, str):
            _check_fits(self._tokenizer.least_tokens(tokens) - len(stream.tokens), self._num_fitting, "prompt")
            tokens = _tokens_of(tokens, self._tokenizer)
        if not tokens:
            raise invalid("prompt", "must not be empty")
        _check_fits(len(tokens) - len(stream.tokens), self._num_fitting, "prompt")
        if max(tokens) >= self._num_vocab:
            at = next(i for i, token_id in enumerate(tokens) if token_id >= self._num_vocab)
            raise invalid(f"prompt[{at}]", f"the model has no token {tokens[at]}")
        return streams.continued(stream, tokens)

    def answered(self, stream: Stream, generated: list[int], text: str, calls: Sequence[Call] = ()) -> Stream:
        """The prompt's stream with what was generated."""
        return replace(stream, tokens=stream.tokens + generated)


class ChatPrompt:
    """A prompt of messages. Those that a stream has already keep the token ids that they have there, others those
    that they say they were generated as, if they may. Of these others there have to be no more than `num_fitting`
    tokens, as in `TextPrompt`."""

    def __init__(self, body: ChatBody | types.RenderRequest, chat: Chat, num_fitting: int | None = None) -> None:
        self.stop_ids = chat.end_ids
        use = NO_TOOLS
        if isinstance(body, ChatBody):
            use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        self._chat = chat
        self._num_fitting = num_fitting
        self._rendered = chat.render(body.messages, body.tools, body.add_generation_prompt)
        self._messages = body.messages
        self._tools = body.tools
        self._stops = tuple(body.stops) if isinstance(body, ChatBody) else ()
        self._identities = [normalise_for_matching(message) for message in body.messages]
        self._head = json.dumps(body.tools, sort_keys=True) if body.tools else None
        if use.many and not chat.takes_many_calls:
            use = replace(use, many=False)
        asked = body.response_format if isinstance(body, ChatBody) else None
        self.shape = Shape(
            use,
            chat.call_format,
            asked.schema_of_answer if asked else None,
            is_strict=bool(asked and asked.json_schema and asked.json_schema.strict),
            is_thinking=self._rendered.is_thinking,
        )
        """What the answer has to look like."""

    def continued(self, stream: Stream) -> Continued:
        """What becomes of a session's stream: the messages that it shares with the request, and the rest anew."""
        num_kept = 0
        if self._head == stream.head:
            num_both = min(len(self._identities), len(stream.messages))
            num_kept = next((i for i in range(num_both) if not self._is_in(stream, i)), num_both)
        messages = [self._known(stream.messages[i], i) for i in range(num_kept)]
        tokens = stream.tokens[: messages[-1].end] if messages else []
        if messages and messages[-1].is_open:
            tokens += self._chat.assistant_tail(tokens[messages[-1].content_start :])
            messages[-1] = replace(messages[-1], end=len(tokens), is_open=False)
        new = range(num_kept, len(self._identities))
        if self._num_fitting is not None:
            least = self._chat.tokenizer.least_tokens
            _check_fits(sum(least(self._rendered.text_of(i)) for i in new), self._num_fitting, "messages")
        warnings: list[str] = []
        for i in new:
            piece = self._piece(i, warnings)
            messages.append(_placed(piece, len(tokens), self._identities[i]))
            tokens += piece.tokens
        differs = num_kept < min(len(stream.messages), len(self._identities))
        tokens += self._rendered.generation
        found = streams.continued(stream, tokens, tuple(messages), self._head, num_kept if differs else None)
        return replace(found, warnings=tuple(warnings))

    def _is_in(self, stream: Stream, i: int) -> bool:
        """Whether message `i` is the stream's own. Of an answer, what the model thought may be left out, and arguments
        that are no JSON; it may have got a name. One that ended at a stop string has that in the stream, though not in
        the reply: it may be put back in its place."""
        message = stream.messages[i]
        if self._identities[i] == message.identity:
            return True
        if message.role != "assistant":
            return False
        # Before it came back once, it is as the model wrote it.
        made = named_as(message.identity, self._identities[i]) if message.is_open else message.identity
        whole = {made} | without_torn_arguments(made)
        known = whole | {without_reasoning(identity) for identity in whole}
        if self._identities[i] in known:
            return True
        cut = [stop for stop in self._stops if normalise_for_matching(self._messages[i], ending=stop) in known]
        written = self._chat.tokenizer.decode(stream.tokens[message.content_start : message.content_end]) if cut else ""
        return any(stop in written for stop in cut)

    def _known(self, message: Message, i: int) -> Message:
        """A message that the stream has, by the spelling and the ids with which it came last."""
        return replace(_with_ids(message, self._messages[i]), identity=self._identities[i])

    @cached_property
    def _functions(self) -> tuple[Function, ...]:
        """Those that earlier answers may have called, whatever this one may."""
        return tool_use(self._tools, None, None).functions

    def _piece(self, i: int, warnings: list[str]) -> Piece:
        """A message that the stream does not have, in tokens."""
        if claimed_ids(self._messages[i]):
            try:
                return claimed_piece(self._chat, self._rendered, i, self._messages[i], self._functions, self._stops)
            except AkvError as error:
                warnings.append(f"messages[{i}].akv.token_ids: {error.message}; left aside, and the text tokenized")
        return self._rendered.piece(i)

    def answered(self, stream: Stream, generated: list[int], text: str, calls: Sequence[Call] = ()) -> Stream:
        """The prompt's stream with what was generated, as a message that is known by `text` and `calls` when it comes
        back.

        Where nothing was generated, what opens the model's turn goes again: the next message may be anybody's. So does
        what closes the turn of an answer that keeps its ids: the stream ends as it did when that was generated.
        """
        end = stream.messages[-1].end
        if not generated:
            for last in (self._reopened(stream), stream.messages[-1]):
                shorter, num_lost = stream.truncated(last.end)
                if not num_lost:
                    return replace(shorter, messages=(*stream.messages[:-1], last))
            return stream
        piece = self._chat.generated_piece(self._rendered, generated, calls)
        tokens = stream.tokens + generated
        message = replace(_placed(piece, end, identity_of(text, calls)), end=len(tokens), is_open=True)
        return replace(stream, tokens=tokens, messages=(*stream.messages, message))

    def _reopened(self, stream: Stream) -> Message:
        """The stream's last message, as it stood there when it had just been generated, if it was."""
        last, ids = stream.messages[-1], claimed_ids(self._messages[-1])
        tail = self._chat.assistant_tail(ids)
        if not ids or stream.tokens[last.content_start : last.end] != [*ids, *tail]:
            return last
        return replace(last, end=last.end - len(tail), is_open=True)


Prompt = TextPrompt | ChatPrompt


def render(body: types.RenderRequest, chat: Chat) -> Stream:
    """The stream that a chat request would have on a new session."""
    return ChatPrompt(body, chat).continued(Stream()).stream


def _check_fits(num_new: int, num_fitting: int | None, param: str) -> None:
    if num_fitting is not None and num_new > num_fitting:
        message = f"{param}: at least {num_new} new tokens, more than the {num_fitting} that have room here"
        raise AkvError("context_length_exceeded", message, param=param)


def _tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Special tokens in the text are what they name: the caller writes the whole stream here, template and all."""
    tokens = tokenizer.encode(text, parse_special=True)
    bos = tokenizer.bos_token_id
    return [bos, *tokens] if tokenizer.add_bos and bos is not None and tokens[:1] != [bos] else tokens


def _with_ids(message: Message, sent: dict[str, Any]) -> Message:
    """A message that the stream has, with the ids by which the request calls it: frameworks make them anew."""
    if message.role == "tool" and message.tool_call_id != sent.get("tool_call_id"):
        return replace(message, tool_call_id=sent.get("tool_call_id"))
    inputs = [block for block in message.blocks if block.kind == "tool_input"]
    if not {block.tool_call_id for block in inputs} - {call.get("id") for call in sent.get("tool_calls") or ()}:
        return message
    found = ids_of_inputs(sent)
    if len(found) != len(inputs):  # the model wrote one in a way that has no place of its own
        return message
    ids = dict(zip([block.id for block in inputs], found, strict=True))
    return replace(
        message, blocks=tuple(replace(b, tool_call_id=ids.get(b.id, b.tool_call_id)) for b in message.blocks)
    )


def _placed(piece: Piece, start: int, identity: Hashable) -> Message:
    a, b = piece.content
    return Message(
        identity=identity,
        role=piece.role,
        start=start,
        end=start + len(piece.tokens),
        content_start=start + a,
        content_end=start + b,
        tool_call_id=piece.tool_call_id,
        blocks=tuple(block.moved(start) for block in piece.blocks),
    )
