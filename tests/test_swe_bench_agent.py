"""The SWE-bench agent: its parts alone, and whole runs over repositories made here, against a real AKV server.

Two kinds of model: a scripted one that solves the issues (the server is real, so spans, ops and counts are; only what
the model says is put in its place on the way back), and a tiny random one that solves nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from swe_bench_agent import commands, instances
from swe_bench_agent.agent import Config, Limits, Prices, parse_action, parse_policy
from swe_bench_agent.instances import Instance
from swe_bench_agent.main import Settings, main, run
from swe_bench_agent.records import Predictions
from swe_bench_agent.workspace import DockerWorkspace, LocalWorkspace, WorkspaceFailed

from akv_sdk import Client, DropRepeats, InTurn, LastNObservations, RollingDrop, Usage
from akv_server import loader
from tests.server import Server, load_tiny, serving_model

MAX_TEST_S = 60


# --- three instances: a repository with a fault, an issue, a test that fails until it is mended -----------------------


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


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories whose history has a commit before the base, and the fix after it."""
    folder = tmp_path_factory.mktemp("mirror")
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
    return folder


@pytest.fixture(scope="module")
def dataset(mirror: Path) -> Path:
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


@pytest.fixture(autouse=True)
def _python_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    loaded = load_tiny(tmp_path_factory.mktemp("swe"), max_position_embeddings=8192)
    with serving_model(loaded, pool_tokens=16_384) as running:
        yield running


class Scripted(httpx.BaseTransport):
    """A server whose model says what `answer` makes of the messages. All else is the real one's doing: it prefills what
    it is sent and generates nothing."""

    def __init__(self, answer: Callable[[list[dict[str, Any]]], str]) -> None:
        self._answer = answer
        self._network = httpx.HTTPTransport()
        self.bodies: list[dict[str, Any]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/chat/completions":
            return self._network.handle_request(request)
        body = json.loads(request.content)
        if not body.get("stream"):
            return self._network.handle_request(request)
        self.bodies.append(body)
        text = self._answer(body["messages"])
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        reply = self._network.handle_request(httpx.Request("POST", request.url, json={**asked, "max_tokens": 0}))
        content = json.loads(reply.read())
        if reply.status_code != 200:
            return httpx.Response(reply.status_code, json=content)
        usage = {**content["usage"], "completion_tokens": 10}
        chunks = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage, "akv": content["akv"]},
        ]
        lines = [*map(json.dumps, chunks), "[DONE]"]
        return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))


def by_script(messages: list[dict[str, Any]]) -> str:
    """Answer number n of the case whose issue this is."""
    (case,) = [case for case in CASES if case.issue in messages[1]["content"]]
    number = sum(message["role"] == "assistant" for message in messages)
    return f"Step {number}.\n\n```bash\n{case.script[number]}\n```"


def answering(*script: str) -> Callable[[list[dict[str, Any]]], str]:
    """These commands, whatever the issue; the last for ever."""

    def answer(messages: list[dict[str, Any]]) -> str:
        number = sum(message["role"] == "assistant" for message in messages)
        return f"```bash\n{script[min(number, len(script) - 1)]}\n```"

    return answer


@pytest.fixture
def scripted(server: Server) -> Iterator[Callable[[Callable[[list[dict[str, Any]]], str]], Client]]:
    clients = []

    def connect(answer: Callable[[list[dict[str, Any]]], str] = by_script) -> Client:
        clients.append(Client(server.url, transport=Scripted(answer)))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def settings(out: Path, policy: str = "last:2", **options: Any) -> Settings:
    return Settings(out=out, agent=Config(policy=parse_policy(policy), **options), policy_name=policy)


def trajectory(out: Path, case: Case) -> dict[str, Any]:
    return json.loads((out / "trajectories" / f"{case.instance_id}.json").read_text())


def predictions(out: Path) -> dict[str, str]:
    """Patches by instance, read as the official harness reads them: a list of objects with these three fields."""
    rows = json.loads((out / "preds.json").read_text())
    assert isinstance(rows, list)
    for row in rows:
        assert set(row) == {"instance_id", "model_name_or_path", "model_patch"}
        assert all(isinstance(value, str) for value in row.values())
    assert len({row["instance_id"] for row in rows}) == len(rows)
    return {row["instance_id"]: row["model_patch"] for row in rows}


