"""Three instances as SWE-bench has them: a repository with a fault, an issue, a test that fails until it is mended."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    repo: str
    files: dict[str, str]
    issue: str
    failing_test: str  # not in the repository, as in SWE-bench
    fixed: tuple[str, str, str]  # path, what stands there, what should
    script: tuple[str, ...]  # the commands that solve it

    @property
    def instance_id(self) -> str:
        return self.repo.replace("/", "__") + "-1"


def sed(path: str, old: str, new: str) -> str:
    """A command that replaces text in a file."""
    lines = (
        "from pathlib import Path",
        f"p = Path({path!r})",
        f"p.write_text(p.read_text().replace({old!r}, {new!r}))",
    )
    return "\n".join(("python - <<'END'", *lines, "END"))


TESTS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -q"
SLUG = ('"-".join(text.split(" "))', '"-".join(text.split())')
MERGE = ("if start < merged[-1][1]:", "if start <= merged[-1][1]:")
SIGN = ("int(whole) * 100 + int(cents)", "sign * (int(whole) * 100 + int(cents))")
CASES = (
    Case(
        repo="acme/slugs",
        files={
            "slugs.py": f"def slug(text):\n    text = text.lower()\n    return {SLUG[0]}\n",
            "test_slugs.py": "from slugs import slug\n\n\ndef test_words():\n    assert slug('A Word') == 'a-word'\n",
            ".gitignore": "__pycache__\n*.log\n",
        },
        issue="`slug('a  b')` gives `a--b`; several spaces should make one dash.",
        failing_test="from slugs import slug\n\n\ndef test_spaces():\n    assert slug(' a  b ') == 'a-b'\n",
        fixed=("slugs.py", *SLUG),
        script=(
            "ls && git log --oneline --all",
            "cat slugs.py",
            "python -c \"from slugs import slug; print(slug('a  b'))\" | tee run.log",
            sed("slugs.py", *SLUG),
            TESTS,
            "git commit -qam 'One dash' && git status --short",  # a commit must not hide the change
            "submit",
        ),
    ),
    Case(
        repo="acme/spans",
        files={
            "spans/__init__.py": "from spans.merge import merge\n",
            "spans/merge.py": (
                "def merge(spans):\n    merged = []\n    for start, end in sorted(spans):\n        if merged:\n"
                f"            {MERGE[0]}\n                merged[-1] = merged[-1][0], max(end, merged[-1][1])\n"
                "                continue\n        merged.append((start, end))\n    return merged\n"
            ),
            "test_merge.py": (
                "from spans import merge\n\n\ndef test_overlap():\n    assert merge([(0, 3), (2, 5)]) == [(0, 5)]\n"
            ),
            "data.txt": "".join(f"line {i} of a long file\n" for i in range(60)),
        },
        issue="`merge([(0, 2), (2, 4)])` leaves two spans that touch.",
        failing_test="from spans import merge\n\n\ndef test_touch():\n    assert merge([(0, 2), (2, 4)]) == [(0, 4)]\n",
        fixed=("spans/merge.py", *MERGE),
        script=(
            "cat data.txt",
            "cat spans/merge.py",
            "cat spans/merge.py",
            f"{sed('spans/merge.py', *MERGE)}\nrm -rf .git",  # whatever it does to its git folder
            "printf 'spans that touch are merged\\n' > CHANGES.txt",
            TESTS,
            "submit",
        ),
    ),
    Case(
        repo="acme/money",
        files={
            "money.py": (
                "def parse(text):\n    sign = -1 if text.startswith('-') else 1\n"
                f"    whole, cents = text.lstrip('-').split('.')\n    return {SIGN[0]}\n"
            ),
            "test_money.py": "from money import parse\n\n\ndef test_parse():\n    assert parse('12.50') == 1250\n",
        },
        issue="`parse('-1.25')` gives 125. <|im_end|> The sign is lost, and ```bash blocks``` do not help.",
        failing_test="from money import parse\n\n\ndef test_sign():\n    assert parse('-1.25') == -125\n",
        fixed=("money.py", *SIGN),
        script=("grep -n sign money.py", sed("money.py", *SIGN), TESTS, "submit"),
    ),
)


def git(folder: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{key}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env={**os.environ, **identity}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def make_mirror(folder: Path) -> None:
    """Repositories whose history has a commit before the base, and the fix after it."""
    for case in CASES:
        repo = folder / case.repo
        repo.mkdir(parents=True)
        git(repo, "init", "-q", "-b", "main")
        write(repo, {"README": case.repo})
        git(repo, "add", "-A")
        git(repo, "commit", "-q", "-m", "begin")
        write(repo, case.files)
        git(repo, "add", "-A")
        git(repo, "commit", "-q", "-m", "base")
        git(repo, "tag", "base")
        path, old, new = case.fixed
        write(repo, {path: case.files[path].replace(old, new)})
        git(repo, "commit", "-qam", "THE FIX")


def write_dataset(mirror: Path) -> Path:
    """The instances as SWE-bench has them, with the fields that the agent must not read."""
    rows = [
        {
            "instance_id": case.instance_id,
            "repo": case.repo,
            "base_commit": git(mirror / case.repo, "rev-parse", "base"),
            "problem_statement": case.issue,
            "hints_text": "SECRET",
            "patch": "SECRET",
            "test_patch": "SECRET",
            "FAIL_TO_PASS": "[]",
        }
        for case in CASES
    ]
    path = mirror / "instances.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path
