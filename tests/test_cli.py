"""The command line as a user meets it: a process, what it prints, how it ends."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from akv_server import cli
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("cli"))


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-m", "akv_server.cli", *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def start(running: subprocess.Popen[str]) -> tuple[str, str]:
    """What start-up printed, and the address in it."""
    printed = ""
    assert running.stdout
    for line in running.stdout:
        printed += line
        if found := re.search(r"serving +(http://\S+)/v1", line):
            return printed, found[1]
    pytest.fail(f"the server did not start:\n{printed}")


def run(*arguments: str) -> tuple[int, str]:
    with process(*arguments) as running:
        output, _ = running.communicate(timeout=120)
        return running.returncode, output


def test_serve_says_what_it_does_and_ends_cleanly(model: Path) -> None:
    options = ["--model", str(model), "--weights", "float32", "--port", "0", "--pool-tokens", "1000"]
    with process("serve", *options) as running:
        printed, url = start(running)
        assert re.search(rf"model +{model.name}, weights float32, \d+ CPU threads", printed)
        assert re.search(r"pool +1008 tokens, \d+ MB", printed)
        assert re.search(r"window +2048 positions", printed)
        body = {"prompt": "endless", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data:")
            running.send_signal(signal.SIGINT)
            output, _ = running.communicate(timeout=30)
        assert (running.returncode, output) == (0, "stopped\n")


def test_evicted_kv_outlives_the_server(model: Path, tmp_path: Path) -> None:
    options = ["--model", str(model), "--weights", "float32", "--port", "0", "--pool-tokens", "1000"]
    disk = ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-gb", "0.01"]
    stored = cached = 0  # the second server's
    for _ in range(2):
        with process("serve", *options, *disk) as running:
            printed, url = start(running)
            found = re.search(rf"evicted +{tmp_path / 'kv'}, up to 0.01 GB, (\d+) tokens", printed)
            assert found, printed
            stored = int(found[1])
            body = {"prompt": "a b c d e f g h " * 20, "max_tokens": 1}
            usage = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            running.send_signal(signal.SIGINT)
            assert running.communicate(timeout=30)[0] == "stopped\n"
    assert stored >= usage["prompt_tokens"] - 16
    assert cached >= usage["prompt_tokens"] - 16
    (tmp_path / "kv").write_text("my thesis")
    status, output = run("serve", *options, *disk)
    assert status == 1
    assert "no file of AKV's" in output


def test_keys_make_tenants_and_are_not_printed(model: Path) -> None:
    options = ["--model", str(model), "--weights", "float32", "--port", "0", "--host", "0.0.0.0"]
    with process("serve", *options, "--api-key", "ann:s3cret:1", "--api-key", "bob:other") as running:
        printed, url = start(running)
        assert re.search(r"tenants +ann, bob", printed)
        assert "s3cret" not in printed
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer s3cret:1"}).status_code == 200
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=30)
        assert (running.returncode, output) == (0, "stopped\n")


def test_a_host_beyond_loopback_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.com"):
        assert cli.main(["serve", "--host", host]) == 2
        assert "--api-key" in capsys.readouterr().err


def test_a_taken_port_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.main(["serve", "--port", str(port), "--model", "/nowhere"]) == 1
    error = capsys.readouterr().err
    assert str(port) in error
    assert "in use" in error


def test_a_model_that_is_not_there() -> None:
    code, output = run("serve", "--model", "./no such folder", "--port", "0")
    assert code == 1
    assert "akv: " in output
    assert "Traceback" not in output


def test_what_cannot_be_is_one_line(model: Path, tmp_path: Path) -> None:
    options = ["--weights", "float32", "--port", "0"]
    code, output = run("serve", "--model", str(model), *options, "--pool-tokens", str(2**31 - 1))
    assert (code, output.splitlines()[-1][:46]) == (1, "akv: there is no memory for a pool of 21474836")
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors.index.json").write_text("{}")
    code, output = run("serve", "--model", str(broken), *options)
    expected = "akv: broken cannot be read: model.safetensors.index.json has no weight_map that names files"
    assert (code, output.splitlines()[1:]) == (1, [expected])


@pytest.mark.parametrize(
    "options",
    [["--port", "65536"], ["--api-key", "nokey"], ["--api-key", ":key"], ["--pool-tokens", "0"], ["--weights", "int3"]],
)
def test_options_that_make_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *options])
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["serve", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    assert "akv 0." in capsys.readouterr().out
    assert "torch" not in _modules_after("import akv_server.cli as c; c._parser()")


def _modules_after(code: str) -> set[str]:
    """What is imported once `code` has run in a fresh interpreter."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
