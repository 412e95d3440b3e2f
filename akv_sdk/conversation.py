"""What a session knows without asking: the conversation, the spans and ops that the server told of, marks and notes.

Owns building a session's calls and taking their replies in, and that one answer is written at a time. Pure: does no
I/O. `session.py` moves the calls.
"""

from __future__ import annotations

import logging
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from inspect import isawaitable
from typing import Any, Literal, overload

from akv_sdk import _wire, types
from akv_sdk._wire import Call, Message, Turn
from akv_sdk.errors import EmptySummary, SessionBusy, StreamDiverged
from akv_sdk.policies import Context, Decision, Drop, Summary, summarise
from akv_sdk.policies.context import dropped_spans, note_of, still_dropped, tags_of, without_notes

logger = logging.getLogger("akv_sdk.session")

_BLOCK_ID = re.compile(r'<ephemeral_observation id="([^"]*)">')


class Conversation:
    """What both twins hold, and everything about it that needs no I/O.

    Attributes:
        name: of the session on the server.
        messages: the conversation so far. Append to it as you like; editing what was sent makes the stream diverge
            there, and the server says so.
        spans: where each message and block lies, from the last reply.
        marks: what was said about messages and spans besides the tags in their text.
    """

    def __init__(self, name: str | None, *, model: str | None, messages: Iterable[Message]) -> None:
        self.name = name if name is not None else f"session-{uuid.uuid4().hex}"
        self.model = model
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.spans: list[types.MessageSpan] = []
        self.marks: list[types.Mark] = []
        self._ops: list[types.Op] | None = None  # None: not known yet, the server's journal holds
        self._is_anonymous = name is None
        self._untold: list[Drop] = []  # what a note before the next observation or user message is to tell of
        self._shape: dict[str, Any] = {}  # what the last completion asked for that decides how the stream is rendered
        self._refused_summary_tokens = 0
        self._is_held = False  # an answer is being written, or the messages are being rewritten

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {len(self.messages)} messages, {len(self.ops)} ops>"

    @property
    def ops(self) -> tuple[types.Op, ...]:
        """The history of the stream, as the server last told it."""
        return tuple(self._ops or ())

    def system(self, content: str) -> None:
        self.messages.append({"role": "system", "content": content})

    def user(self, content: str | Sequence[Mapping[str, Any]]) -> None:
        note = self._take_note()
        if note is not None:
            content = f"{note}\n{content}" if isinstance(content, str) else [{"type": "text", "text": note}, *content]
        self.messages.append({"role": "user", "content": content})

    def assistant(self, content: str | None, *, tool_calls: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Appends an assistant message that was not generated here."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if tool_calls:
            message["tool_calls"] = [dict(call) for call in tool_calls]
        self.messages.append(message)

    @overload
    def observe(
        self,
        output: str,
        *,
        tool: str | None = None,
        tool_call_id: str | None = None,
        ephemeral: Literal[True] = True,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> str: ...

    @overload
    def observe(
        self,
        output: str,
        *,
        tool: str | None = None,
        tool_call_id: str | None = None,
        ephemeral: bool,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> str | None: ...

    def observe(
        self,
        output: str,
        *,
        tool: str | None = None,
        tool_call_id: str | None = None,
        ephemeral: bool = True,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> str | None:
        """Appends a tool's output. An ephemeral one is marked as a block, to be dropped later by its id; one that is
        not is never dropped by a policy. Of a block that a policy drops, the first `keep_head` and the last `keep_tail`
        tokens stay visible; no text changes for that.

        Returns:
            The block's id, unique in this session, or None where it is not ephemeral.
        """
        block_id = None
        if keep_head or keep_tail or not ephemeral:
            self.marks.append(
                types.Mark(message=len(self.messages), ephemeral=ephemeral, keep_head=keep_head, keep_tail=keep_tail)
            )
        if ephemeral:
            block_id = self._fresh_block_id()
            opening, closing = tags_of(block_id)
            output = f"{opening}\n{output}\n{closing}"
        if (note := self._take_note()) is not None:
            output = f"{note}\n{output}"  # before the tags: it shall not go with the observation
        message = {"role": "tool", "content": output}
        if tool is not None:
            message["name"] = tool
        if tool_call_id is not None:
            message["tool_call_id"] = tool_call_id
        self.messages.append(message)
        return block_id

    def mark(
        self,
        place: int | tuple[int, int],
        *,
        tool_call_id: str | None = None,
        ephemeral: bool = True,
        keep_head: int = 0,
        keep_tail: int = 0,
    ) -> None:
        """Marks an observation without tags: a message by its index, or a span of the stream.

        `tool_call_id` makes sure of the message: ids repeat in real data, so an id alone does not name one. Raises
        ValueError where the message has another, IndexError where there is no such message.
        """
        if isinstance(place, tuple):
            mark = types.Mark(span=place, ephemeral=ephemeral, keep_head=keep_head, keep_tail=keep_tail)
        else:
            own = self.messages[place].get("tool_call_id")
            if tool_call_id is not None and own != tool_call_id:
                raise ValueError(f"tool_call_id: message {place} has {own!r}, not {tool_call_id!r}")
            index = range(len(self.messages))[place]
            mark = types.Mark(
                message=index,
                tool_call_id=tool_call_id,
                ephemeral=ephemeral,
                keep_head=keep_head,
                keep_tail=keep_tail,
            )
        self.marks.append(mark)

    def pin(self, place: str | tuple[int, int]) -> None:
        """Keeps a block, by its id, or a span of the stream from every policy. Raises KeyError for an unknown block."""
        if isinstance(place, tuple):
            self.marks.append(types.Mark(span=place, pinned=True))
            return
        homes = {span.message for span in self.spans for block in span.blocks if block.id == place}
        homes |= {i for i, block_id in self._own_blocks() if block_id == place}
        if not homes:
            raise KeyError(place)
        self.marks += [types.Mark(message=i, block=place, pinned=True) for i in sorted(homes)]

    @property
    def context(self) -> Context:
        """The stream as policies see it."""
        return Context(
            self.messages,
            self.spans,
            self.ops,
            tuple(self.marks),
            refused_summary_tokens=self._refused_summary_tokens,
        )

    def is_visible(self, block_id: str) -> bool:
        """Whether the model sees all of the block's inside; True for one that was not sent yet. Raises KeyError."""
        found = [(block.start, block.end) for span in self.spans for block in span.blocks if block.id == block_id]
        if found:
            gone = self.context.dropped
            return not any(start < b and a < end for start, end in found for a, b in gone)
        if any(own == block_id for _, own in self._own_blocks()):
            return True
        raise KeyError(block_id)

    def _own_blocks(self) -> list[tuple[int, str]]:
        """(message, id) of the blocks that messages consist of."""
        contents = ((i, message.get("content")) for i, message in enumerate(self.messages))
        opened = ((i, _BLOCK_ID.match(without_notes(text))) for i, text in contents if isinstance(text, str))
        return [(i, match[1]) for i, match in opened if match]

    def _fresh_block_id(self) -> str:
        numbers = [int(name[4:]) for _, name in self._own_blocks() if re.fullmatch(r"obs-[0-9]+", name)]
        return f"obs-{max(numbers, default=0) + 1}"

    def _take_note(self) -> str | None:
        """The note that waits for the next message, of what is gone by now."""
        drops, self._untold = still_dropped(self._untold, self.context.dropped), []
        return note_of(drops) if drops else None

    def _turn(
        self,
        params: Mapping[str, Any],
        on_miss: types.OnMiss,
        auto_drop: types.AutoDrop | bool | None,
        stream: bool = False,
    ) -> AbstractContextManager[Turn]:
        """A completion of the conversation as it is when the block is entered; holds it until the block ends."""
        if "n" in params or "echo" in params:
            raise TypeError("n, echo: a session has one continuation, and no echo")
        _wire.check_names(params)

        @contextmanager
        def turn() -> Iterator[Turn]:
            with self._alone():
                yield Turn(self._completion(params, on_miss, auto_drop, stream), self._on_reply(params))

        return turn()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the conversation for one answer, or one rewriting. Raises SessionBusy where it is held."""
        if self._is_held:
            raise SessionBusy(f"session {self.name!r}: its last answer is still being written; read that to its end")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def _completion(
        self,
        params: Mapping[str, Any],
        on_miss: types.OnMiss = "replay",
        auto_drop: types.AutoDrop | bool | None = None,
        stream: bool = False,
    ) -> Call[types.Completion]:
        self._shape = {name: params[name] for name in ("tools", "cache_salt", "stop") if name in params}
        return _wire.chat(
            self.messages,
            model=self.model,
            session=self.name,
            ops=self._ops,
            on_miss=on_miss,
            auto_drop=auto_drop,
            params={"return_token_ids": True, **params},
            stream=stream,
            marks=self.marks,
        )

    def _rebuild(self) -> Call[types.Completion]:
        """A call that makes the server hold this session again: it prefills and generates nothing."""
        return self._completion({**self._shape, "max_tokens": 0})

    def _render(self, messages: Sequence[Message]) -> Call[types.RenderReply]:
        tools = self._shape.get("tools")
        return _wire.render(messages, model=self.model, tools=tools, add_generation_prompt=False)

    def _asking(self, replaced: tuple[int, int]) -> Generator[Call[Any], Any, list[dict[str, Any]]]:
        """The calls that tell what the model still sees of messages in which something was dropped. Gives the messages
        for the summariser."""
        context = self.context
        texts: dict[int, str] = {}
        partly = summarise.partly_visible(context, replaced[1])
        if any(partly.values()):
            rendered: types.RenderReply = yield self._render(self.messages[: replaced[1]])
            for i, parts in partly.items():
                old, new = context.spans[i], rendered.spans[i]
                if parts and old.content_end - old.content_start == new.content_end - new.content_start:
                    by = new.content_start - old.content_start
                    tokens = [token for start, end in parts for token in rendered.tokens[start + by : end + by]]
                    text: types.DetokenizeReply = yield _wire.detokenize(tokens, model=self.model)
                    texts[i] = text.prompt
        return summarise.request(context, replaced, texts)

    def _rewriting(self, decision: Decision, summary: Summary) -> Generator[Call[Any], Any, Decision]:
        """The calls that put a summary in the place of older messages, each to be sent the reply to it: they prefill
        and generate nothing. What was dropped of the messages that stay is dropped at their new places, so that it
        takes no room. Gives the decision with what was freed and prefilled; a summary that would free nothing is left
        aside, before anything is changed."""
        messages, places = summarise.rewritten(self.context, decision.replaced, summary.text)
        rendered: types.RenderReply = yield self._render(messages)
        moves = summarise.Moves(places, self.spans, rendered.spans)
        visible = moves.visible_tokens(summarise.moved_ops(self.ops, moves))
        if visible >= decision.visible_tokens:
            span = rendered.spans[decision.replaced[0]]
            self._refused_summary_tokens = span.end - span.start
            return summarise.refused(decision, summary, span.end - span.start, decision.visible_tokens - visible)
        params = {**self._shape, "max_tokens": 0}
        prefilled = 0
        for _ in range(2):
            ops = summarise.moved_ops(self.ops, moves)
            call = _wire.chat(messages, model=self.model, session=self.name, ops=ops, on_miss="replay", params=params)
            reply: types.Completion = yield call
            prefilled += reply.akv.prefilled_tokens + reply.akv.replayed_tokens
            if not ops or _first_moved(moves.after, reply.akv.spans) is None:
                break
            moves = replace(moves, after=reply.akv.spans)  # an answer's own ids can lie otherwise than its text
        else:
            raise StreamDiverged(f"session {self.name!r}: its rewritten messages lie elsewhere each time they are sent")
        moves = replace(moves, after=reply.akv.spans)
        self._take(reply)
        self._refused_summary_tokens = 0
        self.messages = messages
        self.marks = summarise.moved_marks(self.marks, moves)
        self._untold = summarise.moved_drops(self._untold, moves)
        return summarise.measured(decision, summary, moves.visible_tokens(self.ops), prefilled)

    def _log(self, decision: Decision) -> Decision:
        logger.log(logging.INFO if decision.took_something else logging.DEBUG, "%s: %s", self.name, decision)
        return decision

    def _take(self, reply: types.Completion) -> None:
        if "ops" in reply.akv.model_fields_set:
            self._ops = list(reply.akv.ops)
        self.spans = reply.akv.spans

    def _on_reply(self, params: Mapping[str, Any]) -> Callable[[types.Completion], None]:
        """What to do with the reply to the conversation as it is now. The server keeps ops that come while it generates
        for the end of it, and they are not in that reply: where there were some, ours is the newer history."""
        begun, num_sent = self._ops, len(self.messages)
        is_prefill = params.get("max_tokens") == 0

        def take(reply: types.Completion) -> None:
            newer = self._ops if self._ops is not begun else None
            self._check_unmoved(self.spans[:num_sent], reply.akv.spans, begun)
            self._take(reply)
            if not is_prefill:
                generated_as = {"akv": {"token_ids": reply.token_ids}} if reply.token_ids else {}
                self.messages.append({**reply.message, **generated_as})
            if newer is not None:
                self._take_ops(newer)

        return take

    def _check_unmoved(
        self, ours: list[types.MessageSpan], theirs: list[types.MessageSpan], ops: list[types.Op] | None
    ) -> None:
        """Raises StreamDiverged where an op or a mark by index hits tokens that moved."""
        at = _first_moved(ours, theirs)
        if at is None:
            return
        ends = [op.end for op in ops or ()] + [mark.span[1] for mark in self.marks if mark.span is not None]
        if any(end is None or end > at for end in ends):
            raise StreamDiverged(
                f"session {self.name!r}: tokens from {at} on lie elsewhere than before; its ops or marks no longer hit "
                "what was meant (info() takes over what the server has now)"
            )

    def _take_rebuilt(self, reply: types.Completion, *, is_by_index: bool) -> None:
        """Takes the reply of `_rebuild`. Raises StreamDiverged where tokens lie elsewhere than before and ops, old or
        about to come, would hit others than were meant (text that the model wrote need not tokenize as it did)."""
        is_moved = len(reply.akv.spans) < len(self.spans) or _first_moved(self.spans, reply.akv.spans) is not None
        if is_moved and (self._ops or is_by_index):
            raise StreamDiverged(
                f"session {self.name!r} was built again from its messages and its tokens lie elsewhere than before; "
                "its ops would no longer hit what was meant"
            )
        self._take(reply)

    def _take_layout(self, reply: types.LayoutReply) -> None:
        if "ops" in reply.model_fields_set:
            self._take_ops(list(reply.ops))

    def _take_ops(self, ops: list[types.Op]) -> None:
        """Takes a newer history than the one that `spans` came with."""
        self._ops = ops
        gone = dropped_spans(ops)
        starts = [start for start, _ in gone]

        def is_visible(block: types.Block) -> bool:
            before = bisect_right(starts, block.start) - 1
            return block.start == block.end or before < 0 or gone[before][1] < block.end

        self.spans = [
            span.model_copy(
                update={"blocks": [block.model_copy(update={"visible": is_visible(block)}) for block in span.blocks]}
            )
            for span in self.spans
        ]

    def _take_info(self, info: types.SessionInfo) -> None:
        self.spans = info.spans
        self._take_layout(info)

    def _hand_on(self, copy: Conversation, info: types.SessionInfo) -> None:
        """Gives a fork what this session holds that the server does not know."""
        copy._shape = dict(self._shape)
        copy.marks = list(self.marks)
        copy._untold = list(self._untold)
        copy._refused_summary_tokens = self._refused_summary_tokens
        copy._take_info(info)


def checked_summary(written: object) -> Summary:
    """What a summariser gave, if that can stand for messages. Raises TypeError where it is no summary, EmptySummary
    where it says nothing."""
    if isawaitable(written):
        if isinstance(written, Coroutine):
            written.close()
        raise TypeError("summarise: an asynchronous summariser needs an AsyncSession")
    if not isinstance(written, Summary):
        raise TypeError(
            f"summarise: gave {'None' if written is None else f'a {type(written).__name__}'}; return an akv_sdk.Summary"
        )
    if not written.text.strip():
        raise EmptySummary(
            f"summarise: the summary is empty ({written.generated_tokens} tokens were generated for it), nothing was "
            "changed; give the summariser more max_tokens, or another model"
        )
    return written


def _first_moved(ours: Sequence[types.MessageSpan], theirs: Sequence[types.MessageSpan]) -> int | None:
    """The start of the first message that lies elsewhere for the server than it did for us."""
    for a, b in zip(ours, theirs, strict=False):
        if (a.start, a.content_start, a.content_end) != (b.start, b.content_start, b.content_end):
            return min(a.start, b.start)
    return None
