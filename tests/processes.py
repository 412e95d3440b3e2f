"""`akv serve` as a process that starts quickly and can be killed: one process imports everything and forks each server.

with Forge("--model", path, "--state", file) as forge:
    url = forge.start()
    forge.kill()
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import TracebackType


class Forge:
    """Starts servers with these options, one at a time, all on the port that the first one found."""

    def __init__(self, *options: str) -> None:
        self._options = ["serve", *options]
        self._port = "0"
        self._pid = 0
        self.url = ""
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.processes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self) -> str:
        """Returns the address once the server listens."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        assert not self._pid
        self._parent.stdin.write(json.dumps([*self._options, "--port", self._port]) + "\n")
        self._parent.stdin.flush()
        printed = ""
        for line in self._parent.stdout:
            printed += line
            if found := re.match(r"pid +(\d+)", line):
                self._pid = int(found[1])
            if found := re.match(r"serving +(http://\S+:(\d+))/v1", line):
                self.url, self._port = found[1], found[2]
                return self.url
            assert not line.startswith("ended"), f"the server did not start:\n{printed}"
        raise AssertionError(f"the server did not start:\n{printed}")

    def kill(self) -> None:
        """SIGKILL; returns once the process is gone."""
        pid, self._pid = self._pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            while True:
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.001)

    def __enter__(self) -> Forge:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._parent.communicate()


def hear_interrupts() -> None:
    """In a child, before it runs: a shell's background jobs, and all that they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    from akv_server import cli, loader, serving, tokenizer  # noqa: F401 (what every server needs)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            print(f"pid {os.getpid()}", flush=True)
            status = cli.main(json.loads(line))
            print(f"ended {status}", flush=True)
            os._exit(status)


if __name__ == "__main__":
    main()
