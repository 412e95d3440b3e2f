"""The benchmark's parts without a model: files of trajectories, the clock, other servers' wires, report, options."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from akv_bench import report
from akv_bench.chat import MAX_ATTEMPTS, Endpoint, Reply
from akv_bench.likelihood import Likelihood
from akv_bench.main import main
from akv_bench.measure import Run, Stopwatch, Turn, percentile
from akv_bench.replay import Group, jobs_of, salted
from akv_bench.report import Prices
from akv_bench.trajectories import Trajectory, TrajectoryError, read
from rich.console import Console

from akv_sdk import ApiError, BadReply, ConnectionFailed, OutOfPages
from tests.rival import Rival, as_llama_cpp, rival_server

JSON = dict[str, Any]

# --- files ------------------------------------------------------------------------------------------------------------


def saved(folder: Path, data: Any, name: str = "agent.traj.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def test_every_shared_trajectory_is_read_as_its_marks_say(shared):
    for path in sorted((shared / "trajectories").glob("*.json")):
        raw = json.loads(path.read_text())["messages"]
        found = read(path)
        assert found.name == path.stem
        assert [m["role"] for m in found.messages] == [m["role"] for m in raw]
        assert [m["content"] for m in found.messages] == [m.get("content") or "" for m in raw]
        assert found.observations == {i for i, m in enumerate(raw) if m.get("is_observation")}
        assert all(found.messages[i]["role"] == "assistant" for i in found.turns)
        assert not any("is_" in key for message in found.messages for key in message)


def test_mini_swe_agent_writes_a_list_or_an_object(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "the task"},
        {"role": "assistant", "content": "ls", "extra": {"cost": 1}},
        {"role": "user", "content": "<output>a.py</output>", "extra": {"returncode": 0}},
        {"role": "assistant", "content": "echo COMPLETE"},
    ]
    old = read(saved(tmp_path, messages))
    new = read(
        saved(
            tmp_path,
            {
                "trajectory_format": "mini-swe-agent-1.1",
                "info": {},
                "messages": [*messages, {"role": "exit", "content": "diff", "extra": {"submission": "diff"}}],
            },
        )
    )
    assert old == new == Trajectory("agent", old.messages, 2, frozenset({3}))
    assert old.messages[2:4] == (
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "<output>a.py</output>"},
    )
    assert old.turns == [2, 4]


def test_arguments_are_text_as_servers_want_them(tmp_path):
    given = [{"x": "ä"}, '{"y":  1}', None]
    calls = [{**CALL, "function": {"name": "f", "arguments": arguments}} for arguments in given]
    found = read(saved(tmp_path, told(tool_calls=calls))).messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in found] == ['{"x": "ä"}', '{"y":  1}', "{}"]


def test_mini_swe_agent_with_tool_calls_observes_by_tool_messages(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    found = read(
        saved(
            tmp_path,
            {
                "messages": [
                    {"role": "user", "content": "the task"},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
                    {"role": "assistant", "content": "no call", "tool_calls": []},
                    {"role": "user", "content": "Every answer needs a call."},
                    {"role": "assistant", "content": "done"},
                ]
            },
        )
    )
    assert found.observations == {2}
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert "tool_calls" not in found.messages[3]


CALL = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
SWE_AGENT = [
    {"role": "system", "content": "s", "agent": "main", "message_type": "system_prompt"},
    {"role": "user", "content": "a demonstration", "is_demo": True, "message_type": "demonstration"},
    {"role": "assistant", "content": "its answer", "is_demo": True},
    {"role": "user", "content": [{"type": "text", "text": "the issue"}], "message_type": "observation"},
    {"role": "assistant", "content": "look", "action": "ls", "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "a.py"}, {"type": "image_url"}], "tool_call_ids": ["x"]},
    {"role": "assistant", "content": "submit", "tool_calls": None},
]


def test_swe_agent_history(tmp_path):
    found = read(saved(tmp_path, {"trajectory": [], "history": SWE_AGENT, "info": {}}, "marshmallow-1867.traj"))
    assert (found.name, found.num_head, found.turns) == ("marshmallow-1867", 4, [4, 6])
    assert found.observations == {5}
    assert found.messages[5] == {"role": "tool", "content": "a.py\n[image_url omitted]", "tool_call_id": "x"}
    assert found.messages[3]["content"] == "the issue"


def test_swe_agent_results_of_calls_may_be_the_users(tmp_path):
    history = [*SWE_AGENT[:5], {**SWE_AGENT[5], "role": "user"}, SWE_AGENT[6]]
    assert read(saved(tmp_path, {"history": history})).messages[5]["role"] == "tool"


def test_an_empty_history_gives_way_to_the_steps(tmp_path):
    steps = [{"messages": SWE_AGENT[:2], "response": "look", "observation": "a.py"}]
    found = read(saved(tmp_path, {"history": [], "trajectory": steps}))
    assert [m["content"] for m in found.messages] == ["s", "a demonstration", "look", "a.py"]


def test_swe_agent_steps_alone(tmp_path):
    steps = [
        {"query": SWE_AGENT[:2], "response": "look", "action": "ls", "observation": "a.py"},
        {"query": [], "response": "", "observation": "nothing was said"},
        {"response": "submit", "observation": ""},
    ]
    found = read(saved(tmp_path, {"trajectory": steps}, "x.traj"))
    assert [m["content"] for m in found.messages] == ["s", "a demonstration", "look", "a.py", "submit", ""]
    assert (found.turns, found.observations) == ([2, 4], {3, 5})


OPENING = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


def told(content: Any = "hi", **fields: Any) -> JSON:
    """A file of two messages, of which the last is an answer with these fields."""
    return {"messages": [OPENING, {"role": "assistant", "content": content, **fields}]}


def called(**fields: Any) -> JSON:
    return told(tool_calls=[{**CALL, **fields}])


def stepped(**fields: Any) -> JSON:
    return {"trajectory": [{"query": [OPENING], "response": "hi", "observation": "a.py", **fields}]}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("not even a list", "holds neither an object nor a list"),
        ({"steps": []}, "has none of `messages`, `history` and `trajectory`"),
        ({"messages": []}, "messages: has no message of an assistant"),
        ([OPENING], "the list: has no message of an assistant"),
        ([ANSWER, OPENING], "[0]: is an answer, and nothing stands before it"),
        ({"messages": [OPENING, {"role": "robot", "content": ""}]}, "messages[1].role: 'robot' is none of system,"),
        ({"messages": [OPENING, {"object": "response", "output": []}]}, "messages[1].role: None is none of"),
        ({"history": [OPENING, "hi"]}, "history[1]: is not an object"),
        ({"trajectory": ["step"]}, "trajectory[0]: is not an object"),
        ({"history": []}, "history: has no message of an assistant"),
        ({"history": {"0": OPENING}}, "history: is not a list"),
        ({"messages": "none", "history": [OPENING, ANSWER]}, "messages: is not a list"),
        ({"trajectory": [{"response": "hi"}]}, "trajectory[0].response: is an answer, and nothing stands"),
        (stepped(query="hello"), "trajectory[0].query: is not a list"),
        (stepped(query=["hello"]), "trajectory[0].query[0]: is not an object"),
        (stepped(query=None, messages={"role": "user"}), "trajectory[0].messages: is not a list"),
        (stepped(response=["hi"]), "trajectory[0].response: is not text"),
        (stepped(observation={"text": "a.py"}), "trajectory[0].observation: is not text"),
        (told(role=["user"]), "messages[1].role: is not text"),
        (told(7), "messages[1].content: is neither text nor"),
        (told(["hi"]), "messages[1].content[0]: is not an object"),
        (told([{"type": "text", "text": None}]), "messages[1].content[0].text: is not text"),
        (told([{"type": "text", "text": 7}]), "messages[1].content[0].text: is not text"),
        (told([{"type": "text"}]), "messages[1].content[0].text: is not text"),
        (told([{"type": ["image"]}]), "messages[1].content[0].type: is not text"),
        (told("half a pair: \ud83d"), "messages[1].content: no request can hold it: 'utf-8' codec"),
        (told(name=7), "messages[1].name: is not text"),
        (told(is_demo="no"), "messages[1].is_demo: is not true or false"),
        (told(is_observation=1), "messages[1].is_observation: is not true or false"),
        (told(tool_call_id=0), "messages[1].tool_call_id: is not text"),
        (told(tool_call_ids={"x": 1}), "messages[1].tool_call_ids: is not a list"),
        (told(tool_call_ids=[None]), "messages[1].tool_call_ids[0]: is not text"),
        (told(tool_calls={"id": "x"}), "messages[1].tool_calls: is not a list"),
        (told(tool_calls=["ls"]), "messages[1].tool_calls[0]: is not an object"),
        (called(id=7), "messages[1].tool_calls[0].id: is not text"),
        (called(function=None), "messages[1].tool_calls[0].function.name: is missing"),
        (called(function="ls"), "messages[1].tool_calls[0].function: is not an object"),
        (called(function={"name": None}), "messages[1].tool_calls[0].function.name: is missing"),
        (called(function={"name": 7}), "messages[1].tool_calls[0].function.name: is not text"),
        (called(function={"name": "f", "arguments": [1]}), "messages[1].tool_calls[0].function.arguments: is neither"),
        (called(function={"name": "f", "arguments": {"x": math.nan}}), "messages[1].tool_calls: no request can hold"),
    ],
)
def test_a_file_that_is_no_trajectory_is_named_with_the_place(tmp_path, data, what):
    path = saved(tmp_path, data)
    with pytest.raises(TrajectoryError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {what}")
    assert "\n" not in str(error.value)
    assert error.value.code == "invalid_trajectory"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is not JSON: Expecting value"),
        (b'{"messages": [', "is not JSON: Expecting value"),
        (b'["\xe4"]', "is not UTF-8: invalid continuation byte at byte 2"),
        (json.dumps([OPENING, ANSWER]).encode("utf-16"), "is not UTF-8: invalid start byte at byte 0"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[" + b"9" * 10_000 + b"]", "is not JSON: Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_json_is_named(tmp_path, data, what):
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    with pytest.raises(TrajectoryError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {what}")
    assert "\n" not in str(error.value)


def test_a_bad_file_ends_the_command_before_anything_starts(tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path, what in ((broken, "is not JSON"), (tmp_path / "missing.json", "No such file")):
        assert main([str(path), "--out", str(tmp_path / "out")]) == 1
        printed = capsys.readouterr().out.replace("\n", "")
        assert str(path) in printed and what in printed
    assert not (tmp_path / "out").exists()


def test_cut_and_tags():
    out, more = {"role": "tool", "content": "out"}, {"role": "user", "content": "more"}
    messages = (OPENING, ANSWER, out, ANSWER, more, ANSWER)
    whole = Trajectory("t", messages, 1, frozenset({2, 4}))
    assert whole.cut(2) == Trajectory("t", messages[:4], 1, frozenset({2}))
    assert whole.cut(99) == whole.cut() == whole
    tagged = whole.tagged()
    assert tagged[2]["content"] == '<ephemeral_observation id="obs-2">out</ephemeral_observation>'
    assert [tagged[i] for i in (0, 1, 3, 5)] == [OPENING, ANSWER, ANSWER, ANSWER]


def test_every_trajectory_is_replayed_and_every_session_has_one():
    a, b, c = (Trajectory(name, (OPENING, ANSWER), 1, frozenset()) for name in "abc")
    assert [job.name for job in jobs_of([a, b, c], 1)] == ["a", "b", "c"]
    assert [job.name for job in jobs_of([a, b, c], 4)] == ["a", "b", "c", "a"]
    first, second = (salted(a, salt).messages for salt in ("1", "2"))
    assert first[0]["content"] == "[1]\nhello" and first[0] != second[0]
    assert first[1:] == second[1:] == a.messages[1:]


# --- the clock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_values", [1, 2, 7, 40])
def test_percentile_is_that_of_the_standard_library(num_values):
    rng = random.Random(num_values)
    values = [rng.random() for _ in range(num_values)]
    if num_values > 1:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        assert [percentile(values, percent) for percent in (1, 50, 95, 99)] == pytest.approx(
            [cuts[percent - 1] for percent in (1, 50, 95, 99)]
        )
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


def test_percentile_of_nothing():
    assert math.isnan(percentile([], 50))


def test_stopwatch_counts_tokens_not_events(monkeypatch):
    clock = iter([10.0, 12.0, 12.5, 14.5])
    monkeypatch.setattr("akv_bench.measure.time.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    for num_tokens in (0, 1, 1, 2, 0):
        watch.saw(num_tokens)
    assert (watch.ttft_s, watch.gaps_s) == (2.0, [0.5, 1.0, 1.0])


# --- servers that are not AKV -----------------------------------------------------------------------------------------


async def ask(rival: Rival, *prompts: str, max_tokens: int = 3) -> tuple[list[Reply], Endpoint]:
    async with Endpoint("other", rival.url + "/v1") as endpoint:
        await endpoint.connect()
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [await endpoint.chat(messages, max_tokens=max_tokens) for messages in asked], endpoint


@pytest.mark.parametrize(
    "ends",
    [
        lambda prompt, reused: {"timings": {"cache_n": reused, "prompt_n": prompt - reused}},
        lambda prompt, reused: {"timings": {"prompt_n": prompt - reused}},
        lambda prompt, reused: {"tokens_cached": reused},
        lambda prompt, reused: {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": reused},
            }
        },
        lambda prompt, reused: {"usage": None, "timings": {"cache_n": reused, "prompt_n": prompt - reused}},
    ],
)
def test_what_was_reused_is_read_from_wherever_the_server_says_it(ends):
    with rival_server() as rival:
        rival.ends = ends
        replies, endpoint = asyncio.run(ask(rival, "hello", "hello, world"))
    assert [reply.prompt_tokens for reply in replies] == [11, 18]
    assert [(reply.prefilled_tokens, reply.reused_tokens) for reply in replies] == [(11, 0), (7, 11)]
    assert [(reply.text, reply.generated_tokens, reply.stream_tokens) for reply in replies] == [
        ("so it is", 3, 14),
        ("so it is", 3, 21),
    ]
    assert (endpoint.model, endpoint.client, endpoint.hides_reuse) == ("other-model", None, False)
    assert all("akv" not in body and "return_token_ids" not in body for body in rival.asked)


@pytest.mark.parametrize("is_old", [False, True])
def test_llama_cpp_says_its_window_what_it_reused_and_where_it_ends(is_old):
    with rival_server() as rival:
        as_llama_cpp(rival, 30, is_old=is_old)
        replies, endpoint = asyncio.run(ask(rival, "hello", "hello, world"))
        with pytest.raises(ApiError, match="exceeds the available context size") as error:
            asyncio.run(ask(rival, "hello, " * 30))
    assert [(reply.prompt_tokens, reply.prefilled_tokens, reply.reused_tokens) for reply in replies] == [
        (11, 11, 0),
        (18, 7, 11),
    ]
    assert (endpoint.model, endpoint.window_tokens, endpoint.client, endpoint.hides_reuse) == (
        "m.gguf",
        30,
        None,
        False,
    )
    assert error.value.code == "exceed_context_size_error"


def test_llama_cpp_without_props_has_no_window():
    with rival_server() as rival:
        as_llama_cpp(rival, 30)
        for rival.props in (None, {}, {"default_generation_settings": {"n_ctx": "many"}}):
            assert asyncio.run(ask(rival))[1].window_tokens is None


def test_a_server_that_is_not_ready_is_named():
    with rival_server() as rival:
        body = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        rival.not_ready = (503, {}, body)
        with pytest.raises(ApiError, match=f"other: GET {rival.url}/v1/models: Loading model") as error:
            asyncio.run(ask(rival))
    assert error.value.status == 503


def test_a_server_that_hides_what_it_reuses_is_noticed():
    with rival_server() as rival:
        rival.ends = lambda prompt, reused: {}
        replies, endpoint = asyncio.run(ask(rival, "hello", "hello, world"))
    assert [(reply.prefilled_tokens, reply.reused_tokens) for reply in replies] == [(11, 0), (18, 0)]
    assert endpoint.hides_reuse


def test_a_request_that_is_put_off_comes_again():
    with rival_server() as rival:
        body = {"error": {"code": "out_of_pages", "message": "full"}}
        rival.refuse = lambda asked, attempt: (503, {"Retry-After": "0"}, body) if attempt < MAX_ATTEMPTS else None
        replies, _ = asyncio.run(ask(rival, "hello"))
        assert (replies[0].text, len(rival.asked)) == ("so it is", MAX_ATTEMPTS)
        rival.refuse = lambda asked, attempt: (503, {"Retry-After": "0"}, body)
        with pytest.raises(OutOfPages, match="full") as error:
            asyncio.run(ask(rival, "hello"))
        assert len(rival.asked) == 2 * MAX_ATTEMPTS
    assert error.value.status == 503


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"error": {"code": 400, "type": "exceed_context_size_error", "message": "m"}}, "exceed_context_size_error"),
        ({"error": {"code": "context_length_exceeded", "message": "m"}}, "context_length_exceeded"),
        ({"error": "m"}, "http_400"),
        ({"detail": "m"}, "http_400"),
    ],
)
def test_errors_keep_the_word_that_the_server_has_for_them(body, code):
    with rival_server() as rival:
        rival.refuse = lambda asked, attempt: (400, {}, body)
        with pytest.raises(ApiError, match="m") as error:
            asyncio.run(ask(rival, "hello"))
    assert error.value.code == code


def test_what_is_no_server_of_this_api_is_an_error_in_words():
    with rival_server() as rival:
        rival.ends = lambda prompt, reused: {"usage": None}
        with pytest.raises(BadReply, match="usage"):
            asyncio.run(ask(rival, "hello"))
    with pytest.raises(ConnectionFailed, match="cannot connect"):
        asyncio.run(ask(rival, "hello"))


# --- the report -------------------------------------------------------------------------------------------------------


def group(key: str, name: str, ttft_s: float, *, sessions: int = 1, failed_at: int | None = None) -> Group:
    """Two runs of three steps."""
    found = Group("akv", key, name, f"how {name} does it", sessions, 6, wall_s=10.0)
    for number in range(2):
        run = Run(f"agent-{number}", "", 3)
        num_turns = 3 if failed_at is None else failed_at
        run.turns = [Turn(ttft_s * (n + 1), (0.02, 0.04), 100, 50, 500 + n, 600, 3) for n in range(num_turns)]
        if failed_at is not None:
            run.failure, run.failure_code = "full [context_length_exceeded]", "context_length_exceeded"
        found.runs.append(run)
        found.turns += run.turns
    return found


GROUPS = [
    group("append-only", "Append-only", 0.1, failed_at=1),
    group("truncation", "Truncation", 0.23),
    group("summarisation", "Summarisation", 0.59),
    group("akv-repos", "AKV + repos", 0.1),
]
PRICES = Prices(input=3.0, cached=0.3, output=15.0)


def test_figures_of_a_group():
    failed, found, *_ = report.figures(GROUPS, PRICES)
    assert (found["ttft_p50_s"], found["ttft_mean_s"]) == (pytest.approx(0.46), pytest.approx(0.46))
    assert found["inter_token_p95_s"] == pytest.approx(0.04)
    assert (found["prefilled_tokens"], found["reused_tokens"], found["generated_tokens"]) == (600, 300, 18)
    assert (found["tokens_per_s"], found["steps_per_s"]) == (61.8, 0.6)
    assert found["peak_visible_tokens"] == 502
    assert found["cost_per_run_usd"] == pytest.approx((300 * 3.0 + 150 * 0.3 + 9 * 15.0) / 1e6)
    assert report.figures(GROUPS, None)[1]["cost_per_run_usd"] is None
    assert (failed["failed_runs"], failed["failure_codes"]) == (2, "context_length_exceeded")
    assert (failed["completed_steps"], failed["num_steps"]) == (2, 6)


def test_ratios_are_of_strategies_that_went_through_all_steps():
    found = report.ratios(GROUPS)
    assert [(row["strategy"], row["against"], row["TTFT P50"], row["TTFT mean"]) for row in found] == [
        ("akv: Truncation", "akv: AKV + repos", "2.3x", "2.3x"),
        ("akv: Summarisation", "akv: AKV + repos", "5.9x", "5.9x"),
    ]
    assert found[0]["claimed"].startswith("2.3") and found[1]["claimed"].startswith("5.9")
    assert report.ratios([*GROUPS[:3], group("akv-repos", "AKV + repos", 0.1, sessions=4)]) == []


def test_ratios_say_which_server_is_held_against_which():
    """A rival may be an AKV server, too. What is claimed is claimed of strategies on one server."""
    theirs = [group("truncation", "Truncation", 0.4), group("akv-repos", "AKV + repos", 0.2)]
    for each in theirs:
        each.server = "other"
    found = report.ratios([GROUPS[1], GROUPS[3], *theirs])
    assert [(row["strategy"], row["against"], row["TTFT P50"], row["claimed"][:3]) for row in found] == [
        ("akv: Truncation", "akv: AKV + repos", "2.3x", "2.3"),
        ("other: Truncation", "akv: AKV + repos", "4.0x", ""),
        ("other: AKV + repos", "akv: AKV + repos", "2.0x", ""),
        ("akv: Truncation", "other: AKV + repos", "1.1x", ""),
        ("akv: AKV + repos", "other: AKV + repos", "0.5x", ""),
        ("other: Truncation", "other: AKV + repos", "2.0x", "2.3"),
    ]


def test_columns_that_nobody_could_fill_are_left_out():
    bare = report.rows(GROUPS, "akv", None)
    assert not {"$ per run", "NLL/token", "NLL steps"} & set(bare[0])
    scored = group("akv-repos", "AKV + repos", 0.1)
    scored.scores = {"agent-0": [Likelihood(3.0, 2)]}
    full = report.rows([*GROUPS, scored], "akv", PRICES)
    assert [row["NLL/token"] for row in full] == ["", "", "", "", "1.500"]
    assert all(row["$ per run"] for row in full)


def test_likelihoods_are_over_the_steps_that_all_have(tmp_path):
    """One stopped early, one has an answer without room; the easy words that follow are nobody's advantage."""
    hard, easy, other = Likelihood(4.0, 2), Likelihood(0.5, 5), Likelihood(6.0, 3)
    early, gapped, whole, failed, unscored = (group(key, key, 0.1) for key in ("a", "b", "c", "d", "e"))
    early.scores = {"x": [hard, hard], "y": [other]}
    gapped.scores = {"x": [hard, None, easy], "y": [other, easy]}
    whole.scores = {"x": [easy, easy, easy], "y": [other, easy]}
    failed.scores = {"x": [], "y": []}
    groups = [early, gapped, whole, failed, unscored]
    found = report.figures(groups, None)
    assert [each["scored_steps"] for each in found] == [2, 2, 2, None, None]
    assert [each["scored_tokens"] for each in found] == [5, 5, 8, None, None]
    assert [each["nats_per_token"] for each in found] == [2.0, 2.0, 6.5 / 8, None, None]
    assert [row["NLL steps"] for row in report.rows(groups, "akv", None)] == ["2", "2", "2", "", ""]
    report.write(tmp_path, groups, {"command": "", "notes": []}, "akv", None)
    in_json = json.loads((tmp_path / "bench.json").read_text())["groups"]
    in_csv = csv.DictReader((tmp_path / "bench.csv").open())
    assert [(a["scored_steps"], b["scored_steps"]) for a, b in zip(in_json, in_csv, strict=True)] == [
        *[(2, "2")] * 3,
        *[(None, "")] * 2,
    ]
    # Where no step is common to all, there is nothing to compare.
    failed.scores = {"x": [], "y": [None, easy]}
    assert [each["nats_per_token"] for each in report.figures(groups, None)] == [None] * 5
    assert [each["scored_steps"] for each in report.figures(groups, None)] == [0, 0, 0, 0, None]


