"""Messages that are the same, however they are spelled, and messages that are not."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from akv_server.errors import AkvError
from akv_server.identity import named_as, normalise_for_matching, without_reasoning, without_torn_arguments
from tests.chats import CALLING, RESULT

PYTHON = {"name": "python_interpreter", "arguments": "print(1 + 1)"}


def test_messages_that_are_the_same_sent_twice():
    same = [
        ({"role": "user", "content": "a\r\nb "}, {"role": "user", "content": [{"type": "text", "text": "a\nb"}]}),
        ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None}),
        (CALLING, {**CALLING, "tool_calls": [{"id": "other", "function": {"name": "ls", "arguments": {"p": "/tmp"}}}]}),
        (RESULT, {**RESULT, "name": "ls", "tool_call_id": "other"}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (calling_ls('{"p": "a"}'), calling_ls('"{\\"p\\": \\"a\\"}"')),  # encoded twice
    ]
    for a, b in same:
        assert normalise_for_matching(a) == normalise_for_matching(b)
        assert hash(normalise_for_matching(a)) == hash(normalise_for_matching(b))


def calling_ls(*arguments: Any) -> dict[str, Any]:
    """An answer that calls `ls`, once with each of these arguments."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "ls", "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "  Let me look.\n", "tool_calls": calls}


def as_smolagents_sends_it(message: dict[str, Any]) -> dict[str, Any]:
    """The calls as Python writes them, in the text behind the answer's own."""
    text = "\n".join(filter(None, [message["content"].strip(), f"Calling tools:\n{message['tool_calls']}"]))
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


@pytest.mark.parametrize(
    ("generated", "resent"),
    [
        (['{"p":"it\'s \\"é\\"\\n","n":2.0}'], [{"p": 'it\'s "é"\n', "n": 2.0}]),
        (['{"p": "a"}', "{}", '{"x": null, "y": true}'], [{"p": "a"}, {}, {"x": None, "y": True}]),
        (['{"p": "[1, {\\"a\\": 2}]"}'], [{"p": [1, {"a": 2}]}]),  # it takes JSON in a string for its value
        (["not json"], ["not json"]),
    ],
)
def test_calls_that_come_back_as_python_writes_them(generated: list[str], resent: list[Any]):
    same = normalise_for_matching(calling_ls(*generated))
    assert normalise_for_matching(as_smolagents_sends_it(calling_ls(*resent))) == same
    silent = {**calling_ls(*generated), "content": None}
    back = as_smolagents_sends_it({**calling_ls(*resent), "content": ""})
    assert normalise_for_matching(back) == normalise_for_matching(silent) != same


@pytest.mark.parametrize("said", ["", "Here."])
def test_reasoning_is_the_same_in_the_text_and_in_a_field_of_its_own(said: str):
    def identity(content: str, reasoning: str | None = None) -> Hashable:
        return normalise_for_matching({"role": "assistant", "content": content, "reasoning_content": reasoning})

    same = {
        identity(f"<think>\nWhere?\n</think>\n\n{said}"),
        identity(f"Where?</think>{said}"),  # where the template opened it
        identity(f"<think>Where?</think>\n{said}", "Where?"),
        identity(said, "\nWhere?\n"),
    }
    silent = {identity(said), identity(f"<think>\n\n</think>\n\n{said}"), identity(said, "")}
    other = {identity(f"<think>\nWhy?\n</think>\n\n{said}"), identity(said, "Why?")}
    assert [len(same), len(silent), len(other)] == [1, 1, 1]
    assert len(same | silent | other) == 3
    assert {without_reasoning(known) for known in same | silent | other} == silent


@pytest.mark.parametrize("said", ["", "Here."])
def test_reasoning_is_the_same_in_a_part_of_its_own(said: str):
    parts: list[dict[str, Any]] = [{"type": "thinking", "thinking": "Where?\n", "signature": "s"}]
    if said:
        parts.append({"type": "text", "text": said})
    for thought, written in [("Where?\n", f"<think>\nWhere?\n</think>\n\n{said}"), (" ", said)]:
        parts[0]["thinking"] = thought
        back = {"role": "assistant", "content": parts}
        assert normalise_for_matching(back) == normalise_for_matching({"role": "assistant", "content": written})


