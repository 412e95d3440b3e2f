"""The benchmark end to end, on real servers: what each strategy makes the server compute, and what a run leaves."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from akv_bench.chat import Endpoint
from akv_bench.lengths import Lengths
from akv_bench.likelihood import Likelihood, Scene, score
from akv_bench.main import Bench, Settings, main
from akv_bench.replay import Group, replay, salted
from akv_bench.strategies import PLACEHOLDER, STRATEGIES, Limits, OpenStrategy
from akv_bench.trajectories import Trajectory, read
from rich.console import Console

from akv_sdk import Client, InvalidRequest
from akv_sdk.policies.context import dropped_spans, subtract
from akv_server import streams
from tests.models import tiny_model
from tests.processes import hear_interrupts
from tests.rival import as_llama_cpp, rival_server
from tests.server import Server, load_tiny, serving_model
from tests.truth import Truth

JSON = dict[str, Any]
WINDOW = 3072
BUDGET = 1000
TEXT = ("append-only", "truncation", "summarisation", "clearing")


def recorded(folder: Path, name: str, num_steps: int) -> Path:
    """An agent with tool calls. A token of the tiny model is about a character: a step has 300, two thirds of them
    output."""
    messages: list[JSON] = [
        {"role": "system", "content": "You repair code."},
        {"role": "user", "content": f"Repair {name}."},
    ]
    for n in range(num_steps - 1):
        call = {"id": f"call-{n}", "type": "function", "function": {"name": "sh", "arguments": f'{{"f": {n}}}'}}
        output = " ".join(f"{name}{n}-{word}" for word in range(37))
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{n}", "content": output, "is_observation": True},
        ]
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"messages": [*messages, {"role": "assistant", "content": "Done."}]}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving_model(load_tiny(folder, max_position_embeddings=WINDOW), pool_tokens=16_384) as server:
        yield server


@pytest.fixture(scope="module")
def truth(server: Server, folder: Path) -> Truth:
    return Truth(folder / server.service.model)


def run(
    urls: dict[str, str],
    out: Path,
    path: Path,
    *,
    sessions: int = 1,
    strategies: Sequence[str] = tuple(STRATEGIES),
    budget: int = 0,
    scores: bool = False,
) -> tuple[JSON, str]:
    """A benchmark without its command: what it wrote, and what it printed."""
    settings = Settings((sessions,), tuple(strategies), Limits(budget, 4), None, scores, out, "akv bench")
    console = Console(record=True, file=io.StringIO(), width=500)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            endpoints = [await stack.enter_async_context(Endpoint(name, url)) for name, url in urls.items()]
            await Bench(settings, [read(path)], console, endpoints).run()

    asyncio.run(run())
    return json.loads((out / "bench.json").read_text()), console.export_text()


@pytest.fixture(scope="module")
def bench(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], JSON]]:
    """All strategies, one agent and then two at once, with a budget that half of a recording fills; the folder it wrote
    to, and the groups by strategy and sessions."""
    out = tmp_path_factory.mktemp("out")
    options = [str(recorded(out, "ab", 7)), "--url", server.url, "--out", str(out), "--max-tokens", "4"]
    prices = ["--price-input", "1", "--price-cached", "0.1", "--price-output", "2"]
    assert main([*options, *prices, "--sessions", "1,2", "--budget", str(BUDGET)]) == 0
    written = json.loads((out / "bench.json").read_text())
    return out, {(group["strategy"], group["sessions"]): group for group in written["groups"]}


def test_every_strategy_goes_through_all_steps(bench):
    _, groups = bench
    assert set(groups) == {(key, sessions) for key in STRATEGIES for sessions in (1, 2)}
    for (_, sessions), group in groups.items():
        assert (group["runs"], group["failed_runs"]) == (sessions, 0)
        assert group["completed_steps"] == group["num_steps"] == 7 * sessions
        for each in group["run_details"]:
            assert all(turn["ttft_s"] > 0 and len(turn["gaps_s"]) < 4 for turn in each["turns"])
            # How any system prompt opens is all that a run shares with one before it.
            assert each["turns"][0]["reused_tokens"] < 16


def test_akv_computes_every_token_once_and_keeps_to_the_budget(bench):
    _, groups = bench
    for key, sessions in (("akv-repos", 1), ("akv-repos", 2), ("akv-gap", 1), ("akv-gap", 2)):
        for each in groups[key, sessions]["run_details"]:
            turns = each["turns"]
            prompt = turns[-1]["stream_tokens"] - turns[-1]["generated_tokens"]
            assert sum(turn["prefilled_tokens"] for turn in turns) + turns[0]["reused_tokens"] == prompt
            assert prompt > BUDGET >= max(turn["visible_tokens"] for turn in turns)


def test_editing_the_text_computes_more_than_dropping_from_the_cache(bench):
    _, groups = bench
    for sessions in (1, 2):
        akv = groups["akv-repos", sessions]["prefilled_tokens"]
        assert groups["akv-gap", sessions]["prefilled_tokens"] == pytest.approx(akv, abs=20)
        assert groups["append-only", sessions]["prefilled_tokens"] == pytest.approx(akv, abs=20)
        for key in ("truncation", "summarisation", "clearing"):
            assert groups[key, sessions]["prefilled_tokens"] > akv + 200, key
        assert groups["truncation", sessions]["peak_visible_tokens"] <= BUDGET
        assert groups["clearing", sessions]["peak_visible_tokens"] <= BUDGET
        assert groups["append-only", sessions]["peak_visible_tokens"] > BUDGET
    # a window that slides on every turn never finds its prefix again; one that is cleared now and then does
    assert groups["truncation", 1]["prefilled_tokens"] > groups["clearing", 1]["prefilled_tokens"]


def test_only_a_summary_is_generated_besides_the_answers(bench):
    _, groups = bench
    for (key, _), group in groups.items():
        answers = 4 * group["completed_steps"]
        assert (group["generated_tokens"] > answers + 50) == (key == "summarisation"), key


def test_totals_are_the_same_in_all_files(bench):
    out, groups = bench
    rows = list(csv.DictReader((out / "bench.csv").open()))
    assert len(rows) == len(groups)
    for row in rows:
        group = groups[row["strategy"], int(row["sessions"])]
        turns = [turn for each in group["run_details"] for turn in each["turns"]]
        for name in ("prefilled_tokens", "reused_tokens", "generated_tokens"):
            assert int(row[name]) == group[name] == sum(turn[name] for turn in turns)
        micros = group["prefilled_tokens"] + 0.1 * group["reused_tokens"] + 2 * group["generated_tokens"]
        assert float(row["cost_per_run_usd"]) == pytest.approx(micros / group["runs"] / 1e6)
    text = (out / "bench.md").read_text()
    assert "| AKV + repos | 2 |" in text
    assert "| akv: Summarisation | akv: AKV + repos | 2 |" in text
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_agents_said_is_scored_once_for_each_strategy(bench):
    _, groups = bench
    scored = {key: group for (key, sessions), group in groups.items() if sessions == 1}
    assert len({group["scored_tokens"] for group in scored.values()}) == 1
    assert all(group["nats_per_token"] > 0 for group in scored.values())
    assert all(group["nats_per_token"] is None for (_, sessions), group in groups.items() if sessions == 2)


def replayed(url: str, key: str, trajectory: Trajectory, budget: int = BUDGET) -> tuple[Group, list[Scene]]:
    """One agent under one strategy, and what it was shown."""

    async def replay_one() -> Group:
        async with Endpoint("akv", url) as endpoint:
            await endpoint.connect()
            lengths = Lengths(endpoint.client)
            await lengths.learn(trajectory.messages)

            def make(job: Trajectory, number: int) -> OpenStrategy:
                return STRATEGIES[key](endpoint, lengths, Limits(budget, 4), job.observations, f"{key}-{number}")

            group = Group("akv", key, key, "", 1, len(trajectory.turns))
            await replay(group, [trajectory], make)
            return group

    group = asyncio.run(replay_one())
    return group, group.scenes[trajectory.name]


@pytest.mark.parametrize("key", ["append-only", "akv-repos", "akv-gap", "truncation"])
def test_likelihood_is_that_of_a_dense_model(server, truth, tmp_path, key):
    trajectory = salted(read(recorded(tmp_path, "ef", 4)), key)
    scenes = replayed(server.url, key, trajectory, 600)[1][-2:]
    nats, num_tokens = 0.0, 0
    with Client(server.url) as client:
        for scene in scenes:
            rendered = client.render([*scene.prompt, scene.answer], add_generation_prompt=False)
            logprobs = truth.logits(rendered.tokens, tuple(map(streams.op_of, scene.ops))).log_softmax(-1)
            span = rendered.spans[-1]
            for at in range(span.content_start, span.end):
                nats -= float(logprobs[at - 1, rendered.tokens[at]])
                num_tokens += 1

    async def scored() -> Likelihood:
        async with Endpoint("akv", server.url) as endpoint:
            await endpoint.connect()
            assert endpoint.client is not None
            return sum(filter(None, await score(endpoint.client, scenes)), Likelihood())

    found = asyncio.run(scored())
    assert any(scene.ops for scene in scenes) == key.startswith("akv")
    assert found.tokens == num_tokens
    assert found.nats == pytest.approx(nats, rel=1e-4)


def test_what_each_strategy_shows_the_model(server, tmp_path):
    trajectory = read(recorded(tmp_path, "gh", 7))
    head, whole = list(trajectory.messages[:2]), list(trajectory.messages[: trajectory.turns[-1]])
    shown = {key: replayed(server.url, key, salted(trajectory, key))[1][-1] for key in STRATEGIES}
    for key, scene in shown.items():
        assert scene.prompt[1] == head[1], key
        assert scene.prompt[-2:] == whole[-2:], key
        assert bool(scene.ops) == key.startswith("akv"), key
    for key in ("append-only", "akv-repos", "akv-gap"):
        assert shown[key].prompt[1:] == whole[1:]
    assert [op.repos for op in shown["akv-repos"].ops] == [True] * len(shown["akv-gap"].ops)
    assert not any(op.repos for op in shown["akv-gap"].ops)
    kept = len(shown["truncation"].prompt) - 2
    assert shown["truncation"].prompt[2:] == whole[-kept:] and shown["truncation"].prompt[2]["role"] == "assistant"
    summary = shown["summarisation"].prompt[2]
    assert summary["role"] == "user" and summary["content"].startswith("Summary of the work so far:")
    contents = [message["content"] for message in shown["clearing"].prompt]
    assert len(contents) == len(whole) and contents.count(PLACEHOLDER) >= 2
    results = [content for message, content in zip(whole, contents, strict=True) if message["role"] == "tool"]
    assert results[0] == PLACEHOLDER != results[-1]


def test_ops_hold_from_where_the_agent_had_spoken(server, tmp_path):
    """As with a session of the SDK: an observation is seen by the answer to it, and what goes is an observation."""
    trajectory = salted(read(recorded(tmp_path, "ij", 7)), "where")
    scene = replayed(server.url, "akv-repos", trajectory)[1][-1]
    with Client(server.url) as client:
        spans = client.render(scene.prompt).spans
    outputs = {(span.content_start, span.content_end): span.message for span in spans if span.role == "tool"}
    ends = {span.end: span.message for span in spans if span.role == "assistant"}
    assert scene.ops
    assert all((op.start, op.end) in outputs and ends[op.at] > outputs[op.start, op.end] for op in scene.ops)


@pytest.mark.parametrize("key", ["akv-repos", "truncation"])
def test_whole_messages_go_where_observations_are_not_enough(server, tmp_path, key):
    trajectory = salted(read(recorded(tmp_path, "yz", 9)), key)
    group, scenes = replayed(server.url, key, trajectory, 500)
    turns = group.runs[0].turns
    assert not group.failures and len(turns) == 9
    assert max(turn.visible_tokens for turn in turns) <= 500
    if key == "akv-repos":
        prompt = turns[-1].stream_tokens - turns[-1].generated_tokens
        assert group.prefilled_tokens + turns[0].reused_tokens == prompt
        with Client(server.url) as client:
            spans = client.render(scenes[-1].prompt).spans
        gone = dropped_spans(scenes[-1].ops)
        assert spans[2].role == "assistant" and subtract((spans[2].start, spans[2].end), gone) == []
        assert gone[0][0] == spans[1].end


def test_failures_are_reported_as_failures(server, tmp_path):
    """A recording beyond the window: without room made, or with the gaps left open, positions run out."""
    keys = ("append-only", "akv-gap", "akv-repos")
    path = recorded(tmp_path, "kl", 13)
    written, printed = run({"akv": server.url}, tmp_path, path, strategies=keys, budget=1700, scores=True)
    groups = {group["strategy"]: group for group in written["groups"]}
    for key in ("append-only", "akv-gap"):
        assert groups[key]["failure_codes"] == "context_length_exceeded"
        assert 0 < groups[key]["completed_steps"] < groups[key]["num_steps"] == 13
        assert "[context_length_exceeded]" in groups[key]["run_details"][0]["failure"]
    assert (groups["akv-repos"]["failed_runs"], groups["akv-repos"]["completed_steps"]) == (0, 13)
    # What is compared are the same words: those of the steps that all have gone through.
    assert len({(group["scored_steps"], group["scored_tokens"]) for group in groups.values()}) == 1
    common = min(group["completed_steps"] for group in groups.values())
    assert common - 1 <= groups["akv-repos"]["scored_steps"] <= common
    assert groups["akv-repos"]["run_details"][0]["turns"][-1]["stream_tokens"] > WINDOW
    assert f"Note: kl: beyond the model's window of {WINDOW:,} tokens on akv (up to " in printed
    assert f"kl failed at step {groups['akv-gap']['completed_steps'] + 1} of 13: messages: the stream" in printed


def test_rivals_run_the_strategies_over_text(server, tmp_path):
    path = recorded(tmp_path, "mn", 5)
    with rival_server() as rival:
        urls = {"akv": server.url, "other": rival.url}
        written, printed = run(urls, tmp_path, path, sessions=2, budget=700)
    assert "other is no AKV server: akv-gap, akv-repos left out" in printed
    groups = {(group["server"], group["strategy"]): group for group in written["groups"]}
    assert set(groups) == {("akv", key) for key in STRATEGIES} | {("other", key) for key in TEXT}
    for key in TEXT:
        assert groups["other", key]["completed_steps"] == 10
        assert groups["other", key]["prefilled_tokens"] > 0
        assert groups["other", key]["nats_per_token"] is None
    # Between groups a rival is made to forget the one before.
    shorts = [i for i, body in enumerate(rival.asked) if body["messages"][0]["content"].endswith("Say yes.")]
    assert len(shorts) == 2 * len(TEXT)
    # What is cut is the same on both, as its length is that on the AKV server.
    sent = [body["messages"] for body in rival.asked[shorts[2] + 2 : shorts[4]]]
    assert min(map(len, sent)) == 2 and max(map(len, sent)) < len(read(path).messages) - 1
    assert not any("akv" in body for body in rival.asked)


def test_llama_cpp_is_a_rival(server, tmp_path, capsys):
    """As the command has it. What does not fit its context is a failure of that strategy alone."""
    path, out = recorded(tmp_path, "lc", 9), tmp_path / "out"
    with rival_server() as rival:
        as_llama_cpp(rival, n_ctx=1500)
        options = ["--url", server.url, "--rival", f"llama.cpp={rival.url}/v1", "--sessions", "1", "--no-nll"]
        assert main([str(path), *options, "--budget", "900", "--max-tokens", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.split("Replaying")[1].count("llama.cpp is no AKV server: akv-gap, akv-repos left out") == 2
    assert "Note: lc: beyond the model's window of 1,500 tokens on llama.cpp (up to " in printed
    assert "tokens on akv (up to" not in printed
    written = json.loads((out / "bench.json").read_text())
    assert written["servers"]["llama.cpp"] == {"model": "m.gguf", "window_tokens": 1500}
    groups = {group["strategy"]: group for group in written["groups"] if group["server"] == "llama.cpp"}
    assert tuple(groups) == TEXT
    assert groups["append-only"]["failure_codes"] == "exceed_context_size_error"
    assert 0 < groups["append-only"]["completed_steps"] < 9
    for key in TEXT[1:]:
        assert (groups[key]["completed_steps"], groups[key]["failed_runs"]) == (9, 0), key
    for group in groups.values():
        (agent,) = group["run_details"]
        assert agent["turns"][0]["reused_tokens"] < agent["turns"][0]["prefilled_tokens"]
        assert agent["turns"][1]["reused_tokens"] >= agent["turns"][0]["prefilled_tokens"]
    # The append-only prompt is computed once.
    last = groups["append-only"]["run_details"][0]["turns"][-1]
    computed = last["stream_tokens"] - last["generated_tokens"]
    assert groups["append-only"]["prefilled_tokens"] == pytest.approx(computed, abs=60)


def test_a_server_that_is_not_akv_needs_a_budget_and_skips_akv(tmp_path):
    path = recorded(tmp_path, "op", 5)
    with rival_server() as rival:
        with pytest.raises(InvalidRequest, match="--budget: the server does not say its window"):
            run({"akv": rival.url}, tmp_path, path)
        written, _ = run({"akv": rival.url}, tmp_path, path, budget=700)
    groups = {group["strategy"]: group for group in written["groups"]}
    assert tuple(groups) == TEXT
    # counted by characters, at the rate that one request showed
    assert groups["truncation"]["peak_visible_tokens"] <= 1.1 * 700 < groups["append-only"]["peak_visible_tokens"]
    assert any("akv is no AKV server" in note for note in written["notes"])


def test_a_server_that_is_gone_ends_it_with_what_was_measured(tmp_path, capsys):
    path = recorded(tmp_path, "gone", 3)
    with rival_server() as rival:
        num_asked = 1 + 1 + 3  # to learn how long texts are, to begin a group, and for its steps
        rival.refuse = lambda body, attempt: None if attempt <= num_asked else (500, {}, {"error": "on fire"})
        options = ["--url", rival.url, "--budget", "700", "--sessions", "1", "--out", str(tmp_path)]
        assert main([str(path), *options]) == 1
    assert "ended early: on fire [http_500]" in " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [(group["strategy"], group["completed_steps"]) for group in written["groups"]] == [("append-only", 3)]


@pytest.mark.parametrize(
    ("budget", "what"),
    [(5000, f"--budget: 5000 tokens are more than the model's window of {WINDOW}"), (20, "--budget: qr begins with")],
)
def test_a_budget_that_cannot_be_is_refused_before_anything_runs(server, tmp_path, budget, what):
    with pytest.raises(InvalidRequest, match=what):
        run({"akv": server.url}, tmp_path, recorded(tmp_path, "qr", 2), budget=budget)
    assert not (tmp_path / "bench.json").exists()


def test_a_recording_within_the_budget_is_remarked_upon(server, tmp_path):
    written, printed = run({"akv": server.url}, tmp_path, recorded(tmp_path, "st", 3), strategies=["truncation"])
    assert f"no trajectory is longer than the budget of {WINDOW * 3 // 4:,} tokens" in printed
    assert "beyond the model's window" not in printed
    assert written["groups"][0]["nats_per_token"] is None


def test_a_stop_keeps_what_was_measured_and_takes_the_server_along(tmp_path):
    """The command as a user has it, with a server of its own."""
    path, model = recorded(tmp_path, "uv", 7), tiny_model(tmp_path)
    options = ["--model", str(model), "--sessions", "1,16", "--no-nll", "--out", str(tmp_path), "--limit-steps", "6"]
    command = [sys.executable, "-m", "akv_server.cli", "bench", str(path), *options]
    bench = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear_interrupts
    )
    written = tmp_path / "bench.json"
    while not (written.exists() and written.stat().st_size):
        assert bench.poll() is None
        time.sleep(0.02)
    (server,) = psutil.Process(bench.pid).children()
    bench.send_signal(signal.SIGTERM)
    printed, _ = bench.communicate(timeout=60)
    assert bench.returncode == 130, printed
    assert not server.is_running()
    whole = json.loads(written.read_text())
    assert "stopped before the end" in whole["notes"]
    assert whole["servers"]["akv"] == {"model": model.name, "window_tokens": 2048}
    assert whole["groups"][0]["completed_steps"] == whole["groups"][0]["num_steps"] == 6
    assert len(whole["groups"]) < 12
    assert "append-only" in (tmp_path / "bench.csv").read_text()
    assert f"pool     {16 * 8192} tokens" in (tmp_path / "server.log").read_text()


def test_nobody_reading_on_ends_it_quietly_with_what_was_measured(tmp_path):
    """As `akv bench … | head` is."""
    path = recorded(tmp_path, "wx", 3)
    with rival_server() as rival:
        options = ["--url", rival.url, "--budget", "700", "--sessions", "1", "--out", str(tmp_path)]
        command = [sys.executable, "-m", "akv_server.cli", "bench", str(path), *options]
        bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert bench.stdout is not None and bench.stderr is not None
        goes_on = threading.Event()
        rival.refuse = lambda body, attempt: None if attempt <= 6 or goes_on.wait(60) else (500, {}, {})
        while "Append-only x1: 3/3" not in bench.stdout.readline():
            assert bench.poll() is None
        bench.stdout.close()
        goes_on.set()
        assert (bench.wait(60), bench.stderr.read()) == (128 + signal.SIGPIPE, "")
        bench.stderr.close()
    groups = json.loads((tmp_path / "bench.json").read_text())["groups"]
    assert [(group["strategy"], group["completed_steps"]) for group in groups] == [
        ("append-only", 3),
        ("truncation", 3),
    ]


def test_nobody_reading_an_error_ends_it_quietly(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "akv_server.cli", "bench", str(tmp_path / "missing.json")]
    try:
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_the_benchmark_needs_neither_torch_nor_a_plot_to_begin():
    code = "import akv_bench.main, sys; print({'torch', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