def test_all_files_say_the_same(tmp_path):
    about = {"command": "akv bench x.json", "notes": ["a note"]}
    report.write(tmp_path, GROUPS, about, "akv", PRICES)
    whole = json.loads((tmp_path / "bench.json").read_text())
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    lines = (tmp_path / "bench.md").read_text().splitlines()
    assert len(whole["groups"]) == len(rows) == len(GROUPS)
    for in_json, in_csv, shown in zip(whole["groups"], rows, report.rows(GROUPS, "akv", PRICES), strict=True):
        assert {key: "" if in_json[key] is None else str(in_json[key]) for key in in_csv} == in_csv
        turns = [turn for run in in_json["run_details"] for turn in run["turns"]]
        for name in ("prefilled_tokens", "reused_tokens", "generated_tokens"):
            assert in_json[name] == sum(turn[name] for turn in turns)
        assert f"| {' | '.join(shown.values())} |" in lines
    assert lines[0] == "`akv bench x.json`" and "- a note" in lines
    report.write(tmp_path, [], about, "akv", None)
    assert json.loads((tmp_path / "bench.json").read_text())["groups"] == []


def shown(width: int, found: list[dict[str, str]], *, is_terminal: bool = True) -> str:
    console = Console(width=width, record=True, force_terminal=is_terminal, file=io.StringIO())
    report.show(console, found)
    return console.export_text()


