"""Context management by JSON alone: a plain openai client, `extra_body`, and a real server with a tiny model.

What the policies themselves decide is held in test_policy.py; here the server has to carry it out: on which tokens,
from when on, once, and at what cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

import akv_sdk
from akv_sdk.policies import DropThinking, LastNObservations
from akv_sdk.types import MessageSpan, Op
from akv_server import streams
from akv_server.streams import Stream
from tests.server import Server, load_tiny, serving_model

JSON = dict[str, Any]
POOL_TOKENS = 4096
SYSTEM: JSON = {"role": "system", "content": "You run the tests of a repository."}
TASK: JSON = {"role": "user", "content": "Find out why the tests fail."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_model(load_tiny(tmp_path_factory.mktemp("model")), pool_tokens=POOL_TOKENS) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def name(server: Server) -> Iterator[str]:
    """A fresh session name; whatever a test did, the cache must still hold together after it."""
    yield uuid4().hex
    server.engine.check()


def chat(api: OpenAI, messages: list[JSON], *, max_tokens: int = 2, **extra: Any) -> Any:
    return api.chat.completions.create(
        model="default",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        extra_body=extra,
    )


def calling(number: int, **arguments: Any) -> JSON:
    function = {"name": "sh", "arguments": json.dumps(arguments or {"command": f"pytest tests/test_{number}.py"})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }


def result(number: int, text: str | None = None, **fields: Any) -> JSON:
    text = f"output {number}: " + "1 failed, 2 passed " * 3 if text is None else text
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text, **fields}


def talk(num_uses: int) -> list[JSON]:
    return [SYSTEM, TASK, *(part for i in range(num_uses) for part in (calling(i), result(i)))]


def clearing(keep: int = 1, trigger: int = 0, **fields: Any) -> JSON:
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": trigger},
        "keep": {"type": "tool_uses", "value": keep},
        **fields,
    }
    return {"edits": [edit]}


def gone(akv: JSON) -> list[tuple[int, int]]:
    """The spans that a reply's history made invisible."""
    return [(op["start"], op["end"]) for op in akv["ops"] if op["op"] == "drop"]


def content(akv: JSON, message: int) -> tuple[int, int]:
    span = akv["spans"][message]
    return span["content_start"], span["content_end"]


def refusal(call: Any) -> tuple[str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        call()
    return refused.value.code, refused.value.param


# --- Anthropic's edits ------------------------------------------------------------------------------------------------


def test_an_edit_clears_old_results_and_says_so_in_both_places(api: OpenAI, name: str) -> None:
    reply = chat(api, talk(4), akv={"session": name}, context_management=clearing(keep=1))
    akv = reply.akv
    want = [content(akv, i) for i in (3, 5, 7)]
    assert gone(akv) == want
    assert all(op["repos"] for op in akv["ops"])
    num_cleared = sum(end - start for start, end in want)
    edit = {
        "type": "clear_tool_uses_20250919",
        "cleared_tool_uses": 3,
        "cleared_thinking_turns": 0,
        "cleared_input_tokens": num_cleared,
    }
    assert akv["applied_edits"] == [edit]
    assert reply.context_management == {"applied_edits": [edit]}
    assert akv["dropped_tokens"] == num_cleared
    assert akv["next_position"] == akv["visible_tokens"], "the gaps are closed"
    assert reply.usage.prompt_tokens == akv["stream_tokens"] - num_cleared - reply.usage.completion_tokens


def test_what_comes_after_is_computed_without_what_was_cleared(api: OpenAI, client: httpx.Client, name: str) -> None:
    """An edit comes to the same as a drop through the ops route at that place, to the last token id."""
    for is_edit in (True, False):
        session = {"session": f"{name}-{is_edit}"}
        first = chat(api, talk(3), max_tokens=0, akv=session, cache_salt=name)
        if not is_edit:
            spans = [content(first.akv, message) for message in (3, 5)]
            client.post("/v1/cache/drop", json={"spans": spans, **session})
        extra: JSON = {"context_management": clearing(keep=1)} if is_edit else {}
        messages = [*talk(3), {"role": "user", "content": "go on"}]
        reply = chat(api, messages, max_tokens=8, akv=session, cache_salt=name, return_token_ids=True, **extra)
        if is_edit:
            ids, ops = reply.choices[0].token_ids, reply.akv["ops"]
            assert len(ops) == 2
            assert reply.akv["prefilled_tokens"] > 0
    assert reply.akv["ops"] == ops
    assert reply.akv["prefilled_tokens"] == 0, "the other session had computed it, under the same history"
    assert reply.choices[0].token_ids == ids


def test_without_anything_to_clear_the_reply_says_that(api: OpenAI, name: str) -> None:
    reply = chat(api, talk(2), akv={"session": name}, context_management=clearing(trigger=100_000))
    assert reply.context_management == {"applied_edits": []}
    assert reply.akv["dropped_tokens"] == 0
    plain = chat(api, talk(2), akv={"session": name})
    assert not hasattr(plain, "context_management")
    assert plain.akv["applied_edits"] == []


def test_edits_in_a_stream_come_with_its_last_chunk(client: httpx.Client, name: str) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        body = {
            "messages": talk(3),
            "max_tokens": 2,
            "stream": True,
            "akv": {"session": f"{name}-{len(options)}"},
            "context_management": clearing(keep=2),
            **options,
        }
        lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert ["context_management" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        (edit,) = chunks[-1]["context_management"]["applied_edits"]
        assert edit["cleared_tool_uses"] == 1
        assert chunks[-1]["akv"]["applied_edits"] == [edit]


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
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    assert gone(akv) == [content(akv, i) for i in (3, 6, 9, 12)]
    # Sent again whole, and with another question: nothing goes twice.
    for more in ({"role": "user", "content": "and now?"}, {"role": "user", "content": "and then?"}):
        messages.append(more)
        reply = chat(api, messages, akv={"session": name}, context_management=clearing(keep=2), cache_salt=name)
        assert reply.akv["applied_edits"] == []
        assert reply.akv["replayed_tokens"] == 0
        assert reply.akv["prefilled_tokens"] < 40
        assert gone(reply.akv) == gone(akv)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))


