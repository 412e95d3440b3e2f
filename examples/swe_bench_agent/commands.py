"""Running one command with a limit on its time and on what is kept of its output.

Knows neither agents nor repositories.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_OUTPUT_BYTES = 16_000
_READ_BYTES = 65_536
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Ran:
    """`exit_status` is None where the time was up, negative where a signal ended the command."""

    output: str
    exit_status: int | None
    elapsed_s: float


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
) -> Ran:
    """Runs a command to its end or to its time limit; stdout and stderr come together, its stdin is empty.

    Of a long output the first and the last half of `max_output_bytes` are kept, and never more is held in memory. The
    command gets a process group of its own, and whatever it left running there ends with it.
    """
    started_s = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    kept = _HeadAndTail(max_output_bytes)
    try:
        is_over = _read(process, kept, started_s + timeout_s)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        assert process.stdout is not None
        process.stdout.close()
    return Ran(kept.text(), status if is_over else None, time.monotonic() - started_s)


def _read(process: subprocess.Popen[bytes], kept: _HeadAndTail, deadline_s: float) -> bool:
    """Until the command has ended; False where the deadline came first. Does not wait for what it left behind in the
    background, which may hold the pipe open for ever."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        is_open = True
        while (left_s := deadline_s - time.monotonic()) > 0:
            has_ended = process.poll() is not None
            wait_s = 0 if has_ended else min(left_s, _POLL_S)
            if is_open and selector.select(wait_s):
                chunk = os.read(process.stdout.fileno(), _READ_BYTES)
                kept.add(chunk)
                is_open = bool(chunk)
            elif has_ended:
                return True
            elif not is_open:
                time.sleep(min(wait_s, 0.005))  # it closed its output and goes on
    return process.poll() is not None


class _HeadAndTail:
    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._head = b""
        self._tail = b""
        self._num_bytes = 0

    def add(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail = (self._tail + chunk[room:])[-self._half :] if len(chunk) > room else self._tail

    def text(self) -> str:
        num_left_out = self._num_bytes - len(self._head) - len(self._tail)
        middle = f"\n[… {num_left_out} bytes left out …]\n".encode() if num_left_out else b""
        return (self._head + middle + self._tail).decode(errors="replace")
