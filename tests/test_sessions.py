"""Streams as values (continuing, ops, names of spans) and sessions on an event loop (who may change what, and when)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from akv_sdk import types
from akv_server import streams
from akv_server.blocks import Block
from akv_server.errors import AkvError
from akv_server.ops import Layout, Op, Timeline
from akv_server.sessions import Sessions
from akv_server.streams import Continued, Message, Stream, continued, named_spans

WINDOW = 400


class FakeCache:
    """Residency as a test says: the tokens below `num_resident` are there."""

    def __init__(self) -> None:
        self.num_resident = 10**9

    def residency(
        self, salt: str, tokens: list[int], timeline: Timeline, *, with_tier: bool = False
    ) -> tuple[int, int]:
        n = min(len(tokens), self.num_resident)
        return timeline.layout_at(len(tokens)).num_visible_in(0, n), -(-n // 16)


def stream_of(num_tokens: int, *ops: Op) -> Stream:
    """A stream with these ops, all of it computed under them."""
    return replace(Stream(tokens=list(range(num_tokens))).with_history(ops), num_known=num_tokens)


def refused(code: str, param: str | None = None) -> Any:
    """Expects this error, and that it names this field."""

    class Expectation:
        def __enter__(self) -> None:
            self.raised = pytest.raises(AkvError)
            self.caught = self.raised.__enter__()

        def __exit__(self, *exc: Any) -> bool:
            done = self.raised.__exit__(*exc)
            assert (self.caught.value.code, self.caught.value.param) == (code, param)
            return bool(done)

    return Expectation()


# Streams -------------------------------------------------------------------------------------------------------------


def test_a_longer_prompt_keeps_everything() -> None:
    stream = stream_of(100, Op("drop", 100, 10, 20, repos=True))
    after = continued(stream, list(range(150)))
    assert (after.num_common, after.num_lost) == (100, 0)
    assert after.stream.timeline.history == stream.timeline.history
    assert after.stream.num_known == 100
    assert after.stream.layout.num_visible == 140


def test_a_different_prompt_loses_the_ops_behind_the_difference() -> None:
    stream = stream_of(100, Op("drop", 40, 10, 20), Op("drop", 100, 30, 60))
    tokens = [*range(50), -1, *range(51, 100)]
    after = continued(stream, tokens)
    assert (after.num_common, after.num_lost) == (50, 1)
    assert after.stream.timeline.history == (Op("drop", 40, 10, 20),)
    assert after.stream.tokens == tokens
    assert after.stream.num_known == 50
    assert stream.tokens[50] == 50, "the stream itself is a value"


def test_a_shorter_prompt_truncates() -> None:
    after = continued(stream_of(100, Op("drop", 60, 10, 20), Op("drop", 80, 30, 60)), list(range(60)))
    assert (after.num_common, after.num_lost) == (60, 1)
    assert after.stream.layout.num_visible == 50


@pytest.mark.parametrize(("length", "end"), [(50, 50), (70, 60), (20, None)])
def test_what_was_forgotten_stays_so_as_far_as_it_reaches(length: int, end: int | None) -> None:
    stream = stream_of(100, Op("drop", 30, 30, 60, repos=True, mode="forget"))
    history = continued(stream, list(range(length))).stream.timeline.history
    expected = () if end is None else (Op("drop", 30, 30, end, repos=True, mode="forget"),)
    assert history == expected


def test_a_forget_that_is_cut_short_may_take_a_later_op_with_it() -> None:
    stream = stream_of(100, Op("drop", 10, 10, 60, mode="forget"), Op("repos", 30, 20, None, delta=-45))
    truncated, num_lost = stream.truncated(40)
    assert num_lost == 1
    assert truncated.layout.num_visible == 10


def test_messages_beyond_the_common_part_are_no_longer_there() -> None:
    messages = tuple(Message(i, "user", 10 * i, 10 * i + 10, 10 * i + 2, 10 * i + 8) for i in range(5))
    stream = Stream(list(range(50)), messages)
    after = continued(stream, [*range(35), -1])
    assert after.stream.messages == messages[:3]


def test_drop_applies_spans_one_after_another() -> None:
    stream = stream_of(160)
    edited = streams.drop(stream, named_spans(stream, [(96, 128), (32, 64)]), repos=True, forget=False)
    assert edited.changed == 64
    assert edited.applied == [Op("drop", 160, 96, 128, repos=True), Op("drop", 160, 32, 64, repos=True)]
    assert [s[:3] for s in edited.stream.layout.segments] == [(0, 32, 0), (64, 96, -32), (128, 160, -64)]


def test_no_op_leaves_no_trace() -> None:
    stream = stream_of(100, Op("drop", 100, 10, 20))
    for spans in ([(12, 18)], [(50, 50)], [(10, 20)]):
        edited = streams.drop(stream, named_spans(stream, spans), repos=True, forget=False)
        assert (edited.stream, edited.changed, edited.applied) == (stream, 0, [])
    edited = streams.restore(stream, named_spans(stream, [(40, 60)]), repos=True)
    assert (edited.stream, edited.changed, edited.applied) == (stream, 0, [])


def test_drop_and_restore_are_inverse() -> None:
    stream = stream_of(160)
    spans = named_spans(stream, [(32, 64), (100, 130)])
    dropped = streams.drop(stream, spans, repos=True, forget=False).stream
    restored = streams.restore(dropped, list(reversed(spans)), repos=True)
    assert restored.changed == 62
    assert restored.stream.layout.segments == [(0, 160, 0, 0)]


def test_forget_takes_effect_where_the_span_starts() -> None:
    stream = stream_of(100, Op("drop", 100, 50, 60, repos=True))
    edited = streams.drop(stream, named_spans(stream, [(20, 30)]), repos=True, forget=True)
    assert edited.changed == 10
    assert [op.at for op in edited.stream.timeline.history] == [20, 100]
    assert edited.stream.num_known == 20
    assert edited.stream.layout.next_position == 80
    again = streams.drop(edited.stream, named_spans(stream, [(20, 30)]), repos=True, forget=True)
    assert (again.changed, again.applied, again.stream) == (0, [], edited.stream)


def test_forget_that_later_ops_leave_no_room_for_is_refused() -> None:
    stream = stream_of(100, Op("drop", 60, 0, 10), Op("repos", 60, 10, None, delta=-10))
    with refused("position_conflict", "spans[0]"):
        streams.drop(stream, named_spans(stream, [(5, 20)]), repos=True, forget=True)


@pytest.mark.parametrize(
    ("spans", "code", "param"),
    [
        ([(0, 10), (90, 101)], "span_out_of_range", "spans[1]"),
        ([(20, 10)], "span_out_of_range", "spans[0]"),
        ([(100, 2**31 - 1)], "span_out_of_range", "spans[0]"),
        ([(0, 10), (50, 60), (9, 12)], "invalid_request", "spans[2]"),
        ([(5, 6), (5, 6)], "invalid_request", "spans[1]"),
    ],
)
def test_bad_spans_are_named(spans: list[tuple[int, int]], code: str, param: str) -> None:
    with refused(code, param):
        named_spans(stream_of(100), spans)


def test_an_op_that_conflicts_is_refused_whole() -> None:
    stream = stream_of(100, Op("drop", 100, 10, 20), Op("repos", 100, 20, None, delta=-10))
    spans = named_spans(stream, [(30, 40), (12, 15)])
    with refused("position_conflict", "spans[1]"):
        streams.restore(stream, spans, repos=False)


def test_pages_are_sixteen_tokens_and_join() -> None:
    stream = stream_of(100)
    spans = streams.spans_of_pages(stream, [6, 1, 0, 4])
    assert [(s.start, s.end) for s in spans] == [(0, 32), (64, 80), (96, 100)]
    with refused("span_out_of_range", "pages[1]"):
        streams.spans_of_pages(stream, [0, 7])


def test_blocks_are_named_by_id_or_by_message_and_id() -> None:
    blocks = [(Block("a", 3, 6),), (Block("a", 13, 16), Block("b:1", 17, 18)), ()]
    messages = tuple(Message(i, "tool", 10 * i, 10 * i + 10, 0, 0, None, b) for i, b in enumerate(blocks))
    stream = Stream(list(range(30)), messages)
    spans = streams.spans_of_blocks(stream, ["b:1", "0:a", "1:a"])
    assert [(s.param, s.start, s.end) for s in spans] == [
        ("blocks[0]", 17, 18), ("blocks[1]", 3, 6), ("blocks[2]", 13, 16),
    ]  # fmt: skip
    for names in (["a"], ["zz"], ["2:a"], ["0:a", "0:a"]):
        with refused("invalid_request", f"blocks[{len(names) - 1}]"):
            streams.spans_of_blocks(stream, names)


def test_a_clients_history_is_checked_op_by_op() -> None:
    stream = stream_of(100)
    good = Op("drop", 50, 0, 10)
    for bad, code, param in [
        (Op("drop", 101, 0, 10), "span_out_of_range", "ops[1]"),
        (Op("drop", 60, 60, 101, mode="forget"), "span_out_of_range", "ops[1]"),
        (Op("drop", 60, 50, 61), "span_out_of_range", "ops[1]"),
        (Op("drop", 40, 0, 10), "invalid_request", "ops[1].at"),
        (Op("repos", 60, 5, None, delta=-30), "position_conflict", "ops[1]"),
    ]:
        with refused(code, param):
            stream.with_history((good, bad))
    assert stream.with_history((good,)).num_known == 50


def test_random_ops_agree_with_replaying_their_history() -> None:
    """Whatever was applied, the journal alone gives the same layout; what was refused changed nothing."""
    rng = Random(7)
    num_refused = num_other = 0
    for _ in range(60):
        stream = stream_of(rng.randrange(1, 60))
        for _ in range(12):
            n = len(stream.tokens)
            start, end = sorted((rng.randrange(n + 1), rng.randrange(n + 1)))
            before = stream
            try:
                spans = named_spans(stream, [(start, end)])
                kind = rng.randrange(4)
                if kind == 0:
                    stream = streams.drop(stream, spans, repos=rng.random() < 0.5, forget=False).stream
                elif kind == 1:
                    stream = streams.drop(stream, spans, repos=rng.random() < 0.5, forget=True).stream
                elif kind == 2:
                    stream = streams.restore(stream, spans, repos=rng.random() < 0.5).stream
                else:
                    stream = streams.reposition(stream, start, None, rng.randrange(-6, 7)).stream
            except AkvError as error:
                num_refused += error.code == "position_conflict" and stream is before
                num_other += error.code != "position_conflict" or stream is not before
            tokens = [
                *stream.tokens[: rng.randrange(n // 2, n + 1)],
                *(rng.randrange(9) for _ in range(rng.randrange(9))),
            ]
            stream = continued(stream, tokens or [0]).stream
            layout = Layout()
            for op in stream.timeline.history:
                layout, _ = layout.feed(op.at - layout.num_tokens).apply(op)
            layout = layout.feed(len(stream.tokens) - layout.num_tokens)
            assert layout.segments == stream.layout.segments
            positions = [i + s.shift for s in layout.segments for i in range(s.start, s.end)]
            assert positions == sorted(set(positions))
    assert num_refused > 20
    assert num_other == 0


# Sessions ------------------------------------------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def make() -> tuple[Sessions, FakeCache]:
    cache = FakeCache()
    return Sessions(cache, window=WINDOW, page_size=16), cache


async def feed(sessions: Sessions, name: str | None, tokens: list[int], tenant: str = "", **how: Any) -> list[str]:
    """A turn that generates one token more; gives its warnings."""
    async with sessions.turn(tenant, name, lambda stream: continued(stream, tokens), **how) as turn:
        sessions.keep_prompt(turn)
        await sessions.keep_answer(turn, Stream([*turn.stream.tokens, 7], turn.stream.messages, turn.stream.timeline))
    return turn.warnings


def drop(spans: list[tuple[int, int]] | None = None, session: str = "s", **more: Any) -> types.DropRequest:
    return types.DropRequest(session=session, spans=spans, **more)


def test_a_turn_continues_and_ops_hold_at_its_end() -> None:
    async def work() -> None:
        sessions, _ = make()
        assert await feed(sessions, "s", list(range(100))) == []
        reply = await sessions.drop("", drop([(10, 30)]))
        assert (reply.stream_tokens, reply.visible_tokens, reply.next_position, reply.changed) == (101, 81, 81, 20)
        assert reply.applied == reply.ops == [types.Op(op="drop", at=101, start=10, end=30, repos=True)]
        assert await feed(sessions, "s", [*range(100), 7, *range(50)]) == []
        info = await sessions.info("", "s")
        assert (info.stream_tokens, info.visible_tokens, info.generating) == (152, 132, False)
        (warning,) = await feed(sessions, "s", [*range(90), 5])
        assert "goes on from token 90" in warning
        assert "1 op " in warning
        assert (await sessions.info("", "s")).ops == []

    run(work())


def test_a_session_generates_once_at_a_time_and_ops_wait() -> None:
    async def work() -> None:
        sessions, _ = make()
        async with sessions.turn("", "s", lambda stream: continued(stream, list(range(50)))) as turn:
            sessions.keep_prompt(turn)
            with refused("session_busy", "akv.session"):
                await feed(sessions, "s", [1, 2])
            waiting = [asyncio.create_task(sessions.drop("", drop([(0, 10)], repos=False)))]
            waiting += [asyncio.create_task(sessions.drop("", drop([(45, 55)], repos=False)))]
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in waiting)
            assert (await sessions.info("", "s")).generating
            await feed(sessions, "other", [1, 2])
            await sessions.keep_answer(turn, Stream(list(range(60))))
        replies = await asyncio.gather(*waiting)
        assert [op.at for op in replies[-1].ops] == [60, 60]
        assert replies[-1].visible_tokens == 40
        await feed(sessions, "s", list(range(70)))

    run(work())


def test_a_turn_that_fails_changes_nothing() -> None:
    async def work() -> None:
        sessions, _ = make()

        def fail(stream: Stream) -> Continued:
            raise AkvError("invalid_request", "no", param="messages")

        for prompt in (fail, lambda stream: continued(stream, [1, 2])):
            with pytest.raises((AkvError, ZeroDivisionError)):
                async with sessions.turn("", "new", prompt):
                    raise ZeroDivisionError
            with refused("session_not_found", "session"):
                await sessions.info("", "new")
        assert len(sessions) == 0
        await feed(sessions, "s", list(range(20)))
        before = await sessions.info("", "s")
        with refused("span_out_of_range", "akv.ops[0]"):
            await feed(sessions, "s", [1, 2, 3], ops=[types.Op(op="drop", at=20, start=0, end=1)])
        assert (await sessions.info("", "s")).model_copy(update={"idle_s": before.idle_s}) == before

    run(work())


def test_a_clients_history_replaces_the_servers() -> None:
    async def work() -> None:
        sessions, _ = make()
        await feed(sessions, "s", list(range(100)))
        await sessions.drop("", drop([(10, 30)]))
        ops = [types.Op(op="drop", at=60, start=0, end=50, repos=True)]
        warning = "akv.ops: replaced 1 op that the session had"
        assert await feed(sessions, "s", list(range(80)), ops=ops) == [warning]
        assert (await sessions.info("", "s")).ops == ops
        assert await feed(sessions, "s", list(range(80)), ops=ops) == []
        assert await feed(sessions, "s", [*range(80), 7, 1], ops=[]) == [warning]
        assert (await sessions.info("", "s")).ops == []

    run(work())


def test_tenants_see_nothing_of_one_another() -> None:
    async def work() -> None:
        sessions, _ = make()
        await feed(sessions, "s", [1, 2, 3], tenant="a")
        await feed(sessions, "s", [4, 5], tenant="b")
        assert (await sessions.info("a", "s")).stream_tokens == 4
        assert [info.stream_tokens for info in (await sessions.list("b")).data] == [3]
        for call in (sessions.drop("c", drop([(0, 1)])), sessions.delete("c", "s"), sessions.fork("c", "s", None)):
            with refused("session_not_found", "session"):
                await call

    run(work())


def test_the_loop_goes_on_while_residency_is_looked_up() -> None:
    """The engine is asked in a thread: it may be in the middle of a step."""
    asked, may_answer = threading.Event(), threading.Event()

    class SlowCache(FakeCache):
        def residency(self, *args: Any, **more: Any) -> tuple[int, int]:
            asked.set()
            assert may_answer.wait(10)
            return super().residency(*args, **more)

    async def work() -> None:
        sessions = Sessions(SlowCache(), window=WINDOW, page_size=16)
        await feed(sessions, "s", list(range(100)))
        listed = asyncio.create_task(sessions.list(""))
        while not asked.is_set():
            await asyncio.sleep(0)
        assert (await sessions.drop("", drop([(10, 20)]))).visible_tokens == 91
        assert not listed.done()
        may_answer.set()
        (info,) = (await listed).data
        assert (info.visible_tokens, info.resident_tokens) == (101, 101), "as it was when it was asked for"

    run(work())


def test_fork_and_delete() -> None:
    async def work() -> None:
        sessions, _ = make()
        await feed(sessions, "s", list(range(100)))
        await sessions.drop("", drop([(10, 30)]))
        copy = await sessions.fork("", "s", "copy")
        assert (copy.session, copy.visible_tokens) == ("copy", 81)
        await sessions.drop("", drop([(40, 50)], session="copy"))
        assert ((await sessions.info("", "s")).visible_tokens, (await sessions.info("", "copy")).visible_tokens) == (
            81,
            71,
        )
        with refused("invalid_request", "session"):
            await sessions.fork("", "s", "copy")
        assert (await sessions.fork("", "s", None)).session != "s"
        await sessions.delete("", "s")
        with refused("session_not_found", "session"):
            await sessions.drop("", drop([(0, 1)]))
        await feed(sessions, "s", [1])
        assert (await sessions.info("", "s")).stream_tokens == 2

    run(work())


@pytest.mark.parametrize(("num_tokens", "closes"), [(299, False), (300, True)])
def test_auto_closes_a_gap_only_when_positions_run_out(num_tokens: int, closes: bool) -> None:
    async def work() -> None:
        sessions, _ = make()
        await feed(sessions, "s", list(range(num_tokens)))
        reply = await sessions.drop("", drop([(10, 30)], repos="auto"))
        assert [op.repos for op in reply.applied] == [closes]
        back = await sessions.restore("", types.RestoreRequest(session="s", spans=[(10, 30)], repos="auto"))
        assert (back.visible_tokens, back.next_position) == (num_tokens + 1, num_tokens + 1)

    run(work())


def test_on_miss_forgets_only_what_a_replay_would_compute() -> None:
    async def work() -> None:
        sessions, cache = make()
        await feed(sessions, "s", list(range(100)))
        await sessions.drop("", drop([(10, 30)]))
        await feed(sessions, "s", [*range(100), 7, *range(99)])
        await sessions.drop("", drop([(120, 150)]))
        prompt = [*range(100), 7, *range(99), 7, 1, 2, 3]
        assert await feed(sessions, "s", prompt, on_miss="forget") == []
        cache.num_resident = 110  # the first span and its phase are there, the second is not
        (warning,) = await feed(sessions, "s", [*prompt, 7, 1], on_miss="forget")
        assert "[120, 150)" in warning
        assert "[10, 30)" not in warning
        ops = (await sessions.info("", "s")).ops
        assert [(op.at, op.mode) for op in ops] == [(101, "mask"), (120, "forget")]
        cache.num_resident = 0
        assert await feed(sessions, "s", [*prompt, 7, 1, 7, 1]) == []
        (warning,) = await feed(sessions, "s", [*prompt, 7, 1, 7, 1, 7, 1], on_miss="forget")
        assert "[10, 30)" in warning

    run(work())


def test_requests_without_a_session_leave_none() -> None:
    async def work() -> None:
        sessions, _ = make()
        await feed(sessions, None, [1, 2, 3])
        assert len(sessions) == 0

    run(work())