def outcome(folder: Path, case: Case, mirror: Path, patch: str) -> dict[str, bool]:
    """Test files (of one test each) in a fresh checkout of the base with the patch and the failing test, and whether
    they pass."""
    git(folder.parent, "clone", "-q", str(mirror / case.repo), folder.name)
    git(folder, "checkout", "-q", "base")
    if patch:
        (folder.parent / "it.patch").write_text(patch)
        git(folder, "apply", "--whitespace=nowarn", str(folder.parent / "it.patch"))
    write(folder, {"test_issue.py": case.failing_test})
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_TEST_S,
        check=False,
    )
    return {name: word == "PASSED" for word, name in re.findall(r"^(PASSED|FAILED) (\w+\.py)::", ran.stdout, re.M)}


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_scripted_model_solves_all_three(
    scripted: Callable[..., Client], server: Server, mirror: Path, dataset: Path, tmp_path: Path
) -> None:
    asked = instances.load(str(dataset))
    assert run(scripted(), asked, settings(tmp_path), lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}")) == []
    patches = predictions(tmp_path)
    assert list(patches) == [case.instance_id for case in CASES]
    for number, case in enumerate(CASES):
        base = outcome(tmp_path / f"base-{number}", case, mirror, "")
        fixed = outcome(tmp_path / f"fixed-{number}", case, mirror, patches[case.instance_id])
        assert base.pop("test_issue.py") is False
        assert base and all(base.values())
        assert fixed and all(fixed.values())
        assert f"+++ b/{case.fixed[0]}" in patches[case.instance_id]
    assert "+spans that touch are merged" in patches[CASES[1].instance_id]  # a new file is part of it
    assert "run.log" not in patches[CASES[0].instance_id]  # an ignored one is not
    assert server.engine.stats()["running"] == 0
    with Client(server.url) as client:
        assert client.stats().sessions == 0
    server.engine.check()


def test_the_agent_sees_neither_the_fix_nor_the_reference(
    scripted: Callable[..., Client], mirror: Path, dataset: Path, tmp_path: Path
) -> None:
    asked = instances.load(str(dataset))[:1]
    client = scripted(answering(CASES[0].script[0], "cat slugs.py", "submit"))
    run(client, asked, settings(tmp_path), lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}"))
    said = json.dumps(trajectory(tmp_path, CASES[0]))
    assert "SECRET" not in said
    assert "THE FIX" not in said
    log = next(m["content"] for m in trajectory(tmp_path, CASES[0])["messages"] if m["role"] == "tool")
    assert " base" in log


