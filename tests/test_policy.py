"""What may be dropped, and each policy against a plain restatement of the rule it is named for."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from akv_sdk import (
    CacheOrSummarise,
    ClearToolUsesEdit,
    Context,
    ContextEdits,
    Drop,
    DropRepeats,
    DropThinking,
    InTurn,
    LastNObservations,
    Mark,
    Op,
    RollingDrop,
    Target,
    decide,
)
from akv_sdk.policies.context import NUM_SINK_TOKENS, dropped_spans, note_of, spans_of, subtract, union
from tests.conversations import call, context_of, ops_of, result, tagged, text_of, trajectories, visible_text

TASK = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Find the bug."}]


class Everything:
    """Names all that a context offers."""

    def select(self, context: Context) -> list[Drop]:
        return [Drop(target, "all") for target in context.targets]


def run(*texts: str, tool: str = "sh", **fields: Any) -> list[dict[str, Any]]:
    """A run of an agent: a call and its marked result for each text."""
    turns = [
        [call(tool, f"c{i}", n=i), result(f"c{i}", tagged(f"obs-{i}", text), **fields)] for i, text in enumerate(texts)
    ]
    return [*TASK, *(message for turn in turns for message in turn)]


def names(drops: list[Drop]) -> list[str | None]:
    return [drop.target.block for drop in drops]


# --- intervals --------------------------------------------------------------------------------------------------------

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def indexes(spans: Any) -> set[int]:
    return {i for start, end in spans for i in range(start, end)}


@given(SPANS, st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_intervals_are_sets_of_indexes(spans, span):
    joined = union(spans)
    assert indexes(joined) == indexes(spans)
    assert all(a[0] < a[1] < b[0] < b[1] for a, b in pairwise(joined))
    assert indexes(subtract(span, spans)) == indexes([span]) - indexes(spans)


@given(st.lists(st.tuples(st.sampled_from(["drop", "restore"]), st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_what_is_dropped_is_what_the_ops_left(steps):
    ops = [Op(op=kind, at=20, start=min(a, b), end=max(a, b)) for kind, a, b in steps]
    seen = [True] * 20
    for op in ops:
        seen[op.start : op.end] = [op.op == "restore"] * (op.end - op.start)
    assert indexes(dropped_spans(ops)) == {i for i in range(20) if not seen[i]}


# --- the guard --------------------------------------------------------------------------------------------------------


def test_only_the_inside_of_marked_observations_goes(shared):
    for name, messages in trajectories(shared).items():
        context = context_of(messages)
        drops = decide(Everything(), context)
        text = text_of(messages)
        observations = [drop for drop in drops if drop.target.kind == "observation"]
        marked = [m for m in messages if "<ephemeral_observation" in (m["content"] or "")]
        assert len(observations) == len([m for m in marked if not m["content"].endswith('"></ephemeral_observation>')])
        inside = [text[s:e] for drop in observations for s, e in drop.target.parts]
        assert all(f">{part}</ephemeral_observation>" in text for part in inside), name
        left = visible_text(messages, ops_of(drops, len(text)))
        for message in messages:
            if (
                message["role"] in ("system", "user", "assistant")
                and "<ephemeral_observation" not in message["content"]
            ):
                assert message["content"] in left, name
        assert left.count("</ephemeral_observation>") == text.count("</ephemeral_observation>")


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_gets_past_the_guard(shared, seed):
    """A policy that asks for anything, in any order, with forged parts, is given only what is marked and not kept."""
    rng = random.Random(seed)
    messages = rng.choice(list(trajectories(shared).values()))
    bare = context_of(messages)
    end = bare.stream_tokens
    pinned = sorted(rng.sample(range(end), 6))
    marks = [Mark(span=(a, b), pinned=True) for a, b in zip(pinned[::2], pinned[1::2], strict=True)]
    marks += [
        Mark(message=i, keep_head=rng.randrange(9), keep_tail=rng.randrange(9)) for i in range(0, len(messages), 3)
    ]
    before = [
        Op(op="drop", at=end, start=end // 4, end=end // 3),
        Op(op="restore", at=end, start=end // 4, end=end // 3),
    ]
    context = replace(bare, marks=marks, ops=before)

    class Greedy:
        def select(self, context: Context) -> list[Drop]:
            places = [Target("observation", 0, None, a, b, ((0, end),)) for a, b in [(0, end), (5, 50)]]
            forged = [replace(target, parts=((0, end),)) for target in context.targets]
            return [Drop(target, "") for target in rng.sample([*places, *forged], len(places) + len(forged))]

    gone = indexes(spans_of(decide(Greedy(), context)))
    never = set(range(NUM_SINK_TOKENS)) | indexes([mark.span for mark in marks if mark.span])
    never |= indexes([(end // 4, end // 3)])
    allowed: set[int] = set()
    for span in bare.spans:
        keep = next((m for m in marks if m.message == span.message), Mark(message=0))
        for block in span.blocks:
            head, tail = (keep.keep_head, keep.keep_tail) if block.kind == "observation" else (0, 0)
            allowed |= set(range(block.start + head, block.end - tail))
    assert gone <= allowed - never
    observed = {b.start for span in bare.spans for b in span.blocks if b.kind == "observation"}
    assert observed or not gone


def test_system_text_demonstrations_and_unclosed_blocks_are_never_offered():
    messages = [
        {"role": "system", "content": tagged("s", "an example of the tags")},
        {"role": "user", "content": tagged("d", "a demonstration"), "is_demo": True},
        {"role": "user", "content": '<ephemeral_observation id="u">never closed'},
        {"role": "user", "content": "see " + tagged("page", "the page")},
    ]
    assert [target.block for target in context_of(messages).targets] == ["page"]


def test_head_and_tail_stay():
    messages = run("0123456789")
    context = context_of(messages, marks=[Mark(message=3, keep_head=2, keep_tail=3)])
    (drop,) = decide(LastNObservations(0), context)
    assert [text_of(messages)[s:e] for s, e in drop.target.parts] == ["23456"]
    wider = replace(context, marks=[Mark(message=3, keep_head=8, keep_tail=8)])
    assert decide(LastNObservations(0), wider) == []


def test_a_message_says_of_itself_what_may_go():
    messages = run("one", "two", "three", "four")
    messages[3]["akv"] = {"ephemeral": False}
    messages[5]["akv"] = {"pinned": True}
    messages[7]["akv"] = {"keep_head": 2}
    drops = decide(Everything(), context_of(messages))
    gone = [text_of(messages)[s:e] for drop in drops if drop.target.kind == "observation" for s, e in drop.target.parts]
    assert gone == ["ree", "four"]
    messages[3]["akv"] = {"ephemerall": True}
    with pytest.raises(ValidationError, match="ephemerall"):
        decide(Everything(), context_of(messages))
    messages[3]["akv"] = []
    with pytest.raises(ValidationError, match="MessageMarking"):
        decide(Everything(), context_of(messages))


def test_marks_by_place():
    messages = [*TASK, call("sh", "c0"), result("c0", "plain"), call("sh", "c0"), result("c0", "same id")]
    assert context_of(messages).observations == []
    context = context_of(messages, marks=[Mark(message=5, tool_call_id="c0", ephemeral=True)])
    (drop,) = decide(LastNObservations(0), context)
    assert (drop.target.text, drop.target.call) == ("same id", (4, "c0"))
    at = text_of(messages).index("plain")
    (drop,) = decide(LastNObservations(0), context_of(messages, marks=[Mark(span=(at + 1, at + 3), ephemeral=True)]))
    assert drop.target.parts == ((at + 1, at + 3),)
    for wrong in ({}, {"message": 1, "span": (0, 1)}, {"span": (0, 1), "block": "x"}):
        with pytest.raises(ValidationError):
            Mark(**wrong)


def test_arguments_go_with_their_result_or_not_at_all():
    messages = run("one", "two", "three")
    context = context_of([*messages, call("sh", "c9", n=9)])

    class Inputs:
        def select(self, context: Context) -> list[Drop]:
            return [Drop(target, "") for target in context.targets if target.kind == "tool_input"]

    assert decide(Inputs(), context) == []
    gone = context.after(decide(LastNObservations(2), context))
    assert [drop.target.call for drop in decide(Inputs(), gone)] == [(2, "c0")]
    both = decide(InTurn(LastNObservations(1), Inputs()), context)
    assert [drop.target.kind for drop in both] == ["tool_input", "observation"] * 2


def test_once_per_block_also_after_a_restore_and_for_a_new_client():
    messages = run("one", "two", "three")
    context = context_of(messages)
    at = context.stream_tokens
    drops = decide(LastNObservations(1), context)
    assert names(drops) == ["obs-0", "obs-1"]
    ops = ops_of(drops, at)
    assert decide(LastNObservations(1), replace(context, ops=ops)) == []
    restored = [*ops, Op(op="restore", at=at, start=ops[0].start, end=ops[0].end)]
    assert decide(LastNObservations(1), Context(messages, context.spans, restored)) == []
    assert names(decide(LastNObservations(0), Context(messages, context.spans, restored))) == ["obs-2"]


# --- SWE-agent --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([(), ("keep_output",), ("remove_output",)]), max_size=14),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_the_last_n_are_those_of_swe_agent(tags, n, polling):
    messages = run(*(f"text {i}" for i in range(len(tags))))
    for i, tag in enumerate(tags):
        messages[3 + 2 * i]["tags"] = list(tag)
    history = ["task", *range(len(tags))]  # its processor takes the task for the first observation
    last_removed = max(0, (len(history) // polling) * polling - n)
    elided = [
        i
        for place, i in enumerate(history)
        if i != "task" and ("remove_output" in tags[i] or (1 <= place < last_removed and "keep_output" not in tags[i]))
    ]
    drops = decide(LastNObservations(n, polling), context_of(messages))
    assert names(drops) == [f"obs-{i}" for i in elided]


def test_a_tag_alone_marks_an_observation():
    messages = [*TASK, call("sh", "c0"), result("c0", "big"), call("sh", "c1"), result("c1", "plain")]
    messages[3]["tags"] = ["remove_output"]
    (drop,) = decide(LastNObservations(5), context_of(messages))
    assert (drop.target.text, drop.reason) == ("big", "tagged remove_output")


def test_tags_that_are_no_list_are_refused_by_name():
    messages = run("one", "two")
    messages[3]["tags"] = "keep_output"
    with pytest.raises(ValidationError, match=r"tags\n  Input should be a valid list"):
        decide(LastNObservations(0), context_of(messages))
    messages[3]["tags"] = None
    assert names(decide(LastNObservations(0), context_of(messages))) == ["obs-0", "obs-1"]


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (LastNObservations, {"n": -1}),
        (LastNObservations, {"n": 1, "polling": 0}),
        (RollingDrop, {"window_tokens": -1}),
        (DropThinking, {"keep": -1}),
        (ClearToolUsesEdit, {"keep": -1}),
        (ClearToolUsesEdit, {"trigger": -1}),
        (ClearToolUsesEdit, {"clear_at_least": -1}),
        (CacheOrSummarise, {"threshold_tokens": -1, "summarise": None}),
        (CacheOrSummarise, {"threshold_tokens": 1, "summarise": None, "keep_messages": -1}),
    ],
)
def test_a_policy_refuses_less_than_none(policy, fields):
    (bad,) = (name for name, value in fields.items() if value in (-1, 0))
    with pytest.raises(ValueError, match=f"^{bad}: {fields[bad]} is less than"):
        policy(**fields)


# --- budgets and repeats ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 500))
def test_the_oldest_go_until_the_rest_fits(lengths, window):
    messages = run(*("x" * length for length in lengths))
    context = context_of(messages)
    drops = decide(RollingDrop(window), context)
    assert names(drops) == [f"obs-{i}" for i, length in enumerate(lengths) if length][: len(drops)]
    left = context.after(drops)
    assert left.visible_tokens == len(visible_text(messages, ops_of(drops, context.stream_tokens)))
    droppable = [length for length in lengths if length]
    assert left.visible_tokens <= window or len(drops) == len(droppable)
    if drops:
        assert left.visible_tokens + drops[-1].target.num_tokens > window
    assert decide(RollingDrop(window), left) == []


def test_a_repeat_lets_the_earlier_go():
    messages = run("pending", "pending", "done", "pending")
    note = "[No longer shown: obs-x (1 tokens, old). Ask.]\n"
    messages[3]["content"] = tagged("obs-0", f"{note * 3}pending\n")
    messages[5]["content"] = note * 2 + messages[5]["content"]
    drops = decide(DropRepeats(), context_of(messages))
    assert [(drop.target.block, drop.reason) for drop in drops] == [
        ("obs-0", "repeated in obs-3"),
        ("obs-1", "repeated in obs-3"),
    ]
    messages[3]["name"] = "another tool"
    assert names(decide(DropRepeats(), context_of(messages))) == ["obs-1"]


def test_a_repeat_that_is_gone_lets_nothing_go():
    messages = run("same", "same")
    context = context_of(messages)
    last = context.observations[1]
    gone = replace(context, ops=[Op(op="drop", at=context.stream_tokens, start=last.start, end=last.end)])
    assert decide(DropRepeats(), gone) == []


def test_policies_in_turn_see_what_those_before_them_left():
    messages = run("a" * 100, "a" * 100, "b" * 100)
    context = context_of(messages)
    window = context.visible_tokens - 150
    assert names(decide(InTurn(DropRepeats(), RollingDrop(window)), context)) == ["obs-0", "obs-1"]
    assert names(decide(InTurn(DropRepeats(), RollingDrop(window + 50)), context)) == ["obs-0"]


def test_a_note_says_what_went_how_large_it_was_and_how_to_get_it_back():
    messages = run("0123456789", "x", tool="cat")
    note = note_of(decide(LastNObservations(1), context_of(messages)))
    assert note == (
        "[No longer shown: obs-0 (cat, 10 tokens, older than the last 1). Ask for it by this name to have it restored.]"
    )


# --- LangChain and Anthropic ------------------------------------------------------------------------------------------

USES = st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["cat", "ls", "rm"])), max_size=9)


def uses(lengths_and_tools: list[tuple[int, str]]) -> list[dict[str, Any]]:
    turns = [
        [call(tool, f"c{i}", n=i), result(f"c{i}", tagged(f"obs-{i}", chr(97 + i) * length))]
        for i, (length, tool) in enumerate(lengths_and_tools)
    ]
    return [*TASK, *(message for turn in turns for message in turn)]


@given(USES, st.integers(0, 4), st.integers(0, 60), st.sampled_from([(), ("cat",), ("cat", "rm")]), st.booleans())
def test_clear_tool_uses_as_langchain_has_it(lengths, keep, clear_at_least, exclude, with_inputs):
    messages = uses(lengths)
    context = context_of(messages)
    candidates = list(enumerate(lengths))
    candidates = [] if keep >= len(candidates) else candidates[:-keep] if keep else candidates
    cleared, freed = [], 0
    for i, (length, tool) in candidates:
        if tool in exclude:
            continue
        cleared.append(i)
        freed += length + (len(f'{{"n": {i}}}') if with_inputs else 0)
        if clear_at_least > 0 and freed >= clear_at_least:
            break
    edit = ClearToolUsesEdit(
        trigger=context.visible_tokens - 1,
        keep=keep,
        clear_at_least=clear_at_least,
        exclude_tools=exclude,
        clear_tool_inputs=with_inputs,
    )
    drops = decide(edit, context)
    assert [drop.target.block for drop in drops if drop.target.kind == "observation"] == [f"obs-{i}" for i in cleared]
    assert sum(drop.target.num_tokens for drop in drops) == freed
    assert {drop.reason for drop in drops} <= {"[cleared]"}
    assert decide(replace(edit, trigger=context.visible_tokens), context) == []


def test_an_orphan_is_passed_over():
    messages = [*TASK, call("sh", "a"), result("b", tagged("orphan", "who asked?")), *run("fine")[2:]]
    edit = ClearToolUsesEdit(trigger=0, keep=0)
    assert names(decide(edit, context_of(messages))) == ["obs-0"]


@given(USES, st.integers(0, 4), st.integers(0, 120), st.sampled_from([None, ["cat"]]), st.sampled_from([True, ["ls"]]))
def test_anthropics_minimum_is_all_or_nothing(lengths, keep, minimum, exclude, inputs):
    messages = uses(lengths)
    for message in messages:
        if message["role"] == "tool":  # no tags: the edit itself says that tool results may go
            message["content"] = message["content"].split(">")[1].split("<")[0]
    context = context_of(messages)
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": context.visible_tokens - 1},
        "keep": {"type": "tool_uses", "value": keep},
        "clear_at_least": {"type": "input_tokens", "value": minimum},
        "exclude_tools": exclude,
        "clear_tool_inputs": inputs,
    }
    cleared = [i for i, (_, tool) in enumerate(lengths) if i < len(lengths) - keep and tool not in (exclude or [])]
    freed = sum(
        lengths[i][0] + (len(f'{{"n": {i}}}') if inputs is True or lengths[i][1] in inputs else 0) for i in cleared
    )
    edits = ContextEdits.parse({"edits": [edit]})
    drops = decide(edits, context)
    applied = [applied.model_dump() for applied in edits.applied_edits(drops)]
    if freed < minimum or not cleared:
        assert (drops, applied) == ([], [])
    else:
        assert applied == [
            {
                "type": "clear_tool_uses_20250919",
                "cleared_tool_uses": len(cleared),
                "cleared_input_tokens": freed,
            }
        ]
        assert decide(edits, context.after(drops)) == []


def test_a_trigger_may_count_tool_uses():
    messages = uses([(5, "ls")] * 4)

    def cleared(value: int) -> int:
        trigger = {"type": "tool_uses", "value": value}
        edit = {"type": "clear_tool_uses_20250919", "trigger": trigger, "keep": {"type": "tool_uses", "value": 1}}
        return len(decide(ContextEdits.parse({"edits": [edit]}), context_of(messages)))

    assert (cleared(3), cleared(4)) == (3, 0)


def test_the_two_meanings_of_clear_at_least_differ():
    context = context_of(uses([(10, "ls")] * 6))
    stop = ClearToolUsesEdit(trigger=0, keep=3, clear_at_least=15)
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 0}}

    def minimum(value: int) -> list[Drop]:
        least = {"type": "input_tokens", "value": value}
        return decide(ContextEdits.parse({"edits": [{**edit, "clear_at_least": least}]}), context)

    assert names(decide(stop, context)) == ["obs-0", "obs-1"]  # enough is enough
    assert names(minimum(15)) == ["obs-0", "obs-1", "obs-2"]  # all that may go
    assert minimum(31) == []  # or nothing
    assert len(decide(replace(stop, clear_at_least=31), context)) == 3


def test_thinking_goes_from_old_turns():
    think = "<think>hm {}</think>answer {}"
    messages = [m for i in range(4) for m in (TASK[1], {"role": "assistant", "content": think.format(i, i)})]
    context = context_of(messages)
    left = visible_text(messages, ops_of(decide(DropThinking(keep=1), context), context.stream_tokens))
    assert ("hm 2" in left, "hm 3" in left, "answer 0" in left) == (False, True, True)
    assert decide(DropThinking("all"), context) == []
    edits = ContextEdits.parse({"edits": [{"type": "clear_thinking_20251015"}]})
    assert edits.applied_edits(decide(edits, context))[0].model_dump() == {
        "type": "clear_thinking_20251015",
        "cleared_thinking_turns": 3,
        "cleared_input_tokens": 12,
    }
    for keep, turns in (({"type": "thinking_turns", "value": 3}, 1), ("all", 0), ({"type": "all"}, 0)):
        edits = ContextEdits.parse({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]})
        assert len(decide(edits, context)) == turns


@pytest.mark.parametrize(
    ("management", "field"),
    [
        ({"edits": [{"type": "clear_everything"}]}, "edits.0"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}]}, "keep.value"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "kep": 3}]}, "kep"),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]}, "value"),
        ({"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]}, "comes first"),
        ({"edit": []}, "edit"),
    ],
)
def test_a_wrong_edit_names_its_field(management, field):
    with pytest.raises(ValidationError) as error:
        ContextEdits.parse(management)
    assert field in str(error.value)
