"""The tensors behind page ids: K and V of all layers, in one pool. Knows no tree, no request, nor what a page holds."""

from __future__ import annotations

import torch
from torch import Tensor


class KV:
    """K and V pages of every layer. A page has the same id in all layers; nothing is initialised, since a slot is never
    read before it was written."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
        self._k = torch.empty(shape, dtype=dtype, device=device)
        self._v = torch.empty(shape, dtype=dtype, device=device)
        self.k_pages: list[Tensor] = list(self._k)  # per layer [num_pages, page_size, num_kv_heads, head_dim]
        self.v_pages: list[Tensor] = list(self._v)

    @property
    def num_bytes(self) -> int:
        return 2 * self._k.numel() * self._k.element_size()

    def copy_page(self, source: int, target: int, num_slots: int) -> None:
        """Copies the first `num_slots` slots of a page, in all layers, bit for bit."""
        self._k[:, target, :num_slots] = self._k[:, source, :num_slots]
        self._v[:, target, :num_slots] = self._v[:, source, :num_slots]
