"""The HTTP surface on a real uvicorn with a tiny model, through the real openai client and httpx."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from akv_sdk._wire import MAX_RETRY_AFTER_S
from akv_sdk.types import SessionInfo
from akv_server.app import create_app
from akv_server.loader import LoadedModel
from tests.server import Server, load_tiny, serving_model

JSON = dict[str, Any]


def post(client: httpx.Client, route: str, **body: Any) -> JSON:
    reply = client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def complete(client: httpx.Client, prompt: Any, **body: Any) -> JSON:
    return post(client, "/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 4, **body})


def chat(client: httpx.Client, messages: list[JSON], **body: Any) -> JSON:
    return post(client, "/v1/chat/completions", messages=messages, **{"temperature": 0, "max_tokens": 4, **body})


def user(text: Any) -> JSON:
    return {"role": "user", "content": text}


def error_of(reply: httpx.Response) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in reply.text
    return reply.status_code, error["code"], error["param"]


def info_of(client: httpx.Client, name: str) -> SessionInfo:
    reply = client.get(f"/v1/cache/sessions/{name}")
    assert reply.status_code == 200, reply.text
    return SessionInfo.model_validate(reply.json()).model_copy(update={"idle_s": 0.0})


def events_of(reply: httpx.Response) -> list[JSON]:
    """The chunks of a finished event stream."""
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


# --- OpenAI ---------------------------------------------------------------------------------------------------------


def test_a_chat_through_the_openai_client(api: OpenAI, server: Server, name: str) -> None:
    reply = api.chat.completions.create(
        model=server.service.model,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"akv": {"session": name}, "return_token_ids": True},
    )
    choice = reply.choices[0]
    assert reply.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert reply.usage
    assert reply.usage.completion_tokens == len(choice.token_ids) <= 6  # type: ignore[attr-defined]
    assert choice.logprobs
    assert choice.logprobs.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    text = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode(errors="replace")
    assert text.removesuffix("<|im_end|>") == choice.message.content
    akv = reply.akv  # type: ignore[attr-defined]
    assert akv["session"] == name
    assert akv["stream_tokens"] == reply.usage.total_tokens
    assert [span["role"] for span in akv["spans"]] == ["system", "user", "assistant"]


def test_a_stream_says_the_same_as_a_whole_reply(api: OpenAI, name: str) -> None:
    ask: JSON = {
        "model": "default",
        "messages": [user("one two three")],
        "max_tokens": 12,
        "temperature": 0,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True, "cache_salt": name},
    }
    whole = api.chat.completions.create(**ask)
    chunks = list(api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    for i in range(2):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == i]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == whole.choices[i].message.content
        assert [t for part in parts for t in getattr(part, "token_ids", [])] == whole.choices[i].token_ids  # type: ignore[attr-defined]
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
        assert [e.token for e in entries] == [e.token for e in whole.choices[i].logprobs.content]  # type: ignore[union-attr]
        assert [part.finish_reason for part in parts][-1] == whole.choices[i].finish_reason
    assert [chunk.usage is not None for chunk in chunks].index(True) == len(chunks) - 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens  # type: ignore[union-attr]
    assert chunks[-1].akv["stream_tokens"] == whole.akv["stream_tokens"]  # type: ignore[attr-defined]


def test_without_usage_the_last_chunk_carries_akv(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(reply)
    assert all(chunk["choices"] for chunk in chunks)
    assert ["akv" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_text_completions_in_all_their_shapes(api: OpenAI, client: httpx.Client) -> None:
    tokens = post(client, "/tokenize", prompt="the agent reads")["tokens"]
    by_text = api.completions.create(model="default", prompt="the agent reads", max_tokens=5, temperature=0, logprobs=2)
    by_ids = api.completions.create(
        model="default",
        prompt=tokens,
        max_tokens=5,
        temperature=0,
        logprobs=2,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    )
    a, b = by_text.choices[0], by_ids.choices[0]
    assert a.text == b.text
    assert a.logprobs
    assert b.logprobs
    assert b.logprobs.tokens == [f"token_id:{t}" for t in b.token_ids]  # type: ignore[attr-defined]
    assert a.logprobs.token_logprobs == pytest.approx(b.logprobs.token_logprobs, abs=1e-5)
    assert all(key.startswith("token_id:") for top in b.logprobs.top_logprobs or [] for key in top)
    assert a.text == "".join(a.logprobs.tokens or [])


def test_echo_scores_a_prompt_and_cached_tokens_have_no_score(client: httpx.Client, name: str) -> None:
    tokens = list(range(3, 83))
    ask = {"max_tokens": 0, "echo": True, "logprobs": 3, "return_tokens_as_token_ids": True, "cache_salt": name}
    first = complete(client, tokens[:60], akv={"session": name}, **ask)
    scored = first["choices"][0]["logprobs"]
    assert first["choices"][0]["finish_reason"] == "length"
    assert scored["tokens"] == [f"token_id:{t}" for t in tokens[:60]]
    assert [value is None for value in scored["token_logprobs"]] == [True] + [False] * 59
    assert all(sum(map(math.exp, top.values())) <= 1 + 1e-6 for top in scored["top_logprobs"][1:])
    second = complete(client, tokens, akv={"session": name}, **ask)
    rest = second["choices"][0]["logprobs"]["token_logprobs"]
    assert [value is None for value in rest] == [True] * 61 + [False] * 19
    assert second["akv"]["prefilled_tokens"] == 20
    # Another session shares the KV, and yet what is new to it is scored.
    other = complete(client, tokens[:60], akv={"session": f"{name}-2"}, **ask)
    assert other["akv"]["prefilled_tokens"] == 0
    assert other["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        scored["token_logprobs"][1:], abs=1e-5
    )
    nobody = complete(client, tokens[:60], **ask)
    assert nobody["choices"][0]["logprobs"]["token_logprobs"] == [None] * 60


def test_stop_strings_end_the_text_and_never_leak(client: httpx.Client, name: str) -> None:
    free = complete(client, "abc", max_tokens=30, return_token_ids=True)["choices"][0]
    text, ids = free["text"], free["token_ids"]
    stop = text[7:10]
    at = text.index(stop)
    for stream in (False, True):
        ask = {
            "max_tokens": 30,
            "stop": ["never", stop],
            "return_token_ids": True,
            "akv": {"session": name + str(stream)},
        }
        if stream:
            reply = client.post("/v1/completions", json={"prompt": "abc", "temperature": 0, "stream": True, **ask})
            parts = [choice for chunk in events_of(reply) for choice in chunk["choices"]]
            got = "".join(part["text"] for part in parts)
            got_ids = [t for part in parts for t in part.get("token_ids", [])]
            reason = parts[-1]["finish_reason"]
        else:
            choice = complete(client, "abc", **ask)["choices"][0]
            got, got_ids, reason = choice["text"], choice["token_ids"], choice["finish_reason"]
        assert (got, reason) == (text[:at], "stop")
        assert got_ids == ids[: len(got_ids)]
        info = info_of(client, name + str(stream))
        assert info.stream_tokens == len(post(client, "/tokenize", prompt="abc")["tokens"]) + len(got_ids)


def test_a_seed_repeats_and_choices_differ(client: httpx.Client) -> None:
    ask = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 8, "return_token_ids": True}
    first, second = ([choice["token_ids"] for choice in complete(client, "seeded", **ask)["choices"]] for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3


def test_end_tokens_stop_unless_ignored(client: httpx.Client, loaded: LoadedModel) -> None:
    free = complete(client, "xyz", max_tokens=6, return_token_ids=True, ignore_eos=True)["choices"][0]["token_ids"]
    assert len(free) == 6
    stopped = complete(client, "xyz", max_tokens=6, return_token_ids=True, stop_token_ids=[free[3]])["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == free[: free.index(free[3]) + 1]


# --- Sessions -------------------------------------------------------------------------------------------------------


def test_the_main_job(client: httpx.Client, name: str) -> None:
    """Observations are dropped by name, what follows closes up, and nothing is prefilled twice."""
    messages = [user("look"), {"role": "assistant", "content": "ls"}]
    before = 0
    for i in range(4):
        content = f'<ephemeral_observation id="obs-{i}">file {i} file {i} file {i}\n</ephemeral_observation>'
        messages.append({"role": "tool", "tool_call_id": "call", "content": content})
        reply = chat(client, messages, akv={"session": name}, cache_salt=name)
        messages.append(reply["choices"][0]["message"])
        prompt_tokens = reply["akv"]["stream_tokens"] - reply["usage"]["completion_tokens"]
        assert reply["akv"]["prefilled_tokens"] == prompt_tokens - before
        assert reply["akv"]["replayed_tokens"] == 0
        before = reply["akv"]["stream_tokens"]
        if i > 0:
            layout = post(client, "/v1/cache/drop", session=name, blocks=[f"obs-{i - 1}"])
            assert layout["changed"] >= 10
            assert layout["next_position"] == layout["visible_tokens"]
    final = chat(client, [*messages, user("done?")], akv={"session": name}, cache_salt=name)
    assert final["akv"]["warnings"] == []
    assert final["akv"]["dropped_tokens"] >= 30
    assert final["usage"]["prompt_tokens"] == final["akv"]["visible_tokens"] - final["usage"]["completion_tokens"]
    blocks = {b["id"]: b["visible"] for span in final["akv"]["spans"] for b in span["blocks"]}
    assert blocks == {"obs-0": False, "obs-1": False, "obs-2": False, "obs-3": True}
    back = post(client, "/v1/cache/restore", session=name, blocks=["obs-2", "obs-0", "obs-1"])
    assert back["dropped_tokens"] == 0
    assert {segment["shift"] for segment in back["segments"]} == {0}


def test_a_session_is_named_in_three_ways(client: httpx.Client, name: str) -> None:
    for i, (body, headers) in enumerate(
        [
            ({"prompt_cache_key": f"{name}-0"}, {}),
            ({"prompt_cache_key": "not this"}, {"X-AKV-Session": f"{name}-1"}),
            ({"prompt_cache_key": "not this", "akv": {"session": f"{name}-2"}}, {"X-AKV-Session": "nor this"}),
        ]
    ):
        reply = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1, **body}, headers=headers)
        assert reply.json()["akv"]["session"] == f"{name}-{i}"
    assert complete(client, "abc")["akv"]["session"] is None
    names = [entry["session"] for entry in client.get("/v1/cache/sessions").json()["data"]]
    assert {f"{name}-{i}" for i in range(3)} <= set(names)


def test_resent_messages_need_not_be_byte_for_byte(client: httpx.Client, name: str) -> None:
    first = chat(client, [user("hello there")], akv={"session": name}, max_tokens=6)
    answer = first["choices"][0]["message"]["content"]
    again = [
        {"role": "user", "content": [{"type": "text", "text": "hello there "}]},
        {"role": "assistant", "content": f"\r\n{answer}\r\n"},
        user("go on"),
    ]
    second = chat(client, again, akv={"session": name})
    assert second["akv"]["warnings"] == []
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["akv"]["stream_tokens"]
    start = first["akv"]["stream_tokens"]
    assert second["akv"]["spans"][1]["start"] == first["akv"]["spans"][1]["start"]
    assert second["akv"]["prefilled_tokens"] == second["usage"]["prompt_tokens"] - start


def test_a_message_that_differs_is_named_and_ops_behind_it_go(client: httpx.Client, name: str) -> None:
    messages = [user("first"), {"role": "assistant", "content": "ok"}, user("second question")]
    reply = chat(client, messages, akv={"session": name})
    end = reply["akv"]["spans"][0]["end"]
    post(client, "/v1/cache/drop", session=name, spans=[[2, 4]])
    changed = [messages[0], {"role": "assistant", "content": "no"}, *messages[2:]]
    reply = chat(client, changed, akv={"session": name})
    (warning,) = reply["akv"]["warnings"]
    assert "messages[1]" in warning
    assert "1 op " in warning
    assert reply["akv"]["ops"] == []
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= end


def test_tools_are_part_of_what_must_match(client: httpx.Client, name: str) -> None:
    messages = [user("hi")]
    chat(client, messages, akv={"session": name})
    tool = {"type": "function", "function": {"name": "ls", "description": "list", "parameters": {"type": "object"}}}
    reply = chat(client, messages, tools=[tool], akv={"session": name})
    assert reply["akv"]["stream_tokens"] > 0


def test_prefill_alone_leaves_the_turn_to_anybody(client: httpx.Client, name: str) -> None:
    messages = [user("one")]
    fed = chat(client, messages, akv={"session": name}, max_tokens=0)
    assert fed["choices"][0]["finish_reason"] == "length"
    assert fed["akv"]["spans"][-1]["end"] == fed["akv"]["stream_tokens"]
    post(client, "/v1/cache/drop", session=name, spans=[[0, 3]])
    reply = chat(client, [*messages, user("two")], akv={"session": name}, max_tokens=0)
    assert reply["akv"]["warnings"] == []
    assert len(reply["akv"]["ops"]) == 1


def test_a_clients_history_rebuilds_a_session_elsewhere(client: httpx.Client, name: str) -> None:
    messages = [user("tell me " * 20)]
    reply = chat(client, messages, akv={"session": name}, max_tokens=0)
    post(client, "/v1/cache/drop", session=name, spans=[[10, 40]])
    messages.append(user("and now?"))
    before = chat(client, messages, akv={"session": name}, return_token_ids=True, max_tokens=8)
    ops = before["akv"]["ops"]
    assert reply["akv"]["stream_tokens"] == ops[0]["at"]
    client.delete(f"/v1/cache/sessions/{name}")
    after = chat(
        client, messages, akv={"session": name, "ops": ops}, cache_salt=name, return_token_ids=True, max_tokens=8
    )
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    plain = chat(client, messages, return_token_ids=True, max_tokens=8)
    assert plain["akv"]["ops"] == []


def test_ops_on_a_stream_of_token_ids(client: httpx.Client, name: str) -> None:
    tokens = [3 + i % 200 for i in range(160)]
    complete(client, tokens, max_tokens=0, akv={"session": name})
    layout = post(client, "/v1/cache/drop", session=name, pages=[2, 3, 4, 5, 6, 7], repos=False)
    assert (layout["changed"], layout["next_position"]) == (96, 160)
    layout = post(client, "/v1/cache/repos", session=name, start=128, end=None, delta=-96)
    assert (layout["changed"], layout["next_position"]) == (32, 64)
    assert [(s["start"], s["end"], s["shift"]) for s in layout["segments"]] == [(0, 32, 0), (128, 160, -96)]
    assert layout["applied"] == [layout["ops"][1]]
    reply = complete(client, [*tokens, 9, 8, 7], max_tokens=1, akv={"session": name})
    assert (reply["akv"]["prefilled_tokens"], reply["akv"]["next_position"]) == (3, 68)
    info = info_of(client, name)
    assert info.ops == [type(info.ops[0])(**op) for op in layout["ops"]]
    assert 0 <= info.fragmentation < 1
    assert info.resident_tokens <= info.visible_tokens


def test_forget_is_as_if_it_had_never_been_there(client: httpx.Client, name: str) -> None:
    tokens = [3 + (7 * i) % 250 for i in range(120)]
    complete(client, tokens, max_tokens=0, akv={"session": name})
    layout = post(client, "/v1/cache/drop", session=name, spans=[[20, 60]], mode="forget")
    assert layout["applied"] == [
        {"op": "drop", "at": 20, "start": 20, "end": 60, "delta": 0, "repos": True, "mode": "forget"}
    ]
    ask = {"max_tokens": 8, "return_token_ids": True}
    forgotten = complete(client, tokens, akv={"session": name}, **ask)
    without = complete(client, tokens[:20] + tokens[60:], **ask)
    assert forgotten["choices"][0]["token_ids"] == without["choices"][0]["token_ids"]
    assert forgotten["akv"]["replayed_tokens"] == 0


def test_evicting_everything_changes_counters_but_no_answer(client: httpx.Client, server: Server, name: str) -> None:
    tokens = [3 + (11 * i) % 250 for i in range(200)]

    def turn(session: str, evict: bool) -> list[JSON]:
        replies = [complete(client, tokens[:150], max_tokens=0, akv={"session": session})]
        post(client, "/v1/cache/drop", session=session, spans=[[30, 100]])
        if evict:
            wait_until(lambda: num_running(client) == 0)
            server.engine.evict_all()
        ask = {"max_tokens": 10, "return_token_ids": True, "akv": {"session": session}}
        return [*replies, complete(client, tokens, **ask)]

    kept, lost = turn(f"{name}-a", False)[1], turn(f"{name}-b", True)[1]
    assert kept["choices"][0]["token_ids"] == lost["choices"][0]["token_ids"]
    assert kept["akv"]["replayed_tokens"] == 0
    assert lost["akv"]["replayed_tokens"] == 150
    assert lost["akv"]["prefilled_tokens"] == kept["akv"]["prefilled_tokens"] == 50
    wait_until(lambda: num_running(client) == 0)
    server.engine.evict_all()
    more = complete(client, [*tokens, 5], akv={"session": f"{name}-b", "on_miss": "forget"})
    assert any("[30, 100)" in warning for warning in more["akv"]["warnings"])
    assert more["akv"]["ops"][0]["mode"] == "forget"


def test_a_fork_shares_and_then_goes_its_own_way(client: httpx.Client, name: str) -> None:
    tokens = [3 + (5 * i) % 250 for i in range(100)]
    complete(client, tokens, max_tokens=0, akv={"session": name})
    post(client, "/v1/cache/drop", session=name, spans=[[10, 30]])
    copied = client.get("/v1/cache/stats").json()["pages_copied"]
    fork = post(client, f"/v1/cache/sessions/{name}/fork", session=f"{name}/fork")
    assert fork["ops"] == info_of(client, name).model_dump(mode="json")["ops"]
    one = complete(client, [*tokens, 5], akv={"session": name})
    two = complete(client, [*tokens, 6], akv={"session": f"{name}/fork"})
    assert (one["akv"]["prefilled_tokens"], two["akv"]["prefilled_tokens"]) == (1, 1)
    assert client.get("/v1/cache/stats").json()["pages_copied"] - copied <= 1
    unnamed = client.post(f"/v1/cache/sessions/{name}/fork")
    assert unnamed.status_code == 200
    assert client.delete(f"/v1/cache/sessions/{unnamed.json()['session']}").json()["deleted"] is True
    assert client.delete(f"/v1/cache/sessions/{name}/fork").status_code == 200
    assert error_of(client.get(f"/v1/cache/sessions/{name}/fork")) == (404, "session_not_found", "session")


# --- Everything else that is served ---------------------------------------------------------------------------------


def test_tokenizing_rendering_and_the_small_routes(client: httpx.Client, api: OpenAI, server: Server) -> None:
    text = "naïve <|im_end|> 日本"
    plain = post(client, "/tokenize", prompt=text)
    assert plain["count"] == len(plain["tokens"])
    assert plain["max_model_len"] == 2048
    assert post(client, "/detokenize", tokens=plain["tokens"])["prompt"] == text
    special = post(client, "/tokenize", prompt=text, parse_special=True)["tokens"]
    assert len(special) < len(plain["tokens"])
    rendered = post(client, "/v1/render", messages=[user(text)])
    (span,) = rendered["spans"]
    content = rendered["tokens"][span["content_start"] : span["content_end"]]
    assert post(client, "/detokenize", tokens=content)["prompt"] == text
    assert rendered["text"].count("<|im_start|>") == 2
    assert (
        post(client, "/v1/render", messages=[user(text)], add_generation_prompt=False)["text"].count("<|im_start|>")
        == 1
    )
    published = client.get("/v1/tokenizer").json()
    assert published["eos_token_id"] == 2
    (model,) = api.models.list().data
    assert (model.id, model.max_model_len) == (server.service.model, 2048)  # type: ignore[attr-defined]
    assert api.models.retrieve(model.id).id == model.id
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json()["version"]
    for path in ("/health", "/v1/models"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    stats = client.get("/v1/cache/stats").json()
    assert stats["pages_total"] == 4096 // 16
    assert stats["tokens_prefilled"] > 0


def test_every_reply_has_a_request_id(client: httpx.Client) -> None:
    assert client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    ids = {client.get(path).headers["x-request-id"] for path in ("/health", "/nowhere", "/v1/models")}
    assert len(ids) == 3
    assert client.get("/health", headers={"X-Request-Id": "a b" * 50}).headers["x-request-id"] != "a b" * 50


def test_unknown_fields_are_left_aside_and_named(client: httpx.Client) -> None:
    reply = complete(client, "abc", user="me", metadata={}, frequency_penalty=0, presence_penalty=0.5, temprature=1)
    assert [warning.split(":")[0] for warning in reply["akv"]["warnings"]] == ["presence_penalty", "temprature"]


# --- Refusals -------------------------------------------------------------------------------------------------------

ABC = {"prompt": "abc"}
HI = {"messages": [user("hi")]}
DROP = {"op": "drop", "at": 1, "start": 0, "end": 1}
FORGET = {**DROP, "mode": "forget"}


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("completions", {}, (400, "invalid_request", "prompt")),
        ("completions", {"prompt": ""}, (400, "invalid_request", "prompt")),
        ("completions", {"prompt": []}, (400, "invalid_request", "prompt")),
        ("completions", {"prompt": [1, 2.0]}, (400, "invalid_request", "prompt[1]")),
        ("completions", {"prompt": [1, 99999]}, (400, "invalid_request", "prompt[1]")),
        ("completions", {"prompt": [1, True]}, (400, "invalid_request", "prompt[1]")),
        ("completions", {"prompt": [1, 10**400]}, (400, "invalid_request", "prompt[1]")),
        ("completions", {"prompt": ["a", "b"]}, (400, "invalid_request", "prompt[0]")),
        ("completions", {**ABC, "max_tokens": -1}, (400, "invalid_request", "max_tokens")),
        ("completions", {**ABC, "max_tokens": "5"}, (400, "invalid_request", "max_tokens")),
        ("completions", {**ABC, "temperature": -0.1}, (400, "invalid_request", "temperature")),
        ("completions", {**ABC, "top_p": 0}, (400, "invalid_request", "top_p")),
        ("completions", {**ABC, "min_p": 1.5}, (400, "invalid_request", "min_p")),
        ("completions", {**ABC, "n": 0}, (400, "invalid_request", "n")),
        ("completions", {**ABC, "n": 1000}, (400, "invalid_request", "n")),
        ("completions", {**ABC, "stop": ["a", ""]}, (400, "invalid_request", "stop[1]")),
        ("completions", {**ABC, "logprobs": 99}, (400, "invalid_request", "logprobs")),
        ("completions", {**ABC, "echo": True, "stream": True}, (400, "invalid_request", "echo")),
        ("completions", {**ABC, "model": "gpt-x"}, (404, "model_not_found", "model")),
        ("completions", {**ABC, "akv": {"sesion": "x"}}, (400, "invalid_request", "akv.sesion")),
        ("completions", {**ABC, "akv": {"ops": [{**DROP, "end": None}]}}, (400, "invalid_request", "akv.ops[0].end")),
        ("completions", {**ABC, "akv": {"ops": [{**DROP, "at": 900}]}}, (400, "span_out_of_range", "akv.ops[0]")),
        ("completions", {"prompt": [3], "akv": {"ops": [{**FORGET, "at": 0}]}}, (400, "invalid_request", "akv.ops")),
        ("completions", {"prompt": [5] * 2100, "max_tokens": 1}, (400, "context_length_exceeded", "prompt")),
        ("completions", {"prompt": "bad \ud800 text"}, (400, "invalid_request", "prompt")),
        ("chat/completions", {}, (400, "invalid_request", "messages")),
        ("chat/completions", {"messages": []}, (400, "invalid_request", "messages")),
        ("chat/completions", {"messages": ["hi"]}, (400, "invalid_request", "messages[0]")),
        ("chat/completions", {"messages": [user("a"), {"content": ""}]}, (400, "invalid_request", "messages[1].role")),
        ("chat/completions", {"messages": [user(5)]}, (400, "invalid_request", "messages[0].content")),
        ("chat/completions", {**HI, "top_logprobs": 21, "logprobs": True}, (400, "invalid_request", "top_logprobs")),
        ("chat/completions", {**HI, "top_logprobs": 2}, (400, "invalid_request", "top_logprobs")),
        ("chat/completions", {"messages": [user("word " * 3000)]}, (400, "context_length_exceeded", "messages")),
        ("render", {"messages": [user("hi")], "extra": 1}, (400, "invalid_request", "extra")),
        ("tokenize", {"prompt": 5}, (400, "invalid_request", "prompt")),
        ("tokenize", {**ABC, "parse_special": "no"}, (400, "invalid_request", "parse_special")),
        ("tokenize", {**ABC, "add_special_tokens": 0}, (400, "invalid_request", "add_special_tokens")),
        ("render", {**HI, "add_generation_prompt": "off"}, (400, "invalid_request", "add_generation_prompt")),
        ("completions", {**ABC, "akv": {"ops": [{**DROP, "repos": 1}]}}, (400, "invalid_request", "akv.ops[0].repos")),
        ("completions", {**ABC, "akv": {"auto_drop": 1}}, (400, "invalid_request", "akv.auto_drop")),
        ("detokenize", {"tokens": [1, -1]}, (400, "invalid_request", "tokens[1]")),
    ],
)  # fmt: skip
def test_bad_bodies_name_the_field(
    client: httpx.Client, route: str, body: JSON, expected: tuple[int, str, str]
) -> None:
    reply = client.post(f"/v1/{route}", content=json.dumps(body))
    assert error_of(reply) == expected, reply.text
    assert complete(client, "still here")["choices"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"spans": [[0, 5], [10, 2000]]}, ("span_out_of_range", "spans[1]")),
        ({"spans": [[10, 5]]}, ("span_out_of_range", "spans[0]")),
        ({"spans": [[0, 10], [5, 15]]}, ("invalid_request", "spans[1]")),
        ({"spans": [[0, 2**31]]}, ("span_out_of_range", "spans[0][1]")),
        ({"spans": [[0, 10**30]]}, ("span_out_of_range", "spans[0][1]")),
        ({"spans": [[-1, 5]]}, ("span_out_of_range", "spans[0][0]")),
        ({"spans": [[0.0, 5]]}, ("invalid_request", "spans[0][0]")),
        ({"spans": [[0, 5.5]]}, ("invalid_request", "spans[0][1]")),
        ({"spans": [[0, "5"]]}, ("invalid_request", "spans[0][1]")),
        ({"spans": [[0, True]]}, ("invalid_request", "spans[0][1]")),
        ({"spans": [[0]]}, ("invalid_request", "spans[0][1]")),
        ({"spans": [[0, 1, 2]]}, ("invalid_request", "spans[0]")),
        ({"spans": 5}, ("invalid_request", "spans")),
        ({}, ("invalid_request", "spans")),
        ({"spans": [[0, 1]], "pages": [0]}, ("invalid_request", "spans")),
        ({"blocks": ["nobody"]}, ("invalid_request", "blocks[0]")),
        ({"pages": [0, 500]}, ("span_out_of_range", "pages[1]")),
        ({"spans": [[0, 1]], "mode": "erase"}, ("invalid_request", "mode")),
        ({"spans": [[0, 1]], "repos": "maybe"}, ("invalid_request", "repos")),
        ({"spans": [[0, 1]], "repos": "yes"}, ("invalid_request", "repos")),
        ({"spans": [[0, 1]], "repos": 1}, ("invalid_request", "repos")),
        ({"spans": [[0, 1]], "extra": 1}, ("invalid_request", "extra")),
    ],
)
def test_bad_drops_change_nothing(client: httpx.Client, name: str, body: JSON, expected: tuple[str, str]) -> None:
    complete(client, list(range(3, 103)), max_tokens=0, akv={"session": name})
    post(client, "/v1/cache/drop", session=name, spans=[[50, 60]])
    before = info_of(client, name)
    for session, more in ((name, {}), (name, {"blocks": None})):
        reply = client.post("/v1/cache/drop", json={"session": session, **more, **body})
        assert error_of(reply)[1:] == expected, reply.text
    assert info_of(client, name) == before
    assert post(client, "/v1/cache/drop", session=name, spans=[[0, 1]])["changed"] == 1


def test_ops_that_conflict_or_have_no_session(client: httpx.Client, name: str) -> None:
    complete(client, list(range(3, 103)), max_tokens=0, akv={"session": name})
    before = info_of(client, name)
    for delta, start, end in ((-5, 10, None), (30, 10, 20), (-1, 0, None)):
        reply = client.post("/v1/cache/repos", json={"session": name, "start": start, "end": end, "delta": delta})
        assert error_of(reply) == (409, "position_conflict", "delta")
    for start, end, param in ((10, 5, "end"), (0, 101, "end"), (101, None, "start"), (102, 103, "start")):
        reply = client.post("/v1/cache/repos", json={"session": name, "start": start, "end": end, "delta": 1})
        assert error_of(reply) == (400, "span_out_of_range", param)
    reply = client.post("/v1/cache/repos", json={"session": name, "start": 10, "delta": 2048 - 99})
    assert error_of(reply) == (400, "context_length_exceeded", "delta")
    assert info_of(client, name) == before
    for route, body in [
        ("drop", {"spans": [[0, 1]]}),
        ("restore", {"spans": [[0, 1]]}),
        ("repos", {"start": 0, "delta": 1}),
    ]:
        reply = client.post(f"/v1/cache/{route}", json={"session": "nobody", **body})
        assert error_of(reply) == (404, "session_not_found", "session")
    assert error_of(client.post("/v1/cache/sessions/nobody/fork"))[1] == "session_not_found"
    assert error_of(client.delete("/v1/cache/sessions/nobody"))[1] == "session_not_found"


def test_a_move_to_the_windows_end_is_no_move_beyond_it(client: httpx.Client, name: str) -> None:
    complete(client, list(range(3, 103)), max_tokens=0, akv={"session": name})
    ask = {"session": name, "start": 10}
    assert post(client, "/v1/cache/repos", **ask, delta=2048 - 100)["next_position"] == 2048
    assert error_of(client.post("/v1/cache/repos", json={**ask, "delta": 1}))[1:] == (
        "context_length_exceeded",
        "delta",
    )
    assert post(client, "/v1/cache/repos", **ask, delta=100 - 2048)["next_position"] == 100


def test_errors_say_what_to_do_instead(client: httpx.Client, name: str) -> None:
    block = '<ephemeral_observation id="a">{}</ephemeral_observation>'
    chat(client, [user(f"{block.format('one')} {block.format('two')}")], max_tokens=0, akv={"session": name})
    (span,) = info_of(client, name).spans
    first, second = ([b.start, b.end] for b in span.blocks)
    for key in ("a", "0:a"):
        reply = client.post("/v1/cache/drop", json={"session": name, "blocks": [key]})
        assert error_of(reply) == (400, "invalid_request", "blocks[0]")
        assert f"spans: {first}, {second}" in reply.json()["error"]["message"]
    post(client, "/v1/cache/drop", session=name, spans=[first, second])
    both = {"session": name, "spans": [[first[0], second[1]]]}
    reply = client.post("/v1/cache/restore", json=both | {"repos": False})
    assert error_of(reply) == (409, "position_conflict", "spans[0]")
    assert "with repos" in reply.json()["error"]["message"]
    assert post(client, "/v1/cache/restore", **both)["dropped_tokens"] == 0
    reply = client.post("/v1/completions", json={**ABC, "stop": ["x"] * 100})
    assert error_of(reply) == (400, "invalid_request", "stop")
    assert "at most 64" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[1]", None),
        (b"5", None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": NaN}', None),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"prompt": "a", "\\udc00": 1}', ""),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt"),
        (b'{"messages": [{"role": "user", "content": "hi", "x": ' + b"[" * 900 + b"]" * 900 + b"}]}", "messages"),
        (b'{"tools": [{"a": ' + b"[" * 500 + b"]" * 500 + b"}]}", "tools"),
        (b'{"tools": [{"a": ' + b'{"a":' * 99 + b"1" + b"}" * 99 + b"}]}", "tools"),
    ],
)
def test_bodies_that_are_no_json_object(client: httpx.Client, content: bytes, param: str | None) -> None:
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/cache/drop", "/v1/render"):
        assert error_of(client.post(route, content=content)) == (400, "invalid_request", param)


def test_what_is_nested_no_deeper_than_the_bound_is_served(client: httpx.Client) -> None:
    deep: Any = 1
    for _ in range(94):
        deep = [deep]  # with what is around it below, at most 100
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": deep}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, "a": deep}}
    assert chat(client, [{**user("hi"), "x": deep}], tools=[tool])["choices"]
    assert chat(client, [user("hi"), {"role": "assistant", "tool_calls": [call]}, user("hi")])["choices"]


def test_arguments_in_a_string_may_be_nested_without_harm(client: httpx.Client) -> None:
    for depth in (900, 100_000):
        function = {"name": "f", "arguments": '{"a": ' + "[" * depth + "]" * depth + "}"}
        messages = [user("hi"), {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}, user("hi")]
        assert post(client, "/v1/render", messages=messages)["tokens"]


def test_a_failing_template_is_the_requests_fault(client: httpx.Client, tmp_path: Path, loaded: LoadedModel) -> None:
    model = load_tiny(tmp_path)
    source = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no such turn') }}{% endif %}"
    source += "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    object.__setattr__(model.tokenizer, "chat_template", source)
    with serving_model(model) as server, server.client() as client:
        status, code, param = error_of(client.post("/v1/chat/completions", json={"messages": [user("bad")]}))
        assert (status, code) == (400, "invalid_request")
        assert param
        assert param.startswith("messages")
        assert chat(client, [user("good")])["choices"]


def test_a_body_beyond_the_bound(client: httpx.Client) -> None:
    body = b'{"prompt": "' + b"a" * (33 * 2**20) + b'"}'
    assert error_of(client.post("/v1/completions", content=body)) == (413, "request_too_large", None)
    assert error_of(client.post("/v1/completions", content=iter([body]))) == (413, "request_too_large", None)
    assert complete(client, "still here")["choices"]


@pytest.mark.parametrize("broken", ["schedule", "commit"])
def test_a_fault_of_the_engine_is_told_and_survived(loaded: LoadedModel, broken: str) -> None:
    with serving_model(loaded) as server, server.client() as client:
        scheduler = server.engine.scheduler

        def fail(*_: Any) -> None:
            delattr(scheduler, broken)
            raise RuntimeError("secret detail")

        setattr(scheduler, broken, fail)
        reply = client.post("/v1/completions", json={"prompt": "abc", "akv": {"session": "s"}})
        assert error_of(reply) == (500, "internal_error", None)
        assert "secret" not in reply.text
        assert error_of(client.get("/v1/cache/sessions/s"))[1] == "session_not_found"
        assert complete(client, "abc", akv={"session": "s"})["choices"]


def test_unknown_routes_and_methods_use_the_envelope(client: httpx.Client) -> None:
    assert error_of(client.get("/v1/nothing"))[:2] == (404, "not_found")
    assert error_of(client.get("/v1/completions"))[:2] == (405, "invalid_request")
    assert error_of(client.get("/docs"))[:2] == (404, "not_found")


def test_openai_errors_are_typed(api: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="default", messages=[], temperature=0)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "hi"}])
    assert missing.value.code == "model_not_found"


def test_prompts_that_are_far_too_long_are_refused_before_they_are_tokenized(
    client: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = "the quick brown fox " * 200_000
    sent: list[JSON] = []

    def answer(body: JSON) -> httpx.Response:
        return client.post(f"/v1/{'chat/completions' if 'messages' in body else 'completions'}", json=body)

    for session in ({}, {"akv": {"session": name}}):
        sent += [{"prompt": text, **session}, {"messages": [user("a"), user(text)], **session}]
        sent.append({"prompt": [1] * 100_000, **session})
    messages = [user("a")]
    messages.append(chat(client, messages, akv={"session": f"{name}-2"})["choices"][0]["message"])
    sent.append({"messages": [*messages, user(text)], "akv": {"session": f"{name}-2"}})
    tokenize = type(server.service.tokenizer)._found

    def checked(self: Any, text: str, *args: Any, **options: Any) -> Any:
        assert len(text) < 1000
        return tokenize(self, text, *args, **options)

    monkeypatch.setattr(type(server.service.tokenizer), "_found", checked)
    with ThreadPoolExecutor(3) as pool:
        for body, reply in zip(sent, pool.map(answer, sent), strict=True):
            field = "messages" if "messages" in body else "prompt"
            assert error_of(reply) == (400, "context_length_exceeded", field), reply.text
    assert info_of(client, f"{name}-2").stream_tokens > 0


def test_a_long_prompt_fits_where_ops_make_room(client: httpx.Client, name: str) -> None:
    text = "the quick brown fox " * 20_000
    end = post(client, "/tokenize", prompt=text)["count"]
    ops = [{"op": "drop", "at": 8, "start": 8, "end": end - 8, "repos": True, "mode": "forget"}]
    assert error_of(client.post("/v1/completions", json={"prompt": text}))[1] == "context_length_exceeded"
    reply = complete(client, text, akv={"session": name, "ops": ops})
    assert (reply["usage"]["prompt_tokens"], reply["akv"]["prefilled_tokens"]) == (16, 16)


def test_a_request_larger_than_the_pool(tmp_path: Path) -> None:
    with serving_model(load_tiny(tmp_path), pool_tokens=128) as server, server.client() as client:
        reply = client.post("/v1/completions", json={"prompt": [5] * 200, "max_tokens": 1})
        assert error_of(reply)[:2] == (503, "out_of_pages")
        assert int(reply.headers["retry-after"]) > MAX_RETRY_AFTER_S, "the SDK does not wait for what will not come"
        assert reply.headers["x-should-retry"] == "false"
        assert complete(client, [5] * 50, max_tokens=0, akv={"session": "s"})["choices"]
        before = info_of(client, "s")
        for stream in (False, True):
            ask = {"prompt": [5] * 200, "max_tokens": 1, "stream": stream, "akv": {"session": "s"}}
            assert error_of(client.post("/v1/completions", json=ask))[:2] == (503, "out_of_pages")
            assert info_of(client, "s") == before
        assert complete(client, [5] * 50, max_tokens=20)["usage"]["completion_tokens"] == 20
        unbounded = chat(client, [user("hi")], max_tokens=None, ignore_eos=True)
        assert unbounded["choices"][0]["finish_reason"] == "length"
        server.engine.check()


# --- At the same time -----------------------------------------------------------------------------------------------


class OpenStream:
    """A streamed completion that has begun, long enough to still run when the test looks."""

    def __init__(self, client: httpx.Client, **body: Any) -> None:
        ask = {"prompt": "endless", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True, **body}
        self._context = client.stream("POST", "/v1/completions", json=ask)

    def __enter__(self) -> httpx.Response:
        reply = self._context.__enter__()
        assert reply.status_code == 200
        self._lines = reply.iter_lines()
        next(self._lines)
        return reply

    def __exit__(self, *exc: Any) -> None:
        self._context.__exit__(*exc)


def num_running(client: httpx.Client) -> int:
    stats = client.get("/v1/cache/stats").json()
    return int(stats["running"]) + int(stats["waiting"])


def test_two_requests_on_one_session(client: httpx.Client, name: str) -> None:
    with OpenStream(client, akv={"session": name}):
        reply = client.post("/v1/completions", json={"prompt": "endless", "akv": {"session": name}})
        assert error_of(reply) == (409, "session_busy", "akv.session")
        assert complete(client, "endless", akv={"session": f"{name}-other"})["choices"]
    wait_until(lambda: not info_of(client, name).generating)
    assert complete(client, "endless", akv={"session": name})["choices"]


def test_an_op_during_a_stream_holds_from_its_end(client: httpx.Client, name: str) -> None:
    ask = {"prompt": [5, 6, 7, 8] * 20, "max_tokens": 300, "akv": {"session": name}, "return_token_ids": True}
    free = complete(client, ask["prompt"], max_tokens=300, return_token_ids=True, ignore_eos=True)
    with ThreadPoolExecutor() as pool:
        with client.stream(
            "POST", "/v1/completions", json={**ask, "stream": True, "temperature": 0, "ignore_eos": True}
        ) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            op = pool.submit(post, client, "/v1/cache/drop", session=name, spans=[[10, 30]])
            chunks = [json.loads(line[6:]) for line in [first, *lines] if line.startswith("data: {")]
        layout = op.result(timeout=30)
    got = [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids", [])]
    assert got == free["choices"][0]["token_ids"], "the stream is unharmed"
    assert layout["applied"][0]["at"] == 80 + 300
    assert layout["stream_tokens"] == 380
    assert chunks[-1]["akv"]["ops"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_work(client: httpx.Client, server: Server, name: str, stream: bool) -> None:
    wait_until(lambda: num_running(client) == 0)
    generated = client.get("/v1/cache/stats").json()["tokens_generated"]
    body = {"prompt": "endless", "max_tokens": 1900, "ignore_eos": True, "akv": {"session": name}, "stream": stream}
    with server.client() as leaver:
        if stream:
            with leaver.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                assert next(lines)
                wait_until(lambda: num_running(client) == 1)
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaver.post("/v1/completions", json=body, timeout=0.2)
    wait_until(lambda: num_running(client) == 0)
    assert client.get("/v1/cache/stats").json()["tokens_generated"] - generated < 1900
    info = info_of(client, name)
    assert not info.generating
    assert info.stream_tokens == len(post(client, "/tokenize", prompt="endless")["tokens"]), "the prompt alone stays"


def test_a_client_that_leaves_while_it_sends_is_no_failure(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    events: list[JSON] = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}]
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop(0) if events else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(create_app(server.service)(scope, receive, send))
    assert not caplog.records


def test_many_at_once_get_what_each_would_get_alone(client: httpx.Client, server: Server) -> None:
    prompts = [[3 + (i * k) % 200 for i in range(20 + 30 * k)] for k in range(1, 9)]
    ask = {"max_tokens": 16, "return_token_ids": True}
    alone = [complete(client, prompt, **ask)["choices"][0]["token_ids"] for prompt in prompts]
    server.engine.evict_all()
    barrier = threading.Barrier(len(prompts))

    def one(prompt: list[int]) -> list[int]:
        barrier.wait()
        return list(complete(client, prompt, **ask)["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(one, prompts)) == alone


# --- Tenants --------------------------------------------------------------------------------------------------------


def test_tenants_and_keys(loaded: LoadedModel) -> None:
    with serving_model(loaded, api_keys=[("ann", "key-a"), ("bob", "key-b"), ("ann", "key-a2")]) as server:
        ann, bob, ann2 = (
            server.client(headers={"Authorization": f"Bearer {key}"}) for key in ("key-a", "key-b", "key-a2")
        )
        with ann, bob, ann2, server.client() as nobody:
            tokens = list(range(3, 103))
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "key-a"},
                {"Authorization": "Basic key-a"},
            ):
                reply = nobody.get("/v1/models", headers=headers)
                assert error_of(reply) == (401, "unauthorized", None)
                assert nobody.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 401
            assert nobody.get("/health").status_code == nobody.get("/version").status_code == 200
            assert nobody.get("/metrics").status_code == 401
            assert complete(ann, tokens, akv={"session": "s"})["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert complete(bob, tokens)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert complete(ann2, tokens)["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
            assert error_of(bob.get("/v1/cache/sessions/s"))[1] == "session_not_found"
            assert bob.get("/v1/cache/sessions").json()["data"] == []
            counts = [who.get("/v1/cache/stats").json()["sessions"] for who in (ann, bob, ann2)]
            assert counts == [1, 0, 1]
            assert re.search(r"^akv_sessions\{.*\} 1$", bob.get("/metrics").text, re.MULTILINE)
            assert info_of(ann2, "s").stream_tokens == 104


def test_a_cache_salt_shares_with_nobody(client: httpx.Client, name: str) -> None:
    tokens = list(range(3, 103))
    complete(client, tokens)
    for salt in (name, f"{name}-2"):
        cached = [
            complete(client, tokens, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for _ in range(2)
        ]
        assert cached == [0, 100]
