"""Where the SWE-bench agent's commands run, locally and in a stand-in for Docker, and the patches taken there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swe_bench_agent import commands, instances
from swe_bench_agent.commands import CommandFailed
from swe_bench_agent.instances import Instance
from swe_bench_agent.patches import Patch
from swe_bench_agent.workspace import DockerWorkspace, LocalWorkspace, Workspace

from tests.swe_bench import git, make_mirror, write_dataset


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    make_mirror(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(mirror: Path) -> Path:
    return write_dataset(mirror)


def bash(command: str, timeout_s: float = 20, **options: Any) -> commands.Ran:
    return commands.run(["bash", "-c", command], timeout_s=timeout_s, **options)


def test_a_command_has_its_output_and_status() -> None:
    ran = bash("echo out; echo err >&2; exit 3")
    assert (ran.output, ran.exit_status) == ("out\nerr\n", 3)
    assert bash("cat").output == ""  # no input, rather than ours
    assert bash("kill -9 $$").exit_status == -9
    assert bash("printf '\\xff'").output == "\ufffd"
    assert bash("exec >&- 2>&-; sleep 0.2; exit 4").exit_status == 4


def test_a_command_ends_at_its_time_limit_with_what_it_printed() -> None:
    ran = bash("echo begun; sleep 60 & sleep 60", timeout_s=0.5)
    assert (ran.output, ran.exit_status) == ("begun\n", None)
    assert 0.5 <= ran.elapsed_s < 10


def test_what_runs_on_in_the_background_ends_with_its_command(tmp_path: Path) -> None:
    ran = bash(f"(sleep 1; touch {tmp_path / 'late'}) & echo done")
    assert (ran.output, ran.exit_status) == ("done\n", 0)
    assert ran.elapsed_s < 1
    time.sleep(1.2)
    assert not (tmp_path / "late").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what leaves its session is not found again")
def test_what_has_left_its_session_ends_with_its_command(tmp_path: Path) -> None:
    late = tmp_path / "late"
    ran = bash(f"setsid bash -c '(sleep 1; touch {late}) & sleep 1; touch {late}' & sleep 0.1; echo done")
    assert (ran.output, ran.exit_status) == ("done\n", 0)
    time.sleep(1.3)
    assert not late.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the process group ends")
def test_what_left_its_session_ends_with_its_command_too(tmp_path: Path) -> None:
    late = f"sleep 1; touch {tmp_path}/late"
    inner = f"setsid -f sh -c '{late}'; {late}"
    ran = bash(f"setsid sh -c '{late}' & setsid -f sh -c \"{inner}\"; sleep 0.3; echo done")
    assert (ran.output, ran.exit_status) == ("done\n", 0)
    own = subprocess.Popen(["sleep", "30"], start_new_session=True)  # ours from before, and not the command's
    assert bash(f"setsid -f sh -c '{late}'; sleep 30", timeout_s=0.5).exit_status is None
    assert own.poll() is None
    own.kill()
    own.wait()
    time.sleep(1.2)
    assert list(tmp_path.iterdir()) == []


def test_output_without_end_is_cut_in_the_middle() -> None:
    ran = bash("yes 0123456 | head -c 80000000", max_output_bytes=1000)
    assert ran.exit_status == 0
    assert ran.output.startswith("0123456\n" * 62 + "0123\n[… 79999000 bytes left out …]\n456\n")
    assert ran.output.endswith("0123456\n")
    assert bash("yes", timeout_s=0.5, max_output_bytes=1000).exit_status is None
    for num_bytes in (0, 1, 999, 1000, 1001):
        output = bash(f"head -c {num_bytes} /dev/zero | tr '\\0' x", max_output_bytes=1000).output
        cut = "x" * 500 + "\n[… 1 bytes left out …]\n" + "x" * 500
        assert output == (cut if num_bytes == 1001 else "x" * num_bytes)


def test_a_local_workspace_keeps_our_environment_to_itself(
    mirror: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AKV_API_KEY", "s3cret")
    instance = instances.load(str(dataset))[0]
    with LocalWorkspace(instance, f"{mirror}/{{repo}}") as workspace:
        assert "s3cret" not in workspace.run("env", 20).output
        assert workspace.run("pwd", 20).output.strip() == str(workspace.root)
        assert workspace.run("git remote; git tag; git log --format=%s", 20).output == "base\n"
        assert workspace.patch() == Patch("")
        workspace.run("git checkout -q -b other; rm README; printf '\\0\\1' > data.bin; git add -A; git stash -q", 20)
        assert workspace.patch() == Patch("")
        workspace.run("rm -rf $PWD", 20)
        assert workspace.run("ls", 20).exit_status == 1
        assert workspace.patch().text.count("deleted file") == 4
    assert not workspace.root.exists()
    with pytest.raises(CommandFailed, match="git fetch"):
        LocalWorkspace(instance, f"{mirror}/nothing/{{repo}}")


LATIN = "print('\xe4\xf6')\n".encode("latin-1")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("latin.py", b"# coding: latin-1\n" + LATIN),
        ("data.bin", bytes(range(256))),
        ("nul.txt", b"a\0b\n"),
        ("crlf.txt", b"one\r\ntwo\r\n"),
        ("no_end.txt", b"one"),
        ("a name \xe4.txt", "\xe4\n".encode()),
    ],
)
def test_a_patch_that_went_through_json_gives_what_the_agent_left(
    mirror: Path, dataset: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    instance = instances.load(str(dataset))[0]
    with LocalWorkspace(instance, f"{mirror}/{{repo}}") as workspace:
        (workspace.root / name).write_bytes(content)
        with (workspace.root / "slugs.py").open("a") as file:
            file.write("# \xe4 comment\n")
        patch = workspace.patch()
    assert patch.problem is None
    assert "+# \xe4 comment\n" in patch.text  # what can be read is not hidden in a binary patch
    git(tmp_path, "clone", "-q", str(mirror / instance.repo), "fresh")
    git(tmp_path / "fresh", "checkout", "-q", "base")
    (tmp_path / "patch.diff").write_bytes(json.loads(json.dumps(patch.text)).encode())
    git(tmp_path / "fresh", "apply", str(tmp_path / "patch.diff"))
    assert (tmp_path / "fresh" / name).read_bytes() == content


def test_git_folders_that_the_agent_made_hide_nothing(mirror: Path, dataset: Path) -> None:
    instance = instances.load(str(dataset))[0]
    with LocalWorkspace(instance, f"{mirror}/{{repo}}") as workspace:
        workspace.run("mkdir -p a/b; cd a/b; git init -q; echo new > file.txt; git add -A; git commit -qm x", 20)
        workspace.run("mkdir empty; cd empty; git init -q; echo '# more' >> ../slugs.py", 20)
        patch = workspace.patch()
    assert patch.problem is None
    assert "+++ b/a/b/file.txt" in patch.text
    assert "+# more\n" in patch.text


FAKE_DOCKER = """#!/bin/bash
# A container is a folder. `exec` runs there what it is told; everything is written down.
echo "$*" >> "$FAKE_DOCKER/calls"
verb=$1; shift
case $verb in
  run) echo "pulling" >&2; echo c0ffee ;;
  rm) rm -rf "$FAKE_DOCKER/testbed" ;;
  exec) while [ "$1" != c0ffee ]; do shift; done; shift; cd "$FAKE_DOCKER/testbed" && exec "$@" ;;
