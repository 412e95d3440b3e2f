"""Text to token ids and back, exactly as the model's own tokenizer does it.

Owns reading a tokenizer from a GGUF file or a model directory, and proving whether tiktoken can express it. Knows
neither messages nor templates (`chat.py`), and no torch. Everything here is immutable after loading and may be used
from any thread.

What is split off where, in order: special tokens (only on request), then added tokens that are ordinary text, then the
normalizer, the pre-tokenizer, and BPE within each piece.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken
import tokenizers

from akv_sdk.types import TiktokenSpec, TokenizerReply
from akv_server.errors import AkvError
from akv_server.files import ModelFiles, gguf_reader

Spec = dict[str, Any]

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut out first, so that whitespace before a digit stands at the end of its piece: hence the lookahead.
DIGITS_GPT2_PATTERN = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _WORDS + r"\p{N}{1,3}" + _REST
QWEN2_PATTERN = _WORDS + r"\p{N}" + _REST

_BYTE_LEVEL: Spec = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_GPT2: Spec = {**_BYTE_LEVEL, "use_regex": True}
_DIGITS: Spec = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> Spec:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: Spec) -> Spec:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_LLAMA3: Spec = {"pre_tokenizer": _sequence(_split(LLAMA3_PATTERN), _BYTE_LEVEL), "ignore_merges": True}
_QWEN2: Spec = {"pre_tokenizer": _sequence(_split(QWEN2_PATTERN), _BYTE_LEVEL), "normalizer": {"type": "NFC"}}
_PRE_TOKENIZERS: dict[str, Spec] = {  # by tokenizer.ggml.pre
    "gpt-2": {"pre_tokenizer": _GPT2},
    "default": {"pre_tokenizer": _GPT2},
    "smollm": {"pre_tokenizer": _sequence(_DIGITS, _GPT2)},
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_GGUF_UNKNOWN, _GGUF_CONTROL, _GGUF_USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

# Where two implementations of a pre-tokenizer most often part.
_SPOT_STRINGS = (
    "a  1\t\t22 333  4444 55555",
    "  leading\n\n\n  and trailing  ",
    "don't I'LL we've 'S 'tis x'y",
    " ... (a==b)&&c;\r\n\r\n",
    "naïve — “quotes” … \u00a0\u2003x",
    "日本語 ١٢٣ ½Ⅷ² 👩‍👩‍👧 e\u0301",
    "\n \n\t\n x \r\r\n",
    '{"a": [1, 2.5e-10], "b": null}',
    "https://example.com/a?b=1&c=%20#d",
    "A" * 70 + "0" * 70 + " " * 70 + "x" + "\n" * 70,
)


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes for bytes: a byte that prints stands for itself, others from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


class Encoded(NamedTuple):
    """Token ids of a text, and for each the characters `[start, end)` of the text it stands for.

    Tokens that share one character (a character of several tokens) have the same range.
    """

    ids: list[int]
    ranges: list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. Make it with `load`, `from_gguf` or `from_directory`.

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
            raise _refused(self.name, "its tokens are neither byte-level nor SentencePiece pieces")

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
        spec = _tiktoken_spec(self)
        return TokenizerReply(
            name=self.name,
            num_vocab=self.num_vocab,
            eos_token_id=self.eos_token_id,
            special_tokens=self.special,
            tiktoken=spec if spec and _agrees(spec, self) else None,
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
            raise _refused(self.name, str(error)) from None
        for token in spec["added_tokens"]:
            if library.token_to_id(token["content"]) != token["id"]:
                raise _refused(self.name, f"added token {token['content']!r} cannot have id {token['id']}")
        library.encode_special_tokens = True  # found as text
        return library

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in _steps(self.spec["pre_tokenizer"]))

    @cached_property
    def _is_sentencepiece(self) -> bool:
        return bool(self.spec["model"].get("byte_fallback"))

    @cached_property
    def _starts_with_space(self) -> bool:
        steps = [*_steps(self.spec["pre_tokenizer"]), *_steps(self.spec.get("normalizer"))]
        return any(step["type"] == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps)

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether a decoded text loses one space at its beginning (SentencePiece adds one to the first word)."""
        return any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in _steps(self.spec.get("decoder"))
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
        normalizers = list(_steps(self.spec.get("normalizer")))
        if any(step["type"] == "NFC" for step in normalizers):
            longest *= 4  # a composed character has at most 3.5 times fewer bytes
        is_kept = (
            all(_keeps_text(step) for step in (*normalizers, *_steps(self.spec["pre_tokenizer"])))
            and not any(token.get("lstrip") or token.get("rstrip") for token in self.spec["added_tokens"])
            and (not self._silent_bytes or (self._is_byte_level and not normalizers))
        )
        return longest if is_kept else 0

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        read = _byte_level_bytes if self._is_byte_level else _sentencepiece_bytes
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


