"""A model by its name, ready to run: files found, weights read, backend chosen, tokenizer made. Owns no state."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import akv_kernels
import torch

from akv_server import files, weights
from akv_server.model import Model, ModelConfig, Weights

if TYPE_CHECKING:
    from akv_server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    config: ModelConfig
    model: Model
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Says whether two models are the same one, under whatever name and in whatever precision: from the shape, the
        tokenizer, and the weights of the last norm, which any training moves."""
        shape = {**asdict(self.config), "name": ""}
        known = json.dumps([shape, self.tokenizer.spec], sort_keys=True).encode()
        norm = self.model.last_norm.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
        return hashlib.sha256(known + norm).hexdigest()


def load_model(
    found: files.ModelFiles,
    *,
    weights_as: Weights = "float32",
    device: torch.device | str = "cpu",
    backend: ModuleType | None = None,
) -> Model:
    """The weights of `found` on `device`, over `backend` or the one that `akv_kernels` has for the device.

    Raises AkvError("repos_unsupported" | "invalid_request").
    """
    device = torch.device(device)
    with weights.open_weights(found) as (config, source):
        chosen = backend or akv_kernels.select(device.type)
        return Model(config, source, chosen, weights=weights_as, device=device)


def load(model: str, *, weights: Weights = "float32", device: torch.device | str = "cpu") -> LoadedModel:
    """The model called `model` ("default", a .gguf file, a directory or a hub id: see `files.resolve`).

    Raises AkvError("model_not_found" | "repos_unsupported" | "invalid_request") with the reason.
    """
    from akv_server import tokenizer_files

    found = files.resolve(model)
    loaded = load_model(found, weights_as=weights, device=device)
    reply = LoadedModel(loaded.config, loaded, tokenizer_files.load(found))
    _return_freed_memory()
    return reply


def _return_freed_memory() -> None:
    """Reading a GGUF file makes a million small objects (120 MB for the default model); glibc keeps what they leave."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # musl has none
        libc.malloc_trim(0)
