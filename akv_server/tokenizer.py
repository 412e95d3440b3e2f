"""Text to token ids and back, exactly as the model's own tokenizer does it.

Owns encoding, decoding and special tokens, of a tokenizer as a `tokenizer.json` says it. Knows neither the files it
came from (`tokenizer_files.py`) nor messages and templates (`chat.py`), and no torch. Everything here is immutable and
may be used from any thread.

What is split off where, in order: special tokens (only on request), then added tokens that are ordinary text, then the
normalizer, the pre-tokenizer, and BPE within each piece.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import tokenizers

from akv_sdk.types import TokenizerReply
from akv_server.errors import AkvError
from akv_server.tiktoken_export import tiktoken_spec
from akv_server.tokenizer_spec import Spec, byte_level_bytes, keeps_text, sentencepiece_bytes, steps_of


class Encoded(NamedTuple):
    """Token ids of a text, and for each the characters `[start, end)` of the text it stands for.

    Tokens that share one character (a character of several tokens) have the same range.
    """

    ids: list[int]
    ranges: list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. `tokenizer_files.py` reads one.

    `spec` is the whole tokenizer as a `tokenizer.json` says it. `special` are the control tokens (never found in
    plain content), `added` the added tokens that count as text and are found in any.
    """

    name: str
    spec: Spec = field(repr=False)
    eos_token_id: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    add_bos: bool
    chat_template: str | None = field(repr=False)
    template_names: dict[str, str] = field(repr=False)
    """What a chat template may call by name: bos_token, eos_token, unk_token, pad_token."""

    def __post_init__(self) -> None:
        self._library  # noqa: B018  (a broken tokenizer is refused when it is loaded)
        if not self._is_byte_level and not self._is_sentencepiece:
            raise refused(self.name, "its tokens are neither byte-level nor SentencePiece pieces")

    @cached_property
    def special(self) -> dict[str, int]:
        return {token["content"]: token["id"] for token in self.spec["added_tokens"] if token["special"]}

    @cached_property
    def added(self) -> dict[str, int]:
        return {token["content"]: token["id"] for token in self.spec["added_tokens"] if not token["special"]}

    @cached_property
    def num_vocab(self) -> int:
        """One more than the highest id. A model's own vocabulary may be padded beyond it."""
        ids: list[int] = [*self.spec["model"]["vocab"].values(), *self.special.values(), *self.added.values()]
        return 1 + max(ids)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds special tokens; group 1 is the token itself, around it whitespace that it swallows."""
        tokens = sorted((t for t in self.spec["added_tokens"] if t["special"]), key=lambda t: -len(t["content"]))
        return re.compile("|".join(_find(token) for token in tokens) or r"(?!)")

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, without a BOS. Special tokens are text unless `parse_special` says otherwise.

        Raises AkvError("invalid_request") where `text` holds half a surrogate pair.
        """
        if not parse_special:
            return self._ids_of_run(text)
        ids: list[int] = []
        for run, special in self.split_special(text):
            ids += [special] if special is not None else self._ids_of_run(run, continues=bool(ids))
        return ids

    def split_special(self, text: str) -> Iterator[tuple[str, int | None]]:
        """`text` cut at special tokens: `(run, None)` for what lies between, `(matched text, id)` for a token."""
        at = 0
        for found in self.special_pattern.finditer(text):
            if at < found.start():
                yield text[at : found.start()], None
            token = next(group for group in found.groups() if group)
            yield found.group(), self.special[token]
            at = found.end()
        if at < len(text):
            yield text[at:], None

    def encode_run(self, text: str, *, continues: bool = False) -> Encoded:
        """Tokens of a text without special tokens in it. `continues`: it follows other tokens of the same stream,
        which matters only to tokenizers that put a space before the very first word."""
        found, num_before = self._found(text, continues, with_ranges=True)
        ranges = found.offsets
        if num_before:
            ranges = [(max(a - len(_JOIN), 0), b - len(_JOIN)) for a, b in ranges[num_before:]]
        return Encoded(found.ids[num_before:], ranges)

    def _ids_of_run(self, text: str, *, continues: bool = False) -> list[int]:
        found, num_before = self._found(text, continues, with_ranges=False)
        return list(found.ids[num_before:])

    def _found(self, text: str, continues: bool, *, with_ranges: bool) -> tuple[tokenizers.Encoding, int]:
        """What the library makes of `text`, and how many of its first tokens do not belong to it."""
        joins = continues and self._starts_with_space and _JOIN not in text
        library = self._continuing_library if joins else self._library
        # as a batch of one: only for a batch does the library let other threads run meanwhile
        encode = library.encode_batch if with_ranges else library.encode_batch_fast
        try:
            return encode([_JOIN + text if joins else text], add_special_tokens=False)[0], int(joins)
        except (TypeError, UnicodeEncodeError):
            raise AkvError(
                "invalid_request", "the text holds half of a surrogate pair, which no UTF-8 can carry", param="prompt"
            ) from None

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found in no time; 0 where nothing can be said."""
        if not self._most_bytes:
            return 0
        data = text.encode("utf-8", "replace").translate(None, self._silent_bytes)
        return -(-len(data) // self._most_bytes)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD; an id without a token is nothing."""
        decoder = self.decode_stream(skip_special)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.finish()

    def decode_stream(self, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> IncrementalDecoder:
        """`shown` are special tokens whose names are text all the same."""
        return IncrementalDecoder(self, skip_special, shown)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; of a special token its name; b"" where no token has this id."""
        return self._bytes.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def published(self) -> TokenizerReply:
        """What tiktoken needs to build the same encoding, or `tiktoken=None` where that would not give the same ids."""
        return self._published

    @cached_property
    def _published(self) -> TokenizerReply:
        return TokenizerReply(
            name=self.name,
            num_vocab=self.num_vocab,
            eos_token_id=self.eos_token_id,
            special_tokens=self.special,
            tiktoken=tiktoken_spec(self.spec, self.encode),
        )

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        return self._build(self.spec)

    @cached_property
    def _continuing_library(self) -> tokenizers.Tokenizer:
        library = self._build(self.spec)
        library.add_tokens([tokenizers.AddedToken(_JOIN, normalized=False, special=False)])
        return library

    def _build(self, spec: Spec) -> tokenizers.Tokenizer:
        try:
            # without post-processor: it may put a BOS in front, and trims spaces off the ranges
            built = {**spec, "post_processor": None, "truncation": None, "padding": None}
            library = tokenizers.Tokenizer.from_str(json.dumps(built))
        except Exception as error:  # the library raises bare Exception
            raise refused(self.name, str(error)) from None
        for token in spec["added_tokens"]:
            if library.token_to_id(token["content"]) != token["id"]:
                raise refused(self.name, f"added token {token['content']!r} cannot have id {token['id']}")
        library.encode_special_tokens = True  # found as text
        return library

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in steps_of(self.spec["pre_tokenizer"]))

    @cached_property
    def _is_sentencepiece(self) -> bool:
        return bool(self.spec["model"].get("byte_fallback"))

    @cached_property
    def _starts_with_space(self) -> bool:
        steps = [*steps_of(self.spec["pre_tokenizer"]), *steps_of(self.spec.get("normalizer"))]
        return any(step["type"] == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps)

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether a decoded text loses one space at its beginning (SentencePiece adds one to the first word)."""
        return any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps_of(self.spec.get("decoder"))
        )

    @cached_property
    def _silent_bytes(self) -> bytes:
        """Bytes without a token of their own: byte-level BPE leaves them out of the text."""
        known = set(self._bytes.values())
        return bytes(byte for byte in range(256) if bytes([byte]) not in known)

    @cached_property
    def _most_bytes(self) -> int:
        """No token stands for more bytes of a text than this; 0 where there is no such bound: something on the way to
        the tokens may take any part of the text away, or make one token of it."""
        longest = max(map(len, self._bytes.values()))
        normalizers = list(steps_of(self.spec.get("normalizer")))
        if any(step["type"] == "NFC" for step in normalizers):
            longest *= 4  # a composed character has at most 3.5 times fewer bytes
        is_kept = (
            all(keeps_text(step) for step in (*normalizers, *steps_of(self.spec["pre_tokenizer"])))
            and not any(token.get("lstrip") or token.get("rstrip") for token in self.spec["added_tokens"])
            and (not self._silent_bytes or (self._is_byte_level and not normalizers))
        )
        return longest if is_kept else 0

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        read = byte_level_bytes if self._is_byte_level else sentencepiece_bytes
        plain = {token_id: read(piece) for piece, token_id in self.spec["model"]["vocab"].items()}
        return plain | {token_id: text.encode() for text, token_id in (self.special | self.added).items()}


class IncrementalDecoder:
    """Text of a stream, token by token, never with half a character in it. Mutable; one per stream."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """What is certain to follow now; "" while a character is still incomplete."""
        if self._skip_special and self._tokenizer.is_special(token_id) and token_id not in self._shown:
            return ""
        return self._begun(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The end of the text: U+FFFD for a character that never was completed, else ""."""
        return self._begun(self._decoder.decode(b"", final=True))

    def _begun(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def _find(token: Spec) -> str:
    core = f"({re.escape(token['content'])})"
    if token["single_word"]:
        core = rf"(?<!\w){core}(?!\w)"
    return (r"\s*" if token["lstrip"] else "") + core + (r"\s*" if token["rstrip"] else "")


def refused(name: str, reason: str) -> AkvError:
    """The error for a tokenizer that is not supported."""
    return AkvError("invalid_request", f"the tokenizer of {name} cannot be used: {reason}", param="model")


# Stands for "other tokens come before" where a tokenizer treats the first word differently: three noncharacters, which
# no text holds; a text that does hold them is encoded without.
_JOIN = "\ufdd0\ufdef\ufdd0"
