"""The tensors behind page ids: K and V of all layers, in one pool. Knows no tree, no request, nor what a page holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from akv_server.errors import AkvError
from akv_server.model import Model


class KV:
    """K and V pages of every layer. A page has the same id in all layers; nothing is initialised, since a slot is never
    read before it was written."""

    def __init__(self, model: Model, num_pages: int, page_size: int) -> None:
        """Pages for `model`, in its dtype and on its device. Raises AkvError where there is no memory for them."""
        config, dtype, device = model.config, model.kv_dtype, model.device
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self._backend, self._rotary = model.backend, model.rotary.to(device)
        try:
            self._k = torch.empty(shape, dtype=dtype, device=device)
            self._v = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError:  # which is all that torch raises where memory is short
            num_bytes = 2 * math.prod(shape) * dtype.itemsize
            message = f"there is no memory for a pool of {num_pages * page_size} tokens, {num_bytes / 1e9:.1f} GB"
            raise AkvError("invalid_request", message, param="pool_tokens") from None
        self.k_pages: list[Tensor] = list(self._k)  # per layer [num_pages, page_size, num_kv_heads, head_dim]
        self.v_pages: list[Tensor] = list(self._v)

    @property
    def dtype(self) -> torch.dtype:
        return self._k.dtype

    def block_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Of K and V of so many tokens: [2, num_layers, num_tokens, num_kv_heads, head_dim]."""
        return 2, self._k.shape[0], num_tokens, *self._k.shape[3:]

    def block_bytes(self, num_tokens: int) -> int:
        return math.prod(self.block_shape(num_tokens)) * self._k.element_size()

    @property
    def num_bytes(self) -> int:
        return 2 * self._k.numel() * self._k.element_size()

    def move(self, sources: np.ndarray, targets: np.ndarray, deltas: np.ndarray) -> None:
        """Copies tokens from slot to slot, turning each key by its delta on the way. int [num_tokens] each."""
        source, target = self._index(sources), self._index(targets)
        rotation = self._rotary.table(torch.from_numpy(deltas.astype(np.int64)).to(self._k.device))
        for k_pages, v_pages in zip(self.k_pages, self.v_pages, strict=True):
            self._backend.repos_pages(k_pages, v_pages, source, target, rotation, interleaved=self._rotary.interleaved)

    def copy_page(self, source: int, target: int, num_slots: int) -> None:
        """Copies the first `num_slots` slots of a page, in all layers, bit for bit."""
        self._k[:, target, :num_slots] = self._k[:, source, :num_slots]
        self._v[:, target, :num_slots] = self._v[:, source, :num_slots]

    def take_out(self, slots: np.ndarray) -> tuple[Tensor, Callable[[], None]]:
        """K and V in these slots (int [num_tokens]) as they are now, in host memory: `block_shape`. On a GPU the copy
        is only under way when this returns, though ahead of all that is launched later; the function waits for it."""
        shape, index = self.block_shape(len(slots)), self._index(slots)
        block = torch.empty(shape, dtype=self.dtype, device=self._k.device)
        for half, pages in zip(block, (self._k, self._v), strict=True):
            torch.index_select(pages.flatten(1, 2), 1, index, out=half)
        if block.device.type == "cpu":
            return block, lambda: None
        host = torch.empty(shape, dtype=self.dtype, pin_memory=True)
        host.copy_(block, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return host, done.synchronize

    def put_back(self, block: Tensor, slots: np.ndarray) -> None:
        """Writes K and V, as `take_out` gave them, to these slots."""
        index = self._index(slots)
        for half, pages in zip(block.to(self._k.device, non_blocking=True), (self._k, self._v), strict=True):
            pages.flatten(1, 2).index_copy_(1, index, half)

    def synchronize(self) -> None:
        """Returns once everything launched so far is done."""
        if self._k.device.type != "cpu":
            torch.cuda.synchronize(self._k.device)

    def _index(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self._k.device)