esac
"""


def make_docker(folder: Path, mirror: Path, instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    git(folder, "clone", "-q", str(mirror / instance.repo), "testbed")
    git(folder / "testbed", "checkout", "-q", instance.base_commit)
    git(folder / "testbed", "config", "diff.noprefix", "true")  # an image's own configuration
    (folder / "docker").write_text(FAKE_DOCKER)
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(folder))


def test_a_docker_workspace_by_the_commands_it_gives(
    mirror: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instances.load(str(dataset))[0]
    make_docker(tmp_path, mirror, instance, monkeypatch)
    with DockerWorkspace(instance) as workspace:
        assert workspace.run("ls; exit 5", 20).exit_status == 5
        assert workspace.run("sleep 30", 1).exit_status is None
        workspace.run("echo '# more' >> slugs.py; git -c user.name=a -c user.email=b commit -qam more", 20)
        assert "+# more\n" in workspace.patch().text
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == (
        "run -d --rm --network none -w /testbed "
        "docker.io/swebench/sweb.eval.x86_64.acme_1776_slugs-1:latest sleep infinity"
    )
    assert "-w /testbed c0ffee timeout -s KILL 20 bash -c export PATH=" in "\n".join(calls)
    assert calls[-1] == "rm -f c0ffee"
    (tmp_path / "docker").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandFailed, match="docker"):
        DockerWorkspace(instance)


ODD_FILES = {
    "latin.py": "# -*- coding: latin-1 -*-\nword = 'caf\xe9'\n".encode("latin-1"),
    "sub/utf8.py": "word = 'café'\n".encode(),
    "data.bin": bytes(range(256)),
    "dos.txt": b"one\r\ntwo\rthree\n",
    "no_end.txt": b"one",
    "nul.txt": b"one\0two\n",
    "näme \n.txt": b"diff --git a/x b/x\n",
    ".gitattributes": b"*.dat text\n*.txt -diff\n",
    "marked.dat": b"\xff\n",
    "gone.dat": b"\xfe\n",
    "run.sh": b"echo\n",
}


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, Instance]:
    """A mirror of one repository with files that JSON cannot hold as they are, and its instance."""
    mirror = tmp_path / "odd"
    repo = mirror / "acme/odd"
    (repo / "sub").mkdir(parents=True)
    for name, content in ODD_FILES.items():
        (repo / name).write_bytes(content)
    git(repo, "init", "-q", "-b", "main")
    git(repo, "add", "-A")
    git(repo, "update-index", "--add", "--cacheinfo", f"160000,{'a' * 40},vendor/lib")  # a submodule
    git(repo, "commit", "-q", "-m", "base")
    return mirror, Instance("acme__odd-1", "acme/odd", git(repo, "rev-parse", "HEAD"), "?")


@pytest.fixture(params=["local", "docker"])
def workspace(
    request: pytest.FixtureRequest, odd: tuple[Path, Instance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    mirror, instance = odd
    if request.param == "docker":
        make_docker(tmp_path, mirror, instance, monkeypatch)
    with (
        DockerWorkspace(instance)
        if request.param == "docker"
        else LocalWorkspace(instance, str(mirror / "{repo}")) as it
    ):
        yield it


def applied(patch: Patch, odd: tuple[Path, Instance], folder: Path) -> Path:
    """A fresh clone with the patch in it, once that went through a prediction's JSON."""
    mirror, instance = odd
    git(folder, "clone", "-q", str(mirror / instance.repo), "applied")
    text = json.loads(json.dumps({"model_patch": patch.text}))["model_patch"]
    (folder / "it.patch").write_text(text, encoding="utf-8", newline="")
    git(folder / "applied", "apply", "--whitespace=nowarn", str(folder / "it.patch"))
    return folder / "applied"


