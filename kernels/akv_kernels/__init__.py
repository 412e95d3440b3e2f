"""Attention over segments of paged KV and its neighbours: one interface, three backends, chosen once by `select`.

Knows torch tensors only: no stream, no tree, no model. Importing this package imports no backend.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_BACKENDS = {"cpu": "cpu", "cuda": "gpu", "hip": "gpu"}


def select(device_type: str) -> ModuleType:
    """The backend module for a `torch.device.type`: Triton on a GPU, compiled C on a CPU; ValueError for others."""
    if device_type not in _BACKENDS:
        raise ValueError(f"no kernels for device type {device_type!r}; there are some for {sorted(_BACKENDS)}")
    return import_module(f"{__name__}.{_BACKENDS[device_type]}")
