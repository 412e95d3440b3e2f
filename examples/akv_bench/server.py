"""A server of our own: started as a subprocess, watched until it answers, always stopped.

Knows the server by its command line alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape

from akv_sdk import Client

STOP_TIMEOUT_S = 10.0


class ServerFailed(RuntimeError):
    """The server ended before it answered. The message holds the last lines that it printed."""


class Server:
    """`akv serve` on a free port of the loopback. A context manager: entered when it answers, gone when left."""

    def __init__(self, console: Console, log: Path, options: Sequence[str] = ()) -> None:
        self._console = console
        self._options = options
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "akv_server.cli", "serve", "--port", str(port), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C in the terminal is ours; we stop the server in our own time
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask it to end, and see that it does."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        """Until it answers, however long a first download takes; shows the last line that it printed."""
        assert self._process is not None
        started_s = time.monotonic()
        # The port is bound before the model is loaded, so until then a call connects and gets no answer.
        with (
            Client(self.url, max_retries=0, timeout_s=1.0) as client,
            self._console.status("starting the server") as status,
        ):
            while not client.health():
                if self._process.poll() is not None:
                    raise ServerFailed(f"the server ended with status {self._process.returncode}:\n{self._tail(15)}")
                status.update(
                    f"starting the server ({time.monotonic() - started_s:.0f} s)  [dim]{escape(self._tail(1))}[/]"
                )
                time.sleep(0.25)

    def _tail(self, num_lines: int) -> str:
        text = self._log.read_bytes().decode(errors="replace").replace("\r", "\n")
        return "\n".join([line for line in text.splitlines() if line.strip()][-num_lines:])
