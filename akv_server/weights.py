"""How a model's files become its config and float32 tensors. Knows GGUF, safetensors and the names that both give to
the tensors of the Llama family, and which models cannot be served right; knows neither the forward pass (`model.py`)
nor where the files came from (`files.py`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from akv_server.errors import AkvError
from akv_server.files import ModelFiles, gguf_reader, resolve
from akv_server.model import ModelConfig, TensorSource

__all__ = ["ModelFiles", "open_weights", "resolve"]

_QKV_BIAS = {"llama": False, "mistral": False, "qwen2": True, "qwen3": False}  # the architectures served
_NO_EXACT_SHIFT = {
    "baichuan": "ALiBi",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "falcon_mamba": "recurrent state",
    "jamba": "recurrent state",
    "mamba": "recurrent state",
    "mamba2": "recurrent state",
    "qwen3_next": "recurrent state",
    "rwkv": "recurrent state",
    "gemma2": "sliding-window layers",
    "gemma3": "sliding-window layers",
    "gemma3_text": "sliding-window layers",
    "gpt_oss": "sliding-window layers",
    "phi3": "sliding-window layers or LongRoPE",
    "qwen2_vl": "M-RoPE",
    "qwen2_5_vl": "M-RoPE",
    "qwen3_vl": "M-RoPE",
}
_MAY_BE_ZERO = {"mscale", "mscale_all_dim"}
_NUMBERS = _MAY_BE_ZERO | {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
_NO_EXACT_ROPE = {
    "dynamic": "dynamic NTK changes every frequency with the length of the context",
    "longrope": "LongRoPE switches its frequencies with the length of the context",
    "su": "LongRoPE switches its frequencies with the length of the context",
    "mrope": "M-RoPE gives a token three positions",
}


@contextmanager
def open_weights(files: ModelFiles) -> Iterator[tuple[ModelConfig, TensorSource]]:
    """The config of a model and a source of its tensors, open for as long as the block runs; nothing stays mapped.

    Raises AkvError("repos_unsupported") with the reason for a model whose cached keys cannot be shifted exactly, and
    AkvError("invalid_request") for files that are broken or lack something; the source raises the latter too.
    """
    with _open_gguf(files) if files.kind == "gguf" else _open_directory(files) as opened:
        yield opened


def _unsupported(name: str, reason: str) -> NoReturn:
    raise AkvError("repos_unsupported", f"{name} cannot be served: {reason}", param="model")


def _broken(name: str, reason: str) -> AkvError:
    return AkvError("invalid_request", f"{name} cannot be read: {reason}", param="model")


def _check_architecture(name: str, architecture: str) -> None:
    if architecture in _NO_EXACT_SHIFT:
        _unsupported(name, f"{architecture} has {_NO_EXACT_SHIFT[architecture]}, so its keys cannot be shifted exactly")
    if architecture not in _QKV_BIAS:
        _unsupported(name, f"unknown architecture {architecture!r}; known are {', '.join(_QKV_BIAS)}")


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a model of this config may ask for, under the last two parts of its name."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "q_proj.weight": (q_rows, hidden),
        "k_proj.weight": (kv_rows, hidden),
        "v_proj.weight": (kv_rows, hidden),
        "q_proj.bias": (q_rows,),
        "k_proj.bias": (kv_rows,),
        "v_proj.bias": (kv_rows,),
        "q_norm.weight": (config.head_dim,),
        "k_norm.weight": (config.head_dim,),
        "o_proj.weight": (hidden, q_rows),
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
    }


def _check_shapes(config: ModelConfig, source: TensorSource) -> TensorSource:
    """`source`, with each tensor's shape held against the config before the model trusts it."""
    shapes = shapes_of(config)

    def checked(name: str) -> Tensor:
        tensor, want = source(name), shapes[".".join(name.split(".")[-2:])]
        if tuple(tensor.shape) != want:
            raise _broken(config.name, f"{name} has shape {tuple(tensor.shape)}, not {want}")
        return tensor

    return checked


# --- a directory as transformers writes it ---------------------------------------------------------------------------


@contextmanager
def _open_directory(files: ModelFiles) -> Iterator[tuple[ModelConfig, TensorSource]]:
    from safetensors import SafetensorError, safe_open

    config = _config_of_directory(files)
    try:
        with ExitStack() as stack:
            where = {}
            for path in sorted(_safetensors_of(files)):
                file = stack.enter_context(safe_open(path, framework="pt"))
                where.update(dict.fromkeys(file.keys(), file))

            def source(name: str) -> Tensor:
                if name not in where:
                    raise _broken(files.name, f"no tensor {name}")
                tensor: Tensor = where[name].get_tensor(name)
                return tensor.to(torch.float32)

            yield config, _check_shapes(config, source)
    except (SafetensorError, FileNotFoundError) as error:
        raise _broken(files.name, str(error)) from error


