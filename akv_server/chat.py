"""Messages to tokens, and where each message and block lies in them.

Owns running the model's chat template, keeping content apart from what the template wrote, cutting the result into one
piece of tokens per message, and the identity of a message that comes back. Knows neither sessions nor the cache.

A stream of a conversation is a concatenation of pieces: one per message, then what opens the model's turn. A piece
never changes with what follows it. Where a template makes the end of a message depend on the next one (Qwen closes a
turn only after the last of several tool results), that end belongs to the piece after it.

Content is never parsed for special tokens: before the template runs, each special token inside the caller's strings
is replaced by a placeholder of noncharacters, and put back as text once the special tokens of the template are found.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import chain, islice, takewhile
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from pydantic import ValidationError

from akv_sdk.types import Block, BlockKind, MessageMarking, MessageSpan
from akv_server.errors import AkvError
from akv_server.nesting import is_deep
from akv_server.tokenizer import Tokenizer
from akv_server.tools import EXAMPLE_CALL, MARKERS, THINK_CLOSING, THINK_OPENING, Call, CallFormat, format_of

Message = dict[str, Any]

_TAG = re.compile(r'<ephemeral_observation\s+id="(?P<id>[^"\\<>\n]{1,200})"\s*>|</ephemeral_observation>')
_TAG_IN_JSON = re.compile(_TAG.pattern.replace('"', r'\\"'))  # as a template writes it that makes JSON of content
_THOUGHT = re.compile(f"{THINK_OPENING}(.*?){THINK_CLOSING}", re.DOTALL)
_NONCHARACTERS = range(0xFDD0, 0xFDF0)
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_CACHED_CHARS = 4_000_000


@dataclass(frozen=True, slots=True)
class Piece:
    """One message in tokens. All indexes count from the piece's own first token.

    `content` is the message's own text: tokens wholly inside it, so what the template wrote is never part of it.
    `blocks` are tokens wholly between the tags of a marked observation or of reasoning, or between the braces of a tool
    call's arguments; all are visible.
    """

    message: int
    role: str
    tokens: list[int]
    content: tuple[int, int]
    blocks: tuple[Block, ...] = ()
    tool_call_id: str | None = None

    def span(self, start: int) -> MessageSpan:
        """Where the message lies in a stream in which the piece begins at index `start`. Every block is visible."""
        return MessageSpan(
            message=self.message,
            role=self.role,
            start=start,
            end=start + len(self.tokens),
            content_start=start + self.content[0],
            content_end=start + self.content[1],
            tool_call_id=self.tool_call_id,
            blocks=[b.model_copy(update={"start": start + b.start, "end": start + b.end}) for b in self.blocks],
        )


@dataclass(frozen=True, eq=False)
class Rendered:
    """A conversation as the template writes it. Pieces are tokenized when they are first asked for, so a caller that
    holds the tokens of the first k messages pays only for the others."""

    text: str
    num_messages: int
    generation: list[int]
    """What follows the last message: the opening of the model's turn; without one, the closing of the last turn."""
    _make: Callable[[int], Piece] = field(repr=False)
    text_of: Callable[[int], str] = field(repr=False)
    """What the template makes of a message: the text that its piece is the tokens of."""

    _open: Callable[[int], Rendered] = field(repr=False)

    def opened(self, message: int) -> Rendered:
        """A conversation whose turn was opened as it was for the model to write that message (not the first). Only
        what opens the turn is meant. Raises AkvError where the template does not take the messages before it alone."""
        return self._open(message)

    def piece(self, message: int) -> Piece:
        """Tokens of one message; valid for ever, do not modify."""
        return self._make(message)

    @cached_property
    def pieces(self) -> list[Piece]:
        return [self.piece(i) for i in range(self.num_messages)]

    @cached_property
    def tokens(self) -> list[int]:
        return [*chain.from_iterable(piece.tokens for piece in self.pieces), *self.generation]

    @property
    def is_thinking(self) -> bool:
        """Whether the model's turn was opened with the beginning of its reasoning."""
        return self.text.rstrip().endswith(THINK_OPENING)

    @cached_property
    def spans(self) -> list[MessageSpan]:
        return spans_of(self.pieces)


def spans_of(pieces: Iterable[Piece]) -> list[MessageSpan]:
    """The spans of pieces that make up a stream from its beginning."""
    spans: list[MessageSpan] = []
    for piece in pieces:
        spans.append(piece.span(spans[-1].end if spans else 0))
    return spans


