"""The pure half of the SDK: errors, requests, retries, event streams. No client, no clock, no network."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv_sdk import _events, _wire, errors, types
from akv_server.errors import STATUS_OF_CODE

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
AKV = {
    "session": "s",
    "stream_tokens": 9,
    "visible_tokens": 9,
    "dropped_tokens": 0,
    "prefilled_tokens": 9,
    "replayed_tokens": 0,
    "next_position": 9,
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}


def test_importing_the_sdk_pulls_in_no_part_of_a_server():
    heavy = ["torch", "fastapi", "numpy", "starlette", "uvicorn", "akv_server", "akv_kernels", "transformers"]
    code = f"import sys, akv_sdk; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- errors -----------------------------------------------------------------------------------------------------------


def test_every_code_of_the_server_has_a_class_of_its_own():
    assert set(errors.ERROR_OF_CODE) == set(STATUS_OF_CODE)
    assert len(set(errors.ERROR_OF_CODE.values())) == len(STATUS_OF_CODE)


def test_the_tree_is_drawn_as_it_is():
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    rows = [line for line in errors.__doc__.splitlines() if "──" in line]
    drawn = {row.split("── ")[1].split()[0]: row for row in rows}
    depth_of_row = {name: row.index("──") // 4 + 1 for name, row in drawn.items()}
    assert set(drawn) | {"AkvError"} == {kind.__name__ for kind in classes}
    for kind in classes:
        if kind is not errors.AkvError:
            assert depth_of_row[kind.__name__] == kind.__mro__.index(errors.AkvError)
            assert kind.code in drawn[kind.__name__] or kind in (errors.TransportError, errors.ApiError)


def test_an_error_carries_what_the_reply_said():
    body = {"error": {"message": "no such token", "type": "x", "param": "spans[1]", "code": "span_out_of_range"}}
    headers = {"retry-after": "2.5", "x-request-id": "r-1"}
    error = _wire.error_of_reply(400, headers, json.dumps(body).encode(), now=NOW)
    assert type(error) is errors.SpanOutOfRange
    assert isinstance(error, errors.InvalidRequest)
    got = (error.code, error.message, error.param, error.status, error.retry_after_s, error.request_id)
    assert got == ("span_out_of_range", "no such token", "spans[1]", 400, 2.5, "r-1")
    assert str(error) == "spans[1]: no such token [span_out_of_range]"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), vars(again)) == (type(error), vars(error))


@pytest.mark.parametrize(
    "body", [b"", b"<html>Bad gateway</html>", b"\xff\xfe", b"[]", b'{"detail":"Not Found"}', b'{"error":"text"}']
)
def test_a_refusal_in_another_shape_is_an_api_error_with_its_status(body):
    error = _wire.error_of_reply(502, {}, body, now=NOW)
    assert type(error) is errors.ApiError
    assert (error.status, error.code) == (502, "http_502")


def test_a_code_of_a_newer_server_is_kept():
    error = _wire.error_of_reply(418, {}, b'{"error":{"message":"m","code":"teapot"}}', now=NOW)
    assert (type(error), error.code) == (errors.ApiError, "teapot")


# --- retries ----------------------------------------------------------------------------------------------------------


def delay(error, *, num_failures=1, max_retries=2, is_repeatable=True, seed=0):
    return _wire.retry_delay_s(
        error, num_failures=num_failures, max_retries=max_retries, is_repeatable=is_repeatable, rng=Random(seed)
    )


@pytest.mark.parametrize(
    ("error", "is_repeatable", "is_retried"),
    [
        (errors.ConnectionFailed("m", sent=False), True, True),
        (errors.ConnectionFailed("m", sent=False), False, True),
        (errors.ConnectionFailed("m"), True, True),
        (errors.ConnectionFailed("m"), False, False),
        (errors.Timeout("m"), True, False),
        (errors.BadReply("m", status=200), True, False),
        (errors.OutOfPages("m", status=503), False, True),
        (errors.ApiError("m", status=429), True, True),
        (errors.ApiError("m", status=502), True, False),
        (errors.SessionBusy("m", status=409), True, False),
        (errors.SessionBusy("m", status=409, retry_after_s=1.0), True, True),
        (errors.PositionConflict("m", status=409, retry_after_s=1.0), True, False),
        (errors.InternalError("m", status=500), True, False),
    ],
)
def test_what_is_sent_again(error, is_repeatable, is_retried):
    assert (delay(error, is_repeatable=is_repeatable) is not None) == is_retried


def test_retries_end():
    error = errors.OutOfPages("m", status=503)
    assert [delay(error, num_failures=n) is None for n in (1, 2, 3)] == [False, False, True]
    assert delay(error, max_retries=0) is None


@given(st.integers(1, 100), st.integers(0, 2**32))
def test_backoff_doubles_up_to_a_bound_with_jitter(num_failures, seed):
    waited = delay(errors.ConnectionFailed("m"), num_failures=num_failures, max_retries=100, seed=seed)
    full = min(8.0, 0.5 * 2 ** (num_failures - 1))
    assert full / 2 <= waited <= full


@given(st.floats(0, 60), st.integers(0, 2**32))
def test_a_retry_after_is_the_least_that_is_waited(asked_s, seed):
    waited = delay(errors.OutOfPages("m", status=503, retry_after_s=asked_s), seed=seed)
    assert asked_s <= waited <= 1.25 * asked_s


def test_a_long_retry_after_is_left_to_the_caller():
    assert delay(errors.OutOfPages("m", status=503, retry_after_s=3600.0)) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", None),
        ("nan", None),
        ("soon", None),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header, seconds):
    assert _wire.parse_retry_after(header, now=NOW) == seconds


# --- requests ---------------------------------------------------------------------------------------------------------


def chat(messages=({"role": "user", "content": "hi"},), *, session=None, ops=None, auto=None, stream=False, **params):
    said = {"session": session, "ops": ops, "on_miss": "replay", "auto_drop": auto, "params": params}
    return _wire.chat(messages, model=None, stream=stream, **said)


def test_a_plain_completion_carries_nothing_of_ours():
    call = chat(max_tokens=3, temperature=0, seed=None)
    assert json.loads(call.body) == {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0,
    }


def test_a_session_and_its_history_travel_in_the_akv_object():
    op = types.Op(op="drop", at=8, start=2, end=5, repos=True)
    body = json.loads(chat(session="s", ops=[op], stream=True).body)
    assert types.AkvRequest.model_validate(body["akv"]) == types.AkvRequest(session="s", ops=[op])
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert "ops" not in json.loads(chat(session="s").body)["akv"]  # not known is not the same as none
    assert json.loads(chat(session="s", ops=[]).body)["akv"]["ops"] == []


@pytest.mark.parametrize("auto", [True, False, types.AutoDrop(epsilon=0.2, turns=2, dry_run=True)])
def test_what_is_said_of_server_driven_drops_travels_in_the_akv_object(auto):
    sent = json.loads(chat(session="s", auto=auto).body)["akv"]
    assert types.AkvRequest.model_validate(sent) == types.AkvRequest(session="s", auto_drop=auto)
    assert "auto_drop" not in json.loads(chat(session="s").body)["akv"]  # left out, the server's start decides


def test_a_misspelt_parameter_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        chat(temprature=1)


@pytest.mark.parametrize(
    ("build", "param"),
    [
        (lambda: _drop(), "spans"),
        (lambda: _drop(spans=[(0, 1)], blocks=["b"]), "spans"),
        (lambda: _drop(spans=[(0, 1), (2.5, 3)]), "spans[1][0]"),
        (lambda: _drop(spans=[(0, -1)]), "spans[0][1]"),
        (lambda: _drop(blocks="obs-1"), "blocks"),
        (lambda: _drop(pages=[0, 2**40]), "pages[1]"),
        (lambda: _drop(blocks=[], repos="maybe"), "repos"),
        (lambda: _drop(blocks=[], mode="erase"), "mode"),
        (lambda: _wire.repos("s", start=0, end=None, delta=1.5), "delta"),
        (lambda: _wire.repos("", start=0, end=None, delta=1), "session"),
        (lambda: chat(session=""), "akv.session"),
        (lambda: chat(auto={"epsilon": 0}), "akv.auto_drop.epsilon"),
        (lambda: chat(auto={"eps": 1}), "akv.auto_drop.eps"),
        (lambda: chat(auto=1), "akv.auto_drop"),
        (lambda: chat([{"role": "user", "content": "a\ud800"}]), "messages[0].content"),
        (lambda: chat(["hello"]), "messages[0]"),
        (lambda: chat([{"role": "user", "content": [{"type": "text", "text": b""}]}]), "messages[0].content[0].text"),
        (lambda: chat(temperature=float("nan")), "temperature"),
    ],
)
def test_a_bad_field_is_named_before_anything_is_sent(build, param):
    with pytest.raises(errors.InvalidRequest) as caught:
        build()
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


def _drop(spans=None, blocks=None, pages=None, repos=True, mode="mask"):
    return _wire.drop("s", spans=spans, blocks=blocks, pages=pages, repos=repos, mode=mode)


@pytest.mark.parametrize(("name", "path"), [("a/b ü", "a%2Fb%20%C3%BC"), ("..", "%2E%2E"), ("v0.1", "v0.1")])
def test_a_session_name_stays_one_part_of_the_path(name, path):
    assert _wire.session_info(name).path == f"/v1/cache/sessions/{path}"
    assert _wire.fork(name, name=None).path == f"/v1/cache/sessions/{path}/fork"


def test_only_what_is_idempotent_is_repeatable():
    calls = {
        "repos": _wire.repos("s", start=0, end=None, delta=1),
        "fork": _wire.fork("s", name=None),
        "delete": _wire.delete_session("s"),
        "drop": _drop(blocks=["b"]),
        "restore": _wire.restore("s", spans=None, blocks=["b"], repos=True),
        "chat": chat(),
        "stats": _wire.stats(),
    }
    assert {name for name, call in calls.items() if not call.is_repeatable} == {"fork", "delete"}
    assert {name for name, call in calls.items() if call.keyed} == {"repos", "drop", "restore"}


def test_a_good_status_with_a_body_of_another_api_is_a_bad_reply():
    for body, reason in (
        (b"<html>", "JSON"),
        (b'{"choices":[{}],"usage":{}}', "usage.prompt_tokens"),
        (b"[]", "dictionary|object"),
    ):
        with pytest.raises(errors.BadReply, match=reason) as caught:
            _wire.read(chat(), body, status=200, request_id="r-2")
        assert (caught.value.status, caught.value.request_id) == (200, "r-2")


# --- event streams ----------------------------------------------------------------------------------------------------

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
EVENT = st.lists(LINE, min_size=1, max_size=3)  # the data lines of one event
NOISE = st.sampled_from([": comment", ":", "event: message", "id: 7", "retry: 10", "unknown", "data-x: no", "datax"])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(st.data(), st.lists(EVENT, max_size=6), st.lists(st.integers(0, 2**16), max_size=40), st.booleans())
def test_events_come_out_whole_however_the_bytes_were_cut(data, events, places, with_bom):
    ending = st.sampled_from(["\n", "\r", "\r\n"])

    def line(text: str) -> str:
        end = data.draw(ending)
        return text + end

    text = "\ufeff" if with_bom else ""
    for event in events:
        for content in event:
            for noise in data.draw(st.lists(NOISE, max_size=2)):
                text += line(noise)
            space = "" if content and not content.startswith(" ") and data.draw(st.booleans()) else " "
            text += line(f"data:{space}{content}")
        # A lone CR before an LF would read as one line end, so the blank line repeats the ending it follows.
        text += "\r\n" if text.endswith("\r\n") else text[-1]
    text += "data: never ended"
    parser = _events.SSEParser()
    got = [event for chunk in cut(text.encode(), places) for event in parser.push(chunk)]
    assert got == ["\n".join(event) for event in events]


def sse(*payloads) -> bytes:
    bodies = [payload if isinstance(payload, str) else json.dumps(payload) for payload in payloads]
    return "".join(f"data: {body}\n\n" for body in bodies).encode()


def read_all(data: bytes, places: list[int] = ()) -> tuple[list[_events.Event], types.Completion | None]:
    reader = _events.StreamReader()
    events = [event for chunk in cut(data, list(places)) for event in reader.push(chunk)]
    return events, reader.final


@given(
    st.lists(st.tuples(st.integers(0, 1), st.text(max_size=5), st.lists(st.integers(0, 99), max_size=3)), max_size=8),
    st.lists(st.integers(0, 2**16), max_size=20),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_reply_without_streaming(parts, places, is_chat):
    def chunk(index, text, ids):
        logprobs = {"content": [{"token": str(i), "logprob": -1.0} for i in ids]}
        content = {"delta": {"content": text}} if is_chat else {"text": text}
        return {"choices": [{"index": index, "token_ids": ids, "logprobs": logprobs, "finish_reason": None, **content}]}

    chunks = [chunk(index, text, ids) for index, text, ids in parts]
    ends = [
        {"choices": [{"index": i, "finish_reason": "stop", **({"delta": {}} if is_chat else {"text": ""})}]}
        for i in (0, 1)
    ]
    head = {"id": "c-1", "model": "m"}
    tail = {"choices": [], "usage": USAGE, "akv": AKV}
    events, final = read_all(sse(*({**head, **body} for body in [*chunks, *ends, tail]), "[DONE]"), places)

    def whole(index):
        text = "".join(t for i, t, _ in parts if i == index)
        ids = [n for i, _, more in parts if i == index for n in more]
        seen = any(i == index for i, _, _ in parts)
        content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return {
            "index": index,
            "finish_reason": "stop",
            "token_ids": ids if seen else None,
            "logprobs": {"content": [{"token": str(i), "logprob": -1.0} for i in ids]} if seen else None,
            **content,
        }

    reply = {**head, "choices": [whole(0), whole(1)], "usage": USAGE, "akv": AKV}
    assert final == types.Completion.model_validate(reply)
    assert final.text == "".join(event.text for event in events if event.choice == 0)
    assert final.usage.cached_tokens == 3


def test_tool_calls_are_put_together():
    def delta(**call):
        return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        delta(index=1, id="b", type="function", function={"name": "ls", "arguments": "{}"}),
        delta(index=0, id="a", type="function", function={"name": "cat", "arguments": ""}),
        delta(index=0, function={"arguments": '{"path":'}),
        delta(index=0, function={"arguments": ' "x"}'}),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": USAGE, "akv": AKV},
    ]
    _, final = read_all(sse(*chunks, "[DONE]"))
    assert final.message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "cat", "arguments": '{"path": "x"}'}},
            {"id": "b", "type": "function", "function": {"name": "ls", "arguments": "{}"}},
        ],
    }
    assert (final.text, final.finish_reason) == ("", "tool_calls")


def test_an_error_inside_a_stream_is_raised_as_what_it_is():
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    reader = _events.StreamReader()
    assert [event.text for event in reader.push(sse(chunk))] == ["a"]
    with pytest.raises(errors.OutOfPages, match="pool"):
        reader.push(sse({"error": {"message": "the pool is full", "code": "out_of_pages"}}))
    assert reader.final is None


@pytest.mark.parametrize(
    "data",
    [
        sse("{"),
        sse("3"),
        sse("[]"),
        sse({"choices": 3}),
        sse({"choices": [{"index": 0, "delta": {"content": 3, "tool_calls": [{}]}}]}),
        sse({"choices": [{"index": 0, "delta": {"content": 5}}], "usage": USAGE, "akv": AKV}, "[DONE]"),
        sse({"choices": [{"index": 0, "delta": {"content": "a"}}]}, "[DONE]"),
        sse("[DONE]"),
    ],
)
def test_a_stream_of_another_shape_is_a_bad_reply(data):
    with pytest.raises(errors.BadReply):
        read_all(data)
