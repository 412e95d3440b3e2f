"""The Messages API as pure translation: what a body asks the chat route for, and what a chat answer comes to.

The one law: what an answer is sent back as is the text and the calls that the model wrote. It is held here for answers
of every kind, cut up anyhow; test_messages_tools.py holds it with a real client and server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv_server.answers import identity_of
from akv_server.call_formats import parser_of
from akv_server.calls import Parser, in_order
from akv_server.errors import STATUS_OF_CODE, AkvError
from akv_server.identity import normalise_for_matching
from akv_server.messages import Asked, CountBody, asked, error_body
from akv_server.messages_reply import Reply
from akv_server.requests import read_json
from akv_server.tools import CallFormat, Function, Style

JSON = dict[str, Any]
USER: JSON = {"role": "user", "content": "Hello"}
TOOL: JSON = {"name": "now", "input_schema": {"type": "object"}}
FUNCTIONS = [Function(name, {}, False, "") for name in ("now", "bash")]


def ask(*messages: JSON, **fields: Any) -> Asked:
    return asked(read_json(json.dumps({"max_tokens": 10, "messages": messages or [USER], **fields}).encode()))


def sent(*messages: JSON, **fields: Any) -> list[JSON]:
    """The messages that the chat route gets."""
    return ask(*messages, **fields).body.messages


def answer(*blocks: JSON) -> JSON:
    """What the chat route gets for an answer that comes back."""
    return sent(USER, {"role": "assistant", "content": list(blocks)}, USER)[1]


def refusal(call: Any) -> tuple[str, str]:
    """The code and the field, as the envelope has them."""
    with pytest.raises(AkvError) as refused:
        call()
    error = error_body(refused.value)["error"]
    assert error["type"] == "invalid_request_error" and error["message"].startswith(f"{error['param']}: ")
    return error["code"], error["param"]


def text(text: str, **more: Any) -> JSON:
    return {"type": "text", "text": text, **more}


def result(id_: str, content: Any, **more: Any) -> JSON:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **more}


def use(id_: str, **arguments: Any) -> JSON:
    return {"type": "tool_use", "id": id_, "name": "bash", "input": arguments}


# --- requests -------------------------------------------------------------------------------------------------------


def test_a_request_in_the_words_of_the_chat_route() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    found = ask(
        {"role": "user", "content": [text("one", **cached), text("two")]},
        model="m",
        system=[text("Be brief.", **cached), text("Really.")],
        tools=[{**TOOL, "description": "the time", **cached}, {**TOOL, "name": "b", "type": "custom", "strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stream=True,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
        akv={"session": "s"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        speed="fast",
    )
    body = found.body
    assert body.messages == [
        {"role": "system", "content": "Be brief.\nReally."},
        {"role": "user", "content": "one\ntwo"},
    ]
    assert body.tools == [
        {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "object"}, "strict": True}},
    ]
    assert (body.tool_choice, body.parallel_tool_calls, body.stops) == ("required", False, ["END"])
    assert (body.model, body.max_tokens, body.stream) == ("m", 10, True)
    assert (body.temperature, body.top_p, body.top_k) == (0.5, 0.9, 40)
    assert body.akv and body.akv.session == "s" and body.context_management and len(body.context_management.edits) == 1
    assert body.prompt_cache_key is None  # who asks is no session
    assert body.warnings() == [] and found.warnings == ("speed: not a field of this request, left aside",)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_tool_choice(choice: JSON, expected: Any) -> None:
    body = ask(tools=[TOOL], tool_choice=choice).body
    assert (body.tool_choice, body.parallel_tool_calls) == (expected, True)


def test_results_and_texts_of_one_message_become_messages_of_their_own() -> None:
    message = {
        "role": "user",
        "content": [result("a", "1"), result("b", [text("2"), text("3")]), text("so?"), text("hm"), result("c", None)],
    }
    assert sent(USER, message, USER, {"role": "user", "content": []}) == [
        {"role": "user", "content": "Hello"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2\n3"},
        {"role": "user", "content": "so?\nhm"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "Hello"},
        {"role": "user", "content": ""},
    ]


def test_a_failed_result_says_so_and_stays_an_observation() -> None:
    opening = '<ephemeral_observation id="1">'
    marked = f"{opening}\nno such file\n</ephemeral_observation>"
    messages = sent({"role": "user", "content": [result("a", t, is_error=True) for t in ("no", "", marked)]})
    assert [message["content"] for message in messages] == [
        "Error: no",
        "Error: ",
        f"{opening}Error: \nno such file\n</ephemeral_observation>",
    ]


def test_an_answer_comes_back_as_it_was_written() -> None:
    called = [{"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls é"}'}}]
    assert answer(text("x"), use("a", command="ls é"), text("y")) == {
        "role": "assistant",
        "content": "x\ny",
        "tool_calls": called,
    }
    assert sent({"role": "assistant", "content": "plain"}, USER)[0] == {"role": "assistant", "content": "plain"}
    # thoughts of other servers are written as models do, and what only these can read is left out
    foreign: JSON = {"type": "thinking", "thinking": "hm", "signature": "EqQBCgIYAhIM"}
    assert answer(foreign, text("x"))["content"] == "<think>\nhm\n</think>\n\nx"
    assert answer({"type": "redacted_thinking", "data": "EqQB"}, text("x"))["content"] == "x"
    for forged in ('["<|im_start|>", ""]', '["", "x"]', '[1, ""]', '["<think>"]', "[" * 100_000):
        assert answer({**foreign, "signature": forged}, text("x"))["content"] == "<think>\nhm\n</think>\n\nx"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [text("x"), {"type": "image", "source": {}}]}]},
            "messages.0.content.1",
        ),
        ({"messages": [{"role": "user", "content": [use("a")]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [text("x"), {"type": "text"}]}]}, "messages.0.content.1.text"),
        (
            {"messages": [{"role": "user", "content": [result("a", [text("x"), {"type": "image", "source": {}}])]}]},
            "messages.0.content.0.content.1.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**use("a"), "input": "ls"}]}, USER]},
            "messages.0.content.0.input",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"max_tokens": None}, "max_tokens"),
        *(
            ({"messages": [USER, {"role": "assistant", "content": [block]}, USER]}, f"messages.1.content.0.{field}")
            for field, block in [
                ("signature", {"type": "thinking", "thinking": "hm", "signature": None}),
                ("thinking", {"type": "thinking", "thinking": 5, "signature": "x"}),
                ("thinking", {"type": "thinking", "signature": "x"}),
                ("text", {"type": "text", "text": 5}),
                ("text", {"type": "text"}),
            ]
        ),
        ({"system": [text("a"), {"type": "text", "text": 5}]}, "system.1.text"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences.1"),
        ({"tools": [TOOL, {"name": "x"}]}, "tools.1.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"akv": {"session": ""}}, "akv.session"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits.0"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
)
def test_what_is_wrong_is_named(body: JSON, param: str) -> None:
    assert refusal(lambda: ask(**{"messages": [USER], **body})) == ("invalid_request", param)


def test_a_request_needs_max_tokens_and_a_count_does_not() -> None:
    assert refusal(lambda: asked({"messages": [USER]})) == ("invalid_request", "max_tokens")
    assert (
        asked({"messages": [USER, {"role": "assistant", "content": "x"}]}, CountBody).body.messages[1]["content"] == "x"
    )


def test_errors_of_the_chat_route_name_the_callers_field() -> None:
    message = {"role": "user", "content": [result("a", "1"), text("x"), text("y")]}
    found = ask(USER, message, system="S", tools=[TOOL])
    for chat, ours in [
        ("messages[0].content", "system"),
        ("messages[1].content", "messages.0.content"),
        ("messages[2].content", "messages.1.content.0"),
        ("messages[3]", "messages.1.content.1"),
        ("tools[0].function.parameters", "tools.0.input_schema"),
        ("tools[0].function.name", "tools.0.name"),
        ("akv.marks[3].span", "akv.marks.3.span"),
        ("messages", "messages"),
    ]:
        error = found.renamed(AkvError("session_busy", f"{chat}: wrong", param=chat, retry_after_s=1))
        assert error_body(error)["error"]["message"] == f"{ours}: wrong"
        assert error_body(error)["error"]["param"] == ours and error.retry_after_s == 1
    plain = AkvError("internal_error", "the engine failed")
    assert found.renamed(plain) is plain


def test_every_code_has_one_of_anthropics_types() -> None:
    kinds = {code: error_body(AkvError(code, "m"))["error"]["type"] for code in STATUS_OF_CODE}
    special = {
        "unauthorized": "authentication_error",
        "session_not_found": "not_found_error",
        "model_not_found": "not_found_error",
        "not_found": "not_found_error",
        "position_conflict": "conflict_error",
        "stream_diverged": "conflict_error",
        "session_busy": "conflict_error",
        "request_too_large": "request_too_large",
        "internal_error": "api_error",
        "out_of_pages": "overloaded_error",
    }
    assert kinds == {code: special.get(code, "invalid_request_error") for code in STATUS_OF_CODE}
    assert error_body(AkvError("unauthorized", "no key")) == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no key", "code": "unauthorized", "param": None},
    }


# --- answers --------------------------------------------------------------------------------------------------------


def chunks(parts: Sequence[str], parser: Parser | None, reason: str = "stop", **last: Any) -> Iterator[JSON]:
    """A chat answer as the chat route streams it."""

    def chunk(delta: JSON, **more: Any) -> JSON:
        return {"model": "m", "choices": [{"index": 0, "delta": delta, **more}]}

    for part in [*parts, None]:
        if parser is None:
            found: Any = [(part or "", [])]
        else:
            found = in_order(*(parser.finish() if part is None else parser.push(part)))
        for content, deltas in found:
            if content:
                yield chunk({"content": content})
            for delta in deltas:
                yield chunk({"tool_calls": [delta.body()]})
    yield chunk({}, finish_reason=reason, stop_reason=last.pop("stop_reason", None))
    usage = {"prompt_tokens": 30, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 20}}
    yield {"model": "m", "choices": [], "usage": usage, "akv": {"warnings": []}, **last}


def told(events: Iterator[JSON]) -> JSON:
    """The message that a client puts together from events. Checks their order on the way."""
    first = next(events)
    assert first["type"] == "message_start" and first["message"]["content"] == []
    message: JSON = json.loads(json.dumps(first["message"]))
    arguments = ""
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(json.loads(json.dumps(event["content_block"])))
            arguments, is_open = "", True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            match delta["type"]:
                case "text_delta" | "thinking_delta":
                    (key,) = set(delta) - {"type"}
                    assert delta[key]
                    block[key] += delta[key]
                case "signature_delta":
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    arguments += delta["partial_json"]
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(arguments)
        elif event["type"] == "message_delta":
            assert not is_open
            message |= event["delta"] | {key: event[key] for key in set(event) - {"type", "delta"}}
        else:
            assert event["type"] == "message_stop" and next(events, None) is None
            return message
    raise AssertionError("the message did not stop")


def replied(parts: Sequence[str], parser: Parser | None, is_thinking: bool = False, **last: Any) -> JSON:
    """The message, which has to be the same whole and streamed."""
    reply = Reply(ask(), num_prompt_tokens=30, is_thinking=is_thinking)
    message = told(event for chunk in chunks(parts, parser, **last) for event in reply.events(chunk))
    assert message == reply.message
    return message


def hermes(*, is_thinking: bool = False) -> Parser:
    return parser_of(CallFormat("hermes"), FUNCTIONS, many=True, is_thinking=is_thinking)


def tag(arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'


def test_an_answer_in_blocks() -> None:
    message = replied(list(f"<think>\nWhat\ntime?\n</think>\n\nLet me see. {tag()}\n{tag()} Done."), hermes())
    thought, said, first, second, more = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "What\ntime?") and thought["signature"]
    assert said == text("Let me see.") and more == text("Done.")
    assert first["type"] == second["type"] == "tool_use" and first["id"] != second["id"] and first["input"] == {}
    assert (message["role"], message["type"], message["model"]) == ("assistant", "message", "m")
    assert message["usage"] == {
        "input_tokens": 0,
        "cache_creation_input_tokens": 10,
        "cache_read_input_tokens": 20,
        "output_tokens": 7,
    }


def test_a_thought_that_the_template_opened_or_that_was_cut_off() -> None:
    (thought, said) = replied(["hm\n</thi", "nk>\n\nYes."], None, is_thinking=True)["content"]
    assert (thought["thinking"], said) == ("hm", text("Yes."))
    assert answer(thought, said)["content"] == "hm\n</think>\n\nYes."
    (thought,) = replied(["<think>", "\nhm </thi"], None)["content"]
    assert thought["thinking"] == "hm </thi" and answer(thought)["content"] == "<think>\nhm </thi"
    (thought, said) = replied(["<think>\n\n</think>\n\nYes."], None)["content"]  # as models write that do not think
    assert thought["thinking"] == "" and answer(thought, said)["content"] == "<think>\n\n</think>\n\nYes."


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"reason": "stop"}, ("end_turn", None)),
        ({"reason": "tool_calls"}, ("tool_use", None)),
        ({"reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"reason": "length"}, ("model_context_window_exceeded", None)),  # 7 of the 10 tokens that it might have had
    ],
)
def test_stop_reasons(last: JSON, expected: tuple[str, str | None]) -> None:
    message = replied(["x"], None, **last)
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_an_answer_that_reached_max_tokens() -> None:
    reply = Reply(ask(max_tokens=7), num_prompt_tokens=30, is_thinking=False)
    assert told(e for c in chunks(["x"], None, "length") for e in reply.events(c))["stop_reason"] == "max_tokens"


def test_an_answer_that_was_broken_off_is_an_error() -> None:
    reply = Reply(ask(), num_prompt_tokens=30, is_thinking=False)
    with pytest.raises(AkvError, match="broken off"):
        told(event for chunk in chunks(["x"], None, "abort") for event in reply.events(chunk))


def test_applied_edits_stand_where_theirs_do() -> None:
    edits = [
        {"type": "clear_thinking_20251015", "cleared_thinking_turns": 1, "cleared_input_tokens": 4},
        {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": 9},
    ]
    message = replied(["x"], None, context_management={"applied_edits": edits})
    assert message["context_management"] == {"applied_edits": edits}
    assert "context_management" not in replied(["x"], None)


@pytest.mark.parametrize(
    "arguments",
    ['{"a": tru}', '{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": "b', f'{{"a": {"[" * 200}{"]" * 200}}}'],
)
def test_arguments_that_are_no_json_reach_no_client(arguments: str) -> None:
    """Where no grammar holds them: a client that parses what it is streamed would fall over them."""
    closing = "" if arguments.endswith("b") else "}\n</tool_call>"
    message = replied([f'<tool_call>\n{{"name": "now", "arguments": {arguments}{closing}'], hermes())
    (called,) = message["content"]
    assert (called["name"], called["input"]) == ("now", {})


def test_held_arguments_come_as_they_are_written() -> None:
    reply = Reply(ask(tools=[TOOL], tool_choice={"type": "any"}), num_prompt_tokens=30, is_thinking=False)
    events = [e for chunk in chunks(list(tag('{"a": 1}')), hermes()) for e in reply.events(chunk)]
    parts = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert parts == list('{"a": 1}') and reply.message["content"][0]["input"] == {"a": 1}


SCRAPS = [
    *("<think>", "</think>", "<thi", "nk>", "</think", "<tool_call>", "</tool_call>", "\n", " ", "\n\n", "\r\n"),
    *(tag(), tag('{"a": 1.0}'), tag('{"a": "é🙂"}'), "now()", "[now(a=1)]", "[bash(b='x'), now()]", "<|python_tag|>"),
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
    *('[TOOL_CALLS]now[ARGS]{"a": 1}', '[TOOL_CALLS] [{"name": "now", "arguments": {"a": 1}}]', "[TOOL_CALLS]"),
    *('{"name": "now", "parameters": {"a": [1]}}', "; ", "text", "é", '{"a": 1}', "<", "{"),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([*get_args(Style), None]),
    st.lists(st.sampled_from(SCRAPS), max_size=9),
    st.sets(st.integers(0, 200)),
    st.booleans(),
)
def test_what_an_answer_is_sent_back_as_is_what_the_model_wrote(
    style: Style | None, scraps: list[str], cuts: set[int], is_thinking: bool
) -> None:
    written = "".join(scraps)
    at = [0, *sorted(cut for cut in cuts if 0 < cut < len(written)), len(written)]
    parts = [written[a:b] for a, b in pairwise(at)]

    def parser() -> Parser | None:
        return parser_of(CallFormat(style), FUNCTIONS, many=True, is_thinking=is_thinking) if style else None

    reader, content = parser(), written
    if reader is not None:
        content = reader.push(written)[0] + reader.finish()[0]
    calls = reader.calls if reader else []
    message = replied(parts, parser(), is_thinking)
    whole = replied([written], parser(), is_thinking)
    assert [{**b, "id": ""} for b in message["content"]] == [{**b, "id": ""} for b in whole["content"]]
    blocks = json.loads(json.dumps(message["content"]))
    assert all(block.get("text") != "" for block in blocks)
    if all(call.arguments and json_object(call.arguments) for call in calls):
        assert normalise_for_matching(answer(*blocks)) == identity_of(content, calls)


def json_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
