"""Messages to tokens, and where each message and block lies in them.

Owns cutting what a chat template wrote into one piece of tokens per message, keeping content apart from what the
template put around it, and what is learned of a template by trying it: how it ends a turn and writes a call. Knows
neither sessions nor the cache; how a template is run is `templates.py`'s, and how it is asked for places `turns.py`'s.

A stream of a conversation is a concatenation of pieces: one per message, then what opens the model's turn. A piece
never changes with what follows it. Where a template makes the end of a message depend on the next one (Qwen closes a
turn only after the last of several tool results), that end belongs to the piece after it.

Content is never parsed for special tokens: they are hidden in the caller's strings before the template runs, and put
back as text once the special tokens of the template are found.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from jinja2 import TemplateError

from akv_server.blocks import Block, CallRange, TextTokens, find_observations, find_thoughts
from akv_server.calls import Call
from akv_server.errors import AkvError
from akv_server.identity import Message
from akv_server.templates import Template
from akv_server.tokenizer import Tokenizer
from akv_server.tools import EXAMPLE_CALL, MARKERS, THINK_OPENING, CallFormat, format_of
from akv_server.turns import Escape, Turns

_CACHED_CHARS = 4_000_000


@dataclass(frozen=True, slots=True)
class Piece:
    """One message in tokens. All indexes count from the piece's own first token.

    `content` is the message's own text: tokens wholly inside it, so what the template wrote is never part of it.
    `blocks` are tokens wholly between the tags of a marked observation or of reasoning, or between the braces of a tool
    call's arguments.
    """

    role: str
    tokens: list[int]
    content: tuple[int, int]
    blocks: tuple[Block, ...] = ()
    tool_call_id: str | None = None


class Chat:
    """The chat template of one tokenizer. May be used from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises AkvError("invalid_request", param="model") where the template is no valid template."""
        self.tokenizer = tokenizer
        self._cache: OrderedDict[tuple[str, str, bool], TextTokens] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()
        self._template: Template | None = None
        if tokenizer.chat_template is not None:
            try:
                self._template = Template(tokenizer.chat_template, tokenizer.template_names)
            except TemplateError as error:
                message = f"the chat template of {tokenizer.name} is broken: {error}"
                raise AkvError("invalid_request", message, param="model") from None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, add_generation_prompt: bool = True
    ) -> Rendered:
        """The conversation in tokens, equal to the template's text tokenized as a whole.

        Raises AkvError("invalid_request") naming the field: messages of the wrong shape, text that is no Unicode, a
        template that fails or refuses them. Mutates nothing.
        """
        return Rendered(self, messages, tools, add_generation_prompt)

    def turns(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> Turns:
        """The conversation, ready for the template. Raises as `render` does."""
        if self._template is None:
            raise AkvError("invalid_request", f"{self.tokenizer.name} has no chat template", param="model")
        return Turns(self._template, self._special_texts, messages, tools)

    def assistant_tail(self, generated: Sequence[int]) -> list[int]:
        """What the template puts after a generated answer, before the next message.

        Without the end-of-turn token where `generated` ends with one (the model sampled it).
        """
        tail = self._tail
        if generated and generated[-1] in self.end_ids:
            past = next((i + 1 for i, token in enumerate(tail) if self.tokenizer.is_special(token)), len(tail))
            return tail[past:]
        return list(tail)

    def generated_piece(self, rendered: Rendered, generated: Sequence[int], calls: Sequence[Call] = ()) -> Piece:
        """The piece of an answer that the model generated after `rendered`, which had the turn opened.

        Its tokens are those in the stream (`rendered.generation` and `generated`) and then `assistant_tail(generated)`,
        which the stream needs before the next message. `calls` are those found in the answer's text.
        """
        ended = bool(generated) and generated[-1] in self.end_ids
        decoder = self.tokenizer.decode_stream(shown=self.marker_ids)
        text, tokens = "", TextTokens()
        for token_id in generated[:-1] if ended else generated:
            shown = decoder.push(token_id)
            tokens.add(token_id, len(text), len(text) + len(shown))
            text += shown
        text += decoder.finish()
        opening = len(rendered.generation)
        blocks = tokens.blocks(
            find_observations(text, text, "assistant"),
            find_thoughts(text, is_open=rendered.is_thinking),
            [(call.id, call.begin, call.end) for call in calls if call.begin < call.end],
        )
        return Piece(
            role="assistant",
            tokens=[*rendered.generation, *generated, *self.assistant_tail(generated)],
            content=(opening, opening + len(tokens.ids)),
            blocks=tuple(block.moved(opening) for block in blocks),
        )

    # What is learned of the template by trying it

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the model's turn: the tokenizer's own, and the one that the template closes a turn with."""
        closing = [token for token in self._tail if self.tokenizer.is_special(token)][:1]
        return self.tokenizer.eos_token_ids | frozenset(closing)

    @cached_property
    def call_format(self) -> CallFormat:
        """How the template writes calls, and so how the model does."""
        return format_of(self._written([EXAMPLE_CALL]))

    @cached_property
    def takes_many_calls(self) -> bool:
        """Whether the template takes several calls in one message; some refuse to."""
        return bool(self._written([EXAMPLE_CALL, EXAMPLE_CALL]))

    def _written(self, calls: list[Message]) -> str:
        call = {"role": "assistant", "content": None, "tool_calls": calls}
        _, whole, starts = self._try([_QUESTION, call])
        return whole[starts[1] :] if starts else ""

    @cached_property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that mark calls and reasoning: a parser has to see them in an answer's text."""
        return frozenset(self.tokenizer.special[mark] for mark in MARKERS if mark in self.tokenizer.special)

    @cached_property
    def _tail(self) -> list[int]:
        """What the template puts after an answer's text, in tokens."""
        turns, whole, starts = self._try([_QUESTION, _ANSWER])
        if turns is None:
            return []
        content_end = turns.contents(whole, starts)[1][1]
        end = self.stable_end(whole, content_end, starts[2], "assistant")
        return self.tokenize(whole[content_end:end], turns.escape, continues=True).ids.tolist()

    def stable_end(self, whole: str, content_end: int, end: int, role: str) -> int:
        """Where the piece of a message ends whose text ends at `end`: before what depends on the message after it."""
        for ending in self._endings.get(role, ()):
            if whole.endswith(ending, content_end, end):
                return end - len(ending)
        return end

    @cached_property
    def _endings(self) -> dict[str, list[str]]:
        """By role, the text at the end of a message that changes, as text or in tokens, with what follows it. Learned
        from how the template writes the same message before different others. Longest first; most templates have none.
        """
        found: dict[str, list[str]] = {}
        for role, before in _PROBES.items():
            variants: list[tuple[str, int, TextTokens]] = []
            content_end = 0
            for after, prompt in _PROBES_AFTER:
                turns, whole, starts = self._try([*before, *after], add_generation_prompt=prompt)
                if turns is not None:
                    content_end = turns.contents(whole, starts)[len(before) - 1][1]
                    tokens = self.tokenize(whole, turns.escape, continues=False)
                    variants.append((whole, starts[len(before)], tokens))
            if not variants:
                continue
            columns = zip(*(tokens.ids for _, _, tokens in variants), strict=False)
            num_same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
            until = min(variants[0][2].end_of(num_same), *(end for _, end, _ in variants))
            until = max(until, content_end)
            found[role] = sorted({whole[until:end] for whole, end, _ in variants} - {""}, key=len, reverse=True)
        return found

    def _try(
        self, messages: list[Message], *, add_generation_prompt: bool = False
    ) -> tuple[Turns | None, str, list[int]]:
        try:
            turns = self.turns(messages)
            whole = turns.run(add_generation_prompt=add_generation_prompt)
            return turns, whole, turns.starts(whole)
        except AkvError:  # the template does not take such a conversation
            return None, "", []

    # Text to tokens

    def tokenize(self, escaped: str, escape: Escape, *, continues: bool) -> TextTokens:
        """Special tokens of the template parsed, text between them put back as it was and tokenized in one.

        `continues`: other text comes before. The result is shared, do not modify.
        """
        key = (escaped, escape.letter, continues)
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return known
        tokens, at = TextTokens(), 0
        for run, special in self.tokenizer.split_special(escaped):
            text = escape.restore(run)
            if special is not None:
                tokens.add(special, at, at + len(text))
            else:
                encoded = self.tokenizer.encode_run(text, continues=continues or at > 0)
                tokens.extend(encoded.ids, encoded.ranges, at)
            at += len(text)
        with self._lock:
            if self._cache.setdefault(key, tokens) is tokens:
                self._cached_chars += len(escaped)
            while self._cached_chars > _CACHED_CHARS and len(self._cache) > 1:
                (old, *_), _ = self._cache.popitem(last=False)
                self._cached_chars -= len(old)
        return tokens

    @cached_property
    def _special_texts(self) -> list[str]:
        """Special tokens, longest first, so that none is taken for a part of another."""
        return sorted(self.tokenizer.special, key=len, reverse=True)