def load(found: ModelFiles) -> Tokenizer:
    """The tokenizer of a model on disk. Raises AkvError("invalid_request", param="model") with the reason."""
    return from_gguf(found.path, found.name) if found.kind == "gguf" else from_directory(found.path, found.name)


def from_gguf(path: Path, name: str | None = None) -> Tokenizer:
    """The tokenizer inside a GGUF file, with the pre-tokenizer that the file names (`tokenizer.ggml.pre`).

    Raises AkvError("invalid_request", param="model") for a vocabulary that is no BPE, or an unknown pre-tokenizer.
    """
    name = name or path.stem
    fields = gguf_reader(path).fields

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    def strings(key: str) -> list[str]:  # far faster than contents() on a long list
        if key not in fields:
            raise _refused(name, f"the file has no {key}")
        return [bytes(fields[key].parts[i]).decode() for i in fields[key].data]

    if (kind := value("tokenizer.ggml.model")) != "gpt2":
        raise _refused(name, f"its vocabulary is of kind {kind!r}; only byte-level BPE (gpt2) is read from GGUF")
    pre = value("tokenizer.ggml.pre") or "default"
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise _refused(name, f"pre-tokenizer {pre!r} is unknown; known are {known}")
    rules = _PRE_TOKENIZERS[pre]
    tokens = strings("tokenizer.ggml.tokens")
    kinds = [int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data]
    special_kinds = (_GGUF_CONTROL, _GGUF_UNKNOWN)
    spec = _spec(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[merge.split(" ", 1) for merge in strings("tokenizer.ggml.merges")],
        added=[
            _added(tokens[i], i, special=kind in special_kinds)
            for i, kind in enumerate(kinds)
            if kind in (*special_kinds, _GGUF_USER_DEFINED)
        ],
        **rules,
    )
    eos = value("tokenizer.ggml.eos_token_id")
    if eos is None:
        raise _refused(name, "the file has no tokenizer.ggml.eos_token_id")
    ends = [value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    bos = value("tokenizer.ggml.bos_token_id")
    ids = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": value("tokenizer.ggml.unknown_token_id"),
        "pad_token": value("tokenizer.ggml.padding_token_id"),
    }
    add_bos = value("tokenizer.ggml.add_bos_token")
    return Tokenizer(
        name=name,
        spec=spec,
        eos_token_id=eos,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        bos_token_id=bos,
        add_bos=bos is not None and (bool(add_bos) if add_bos is not None else rules is _LLAMA3),
        chat_template=value("tokenizer.chat_template"),
        template_names={key: tokens[i] for key, i in ids.items() if i is not None},
    )