def test_what_was_there_before_goes_before_the_new_tokens_are_computed(api: OpenAI, name: str) -> None:
    first = chat(api, talk(3), akv={"session": name})
    messages = [*talk(3), first.choices[0].message.model_dump(exclude_none=True), calling(3), result(3)]
    akv = chat(api, messages, akv={"session": name}, context_management=clearing(keep=0)).akv
    ats = [op["at"] for op in akv["ops"]]
    assert ats[:3] == [first.akv["stream_tokens"]] * 3
    assert gone(akv)[3] == content(akv, 10)
    assert ats[3] == akv["spans"][10]["end"], "and the new one once it was read, before the answer is opened"


def test_without_a_session_an_edit_works_on_the_requests_own_stream(api: OpenAI, name: str) -> None:
    messages = talk(3)
    extra: JSON = {"cache_salt": name, "context_management": clearing(keep=1)}
    first = chat(api, messages, **extra)
    assert first.akv["session"] is None
    assert first.akv["applied_edits"][0]["cleared_tool_uses"] == 2
    again = chat(api, messages, **extra)
    assert gone(again.akv) == gone(first.akv)
    assert again.akv["prefilled_tokens"] == 0
    messages += [first.choices[0].message.model_dump(exclude_none=True), calling(3), result(3)]
    longer = chat(api, messages, **extra)
    assert longer.akv["applied_edits"][0]["cleared_tool_uses"] == 3
    num_old = first.akv["spans"][7]["end"]
    assert longer.akv["prefilled_tokens"] == longer.akv["stream_tokens"] - num_old - longer.usage.completion_tokens


