"""Where rendered messages meet a session's stream: on real agents' conversations, resent as frameworks resend them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from akv_server.chat import Chat
from akv_server.prompts import ChatPrompt
from akv_server.requests import ChatBody
from akv_server.streams import Continued, Stream
from akv_server.tokenizer import Tokenizer
from tests.chats import Whole

FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name")


@pytest.fixture(scope="module")
def chat(default_tokenizer: Tokenizer) -> Chat:
    return Chat(default_tokenizer)


def conversations(shared: Path, max_messages: int = 40) -> list[list[dict[str, Any]]]:
    files = sorted((shared / "trajectories").glob("*.json"))
    raw = [json.loads(path.read_text())["messages"][:max_messages] for path in files]
    return [[{k: v for k, v in message.items() if k in FIELDS} for message in messages] for messages in raw]


def resent(message: dict[str, Any]) -> dict[str, Any]:
    """The same message as another framework would send it back."""
    again = dict(message)
    if isinstance(content := message.get("content"), str):
        again["content"] = [{"type": "text", "text": f"{content.strip()}\n"}]
    calls = [dict(call, function=dict(call["function"])) for call in message.get("tool_calls") or []]
    for number, call in enumerate(calls):
        call["id"] = f"call_{number}"
        if isinstance(arguments := call["function"]["arguments"], str):
            try:
                call["function"]["arguments"] = json.dumps(json.loads(arguments), indent=1)
            except ValueError:
                continue
    return again | {"tool_calls": calls} if calls else again


def prompt(chat: Chat, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> ChatPrompt:
    return ChatPrompt(ChatBody(messages=messages, tools=tools), chat)


def follows(continued: Continued, stream: Stream) -> bool:
    return continued.first_different is None and continued.num_common == len(stream.tokens)


def test_a_growing_conversation_only_ever_grows_its_stream(chat: Chat, shared: Path) -> None:
    for messages in conversations(shared):
        stream = Stream()
        for end in range(2, len(messages) + 1, 3):
            # what opens the model's turn goes when somebody else speaks, so only messages are compared
            kept = stream.tokens[: stream.messages[-1].end] if stream.messages else []
            before = replace(stream, tokens=kept)
            continued = prompt(chat, [*map(resent, messages[: end - 1]), messages[end - 1]]).continued(before)
            assert follows(continued, before)
            stream = continued.stream
            assert [m.start for m in stream.messages[1:]] == [m.end for m in stream.messages[:-1]]


def test_generated_ids_stay_as_they_are(chat: Chat, shared: Path) -> None:
    """Each of the agent's turns is "generated" one character at a time, which no tokenizer would do."""
    encode = chat.tokenizer.encode
    num_turns = 0
    for messages in conversations(shared, max_messages=16):
        stream, generated = Stream(), 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("tool_calls") or not message.get("content"):
                continue
            text = message["content"].strip()[:200]
            ids = [token for letter in text for token in encode(letter)]
            turn = prompt(chat, [*map(resent, messages[:i])])
            continued = turn.continued(stream)
            assert continued.first_different is None
            assert generated == 0 or continued.num_common >= generated
            ended = [*ids, chat.tokenizer.eos_token_id] if i % 2 else ids
            stream = turn.answered(continued.stream, ended, text)
            generated = len(stream.tokens)
            assert stream.messages[-1].content_end - stream.messages[-1].content_start == len(ids)
            messages[i] = {"role": "assistant", "content": text}
            num_turns += 1
    assert num_turns > 10


def test_the_end_of_a_turn_stands_between_an_answer_and_the_next_message(chat: Chat) -> None:
    for ended in (True, False):
        question = {"role": "user", "content": "How many?"}
        first = prompt(chat, [question])
        ids = chat.tokenizer.encode("Three.") + ([chat.tokenizer.eos_token_id] if ended else [])
        stream = first.answered(first.continued(Stream()).stream, ids, "Three.")
        messages = [question, {"role": "assistant", "content": "Three."}, {"role": "user", "content": "Why?"}]
        continued = prompt(chat, messages).continued(stream)
        assert follows(continued, stream)
        assert continued.stream.tokens == Whole(chat, messages).tokens


def test_a_stop_string_that_is_put_back(chat: Chat) -> None:
    """The reply ends before it, what the model wrote behind it. Where the model did not write it, it is a
    difference."""
    question = {"role": "user", "content": "Add."}
    made_up = [{"id": "call_2", "function": {"name": "python_interpreter", "arguments": "1 + 1"}}]
    reply = "<code>1 + 1\n"

    def asked(*messages: dict[str, Any], stop: str = "</code>") -> ChatPrompt:
        return ChatPrompt(ChatBody(messages=[question, *messages], stop=["Observation:", stop]), chat)

    for written, is_same in ((f"{reply}</code>", True), (f"{reply}</code>\n", True), (reply, False)):
        stream = asked().answered(asked().continued(Stream()).stream, chat.tokenizer.encode(written), reply)
        for text in (f"{reply}</code>", f"{reply}</code>\nCalling tools:\n{made_up}"):
            resent = {"role": "assistant", "content": text}
            continued = asked(resent, question).continued(stream)
            assert follows(continued, stream) == is_same
            assert asked(resent, question).continued(continued.stream).first_different is None
            if is_same:
                assert asked(resent, question, stop="else").continued(stream).first_different == 1


def test_reasoning_that_does_not_come_back(chat: Chat) -> None:
    """A framework that keeps none still has the same conversation; one that sends other reasoning has another."""
    question = {"role": "user", "content": "How many?"}
    written = "<think>\nOne, two.\n</think>\n\nTwo."
    first = prompt(chat, [question])
    stream = first.answered(first.continued(Stream()).stream, chat.tokenizer.encode(written), written)
    for resent, is_same in (("Two.", True), ("<think>One, two.</think>Two.", True), ("<think>Hm.</think>Two.", False)):
        continued = prompt(chat, [question, {"role": "assistant", "content": resent}, question]).continued(stream)
        assert follows(continued, stream) == is_same
    asked_again = prompt(chat, [question, {"role": "assistant", "content": "Three."}, question]).continued(stream)
    assert asked_again.first_different == 1


def test_what_differs_is_named(chat: Chat) -> None:
    messages = [{"role": "user", "content": f"message {i}"} for i in range(4)]
    stream = prompt(chat, messages).continued(Stream()).stream
    for changed, first_different in [
        ([*messages[:2], {"role": "user", "content": "another"}, messages[3]], 2),
        ([*messages[:3], {"role": "system", "content": "message 3"}], 3),
        ([{"role": "user", "content": "message 0!"}], 0),
        ([*messages, messages[0]], None),
        (messages[:2], None),
    ]:
        continued = prompt(chat, changed).continued(stream)
        assert continued.first_different == first_different
        assert continued.stream.tokens == Whole(chat, changed).tokens
