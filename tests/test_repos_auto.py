"""repos: "auto": a gap stays while positions are well inside the window, and closes before they would run out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv_server import streams
from akv_server.streams import Stream
from tests.server import Server

JSON = dict[str, Any]


# --- closing late comes to the same as closing at once ----------------------------------------------------------------


def gapped(spans: list[tuple[int, int, int]], *, repos: bool) -> Stream:
    """A stream that grows to each `at` and drops `[start, end)` there."""
    stream = Stream()
    for at, start, end in spans:
        stream = replace(stream, tokens=list(range(at)))
        stream = streams.drop(stream, streams.named_spans(stream, [(start, end)]), repos=repos, forget=False).stream
    return replace(stream, tokens=list(range(200)))


def positions(stream: Stream) -> dict[int, int]:
    """Of the visible tokens, by index."""
    return {i: i + segment.shift for segment in stream.layout.segments for i in range(segment.start, segment.end)}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), st.integers(0, 20)), max_size=6))
def test_gaps_closed_late_leave_tokens_where_gaps_closed_at_once_do(drawn: list[tuple[int, int, int]]) -> None:
    spans, at = [], 20
    for growth, start, length in drawn:
        at += growth
        spans.append((at, min(start, at), min(start + length, at)))
    late = streams.close_gaps(gapped(spans, repos=False), 0)
    once = gapped(spans, repos=True)
    assert positions(late.stream) == positions(once)
    assert late.stream.layout.next_position == once.layout.next_position == once.layout.num_visible
    assert streams.close_gaps(late.stream, 0).applied == []


def test_a_gap_that_a_repos_made_stays_and_what_was_dropped_comes_back() -> None:
    stream = replace(Stream(), tokens=list(range(100)))
    stream = streams.drop(stream, streams.named_spans(stream, [(10, 20), (20, 30)]), repos=False, forget=False).stream
    stream = streams.reposition(stream, 50, None, 7).stream
    closed = streams.close_gaps(stream, 0).stream
    assert [s[:3] for s in closed.layout.segments] == [(0, 10, 0), (30, 50, -20), (50, 100, -13)]
    for span in ((20, 30), (10, 20)):
        closed = streams.restore(closed, streams.named_spans(closed, [span]), repos=True).stream
    assert [s[:3] for s in closed.layout.segments] == [(0, 50, 0), (50, 100, 7)]


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_auto_leaves_gaps_and_the_request_that_needs_the_room_closes_them_all(
    client: httpx.Client, server: Server, name: str
) -> None:
    def complete(num_tokens: int) -> JSON:
        body = {"prompt": list(range(3, 203)) * (num_tokens // 200), "max_tokens": 0, "akv": {"session": name}}
        return dict(client.post("/v1/completions", json=body).json()["akv"])

    def drop(start: int, end: int) -> JSON:
        body = {"session": name, "spans": [[start, end]], "repos": "auto"}
        return dict(client.post("/v1/cache/drop", json=body).json())

    assert server.service.window == 2048
    complete(1000)
    for start in (100, 300):
        assert [op["repos"] for op in drop(start, start + 150)["applied"]] == [False]
    at_1400 = complete(1400)
    assert (at_1400["next_position"], at_1400["visible_tokens"]) == (1400, 1100)
    at_1600 = complete(1600)  # 3/4 of 2048 are 1536
    assert (at_1600["next_position"], at_1600["visible_tokens"]) == (1300, 1300)
    assert [(op["op"], op["at"], op["start"], op["delta"]) for op in at_1600["ops"][2:]] == [
        ("repos", 1400, 250, -150), ("repos", 1400, 450, -150),
    ]  # fmt: skip
    # A drop that comes when the room is used closes what was left open before it, too.
    assert [op["repos"] for op in drop(500, 550)["applied"]] == [False]
    complete(1800)
    assert complete(2000)["next_position"] == 1650
    applied = drop(600, 700)["applied"]
    assert [(op["op"], op["start"], op["repos"], op["delta"]) for op in applied] == [("drop", 600, True, 0)]
    # The history says what was done: another session that is given it has the same layout.
    ops = client.get(f"/v1/cache/sessions/{name}").json()["ops"]
    tokens = list(range(3, 203)) * 10
    body = {"prompt": tokens, "max_tokens": 0, "akv": {"session": f"{name}-2", "ops": ops}}
    copy = client.post("/v1/completions", json=body).json()["akv"]
    assert (copy["ops"], copy["next_position"], copy["prefilled_tokens"]) == (ops, 1550, 0)


def test_auto_and_a_client_that_drops_when_the_room_is_used(client: httpx.Client, name: str) -> None:
    def call(route: str, **body: Any) -> JSON:
        return dict(client.post(route, json=body).json())

    call("/v1/completions", prompt=list(range(3, 253)) * 6, max_tokens=0, akv={"session": name})
    call("/v1/cache/drop", session=name, spans=[[100, 200]], repos=False)
    open_gap = call("/v1/completions", prompt=list(range(3, 253)) * 6 + [7] * 100, max_tokens=0, akv={"session": name})
    assert open_gap["akv"]["next_position"] == 1600, "nobody said auto yet"
    call("/v1/completions", prompt=list(range(3, 253)) * 6, max_tokens=0, akv={"session": name})
    call("/v1/cache/drop", session=name, spans=[[300, 400]], repos="auto")
    call("/v1/completions", prompt=list(range(3, 253)) * 6 + [7] * 30, max_tokens=0, akv={"session": name})
    call("/v1/cache/repos", session=name, start=1530, end=None, delta=10)
    done = call("/v1/cache/drop", session=name, spans=[[500, 600]], repos="auto")
    assert [(op["op"], op["start"], op["end"], op["delta"]) for op in done["applied"]] == [
        ("drop", 500, 600, 0), ("repos", 200, None, -100), ("repos", 400, None, -100),
    ]  # fmt: skip
    assert done["changed"] == 100
    assert done["next_position"] == done["visible_tokens"] + 10


@pytest.mark.parametrize(("num_asked", "closes"), [(648, False), (649, True)])
def test_a_gap_closes_before_an_answer_that_would_pass_the_window(
    client: httpx.Client, name: str, num_asked: int, closes: bool
) -> None:
    """1,400 of 2,048 positions are used, 400 tokens visible: an answer of 648 has room behind the gap."""
    body: JSON = {"prompt": list(range(3, 203)) * 7, "max_tokens": 0, "akv": {"session": name}}
    client.post("/v1/completions", json=body)
    client.post("/v1/cache/drop", json={"session": name, "spans": [[100, 1100]], "repos": "auto"})
    reply = client.post("/v1/completions", json=body | {"max_tokens": num_asked, "ignore_eos": True}).json()
    assert reply["usage"]["completion_tokens"] == num_asked
    ops = [(op["op"], op["at"], op["start"], op["end"], op["delta"]) for op in reply["akv"]["ops"]]
    assert ops[1:] == ([("repos", 1400, 1100, None, -1000)] if closes else [])
    assert reply["akv"]["next_position"] == 1400 + num_asked - (1000 if closes else 0)
    assert reply["akv"]["replayed_tokens"] == 0
