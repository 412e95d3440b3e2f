"""Where the agent's commands run: a repository at its base commit, in a local folder or in a container.

Owns preparing it and the environment of commands. Knows nothing of models. A local workspace gives no isolation:
commands run with your rights, in a fresh environment; `DockerWorkspace` is for models you do not trust.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from swe_bench_agent import commands
from swe_bench_agent.commands import Ran
from swe_bench_agent.instances import Instance
from swe_bench_agent.patches import Base, Patch

SETUP_TIMEOUT_S = 1800.0
DEFAULT_SOURCE = "https://github.com/{repo}.git"
DEFAULT_IMAGE = "docker.io/swebench/sweb.eval.x86_64.{image_id}:latest"
_IMAGE_PYTHON = "/opt/miniconda3/envs/testbed/bin"  # where the images of SWE-bench keep the repository's environment
_IMAGE_ENVIRONMENT = ("-e", "PAGER=cat", "-e", "GIT_PAGER=cat", "-e", "NO_COLOR=1", "-e", "PYTHONDONTWRITEBYTECODE=1")
_NO_CONFIGURATION = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
_IDENTITY = {"NAME": "Agent", "EMAIL": "agent@example.org"}


class Workspace(Protocol):
    """A context manager; leaving it removes everything. Making one, and taking the patch, raises CommandFailed with
    what git or docker said."""

    def run(self, command: str, timeout_s: float) -> Ran:
        """One bash command at the repository's root."""
        ...

    def patch(self) -> Patch:
        """All that differs from the base commit, committed or not; ignored files are left out. Removes git folders
        below the repository's root."""
        ...

    def __enter__(self) -> Workspace: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalWorkspace:
    """A folder of its own with the repository at its base commit and nothing of its later history.

    `source` is an address or a path, in which `{repo}` stands for the instance's.
    """

    def __init__(self, instance: Instance, source: str = DEFAULT_SOURCE) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="swe-bench-agent-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name).resolve()
        home = self._path / "home"
        self.root = home / instance.repo.rpartition("/")[2]
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PAGER": "cat",
            "GIT_PAGER": "cat",
            "NO_COLOR": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **_NO_CONFIGURATION,
            **{f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in _IDENTITY.items()},
        }
        try:
            self.root.mkdir(parents=True)
            self._execute("git", "-C", str(self.root), "init", "-q", "-b", "main")
            # Your own configuration of git holds for this one, so that mirrors, proxies and keys are found.
            where = source.replace("{repo}", instance.repo)
            where = where if "://" in where or not Path(where).exists() else str(Path(where).resolve())
            fetch = ["git", "fetch", "-q", "--depth", "1", "--no-tags", where, instance.base_commit]
            commands.checked(fetch, timeout_s=SETUP_TIMEOUT_S, cwd=self.root)
            self._execute("git", "-C", str(self.root), "checkout", "-q", "-B", "main", instance.base_commit)
            (self.root / ".git" / "FETCH_HEAD").unlink()
            self._base = Base(self._execute, str(self.root / ".git"), str(self._path / "base.git"))
        except BaseException:
            self._folder.cleanup()
            raise

    def run(self, command: str, timeout_s: float) -> Ran:
        if not self.root.is_dir():
            return Ran("the repository's folder is gone", 1, 0.0)
        return commands.run(["bash", "-c", command], timeout_s=timeout_s, cwd=self.root, env=self._environment)

    def patch(self) -> Patch:
        tree = self.root
        if not tree.is_dir() or tree.resolve() != tree:  # removed, or a link to something that is none of ours
            tree = self._path / "nothing"
            tree.mkdir(exist_ok=True)
        return self._base.patch(str(tree))

    def __enter__(self) -> LocalWorkspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def _execute(self, *command: str, stdin: bytes = b"") -> bytes:
        return commands.checked(command, timeout_s=SETUP_TIMEOUT_S, cwd=self._path, env=self._environment, stdin=stdin)


class DockerWorkspace:
    """A container of the instance's official image, without network; the repository lies in `/testbed`.

    Needs the `docker` command and an engine behind it, and asks for neither before it is made.
    """

    def __init__(self, instance: Instance, image: str = DEFAULT_IMAGE) -> None:
        image_id = instance.instance_id.replace("__", "_1776_").lower()
        name = image.replace("{image_id}", image_id)
        start = ["docker", "run", "-d", "--rm", "--network", "none", "-w", "/testbed", name, "sleep", "infinity"]
        self._container = commands.checked(start, timeout_s=SETUP_TIMEOUT_S).decode().strip().splitlines()[-1]
        try:
            self._base = Base(self._execute, ".git", "../base.git")
        except BaseException:
            self._remove()
            raise

    def run(self, command: str, timeout_s: float) -> Ran:
        # The engine does not end a command whose client went away, so the limit holds inside, and a little longer here.
        limit = ["timeout", "-s", "KILL", str(max(1, round(timeout_s)))]
        told = f"export PATH={_IMAGE_PYTHON}:$PATH\n{command}"
        inside = ["docker", "exec", *_IMAGE_ENVIRONMENT, "-w", "/testbed", self._container, *limit, "bash", "-c", told]
        ran = commands.run(inside, timeout_s=timeout_s + 5)
        was_killed = ran.exit_status in (128 + signal.SIGKILL, -signal.SIGKILL)
        return replace(ran, exit_status=None) if was_killed and ran.elapsed_s >= timeout_s else ran

    def patch(self) -> Patch:
        return self._base.patch(".")

    def __enter__(self) -> DockerWorkspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _execute(self, *command: str, stdin: bytes = b"") -> bytes:
        plain = [word for name, value in _NO_CONFIGURATION.items() for word in ("-e", f"{name}={value}")]
        inside = ["docker", "exec", "-i", *plain, "-w", "/testbed", self._container, *command]
        return commands.checked(inside, timeout_s=SETUP_TIMEOUT_S, stdin=stdin)

    def _remove(self) -> None:
        subprocess.run(["docker", "rm", "-f", self._container], capture_output=True, check=False)
