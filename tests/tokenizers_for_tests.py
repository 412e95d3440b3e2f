"""Small byte-level BPE tokenizers, trained on a few lines, of each kind that the server reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from akv_server.tokenizer_spec import LLAMA3_PATTERN, QWEN2_PATTERN

TEXT = (
    "The agent reads a file, runs 12 tests in 3.5 s, and doesn't stop.\n\n    def test():\n        assert 1 + 1 == 2\n"
    "naïve café — “quotes” … 日本語 ١٢٣ ½ 🙂👩‍👩‍👧\t\t'tis we've I'LL  x=12345;\r\n\r\n   trailing   \n"
    "user assistant system tool ephemeral_observation id tool_response </tool_response>\n {'a': [1, 2]}\n"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def small_tokenizer(kind: str, special: list[str], added: list[str] | None = None, num_vocab: int = 600) -> Tokenizer:
    """`kind` is the name that a GGUF file would give the pre-tokenizer: gpt-2, smollm, llama-bpe or qwen2."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "llama-bpe": _split(LLAMA3_PATTERN),
        "qwen2": _split(QWEN2_PATTERN),
    }[kind]
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_vocab, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added or []])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """The tokenizer as a model directory has it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