class Rendered:
    """A conversation as the template writes it. Pieces are tokenized when they are asked for, so a caller that holds
    the tokens of the first k messages pays only for the others."""

    def __init__(
        self, chat: Chat, messages: Sequence[Message], tools: Sequence[Message] | None, add_generation_prompt: bool
    ) -> None:
        self._chat, self._messages, self._tools = chat, messages, tools
        self._turns = turns = chat.turns(messages, tools)
        self._whole = whole = turns.run(add_generation_prompt=add_generation_prompt)
        self._turn_starts = turns.starts(whole)  # where the template begins a message; its piece may begin before
        self._contents = turns.contents(whole, self._turn_starts)
        self._starts = [0]
        for turn, (_, content_end), end in zip(turns.turns, self._contents, self._turn_starts[1:], strict=True):
            self._starts.append(chat.stable_end(whole, content_end, end, turn.role))
        self._openings: dict[tuple[str, str], Rendered] = {}
        self.generation: list[int] = chat.tokenize(whole[self._starts[-1] :], turns.escape, continues=True).ids.tolist()
        """What follows the last message: the opening of the model's turn; without one, the closing of the last turn."""

    @cached_property
    def text(self) -> str:
        return self._turns.escape.restore(self._whole)

    @property
    def is_thinking(self) -> bool:
        """Whether the model's turn was opened with the beginning of its reasoning."""
        return self.text.rstrip().endswith(THINK_OPENING)

    def text_of(self, message: int) -> str:
        """What the template makes of a message: the text that its piece is the tokens of."""
        return self._turns.escape.restore(self._whole[self._starts[message] : self._starts[message + 1]])

    def piece(self, message: int) -> Piece:
        """Tokens of one message; valid for ever, do not modify."""
        turn, start, end = self._turns.turns[message], self._starts[message], self._starts[message + 1]
        restore = self._turns.escape.restore
        tokens = self._chat.tokenize(self._whole[start:end], self._turns.escape, continues=start > 0)

        def place(at: int) -> int:
            return len(restore(self._whole[start:at]))

        low, high = map(place, self._contents[message])
        text = restore(self._whole[start : self._contents[message][1]])
        inputs = [(id_, place(begin), place(stop)) for id_, begin, stop in self._inputs.get(message, ())]
        thoughts: list[tuple[int, int]] = []
        if turn.role == "assistant":
            turn_start = place(self._turn_starts[message])
            stop = min([high, *(begin for _, begin, _ in inputs)])
            thoughts = [(turn_start + a, turn_start + b) for a, b in find_thoughts(text[turn_start:stop])]
        observations = find_observations(text[low:], turn.text, turn.role)
        return Piece(
            role=turn.given_role,
            tokens=tokens.ids.tolist(),
            content=tokens.inside(low, high),
            blocks=tokens.blocks([(id_, low + a, low + b) for id_, a, b in observations], thoughts, inputs),
            tool_call_id=self._messages[message].get("tool_call_id"),
        )

    @cached_property
    def _inputs(self) -> dict[int, list[CallRange]]:
        return self._turns.inputs(self._whole)

    def opened(self, message: int) -> Rendered:
        """A conversation whose turn was opened as it was for the model to write that message (not the first). Only
        what opens the turn is meant. Raises AkvError where the template does not take the messages before it alone."""
        opening = self._whole[self._starts[message] : self._contents[message][0]]
        key = self._turns.turns[message - 1].role, opening  # a template opens turns alike in like places
        if key not in self._openings:
            self._openings[key] = self._chat.render(self._messages[:message], self._tools)
        return self._openings[key]


_QUESTION: Message = {"role": "user", "content": "Q"}
_ANSWER: Message = {"role": "assistant", "content": "A"}
_CALLS = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "R"}
_PROBES: dict[str, list[Message]] = {
    "user": [_QUESTION],
    "assistant": [_QUESTION, _ANSWER],
    "tool": [_QUESTION, {"role": "assistant", "content": "", "tool_calls": _CALLS}, _RESULT],
}
_PROBES_AFTER: list[tuple[list[Message], bool]] = [
    ([], False),
    ([], True),
    ([_QUESTION], False),
    ([_ANSWER], False),
    ([_RESULT], False),
]
