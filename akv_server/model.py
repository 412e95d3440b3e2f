"""The Llama family in one file: config, rotary frequencies, forward over paged KV.

Llama 2 and 3, Mistral, Qwen2 and Qwen3 differ in three switches (`qkv_bias`, `qk_norm`, `rope_scaling`). Owns the
weights on their device. Knows no file format (`weights.py`), no pool and no stream: which slot a token is written to
and what a row sees come in with each step, and the kernels come in as a backend module.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from akv_kernels.plan import AttentionPlan, Rotary
from torch import Tensor

from akv_server.errors import AkvError

Weights = Literal["float32", "int8", "bfloat16", "float16"]
TensorSource = Callable[[str], Tensor]
"""The tensor of a name as transformers' Llama has it (`model.layers.0.mlp.up_proj.weight`), on the CPU, float32.
Valid until the next call; the model copies what it keeps."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model. `rope_scaling` holds transformers' fields under `rope_type` llama3, linear or yarn, or is
    None; GGUF files give the divisor of each frequency instead: `{"rope_type": "divisors", "divisors": [...]}`."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    max_positions: int  # the window: limits positions, not stream indexes
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def num_layer_weights(self) -> int:
        """Weights that every token is multiplied with on its way through the layers."""
        heads = 2 * (self.num_q_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass over T new tokens of any number of sequences. All tensors are on one device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T] rotary position of each
    write_slots: Tensor  # int64 [T] page_id * page_size + offset, or -1: its KV is resident already
    plan: AttentionPlan  # its rows are these T tokens, in this order
    logit_rows: Tensor  # int64 [R] rows whose logits are wanted

    def to(self, device: torch.device) -> StepInput:
        """The same step with its tensors on `device`; self where they are there already."""
        if self.token_ids.device == device:
            return self
        tensors = (self.token_ids, self.positions, self.write_slots, self.logit_rows)
        token_ids, positions, write_slots, logit_rows = (t.to(device, non_blocking=True) for t in tensors)
        return StepInput(token_ids, positions, write_slots, self.plan.to(device), logit_rows)


def rotary_of(config: ModelConfig) -> Rotary:
    """The model's rotation, in float64. Formulas: RoFormer for the plain one; Llama 3.1's wavelength bands; linear
    position interpolation; YaRN (arXiv 2309.00071) sections 3.2 to 3.4, whose magnitude becomes `Rotary.scale`.

    Raises AkvError("repos_unsupported") for a scaling whose rotation is no function of a token's position alone.
    """
    dim, base, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling or {}
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    match scaling.get("rope_type", "default"):
        case "default":
            return Rotary(plain)
        case "divisors":
            return Rotary(plain / torch.tensor(scaling["divisors"], dtype=torch.float64))
        case "linear":
            return Rotary(plain / scaling["factor"])
        case "llama3":
            # turns that a frequency makes over the original window: below `low` it is stretched, above `high` kept
            turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            return Rotary(plain * kept + plain / scaling["factor"] * (1 - kept))
        case "yarn":
            return _yarn(plain, scaling, config)
        case other:
            raise AkvError("repos_unsupported", f"rope type {other!r} cannot be shifted exactly", param="model")


def _yarn(plain: Tensor, scaling: dict[str, Any], config: ModelConfig) -> Rotary:
    dim, factor = config.rotary_dim, float(scaling["factor"])
    window = scaling.get("original_max_position_embeddings") or config.max_positions

    def dim_of(turns: float) -> float:
        """The (fractional) pair whose frequency makes so many turns over the original window."""
        return dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    inv_freq = plain / factor * stretched + plain * (1 - stretched)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if (scale := scaling.get("attention_factor")) is None:
        both = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scale = magnitude(both[0]) / magnitude(both[1]) if both[0] and both[1] else magnitude(1.0)
    return Rotary(inv_freq, scale=scale)


