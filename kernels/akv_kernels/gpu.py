"""The GPU backend: the Triton kernels under the names that every backend has. `reference` has the contracts."""

from __future__ import annotations

from akv_kernels.attention import segment_batch_attention
from akv_kernels.neighbours import rms_norm, sample, silu_mul
from akv_kernels.pages import repos_pages, rope_and_write

__all__ = ["repos_pages", "rms_norm", "rope_and_write", "sample", "segment_batch_attention", "silu_mul"]