def test_the_trajectory_has_spans_ops_and_timings(
    scripted: Callable[..., Client], server: Server, mirror: Path, dataset: Path, tmp_path: Path
) -> None:
    asked = [i for i in instances.load(str(dataset)) if i.repo == "acme/spans"]
    server.engine.evict_all()
    prices = Prices(input=3.0, cached=0.3, output=15.0)
    run(
        scripted(),
        asked,
        settings(tmp_path, "last:1", prices=prices),
        lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}"),
    )
    case = CASES[1]
    recorded = trajectory(tmp_path, case)
    info, steps = recorded["info"], recorded["steps"]
    assert (info["ending"], info["steps"], info["policy"]) == ("submitted", len(case.script), "last:1")
    assert info["model_patch"] == predictions(tmp_path)[case.instance_id]
    assert [step["command"] for step in steps] == list(case.script)
    # messages: system, task, and an answer and an observation for each command but the last
    roles = [message["role"] for message in recorded["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * (len(case.script) - 1), "assistant"]
    assert all(
        m["content"].startswith("<ephemeral_observation id=") for m in recorded["messages"] if m["role"] == "tool"
    )
    blocks = {block["id"]: block for span in recorded["spans"] for block in span["blocks"]}
    assert list(blocks) == [f"obs-{n}" for n in range(1, len(case.script))]
    # LastN counts what the server has seen: the one kept beside the newest
    assert [name for name, block in blocks.items() if block["visible"]] == ["obs-5", "obs-6"]
    dropped = [drop for step in steps for drop in step["dropped"]]
    assert [drop["block"] for drop in dropped] == ["obs-1", "obs-2", "obs-3", "obs-4"]
    drops = [op for op in recorded["ops"] if op["op"] == "drop"]
    assert [(op["start"], op["end"]) for op in drops] == [
        (blocks[f"obs-{n}"]["start"], blocks[f"obs-{n}"]["end"]) for n in range(1, 5)
    ]
    assert [op for step in steps for op in step["ops"]] == recorded["ops"]
    # nothing but what is new was computed, dropped or not
    assert sum(step["replayed_tokens"] for step in steps) == 0
    # (the opening of an answer lies behind the point where a drop holds, so it is computed anew with each)
    opening = steps[0]["prompt_tokens"] - steps[0]["visible_tokens"]
    num_openings = 1 + sum(bool(step["ops"]) for step in steps)
    assert info["prefilled_tokens"] == steps[-1]["stream_tokens"] + num_openings * opening
    assert steps[-1]["visible_tokens"] == steps[-1]["stream_tokens"] - sum(op["end"] - op["start"] for op in drops)
    assert steps[-1]["next_position"] < info["peak_visible_tokens"] <= max(step["next_position"] for step in steps)
    for step in steps:
        assert 0 < step["ttft_s"] <= step["generate_s"]
        assert step["command_s"] > 0 or step["command"] == "submit"
        uncached = step["prompt_tokens"] - step["cached_tokens"]
        assert step["cost_usd"] == pytest.approx((uncached * 3 + step["cached_tokens"] * 0.3 + 10 * 15) / 1e6)
    assert info["cost_usd"] == pytest.approx(sum(step["cost_usd"] for step in steps))


def test_an_interrupted_run_goes_on_where_it_was(
    scripted: Callable[..., Client], mirror: Path, dataset: Path, tmp_path: Path
) -> None:
    asked = instances.load(str(dataset))

    def until_stopped(messages: list[dict[str, Any]]) -> str:
        if CASES[1].issue in messages[1]["content"] and len(messages) > 5:
            raise KeyboardInterrupt
        return by_script(messages)

    seen: list[str] = []

    def prepare(instance: Instance) -> LocalWorkspace:
        seen.append(instance.instance_id)
        return LocalWorkspace(instance, f"{mirror}/{{repo}}")

    with pytest.raises(KeyboardInterrupt):
        run(scripted(until_stopped), asked, settings(tmp_path), prepare)
    first = predictions(tmp_path)
    assert list(first) == [CASES[0].instance_id]
    unfinished = trajectory(tmp_path, CASES[1])
    assert (unfinished["info"]["ending"], unfinished["info"]["steps"]) == (None, 2)
    seen.clear()
    assert run(scripted(), asked, settings(tmp_path), prepare) == []
    assert seen == [CASES[1].instance_id, CASES[2].instance_id]
    patches = predictions(tmp_path)
    assert list(patches) == [case.instance_id for case in CASES]
    assert patches[CASES[0].instance_id] == first[CASES[0].instance_id]
    assert trajectory(tmp_path, CASES[1])["info"]["ending"] == "submitted"
    seen.clear()
    run(scripted(), asked, settings(tmp_path), prepare)
    assert seen == []


def test_a_failed_instance_has_no_prediction_and_is_tried_again(
    scripted: Callable[..., Client], mirror: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = instances.load(str(dataset))[:2]
    client = scripted(answering("submit"))
    lost = Instance(asked[0].instance_id, asked[0].repo, "0" * 40, "?")
    assert run(client, [lost, asked[1]], settings(tmp_path), lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}")) == [
        lost.instance_id
    ]
    assert "failed: git fetch" in capsys.readouterr().out
    assert list(predictions(tmp_path)) == [asked[1].instance_id]
    assert run(client, asked, settings(tmp_path), lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}")) == []
    assert set(predictions(tmp_path)) == {i.instance_id for i in asked}


@pytest.mark.parametrize(
    ("options", "command", "ending", "num_steps"),
    [
        ({"limits": Limits(max_steps=3)}, "ls", "max_steps", 3),
        ({"limits": Limits(max_cost_usd=0.02), "prices": Prices(output=1000.0)}, "ls", "max_cost", 2),
        ({"limits": Limits(max_seconds=1.0)}, "sleep 30", "max_seconds", 1),
        ({"limits": Limits(max_seconds=0.0)}, "ls", "max_seconds", 0),
        ({"policy": None}, "seq 1 3000", "context_length_exceeded", None),
    ],
)
def test_limits_end_an_instance_with_what_it_has(
    scripted: Callable[..., Client],
    mirror: Path,
    dataset: Path,
    tmp_path: Path,
    options: dict[str, Any],
    command: str,
    ending: str,
    num_steps: int | None,
) -> None:
    asked = instances.load(str(dataset))[:1]
    client = scripted(answering(f"echo changed >> slugs.py; {command}"))
    began_s = time.monotonic()
    chosen = Settings(tmp_path, Config(**options), "none")
    assert run(client, asked, chosen, lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}")) == []
    assert time.monotonic() - began_s < 25
    info = trajectory(tmp_path, CASES[0])["info"]
    assert info["ending"] == ending
    assert info["steps"] == num_steps or num_steps is None
    patch = predictions(tmp_path)[asked[0].instance_id]
    assert patch.count("+changed\n") == info["steps"]


class Endless(httpx.SyncByteStream):
    """A model that never stops."""

    def __iter__(self) -> Iterator[bytes]:
        while True:
            time.sleep(0.02)
            yield b'data: {"choices": [{"index": 0, "delta": {"content": "on and "}}]}\n\n'


def test_the_time_limit_holds_while_the_model_writes(mirror: Path, dataset: Path, tmp_path: Path) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Endless()) if request.method == "POST" else httpx.Response(200, json={})

    asked = instances.load(str(dataset))[:1]
    chosen = settings(tmp_path, limits=Limits(max_seconds=0.5))
    with Client("http://akv.test", transport=httpx.MockTransport(handle)) as client:
        assert run(client, asked, chosen, lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}")) == []
    recorded = trajectory(tmp_path, CASES[0])
    assert (recorded["info"]["ending"], recorded["steps"]) == ("max_seconds", [])
    assert [message["role"] for message in recorded["messages"]] == ["system", "user"]
    assert predictions(tmp_path) == {asked[0].instance_id: ""}


def test_a_random_model_ends_at_its_limits_with_an_empty_prediction(
    server: Server, mirror: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--instances",
        str(dataset),
        "--out",
        str(tmp_path),
        "--url",
        server.url,
        "--repos",
        f"{mirror}/{{repo}}",
    ]
    limits = ["--max-steps", "3", "--max-tokens", "20", "--policy", "repeats+rolling:1000", "--only", "slugs|money"]
    assert main([*options, *limits, "--prices", "1", "0.1", "5", "--temperature", "1"]) == 0
    patches = predictions(tmp_path)
    assert patches == {CASES[0].instance_id: "", CASES[2].instance_id: ""}
    out = capsys.readouterr().out
    assert out.count("max_steps after 3 steps") == 2
    recorded = trajectory(tmp_path, CASES[0])
    assert recorded["info"]["model_name_or_path"].startswith("akv-tiny-llama")
    assert recorded["info"]["cost_usd"] > 0
    assert sum("was not one command" in message["content"] for message in recorded["messages"]) == 3
    assert main([*options, *limits]) == 0
    assert capsys.readouterr().out.count("done before") == 2


def test_the_default_model_ends_at_its_limits_with_a_valid_prediction(
    mirror: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--instances", str(dataset), "--out", str(tmp_path), "--repos", f"{mirror}/{{repo}}", "--only", "money"]
    with serving_model(loader.load("default", weights="int8")) as server:
        assert main([*options, "--url", server.url, "--max-steps", "2", "--max-tokens", "32"]) == 0
    assert "max_steps after 2 steps" in capsys.readouterr().out
    assert list(predictions(tmp_path)) == [CASES[2].instance_id]
    recorded = trajectory(tmp_path, CASES[2])
    assert len(recorded["steps"]) == 2
    assert len(recorded["spans"]) == len(recorded["messages"]) - 1 == 5


def test_a_server_that_is_not_there(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instances", str(dataset), "--out", str(tmp_path), "--url", "http://127.0.0.1:9"]) == 1
    assert "connection_failed" in capsys.readouterr().err
    assert not (tmp_path / "preds.json").exists()


def test_options_that_make_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--policy", "some:3"], ["--only", "("], ["--max-cost", "1"]):
        with pytest.raises(SystemExit) as ended:
            main(["--instances", "x.jsonl", "--out", str(tmp_path), *options])
        assert ended.value.code == 2
        assert options[0] in capsys.readouterr().err


# --- parts ------------------------------------------------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    whole = {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "f" * 40, "problem_statement": "It fails."}
    return {**whole, **changes}


def test_instances_come_from_lines_or_a_list(tmp_path: Path) -> None:
    rows = [row(), row(instance_id="a__b-2", problem_statement="two\u2028lines", patch="x")]
    (tmp_path / "i.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n")
    (tmp_path / "i.json").write_text(json.dumps(rows))
    for name in ("i.jsonl", "i.json"):
        found = instances.load(str(tmp_path / name))
        assert found == [
            Instance("a__b-1", "a/b", "f" * 40, "It fails."),
            Instance("a__b-2", "a/b", "f" * 40, "two\u2028lines"),
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {"instance_id": "../../etc/x"},
        {"instance_id": ".."},
        {"instance_id": None},
        {"repo": "a/../b"},
        {"repo": "--upload-pack=x"},
        {"base_commit": "main"},
        {"base_commit": "--help"},
        {"problem_statement": 3},
    ],
)
def test_a_field_that_could_do_harm_is_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "i.jsonl").write_text(json.dumps(row()) + "\n" + json.dumps(row(**changes)))
    with pytest.raises(ValueError, match=f"entry 2: {next(iter(changes))}"):
        instances.load(str(tmp_path / "i.jsonl"))


def test_instances_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "twice.json").write_text(json.dumps([row(), row()]))
    with pytest.raises(ValueError, match="stands there twice"):
        instances.load(str(tmp_path / "twice.json"))
    with pytest.raises(ValueError, match="no such file"):
        instances.load(str(tmp_path / "none.jsonl"))


def test_a_hub_id_is_read_with_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(RuntimeError, match="pip install datasets"):
        instances.load("SWE-bench/SWE-bench_Lite")
    fake = ModuleType("datasets")
    fake.load_dataset = lambda name, split: [row(instance_id=f"{split}-1", repo=name)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (found,) = instances.load("SWE-bench/SWE-bench_Lite", split="dev")
    assert (found.instance_id, found.repo) == ("dev-1", "SWE-bench/SWE-bench_Lite")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("Look.\n\n```bash\nls -l\n```", "ls -l"),
        ("```sh\ncat <<'END'\na\n\nb\nEND\n```\nand then more", "cat <<'END'\na\n\nb\nEND"),
        ("```bash\nsubmit\n```", "submit"),
        ("no block: `ls`", None),
        ("```bash\nls\n```\n```bash\npwd\n```", None),
        ("```python\nprint()\n```", None),
        ("```bash\n\n```", None),
        ("```bash\nls", None),
        ("", None),
    ],
)
def test_an_action_is_one_block(text: str, command: str | None) -> None:
    assert parse_action(text) == command


