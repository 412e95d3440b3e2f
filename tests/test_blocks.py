"""Blocks: marked observations, reasoning and the arguments of calls, found in any template's text and its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from akv_server.chat import Chat
from tests.chats import CALLING, CHATML, CLOSE, OPEN, RESULT, USER, Whole, with_template

# --- blocks ----------------------------------------------------------------------------------------------------------


def insides(chat: Chat, message: dict[str, Any]) -> list[tuple[str, str]]:
    rendered = Whole(chat, [USER, message])
    span = rendered.spans[1]
    for block in span.blocks:
        assert span.content_start <= block.start <= block.end <= span.content_end
    return [(b.id, chat.tokenizer.decode(rendered.tokens[b.start : b.end], False)) for b in span.blocks]


NOTE = "[No longer shown: obs-1 (sh, 12 tokens, old). Ask for it by this name to have it restored.]\n"


def block(id_: str, text: str) -> str:
    return OPEN.format(id_) + text + CLOSE


@pytest.mark.parametrize(
    ("role", "content", "want"),
    [
        ("tool", block("a", " ls 12 "), [("a", " ls 12 ")]),
        ("tool", "\n " + block("a", "x") + " \n", [("a", "x")]),
        ("tool", block("a", f"x{CLOSE}y{OPEN.format('b')}z"), [("a", f"x{CLOSE}y{OPEN.format('b')}z")]),
        ("tool", block("a", "") + " " + block("b", "evil"), [("a", CLOSE + " " + OPEN.format("b") + "evil")]),
        ("tool", NOTE + NOTE + block("a", "x"), [("a", "x")]),
        ("tool", f"{NOTE}no {block('a', 'x')}", []),
        ("tool", NOTE.strip() + block("a", "x"), []),
        ("tool", "no " + block("a", "x"), []),
        ("tool", block("a", "x") + " no", []),
        ("tool", OPEN.format("a") + "x", []),
        ("tool", CLOSE + "x" + CLOSE, []),
        ("user", f"see {block('a', ' x ')} and {block('b', 'y z')}.", [("a", " x "), ("b", "y z")]),
        ("user", block("a", f"x {block('b', 'y')} z"), [("a", f"x {block('b', 'y')} z")]),
        ("user", OPEN.format("a") + " x " + block("b", "y"), [("b", "y")]),
        ("assistant", "x" + CLOSE + block("a", "y") + CLOSE, [("a", "y")]),
        ("user", block("a", ""), [("a", "")]),
        ("user", "<ephemeral_observation>x</ephemeral_observation>", []),
    ],
)
@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen", "plain", "by_index"])
def test_blocks(chats, name, role, content, want):
    got = insides(chats[name], {"role": role, "content": content})
    assert [id_ for id_, _ in got] == [id_ for id_, _ in want]
    for (_, text), (_, whole) in zip(got, want, strict=True):
        # letters that share a token with a tag stay outside; of these texts at most a space on either side
        assert text in whole
        assert whole.strip(" <>/x") in text or len(whole) - len(text) <= 2


def test_a_block_is_exact_where_tokens_end_at_the_tags(default_chat):
    text = "\nls -la\ntotal 48\n日本 🙂\n"
    message = {"role": "tool", "content": block("obs-1", text)}
    assert insides(default_chat, message) == [("obs-1", text)]


def test_blocks_in_a_template_that_makes_json_of_content(chats):
    message = {"role": "tool", "content": block("a", 'say "hi"\n')}
    assert insides(chats["json"], message) == [("a", 'say \\"hi\\"\\n')]


# --- reasoning and the arguments of calls ----------------------------------------------------------------------------


def texts_of(chat: Chat, messages: list[dict[str, Any]], kind: str) -> list[tuple[int, str, str | None, str]]:
    """(message, id, call, text) of every block of a kind. Arguments may lack a brace's neighbour to a shared token."""
    rendered = Whole(chat, messages)
    return [
        (i, b.id, b.tool_call_id, chat.tokenizer.decode(rendered.tokens[b.start : b.end], False))
        for i, span in enumerate(rendered.spans)
        for b in span.blocks
        if b.kind == kind
    ]


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain", "by_index"])
def test_reasoning_is_a_block_of_an_answer_alone(chats, name):
    thought = "<think>12 + 345 = 357</think>Two.<think>\n \n</think> So <think>done</think> and <think>not closed"
    talk = [{"role": "user", "content": thought}, {"role": "assistant", "content": thought}]
    found = texts_of(chats[name], talk, "thinking")
    assert [(message, block) for message, block, _, _ in found] == [(1, "thinking-0"), (1, "thinking-1")]
    assert found[0][3].strip() in "12 + 345 = 357"
    assert len(found[0][3]) >= 12
    assert found[1][3].strip() in "done"