@pytest.mark.parametrize("width", [60, 80, 100, 400])
def test_tables_are_whole_on_any_terminal(width):
    """One that is too narrow for a row has the table in parts, and each part says what its rows are of."""
    found = report.rows(GROUPS, "akv", PRICES)
    text = shown(width, found)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    blocks = text.split("\n\n")
    assert (len(blocks) == 1) == (width == 400)
    cells: list[list[str]] = [[] for _ in found]
    for block in blocks:
        rows = block.splitlines()[-len(found) :]
        for row, line, group in zip(cells, rows, GROUPS, strict=True):
            name, sessions, *rest = re.split("  +", line.strip())
            assert (name, sessions) == (group.name, "1")
            row += rest
    assert cells == [list(row.values())[report.NUM_NAMES :] for row in found]


def test_tables_are_in_one_piece_where_no_terminal_is_too_narrow():
    found = report.rows(GROUPS, "akv", PRICES)
    assert shown(80, found, is_terminal=False) == shown(400, found)


def test_a_terminal_too_narrow_for_any_table_loses_nothing():
    found = report.ratios(GROUPS)
    text = shown(20, found)
    assert "…" not in text
    assert text.count("akv: Summarisation") == text.count("akv: AKV + repos") / len(found) == 5


def test_plot_of_several_numbers_of_sessions(tmp_path):
    many = [*GROUPS, *(group(each.key, each.name, 0.3, sessions=4) for each in GROUPS)]
    report.plot(tmp_path / "bench.png", many, "akv", {"the model's window": 800})
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["x.json", "--sessions", "1,0"],
        ["x.json", "--strategies", "akv,truncation"],
        ["x.json", "--rival", "llama"],
        ["x.json", "--rival", "akv=http://127.0.0.1:1"],
        ["x.json", "--rival", "a=http://127.0.0.1:1", "--rival", "a=http://127.0.0.1:2"],
        ["x.json", "--price-input", "-1"],
        ["x.json", "--price-cached", "1"],
        ["x.json", "--budget", "many"],
    ],
)
def test_options_that_make_no_sense(options, capsys):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    assert "usage: akv bench" in capsys.readouterr().err


def test_a_server_that_is_not_there(tmp_path, capsys):
    path = saved(tmp_path, [OPENING, ANSWER])
    assert main([str(path), "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out")]) == 1
    assert "cannot connect" in capsys.readouterr().out.replace("\n", " ")