def test_policies_by_their_flag() -> None:
    assert parse_policy("none") is None
    assert parse_policy("last:3") == LastNObservations(3)
    assert parse_policy("rolling:8000") == RollingDrop(8000)
    assert parse_policy("repeats+rolling:80") == InTurn(DropRepeats(), RollingDrop(80))
    for text in ("", "last", "last:x", "last:-1", "none+repeats", "repeats:1"):
        with pytest.raises(ValueError, match="is no policy"):
            parse_policy(text)


def test_prices_are_for_a_million_tokens_and_cached_ones_apart() -> None:
    usage = Usage.model_validate(
        {
            "prompt_tokens": 1_000_000,
            "completion_tokens": 100_000,
            "total_tokens": 1_100_000,
            "prompt_tokens_details": {"cached_tokens": 600_000},
        }
    )
    assert Prices(input=3, cached=0.5, output=10).cost_usd(usage) == pytest.approx(0.4 * 3 + 0.6 * 0.5 + 0.1 * 10)


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
        assert workspace.patch() == ""
        workspace.run("git checkout -q -b other; rm README; printf '\\0\\1' > data.bin; git add -A; git stash -q", 20)
        assert workspace.patch() == ""
        workspace.run("rm -rf $PWD", 20)
        assert workspace.run("ls", 20).exit_status == 1
        assert workspace.patch().count("deleted file") == 4
    assert not workspace.root.exists()
    with pytest.raises(WorkspaceFailed, match="git fetch"):
        LocalWorkspace(instance, f"{mirror}/nothing/{{repo}}")


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