def test_the_two_edits_together_as_anthropic_sends_them(api: OpenAI, name: str) -> None:
    messages = [SYSTEM, TASK]
    for i in range(3):
        thinking = f"<think>perhaps test {i} fails because of test {i}</think>"
        messages += [{**calling(i), "content": thinking}, result(i)]
    management = {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 2},
                "keep": {"type": "tool_uses", "value": 1},
                "clear_at_least": {"type": "input_tokens", "value": 10},
                "exclude_tools": ["web_search"],
                "clear_tool_inputs": True,
            },
        ]
    }
    reply = chat(api, messages, akv={"session": name}, context_management=management)
    blocks = {(s["message"], b["kind"]): b for s in reply.akv["spans"] for b in s["blocks"]}
    assert [(place, block["visible"]) for place, block in sorted(blocks.items())] == [
        ((2, "thinking"), False), ((2, "tool_input"), False),
        ((4, "thinking"), False), ((4, "tool_input"), False),
        ((6, "thinking"), True), ((6, "tool_input"), True),
    ]  # fmt: skip
    assert [block["tool_call_id"] for (_, kind), block in sorted(blocks.items()) if kind == "tool_input"] == [
        "c0", "c1", "c2",
    ]  # fmt: skip
    thoughts, uses = reply.context_management["applied_edits"]
    assert (thoughts["type"], thoughts["cleared_thinking_turns"]) == ("clear_thinking_20251015", 2)
    assert (uses["type"], uses["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 2)
    assert thoughts["cleared_input_tokens"] + uses["cleared_input_tokens"] == reply.akv["dropped_tokens"]


@pytest.mark.parametrize(
    ("management", "param"),
    [
        ([], "context_management"),
        ({"edit": []}, "context_management.edit"),
        ({"edits": [{"type": "compact"}]}, "context_management.edits[0]"),
        (clearing(keep=-1), "context_management.edits[0].keep.value"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens"}}]},
         "context_management.edits[0].trigger.value"),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]},
         "context_management.edits[0].keep.value"),
        ({"edits": [*clearing()["edits"], {"type": "clear_thinking_20251015"}]}, "context_management.edits"),
    ],
)  # fmt: skip
def test_a_wrong_edit_is_refused_by_name_and_changes_nothing(
    api: OpenAI, client: httpx.Client, name: str, management: Any, param: str
) -> None:
    def ask() -> Any:
        return chat(api, talk(2), akv={"session": name}, context_management=management)

    assert refusal(ask) == ("invalid_request", param)
    assert client.get(f"/v1/cache/sessions/{name}").status_code == 404


def test_the_guide_shows_what_works(api: OpenAI, name: str) -> None:
    guide = Path(__file__).resolve().parents[1] / "docs" / "context-management.md"
    bodies = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", guide.read_text(), re.DOTALL)]
    assert ["context_management" in body for body in bodies] == [False, True]
    for body in bodies:
        body["akv"]["session"] = name
        reply = chat(api, talk(4), **body)
    assert [edit["type"] for edit in reply.akv["applied_edits"]] == ["clear_tool_uses_20250919"]


def test_tags_of_swe_agent_reach_the_policies_of_a_session(server: Server) -> None:
    with akv_sdk.Client(server.url, timeout_s=60) as client, client.session(messages=talk(4)) as session:
        session.messages[3]["tags"] = ["remove_output"]
        session.messages[5]["tags"] = ["keep_output"]
        session.mark(5)
        session.mark(7)
        session.complete(max_tokens=1, temperature=0)
        assert session.apply(LastNObservations(9)) is not None
        first = (session.spans[3].content_start, session.spans[3].content_end)
        assert [(op.start, op.end) for op in session.ops] == [first]
        assert session.apply(LastNObservations(0)) is not None
        assert len(session.ops) == 2, "what keep_output says stays"


def test_a_text_completion_says_that_it_has_no_edits(client: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "context_management": clearing()}
    reply = client.post("/v1/completions", json=body).json()
    assert reply["akv"]["warnings"] == ["context_management: not supported, left aside"]
    assert "context_management" not in reply


# --- what may never go, said by JSON ----------------------------------------------------------------------------------


def test_marks_tags_and_the_message_itself_say_what_stays(api: OpenAI, name: str) -> None:
    messages = talk(6)
    messages[3] = {**messages[3], "akv": {"ephemeral": False}}
    messages[5] = {**messages[5], "tags": ["keep_output"]}
    messages[7] = {**messages[7], "akv": {"keep_head": 3, "keep_tail": 2}}
    before = chat(api, messages, max_tokens=0).akv
    start, end = content(before, 11)
    marks = [
        {"message": 9, "tool_call_id": "c3", "pinned": True},
        {"span": [start + 2, start + 5], "pinned": True},
    ]
    akv = chat(api, messages, akv={"session": name, "marks": marks}, context_management=clearing(keep=0)).akv
    kept_head, kept_tail = content(akv, 7)
    assert gone(akv) == [
        (kept_head + 3, kept_tail - 2), (start, start + 2), (start + 5, end), content(akv, 13),
    ]  # fmt: skip
    # Marks speak for one request: the pins are not sent again, and what they held goes now.
    messages += [{"role": "user", "content": "go on"}]
    akv = chat(api, messages, akv={"session": name}, context_management=clearing(keep=0)).akv
    assert content(akv, 9) in gone(akv)
    assert (start + 2, start + 5) in gone(akv)


