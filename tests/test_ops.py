"""The op algebra against golden layouts (a naive per-token model) and against a naive model of its own."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from akv_server.errors import AkvError
from akv_server.ops import Layout, Op, Segment, Timeline, common_prefix, layout_at


def drop(start, end, at, **more):
    return Op("drop", at, start, end, **more)


def repos(start, end, delta, at):
    return Op("repos", at, start, end, delta)


def test_golden_layouts(shared):
    cases = json.loads((shared / "golden" / "layouts.json").read_text())["cases"]
    steps = 0
    for case in cases:
        layout = Layout()
        for step in case:
            steps += 1
            if step["op"] == "feed":
                layout = layout.feed(step["n"])
                changed = step["n"]
            else:
                op = Op(step["op"], layout.num_tokens, step["start"], step["end"], step.get("delta", 0))
                if "error" in step:
                    before = layout
                    with pytest.raises(AkvError) as refusal:
                        layout.apply(op)
                    assert refusal.value.code == step["error"]
                    assert layout == before
                    continue
                layout, changed = layout.apply(op)
            assert changed == step["changed"]
            assert [list(segment) for segment in layout.segments] == step["segments"]
            assert layout.next_position == step["next_position"]
    assert steps > 5000


def test_worked_values():
    history = (drop(32, 128, 160), repos(128, None, -96, 160))
    first = layout_at(history, 160)
    assert first.segments == [Segment(0, 32, 0, 0), Segment(128, 160, -96, 0)]
    assert (first.num_tokens, first.next_position) == (160, 64)
    history += (drop(130, 170, 200), repos(170, None, -40, 200))
    assert layout_at(history, 200).segments == [
        Segment(0, 32, 0, 0),
        Segment(128, 130, -96, 0),
        Segment(170, 200, -136, -96),
    ]


def test_drop_with_repos_is_drop_and_then_repos():
    parts = layout_at((drop(32, 128, 160), repos(128, None, -96, 160)), 160)
    assert layout_at((drop(32, 128, 160, repos=True),), 160) == parts


def test_restore_with_repos_undoes_drop_with_repos():
    history = (drop(50, 150, 300, repos=True), Op("restore", 350, 50, 150, repos=True))
    assert layout_at(history, 350).segments == [
        Segment(0, 300, 0, 0),
        Segment(300, 350, 0, -100),
    ]


def test_forget_was_never_there_and_reaches_masked_tokens():
    forgotten = drop(10, 20, 10, repos=True, mode="forget")
    masked_before = drop(12, 15, 30, repos=True)
    layout = layout_at((forgotten, masked_before), 40)
    assert layout.segments == [Segment(0, 10, 0, 0), Segment(20, 40, -10, -10)]
    assert layout.next_position == 30
    # and what was forgotten cannot be restored: it has no keys
    assert layout.apply(Op("restore", 40, 10, 20))[1] == 0


def test_next_position_inside_a_forgotten_span_is_that_of_the_first_token_behind_it():
    layout = layout_at((drop(10, 20, 10, repos=True, mode="forget"),), 13)
    assert layout.next_position == 10


@pytest.mark.parametrize(
    "op",
    [drop(5, 3, 10), drop(-1, 3, 10), drop(0, 11, 10), drop(10, 12, 10), repos(11, None, 1, 10), repos(4, 99, 1, 10)],
)
def test_spans_outside_the_stream_are_refused_and_named(op):
    with pytest.raises(AkvError, match="stream of 10 tokens") as refusal:
        Layout().feed(10).apply(op)
    assert refusal.value.code == "span_out_of_range"


def test_a_history_that_cannot_hold_names_its_op():
    with pytest.raises(AkvError) as refusal:
        Timeline((drop(0, 5, 10), repos(5, None, -6, 10)))
    assert (refusal.value.code, refusal.value.param) == ("position_conflict", "ops[1]")
    with pytest.raises(AkvError) as refusal:
        Timeline((drop(0, 5, 10), drop(0, 5, 9)))
    assert refusal.value.param == "ops[1].at"


def test_ops_are_compared_by_what_they_mean():
    apart = Timeline((drop(0, 10, 30), drop(10, 20, 30)))
    assert [p.signature for p in apart.points] == [p.signature for p in Timeline((drop(0, 20, 30),)).points]
    noop = Timeline((drop(0, 20, 30), drop(5, 9, 40), drop(7, 7, 50), repos(0, None, 0, 60)))
    assert len(noop.points) == 1
    undone = Timeline((drop(0, 20, 30), Op("restore", 30, 0, 20)))
    assert undone.points == []


def test_common_prefix_of_histories():
    base = (drop(0, 4, 10),)
    assert common_prefix(Timeline(base), Timeline(base), 50) == 50
    assert common_prefix(Timeline(base), Timeline(), 50) == 10
    assert common_prefix(Timeline((*base, drop(4, 6, 30))), Timeline((*base, drop(4, 7, 30))), 50) == 30
    assert common_prefix(Timeline((*base, drop(4, 6, 30))), Timeline(base), 20) == 20


def test_a_token_is_computed_in_the_phase_of_the_last_point_before_it():
    timeline = Timeline((drop(0, 4, 10), drop(6, 8, 25)))
    phases = [timeline.phase_of(i) for i in (0, 9, 10, 24, 25, 99)]
    assert [(number, start) for number, start, _ in phases] == [(0, 0), (0, 0), (1, 10), (1, 10), (2, 25), (2, 25)]
    assert [layout.num_visible_in(0, 25) for _, _, layout in phases] == [25, 25, 21, 21, 19, 19]


def closed(start, end, at):
    return Op("drop", at, start, end, repos=True)


def test_the_peak_is_the_highest_position_that_any_phase_came_to():
    timeline = Timeline((closed(0, 90, 100), closed(100, 130, 150), Op("repos", 160, 160, None, 500)))
    assert [timeline.peak(n) for n in (1, 99, 100, 101, 150, 160, 161)] == [1, 99, 100, 100, 100, 100, 541]
    assert Timeline(timeline.history[:2]).peak(200) == 100, "30 + 50 is less than at first"
    assert Timeline().peak(7) == 7


def test_a_digest_names_what_a_history_comes_to():
    halves = Timeline((Op("drop", 20, 0, 5), Op("drop", 20, 5, 10), Op("repos", 20, 10, None, -10), closed(12, 14, 30)))
    whole = Timeline((closed(0, 10, 20), closed(12, 14, 30)))
    assert [point.digest for point in halves.points] == [point.digest for point in whole.points]
    assert whole.digest_at(19) == Timeline().digest_at(50) == b""
    others = [
        (closed(0, 10, 21),),
        (closed(0, 9, 20),),
        (Op("drop", 20, 0, 10),),
        (closed(0, 10, 20), closed(12, 14, 30)),
    ]
    assert len({Timeline(history).points[-1].digest for history in others}) == 4
    assert Timeline((closed(12, 14, 30),)).digest_at(30) != whole.digest_at(30), "all before it counts, too"


class Naive:
    """One entry per index, up to a horizon that stands for infinity."""

    HORIZON = 200

    def __init__(self):
        self.n, self.state, self.shift = 0, ["v"] * self.HORIZON, [0] * self.HORIZON

    def outcome(self):
        visible = [i for i in range(self.HORIZON) if self.state[i] == "v"]
        positions = [i + self.shift[i] for i in visible]
        return all(p >= 0 for p in positions) and all(a < b for a, b in itertools.pairwise(positions))

    def copy(self):
        twin = Naive()
        twin.n, twin.state, twin.shift = self.n, list(self.state), list(self.shift)
        return twin

    def apply(self, op):
        twin = self.copy()
        end = self.HORIZON if op.end is None else op.end
        if op.kind == "repos":
            for i in range(op.start, end):
                twin.shift[i] += op.delta
        elif op.kind == "drop":
            gone = [i for i in range(op.start, end) if twin.state[i] == "v"]
            reach = range(op.start, end) if op.mode == "forget" else gone
            for i in reach:
                twin.state[i] = "f" if op.mode == "forget" else "d"
            if op.repos:
                for i in range(end, self.HORIZON):
                    twin.shift[i] -= len(gone)
        else:
            back = [i for i in range(op.start, end) if twin.state[i] == "d"]
            if op.repos:
                for i in range(end, self.HORIZON):
                    twin.shift[i] += len(back)
            for i in back:
                twin.state[i] = "v"
        return twin if twin.outcome() else None


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_equal_the_naive_model(seed):
    random_ = random.Random(seed)
    layout, naive = Layout(), Naive()
    for _ in range(60):
        grown = random_.randrange(4)
        layout = layout.feed(grown)
        naive.n += grown
        if naive.n > 150:
            break
        n = naive.n
        start, end = sorted((random_.randint(0, n), random_.randint(0, n)))
        kind = random_.choice(["drop", "drop", "repos", "restore", "forget"])
        if kind == "forget":
            op = Op("drop", n, n, n + random_.randrange(6), 0, random_.random() < 0.7, "forget")
        elif kind == "repos":
            op = Op("repos", n, start, random_.choice([None, end]), random_.randint(-12, 12))
        else:
            op = Op(kind, n, start, end, 0, random_.random() < 0.7)
        expected = naive.apply(op)
        before = layout
        if expected is None:
            with pytest.raises(AkvError) as refusal:
                layout.apply(op)
            assert refusal.value.code == "position_conflict"
            assert layout == before
            continue
        layout, _ = layout.apply(op)
        naive = expected
        for i in range(Naive.HORIZON):
            assert layout.is_visible(i) == (naive.state[i] == "v")
            assert layout.position(i) == i + naive.shift[i]
        changed_by_other_words = before.change_to(layout)
        assert (changed_by_other_words == ()) == all(
            before.is_visible(i) == layout.is_visible(i)
            and before.position(i) == layout.position(i)
            and before.runs[before._at(i)].state == layout.runs[layout._at(i)].state
            for i in range(Naive.HORIZON)
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_timeline_that_goes_on_equals_one_worked_out_anew(seed):
    random_ = random.Random(seed)
    history: tuple[Op, ...] = ()
    known = Timeline()
    n = 0
    for _ in range(40):
        n += random_.choice([0, 0, 1, 5])
        start, end = sorted((random_.randint(0, n), random_.randint(0, n)))
        grown = (*history, Op(random_.choice(["drop", "restore"]), n, start, end, 0, random_.random() < 0.5))
        try:
            anew = Timeline(grown)
        except AkvError:
            with pytest.raises(AkvError, match=f"ops.{len(history)}."):
                Timeline(grown, known)
            continue
        history, known = grown, Timeline(grown, known)
        assert [(p.at, p.signature, p.layout) for p in known.points] == [
            (p.at, p.signature, p.layout) for p in anew.points
        ]
    shorter = history[: len(history) // 2]
    assert Timeline(shorter, known).points == Timeline(shorter).points
