"""What users of other context managers suffer from, by JSON alone: a plain openai client and a real server with a tiny
model, one section for each pain. test_policy_pains.py has the same for the policies of the SDK and its sessions."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.json_alone import JSON, SYSTEM, TASK, calling, chat, clearing, content, gone, refusal, result, talk
from tests.server import Server

LAST_3 = {"edits": [{"type": "LastNObservations", "n": 3}]}


def answer(reply: Any) -> JSON:
    """What the model wrote, as the next request sends it back."""
    return dict(reply.choices[0].message.model_dump(exclude_none=True))


# --- (a) clearing re-fires on every turn ------------------------------------------------------------------------------


def test_a_policy_fires_once_per_block_however_often_the_history_is_sent(api: OpenAI, name: str) -> None:
    """(a): the same edit on every request. Each result goes once, and only what is new is ever prefilled."""
    messages = [SYSTEM, TASK]
    known, cleared = 0, 0
    for i in range(6):
        messages += [calling(i), result(i)]
        reply = chat(api, messages, akv={"session": name}, context_management=clearing(keep=2), cache_salt=name)
        akv = reply.akv
        new = akv["stream_tokens"] - reply.usage.completion_tokens - known
        assert (akv["prefilled_tokens"], akv["replayed_tokens"]) == (new, 0)
        assert akv["warnings"] == []
        assert sum(edit["cleared_tool_uses"] for edit in akv["applied_edits"]) == (1 if i >= 2 else 0)
        cleared += sum(edit["cleared_input_tokens"] for edit in akv["applied_edits"])
        assert akv["dropped_tokens"] == cleared
        known = akv["stream_tokens"]
        messages.append(answer(reply))
    assert gone(akv) == [content(akv, i) for i in (3, 6, 9, 12)]
    # Sent again whole, and with another question: nothing goes twice.
    for more in ({"role": "user", "content": "and now?"}, {"role": "user", "content": "and then?"}):
        messages.append(more)
        reply = chat(api, messages, akv={"session": name}, context_management=clearing(keep=2), cache_salt=name)
        assert reply.akv["applied_edits"] == []
        assert reply.akv["replayed_tokens"] == 0
        assert reply.akv["prefilled_tokens"] < 40
        assert gone(reply.akv) == gone(akv)
        messages.append(answer(reply))


# --- (b), (c) trimming orphans a tool message, at any cut -------------------------------------------------------------


def real_calls(shared: Path, name: str) -> list[JSON]:
    """A real trajectory with its calls and ids, its texts cut short."""
    messages = json.loads((shared / "trajectories" / f"{name}.json").read_text())["messages"]
    kept = ("role", "content", "tool_calls", "tool_call_id")
    found = [{key: message[key] for key in kept if message.get(key) is not None} for message in messages]
    for message in found:
        message["content"] = (message.get("content") or "(empty)")[:12]
        for call in message.get("tool_calls") or []:
            call["function"] = {"name": call["function"]["name"][:12], "arguments": '{"n": 12345}'}
    return found


@pytest.mark.parametrize("trajectory", ["coding-sweagent-marshmallow1867-fc", "tools-taubench-airline-t3"])
def test_no_cut_parts_a_result_from_its_call(api: OpenAI, shared: Path, name: str, trajectory: str) -> None:
    """(b), (c): at every cut, what a call said goes with its result or not at all, and no message goes. (All
    trajectories: test_policy_pains.py.)"""
    messages = real_calls(shared, trajectory)
    results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
    assert len(results) >= 9
    for keep in range(len(results) + 1):
        management = clearing(keep=keep, clear_tool_inputs=True)
        akv = chat(api, messages, max_tokens=0, cache_salt=name, context_management=management).akv
        assert [span["role"] for span in akv["spans"]] == [message["role"] for message in messages]
        cleared = results[: len(results) - keep]
        spans = set(gone(akv))
        assert {i for i in results if content(akv, i) in spans} == set(cleared)
        assert sum(edit["cleared_tool_uses"] for edit in akv["applied_edits"]) == len(cleared)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                caller = {block["tool_call_id"]: block for block in akv["spans"][i]["blocks"]}
                following = next((n for n in range(i + 1, len(messages)) if messages[n]["role"] != "tool"), None)
                answered = {messages[n]["tool_call_id"]: n for n in range(i + 1, following or len(messages))}
                for call in message.get("tool_calls") or []:
                    assert caller[call["id"]]["visible"] == (answered.get(call["id"]) not in cleared)
            elif message["role"] in ("system", "user"):
                assert content(akv, i) not in spans


# --- (d) one bad pair poisons all later runs --------------------------------------------------------------------------


def test_calls_that_nobody_answered_poison_nothing(api: OpenAI, name: str) -> None:
    """(d): unanswered calls, orphaned results and repeated ids. Only whole pairs go, and the run goes on."""
    messages = [
        SYSTEM,
        TASK,
        calling(0),
        calling(0),
        result(0),
        result(9),
        calling(1),
        result(1),
        calling(2),
        result(2),
    ]
    management = clearing(keep=1, clear_tool_inputs=True)
    akv = chat(api, messages, max_tokens=0, akv={"session": name}, context_management=management).akv
    inputs = {s["message"]: (b["start"], b["end"]) for s in akv["spans"] for b in s["blocks"]}
    assert sorted(inputs) == [2, 3, 6, 8]
    assert sorted(gone(akv)) == sorted([inputs[3], content(akv, 4), inputs[6], content(akv, 7)])
    messages += [{"role": "user", "content": "go on"}]
    after = chat(api, messages, akv={"session": name}, context_management=management).akv
    assert after["warnings"] == []
    assert gone(after) == gone(akv)


# --- (e) compaction between a call and its output, or during a stream -------------------------------------------------


def test_a_call_that_waits_for_its_output_stays_whole(api: OpenAI, name: str) -> None:
    """(e): an edit between a call and its output lets neither go; the output finds its call."""
    management = clearing(keep=0, clear_tool_inputs=True)
    messages = [*talk(2), calling(2)]
    waiting = chat(api, messages, max_tokens=0, akv={"session": name}, context_management=management).akv
    (block,) = waiting["spans"][6]["blocks"]
    assert block["visible"] and waiting["applied_edits"][0]["cleared_tool_uses"] == 2
    messages.append(result(2))
    akv = chat(api, messages, max_tokens=0, akv={"session": name}, context_management=management).akv
    assert akv["warnings"] == []
    assert {content(akv, 7), (block["start"], block["end"])} <= set(gone(akv))
    assert akv["prefilled_tokens"] <= akv["stream_tokens"] - waiting["stream_tokens"] + 20


def test_a_drop_during_a_stream_holds_from_its_end(client: httpx.Client, name: str) -> None:
    """(e): the op waits for the answer, which is whole."""
    body = {"messages": talk(2), "akv": {"session": name}, "max_tokens": 0}
    akv = client.post("/v1/chat/completions", json=body).json()["akv"]
    more = {"max_tokens": 40, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    drop = {"session": name, "spans": [list(content(akv, 3))]}
    with ThreadPoolExecutor(1) as pool, client.stream("POST", "/v1/chat/completions", json=body | more) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        dropped = pool.submit(client.post, "/v1/cache/drop", json=drop)
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        (op,) = dropped.result().json()["applied"]
    final = chunks[-1]["akv"]
    assert (final["ops"], chunks[-1]["usage"]["completion_tokens"]) == ([], 40)
    assert op["at"] == final["stream_tokens"]


# --- (f) after a prune the cached tokens fall to 0 --------------------------------------------------------------------


def test_after_a_drop_the_rest_still_comes_from_the_cache(api: OpenAI, client: httpx.Client, name: str) -> None:
    """(f): the cached tokens are all that is left of the prompt, not 0."""
    messages = talk(4)
    first = chat(api, messages, akv={"session": name})
    messages += [answer(first), {"role": "user", "content": "go on"}]
    reply = chat(api, messages, akv={"session": name}, context_management=clearing(keep=1))
    num_cleared = reply.akv["applied_edits"][0]["cleared_input_tokens"]
    details = reply.usage.prompt_tokens_details
    assert details.cached_tokens == first.akv["stream_tokens"] - num_cleared
    assert details.cached_tokens + reply.akv["prefilled_tokens"] == reply.usage.prompt_tokens
    # By the ops route, too, and by messages and spans alone.
    start, end = content(reply.akv, 9)
    dropped = client.post("/v1/cache/drop", json={"session": name, "spans": [[start, end]]}).json()
    assert dropped["changed"] == end - start
    messages += [answer(reply), {"role": "user", "content": "and?"}]
    last = chat(api, messages, akv={"session": name}, context_management=clearing(keep=1))
    assert last.akv["applied_edits"] == []
    assert last.usage.prompt_tokens_details.cached_tokens == dropped["visible_tokens"]


# --- (g) one message moves between requests ---------------------------------------------------------------------------


def test_a_block_that_moves_costs_itself_or_is_named(api: OpenAI, name: str) -> None:
    """(g): a part that moves between requests. At the end it alone is computed anew; elsewhere it is named."""
    memory: JSON = {"role": "user", "content": "what I remember: the tests need a database " * 2}
    head = talk(2)
    first = chat(api, [*head, memory], max_tokens=0, akv={"session": name})
    longer = [*head, calling(2), result(2)]
    second = chat(api, [*longer, memory], akv={"session": name})
    assert second.akv["warnings"] == [
        f"stream_diverged: messages[6] differs from the session's, which goes on from token {_common(first, second)}"
    ]
    assert second.akv["prefilled_tokens"] <= second.akv["stream_tokens"] - first.akv["spans"][6]["start"]
    # At the end of every request, behind all that stays, the part costs itself and what is new.
    longest = [*longer, memory, answer(second), memory]
    third = chat(api, longest, akv={"session": name})
    assert third.akv["warnings"] == []
    assert third.akv["prefilled_tokens"] <= third.akv["spans"][10]["end"] - third.akv["spans"][10]["start"] + 20


def _common(first: Any, second: Any) -> int:
    """Where the seventh message parts: both open one, then come different roles."""
    start = first.akv["spans"][6]["start"]
    assert second.akv["spans"][6]["start"] == start
    return int(start) + 1


# --- (h) clearing by count drives re-read loops -----------------------------------------------------------------------


@pytest.mark.parametrize("management", [clearing(keep=3), LAST_3], ids=["Anthropic", "SWE-agent"])
def test_files_in_use_are_not_read_for_ever(api: OpenAI, name: str, management: JSON) -> None:
    """(h): an agent goes round four files with room for three, and reads again what the reply says is not visible."""
    files = {path: f"contents of {path}: " + "pass " * 9 for path in ("a.py", "b.py", "c.py", "d.py")}
    messages, spans = [SYSTEM, TASK], []
    reads: Counter[str] = Counter()
    for turn in range(16):
        path = sorted(files)[turn % 4]
        blocks = {b["id"]: b["visible"] for span in spans for b in span["blocks"] if b["kind"] == "observation"}
        if not any(blocks.get(f"{path}-{n}") for n in range(reads[path])):
            text = f'<ephemeral_observation id="{path}-{reads[path]}">{files[path]}</ephemeral_observation>'
            reads[path] += 1
            messages += [calling(turn, path=path), result(turn, text)]
        else:
            messages.append({"role": "user", "content": f"{path} is above"})
        reply = chat(api, messages, akv={"session": name}, context_management=management, max_tokens=1)
        messages.append(answer(reply))
        spans = reply.akv["spans"]
        assert (reply.akv["replayed_tokens"], reply.akv["warnings"]) == (0, [])
    assert dict(reads) == {"a.py": 2, "b.py": 2, "c.py": 2, "d.py": 2}, "once more, and then it stays"


def test_what_is_read_again_is_not_cleared_again(api: OpenAI, name: str) -> None:
    """(i), and (h): a file cleared by count and read anew stays, and the reply's spans say what the model sees."""
    text = "def test(): assert 1 + 1 == 2 " * 3
    management = clearing(keep=1)
    messages = [SYSTEM, TASK, calling(0, path="a.py"), result(0, text), calling(1), result(1)]
    first = chat(api, messages, akv={"session": name}, context_management=management)
    assert gone(first.akv) == [content(first.akv, 3)]
    messages += [answer(first), calling(2, path="a.py"), result(2, text)]
    for i in range(3, 8):
        messages += [calling(i), result(i)]
        reply = chat(api, messages, akv={"session": name}, context_management=management)
        messages.append(answer(reply))
        assert content(reply.akv, 8) not in gone(reply.akv), "read again after it went: it is in use"
        # A cache of reads asks this before it says "unchanged, see above".
        seen = {content(reply.akv, m) for m in (3, 8)} - set(gone(reply.akv))
        assert seen == {content(reply.akv, 8)}


