"""The agent: a model, a shell, and a session whose old observations a policy drops.

Owns the prompts, the form of an action, and the limits. Knows neither where commands run nor where results go.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from akv_sdk import (
    Completion,
    ContextLengthExceeded,
    DropRepeats,
    InTurn,
    LastNObservations,
    Policy,
    RollingDrop,
    Session,
    Usage,
    decide,
)
from swe_bench_agent.workspace import Workspace

Ending = Literal["submitted", "max_steps", "max_cost", "max_seconds", "context_length_exceeded"]

SYSTEM = (
    "You are a software engineer in a git repository. In each turn you say briefly what you are after and give exactly "
    "one command in a block:\n\n```bash\ngrep -rn needle src\n```\n\nIt runs in a fresh bash at the repository's root, "
    "without input, and you are shown what it prints. Older output may be taken out of your sight to save room; run a "
    "command again if you need it. When the issue is solved, give the command `submit` alone."
)
TASK = (
    "Solve the issue below by changing the source; leave the tests as they are. Find the place, reproduce the fault, "
    "change as little as it needs, and check that it is gone.\n\n<issue>\n{issue}\n</issue>"
)
FORMAT_ERROR = (
    "That was not one command. Give exactly one block that opens with ```bash and closes with ```, and no other block "
    "after it. Lines within it that begin with ``` must be pairs of ```language and ```."
)
CUT_OFF = "That was cut off at the longest answer allowed, and nothing was run. Say less, or write long files in parts."

_FENCE = re.compile(r"^`{3,}([^`\n]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one instance. `max_cost_usd` is None for no limit; a command gets at most `command_timeout_s`."""

    max_steps: int = 50
    max_seconds: float = 1800.0
    max_cost_usd: float | None = None
    command_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Prices:
    """USD for a million tokens: of input, of input that came from the cache, of output."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def cost_usd(self, usage: Usage) -> float:
        computed = usage.prompt_tokens - usage.cached_tokens
        micros = computed * self.input + usage.cached_tokens * self.cached + usage.completion_tokens * self.output
        return micros / 1e6


@dataclass(frozen=True, slots=True)
class Config:
    """`policy` is None where nothing shall be dropped; `max_tokens` bounds one answer."""

    policy: Policy | None = None
    limits: Limits = Limits()
    prices: Prices = Prices()
    max_tokens: int = 1024
    temperature: float = 0.0


@dataclass(slots=True)
class Step:
    """One answer of the model and what came of it. Times in seconds; token counts are the server's."""

    text: str
    ttft_s: float
    generate_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefilled_tokens: int
    replayed_tokens: int
    stream_tokens: int
    visible_tokens: int
    next_position: int
    cost_usd: float
    warnings: list[str]
    policy_s: float = 0.0
    dropped: list[dict[str, Any]] = field(default_factory=list)  # before this answer: block, tokens, reason
    ops: list[dict[str, Any]] = field(default_factory=list)  # that the server applied for it
    command: str | None = None
    block: str | None = None  # of its observation
    exit_status: int | None = None
    command_s: float = 0.0


@dataclass(slots=True)
class Attempt:
    """What there is of one instance so far. `ending` is None while it goes on."""

    started_s: float
    steps: list[Step] = field(default_factory=list)
    cost_usd: float = 0.0
    elapsed_s: float = 0.0
    ending: Ending | None = None


def parse_policy(text: str) -> Policy | None:
    """`none`, `last:N` (observations), `rolling:TOKENS`, `repeats`, or several of these in turn, joined by `+`.

    Raises ValueError for anything else.
    """
    if text == "none":
        return None
    policies = [_policy(part) for part in text.split("+")]
    return policies[0] if len(policies) == 1 else InTurn(*policies)


def _policy(text: str) -> Policy:
    name, _, number = text.partition(":")
    if text == "repeats":
        return DropRepeats()
    if name in ("last", "rolling") and number.isascii() and number.isdigit():
        return LastNObservations(int(number)) if name == "last" else RollingDrop(int(number))
    raise ValueError(f"{text!r} is no policy: none, last:N, rolling:TOKENS, repeats, or several joined by +")


def parse_action(text: str) -> str | None:
    """The one command of an answer, or None where it has none or several, or where it cannot be told where it ends.

    What a reasoning model thought, up to the last `</think>`, is not looked at. The command's block is the last one; it
    may hold blocks that name a language where they open, since only those can be told from its own end.
    """
    said = text.rpartition("</think>")[2]
    depth = opened_at = 0
    opened_as = ""
    blocks: list[tuple[str, int, int]] = []  # the outermost ones: their language, and where their content lies
    for fence in _FENCE.finditer(said):
        language = fence[1].strip()
        if depth == 0:
            opened_as, opened_at = language, fence.end()
        depth += 1 if language or depth == 0 else -1
        if depth == 0:
            blocks.append((opened_as, opened_at, fence.start()))
    commands = [block for block in blocks if block[0] in ("bash", "sh")]
    if depth != 0 or len(commands) != 1 or commands != blocks[-1:]:
        return None
    _, begin, end = commands[0]
    is_thinking = "<think>" in said[:begin] + said[end:]
    return None if is_thinking else said[begin:end].strip() or None