@pytest.mark.parametrize(
    ("mark", "code", "param"),
    [
        ({"message": 6}, "invalid_request", "akv.marks[1].message"),
        ({"message": 3, "tool_call_id": "c1"}, "invalid_request", "akv.marks[1].tool_call_id"),
        ({"message": 3, "block": "obs-7"}, "invalid_request", "akv.marks[1].block"),
        ({"span": [0, 100_000]}, "span_out_of_range", "akv.marks[1].span"),
        ({"span": [5, 4]}, "span_out_of_range", "akv.marks[1].span"),
        ({"message": 1, "span": [0, 1]}, "invalid_request", "akv.marks[1].message"),
        ({"message": 1, "keep_head": -1}, "invalid_request", "akv.marks[1].keep_head"),
    ],
)  # fmt: skip
def test_a_mark_that_speaks_of_nothing_is_refused_by_name(
    api: OpenAI, client: httpx.Client, name: str, mark: JSON, code: str, param: str
) -> None:
    marks = [{"message": 3, "tool_call_id": "c0", "ephemeral": True}, mark]
    assert refusal(lambda: chat(api, talk(2), akv={"session": name, "marks": marks})) == (code, param)
    assert client.get(f"/v1/cache/sessions/{name}").status_code == 404


def test_a_message_whose_marking_is_wrong_is_named(api: OpenAI) -> None:
    messages = [SYSTEM, {**TASK, "akv": {"ephemral": True}}]
    assert refusal(lambda: chat(api, messages)) == ("invalid_request", "messages[1].akv.ephemral")


def test_a_session_of_the_sdk_sends_its_marks_and_may_use_the_servers_edits(server: Server) -> None:
    with akv_sdk.Client(server.url, timeout_s=60) as client, client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(4):
            session.messages.append(calling(i))
            session.observe(f"output {i} " * 6, tool="sh", tool_call_id=f"c{i}", ephemeral=i != 1, keep_head=2)
        session.pin("obs-1")
        reply = session.complete(max_tokens=2, temperature=0, context_management=clearing(keep=1))
        assert [edit.cleared_tool_uses for edit in reply.akv.applied_edits] == [1]
        (op,) = reply.akv.ops
        (block,) = session.spans[7].blocks
        assert (op.start, op.end) == (block.start + 2, block.end)
        assert session.is_visible("obs-1")
        assert not session.is_visible("obs-2")


def test_policies_of_the_client_reach_reasoning_and_arguments(server: Server) -> None:
    with akv_sdk.Client(server.url, timeout_s=60) as client, client.session() as session:
        session.messages += [dict(SYSTEM), dict(TASK)]
        for i in range(3):
            session.assistant(f"<think>step {i} of several steps</think>done")
            session.user("go on")
        session.complete(max_tokens=1, temperature=0)
        layout = session.apply(DropThinking(keep=1))
        assert layout is not None
        blocks = [block for span in session.spans for block in span.blocks]
        assert [(block.kind, block.visible) for block in blocks] == [("thinking", i == 2) for i in range(3)]
        assert session.apply(DropThinking(keep=1)) is None


# --- the pains, end to end --------------------------------------------------------------------------------------------


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


def test_after_a_drop_the_rest_still_comes_from_the_cache(api: OpenAI, client: httpx.Client, name: str) -> None:
    """(f): the cached tokens are all that is left of the prompt, not 0."""
    messages = talk(4)
    first = chat(api, messages, akv={"session": name})
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    reply = chat(api, messages, akv={"session": name}, context_management=clearing(keep=1))
    num_cleared = reply.akv["applied_edits"][0]["cleared_input_tokens"]
    details = reply.usage.prompt_tokens_details
    assert details.cached_tokens == first.akv["stream_tokens"] - num_cleared
    assert details.cached_tokens + reply.akv["prefilled_tokens"] == reply.usage.prompt_tokens
    # By the ops route, too, and by messages and spans alone.
    start, end = content(reply.akv, 9)
    dropped = client.post("/v1/cache/drop", json={"session": name, "spans": [[start, end]]}).json()
    assert dropped["changed"] == end - start
    messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    last = chat(api, messages, akv={"session": name}, context_management=clearing(keep=1))
    assert last.akv["applied_edits"] == []
    assert last.usage.prompt_tokens_details.cached_tokens == dropped["visible_tokens"]


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
    longest = [*longer, memory, second.choices[0].message.model_dump(exclude_none=True), memory]
    third = chat(api, longest, akv={"session": name})
    assert third.akv["warnings"] == []
    assert third.akv["prefilled_tokens"] <= third.akv["spans"][10]["end"] - third.akv["spans"][10]["start"] + 20