def test_a_patch_of_files_in_any_encoding_applies(
    workspace: Workspace, odd: tuple[Path, Instance], tmp_path: Path
) -> None:
    changed = {name: b"new\n" + content + b"more\n" for name, content in ODD_FILES.items() if name != "gone.dat"}
    changed |= {"new/latin.txt": b"\xe4\xf6\n", "new.bin": b"\0\1"}
    for name, content in changed.items():
        quoted = "".join(f"\\x{byte:02x}" for byte in name.encode())
        told = "".join(f"\\x{byte:02x}" for byte in content)
        ran = workspace.run(f"n=$(printf '{quoted}.'); n=${{n%.}}; mkdir -p new; printf '{told}' > \"$n\"", 20)
        assert ran.exit_status == 0, ran
    workspace.run("rm gone.dat; chmod +x run.sh", 20)
    patch = workspace.patch()
    assert patch.problem is None
    folder = applied(patch, odd, tmp_path)
    assert {name: (folder / name).read_bytes() for name in changed} == changed
    assert not (folder / "gone.dat").exists()
    assert os.access(folder / "run.sh", os.X_OK)
    assert "+more\n" in patch.text.partition("a/sub/utf8.py")[2]  # read by people where it can be
    assert "+one\r\n" not in patch.text  # what is unchanged stays out
    assert patch.text.count("GIT binary patch") == 7


def test_what_no_patch_can_hold_is_said(workspace: Workspace, odd: tuple[Path, Instance], tmp_path: Path) -> None:
    workspace.run("echo '# more' >> sub/utf8.py; rm data.bin; mkfifo data.bin", 20)
    patch = workspace.patch()
    assert patch.problem is not None and "can only add regular files" in patch.problem
    assert "+# more\n" in patch.text
    workspace.run("rm data.bin; ln -s $'caf\\xe9' link", 20)
    patch = workspace.patch()
    assert patch.problem == "the patch applies, but does not give what the agent left"
    assert (applied(patch, odd, tmp_path) / "sub/utf8.py").read_text() == "word = 'café'\n# more\n"


def test_repositories_within_the_repository_are_part_of_the_patch(
    workspace: Workspace, odd: tuple[Path, Instance], tmp_path: Path
) -> None:
    commit = "git add -A && git -c user.name=a -c user.email=b commit -qm one"
    workspace.run("mkdir empty && cd empty && git init -q && echo 1 > one.txt", 20)
    workspace.run(f"mkdir -p sub/full && cd sub/full && git init -q && echo 2 > two.txt && {commit}", 20)
    workspace.run(f"mkdir -p vendor/lib && cd vendor/lib && git init -q && echo 3 > three.txt && {commit}", 20)
    patch = workspace.patch()
    assert patch.problem is None
    folder = applied(patch, odd, tmp_path)
    assert (folder / "empty/one.txt").read_text() == "1\n"
    assert (folder / "sub/full/two.txt").read_text() == "2\n"
    assert "Subproject commit" in patch.text  # a submodule stays one
    assert "three.txt" not in patch.text


def test_a_link_in_the_place_of_the_repository_is_not_followed(odd: tuple[Path, Instance], tmp_path: Path) -> None:
    mirror, instance = odd
    (tmp_path / "ours/odd").mkdir(parents=True)
    git(tmp_path / "ours/odd", "clone", "-q", str(mirror / instance.repo), "inner")
    with LocalWorkspace(instance, str(mirror / "{repo}")) as workspace:
        workspace.run(f"cd ../.. && rm -rf home && ln -s {tmp_path / 'ours'} home", 20)
        patch = workspace.patch()
    assert patch.text.count("deleted file") == len(ODD_FILES) + 1
    assert "new file" not in patch.text
    assert (tmp_path / "ours/odd/inner/.git").is_dir()
