"""How a model's files become its config and float32 tensors. Knows GGUF, safetensors and the names that both give to
the tensors of the Llama family; knows neither the forward pass (`model.py`) nor downloads (`files.py`)."""

from __future__ import annotations

from akv_server.files import ModelFiles, resolve

__all__ = ["ModelFiles", "resolve"]