def _common(first: Any, second: Any) -> int:
    """Where the seventh message parts: both open one, then come different roles."""
    start = first.akv["spans"][6]["start"]
    assert second.akv["spans"][6]["start"] == start
    return int(start) + 1


def test_what_is_read_again_is_not_cleared_again(api: OpenAI, name: str) -> None:
    """(i), and (h): a file cleared by count and read anew stays, and the reply's spans say what the model sees."""
    text = "def test(): assert 1 + 1 == 2 " * 3
    management = clearing(keep=1)
    messages = [SYSTEM, TASK, calling(0, path="a.py"), result(0, text), calling(1), result(1)]
    first = chat(api, messages, akv={"session": name}, context_management=management)
    assert gone(first.akv) == [content(first.akv, 3)]
    messages += [first.choices[0].message.model_dump(exclude_none=True), calling(2, path="a.py"), result(2, text)]
    for i in range(3, 8):
        messages += [calling(i), result(i)]
        reply = chat(api, messages, akv={"session": name}, context_management=management)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        assert content(reply.akv, 8) not in gone(reply.akv), "read again after it went: it is in use"
        # A cache of reads asks this before it says "unchanged, see above".
        seen = {content(reply.akv, m) for m in (3, 8)} - set(gone(reply.akv))
        assert seen == {content(reply.akv, 8)}


def test_one_result_larger_than_everything_is_one_drop_or_a_clear_error(api: OpenAI, server: Server, name: str) -> None:
    """(j): never a loop. Over the trigger alone it goes once; over the window it is an error, or is never computed."""
    large = "all work and no play " * 60
    messages = [SYSTEM, TASK, calling(0), result(0, large)]
    budget = clearing(keep=0, trigger=200)
    first = chat(api, messages, akv={"session": name}, context_management=budget)
    assert first.akv["applied_edits"][0]["cleared_tool_uses"] == 1
    assert first.akv["visible_tokens"] < 200
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
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


def test_a_client_and_the_server_agree_on_what_was_dropped(server: Server, api: OpenAI, name: str) -> None:
    """An SDK policy on a session on which server edits ran before: what one dropped the other does not drop again."""
    with akv_sdk.Client(server.url, timeout_s=60) as client:
        session = client.session(name, messages=talk(4))
        session.mark(3)
        session.mark(5)
        session.complete(max_tokens=1, temperature=0, context_management=clearing(keep=2))
        assert session.apply(LastNObservations(0)) is None
        ops = [
            Op.model_validate(op) for op in chat(api, session.messages, max_tokens=0, akv={"session": name}).akv["ops"]
        ]
        assert tuple(ops) == session.ops
        spans = [MessageSpan.model_validate(span) for span in session.spans]
        assert [(op.start, op.end) for op in ops] == [(spans[m].content_start, spans[m].content_end) for m in (3, 5)]
        session.delete()


# --- repos: "auto" ----------------------------------------------------------------------------------------------------


def gapped(spans: list[tuple[int, int, int]], *, repos: bool) -> Stream:
    """A stream that grows to each `at` and drops `[start, end)` there."""
    stream = Stream()
    for at, start, end in spans:
        stream = replace(stream, tokens=list(range(at)))
        stream = streams.drop(stream, streams.named_spans(stream, [(start, end)]), repos=repos, forget=False).stream
    return replace(stream, tokens=list(range(200)))


def positions(stream: Stream) -> dict[int, int]:
    """Of the visible tokens, by index."""
    return {i: i + segment.shift for segment in stream.layout.segments for i in range(segment.start, segment.end)}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), st.integers(0, 20)), max_size=6))
def test_gaps_closed_late_leave_tokens_where_gaps_closed_at_once_do(drawn: list[tuple[int, int, int]]) -> None:
    spans, at = [], 20
    for growth, start, length in drawn:
        at += growth
        spans.append((at, min(start, at), min(start + length, at)))
    late = streams.close_gaps(gapped(spans, repos=False), 0)
    once = gapped(spans, repos=True)
    assert positions(late.stream) == positions(once)
    assert late.stream.layout.next_position == once.layout.next_position == once.layout.num_visible
    assert streams.close_gaps(late.stream, 0).applied == []


