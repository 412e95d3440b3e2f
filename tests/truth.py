"""The right answer for an edited stream, the slow way: a dense Llama that keeps every token's key unrotated.

Shares no code with the server but `ops` (which the golden layouts hold to its meaning): weights are read straight from
the safetensors file, attention is a masked softmax over all tokens, and each key is rotated afresh for the position
that the layout gives it at the moment of reading.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from akv_server.ops import History, Timeline


class Truth:
    """A llama of `tests.models.tiny_model` in `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float64) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {name: w.to(dtype) for name, w in load_file(path / "model.safetensors").items()}
        self.dtype = dtype
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.dim = self.config["head_dim"]
        theta = (self.config.get("rope_parameters") or self.config)["rope_theta"]
        self.inv_freq = theta ** -(torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)

    def logits(self, tokens: Sequence[int], history: History = ()) -> Tensor:
        """[num_tokens, vocab] of each token, as the history had it when it was computed (NaN where forgotten)."""
        n = len(tokens)
        layers = self.config["num_hidden_layers"]
        self.attention = torch.zeros(n, n, dtype=self.dtype)  # row i: over tokens, summed over heads and layers
        keys = torch.zeros(layers, n, self.kv_heads, self.dim, dtype=self.dtype)
        values = torch.zeros_like(keys)
        out = torch.full((n, self.config["vocab_size"]), float("nan"), dtype=self.dtype)
        timeline, end = Timeline(history), 0
        while end < n:
            _, start, layout = timeline.phase_of(end)
            end = min(timeline.next_point(start), n)
            rows = [i for i in range(start, end) if layout.is_visible(i)]
            if not rows:
                continue
            seen = torch.tensor([[j <= i and layout.is_visible(j) for j in range(end)] for i in rows])
            positions = torch.tensor([layout.position(j) for j in range(end)])
            out[rows] = self._phase(tokens, rows, end, seen, positions, keys, values)
        return out

    def _phase(self, tokens, rows, end, seen, positions, keys, values) -> Tensor:
        w, dim, group = self.weights, self.dim, self.heads // self.kv_heads
        x = w["model.embed_tokens.weight"][[tokens[i] for i in rows]]
        for layer in range(keys.shape[0]):
            p = f"model.layers.{layer}."
            h = self._norm(x, w[p + "input_layernorm.weight"])
            q = (h @ w[p + "self_attn.q_proj.weight"].T).view(len(rows), self.heads, dim)
            keys[layer, rows] = (h @ w[p + "self_attn.k_proj.weight"].T).view(len(rows), self.kv_heads, dim)
            values[layer, rows] = (h @ w[p + "self_attn.v_proj.weight"].T).view(len(rows), self.kv_heads, dim)
            q = self._rotate(q, positions[rows])
            k = self._rotate(keys[layer, :end], positions).repeat_interleave(group, dim=1)
            v = values[layer, :end].repeat_interleave(group, dim=1)
            scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            self.attention[rows, :end] += weights.sum(0)
            attended = torch.einsum("hts,shd->thd", weights, v).reshape(len(rows), -1)
            x = x + attended @ w[p + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
            x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return self._norm(x, w["model.norm.weight"]) @ head.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * weight

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions.double()[:, None] * self.inv_freq)[:, None]
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
