"""Running one command with a limit on its time: an agent's, of whose output some is kept, or one of our own.

Knows neither agents nor repositories.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MAX_OUTPUT_BYTES = 16_000
_READ_BYTES = 65_536
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


class CommandFailed(RuntimeError):
    """A command of our own did not succeed. The message holds what it said."""


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
    command gets a session of its own, and what it left running ends with it: on Linux all of it, elsewhere what stayed
    in its process group. Not for two threads at a time: each would end what the other's command left.
    """
    started_s = time.monotonic()
    with _leaving_nothing():
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


def checked(
    command: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> bytes:
    """stdout of a command that must succeed. Raises CommandFailed."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise CommandFailed(f"{' '.join(command)[:200]} … ended with status {done.returncode}: {said[-2000:]}")
    return done.stdout


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


@contextmanager
def _leaving_nothing() -> Iterator[None]:
    """Ends what was started within and left its session, on Linux: it becomes our child once its parent has ended, and
    so do its own children after it."""
    others = set(_children_of_other_sessions())
    _adopt_orphans(True)
    try:
        yield
    finally:
        while strays := set(_children_of_other_sessions()) - others:
            for pid in strays:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except PermissionError:  # another user's, by way of sudo
                    others.add(pid)
        _adopt_orphans(False)


def _adopt_orphans(yes: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(yes), 0, 0, 0)


def _children_of_other_sessions() -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            _, parent, _, session = stat.read_bytes().rpartition(b")")[2].split()[:4]
            if int(parent) == os.getpid() and int(session) != os.getsid(0):
                yield int(stat.parent.name)


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
