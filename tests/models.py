"""Small seeded random models of each family, written to a directory as transformers writes them, for any test to load.

Every parameter is random (norms and biases too), so that a tensor read into the wrong place changes the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

Family = Literal["llama", "llama3", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "llama3", "mistral", "qwen2", "qwen3")
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that all three wavelength bands occur
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = (
    "The agent reads a file, runs the tests, and drops what it has seen. "
    "A token's position moves; its index never does. def test(): assert 1 + 1 == 2\n"
)
_CONFIGS = {
    "llama": LlamaConfig,
    "llama3": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def tiny_model(
    folder: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    sharded: bool = False,
    name: str | None = None,
    **config: Any,
) -> Path:
    """Writes config.json, safetensors (in several files if `sharded`), tokenizer.json and tokenizer_config.json.

    2 layers, hidden size 64, 4 query and 2 KV heads of 16, window 2048, float32; `config` overrides fields of the
    transformers config. The same arguments give the same weights. Returns the new directory `folder / name`.
    """
    path = folder / (name or f"tiny-{family}-{seed}")
    path.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    fields: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "llama3":
        fields |= {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}
    if family == "mistral":
        fields["sliding_window"] = None
    model = AutoModelForCausalLM.from_config(_CONFIGS[family](**fields | config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed_tokens" in key or key.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.save_pretrained(path, max_shard_size="100KB" if sharded else "1GB")
    return path


def _tokenizer() -> Tokenizer:
    """A byte-level BPE over all 256 bytes with a few dozen merges; the special tokens come first."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer
