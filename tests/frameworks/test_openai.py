"""The openai package by itself, with an agent's loop around it as people write it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from openai import OpenAI
from pydantic import ValidationError

import akv_sdk
from akv_sdk.integrations import drop, in_session, marked
from akv_sdk.integrations.openai import extra_body, report_of
from akv_sdk.types import LayoutReply, Mark
from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, ScriptedServer, read_file, scripted

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "limit": {"type": "number"}},
            "required": ["path"],
        },
    },
}


def as_it_came(message: dict[str, Any]) -> dict[str, Any]:
    return message


def normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Text stripped, arguments parsed and written again, fields that mean nothing left out."""
    calls = []
    for made in message.get("tool_calls", []):
        arguments = json.dumps(json.loads(made["function"]["arguments"]), sort_keys=True, separators=(",", ":"))
        function = {"name": made["function"]["name"], "arguments": arguments}
        calls.append({"id": made["id"], "type": "function", "function": function})
    text = (message.get("content") or "").strip()
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Content as a list of parts, one for each line, empty where there is none."""
    lines = (message.get("content") or "").splitlines()
    return {**message, "content": [{"type": "text", "text": line} for line in lines]}


def run(agent: ScriptedServer, form: Any = as_it_came, *, stream: bool = False, session: str | None = "agent") -> None:
    """An agent's loop to its end. `form` is how it keeps an answer."""
    client = OpenAI(base_url=agent.url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "You code."}, {"role": "user", "content": "Find the bug."}]
    options: dict[str, Any] = {"model": "default", "tools": [TOOL], "extra_body": {"akv": {"session": session}}}
    while True:
        if stream:
            with client.chat.completions.stream(messages=messages, **options) as events:
                reply: Any = events.get_final_completion()
        else:
            reply = client.chat.completions.create(messages=messages, **options)
        message = reply.choices[0].message
        messages.append(form(message.model_dump(exclude_none=True)))
        if not message.tool_calls:
            return
        for made in message.tool_calls:
            result = read_file(**json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


@pytest.mark.parametrize("form", [as_it_came, normalised, in_parts])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_each_turn_prefills_only_what_is_new(loaded: LoadedModel, form: Any, stream: bool) -> None:
    with scripted(loaded, ANSWERS) as agent:
        run(agent, form, stream=stream)
    agent.check_each_turn_prefills_only_what_is_new()


def test_the_check_sees_an_answer_that_is_not_known_again(models: dict[str, LoadedModel]) -> None:
    with scripted(models["plain"], ANSWERS) as agent:
        run(agent, lambda message: {**message, "content": f"{message.get('content')}!"})
    with pytest.raises(AssertionError):
        agent.check_each_turn_prefills_only_what_is_new()
    with scripted(models["plain"], ANSWERS, drop_before=None) as agent:
        run(agent, session=None)
    with pytest.raises(AssertionError):
        agent.check_each_turn_prefills_only_what_is_new()


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    with scripted(models["plain"], ANSWERS, drop_before=None) as agent:
        output = run_example("agent_openai.py", agent)
    agent.check_each_turn_prefills_only_what_is_new()
    agent.check_observations_are_blocks(False, False, False, True, True)
    assert output.strip().endswith("It is done.")


def test_what_goes_out_and_comes_back(models: dict[str, LoadedModel]) -> None:
    assert extra_body("a") == {"akv": {"session": "a"}}
    mark = Mark(message=1, ephemeral=True)
    body = extra_body("a", ops=[], on_miss="forget", marks=[mark], auto_drop=False)
    assert body == {
        "akv": {
            "session": "a",
            "ops": [],
            "on_miss": "forget",
            "marks": [{"message": 1, "ephemeral": True}],
            "auto_drop": False,
        }
    }
    with pytest.raises(ValidationError, match="session"):
        extra_body("")
    with scripted(models["plain"], ["Yes.", "No."], drop_before=None) as agent:
        client = OpenAI(base_url=agent.url, api_key="none", max_retries=0)
        options: Any = {"model": "default", "messages": [{"role": "user", "content": "?"}]}
        whole = client.chat.completions.create(**options, extra_body=extra_body("a", on_miss="forget"))
        chunks = list(client.chat.completions.create(**options, stream=True, extra_body=extra_body("b")))
    assert report_of(whole) == agent.exchanges[0].akv
    assert [report_of(chunk) for chunk in chunks] == [None] * (len(chunks) - 1) + [agent.exchanges[1].akv]


@pytest.mark.parametrize(
    "content", ["two\nlines", [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}], ["two", "lines"]]
)
def test_what_a_tool_said_is_marked(content: Any) -> None:
    before = copy.deepcopy(content)
    found = marked(content, 'id "x"\n<y>')
    opening, closing = '<ephemeral_observation id="id _x___y_">', "</ephemeral_observation>"
    if isinstance(content, str):
        assert found == f"{opening}\n{content}\n{closing}"
    else:
        assert found == [{"type": "text", "text": opening}, *content, {"type": "text", "text": closing}]
    assert content == before
    assert [marked(nothing, "x") for nothing in ("", [], None)] == ["", [], None]


def test_a_session_that_the_server_does_not_have_has_nothing_to_drop(models: dict[str, LoadedModel]) -> None:
    layouts: list[LayoutReply] = []
    messages = [{"role": "user", "content": "?"}]
    with scripted(models["plain"], ["Yes."], drop_before=None) as agent, akv_sdk.Client(agent.root) as akv:
        session = akv.session("a")
        drop(session, messages, akv_sdk.RollingDrop(0), layouts.append)
        assert not layouts
        OpenAI(base_url=agent.url, api_key="none").chat.completions.create(
            model="default", messages=messages, extra_body=in_session({"top_k": 1}, "a")
        )
        drop(session, messages, None, layouts.append)
        assert [layout.changed for layout in layouts] == [0]
        assert layouts[0].stream_tokens == agent.exchanges[0].akv.stream_tokens
        akv.delete_session("a")
        drop(session, messages, akv_sdk.RollingDrop(0), layouts.append)
    assert len(layouts) == 1
