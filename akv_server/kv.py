"""The tensors behind page ids: K and V of all layers, in one pool. Knows no tree, no request, nor what a page holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from akv_server.model import Model


class KV:
    """K and V pages of every layer. A page has the same id in all layers; nothing is initialised, since a slot is never
    read before it was written."""

    def __init__(self, model: Model, num_pages: int, page_size: int) -> None:
        """Pages for `model`, in its dtype and on its device."""
        config, dtype, device = model.config, model.kv_dtype, model.device
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self._backend, self._rotary = model.backend, model.rotary
        self._k = torch.empty(shape, dtype=dtype, device=device)
        self._v = torch.empty(shape, dtype=dtype, device=device)
        self.k_pages: list[Tensor] = list(self._k)  # per layer [num_pages, page_size, num_kv_heads, head_dim]
        self.v_pages: list[Tensor] = list(self._v)

    @property
    def num_bytes(self) -> int:
        return 2 * self._k.numel() * self._k.element_size()

    def move(self, sources: np.ndarray, targets: np.ndarray, deltas: np.ndarray) -> None:
        """Copies tokens from slot to slot, turning each key by its delta on the way. int [num_tokens] each."""
        source, target = (torch.from_numpy(slots.astype(np.int64)).to(self._k.device) for slots in (sources, targets))
        rotation = self._rotary.table(torch.from_numpy(deltas.astype(np.int64)).to(self._k.device))
        for k_pages, v_pages in zip(self.k_pages, self.v_pages, strict=True):
            self._backend.repos_pages(k_pages, v_pages, source, target, rotation, interleaved=self._rotary.interleaved)

    def copy_page(self, source: int, target: int, num_slots: int) -> None:
        """Copies the first `num_slots` slots of a page, in all layers, bit for bit."""
        self._k[:, target, :num_slots] = self._k[:, source, :num_slots]
        self._v[:, target, :num_slots] = self._v[:, source, :num_slots]
