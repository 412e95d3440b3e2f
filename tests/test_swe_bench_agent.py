"""Whole runs of the SWE-bench agent over repositories made here, against a real AKV server.

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
from pathlib import Path
from typing import Any

import httpx
import pytest
from swe_bench_agent import agent, instances
from swe_bench_agent.agent import Config, Limits, Prices, parse_policy
from swe_bench_agent.instances import Instance
from swe_bench_agent.main import Settings, main, run
from swe_bench_agent.workspace import LocalWorkspace

from akv_sdk import Client
from akv_server import loader
from tests.server import Server, load_tiny, serving_model
from tests.swe_bench import CASES, Case, git, make_mirror, write, write_dataset

MAX_TEST_S = 60


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    make_mirror(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(mirror: Path) -> Path:
    return write_dataset(mirror)


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

    def __init__(self, answer: Callable[[list[dict[str, Any]]], str], finish_reason: str) -> None:
        self._answer, self._finish_reason = answer, finish_reason
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
            {"choices": [{"index": 0, "delta": {}, "finish_reason": self._finish_reason}]},
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

    def connect(answer: Callable[[list[dict[str, Any]]], str] = by_script, finish_reason: str = "stop") -> Client:
        clients.append(Client(server.url, transport=Scripted(answer, finish_reason)))
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


def test_an_answer_that_was_cut_off_is_not_run(
    scripted: Callable[..., Client], mirror: Path, dataset: Path, tmp_path: Path
) -> None:
    asked = instances.load(str(dataset))[:1]
    client = scripted(answering("echo changed >> slugs.py"), "length")
    chosen = settings(tmp_path, limits=Limits(max_steps=1))
    assert run(client, asked, chosen, lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}")) == []
    assert predictions(tmp_path) == {asked[0].instance_id: ""}
    recorded = trajectory(tmp_path, CASES[0])
    assert recorded["steps"][0]["command"] is None
    assert "was cut off" in recorded["messages"][-1]["content"]


def test_what_a_patch_lacks_is_said_and_recorded(
    scripted: Callable[..., Client], mirror: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = instances.load(str(dataset))[:1]
    client = scripted(answering("echo '# more' >> slugs.py; rm README; mkfifo README", "submit"))
    assert run(client, asked, settings(tmp_path), lambda i: LocalWorkspace(i, f"{mirror}/{{repo}}")) == []
    assert "+# more" in predictions(tmp_path)[asked[0].instance_id]
    problem = trajectory(tmp_path, CASES[0])["info"]["patch_problem"]
    assert "README: can only add regular files" in problem
    assert problem in capsys.readouterr().out


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
    no_command = (agent.CUT_OFF, agent.FORMAT_ERROR)
    assert sum(message["content"] in no_command for message in recorded["messages"]) == 3
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