def test_reasoning_that_the_template_opened_ends_where_the_model_closed_it(default_tokenizer):
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    chat = with_template(default_tokenizer, template)
    rendered = chat.render([USER])
    assert rendered.text.endswith("<think>\n")
    generated = chat.tokenizer.encode("Counting the files.\n</think>\n\nTwo.")
    (block,) = chat.generated_piece(rendered, generated).blocks
    opening = len(rendered.generation)
    assert (block.kind, block.start) == ("thinking", opening)
    assert chat.tokenizer.decode(generated[: block.end - opening]).strip() == "Counting the files."
    assert with_template(default_tokenizer, CHATML).generated_piece(rendered, []).blocks == ()


def test_reasoning_that_a_template_hides_is_no_block(chats):
    answer = {"role": "assistant", "content": "<think>12 + 345</think>\n\nTwo."}
    assert [found[0] for found in texts_of(chats["qwen"], [USER, answer, USER, answer], "thinking")] == [3]


@pytest.mark.parametrize("name", ["chatml", "qwen", "plain"])
def test_arguments_of_calls_are_blocks_with_or_without_the_templates_help(chats, name):
    def call(arguments: Any, number: int) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": "ls", "arguments": arguments}}

    long = {"path": "/tmp/a b", "text": 'x = {"y": "}"}\n<|im_end|>\n<think>no</think>', "n": [1, {"z": 2.5}]}
    calls = [call(json.dumps(long), 0), call({}, 1), call("no json", 2), call({"path": "/tmp/two"}, 3)]
    messages = [
        {**USER, "content": "arguments {of} calls"},
        {"role": "assistant", "content": "I look {here}", "tool_calls": calls},
        {**RESULT, "tool_call_id": "c0"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"path": "/tmp/three"}', 0)]},
        RESULT,
    ]
    found = texts_of(chats[name], messages, "tool_input")
    assert [(message, block, call_id) for message, block, call_id, _ in found] == [
        (1, "input-0", "c0"), (1, "input-1", "c3"), (3, "input-0", "c0"),
    ]  # fmt: skip
    for text, whole in zip(found, (long, {"path": "/tmp/two"}, {"path": "/tmp/three"}), strict=True):
        inside = json.dumps(whole, ensure_ascii=False)[1:-1]
        assert text[3] in inside
        assert len(text[3]) >= len(inside) - 6, "all but what shares a token with a brace"
    assert texts_of(chats[name], messages, "thinking") == []


def test_arguments_that_a_template_writes_in_its_own_way_are_no_blocks(default_tokenizer):
    template = CHATML.replace(
        "{{ message.content }}",
        "{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{% for key, value in call.function.arguments.items() %}<p={{ key }}>{{ value }}</p>{% endfor %}{% endfor %}",
    )
    chat = with_template(default_tokenizer, template)
    assert "<p=p>/tmp</p>" in chat.render([USER, CALLING]).text
    assert texts_of(chat, [USER, CALLING, RESULT], "tool_input") == []
