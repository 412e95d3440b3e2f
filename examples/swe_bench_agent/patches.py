"""An agent's work as a patch: text that JSON can hold, and that is known to give what the agent left.

Owns the git folder that commands do not know, the form of the diff and its check. Does not know where the repository
lies: it is given a way to execute commands there.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from typing import Protocol

from swe_bench_agent.commands import CommandFailed

_DIFF = ("diff-index", "--cached", "--patch")  # not `diff`, whose form is a matter of configuration
_FILE = re.compile(rb"^(?=diff --git )", re.MULTILINE)  # no line within a file's changes begins so
_SUBMODULE = re.compile(r"^160000 [^\t]*\t(.*)$", re.DOTALL)


class Execute(Protocol):
    def __call__(self, *command: str, stdin: bytes = b"") -> bytes:
        """Its stdout. Raises CommandFailed where it does not succeed."""
        ...


@dataclass(frozen=True, slots=True)
class Patch:
    """`text` is a git diff, perhaps empty. `problem` says what it lacks, or why it does not apply."""

    text: str
    problem: str | None = None


class Base:
    """A copy, at `kept`, of the repository's git folder as it was at the base commit, so that what commands do to
    theirs spoils nothing. A relative `kept` counts from the repository."""

    def __init__(self, execute: Execute, git_dir: str, kept: str) -> None:
        self._execute, self._kept = execute, kept
        execute("cp", "-a", git_dir, kept)
        execute("mkdir", "-p", f"{kept}/info")
        # So `--binary` takes every file for binary, whatever the repository says, as `--text` takes each for text.
        execute("tee", f"{kept}/info/attributes", stdin=b"* -diff\n")

    def patch(self, tree: str) -> Patch:
        """All that differs from the base commit in the folder `tree`, less what is ignored. Removes git folders below
        its root, but for those of submodules, so that what they hold counts as any other file. Raises CommandFailed
        where there is no diff at all.
        """
        problems = []
        for command in (self._remove_nested(tree), self._command(tree, "add", "-A", "--ignore-errors")):
            try:
                self._execute(*command)
            except CommandFailed as error:
                problems.append(str(error))
        as_text = self._git(tree, *_DIFF, "--text", "HEAD")
        as_binary = self._git(tree, *_DIFF, "--binary", "HEAD")
        files = zip(_FILE.split(as_text)[1:], _FILE.split(as_binary)[1:], strict=True)
        text = "".join(_readable(*file) for file in files)
        problems += self._check(tree, text)
        return Patch(text, "; ".join(problems) or None)

    def _remove_nested(self, tree: str) -> tuple[str, ...]:
        listed = self._git(tree, "ls-files", "--stage", "-z").decode(errors="surrogateescape").split("\0")
        submodules = [f"{tree}/{found[1]}" for entry in listed if (found := _SUBMODULE.match(entry))]
        spared = [word for path in submodules for word in ("-path", glob.escape(path), "-prune", "-o")]
        return ("find", tree, "-mindepth", "2", *spared, "-name", ".git", "-prune", "-exec", "rm", "-rf", "{}", "+")

    def _check(self, tree: str, text: str) -> list[str]:
        """Applies the text to the base commit, in the index alone, and compares with what was there before."""
        left = self._git(tree, "write-tree")
        self._git(tree, "read-tree", "HEAD")
        try:
            if text:
                self._git(tree, "apply", "--cached", "--whitespace=nowarn", "-", stdin=text.encode())
        except CommandFailed as error:
            return [f"the patch does not apply: {error}"]
        if self._git(tree, "write-tree") != left:
            return ["the patch applies, but does not give what the agent left"]
        return []

    def _git(self, tree: str, *arguments: str, stdin: bytes = b"") -> bytes:
        return self._execute(*self._command(tree, *arguments), stdin=stdin)

    def _command(self, tree: str, *arguments: str) -> tuple[str, ...]:
        return ("git", "-C", tree, f"--git-dir={self._kept}", "--work-tree=.", *arguments)


def _readable(as_text: bytes, as_binary: bytes) -> str:
    """A prediction is JSON, so a file in another encoding goes into it as git writes binary files."""
    try:
        text = as_text.decode()
    except UnicodeDecodeError:
        return as_binary.decode(errors="replace")  # ASCII, but for where a link leads to, and then the check tells
    return text if "\0" not in text else as_binary.decode(errors="replace")
