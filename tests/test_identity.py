"""Messages that are the same, however they are spelled, and messages that are not."""

from __future__ import annotations

from typing import Any

from akv_server.identity import normalise_for_matching
from tests.chats import CALLING, RESULT


def test_messages_that_are_the_same_sent_twice():
    same = [
        ({"role": "user", "content": "a\r\nb "}, {"role": "user", "content": [{"type": "text", "text": "a\nb"}]}),
        ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None}),
        (CALLING, {**CALLING, "tool_calls": [{"id": "other", "function": {"name": "ls", "arguments": {"p": "/tmp"}}}]}),
        (RESULT, {**RESULT, "name": "ls", "tool_call_id": "other"}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    ]
    for a, b in same:
        assert normalise_for_matching(a) == normalise_for_matching(b)
        assert hash(normalise_for_matching(a)) == hash(normalise_for_matching(b))


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
        calling("ls", '{"p": 1}'),
        calling("ls", '{"p": 2}'),
        calling("cat", '{"p": 1}'),
        calling("ls", "not json"),
    ]
    assert len({normalise_for_matching(message) for message in different}) == len(different)
    assert normalise_for_matching(calling("ls", '{"a":1,"b":[2.0]}')) == normalise_for_matching(
        calling("ls", '{ "b": [2], "a": 1 }')
    )
