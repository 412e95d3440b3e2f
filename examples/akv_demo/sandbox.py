"""The sandbox: the repository as real files in a temporary folder, and real commands run in it.

Owns the folder and the environment of the commands. Knows nothing of the agent's plan or of the server. The same
commands give the same output each time, but for the seconds and the object addresses that pytest prints.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from akv_demo import repository

COMMAND_TIMEOUT_S = 60.0


class Sandbox:
    """A fresh git repository with one commit. Use it as a context manager: leaving it removes the folder."""

    def __init__(self) -> None:
        for tool in ("git", "sh", "sed", "grep"):
            if shutil.which(tool) is None:
                raise RuntimeError(f"the demo's agent needs the command `{tool}`, which is not installed")
        self._home = tempfile.TemporaryDirectory(prefix="akv-demo-")
        home = Path(self._home.name)
        self.root = home / "stockroom"
        for path, text in repository.files().items():
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        # `python` must be this interpreter (it has pytest), whatever the machine calls its own.
        python = home / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        self._environment = {
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(home),
            "LC_ALL": "C",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_PAGER": "cat",
            **{f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in _IDENTITY.items()},
        }
        self.run("git init -q -b main && git add . && git commit -q -m 'Stock, books and reports'")

    def run(self, command: str) -> str:
        """Run one shell command at the repository's root. Returns what it printed, stdout and stderr together, and
        its exit status where that is not zero."""
        try:
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"[stopped after {COMMAND_TIMEOUT_S:.0f} s]"
        status = f"\n[exit status {done.returncode}]" if done.returncode else ""
        return (done.stdout.rstrip() + status).strip("\n") or "[no output]"

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._home.cleanup()


_IDENTITY = {"NAME": "Demo Agent", "EMAIL": "agent@example.org", "DATE": "2024-06-03T09:00:00+00:00"}