def solve(
    session: Session,
    workspace: Workspace,
    issue: str,
    config: Config,
    on_step: Callable[[Attempt], None],
) -> Attempt:
    """Works on an issue until the model submits or a limit is met; `on_step` hears of each step. The session is left as
    it then stands, to be recorded. Raises the SDK's AkvError where the server fails.

    A limit is looked at between steps and while the model writes: an answer that has not ended by then is thrown away.
    The server's silence before its first token is waited out, at most for the client's `timeout_s`.
    """
    attempt = Attempt(time.monotonic())
    session.system(SYSTEM)
    session.user(TASK.format(issue=issue.strip()))
    while attempt.ending is None:
        attempt.ending = _limit(attempt, config.limits) or _step(attempt, session, workspace, config)
        attempt.elapsed_s = time.monotonic() - attempt.started_s
        on_step(attempt)
    return attempt


def _limit(attempt: Attempt, limits: Limits) -> Ending | None:
    if len(attempt.steps) >= limits.max_steps:
        return "max_steps"
    if limits.max_cost_usd is not None and attempt.cost_usd >= limits.max_cost_usd:
        return "max_cost"
    if time.monotonic() - attempt.started_s >= limits.max_seconds:
        return "max_seconds"
    return None


def _step(attempt: Attempt, session: Session, workspace: Workspace, config: Config) -> Ending | None:
    policy, limits = config.policy, config.limits
    deadline_s = attempt.started_s + limits.max_seconds
    began_s = time.monotonic()
    drops = decide(policy, session.context) if policy is not None else []
    layout = session.apply(policy) if policy is not None and drops else None
    policy_s = time.monotonic() - began_s
    try:
        answered = _answer(session, deadline_s, config)
    except ContextLengthExceeded:
        return "context_length_exceeded"
    if answered is None:
        return "max_seconds"
    reply, ttft_s, generate_s = answered
    step = Step(
        text=reply.text,
        ttft_s=ttft_s,
        generate_s=generate_s,
        prompt_tokens=reply.usage.prompt_tokens,
        cached_tokens=reply.usage.cached_tokens,
        completion_tokens=reply.usage.completion_tokens,
        prefilled_tokens=reply.akv.prefilled_tokens,
        replayed_tokens=reply.akv.replayed_tokens,
        stream_tokens=reply.akv.stream_tokens,
        visible_tokens=reply.akv.visible_tokens,
        next_position=reply.akv.next_position,
        cost_usd=config.prices.cost_usd(reply.usage),
        warnings=reply.akv.warnings,
        policy_s=policy_s,
        dropped=[{"block": d.target.block, "tokens": d.target.num_tokens, "reason": d.reason} for d in drops],
        ops=[op.model_dump() for op in layout.applied] if layout is not None else [],
    )
    attempt.steps.append(step)
    attempt.cost_usd += step.cost_usd
    was_cut_off = reply.finish_reason == "length"
    step.command = None if was_cut_off else parse_action(step.text)
    if step.command is None:
        session.user(CUT_OFF if was_cut_off else FORMAT_ERROR)
    elif step.command == "submit":
        return "submitted"
    else:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return "max_seconds"
        timeout_s = min(limits.command_timeout_s, left_s)
        ran = workspace.run(step.command, timeout_s)
        step.exit_status, step.command_s = ran.exit_status, ran.elapsed_s
        said = f"stopped after {timeout_s:.0f} s" if ran.exit_status is None else f"exit status {ran.exit_status}"
        step.block = session.observe(f"{ran.output.rstrip()}\n[{said}]".lstrip("\n"), tool="bash")
    return None


def _answer(session: Session, deadline_s: float, config: Config) -> tuple[Completion, float, float] | None:
    """The reply, seconds to its first token and to its end; None where the deadline came first."""
    began_s = time.monotonic()
    ttft_s: float | None = None
    with session.stream(max_tokens=config.max_tokens, temperature=config.temperature) as stream:
        for event in stream:
            now_s = time.monotonic()
            if ttft_s is None and (event.text or event.finish_reason):
                ttft_s = now_s - began_s
            if now_s >= deadline_s and event.finish_reason is None:
                return None
    generate_s = time.monotonic() - began_s
    return stream.final, generate_s if ttft_s is None else ttft_s, generate_s