def from_directory(path: Path, name: str | None = None) -> Tokenizer:
    """The tokenizer of a model directory: `tokenizer.json`, with the chat template and named tokens of
    `tokenizer_config.json` and `chat_template.jinja`, and further ends from `generation_config.json`.

    Raises AkvError("invalid_request", param="model") where a file is missing or broken.
    """
    name = name or path.resolve().name
    spec = _read(path / "tokenizer.json", name)
    config = _read(path / "tokenizer_config.json", name, optional=True)
    model = spec.get("model", {})
    if model.get("type") != "BPE":
        raise _refused(name, f"tokenizer.json holds a {model.get('type')} model; only BPE is supported")
    model["merges"] = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in model["merges"]]
    known = {token["content"] for token in spec.setdefault("added_tokens", [])}
    for token_id, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            spec["added_tokens"].append({**_added(token["content"], int(token_id), special=True), **token})
    vocab = model["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    named: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(key)
        if text := token.get("content") if isinstance(token, dict) else token:
            named[key] = text
    ends = [
        end
        for file in ("generation_config.json", "config.json")
        for end in _as_list(_read(path / file, name, optional=True).get("eos_token_id"))
    ]
    if (eos := vocab.get(named.get("eos_token", ""), next(iter(ends), None))) is None:
        raise _refused(name, "neither tokenizer_config.json nor config.json names an eos token")
    bos = vocab.get(named.get("bos_token", ""))
    template_file = path / "chat_template.jinja"
    template = template_file.read_text("utf-8") if template_file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several by name; "default" is the one for plain chat
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        add_bos = _puts_first(spec.get("post_processor"), named.get("bos_token", ""))
    return Tokenizer(
        name=name,
        spec=spec,
        eos_token_id=eos,
        eos_token_ids=frozenset([eos, *ends]),
        bos_token_id=bos,
        add_bos=bos is not None and bool(add_bos),
        chat_template=template,
        template_names=named,
    )


# Stands for "other tokens come before" where a tokenizer treats the first word differently: three noncharacters, which
# no text holds; a text that does hold them is encoded without.
_JOIN = "\ufdd0\ufdef\ufdd0"


def _spec(
    *,
    vocab: dict[str, int],
    merges: list[list[str]],
    added: list[Spec],
    pre_tokenizer: Spec,
    normalizer: Spec | None = None,
    ignore_merges: bool = False,
) -> Spec:
    """A byte-level BPE tokenizer as a `tokenizer.json` would say it."""
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges},
    }


def _added(content: str, token_id: int, *, special: bool) -> Spec:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **flags}


def _find(token: Spec) -> str:
    core = f"({re.escape(token['content'])})"
    if token["single_word"]:
        core = rf"(?<!\w){core}(?!\w)"
    return (r"\s*" if token["lstrip"] else "") + core + (r"\s*" if token["rstrip"] else "")


def _steps(part: Spec | None) -> list[Spec]:
    """A pre-tokenizer, normalizer or decoder as a flat list of its steps."""
    if not part:
        return []
    for key in ("pretokenizers", "normalizers", "decoders", "processors"):
        if part["type"] == "Sequence" and key in part:
            return [step for inner in part[key] for step in _steps(inner)]
    return [part]


