"""repos: "auto": a gap stays while positions are well inside the window, and closes before they would run out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv_server import streams
from akv_server.streams import Stream
from tests.server import Server

JSON = dict[str, Any]


# --- where tokens sit -------------------------------------------------------------------------------------------------


def grown(stream: Stream, num_tokens: int) -> Stream:
    return replace(stream, tokens=list(range(len(stream.tokens) + num_tokens)))


def dropped(stream: Stream, start: int, end: int, *, repos: bool = False) -> Stream:
    return streams.drop(stream, streams.named_spans(stream, [(start, end)]), repos=repos, forget=False).stream


def restored(stream: Stream, start: int, end: int) -> Stream:
    return streams.restore(stream, streams.named_spans(stream, [(start, end)]), repos=True).stream


def closed(stream: Stream) -> Stream:
    return streams.close_gaps(stream, len(stream.tokens)).stream


def positions(stream: Stream) -> dict[int, int]:
    """Of the visible tokens, by index."""
    return {i: i + segment.shift for segment in stream.layout.segments for i in range(segment.start, segment.end)}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["drop", "drop", "drop with repos", "restore", "close"]),
        st.integers(0, 8),  # tokens that come before it
        st.floats(0, 1),  # where it starts, as a part of the stream
        st.integers(0, 9),  # how many tokens it takes
    ),
    max_size=14,
)


def stepped(steps: list[tuple[str, int, float, int]], kinds: dict[str, str]) -> tuple[Stream, set[int]]:
    """A stream after these steps, each kind taken for what `kinds` says of it; and the indexes that are visible."""
    stream, visible = Stream(tokens=[0] * 4), set(range(4))
    for drawn, growth, part, length in steps:
        kind = kinds.get(drawn, drawn)
        visible |= set(range(len(stream.tokens), len(stream.tokens) + growth))
        stream = grown(stream, growth)
        start = round(part * len(stream.tokens))
        end = min(start + length, len(stream.tokens))
        if kind == "close":
            stream = closed(stream)
        elif kind == "restore":
            stream = restored(stream, start, end)
            visible |= set(range(start, end))
        else:
            stream = dropped(stream, start, end, repos=kind == "drop with repos")
            visible -= set(range(start, end))
    return stream, visible


@settings(max_examples=400)
@given(STEPS)
def test_closing_leaves_no_gap_whatever_went_came_back_and_was_closed_before(steps: list[Any]) -> None:
    stream, visible = stepped(steps, {})
    assert set(positions(stream)) == visible
    late = closed(stream)
    assert positions(late) == {index: place for place, index in enumerate(sorted(visible))}
    assert late.layout.next_position == late.layout.num_visible
    assert streams.close_gaps(late, 0).applied == []
    again = grown(late, 3)
    assert again.layout.next_position == again.layout.num_visible


@settings(max_examples=400)
@given(STEPS)
def test_a_restore_opens_what_was_closed_and_no_more(steps: list[Any]) -> None:
    gaps, visible = stepped(steps, {"drop with repos": "drop", "close": "drop"})
    assert positions(gaps) == {i: i for i in visible}, "nothing was closed, nothing moves"
    dense, visible = stepped(steps, {"drop": "drop with repos"})
    assert positions(dense) == {index: place for place, index in enumerate(sorted(visible))}, "nothing was left"
    mixed, _ = stepped(steps, {})
    assert all(place <= index for index, place in positions(mixed).items()), "no token has moved beyond its place"
    n = len(mixed.tokens)
    assert positions(restored(mixed, 0, n)) == {i: i for i in range(n)}


def test_what_stays_dropped_does_not_move_when_its_neighbour_comes_back() -> None:
    """Nothing had taken its place, so nothing has to be made room for."""
    stream = restored(closed(dropped(grown(Stream(), 4), 0, 3)), 0, 1)
    assert positions(stream) == {0: 0, 3: 1}
    assert positions(restored(dropped(stream, 2, 4), 1, 2)) == {0: 0, 1: 1}


def test_a_part_that_comes_back_keeps_before_dropped_ones_that_moved_up() -> None:
    stream = restored(closed(dropped(grown(Stream(), 13), 0, 6)), 3, 4)
    stream = restored(dropped(stream, 6, 7), 4, 5)
    assert positions(stream) == {3: 0, 4: 1} | {i: i - 4 for i in range(7, 13)}
    assert positions(restored(stream, 0, 13)) == {i: i for i in range(13)}


@given(STEPS, st.floats(0, 1), st.integers(1, 9), st.booleans())
def test_a_restore_undoes_the_drop_before_it(steps: list[Any], part: float, length: int, repos: bool) -> None:
    stream, visible = stepped(steps, {})
    start = round(part * len(stream.tokens))
    end = next((i for i in range(start, start + length) if i not in visible), start + length)
    assert positions(restored(dropped(stream, start, end, repos=repos), start, end)) == positions(stream)


def test_a_drop_beside_a_gap_that_was_closed() -> None:
    """The two drops share tokens that were gone already, and these sit where they sat before the closing."""
    stream = closed(grown(dropped(grown(Stream(), 14), 9, 14), 4))
    stream = closed(grown(dropped(grown(stream, 4), 7, 11), 2))
    assert positions(stream) == {i: i for i in range(7)} | {i: i - 7 for i in range(14, 24)}


def test_a_restore_of_several_parts_and_of_a_part_of_what_was_closed_as_one() -> None:
    stream = dropped(dropped(dropped(grown(Stream(), 60), 10, 20, repos=True), 20, 30, repos=True), 40, 50)
    wide = streams.restore(stream, streams.named_spans(stream, [(0, 60)]), repos=True)
    assert (wide.changed, [s[:3] for s in wide.stream.layout.segments]) == (30, [(0, 60, 0)])
    stream = dropped(grown(Stream(), 60), 10, 40, repos=True)
    for span, segments in [
        ((25, 30), [(0, 10, 0), (25, 30, -15), (40, 60, -25)]),
        ((20, 25), [(0, 10, 0), (20, 30, -10), (40, 60, -20)]),
        ((5, 60), [(0, 60, 0)]),
    ]:
        stream = restored(stream, *span)
        assert [s[:3] for s in stream.layout.segments] == segments


def test_a_gap_that_a_repos_made_stays_and_what_was_dropped_comes_back() -> None:
    stream = dropped(dropped(grown(Stream(), 100), 10, 20), 20, 30)
    stream = closed(streams.reposition(stream, 50, None, 7).stream)
    assert [s[:3] for s in stream.layout.segments] == [(0, 10, 0), (30, 50, -20), (50, 100, -13)]
    stream = restored(restored(stream, 20, 30), 10, 20)
    assert [s[:3] for s in stream.layout.segments] == [(0, 50, 0), (50, 100, 7)]


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


def test_drops_that_overlap_one_that_was_closed_leave_no_gap(client: httpx.Client, name: str) -> None:
    def complete(num_tokens: int) -> tuple[int, int]:
        prompt = (list(range(3, 203)) * 14)[:num_tokens]
        body = {"prompt": prompt, "max_tokens": 0, "akv": {"session": name}}
        reply = client.post("/v1/completions", json=body).json()["akv"]
        return reply["next_position"], reply["visible_tokens"]

    complete(1400)
    client.post("/v1/cache/drop", json={"session": name, "spans": [[900, 1400]], "repos": "auto"})
    assert complete(1700) == (1200, 1200)
    client.post("/v1/cache/drop", json={"session": name, "spans": [[700, 1100]], "repos": "auto"})
    assert complete(2400) == (1700, 1700)
    assert complete(2740) == (2040, 2040), "of 2048"


@pytest.mark.parametrize("repos", [None, "auto"])
def test_what_auto_dropped_comes_back_where_it_was(client: httpx.Client, name: str, repos: Any) -> None:
    """The client does not know whether "auto" closed the gap, and need not."""
    back: JSON = {"session": name, "spans": [[100, 300]]} | ({"repos": repos} if repos else {})
    drop: JSON = {"session": name, "spans": [[100, 300]], "repos": "auto"}
    body: JSON = {"prompt": list(range(3, 203)) * 5, "max_tokens": 0, "akv": {"session": name}}
    client.post("/v1/completions", json=body)
    for _ in range(5):
        assert client.post("/v1/cache/drop", json=drop).json()["next_position"] == 1000
        reply = client.post("/v1/cache/restore", json=back).json()
        assert (reply["changed"], reply["visible_tokens"], reply["next_position"]) == (200, 1000, 1000)
    body["prompt"] += list(range(3, 203)) * 3
    client.post("/v1/cache/drop", json=drop)
    assert client.post("/v1/completions", json=body).json()["akv"]["next_position"] == 1400, "closed by now"
    for _ in range(5):
        reply = client.post("/v1/cache/restore", json=back).json()
        assert (reply["visible_tokens"], reply["next_position"]) == (1600, 1600)
        assert client.post("/v1/cache/drop", json=drop).json()["next_position"] == 1400


def test_a_closing_that_goes_with_the_end_of_the_stream_is_done_again(client: httpx.Client, name: str) -> None:
    body: JSON = {"max_tokens": 0, "akv": {"session": name}}
    client.post("/v1/completions", json=body | {"prompt": list(range(3, 203)) * 5})
    client.post("/v1/cache/drop", json={"session": name, "spans": [[100, 900]], "repos": "auto"})
    for fill, at, next_position in [(7, 1400, 1400), (7, 1600, 800), (8, 1400, 1400), (8, 1600, 800)]:
        prompt = list(range(3, 203)) * 5 + [fill] * (at - 1000)
        reply = client.post("/v1/completions", json=body | {"prompt": prompt}).json()["akv"]
        assert reply["next_position"] == next_position


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
