"""The Messages API by the real anthropic package, against a real server with a tiny model: answers, usage, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from akv_server.loader import LoadedModel
from tests.messages_client import HELLO, JSON, READ, WEATHER, api_of, content, create, prompt_tokens, says
from tests.server import Server, load_tiny, serving_model


@pytest.fixture
def api(server: Server) -> Iterator[Anthropic]:
    with api_of(server) as api:
        yield api
    server.engine.check()


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer(api: Anthropic, streamed: bool) -> None:
    fields = {"max_tokens": 20, "extra_body": {"temperature": 0}}
    message, akv = create(api, streamed, system="Be brief.", **fields)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny-llama-0")
    assert message.id.startswith("msg_") and message.stop_sequence is None
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 20
    (block,) = message.content
    assert block.type == "text" and block.text
    assert content(message) == content(create(api, not streamed, system="Be brief.", **fields)[0])
    assert [span["role"] for span in akv["spans"]] == ["system", "user", "assistant"]
    chat = httpx.post(
        f"{api.base_url}/v1/chat/completions",
        json={"messages": [{"role": "system", "content": "Be brief."}, HELLO], "max_tokens": 20, "temperature": 0},
    ).json()
    assert chat["choices"][0]["message"]["content"] == block.text
    assert chat["usage"]["prompt_tokens"] == prompt_tokens(message)


def test_a_stream_says_its_usage_at_both_ends(api: Anthropic) -> None:
    fields: JSON = {"model": "default", "max_tokens": 5, "messages": [HELLO]}
    with api.messages.stream(**fields) as stream:
        events = list(stream)
    start = next(event.message for event in events if event.type == "message_start")
    assert (start.usage.input_tokens, start.usage.output_tokens) == (prompt_tokens(stream.get_final_message()), 0)
    assert start.usage.cache_read_input_tokens is None  # not known yet
    assert "".join(event.text for event in events if event.type == "text") == stream.get_final_text()
    raw = httpx.post(f"{api.base_url}/v1/messages", json={**fields, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    lines = raw.text.rstrip("\n").split("\n\n")
    for line in lines:
        name, data = line.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert lines[-1] == 'event: message_stop\ndata: {"type":"message_stop"}'


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence_is_told(
    api: Anthropic, server: Server, monkeypatch: pytest.MonkeyPatch, client: httpx.Client, streamed: bool
) -> None:
    says(monkeypatch, server, "one, two. three", "one, two. three")
    message, _ = create(api, streamed, stop_sequences=["three", ". "])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ". ")
    assert content(message) == [{"type": "text", "text": "one, two"}]
    body = {"messages": [HELLO], "stop": ["three", ". "], "stream": streamed}
    assert '"stop_reason":". "' in client.post("/v1/chat/completions", json=body).text


def test_the_window_ends_an_answer_as_such(api: Anthropic, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, server, "x" * 300)
    message, akv = create(api, False, messages=[{"role": "user", "content": "a tree " * 380}])
    assert (message.stop_reason, akv["next_position"]) == ("model_context_window_exceeded", 2048)


def test_max_tokens_0_computes_the_prompt_alone(api: Anthropic) -> None:
    fields: JSON = {"messages": [{"role": "user", "content": f"Warm {uuid4().hex}"}]}
    message, _ = create(api, False, max_tokens=0, **fields)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    again, _ = create(api, False, max_tokens=1, **fields)
    assert again.usage.cache_creation_input_tokens == 0 and prompt_tokens(again) == prompt_tokens(message)


# --- context management, counting, usage ----------------------------------------------------------------------------


def clearing(**fields: Any) -> JSON:
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 1},
        "keep": {"type": "tool_uses", "value": 1},
        **fields,
    }
    return {"edits": [edit]}


def uses(num: int) -> list[JSON]:
    """A conversation with so many tool uses."""
    messages = [HELLO]
    for i in range(num):
        used = {"type": "tool_use", "id": f"t{i}", "name": "read_file", "input": {"path": f"{i}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": f"result {i}: " + "a line\n" * 10}
        messages += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    return messages


@pytest.mark.parametrize("streamed", [False, True])
def test_edits_are_applied_once_and_usage_is_true(api: Anthropic, server: Server, streamed: bool) -> None:
    session = {"akv": {"session": uuid4().hex}, "cache_salt": uuid4().hex}
    fields = {"max_tokens": 3, "tools": [READ], "context_management": clearing(), "extra_body": session}
    first, akv = create(api, streamed, messages=uses(1), **fields)
    assert first.context_management.applied_edits == []
    before = server.engine.stats()["tokens_prefilled"]
    num_before = akv["stream_tokens"] - first.usage.output_tokens
    # three results are new; two of them go once they were read, and so does the old one before that
    second, akv = create(api, streamed, messages=uses(4), **fields)
    (edit,) = second.context_management.applied_edits
    assert edit.type == "clear_tool_uses_20250919" and edit.cleared_tool_uses == 3
    assert edit.cleared_input_tokens == akv["dropped_tokens"] > 60
    assert "cleared_thinking_turns" not in edit.to_dict()
    num_prefilled = server.engine.stats()["tokens_prefilled"] - before
    assert num_prefilled == akv["prefilled_tokens"]
    usage = second.usage
    assert prompt_tokens(second) == akv["visible_tokens"] - usage.output_tokens
    assert num_prefilled > usage.cache_creation_input_tokens > 0  # of what was computed, some is not seen
    dropped = [(op["start"], op["end"]) for op in akv["ops"]]
    assert usage.cache_read_input_tokens <= num_before - sum(end - start for start, end in dropped if end < num_before)
    assert usage.cache_read_input_tokens > num_before // 2
    third, akv = create(api, streamed, messages=uses(4), **fields)
    assert third.context_management.applied_edits == []
    assert third.usage.cache_read_input_tokens == prompt_tokens(third) == prompt_tokens(second)
    assert create(api, streamed, max_tokens=1)[0].context_management is None


def test_old_thoughts_are_cleared(api: Anthropic) -> None:
    def answer(thought: str) -> JSON:
        blocks = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "So."}]
        return {"role": "assistant", "content": blocks}

    messages = [HELLO, answer("one " * 10), HELLO, answer("two " * 10), HELLO]
    keep = {"type": "thinking_turns", "value": 1}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    message, akv = create(api, False, messages=messages, max_tokens=1, context_management=edits)
    (edit,) = message.context_management.applied_edits
    assert (edit.type, edit.cleared_thinking_turns) == ("clear_thinking_20251015", 1)
    assert edit.cleared_input_tokens == akv["dropped_tokens"] > 10
    visible = [b["visible"] for span in akv["spans"] for b in span["blocks"] if b["kind"] == "thinking"]
    assert visible == [False, True]


def test_the_chat_route_counts_as_truly(client: httpx.Client) -> None:
    def result(i: int) -> list[JSON]:
        function = {"name": "f", "arguments": f'{{"i": {i}}}'}
        called = {"role": "assistant", "tool_calls": [{"id": f"c{i}", "type": "function", "function": function}]}
        return [called, {"role": "tool", "tool_call_id": f"c{i}", "content": f"{i}: " + "a line\n" * 30}]

    def chat(num: int) -> JSON:
        body = {
            "messages": [HELLO, *(m for i in range(num) for m in result(i))],
            "max_tokens": 1,
            "akv": {"session": "true"},
            "context_management": clearing(),
        }
        return client.post("/v1/chat/completions", json=body).json()

    first, second = chat(1), chat(3)
    num_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second["usage"]["prompt_tokens"] < second["akv"]["prefilled_tokens"]
    assert 0 < num_cached < first["usage"]["prompt_tokens"]


def test_tokens_are_counted_without_answering(api: Anthropic, server: Server) -> None:
    fields: JSON = {"model": "default", "messages": uses(3), "tools": [READ], "system": "Be brief."}
    before = server.engine.stats()["tokens_prefilled"]
    plain = api.beta.messages.count_tokens(**fields)
    edited = api.beta.messages.count_tokens(**fields, context_management=clearing())
    assert server.engine.stats()["tokens_prefilled"] == before
    assert plain.input_tokens == prompt_tokens(api.beta.messages.create(**fields, max_tokens=1))
    assert plain.context_management is None and edited.context_management is not None
    assert edited.context_management.original_input_tokens == plain.input_tokens
    with_edits = api.beta.messages.create(**fields, max_tokens=1, context_management=clearing())
    assert edited.input_tokens == prompt_tokens(with_edits) < plain.input_tokens


# --- sessions, keys, errors -----------------------------------------------------------------------------------------


def test_a_session_is_named_by_body_or_header_and_by_nobody_else(api: Anthropic, client: httpx.Client) -> None:
    a, b = uuid4().hex, uuid4().hex
    both: JSON = {"extra_headers": {"X-AKV-Session": a}, "extra_body": {"akv": {"session": b}}, "max_tokens": 1}
    assert create(api, False, **both)[1]["session"] == b
    assert create(api, False, max_tokens=1, extra_headers={"X-AKV-Session": a})[1]["session"] == a
    num = client.get("/v1/cache/stats").json()["sessions"]
    assert create(api, False, max_tokens=1, metadata={"user_id": "somebody"})[1]["session"] is None
    assert client.get("/v1/cache/stats").json()["sessions"] == num


def test_keys_come_in_either_header(loaded: LoadedModel) -> None:
    keys = [("a", "key-a"), ("b", "key-b")]
    ask: JSON = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "mine " * 20}]}
    with serving_model(loaded, pool_tokens=2048, api_keys=keys) as server:
        for options in ({"api_key": "key-a"}, {"api_key": None, "auth_token": "key-a"}):
            with api_of(server, **options) as api:
                first = api.messages.create(**ask)
        assert first.usage.cache_creation_input_tokens == 0  # the second client is the same tenant
        with api_of(server, api_key="key-b") as api:
            assert api.messages.create(**ask).usage.cache_read_input_tokens == 0
        for headers in ({"x-api-key": "wrong"}, {"authorization": "Basic key-a"}, {"x-api-key": ""}, {}):
            reply = httpx.post(f"{server.url}/v1/messages", json=ask, headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            error = reply.json()
            assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
            assert error["error"]["code"] == "unauthorized"
        headers = {"x-api-key": "key-b", "authorization": "Bearer key-a"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


def refused(call: Callable[[], object], kind: type[anthropic.APIStatusError]) -> JSON:
    with pytest.raises(kind) as caught:
        call()
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_are_typed_and_name_their_field(api: Anthropic, streamed: bool) -> None:
    def error(kind: type[anthropic.APIStatusError] = anthropic.BadRequestError, **fields: Any) -> JSON:
        return refused(lambda: create(api, streamed, **fields), kind)

    image = {"type": "image", "source": {"type": "url", "url": "http://example.test/a.png"}}
    found = error(messages=[{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}])
    assert (found["type"], found["code"]) == ("invalid_request_error", "invalid_request")
    assert found["param"] == "messages.0.content.1" and "image" in found["message"]
    found = error(anthropic.NotFoundError, model="claude-x")
    assert (found["type"], found["code"], found["param"]) == ("not_found_error", "model_not_found", "model")
    tools = [{**WEATHER, "input_schema": {"type": "object", "properties": {"x": {"type": "no"}}}}]
    found = error(tools=tools, tool_choice={"type": "any"})
    assert found["param"] == "tools.0.input_schema" and found["message"].startswith("tools.0.input_schema: ")
    found = error(messages=[{"role": "user", "content": "a tree " * 3000}])
    assert (found["code"], found["param"]) == ("context_length_exceeded", "messages")


def test_what_will_never_have_room_is_not_asked_for_again(tmp_path: Path) -> None:
    replies: list[Any] = []
    with serving_model(load_tiny(tmp_path), pool_tokens=128) as server, api_of(server, max_retries=2) as api:
        api._client.event_hooks = {"response": [replies.append]}
        message: JSON = {"role": "user", "content": "a tree " * 100}
        error = refused(lambda: create(api, False, messages=[message]), anthropic.APIStatusError)
        assert error["code"] == "out_of_pages"
    assert [reply.status_code for reply in replies] == [503]


def test_a_count_is_refused_as_a_request_is(api: Anthropic) -> None:
    error = refused(
        lambda: api.messages.count_tokens(model="default", messages=[HELLO], tools=[{**WEATHER, "name": "a b"}]),
        anthropic.BadRequestError,
    )
    assert error["param"] == "tools.0.name"


def test_every_error_below_the_route_is_in_its_envelope(server: Server, client: httpx.Client) -> None:
    def error(reply: httpx.Response) -> tuple[int, str, str]:
        body = reply.json()
        assert body["type"] == "error"
        return reply.status_code, body["error"]["type"], body["error"]["code"]

    not_found = (404, "not_found_error", "not_found")
    assert error(client.get("/v1/messages/batches")) == not_found
    assert error(client.get("/v1/messages")) == (405, "invalid_request_error", "invalid_request")
    assert error(client.post("/v1/messages", content=b"{")) == (400, "invalid_request_error", "invalid_request")
    large = client.post("/v1/messages", content=b" " * (33 * 2**20))
    assert error(large) == (413, "request_too_large", "request_too_large")
    assert "type" not in client.get("/v1/nothing").json()
    ask = {"max_tokens": 1, "messages": [HELLO]}
    scheduler = server.engine.scheduler

    def fail(*_: Any) -> None:
        del scheduler.schedule  # type: ignore[method-assign]
        raise RuntimeError("secret detail")

    scheduler.schedule = fail  # type: ignore[method-assign, assignment]
    reply = client.post("/v1/messages", json=ask)
    assert error(reply) == (500, "api_error", "internal_error") and "secret" not in reply.text
    assert client.post("/v1/messages", json=ask, headers={"anthropic-version": "2023-06-01"}).status_code == 200


def test_a_session_that_generates_is_a_conflict_that_passes(server: Server, api: Anthropic) -> None:
    asked = {"akv": {"session": uuid4().hex}, "seed": 2}  # an answer that does not end before it is asked again
    fields: JSON = {"model": "default", "max_tokens": 400, "messages": [HELLO], "extra_body": asked}
    with api.messages.stream(**fields) as stream:
        next(iter(stream))
        error = refused(lambda: api.messages.create(**fields), anthropic.ConflictError)
        assert (error["type"], error["code"], error["param"]) == ("conflict_error", "session_busy", "akv.session")


def test_a_stream_that_fails_midway_says_so(server: Server, api: Anthropic) -> None:
    scheduler = server.engine.scheduler
    commit = scheduler.commit
    num_left = 3

    def fail_later(*args: Any) -> None:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            scheduler.commit = commit  # type: ignore[method-assign]
            raise RuntimeError("secret detail")
        commit(*args)

    scheduler.commit = fail_later  # type: ignore[method-assign, assignment]
    error = refused(lambda: create(api, True, max_tokens=50), anthropic.APIStatusError)
    assert (error["type"], error["code"]) == ("api_error", "internal_error")