# --- (i) "unchanged, see above" after the text above was dropped ------------------------------------------------------


def test_a_cache_of_reads_can_tell_whether_the_text_above_is_still_there(
    api: OpenAI, client: httpx.Client, name: str
) -> None:
    """(i): "unchanged, see above" holds while the reply's spans show it, and again once it was restored for nothing."""
    text = '<ephemeral_observation id="a.py">def test(): assert 1 + 1 == 2</ephemeral_observation>'
    messages = [SYSTEM, TASK, calling(0, path="a.py"), result(0, text)]

    def sees(reply: Any) -> bool:
        (block,) = (block for block in reply.akv["spans"][3]["blocks"] if block["id"] == "a.py")
        return bool(block["visible"])

    reply = chat(api, messages, akv={"session": name}, context_management=LAST_3)
    assert sees(reply)
    for i in range(1, 4):
        messages += [answer(reply), calling(i), result(i, text.replace("a.py", f"b{i}.py"))]
        reply = chat(api, messages, akv={"session": name}, context_management=LAST_3)
        assert sees(reply) == (i < 3)
    restored = client.post("/v1/cache/restore", json={"session": name, "blocks": ["a.py"]}).json()
    assert restored["changed"] > 0
    messages += [answer(reply), {"role": "user", "content": "unchanged, see above"}]
    reply = chat(api, messages, akv={"session": name}, context_management=LAST_3)
    assert sees(reply), "what was asked back stays"
    assert reply.akv["dropped_tokens"] == reply.akv["replayed_tokens"] == 0
    assert reply.akv["prefilled_tokens"] < 40