def normalise_for_matching(message: Message) -> Hashable:
    """The identity of a message: two that compare equal are the same message, sent twice.

    Role, text (parts joined, line ends and outer whitespace aside), and function and arguments of each call, by value
    and not by spelling. Ids of calls are left out, frameworks make them anew; so is a tool result's `name`.
    """
    role = _role(message.get("role"))
    calls = [call["function"] for call in _calls(message, "tool_calls")]
    text = _text(message.get("content"), "content").replace("\r\n", "\n").strip()
    called = tuple((call["name"], _canonical(call["arguments"])) for call in calls)
    return role, text, called, None if role == "tool" else message.get("name")


def ids_of_inputs(message: Message) -> list[str | None]:
    """The ids of a message's calls whose arguments are an object that is not empty: those with a block of their own."""
    calls = [(call.get("id"), call["function"]["arguments"]) for call in _calls(message, "tool_calls")]
    return [id_ for id_, arguments in calls if isinstance(arguments, dict) and arguments]


class Chat:
    """The chat template of one tokenizer. May be used from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises AkvError("invalid_request", param="model") where the template is no valid template."""
        self.tokenizer = tokenizer
        self._cache: OrderedDict[tuple[str, str, bool], _Tokens] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()
        source = tokenizer.chat_template
        if source is None:
            return
        try:
            environment = _environment()
            tree = environment.parse(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)
            self.plain = environment.from_string(source)
            self.marked = environment.from_string(_mark_turns(tree, environment))
        except jinja2.TemplateError as error:
            raise AkvError(
                "invalid_request", f"the chat template of {tokenizer.name} is broken: {error}", param="model"
            ) from None
        self.knows_calls = "tool_calls" in source
        self.knows_developer = "developer" in source

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, add_generation_prompt: bool = True
    ) -> Rendered:
        """The conversation in tokens, equal to the template's text tokenized as a whole.

        Raises AkvError("invalid_request") naming the field: messages of the wrong shape, text that is no Unicode, a
        template that fails or refuses them. Mutates nothing.
        """
        turns = _Turns(self, messages, tools)
        whole = turns.run(add_generation_prompt=add_generation_prompt)
        turn_starts = turns.starts(whole)
        contents = turns.contents(whole, turn_starts)
        starts = [0]
        for i, (_, content_end) in enumerate(contents):
            starts.append(self._stable(whole, content_end, turn_starts[i + 1], turns.roles[i]))

        def make(i: int) -> Piece:
            tokens = self._tokenize(whole[starts[i] : starts[i + 1]], turns.escape, continues=starts[i] > 0)

            def place(at: int) -> int:
                return len(turns.restore(whole[starts[i] : at]))

            (low, high), turn_start = map(place, contents[i]), place(turn_starts[i])
            text = turns.restore(whole[starts[i] : contents[i][1]])
            inputs = turns.inputs(whole).get(i, [])
            if turns.roles[i] == "assistant":
                stop = min([high, *(place(begin) for _, begin, _ in inputs)])
                thoughts = _thoughts(text[turn_start:stop])
            else:
                thoughts = []
            return Piece(
                message=i,
                role=turns.given_roles[i],
                tokens=tokens.ids.tolist(),
                content=tokens.inside(low, high),
                blocks=(
                    *(
                        tokens.block(id_, low + begin, low + stop)
                        for id_, begin, stop in _blocks(text[low:], turns.texts[i], turns.roles[i])
                    ),
                    *(
                        tokens.block(f"thinking-{n}", turn_start + begin, turn_start + stop, "thinking")
                        for n, (begin, stop) in enumerate(thoughts)
                    ),
                    *(
                        tokens.block(f"input-{n}", place(begin), place(stop), "tool_input", call_id)
                        for n, (call_id, begin, stop) in enumerate(inputs)
                    ),
                ),
                tool_call_id=messages[i].get("tool_call_id"),
            )

        generation = self._tokenize(whole[starts[-1] :], turns.escape, continues=True).ids.tolist()

        openings: dict[tuple[str, str], Rendered] = {}

        def open_turn(i: int) -> Rendered:
            key = turns.roles[i - 1], whole[starts[i] : contents[i][0]]  # a template opens turns alike in like places
            if key not in openings:
                openings[key] = self.render(messages[:i], tools)
            return openings[key]

        def text_of(i: int) -> str:
            return turns.restore(whole[starts[i] : starts[i + 1]])

        return Rendered(turns.restore(whole), len(messages), generation, make, text_of, open_turn)

    def assistant_tail(self, generated: Sequence[int]) -> list[int]:
        """What the template puts after a generated answer, before the next message.

        Without the end-of-turn token where `generated` ends with one (the model sampled it).
        """
        tail = self._tail
        if generated and generated[-1] in self.end_ids:
            past = next((i + 1 for i, token in enumerate(tail) if self.tokenizer.is_special(token)), len(tail))
            return tail[past:]
        return list(tail)

    def generated_piece(
        self, rendered: Rendered, generated: Sequence[int], message: int, calls: Sequence[Call] = ()
    ) -> Piece:
        """The piece of an answer that the model generated after `rendered`, which had the turn opened.

        Its tokens are those in the stream (`rendered.generation` and `generated`) and then `assistant_tail(generated)`,
        which the stream needs before the next message. `message` is the answer's index in the conversation; `calls`
        are those found in its text.
        """
        ended = bool(generated) and generated[-1] in self.end_ids
        decoder = self.tokenizer.decode_stream(shown=self.marker_ids)
        text, tokens = "", _Tokens()
        for token_id in generated[:-1] if ended else generated:
            piece = decoder.push(token_id)
            tokens.add(token_id, len(text), len(text) + len(piece))
            text += piece
        text += decoder.finish()
        opening = len(rendered.generation)
        thoughts = _thoughts(text, is_open=rendered.is_thinking)
        blocks = [
            *(tokens.block(id_, begin, stop) for id_, begin, stop in _blocks(text, text, "assistant")),
            *(tokens.block(f"thinking-{n}", *inside, "thinking") for n, inside in enumerate(thoughts)),
            *(
                tokens.block(f"input-{n}", call.begin, call.end, "tool_input", call.id)
                for n, call in enumerate(call for call in calls if call.begin < call.end)
            ),
        ]
        return Piece(
            message=message,
            role="assistant",
            tokens=[*rendered.generation, *generated, *self.assistant_tail(generated)],
            content=(opening, opening + len(tokens.ids)),
            blocks=tuple(b.model_copy(update={"start": opening + b.start, "end": opening + b.end}) for b in blocks),
        )

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
        end = self._stable(whole, content_end, starts[2], "assistant")
        return self._tokenize(whole[content_end:end], turns.escape, continues=True).ids.tolist()

    def _stable(self, whole: str, content_end: int, end: int, role: str) -> int:
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
            variants: list[tuple[str, int, _Tokens]] = []
            content_end = 0
            for after, prompt in _PROBES_AFTER:
                turns, whole, starts = self._try([*before, *after], add_generation_prompt=prompt)
                if turns is not None:
                    content_end = turns.contents(whole, starts)[len(before) - 1][1]
                    tokens = self._tokenize(whole, turns.escape, continues=False)
                    variants.append((whole, starts[len(before)], tokens))
            if not variants:
                continue
            columns = zip(*(tokens.ids for _, _, tokens in variants), strict=False)
            num_same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
            until = min(variants[0][2].ends[num_same - 1] if num_same else 0, *(end for _, end, _ in variants))
            until = max(until, content_end)
            found[role] = sorted({whole[until:end] for whole, end, _ in variants} - {""}, key=len, reverse=True)
        return found

    def _try(
        self, messages: list[Message], *, add_generation_prompt: bool = False
    ) -> tuple[_Turns | None, str, list[int]]:
        try:
            turns = _Turns(self, messages, None)
            whole = turns.run(add_generation_prompt=add_generation_prompt)
            return turns, whole, turns.starts(whole)
        except AkvError:  # the template does not take such a conversation
            return None, "", []

    def _tokenize(self, escaped: str, escape: str, *, continues: bool) -> _Tokens:
        """Special tokens of the template parsed, text between them put back as it was and tokenized in one."""
        key = (escaped, escape, continues)
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return known
        tokens, at = _Tokens(), 0
        for run, special in self.tokenizer.split_special(escaped):
            text = _restore(run, escape, self.special_texts)
            if special is not None:
                tokens.add(special, at, at + len(text))
            else:
                encoded = self.tokenizer.encode_run(text, continues=continues or at > 0)
                tokens.ids.extend(encoded.ids)
                tokens.begins.extend([at + begin for begin, _ in encoded.ranges])
                tokens.ends.extend([at + end for _, end in encoded.ranges])
            at += len(text)
        with self._lock:
            if self._cache.setdefault(key, tokens) is tokens:
                self._cached_chars += len(escaped)
            while self._cached_chars > _CACHED_CHARS and len(self._cache) > 1:
                (old, *_), _ = self._cache.popitem(last=False)
                self._cached_chars -= len(old)
        return tokens

    @cached_property
    def special_texts(self) -> list[str]:
        """Special tokens, longest first, so that none is taken for a part of another."""
        return sorted(self.tokenizer.special, key=len, reverse=True)


