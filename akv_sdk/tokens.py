"""Tokens counted in the client, with the same ids as on the server.

Owns building a tiktoken encoding from what the server publishes (`GET /v1/tokenizer`). Does no I/O: where tiktoken
cannot express a tokenizer, a text is handed to a callable of the caller's, which asks the server (`POST /tokenize`).
"""

from __future__ import annotations

import re
import unicodedata
from base64 import b64decode
from collections.abc import Callable

import regex
import tiktoken

from akv_sdk.types import TiktokenSpec, TokenizerReply

Ask = Callable[[str], list[int]]
"""The ids of a text, from the server: `lambda text: client.tokenize(text).tokens`."""


def build_encoding(reply: TokenizerReply) -> tiktoken.Encoding:
    """The published tokenizer as a tiktoken encoding. Encode with `encode_ordinary`.

    Its numbers are ids, or ranks where the server published `rank_to_id`; `Tokens` takes care of that, of added tokens
    and of bytes without a token. Raises ValueError where the server says that tiktoken cannot express it.
    """
    if (spec := reply.tiktoken) is None:
        raise ValueError(f"tiktoken cannot express the tokenizer of {reply.name}; ask the server instead")
    ranks = {b64decode(token): rank for token, rank in spec.mergeable_ranks.items()}
    special = reply.special_tokens
    free = 1 + max(*ranks.values(), reply.num_vocab, *special.values())
    absent = {byte: free + i for i, byte in enumerate(_absent_bytes(spec))}  # tiktoken insists on all 256
    if spec.rank_to_id is not None:  # special tokens must not collide with ranks
        special = {token: free + len(absent) + i for i, token in enumerate(special)}
    return tiktoken.Encoding(reply.name, pat_str=spec.pattern, mergeable_ranks=ranks | absent, special_tokens=special)


class Tokens:
    """Counts and encodes text as the server does. Text is never parsed for special tokens.

    Args:
        reply: what `GET /v1/tokenizer` answered.
        ask: gets a text's ids from the server; needed only where tiktoken cannot tell them.
    """

    def __init__(self, reply: TokenizerReply, ask: Ask | None = None) -> None:
        self.name = reply.name
        self._spec = reply.tiktoken
        self._ask = ask
        if self._spec is None:
            if ask is None:
                raise ValueError(f"tiktoken cannot express the tokenizer of {reply.name}: give `ask`")
            return
        self._encoding = build_encoding(reply)
        absent = _absent_bytes(self._spec)
        self._absent_letters = "".join(byte.decode() for byte in absent if byte < b"\x80")
        self._absent_parts = [byte for byte in absent if byte >= b"\x80"]  # of characters that vanish only in part
        added = sorted(self._spec.added_tokens, key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, added)) + ")") if added else None

    @property
    def is_local(self) -> bool:
        """Whether texts are encoded here, without asking the server."""
        return self._spec is not None

    def encode(self, text: str) -> list[int]:
        """The ids that the server gives `text`, which is valid Unicode.

        Raises ValueError where only the server knows them and there is no `ask`: for a text with a character of
        which some bytes have no token.
        """
        spec, raw = self._spec, text.encode()
        if spec is None or any(byte in raw for byte in self._absent_parts):
            if self._ask is None:
                raise ValueError(
                    f"only the server can tokenize this text: {self.name} has no token for some of its bytes"
                )
            return self._ask(text)
        ids: list[int] = []
        for part in self._added.split(text) if self._added else [text]:
            if part in spec.added_tokens:
                ids.append(spec.added_tokens[part])
                continue
            normal = unicodedata.normalize(spec.normalizer, part) if spec.normalizer else part
            found = [rank for piece in self._pieces(normal) for rank in self._encoding.encode_ordinary(piece)]
            ids += found if spec.rank_to_id is None else [spec.rank_to_id[rank] for rank in found]
        return ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def _pieces(self, text: str) -> list[str]:
        """The text, in pieces where it holds characters without a token: those vanish after the text was cut, so that
        their neighbours may merge, but only within a piece."""
        if self._spec is None or not any(letter in text for letter in self._absent_letters):
            return [text]
        vanish = str.maketrans("", "", self._absent_letters)
        return [piece.translate(vanish) for piece in regex.findall(self._spec.pattern, text)]


def _absent_bytes(spec: TiktokenSpec) -> list[bytes]:
    known = {b64decode(token) for token in spec.mergeable_ranks if len(token) <= 4}
    return [byte for byte in (bytes([value]) for value in range(256)) if byte not in known]
