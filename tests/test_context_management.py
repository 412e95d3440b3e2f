"""Context management by JSON alone: a plain openai client, `extra_body`, and a real server with a tiny model.

What the policies themselves decide is held in test_policy.py; here the server has to carry it out: on which tokens,
from when on, once, and at what cost.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

import akv_sdk
from akv_sdk.policies import (
    ClearToolUsesEdit,
    Context,
    DropRepeats,
    DropThinking,
    LastNObservations,
    RollingDrop,
    decide,
)
from akv_sdk.policies.context import spans_of
from akv_sdk.types import MessageSpan, Op
from tests.conversations import tagged
from tests.json_alone import JSON, SYSTEM, TASK, calling, chat, clearing, content, gone, refusal, result, talk
from tests.server import Server

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
    assert thoughts.keys() == {"type", "cleared_thinking_turns", "cleared_input_tokens"}
    assert uses.keys() == {"type", "cleared_tool_uses", "cleared_input_tokens"}
    assert thoughts["cleared_input_tokens"] + uses["cleared_input_tokens"] == reply.akv["dropped_tokens"]


@pytest.mark.parametrize(
    ("management", "param"),
    [
        ([], "context_management"),
        ({"edit": []}, "context_management.edit"),
        ({"edits": [{"type": "compact"}]}, "context_management.edits[0]"),
        ({"edits": [{"type": "LastNObservations"}]}, "context_management.edits[0].n"),
        ({"edits": [{"type": "LastNObservations", "n": 1, "polling": 0}]}, "context_management.edits[0].polling"),
        ({"edits": [{"type": "DropRepeats", "n": 1}]}, "context_management.edits[0].n"),
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
    applied = []
    for i, body in enumerate(bodies):
        body["akv"]["session"] = f"{name}-{i}"
        edits = chat(api, talk(4), **body).akv["applied_edits"]
        applied.append([(edit["type"], edit["cleared_tool_uses"]) for edit in edits])
    assert applied == [[], [("clear_tool_uses_20250919", 3)], [("LastNObservations", 1)]]


POLICIES: list[Any] = [
    LastNObservations(1),
    LastNObservations(1, polling=3),
    RollingDrop(400),
    DropRepeats(),
    DropThinking(0),
    ClearToolUsesEdit(trigger=0, keep=1, clear_at_least=10, clear_tool_inputs=True),
    ClearToolUsesEdit(trigger=0, keep=0, exclude_tools=["sh"]),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_policy_by_its_name_does_what_it_does_in_the_sdk(api: OpenAI, name: str, policy: Any) -> None:
    messages = [SYSTEM, TASK]
    for i in range(5):
        text = tagged(f"obs-{i}", "the same 2 passed" if i % 2 else f"output {i}: 2 passed")
        messages += [{**calling(i), "content": f"<think>step {i}</think>"}, result(i, text)]
    messages += [calling(5), result(5, "not marked")]
    edit = {"type": type(policy).__name__, **asdict(policy)}
    akv = chat(api, messages, akv={"session": name}, context_management={"edits": [edit]}).akv
    before = [MessageSpan.model_validate(span) for span in akv["spans"][: len(messages)]]
    drops = decide(policy, Context(messages, before))
    assert gone(akv) == spans_of(drops)
    assert bool(drops) == (policy != POLICIES[-1])
    freed = sum(end - start for start, end in gone(akv))
    assert [(e["type"], e["cleared_input_tokens"]) for e in akv["applied_edits"]] == [(edit["type"], freed)] * bool(
        drops
    )


def test_two_edits_of_one_type_have_an_entry_each(api: OpenAI, name: str) -> None:
    """The first leaves two results of `ls`, the second takes all but the newest of the rest."""
    messages = talk(5)
    for i in (2, 4):
        messages[i]["tool_calls"][0]["function"]["name"] = "ls"
    edits = [*clearing(keep=3, exclude_tools=["ls"])["edits"], *clearing(keep=3)["edits"], *clearing(keep=1)["edits"]]
    reply = chat(api, messages, akv={"session": name}, context_management={"edits": edits})
    sizes = [end - start for start, end in (content(reply.akv, i) for i in (3, 5, 7, 9))]
    assert reply.context_management["applied_edits"] == [
        {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": sum(tokens)}
        for tokens in (sizes[:2], sizes[2:])
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tags": "keep_output"}, "messages[3].tags"),
        ({"tags": {"keep_output": True}}, "messages[3].tags"),
        ({"tags": ["keep_output", 1]}, "messages[3].tags"),
        ({"akv": {"tags": "keep_output"}}, "messages[3].akv.tags"),
        ({"akv": []}, "messages[3].akv"),
        ({"akv": "pinned"}, "messages[3].akv"),
        ({"akv": False}, "messages[3].akv"),
    ],
)
def test_a_marking_of_the_wrong_shape_is_refused_by_name(api: OpenAI, name: str, fields: JSON, param: str) -> None:
    messages = talk(2)
    messages[3] |= fields
    assert refusal(lambda: chat(api, messages, akv={"session": name})) == ("invalid_request", param)


def test_edits_of_both_kinds_see_what_those_before_them_left(api: OpenAI, name: str) -> None:
    """Anthropic's edit speaks of every tool result, a policy of AKV only of those that are marked."""
    messages = [*talk(3), calling(3), result(3, akv={"ephemeral": True}), calling(4), result(4)]
    edits = [{"type": "LastNObservations", "n": 0}, *clearing(keep=3)["edits"]]
    reply = chat(api, messages, akv={"session": name}, context_management={"edits": edits})
    assert gone(reply.akv) == [content(reply.akv, i) for i in (3, 5, 9)]
    applied = {edit["type"]: edit["cleared_tool_uses"] for edit in reply.context_management["applied_edits"]}
    assert applied == {"LastNObservations": 1, "clear_tool_uses_20250919": 2}


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


