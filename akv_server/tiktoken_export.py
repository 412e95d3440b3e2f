"""A tokenizer as tiktoken would have it, so that clients can count and cut without asking; or the proof that it cannot.

Owns turning ordered merges into ranks, and holding what was made to what the tokenizer does. Knows no files.
"""

from __future__ import annotations

import unicodedata
from base64 import b64decode, b64encode
from collections.abc import Callable
from itertools import pairwise

import tiktoken
import tokenizers

from akv_sdk.types import TiktokenSpec
from akv_server.tokenizer_spec import (
    BYTE_OF_LETTER,
    DIGITS_GPT2_PATTERN,
    GPT2_PATTERN,
    Spec,
    byte_level_bytes,
    steps_of,
)


def tiktoken_spec(spec: Spec, encode: Callable[[str], list[int]]) -> TiktokenSpec | None:
    """The tokenizer as tiktoken would have it, or None where tiktoken would not give the ids that `encode` gives."""
    found = _in_ranks(spec)
    return found if found and _agrees(found, encode) else None


def _in_ranks(spec: Spec) -> TiktokenSpec | None:
    """The merges as ranks, or None where tiktoken cannot say what a tokenizer does.

    tiktoken merges any two neighbours whose union is a token, lowest rank first; BPE merges only listed pairs, in
    order. What BPE does inside a span that nothing crosses does not depend on what is around it. So if BPE makes
    token t out of t's own bytes, the last merge of that run is the only one that ever makes t, and its place in the
    list is t's true rank; and a token that BPE does not make out of its own bytes is never made, so it is left out.
    """
    model, added = spec["model"], spec["added_tokens"]
    pattern = _pattern_of(spec["pre_tokenizer"])
    normalizer = [step["type"] for step in steps_of(spec.get("normalizer"))]
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    plain = all(_is_plain(token) for token in added)
    if pattern is None or normalizer not in ([], ["NFC"]) or any(model.get(key) for key in odd) or not plain:
        return None
    vocab, merges = model["vocab"], model["merges"]
    rank_of_pair = {(a, b): rank for rank, (a, b) in reversed(list(enumerate(merges)))}
    pairs_of: dict[str, list[int]] = {}
    for (a, b), rank in rank_of_pair.items():
        pairs_of.setdefault(a + b, []).append(rank)
    bpe = tokenizers.models.BPE(vocab, [(a, b) for a, b in merges])
    not_bpe = {token["content"] for token in added}
    true_rank: dict[str, int] = {}
    never_made: list[str] = []
    for token, token_id in vocab.items():
        if token in not_bpe or not all(letter in BYTE_OF_LETTER for letter in token):
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
            b64encode(byte_level_bytes(token)).decode(): vocab[token] if ids_are_ranks else rank
            for rank, token in enumerate(order)
        },
        rank_to_id=None if ids_are_ranks else [vocab[token] for token in order],
        added_tokens={token["content"]: token["id"] for token in added if not token["special"]},
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
    steps = steps_of(pre_tokenizer)
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


def _agrees(spec: TiktokenSpec, encode: Callable[[str], list[int]]) -> bool:
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
        if ([spec.rank_to_id[rank] for rank in got] if spec.rank_to_id else got) != encode(text):
            return False
    return True


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
