"""An answer that a client sends back with the token ids it was generated as: whether that may be, and its piece then.

Owns what ids a client may claim for a message: those, and only those, that read as the message itself. Knows neither
streams nor sessions; what an answer looks like in tokens is `chat.py`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product

from akv_server.call_formats import parser_of
from akv_server.calls import Call, Parser
from akv_server.chat import Chat, Piece, Rendered
from akv_server.errors import AkvError
from akv_server.generation import TextOut
from akv_server.identity import Message, named_as, normalise_for_matching
from akv_server.tools import Function


def claimed_ids(message: Message) -> list[int]:
    """The ids that a message, which was checked already, says it was generated as."""
    return (message.get("akv") or {}).get("token_ids") or []


def identity_of(text: str, calls: Sequence[Call]) -> Hashable:
    """What a generated answer is known by when it comes back."""
    called = [call.body() for call in calls]
    return normalise_for_matching({"role": "assistant", "content": text, "tool_calls": called})


def claimed_piece(
    chat: Chat, rendered: Rendered, i: int, message: Message, functions: Sequence[Function], stops: tuple[str, ...]
) -> Piece:
    """The piece of message `i` of `rendered`, as it stood in the stream in which it was generated.

    Raises AkvError unless its ids, read as those of an answer are, with calls of `functions` or without and up to one
    of `stops` or to their end, make up this message; or if a token among them has no text, or is a special one other
    than the end token behind all others (and what marks calls).
    """
    ids, identity = claimed_ids(message), normalise_for_matching(message)
    if i == 0 or message["role"] != "assistant":
        raise _bad("only an answer has them")
    tokenizer = chat.tokenizer
    if not all(map(tokenizer.token_bytes, ids)):
        raise _bad("there is no such token")
    inner = ids[:-1] if ids[-1] in chat.end_ids else ids
    special = {token_id for token_id in inner if tokenizer.is_special(token_id)}
    if not special <= chat.marker_ids:
        raise _bad("there is a special token among them")
    opened = rendered.opened(i)
    # Without a parser a mark would leave no trace in the text.
    ways = [(False, False)] * (not special) + [(True, False), (True, True)] * bool(functions)
    for (has_calls, is_held), until in product(ways, dict.fromkeys([(), stops])):
        is_thinking = opened.is_thinking
        parser = parser_of(chat.call_format, functions, many=True, is_thinking=is_thinking, is_held=is_held)
        text = _read(chat, ids, until, parser if has_calls else None)
        calls = parser.calls
        if text is not None and named_as(identity_of(text, calls), identity) == identity:
            for call, sent in zip(calls, message.get("tool_calls") or (), strict=True):
                call.id = sent.get("id") or call.id
            return chat.generated_piece(opened, ids, calls)
    raise _bad("they are not those of this message")


def _read(chat: Chat, ids: Sequence[int], stops: tuple[str, ...], parser: Parser | None) -> str | None:
    """The content that an answer of these tokens has; None where it would have ended before the last of them."""
    out = TextOut(chat.tokenizer, stops, chat.marker_ids if parser else frozenset())
    raw, is_over = "", False
    for token_id in ids:
        if is_over:
            return None
        text, is_over = out.push(token_id)
        raw += text
    raw += out.finish()
    if parser is None:
        return raw
    return parser.push(raw)[0] + parser.finish()[0]


def _bad(why: str) -> AkvError:
    return AkvError("invalid_request", why, param="messages")