ALL_MARKED = {"edits": [{"type": "LastNObservations", "n": 0}]}
LOOK: JSON = {"role": "user", "content": "OBSERVATION: a.py b.py c.py"}


@pytest.mark.parametrize(
    ("message", "marks", "cut"),
    [
        ({**LOOK, "content": 'ls: <ephemeral_observation id="ls">a.py b.py</ephemeral_observation>'}, [], "block"),
        ({**LOOK, "akv": {"ephemeral": True, "keep_head": 3, "keep_tail": 2}}, [], (3, 2)),
        ({**LOOK, "tags": ["remove_output"]}, [], (0, 0)),
        (LOOK, [{"message": 4, "ephemeral": True}], (0, 0)),
        (result(1), [{"message": 4, "tool_call_id": "c1", "ephemeral": True, "keep_tail": 4}], (0, 4)),
        (LOOK, "span", (2, 1)),
        (result(1), [], None),
        ({**LOOK, "tags": ["keep_output"], "akv": {"ephemeral": True}}, [], None),
    ],
    ids=["tags", "akv", "remove_output", "message", "tool_call_id", "span", "unmarked", "keep_output"],
)
def test_each_way_to_mark_an_observation(api: OpenAI, name: str, message: JSON, marks: Any, cut: Any) -> None:
    messages = [*talk(1)[:2], LOOK, calling(1), message, {"role": "user", "content": "go on"}]
    start, end = content(chat(api, messages, max_tokens=0).akv, 4)
    if marks == "span":
        marks = [{"span": [start + 2, end - 1], "ephemeral": True}]
    akv = chat(api, messages, akv={"session": name, "marks": marks}, context_management=ALL_MARKED).akv
    if cut == "block":
        (block,) = akv["spans"][4]["blocks"]
        want = [(block["start"], block["end"])]
        assert block["id"] == "ls" and start < block["start"] < block["end"] < end
    else:
        want = [] if cut is None else [(start + cut[0], end - cut[1])]
    assert gone(akv) == want
    assert akv["warnings"] == []


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