class _Tokens:
    """Token ids of a text, and the characters `[begin, end)` that each stands for."""

    def __init__(self) -> None:
        self.ids, self.begins, self.ends = array("I"), array("I"), array("I")

    def add(self, token_id: int, begin: int, end: int) -> None:
        self.ids.append(token_id)
        self.begins.append(begin)
        self.ends.append(end)

    def inside(self, begin: int, end: int) -> tuple[int, int]:
        """The tokens that lie wholly within characters `[begin, end)`."""
        low = bisect_left(self.begins, begin)
        return low, max(low, bisect_right(self.ends, end))

    def block(
        self, name: str, begin: int, end: int, kind: BlockKind = "observation", tool_call_id: str | None = None
    ) -> Block:
        """The block of the characters `[begin, end)`."""
        low, high = self.inside(begin, end)
        return Block(id=name, start=low, end=high, visible=True, kind=kind, tool_call_id=tool_call_id)


class _Turns:
    """One conversation, made ready for one template: checked, in the shape that the template knows, escaped.

    `roles` are as the template gets them, `given_roles` as the caller wrote them, `texts` the content of each message.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Message] | None) -> None:
        if chat.tokenizer.chat_template is None:
            raise AkvError("invalid_request", f"{chat.tokenizer.name} has no chat template", param="model")
        if not messages:
            raise AkvError("invalid_request", "a conversation needs at least one message", param="messages")
        self._chat = chat
        self.texts: list[str] = []
        self.roles: list[str] = []
        self.given_roles: list[str] = []
        self._extras: list[str] = []  # what we add behind a content, where the template has no words for it
        self._calls: list[list[Message]] = []
        shaped = [self._shape(i, message) for i, message in enumerate(messages)]
        for i, tool in enumerate(tools or ()):
            if not isinstance(tool, dict):
                raise _bad(f"tools[{i}]", "a tool is an object")
        self._num_own = 0  # messages of ours before the caller's first
        if tools and not chat.knows_tools:
            if self.roles[0] == "system":
                self._extras[0] += ("\n\n" if self.texts[0] else "") + _tools_text(tools)
            else:
                shaped.insert(0, {"role": "system"})
                self.texts.insert(0, "")
                self._extras.insert(0, _tools_text(tools))
                self._calls.insert(0, [])
                self._num_own = 1
        strings = list(chain(_strings(shaped, "messages"), _strings(list(tools or ()), "tools")))
        strings += [(f"messages[{i - self._num_own}].content", text) for i, text in enumerate(self.texts)]
        for path, text in strings:
            _check_unicode(text, path)
        everything = [text for _, text in strings]
        candidates = map(chr, chain(_NONCHARACTERS, _PRIVATE_USE))
        unused = (letter for letter in candidates if not any(letter in text for text in everything))
        try:
            self.escape, self._mark, self._sentinel = islice(unused, 3)
        except ValueError:
            raise _bad("messages", "the text uses up every private character") from None
        self._tools = _map(list(tools), self._hide) if tools else None
        self._messages: list[Message] = _map(shaped, self._hide)
        for message, text, extra in zip(self._messages, self.texts, self._extras, strict=True):
            message["content"] = self._hide(text + extra)
        self._index_of = {id(message): i - self._num_own for i, message in enumerate(self._messages)}
        self._own_texts = self.texts  # of all messages, ours included
        self.texts = self.texts[self._num_own :]
        self._inputs: dict[int, list[tuple[str | None, int, int]]] | None = None

    def _shape(self, i: int, message: Message) -> Message:
        at = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _bad(at, "a message is an object")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise _bad(f"{at}.role", "a message has a role")
        chat = self._chat
        given = message["role"]
        role = given if chat.knows_developer else _role(given)
        self.given_roles.append(given)
        self.roles.append(role)
        text = _text(message.get("content"), f"{at}.content")
        self.texts.append(text)
        for key in ("tool_call_id", "name"):
            if not isinstance(message.get(key), str | None):
                raise _bad(f"{at}.{key}", f"a {key} is a string")
        calls = _calls(message, f"{at}.tool_calls")
        _check_marking(message, at)
        shaped = {key: value for key, value in message.items() if key not in _NOT_FOR_TEMPLATES}
        shaped["role"] = role
        if calls and chat.knows_calls:
            shaped["tool_calls"] = calls
        self._calls.append(calls)
        self._extras.append("" if chat.knows_calls else _calls_text(text, calls))
        return shaped

    def run(
        self,
        *,
        add_generation_prompt: bool = False,
        num_messages: int | None = None,
        marked: bool = False,
        sentinels: bool = False,
        messages: Sequence[Message] | None = None,
    ) -> str:
        """The template's text, special tokens of the caller's hidden. Raises AkvError where the template fails.
        `messages` stand in for those of the conversation."""
        messages = self._messages if messages is None else messages
        if num_messages is not None:
            messages = messages[: self._num_own + num_messages]
        index_of = self._index_of
        if sentinels:
            messages = [
                {**message, "content": f"{self._sentinel}{i - self._num_own}{self._sentinel}{self._hide(extra)}"}
                for i, (message, extra) in enumerate(zip(messages, self._extras, strict=False))
            ]
            index_of = {id(message): i - self._num_own for i, message in enumerate(messages)}

        def mark(item: object) -> str:
            index = index_of.get(id(item), -1)
            return f"{self._mark}{index}{self._mark}" if index >= 0 else ""

        template = self._chat.marked if marked else self._chat.plain
        try:
            return template.render(
                **self._chat.tokenizer.template_names,
                messages=messages,
                tools=self._tools,
                add_generation_prompt=add_generation_prompt,
                **{_MARKER: mark},
            )
        except Exception as error:  # whatever a template does wrong, the request is refused and nothing else happens
            raise AkvError(
                "invalid_request", f"the chat template does not take these messages: {error}", param="messages"
            ) from None

    def starts(self, whole: str, *, sentinels: bool = False) -> list[int]:
        """Where in `whole` the text of each message starts, and at last where that of the last one ends."""
        marks: dict[int, int] = {}
        plain: list[str] = []
        length = 0
        for i, part in enumerate(self.run(marked=True, sentinels=sentinels).split(self._mark)):
            if i % 2:
                marks[int(part)] = length
            else:
                plain.append(part)
                length += len(part)
        text = "".join(plain)
        if not whole.startswith(text):  # the marks changed what the template did, or its end depends on the prompt
            text = self.run(sentinels=sentinels)
            marks = {}
        starts = [0]
        for i in range(1, len(self.roles)):
            at = marks[i] if i in marks else self._start_by_prefix(whole, i, sentinels)
            starts.append(max(at, starts[-1]))
        return [*starts, max(_num_common(whole, text), starts[-1])]

    def _start_by_prefix(self, whole: str, num_messages: int, sentinels: bool) -> int:
        """For templates that do not simply go over the messages in a loop."""
        try:
            return _num_common(whole, self.run(num_messages=num_messages, sentinels=sentinels))
        except AkvError:
            return 0

    def contents(self, whole: str, starts: list[int]) -> list[tuple[int, int]]:
        """Where in `whole` the content of each message lies, whatever the template made of it: between what it writes
        before and after a content that is a mere sentinel."""
        try:
            model = self.run(sentinels=True)
            model_starts = self.starts(model, sentinels=True)
        except AkvError:  # the template looks into the content
            model, model_starts = "", [0] * len(starts)
        found: list[tuple[int, int]] = []
        for i in range(len(self.roles)):
            low, high = starts[i], starts[i + 1]
            turn = whole[low:high]
            before, sentinel, after = model[model_starts[i] : model_starts[i + 1]].partition(
                f"{self._sentinel}{i}{self._sentinel}"
            )
            if sentinel:
                begin = _num_common(turn, before)
                end = len(turn) - _num_common(turn[::-1], after[::-1])
            else:
                text = self._hide(self.texts[i].strip())
                begin = turn.rfind(text) if text else len(turn)
                begin, end = (len(turn), len(turn)) if begin < 0 else (begin, begin + len(text))
            found.append((low + begin, low + max(begin, end)))
        return found

    def inputs(self, whole: str) -> dict[int, list[tuple[str | None, int, int]]]:
        """By message, `(id, begin, end)` of each of its tool calls: where in `whole` the inside of its arguments lies.

        Only those that the template writes as a JSON object; others have no place of their own in the text. Found by
        letting it write the conversation with other arguments: what is the same in both surrounds them.
        """
        if self._inputs is None:
            self._inputs = self._find_inputs(whole) if any(self._calls) else {}
        return self._inputs

    def _find_inputs(self, whole: str) -> dict[int, list[tuple[str | None, int, int]]]:
        stand_ins: list[Message] = []
        for i, (message, text, calls) in enumerate(zip(self._messages, self._own_texts, self._calls, strict=True)):
            others = [
                {**call, "function": {**call["function"], "arguments": {f"{self._sentinel}{i},{j}{self._sentinel}": 0}}}
                if isinstance(call["function"]["arguments"], dict) and call["function"]["arguments"]
                else call
                for j, call in enumerate(_map(calls, self._hide))
            ]
            if not calls:
                stand_ins.append(message)
            elif self._chat.knows_calls:
                stand_ins.append({**message, "tool_calls": others})
            else:
                stand_ins.append({**message, "content": self._hide(text) + _calls_text(text, others)})
        try:
            model = self.run(messages=stand_ins)
        except AkvError:  # the template looks into the arguments
            return {}
        found: dict[int, list[tuple[str | None, int, int]]] = {}
        at = past = 0  # how far both texts are the same, arguments aside
        for match in re.finditer(f"{self._sentinel}([0-9]+),([0-9]+){self._sentinel}", model):
            begin = model.rfind("{", past, match.start())
            end = _end_of_object(model, begin)
            around = model[past:begin]
            here = at + len(around)
            stop = _end_of_object(whole, here) if begin >= 0 and whole.startswith(around, at) else None
            if end is None or stop is None:
                break
            i, call = int(match[1]) - self._num_own, self._calls[int(match[1])][int(match[2])]
            found.setdefault(i, []).append((call.get("id"), here + 1, stop - 1))
            at, past = stop, end
        return found

    def restore(self, escaped: str) -> str:
        return _restore(escaped, self.escape, self._chat.special_texts)

    def _hide(self, text: str) -> str:
        for i, special in enumerate(self._chat.special_texts):
            if special in text:
                text = text.replace(special, f"{self.escape}{i}{self.escape}")
        return text


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which some templates mark what a model is trained on. Here it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox that chat templates are written for: these names, and blocks that leave no blank lines."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _mark_turns(tree: jinja2.nodes.Template, environment: jinja2.Environment) -> jinja2.nodes.Template:
    """Makes every loop over single things write a mark first, which is empty unless the thing is a message."""
    for loop in list(tree.find_all(jinja2.nodes.For)):
        if isinstance(loop.target, jinja2.nodes.Name):
            item = jinja2.nodes.Name(loop.target.name, "load")
            mark = jinja2.nodes.Call(jinja2.nodes.Name(_MARKER, "load"), [item], [], None, None)
            loop.body.insert(0, jinja2.nodes.Output([mark]).set_lineno(loop.lineno))
    tree.set_environment(environment)
    return tree


def _blocks(text: str, given: str, role: str) -> Iterator[tuple[str, int, int]]:
    """`(id, begin, end)` of the inside of each block in `text`, which the template made of the content `given`.

    A tool result is one block or none: it is data, and tags within it mean nothing. Elsewhere tags pair up as
    brackets do, a pair within a pair is part of it, and a tag without a partner is text.
    """
    tags = list(_TAG.finditer(given))
    if len(tags) < 2:
        return
    for pattern in (_TAG, _TAG_IN_JSON):
        places = list(pattern.finditer(text))
        if len(places) == len(tags):
            break
    else:
        return
    if role == "tool":
        whole = given.strip()
        is_block = tags[0]["id"] and whole.startswith(tags[0].group()) and not tags[-1]["id"]
        if is_block and whole.endswith(tags[-1].group()):
            yield tags[0]["id"], places[0].end(), places[-1].start()
        return
    pairs: list[tuple[int, int]] = []
    open_tags: list[int] = []
    for i, tag in enumerate(tags):
        if tag["id"]:
            open_tags.append(i)
        elif open_tags:
            first = open_tags.pop()
            while pairs and pairs[-1][0] > first:
                pairs.pop()
            pairs.append((first, i))
    for first, last in pairs:
        yield tags[first]["id"], places[first].end(), places[last].start()


def _thoughts(text: str, *, is_open: bool = False) -> list[tuple[int, int]]:
    """`(begin, end)` of what stands between the tags of reasoning in an answer. `is_open`: the template opened one
    before the text. One that was never closed, or says nothing, is none."""
    before = THINK_OPENING if is_open else ""
    found = ((match.start(1), match.end(1)) for match in _THOUGHT.finditer(before + text) if match[1].strip())
    return [(begin - len(before), end - len(before)) for begin, end in found]


def _restore(escaped: str, escape: str, specials: list[str]) -> str:
    if escape not in escaped:
        return escaped
    parts = escaped.split(escape)
    parts[1::2] = [specials[int(part)] if part.isdecimal() else part for part in parts[1::2]]
    return "".join(parts)


def _num_common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _bad(param: str, message: str) -> AkvError:
    return AkvError("invalid_request", message, param=param)


def _role(role: Any) -> Any:
    """OpenAI's newer name for the system role means the same."""
    return "system" if role == "developer" else role