@pytest.mark.parametrize(
    ("role", "parts", "param"),
    [
        ("user", [{"type": "thinking", "thinking": "a"}], "content[0].type"),
        ("assistant", [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "a"}], "content[1].type"),
        ("assistant", [{"type": "thinking", "text": "a"}], "content[0].thinking"),
        ("assistant", [{"type": "redacted_thinking", "data": "a"}], "content[0].type"),
        ("assistant", [{"type": "text", "text": None}], "content[0].text"),
    ],
)
def test_parts_that_have_no_meaning_are_refused(role: str, parts: list[Any], param: str):
    with pytest.raises(AkvError) as caught:
        normalise_for_matching({"role": role, "content": parts})
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


def test_a_generated_answer_may_come_back_under_a_name():
    generated = normalise_for_matching(calling_ls({"p": 1}))
    named = normalise_for_matching({**calling_ls({"p": 1}), "name": "researcher"})
    other = normalise_for_matching({**calling_ls({"p": 2}), "name": "researcher"})
    assert generated != named == named_as(generated, named)
    assert named_as(generated, other) != other


def test_the_code_of_an_answer_comes_back_as_a_call_too():
    said = {"role": "assistant", "content": "Thought: add.\n<code>\nprint(1 + 1)\n</code>"}
    back = as_smolagents_sends_it({**said, "tool_calls": [{"function": PYTHON}]})
    assert normalise_for_matching(back) == normalise_for_matching(said)


NO_CALLS = (
    "",
    "[]",
    "{}",
    "[1]",
    "[",
    "[" * 300,
    "(" * 9999,
    "[{'id': f()}]",
    "[{'function': {}}]",
    "[{'function': {'name': 'f', 'arguments': {1, 2}}}]",
    "[{'function': {'name': 'f', 'arguments': {(1, 2): b'x'}}}]",
)


@pytest.mark.parametrize("written", NO_CALLS)
def test_text_that_only_looks_like_calls_is_text(written: str):
    message = {"role": "assistant", "content": f"Calling tools:\n{written}"}
    assert normalise_for_matching(message)[1] == message["content"].strip()
    calls = as_smolagents_sends_it(calling_ls({"p": 1}))
    assert normalise_for_matching({**calls, "role": "user"})[2] == ()


@pytest.mark.parametrize(
    ("written", "begun"),
    [
        ('{"path": "a", "limit": 1', {"path": "a", "limit": 1}),
        ('{"path": "a", "lim', {"path": "a"}),
        ('{"path": "a lo', {}),
        ('{"a": [{"b": 1}, {"c', {"a": [{"b": 1}, {}]}),
        ("", {}),
        ("not json", {}),
        ("[1, 2", {}),
        ("[1, 2]", {}),
    ],
)
def test_arguments_that_are_no_json_come_back_as_far_as_they_go_or_not_at_all(written: str, begun: dict[str, Any]):
    def identity(last: Any) -> Hashable:
        functions = [{"name": "ls", "arguments": arguments} for arguments in ({"p": 1}, last)]
        return normalise_for_matching({"role": "assistant", "tool_calls": [{"function": f} for f in functions]})

    assert without_torn_arguments(identity(written)) == {identity({}), identity(begun)}
    assert without_torn_arguments(identity({"p": "{"})) == {identity({"p": "{"})}


def test_an_ending_that_does_not_count():
    message = as_smolagents_sends_it({"content": "Done.\n</code>", "tool_calls": [{"function": PYTHON}]})
    without = {"role": "assistant", "content": "Done."}
    assert normalise_for_matching(message, ending="</code>") == normalise_for_matching(without)
    assert normalise_for_matching(message, ending="Done.") == normalise_for_matching(message)


def test_messages_that_differ():
    def calling(name: str, arguments: str) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }

    different = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "a b"},
        {"role": "user", "content": "a  b"},
        {"role": "system", "content": "a"},
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "name": "Ann"},  # a template may write it
        calling("ls", '{"p": 1}'),
        calling("ls", '{"p": 2}'),
        calling("cat", '{"p": 1}'),
        calling("ls", "not json"),
        calling("ls", '"not json"'),
        calling("ls", '"{\\"p\\": 3}"'),
        calling("ls", '{"p": 1, "limit": null}'),  # a null means what the function makes of it
        as_smolagents_sends_it(calling_ls({"p": 1})),
        as_smolagents_sends_it(calling_ls({"p": "1"})),
        as_smolagents_sends_it(calling_ls({"p": 1}, {"p": 1})),
    ]
    assert len({normalise_for_matching(message) for message in different}) == len(different)
    assert normalise_for_matching(calling("ls", '{"a":1,"b":[2.0]}')) == normalise_for_matching(
        calling("ls", '{ "b": [2], "a": 1 }')
    )
