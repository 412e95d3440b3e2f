"""Fixtures that more than one test module needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden values and real trajectories that lies beside the project; absent in a bare clone."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip("golden values and trajectories (../shared) are not beside this clone")
    return folder
