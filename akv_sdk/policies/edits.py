"""Policies with the names and rules of LangChain's and Anthropic's context editing, and every policy as JSON.

Knows the context, the other policies and the JSON models of edits. Theirs is a rewritten prompt with a placeholder,
made anew on each request; here the tokens go once, the text stays, and a placeholder serves as the reason in a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from akv_sdk import types
from akv_sdk.policies.context import Context, Drop, Policy, Target, check_at_least, decide
from akv_sdk.policies.observations import DropRepeats, LastNObservations, RollingDrop


@dataclass(frozen=True, slots=True)
class ClearToolUsesEdit:
    """Once more than `trigger` tokens are visible, all tool results but the newest `keep` go, oldest first.

    As in LangChain: `keep` counts tool results, those of `exclude_tools` and those cleared before included;
    `clear_at_least`, unless 0, is a stop point: no more go once that many tokens were freed, which may leave more than
    `keep`; a result whose call is not in the assistant message before it is passed over. `clear_tool_inputs` lets the
    arguments of the calls go with their results, where the server names their spans.
    """

    trigger: int = 100_000
    keep: int = 3
    clear_at_least: int = 0
    exclude_tools: Sequence[str] = ()
    clear_tool_inputs: bool = False
    placeholder: str = "[cleared]"

    def __post_init__(self) -> None:
        check_at_least(0, trigger=self.trigger, keep=self.keep, clear_at_least=self.clear_at_least)

    def select(self, context: Context) -> Iterator[Drop]:
        if context.visible_tokens <= self.trigger:
            return
        freed = 0
        for use in _tool_uses(context, self.keep, self.exclude_tools, self.clear_tool_inputs):
            for target in use:
                freed += target.num_tokens
                yield Drop(target, self.placeholder)
            if 0 < self.clear_at_least <= freed:
                return


@dataclass(frozen=True, slots=True)
class DropThinking:
    """Of the assistant messages that hold reasoning (`<think>…</think>`), the newest `keep` keep it. Needs a server
    that names the spans of reasoning."""

    keep: int | Literal["all"] = 1

    def __post_init__(self) -> None:
        if self.keep != "all":
            check_at_least(0, keep=self.keep)

    def select(self, context: Context) -> Iterator[Drop]:
        thinking = [target for target in context.targets if target.kind == "thinking"]
        turns = sorted({target.message for target in thinking})
        old = set() if self.keep == "all" else set(turns[: max(0, len(turns) - self.keep)])
        for target in thinking:
            if target.message in old:
                yield Drop(target, f"reasoning before the last {self.keep} turns")


@dataclass(frozen=True, slots=True)
class ContextEdits:
    """A `context_management` object: its edits in order, each on what those before it left.

    Anthropic's edit over tool uses speaks of every tool result, so for it they all count as marked; one whose marking
    says `ephemeral: false` does not, and the rest of the guard holds. Its `clear_at_least` is a minimum or nothing:
    where all that may go comes to less, none of it goes. An edit that bears the name of a policy is that policy.
    """

    management: types.ContextManagement

    @classmethod
    def parse(cls, management: Mapping[str, Any]) -> ContextEdits:
        """From the JSON object of a request; raises pydantic.ValidationError, a ValueError, that names the field."""
        return cls(types.ContextManagement.model_validate(management))

    def select(self, context: Context) -> Iterable[Drop]:
        drops: list[Drop] = []
        for i, edit in enumerate(self.management.edits):
            found = decide(_policy_of(edit), context)
            drops += [Drop(drop.target, _reason(i, edit)) for drop in found]
            context = context.after(found)
        return drops

    def applied_edits(self, drops: Sequence[Drop]) -> list[types.AppliedEdit]:
        """What was done, as the reply reports it: one entry for each edit that let something go."""
        applied = []
        for i, edit in enumerate(self.management.edits):
            targets = [drop.target for drop in drops if drop.reason == _reason(i, edit)]
            if not targets:
                continue
            if isinstance(edit, types.ClearThinking20251015 | types.DropThinking):
                count = {"cleared_thinking_turns": len({target.message for target in targets})}
            else:
                count = {"cleared_tool_uses": sum(target.kind == "observation" for target in targets)}
            num_tokens = sum(target.num_tokens for target in targets)
            applied.append(types.AppliedEdit(type=edit.type, **count, cleared_input_tokens=num_tokens))
        return applied


def _reason(i: int, edit: types.Edit) -> str:
    """Tells the drops of one edit from those of another of its type."""
    return f"edits[{i}], {edit.type}"


@dataclass(frozen=True, slots=True)
class _ClearToolUses:
    edit: types.ClearToolUses20250919

    def select(self, context: Context) -> Iterable[Drop]:
        edit, context = self.edit, replace(context, tool_results_marked=True)
        if isinstance(edit.trigger, types.ToolUses):
            measured = sum(1 for target in context.observations if target.is_whole)
        else:
            measured = context.visible_tokens
        if measured <= edit.trigger.value:
            return []
        uses = _tool_uses(context, edit.keep.value, edit.exclude_tools or (), edit.clear_tool_inputs or False)
        drops = [Drop(target, edit.type) for use in uses for target in use]
        freed = sum(drop.target.num_tokens for drop in drops)
        return [] if edit.clear_at_least is not None and freed < edit.clear_at_least.value else drops


def _tool_uses(
    context: Context, keep: int, exclude_tools: Sequence[str], clear_tool_inputs: bool | Sequence[str]
) -> Iterator[list[Target]]:
    """The tool uses that may be cleared, oldest first: each a result and, where wanted, the arguments of its call."""
    observations = context.observations
    inputs = {target.call: target for target in context.targets if target.kind == "tool_input"}
    for target in observations[: max(0, len(observations) - keep)]:
        if target.parts and not (target.is_orphan or target.is_reread or target.tool in exclude_tools):
            with_inputs = clear_tool_inputs is True or (clear_tool_inputs and target.tool in clear_tool_inputs)
            called = inputs.get(target.call) if with_inputs and target.call is not None else None
            yield [target] if called is None else [target, called]


_OWN: dict[str, type[Policy]] = {
    kind.__name__: kind for kind in (ClearToolUsesEdit, LastNObservations, RollingDrop, DropThinking, DropRepeats)
}


def _policy_of(edit: types.Edit) -> Policy:
    if isinstance(edit, types.ClearToolUses20250919):
        return _ClearToolUses(edit)
    if isinstance(edit, types.ClearThinking20251015):
        return DropThinking(_num_turns(edit.keep))
    return _OWN[edit.type](**edit.model_dump(exclude={"type"}))


def _num_turns(keep: Literal["all"] | types.ThinkingTurns | types.AllThinking) -> int | Literal["all"]:
    return keep.value if isinstance(keep, types.ThinkingTurns) else "all"