def test_a_docker_workspace_by_the_commands_it_gives(
    mirror: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instances.load(str(dataset))[0]
    git(tmp_path, "clone", "-q", str(mirror / instance.repo), "testbed")
    git(tmp_path / "testbed", "checkout", "-q", "base")
    (tmp_path / "docker").write_text(FAKE_DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path))
    with DockerWorkspace(instance) as workspace:
        assert workspace.run("ls; exit 5", 20).exit_status == 5
        assert workspace.run("sleep 30", 1).exit_status is None
        workspace.run("echo '# more' >> slugs.py; git -c user.name=a -c user.email=b commit -qam more", 20)
        assert "+# more\n" in workspace.patch()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == (
        "run -d --rm --network none -w /testbed "
        "docker.io/swebench/sweb.eval.x86_64.acme_1776_slugs-1:latest sleep infinity"
    )
    assert "-w /testbed c0ffee timeout -s KILL 20 bash -c export PATH=" in "\n".join(calls)
    assert calls[-1] == "rm -f c0ffee"
    (tmp_path / "docker").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkspaceFailed, match="docker"):
        DockerWorkspace(instance)


def test_predictions_are_whole_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "preds.json"
    for number in range(3):
        Predictions(path).add(f"i-{number}", "m", "+ä\n")
        assert len(json.loads(path.read_text())) == number + 1
    assert [p.name for p in tmp_path.iterdir()] == ["preds.json"]
    assert "i-1" in Predictions(path)
    assert "i-3" not in Predictions(path)
    path.write_text('{"i-1": 3}')
    with pytest.raises(ValueError, match="no list of predictions"):
        Predictions(path)