def _keeps_text(step: Spec) -> bool:
    """Whether a pre-tokenizer or normalizer leaves every character in the text, as it is or as one of its own."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == "▁")
    if step["type"] in ("Split", "Punctuation"):
        return str(step.get("behavior")).lower() != "removed"
    return step["type"] in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")


def _puts_first(post_processor: Spec | None, bos: str) -> bool:
    return any(
        step["type"] == "TemplateProcessing"
        and step["single"]
        and step["single"][0].get("SpecialToken", {}).get("id") == bos
        for step in _steps(post_processor)
    )


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
    except KeyError:  # a special token, or padding of the vocabulary: stands for its name
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _as_list(value: Any) -> list[int]:
    return [] if value is None else [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _read(path: Path, name: str, *, optional: bool = False) -> Spec:
    if optional and not path.is_file():
        return {}
    try:
        content: Spec = json.loads(path.read_text("utf-8"))
        return content
    except (OSError, ValueError) as error:
        raise _refused(name, f"{path.name} cannot be read ({error})") from None


def _refused(name: str, reason: str) -> AkvError:
    return AkvError("invalid_request", f"the tokenizer of {name} cannot be used: {reason}", param="model")


def _tiktoken_spec(tokenizer: Tokenizer) -> TiktokenSpec | None:
    """The tokenizer as tiktoken would have it, or None where tiktoken cannot say it.

    tiktoken merges any two neighbours whose union is a token, lowest rank first; BPE merges only listed pairs, in
    order. What BPE does inside a span that nothing crosses does not depend on what is around it. So if BPE makes
    token t out of t's own bytes, the last merge of that run is the only one that ever makes t, and its place in the
    list is t's true rank; and a token that BPE does not make out of its own bytes is never made, so it is left out.
    """
    spec, model = tokenizer.spec, tokenizer.spec["model"]
    pattern = _pattern_of(spec["pre_tokenizer"])
    normalizer = [step["type"] for step in _steps(spec.get("normalizer"))]
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    plain = all(_is_plain(token) for token in spec["added_tokens"])
    if pattern is None or normalizer not in ([], ["NFC"]) or any(model.get(key) for key in odd) or not plain:
        return None
    vocab, merges = model["vocab"], model["merges"]
    rank_of_pair = {(a, b): rank for rank, (a, b) in reversed(list(enumerate(merges)))}
    pairs_of: dict[str, list[int]] = {}
    for (a, b), rank in rank_of_pair.items():
        pairs_of.setdefault(a + b, []).append(rank)
    bpe = tokenizers.models.BPE(vocab, [(a, b) for a, b in merges])
    not_bpe = {token["content"] for token in spec["added_tokens"]}
    true_rank: dict[str, int] = {}
    never_made: list[str] = []
    for token, token_id in vocab.items():
        if token in not_bpe or not all(letter in _BYTE_OF_LETTER for letter in token):
            continue
        made = [] if len(token) == 1 else bpe.tokenize(token)
        if len(token) == 1:
            true_rank[token] = -1
        elif [part.id for part in made] == [token_id]:
            ranks = pairs_of[token]
            true_rank[token] = ranks[0] if len(ranks) == 1 else _last_merge(token, rank_of_pair)
        elif model.get("ignore_merges"):  # still found as a whole piece; harmless unless tiktoken would also merge it
            if len(made) == 2:
                return None
            never_made.append(token)
    made_in_order = sorted(true_rank, key=lambda token: (true_rank[token], vocab[token]))
    longer = [vocab[token] for token in made_in_order if true_rank[token] >= 0]
    order = made_in_order + never_made
    ids_are_ranks = all(a < b for a, b in pairwise(longer))
    return TiktokenSpec(
        pattern=pattern,
        mergeable_ranks={
            b64encode(_byte_level_bytes(token)).decode(): vocab[token] if ids_are_ranks else rank
            for rank, token in enumerate(order)
        },
        rank_to_id=None if ids_are_ranks else [vocab[token] for token in order],
        added_tokens=tokenizer.added,
        normalizer="NFC" if normalizer else None,
    )


def _is_plain(added: Spec) -> bool:
    """Whether an added token is found by its letters alone; special ones are not looked for at all."""
    return added["special"] or not any(added[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized"))


def _last_merge(token: str, rank_of_pair: dict[tuple[str, str], int]) -> int:
    """The rank of the merge that completes `token` when BPE runs over its bytes."""
    parts = list(token)
    while True:
        rank, at = min((rank_of_pair.get(pair, len(rank_of_pair)), i) for i, pair in enumerate(pairwise(parts)))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 1:
            return rank


def _pattern_of(pre_tokenizer: Spec | None) -> str | None:
    """The one regular expression that cuts as a pre-tokenizer does, where there is one."""
    steps = _steps(pre_tokenizer)
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    before, words = steps[:-1], steps[-1].get("use_regex", True)
    if words:
        digits = [step["type"] == "Digits" and step.get("individual_digits") for step in before]
        return GPT2_PATTERN if not before else DIGITS_GPT2_PATTERN if digits == [True] else None
    if len(before) != 1 or before[0]["type"] != "Split":
        return None
    split = before[0]
    whole = split["behavior"] in ("Isolated", "isolated") and not split.get("invert")
    return split["pattern"].get("Regex") if whole else None


def _agrees(spec: TiktokenSpec, tokenizer: Tokenizer) -> bool:
    """Holds the regular expression, which cannot be proved right, to strings on which such expressions differ."""
    ranks = {b64decode(token): rank for token, rank in spec.mergeable_ranks.items()}
    absent = [bytes([byte]) for byte in range(256) if bytes([byte]) not in ranks]
    top = max(ranks.values()) + 1
    try:
        encoding = tiktoken.Encoding(
            "spot",
            pat_str=spec.pattern,
            mergeable_ranks=ranks | {byte: top + i for i, byte in enumerate(absent)},
            special_tokens={},
        )
    except ValueError:  # an expression of another dialect
        return False
    for text in _SPOT_STRINGS:
        normal = unicodedata.normalize(spec.normalizer, text) if spec.normalizer else text
        if any(token in normal for token in spec.added_tokens) or any(byte in normal.encode() for byte in absent):
            continue
        got = encoding.encode_ordinary(normal)
        if ([spec.rank_to_id[rank] for rank in got] if spec.rank_to_id else got) != tokenizer.encode(text):
            return False
    return True
