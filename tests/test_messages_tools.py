"""Agents of the Messages API: calls, the resend of a turn, and the tool runner of the real anthropic package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import httpx
import jsonschema
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool

from akv_server import loader
from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, call
from tests.messages_client import HELLO, JSON, READ, WEATHER, api_of, content, create, prompt_tokens, says
from tests.models import CHAT_TEMPLATE, tiny_model
from tests.server import Server, serving_model


@pytest.fixture
def api(server: Server) -> Iterator[Anthropic]:
    with api_of(server) as api:
        yield api
    server.engine.check()


class Conversation:
    """An agent's, on one session. Each turn has to compute what is new to the session, and nothing else."""

    def __init__(self, api: Anthropic, streamed: bool, **fields: Any) -> None:
        self.session = uuid4().hex
        self.messages: list[Any] = [HELLO]
        self.num_dropped = 0
        self._api = api
        self._streamed = streamed
        self._fields = fields
        self._num_before = 0

    def turn(self) -> tuple[Any, JSON]:
        headers = {"X-AKV-Session": self.session}
        salt = {"cache_salt": self.session}  # so that nothing comes from another test's conversation
        fields = {"extra_headers": headers, "extra_body": salt, **self._fields, "messages": self.messages}
        message, akv = create(self._api, self._streamed, **fields)
        assert akv["session"] == self.session and akv["warnings"] == [] and akv["replayed_tokens"] == 0
        num_new = akv["stream_tokens"] - self._num_before - message.usage.output_tokens
        assert akv["dropped_tokens"] == self.num_dropped
        assert prompt_tokens(message) == akv["visible_tokens"] - message.usage.output_tokens
        assert akv["prefilled_tokens"] == message.usage.cache_creation_input_tokens == num_new
        self._num_before = akv["stream_tokens"]
        self.messages.append({"role": "assistant", "content": message.content})
        return message, akv

    def go_on(self, message: Any) -> None:
        """The results of the message's calls, and something that the agent adds, in one message."""
        used = [block for block in message.content if block.type == "tool_use"]
        text = [{"type": "text", "text": "line 1\nline 2\n" * 3}]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": text} for block in used]
        self.messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})

    @property
    def calls(self) -> list[Any]:
        """All that the model has made."""
        answers = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return [block for answer in answers for block in answer if block.type == "tool_use"]


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_that_are_asked_for_fit_their_schema(api: Anthropic, streamed: bool) -> None:
    for seed, choice in enumerate([{"type": "any"}, {"type": "tool", "name": "get_weather"}]):
        choice = {**choice, "disable_parallel_tool_use": True}
        message, _ = create(api, streamed, tools=[WEATHER], tool_choice=choice, extra_body={"seed": seed})
        (block,) = message.content
        assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "get_weather")
        jsonschema.validate(block.input, WEATHER["input_schema"])
    message, _ = create(
        api, streamed, tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=5, extra_body={"seed": 0}
    )
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("drop_before", [None, 2])
def test_five_turns_with_tools_compute_what_is_new_alone(
    api: Anthropic,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    client: httpx.Client,
    streamed: bool,
    drop_before: int | None,
) -> None:
    says(monkeypatch, server, *ANSWERS)
    talk = Conversation(api, streamed, tools=[READ])
    for i in range(5):
        if i == drop_before:
            spans = client.get(f"/v1/cache/sessions/{talk.session}").json()["spans"]
            span = next([s["content_start"], s["content_end"]] for s in spans if s["role"] == "tool")
            dropped = client.post("/v1/cache/drop", json={"session": talk.session, "spans": [span]}).json()
            talk.num_dropped = dropped["changed"]
            assert talk.num_dropped > 10
        message, akv = talk.turn()
        used = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if used else "end_turn")
        # what the client calls a call is what the stream calls it, and its result
        sent = [block.id for block in talk.calls]
        inputs = [b["tool_call_id"] for span in akv["spans"] for b in span["blocks"] if b["kind"] == "tool_input"]
        results = [span["tool_call_id"] for span in akv["spans"] if span["role"] == "tool"]
        assert inputs == sent and results == sent[: len(results)] and len(set(sent)) == len(sent)
        talk.go_on(message)
    assert [block.input for block in talk.calls] == [
        {"path": "src/app.py", "limit": 20},
        {"limit": 5, "path": "naïve é.txt"},
        {"path": "a"},
        {"path": "b", "limit": 10},
        {"path": "c"},
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_was_cut_off_is_no_call_to_run(
    api: Anthropic, server: Server, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    says(monkeypatch, server, call("read_file", '{"path": "a long path"}'), "I see.")
    talk = Conversation(api, streamed, tools=[READ], max_tokens=60)
    message, _ = talk.turn()
    assert message.stop_reason == "max_tokens"
    assert content(message) == [{"type": "tool_use", "name": "read_file", "input": {}}]
    talk.go_on(message)
    talk.turn()


@pytest.mark.parametrize(
    ("written", "begun"),
    [('{"city": "Ro', {}), ('{"city": "Rome", "da', {"city": "Rome"}), ('{"city": "Rome", "days": 3', None)],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_held_call_that_was_cut_off_is_known_again(
    api: Anthropic, server: Server, monkeypatch: pytest.MonkeyPatch, streamed: bool, written: str, begun: JSON | None
) -> None:
    """Of what a stream has sent of the arguments, the SDK keeps what is complete; a whole message has none."""
    inner = '{"city": "Rome", "days": 3}'
    text = call("get_weather", inner)
    says(monkeypatch, server, text, "I see.")
    num_tokens = text.index(inner) + len(written)  # one a character
    talk = Conversation(api, streamed, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=num_tokens)
    message, _ = talk.turn()
    found = {"city": "Rome", "days": 3} if begun is None else begun
    assert content(message) == [{"type": "tool_use", "name": "get_weather", "input": found if streamed else {}}]
    talk.go_on(message)
    talk.turn()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_held_call_that_was_cut_off_before_its_arguments_is_none(
    api: Anthropic, server: Server, monkeypatch: pytest.MonkeyPatch, streamed: bool, choice: JSON
) -> None:
    text = call("get_weather", '{"city": "Rome", "days": 3}')
    says(monkeypatch, server, text, "I see.")
    num_tokens = text.index('"arguments"')
    talk = Conversation(api, streamed, tools=[WEATHER], tool_choice=choice, max_tokens=num_tokens)
    message, _ = talk.turn()
    assert (message.stop_reason, content(message)) == ("max_tokens", [])
    talk.go_on(message)
    talk.turn()


def load(folder: Path, template: str = CHAT_TEMPLATE) -> LoadedModel:
    path = tiny_model(folder)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return loader.load(str(path), weights="float32")


def test_thoughts_come_back_as_the_model_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the template opens them and the model writes only their end."""
    opening = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert opening != CHAT_TEMPLATE
    for i, (template, start) in enumerate([(CHAT_TEMPLATE, "<think>\n"), (opening, "")]):
        loaded = load(tmp_path / str(i), template)
        with serving_model(loaded) as server, api_of(server) as api:
            for streamed in (False, True):
                answers = (f"{start}Why?\n\nSo.\n</think>\n\n\n  It is.", f"{start}\n</think>x", f"{start}And", "no.")
                says(monkeypatch, server, *answers)
                talk = Conversation(api, streamed)
                found = []
                for _ in answers:
                    message, _ = talk.turn()
                    talk.go_on(message)
                    found.append(content(message))
                thinking = [{"type": "thinking", "thinking": thought} for thought in ("Why?\n\nSo.", "", "And")]
                last = {"type": "text", "text": "no."} if start else {"type": "thinking", "thinking": "no."}
                assert found == [
                    [thinking[0], {"type": "text", "text": "It is."}],
                    [thinking[1], {"type": "text", "text": "x"}],
                    [thinking[2]],
                    [last],
                ]
            server.engine.check()


@beta_tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
    """The weather.

    Args:
        city: where.
        days: how many.
    """
    if city == "Rome":
        raise ValueError("no weather there")
    return f"{city}: rain for {days} days"


RUN = (
    "Let me see. " + call("get_weather", '{"city":"Paris", "days": 2}'),
    call("get_weather", '{"days": 1, "city": "Rome"}') + "\n" + call("get_weather", '{"city": "Paris", "days": 1}'),
    "It rains.",
)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_sdks_tool_runner(api: Anthropic, monkeypatch: pytest.MonkeyPatch, server: Server, streamed: bool) -> None:
    says(monkeypatch, server, *RUN)
    session = uuid4().hex
    before = server.engine.stats()
    runner: Any = api.beta.messages.tool_runner(
        model="default",
        max_tokens=300,
        messages=[HELLO],
        tools=[get_weather],
        stream=streamed,
        extra_headers={"X-AKV-Session": session},
        extra_body={"cache_salt": session},
    )
    messages = [item.get_final_message() if streamed else item for item in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use", "end_turn"]
    assert messages[-1].content[0].text == "It rains."
    # each turn read all that was there, and computed only what was new
    assert [message.usage.cache_read_input_tokens for message in messages[1:]] == [
        prompt_tokens(message) + message.usage.output_tokens for message in messages[:-1]
    ]
    after = server.engine.stats()
    computed = sum(message.usage.cache_creation_input_tokens for message in messages)
    assert after["tokens_prefilled"] - before["tokens_prefilled"] == computed
    assert after["tokens_replayed"] == before["tokens_replayed"]


def test_the_asynchronous_tool_runner(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @beta_async_tool
    async def read_file(path: str) -> str:
        """Reads a file."""
        said.append(path)
        return "text"

    async def run() -> str:
        async with AsyncAnthropic(base_url=server.url, api_key="none") as api:
            runner = api.beta.messages.tool_runner(
                model="default",
                max_tokens=200,
                messages=[HELLO],
                tools=[read_file],  # type: ignore[typeddict-item]
            )
            last = await runner.until_done()
            return last.content[0].text  # type: ignore[union-attr]

    says(monkeypatch, server, call("read_file", '{"path": "a.txt"}'), "Done.")
    assert (asyncio.run(run()), said) == ("Done.", ["a.txt"])