# --- (j) one observation larger than the whole budget -----------------------------------------------------------------


def test_one_result_larger_than_everything_is_one_drop_or_a_clear_error(api: OpenAI, server: Server, name: str) -> None:
    """(j): never a loop. Over the trigger alone it goes once; over the window it is an error, or is never computed."""
    large = "all work and no play " * 60
    messages = [SYSTEM, TASK, calling(0), result(0, large)]
    budget = clearing(keep=0, trigger=200)
    first = chat(api, messages, akv={"session": name}, context_management=budget)
    assert first.akv["applied_edits"][0]["cleared_tool_uses"] == 1
    assert first.akv["visible_tokens"] < 200
    messages += [answer(first), {"role": "user", "content": "go on"}]
    assert chat(api, messages, akv={"session": name}, context_management=budget).akv["applied_edits"] == []
    huge = result(1, "all work and no play " * 400)
    messages = [SYSTEM, TASK, calling(1), huge]
    assert refusal(lambda: chat(api, messages, akv={"session": f"{name}-2"}))[0] == "context_length_exceeded"
    extras: list[JSON] = [{"akv": {"session": f"{name}-2"}}, {}]
    for extra in extras:
        reply = chat(api, messages, context_management=budget, **extra)
        (op,) = reply.akv["ops"]
        assert (op["mode"], op["at"]) == ("forget", op["start"])
        assert reply.akv["stream_tokens"] > server.service.window
        assert reply.akv["prefilled_tokens"] < 200, "it was never computed"


# --- (k) `keep` counts tool uses in a run with a single user message --------------------------------------------------


def test_keep_counts_tool_uses_in_a_run_with_a_single_user_message(api: OpenAI, name: str) -> None:
    """(k): not turns of the user, of which there is one."""
    messages = talk(7)
    assert sum(message["role"] == "user" for message in messages) == 1
    akv = chat(api, messages, akv={"session": name}, context_management=clearing(keep=3)).akv
    assert gone(akv) == [content(akv, i) for i in (3, 5, 7, 9)]
    assert akv["applied_edits"][0]["cleared_tool_uses"] == 4
