"""What a `tokenizer.json` says, as plain values: its steps, its patterns, and the bytes that a token stands for.

Owns the pre-tokenizers that are known by name. Knows neither files nor the library that encodes.
"""

from __future__ import annotations

import re
from typing import Any

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


LLAMA3: Spec = {"pre_tokenizer": _sequence(_split(LLAMA3_PATTERN), _BYTE_LEVEL), "ignore_merges": True}
_QWEN2: Spec = {"pre_tokenizer": _sequence(_split(QWEN2_PATTERN), _BYTE_LEVEL), "normalizer": {"type": "NFC"}}
PRE_TOKENIZERS: dict[str, Spec] = {  # by tokenizer.ggml.pre
    "gpt-2": {"pre_tokenizer": _GPT2},
    "default": {"pre_tokenizer": _GPT2},
    "smollm": {"pre_tokenizer": _sequence(_DIGITS, _GPT2)},
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def byte_level_spec(
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


def added_token(content: str, token_id: int, *, special: bool) -> Spec:
    """A token beside the vocabulary, found by its letters alone."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **flags}


def steps_of(part: Spec | None) -> list[Spec]:
    """A pre-tokenizer, normalizer or decoder as a flat list of its steps."""
    if not part:
        return []
    for key in ("pretokenizers", "normalizers", "decoders", "processors"):
        if part["type"] == "Sequence" and key in part:
            return [step for inner in part[key] for step in steps_of(inner)]
    return [part]


def keeps_text(step: Spec) -> bool:
    """Whether a pre-tokenizer or normalizer leaves every character in the text, as it is or as one of its own."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == "▁")
    if step["type"] in ("Split", "Punctuation"):
        return str(step.get("behavior")).lower() != "removed"
    return step["type"] in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes for bytes: a byte that prints stands for itself, others from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()


def byte_level_bytes(piece: str) -> bytes:
    """What a piece of a byte-level vocabulary stands for."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in piece)
    except KeyError:  # a special token, or padding of the vocabulary: stands for its name
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """What a piece of a SentencePiece vocabulary stands for."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
