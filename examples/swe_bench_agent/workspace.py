"""Where the agent's commands run: a repository at its base commit, in a local folder or in a container.

Owns preparing it, the environment of commands, and taking the patch. Knows nothing of models. A local workspace gives
no isolation: commands run with your rights, in a fresh environment; `DockerWorkspace` is for models you do not trust.
"""

from __future__ import annotations

import os
import shutil
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

GIT_TIMEOUT_S = 1800.0
DEFAULT_SOURCE = "https://github.com/{repo}.git"
DEFAULT_IMAGE = "docker.io/swebench/sweb.eval.x86_64.{image_id}:latest"
_IMAGE_PYTHON = "/opt/miniconda3/envs/testbed/bin"  # where the images of SWE-bench keep the repository's environment
_IMAGE_ENVIRONMENT = ("-e", "PAGER=cat", "-e", "GIT_PAGER=cat", "-e", "NO_COLOR=1", "-e", "PYTHONDONTWRITEBYTECODE=1")
_DIFF = ("diff", "--cached", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")


class WorkspaceFailed(RuntimeError):
    """The repository could not be prepared, or its patch not be taken. The message holds what git or docker said."""


class Workspace(Protocol):
    """A context manager; leaving it removes everything."""

    def run(self, command: str, timeout_s: float) -> Ran:
        """One bash command at the repository's root."""
        ...

    def patch(self) -> str:
        """All that differs from the base commit, committed or not, as a git diff; ignored files are left out."""
        ...

    def __enter__(self) -> Workspace: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalWorkspace:
    """A folder of its own with the repository at its base commit and nothing of its later history.

    `source` is an address or a path, in which `{repo}` stands for the instance's. The patch is taken with a copy of the
    git folder that commands do not know, so that what they do to theirs cannot spoil it.
    """

    def __init__(self, instance: Instance, source: str = DEFAULT_SOURCE) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="swe-bench-agent-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        home = folder / "home"
        self.root = home / instance.repo.rpartition("/")[2]
        self._git_dir = folder / "base.git"
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PAGER": "cat",
            "GIT_PAGER": "cat",
            "NO_COLOR": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in _IDENTITY.items()},
        }
        try:
            self.root.mkdir(parents=True)
            self._git("init", "-q", "-b", "main")
            # Your own configuration of git holds for this one, so that mirrors, proxies and keys are found.
            where = source.replace("{repo}", instance.repo)
            where = where if "://" in where or not Path(where).exists() else str(Path(where).resolve())
            _checked(["git", "fetch", "-q", "--depth", "1", "--no-tags", where, instance.base_commit], cwd=self.root)
            self._git("checkout", "-q", "-B", "main", instance.base_commit)
            (self.root / ".git" / "FETCH_HEAD").unlink()
            shutil.copytree(self.root / ".git", self._git_dir)
        except BaseException:
            self._folder.cleanup()
            raise

    def run(self, command: str, timeout_s: float) -> Ran:
        if not self.root.is_dir():
            return Ran("the repository's folder is gone", 1, 0.0)
        return commands.run(["bash", "-c", command], timeout_s=timeout_s, cwd=self.root, env=self._environment)

    def patch(self) -> str:
        self.root.mkdir(parents=True, exist_ok=True)
        own = (f"--git-dir={self._git_dir}", f"--work-tree={self.root}")
        self._git(*own, "add", "-A")
        return self._git(*own, *_DIFF, "HEAD")

    def __enter__(self) -> LocalWorkspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def _git(self, *arguments: str) -> str:
        return _checked(["git", *arguments], cwd=self.root, env=self._environment)


class DockerWorkspace:
    """A container of the instance's official image, without network; the repository lies in `/testbed`.

    Needs the `docker` command and an engine behind it, and asks for neither before it is made.
    """

    def __init__(self, instance: Instance, image: str = DEFAULT_IMAGE) -> None:
        image_id = instance.instance_id.replace("__", "_1776_").lower()
        name = image.replace("{image_id}", image_id)
        start = ["docker", "run", "-d", "--rm", "--network", "none", "-w", "/testbed", name, "sleep", "infinity"]
        self._container = _checked(start).strip().splitlines()[-1]
        try:
            self._base = self._exec("git", "rev-parse", "HEAD").strip()
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

    def patch(self) -> str:
        self._exec("git", "add", "-A")
        return self._exec("git", *_DIFF, self._base)

    def __enter__(self) -> DockerWorkspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _exec(self, *command: str) -> str:
        return _checked(["docker", "exec", "-w", "/testbed", self._container, *command])

    def _remove(self) -> None:
        subprocess.run(["docker", "rm", "-f", self._container], capture_output=True, check=False)


_IDENTITY = {"NAME": "Agent", "EMAIL": "agent@example.org"}


def _checked(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """stdout of a command that must succeed. Raises WorkspaceFailed."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkspaceFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise WorkspaceFailed(f"{' '.join(command[:4])} … ended with status {done.returncode}: {said[-2000:]}")
    return done.stdout.decode(errors="replace")