class _Linear:
    """x [T, K] -> x W^T + b [T, N], in the dtype of W."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _QuantizedLinear:
    """The same with int8 weights. Each row of x is quantised by itself, so that no row depends on the others."""

    __slots__ = ("bias", "matrix")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from akv_kernels.cpu import Int8Linear

        self.matrix, self.bias = Int8Linear(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.matrix(x)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm: Tensor  # [hidden]
    qkv: _Linear | _QuantizedLinear  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: _Linear | _QuantizedLinear  # [hidden, num_q_heads * head_dim]
    mlp_norm: Tensor
    gate_up: _Linear | _QuantizedLinear  # [2 * intermediate, hidden]
    down: _Linear | _QuantizedLinear  # [hidden, intermediate]


class Model:
    """Weights on one device, and the forward pass. Holds no KV and no state between steps."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        backend: ModuleType,  # of akv_kernels
        *,
        weights: Weights = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        """Reads every tensor once, one at a time, so that no second copy of the model is ever in memory.

        Raises AkvError when `weights` cannot be had on this device, or the rotation cannot be shifted exactly.
        """
        device = torch.device(device)
        if weights == "int8" and device.type != "cpu":
            raise AkvError("invalid_request", "int8 weights are for the CPU; take bfloat16 on a GPU", param="weights")
        self.config = config
        self.rotary = rotary_of(config)
        self.backend = backend
        self.device = device
        self.kv_dtype = torch.float32 if weights == "int8" else getattr(torch, weights)
        self._rotary_here = self.rotary.to(device)
        self._scale = config.head_dim**-0.5
        linear = _QuantizedLinear if weights == "int8" else _Linear

        def keep(rows: int | None, *names: str) -> Tensor:
            """One tensor, or several stacked along their first dim into `rows` rows: copied straight into place."""
            first = source(names[0])
            stacked = torch.empty((rows or first.shape[0], *first.shape[1:]), dtype=self.kv_dtype, device=device)
            begin = 0
            for name in names:
                tensor = first if name == names[0] else source(name)
                stacked[begin : begin + tensor.shape[0]].copy_(tensor)
                begin += tensor.shape[0]
            assert begin == stacked.shape[0], f"{names} have {begin} rows, not {stacked.shape[0]}"
            return stacked

        q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def layer(number: int) -> _Layer:
            attn, mlp = f"model.layers.{number}.self_attn.", f"model.layers.{number}.mlp."
            qkv = [f"{attn}{x}_proj." for x in "qkv"]
            qkv_rows = q_rows + 2 * kv_rows
            bias = keep(qkv_rows, *(f"{x}bias" for x in qkv)) if config.qkv_bias else None
            return _Layer(
                attn_norm=keep(None, f"model.layers.{number}.input_layernorm.weight"),
                qkv=linear(keep(qkv_rows, *(f"{x}weight" for x in qkv)), bias),
                q_norm=keep(None, f"{attn}q_norm.weight") if config.qk_norm else None,
                k_norm=keep(None, f"{attn}k_norm.weight") if config.qk_norm else None,
                o=linear(keep(None, f"{attn}o_proj.weight"), None),
                mlp_norm=keep(None, f"model.layers.{number}.post_attention_layernorm.weight"),
                gate_up=linear(
                    keep(2 * config.intermediate_size, f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"), None
                ),
                down=linear(keep(None, f"{mlp}down_proj.weight"), None),
            )

        self._embedding = keep(None, "model.embed_tokens.weight")  # [vocab, hidden]
        self._layers = [layer(number) for number in range(config.num_layers)]
        self.last_norm = keep(None, "model.norm.weight")  # [hidden]
        self._head = linear(self._embedding if config.tie_embeddings else keep(None, "lm_head.weight"), None)

    def fingerprint(self) -> bytes:
        """32 bytes that another model, or the same in other precision, does not have: a digest of the config and of all
        weights, which are read once."""
        digest = hashlib.blake2b(repr((self.config, self.kv_dtype)).encode(), digest_size=32)
        for tensor in _tensors_of([self._embedding, self._layers, self.last_norm, self._head]):
            digest.update(repr(tuple(tensor.shape)).encode())
            bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
            if bits.device.type == "cpu":
                digest.update(bits.numpy().data)
            else:
                digest.update(checksum(F.pad(bits, (0, -len(bits) % 8)).view(torch.int64)).to_bytes(8, "little"))
        return digest.digest()

    @torch.no_grad()
    def forward(
        self,
        step: StepInput,
        k_pages: list[Tensor],  # per layer [num_pages, page_size, num_kv_heads, head_dim], kv_dtype
        v_pages: list[Tensor],
        page_mass: Tensor | None = None,  # float32 [num_table_entries]
    ) -> Tensor:  # float32 [R, vocab_size]
        """Writes K and V of the new tokens to their slots; returns the logits of `step.logit_rows`, a fresh tensor.

        The attention that each entry of the plan's page table gets, summed over rows, heads and layers, is added to
        `page_mass`, if that is given.
        """
        config, eps, backend, plan = self.config, self.config.rms_norm_eps, self.backend, step.plan
        num_q, num_kv = config.num_q_heads, config.num_kv_heads
        interleaved, magnitude = self.rotary.interleaved, self.rotary.scale
        rotation = self._rotary_here.table(step.positions)
        x, residual = F.embedding(step.token_ids, self._embedding), None  # [T, hidden]
        for number, layer in enumerate(self._layers):
            if residual is None:
                residual, x = x, backend.rms_norm(x, layer.attn_norm, eps)
            else:
                x, residual = backend.rms_norm(x, layer.attn_norm, eps, residual)
            qkv = layer.qkv(x).view(-1, num_q + 2 * num_kv, config.head_dim)
            q, k, v = qkv[:, :num_q], qkv[:, num_q : num_q + num_kv], qkv[:, num_q + num_kv :]
            if layer.q_norm is not None:
                q = backend.rms_norm(q.contiguous(), layer.q_norm, eps)
                k = backend.rms_norm(k.contiguous(), layer.k_norm, eps)
            q = backend.rope_and_write(
                q,
                k,
                v,
                k_pages[number],
                v_pages[number],
                step.write_slots,
                rotation,
                interleaved=interleaved,
                scale=magnitude,
            )
            attended = backend.segment_batch_attention(
                q, k_pages[number], v_pages[number], plan, scale=self._scale, page_mass=page_mass
            )
            x = layer.o(attended.view(-1, num_q * config.head_dim))
            x, residual = backend.rms_norm(x, layer.mlp_norm, eps, residual)
            x = layer.down(backend.silu_mul(layer.gate_up(x)))
        assert residual is not None
        rows = step.logit_rows
        x, _ = backend.rms_norm(x[rows], self.last_norm, eps, residual[rows])
        return self._head(x).float()


def checksum(words: Tensor) -> int:
    """The sum of (2 i + 1) words[i] mod 2**64, made on the device of `words` (int64 [num_words]). No change of one word
    leaves it as it is."""
    odd = torch.arange(1, 2**21, 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, len(words), len(odd)):
        part = words[begin : begin + len(odd)]
        total += (part * odd[: len(part)]).sum() + 2 * begin * part.sum()
    return int(total) % 2**64


def _tensors_of(part: Any) -> Iterator[Tensor]:
    """All tensors that a part of a model is made of, in a fixed order."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from _tensors_of(item)
    elif part is not None and not isinstance(part, (int, float, str)):
        names = getattr(type(part), "__slots__", None) or vars(part)
        for name in sorted(names):
            yield from _tensors_of(getattr(part, name))