def _text(content: Any, at: str) -> str:
    """A content as one string; parts are joined by line ends."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _bad(at, "content is a string, null or a list of parts")
    texts: list[str] = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _bad(f"{at}[{j}].type", f"only parts of type text are supported, not {kind!r}")
        if not isinstance(part.get("text"), str):
            raise _bad(f"{at}[{j}].text", "a text part has a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(message: Message, at: str) -> list[Message]:
    """The tool calls of a message, checked, with their arguments as values."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _bad(at, "tool_calls is a list")
    return [_call(call, f"{at}[{j}]") for j, call in enumerate(calls)]


def _calls_text(text: str, calls: Sequence[Message]) -> str:
    """What stands behind a content for a template that has no words for calls."""
    lines = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return "\n".join(([""] if text and lines else []) + lines)


def _end_of_object(text: str, begin: int) -> int | None:
    """Where the JSON object that starts at `begin` ends."""
    if not text.startswith("{", begin):
        return None
    try:
        return _DECODER.raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return None


def _check_marking(message: Message, at: str) -> None:
    """What a message says of itself to policies is held to the contract; the template never sees it."""
    try:
        MessageMarking.model_validate(message.get("akv") or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise _bad(f"{at}.akv{path}", first["msg"]) from None


def _call(call: Any, at: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _bad(f"{at}.function", "a tool call has a function")
    if not isinstance(function.get("name"), str):
        raise _bad(f"{at}.function.name", "a tool call has the name of a function")
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {"name": function["name"], "arguments": {} if arguments is None else arguments}}


def _arguments(arguments: Any) -> Any:
    """Arguments as a value; a string that is no JSON object stays what it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) and not is_deep(parsed) else arguments


def _canonical(value: Any) -> str:
    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [plain(inner) for inner in item]
        return int(item) if isinstance(item, float) and item.is_integer() else item  # JavaScript writes 1.0 as 1

    return json.dumps(plain(value), sort_keys=True)


def _tools_text(tools: Sequence[Message]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and a JSON object of arguments:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )


def _strings(value: Any, at: str) -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, with the name of the field it lies in."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield at, key
            yield from _strings(inner, f"{at}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _strings(inner, f"{at}[{i}]")


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map(inner, change) for key, inner in value.items()}
    return [_map(inner, change) for inner in value] if isinstance(value, list) else value


def _check_unicode(text: str, at: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad(at, "the text holds half of a surrogate pair, which no UTF-8 can carry") from None


_MARKER = "_akv_turn"
_DECODER = json.JSONDecoder()
_NOT_FOR_TEMPLATES = frozenset({"content", "tool_calls", "akv", "tags", "is_demo"})
_QUESTION: Message = {"role": "user", "content": "Q"}
_ANSWER: Message = {"role": "assistant", "content": "A"}
_CALLS = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "R"}
_PROBES_AFTER: list[tuple[list[Message], bool]] = [
    ([], False),
    ([], True),
    ([_QUESTION], False),
    ([_ANSWER], False),
    ([_RESULT], False),
]
_PROBES: dict[str, list[Message]] = {
    "user": [_QUESTION],
    "assistant": [_QUESTION, _ANSWER],
    "tool": [_QUESTION, {"role": "assistant", "content": "", "tool_calls": _CALLS}, _RESULT],
}