def _safetensors_of(files: ModelFiles) -> list[Path]:
    index = files.path / "model.safetensors.index.json"
    if index.is_file():
        parts = _json_of(files, index.name).get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise _broken(files.name, f"{index.name} has no weight_map that names files")
        return [files.path / part for part in set(parts.values())]
    if not (paths := list(files.path.glob("*.safetensors"))):
        raise _broken(files.name, "no *.safetensors in it")
    return paths


def _json_of(files: ModelFiles, name: str) -> dict[str, Any]:
    try:
        value = json.loads((files.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(files.name, f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise _broken(files.name, f"{name} holds no object")
    return value


def _config_of_directory(files: ModelFiles) -> ModelConfig:
    raw = _json_of(files, "config.json")
    architecture = str(raw.get("model_type"))
    _check_architecture(files.name, architecture)
    generation = _json_of(files, "generation_config.json") if (files.path / "generation_config.json").is_file() else {}
    try:
        num_layers = _count(raw, "num_hidden_layers")
        _check_layers(files.name, raw)
        rope_theta, rope_scaling = _rope_of_directory(files.name, raw)
        hidden_size, num_q_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
        max_positions = _count(raw, "max_position_embeddings")
        if rope_scaling is not None and rope_scaling["rope_type"] == "yarn":
            # some configs name the stretched window here and some the original one
            original = int(rope_scaling.get("original_max_position_embeddings") or max_positions)
            rope_scaling["original_max_position_embeddings"] = original
            max_positions = max(max_positions, int(original * rope_scaling["factor"]))
        head_dim = _count(raw, "head_dim", hidden_size // num_q_heads)
        return ModelConfig(
            name=files.name,
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_q_heads=num_q_heads,
            num_kv_heads=_count(raw, "num_key_value_heads", num_q_heads),
            head_dim=head_dim,
            rotary_dim=head_dim,
            vocab_size=_count(raw, "vocab_size"),
            max_positions=max_positions,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=_QKV_BIAS[architecture],
            qk_norm=architecture == "qwen3",
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            eos_token_ids=_ids_of(generation.get("eos_token_id"), raw.get("eos_token_id")),
            bos_token_id=next(iter(_ids_of(raw.get("bos_token_id"))), None),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(files.name, f"config.json: {type(error).__name__} {error}") from error


def _count(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A field that counts something: a whole number above 0. Left out or null, it is `default`, if there is one."""
    value = raw.get(key)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{key} is {value!r}, no whole number above 0")
    return value


def _ids_of(*values: int | list[int] | None) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for value in values:
        ids.update(dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value]))
    return tuple(ids)


def _check_layers(name: str, raw: dict[str, Any]) -> None:
    """Refuses what the forward pass does not do, so that nothing is served wrong."""
    others = [other for other in raw.get("architectures") or () if not str(other).endswith("ForCausalLM")]
    if others:
        _unsupported(name, f"it is a {others[0]}, which predicts no next token")
    if raw.get("partial_rotary_factor") not in (None, 1):
        _unsupported(name, "partial_rotary_factor, which this architecture does not have")
    if raw.get("quantization_config"):
        _unsupported(name, "its safetensors are quantised; take the unquantised ones, or a .gguf file")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        _unsupported(name, f"unknown activation {raw['hidden_act']!r}")
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        _unsupported(name, "biases outside Qwen2's q, k and v")
    layer_types = raw.get("layer_types") or []
    if others := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        _unsupported(name, f"it has layers of type {', '.join(others)}, whose state cannot be shifted exactly")
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if layer_types:
        slides = "sliding_attention" in layer_types
    else:
        slides = raw.get("max_window_layers", 0) < raw.get("num_hidden_layers", 0)
    if window is not None and slides and window < raw.get("max_position_embeddings", 0):
        _unsupported(name, f"it has sliding-window layers ({window} tokens), which a shifted cache would not honour")


def _rope_of_directory(name: str, raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        _unsupported(name, "its layers rotate in different ways")
    scaling = dict(given)
    theta = float(scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    if not 0 < theta < math.inf:
        raise _broken(name, f"its rope_theta is {theta}")
    kind = str(scaling.pop("rope_type", None) or scaling.get("type") or "default")
    scaling.pop("type", None)
    if scaling.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        _unsupported(name, "partial rotary inside rope_parameters")
    return theta, _checked_rope(name, "mrope" if "mrope_section" in scaling else kind, scaling)


def _checked_rope(name: str, kind: str, scaling: dict[str, Any]) -> dict[str, Any] | None:
    if kind in ("default", "none"):
        return None
    if kind in _NO_EXACT_ROPE:
        _unsupported(name, f"{_NO_EXACT_ROPE[kind]}, so its keys cannot be shifted exactly")
    if kind not in ("linear", "llama3", "yarn"):
        _unsupported(name, f"unknown rope type {kind!r}")
    needed = {"factor"} if kind != "llama3" else {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    }  # fmt: skip
    if missing := sorted(needed - scaling.keys()):
        raise _broken(name, f"its {kind} rope scaling lacks {', '.join(missing)}")
    for key in needed | (_NUMBERS & {key for key, value in scaling.items() if value is not None}):
        value = scaling[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (value <= 0 and key not in _MAY_BE_ZERO):
            raise _broken(name, f"its {kind} rope scaling has {key} {value!r}")
    if kind == "llama3" and scaling["low_freq_factor"] == scaling["high_freq_factor"]:
        raise _broken(name, "its llama3 rope scaling has a low_freq_factor that is its high_freq_factor")
    return {"rope_type": kind, **scaling}


# --- GGUF ------------------------------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    parts = name.split(".")
    plain = f"{_GGUF_NAMES[parts[-2]]}.{parts[-1]}"
    return f"blk.{parts[2]}.{plain}" if parts[:2] == ["model", "layers"] else plain


@contextmanager
def _open_gguf(files: ModelFiles) -> Iterator[tuple[ModelConfig, TensorSource]]:
    from gguf import dequantize

    try:
        reader = gguf_reader(files.path)
        config = _config_of_gguf(files, reader)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _broken(files.name, f"{type(error).__name__} {error}") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def source(name: str) -> Tensor:
        if (packed := tensors.get(_gguf_name(name))) is None:
            raise _broken(files.name, f"no tensor {_gguf_name(name)}")
        try:
            tensor = torch.tensor(dequantize(packed.data, packed.tensor_type), dtype=torch.float32)
        except NotImplementedError as error:
            raise _broken(files.name, f"{packed.name} is packed as {packed.tensor_type.name}") from error
        if config.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            # this architecture alone stores a head's rows as pairs (2i, 2i + 1); ours lie half a head apart
            return tensor.reshape(-1, config.head_dim // 2, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        return tensor

    try:
        yield config, _check_shapes(config, source)
    finally:
        tensors.clear()
        reader.tensors.clear()
        reader.fields.clear()
        del reader


def _config_of_gguf(files: ModelFiles, reader: Any) -> ModelConfig:
    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    architecture = str(field("general.architecture"))
    _check_architecture(files.name, architecture)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}  # fastest-moving dim first

    def own(key: str, default: Any = None) -> Any:
        value = field(f"{architecture}.{key}", default)
        if value is None:
            raise KeyError(f"{architecture}.{key}")
        return value

    hidden_size, num_q_heads = own("embedding_length"), own("attention.head_count")
    head_dim = own("attention.key_length", hidden_size // num_q_heads)
    window = own("attention.sliding_window", 0)
    if window and window < own("context_length"):
        _unsupported(
            files.name, f"it has sliding-window layers ({window} tokens), which a shifted cache would not honour"
        )
    if own("expert_count", 0) or own("attention.value_length", head_dim) != head_dim:
        _unsupported(files.name, "it has experts, or values of another width than its keys")
    scaling = {"factor": own("rope.scaling.factor", 1.0)}
    if original := own("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    if (magnitude := own("rope.scaling.attn_factor", 0.0)) and scaling["factor"] > 1:
        scaling["attention_factor"] = magnitude * (0.1 * math.log(scaling["factor"]) + 1)
    if {"rope_factors_long.weight", "rope_factors_short.weight"} & shapes.keys():
        rope = _checked_rope(files.name, "longrope", {})
    else:
        rope = _checked_rope(files.name, own("rope.scaling.type", "none"), scaling)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":  # llama-3 scaling, worked out by whoever wrote the file
            rope = {"rope_type": "divisors", "divisors": tensor.data.tolist()}
    return ModelConfig(
        name=files.name,
        architecture=architecture,
        num_layers=own("block_count"),
        hidden_size=hidden_size,
        intermediate_size=own("feed_forward_length"),
        num_q_heads=num_q_heads,
        num_kv_heads=own("attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        rotary_dim=own("rope.dimension_count", head_dim),
        vocab_size=shapes["token_embd.weight"][1],
        max_positions=own("context_length"),
        rms_norm_eps=own("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias=_QKV_BIAS[architecture],
        qk_norm=architecture == "qwen3",
        rope_theta=own("rope.freq_base", 10000.0),
        rope_scaling=rope,
        eos_token_ids=_ids_of(field("tokenizer.ggml.eos_token_id"), field("tokenizer.ggml.eot_token_id")),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
    )