def test_a_gap_that_a_repos_made_stays_and_what_was_dropped_comes_back() -> None:
    stream = replace(Stream(), tokens=list(range(100)))
    stream = streams.drop(stream, streams.named_spans(stream, [(10, 20), (20, 30)]), repos=False, forget=False).stream
    stream = streams.reposition(stream, 50, None, 7).stream
    closed = streams.close_gaps(stream, 0).stream
    assert [s[:3] for s in closed.layout.segments] == [(0, 10, 0), (30, 50, -20), (50, 100, -13)]
    for span in ((20, 30), (10, 20)):
        closed = streams.restore(closed, streams.named_spans(closed, [span]), repos=True).stream
    assert [s[:3] for s in closed.layout.segments] == [(0, 50, 0), (50, 100, 7)]


def test_auto_leaves_gaps_and_the_request_that_needs_the_room_closes_them_all(
    client: httpx.Client, server: Server, name: str
) -> None:
    def complete(num_tokens: int) -> JSON:
        body = {"prompt": list(range(3, 203)) * (num_tokens // 200), "max_tokens": 0, "akv": {"session": name}}
        return dict(client.post("/v1/completions", json=body).json()["akv"])

    def drop(start: int, end: int) -> JSON:
        body = {"session": name, "spans": [[start, end]], "repos": "auto"}
        return dict(client.post("/v1/cache/drop", json=body).json())

    assert server.service.window == 2048
    complete(1000)
    for start in (100, 300):
        assert [op["repos"] for op in drop(start, start + 150)["applied"]] == [False]
    at_1400 = complete(1400)
    assert (at_1400["next_position"], at_1400["visible_tokens"]) == (1400, 1100)
    at_1600 = complete(1600)  # 3/4 of 2048 are 1536
    assert (at_1600["next_position"], at_1600["visible_tokens"]) == (1300, 1300)
    assert [(op["op"], op["at"], op["start"], op["delta"]) for op in at_1600["ops"][2:]] == [
        ("repos", 1400, 250, -150), ("repos", 1400, 450, -150),
    ]  # fmt: skip
    # A drop that comes when the room is used closes what was left open before it, too.
    assert [op["repos"] for op in drop(500, 550)["applied"]] == [False]
    complete(1800)
    assert complete(2000)["next_position"] == 1650
    applied = drop(600, 700)["applied"]
    assert [(op["op"], op["start"], op["repos"], op["delta"]) for op in applied] == [("drop", 600, True, 0)]
    # The history says what was done: another session that is given it has the same layout.
    ops = client.get(f"/v1/cache/sessions/{name}").json()["ops"]
    tokens = list(range(3, 203)) * 10
    body = {"prompt": tokens, "max_tokens": 0, "akv": {"session": f"{name}-2", "ops": ops}}
    copy = client.post("/v1/completions", json=body).json()["akv"]
    assert (copy["ops"], copy["next_position"], copy["prefilled_tokens"]) == (ops, 1550, 0)


def test_auto_and_a_client_that_drops_when_the_room_is_used(client: httpx.Client, name: str) -> None:
    def call(route: str, **body: Any) -> JSON:
        return dict(client.post(route, json=body).json())

    call("/v1/completions", prompt=list(range(3, 253)) * 6, max_tokens=0, akv={"session": name})
    call("/v1/cache/drop", session=name, spans=[[100, 200]], repos=False)
    open_gap = call("/v1/completions", prompt=list(range(3, 253)) * 6 + [7] * 100, max_tokens=0, akv={"session": name})
    assert open_gap["akv"]["next_position"] == 1600, "nobody said auto yet"
    call("/v1/completions", prompt=list(range(3, 253)) * 6, max_tokens=0, akv={"session": name})
    call("/v1/cache/drop", session=name, spans=[[300, 400]], repos="auto")
    call("/v1/completions", prompt=list(range(3, 253)) * 6 + [7] * 30, max_tokens=0, akv={"session": name})
    call("/v1/cache/repos", session=name, start=1530, end=None, delta=10)
    done = call("/v1/cache/drop", session=name, spans=[[500, 600]], repos="auto")
    assert [(op["op"], op["start"], op["end"], op["delta"]) for op in done["applied"]] == [
        ("drop", 500, 600, 0), ("repos", 200, None, -100), ("repos", 400, None, -100),
    ]  # fmt: skip
    assert done["changed"] == 100
    assert done["next_position"] == done["visible_tokens"] + 10
