"""What server-driven drops let go on real trajectories, and how often something that was needed, for several epsilons.

Each trajectory is replayed teacher-forced with everything visible; at every assistant turn the attention of every
`SAMPLED_EVERY`-th token is noted as the engine does while it decodes, and the server's own policy judges the turn. What
is approximate: attention is that of a model which still sees what was dropped.

A *need* is a turn that writes an identifier-like word (a path, a number, a name with `_`, `.`, `/` or digits) which one
earlier observation has, and nothing else before the turn. It is counted where that observation lies before the recent
window, which is never dropped; a *miss* is a need whose observation was gone when the turn began. Real needs are few,
so needles are planted, too: a line in each of up to four of the longest observations of the first half, and three more
in the longest. Behind the cut trajectory the user asks for one after the other, each once, and is answered: first for
those that nobody looked at until then, at last in four turns on end for those of the longest. It is a miss if a
needle's observation is gone when it is asked for.

    python -m tests.perf.auto_drop [--only NAME] [--cost]

Prints a table for the docs and writes out/auto-drop.json; `--cost` measures what noting attention takes instead.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from akv_bench.trajectories import read
from akv_kernels.plan import SequencePlan, build_plan
from rich.console import Console

from akv_sdk import types
from akv_server import auto_drop, loader
from akv_server.attention import SAMPLED_EVERY, Attention
from akv_server.blocks import Block
from akv_server.chat import Chat
from akv_server.kv import KV
from akv_server.loader import LoadedModel
from akv_server.model import StepInput
from akv_server.ops import Layout, Timeline
from akv_server.prompts import render
from akv_server.streams import Stream
from tests.perf.quality import MIN_TURNS, TRAJECTORIES, chosen, too_short

JSON = dict[str, Any]
PAGE_SIZE = 16
EPSILONS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
WORD = re.compile(r"[\w./:@-]{6,}")
NUM_HOMES, NUM_ON_END = 4, 4
NEEDLES = {  # what was answered once may be copied from the answer: none is asked for twice
    "release": "7f3a-9c21-relay",
    "nightly": "b04e-55d8-ferry",
    "signing": "c9a1-17f0-cedar",
    "upload": "2d6b-e83c-amber",
    "staging": "51be-0f97-slate",
    "rollback": "e8d2-6a4c-heron",
    "preview": "3c70-b1d5-maple",
}


class Replay:
    """A conversation in the cache, and the attention of its assistant turns."""

    def __init__(self, loaded: LoadedModel, messages: Sequence[JSON], max_tokens: int) -> None:
        self.model, self.messages = loaded.model, list(messages)
        body = types.RenderRequest(messages=self.messages, add_generation_prompt=False)
        stream = render(body, Chat(loaded.tokenizer))
        fitting = [i for i, message in enumerate(stream.messages) if message.end <= max_tokens]
        self.stream = replace(
            stream, tokens=stream.tokens[: stream.messages[fitting[-1]].end], messages=stream.messages[: len(fitting)]
        )
        self.turns = [i for i in fitting[1:] if stream.messages[i].role == "assistant"]
        self._kv = KV(self.model, -(-len(self.stream.tokens) // PAGE_SIZE), PAGE_SIZE)
        for start in range(0, len(self.stream.tokens), 512):
            self._forward(range(start, min(start + 512, len(self.stream.tokens))))

    def _forward(self, rows: Sequence[int], mass: torch.Tensor | None = None) -> None:
        end = rows[-1] + 1
        plan = build_plan(
            [SequencePlan(rows, range(-(-end // PAGE_SIZE)), [(0, end, 0, 0)])], self.model.rotary, PAGE_SIZE
        )
        at = torch.tensor(rows)
        tokens = torch.tensor(self.stream.tokens)[at]
        slots = at if mass is None else torch.full_like(at, -1)
        step = StepInput(tokens, at, slots, plan, torch.empty(0, dtype=torch.int64))
        self.model.forward(step, self._kv.k_pages, self._kv.v_pages, mass)

    def attention(self, turn: int) -> Attention:
        """What the prompt of an assistant turn got while that was written."""
        message = self.stream.messages[turn]
        rows = range(message.content_start, message.end, SAMPLED_EVERY)
        noted = Attention(message.content_start)
        for row in rows:
            mass = torch.zeros(row // PAGE_SIZE + 1)
            self._forward([row], mass)
            noted.add(mass.numpy(), [(0, row + 1, 0, 0)], PAGE_SIZE)
        return noted

    def until(self, turn: int, before: Stream) -> Stream:
        """The stream when a turn ends, with what an earlier one knew."""
        messages = self.stream.messages[: turn + 1]
        tokens = self.stream.tokens[: messages[-1].end]
        return replace(before, tokens=tokens, messages=messages)

    def judged(self, attention: dict[int, Attention], settings: types.AutoDrop) -> Iterator[tuple[int, Stream]]:
        """Every turn with the stream that it begins with, drops and all; the last is one past the end."""
        stream = Stream(timeline=Timeline())
        for turn in self.turns:
            yield turn, stream
            stream = auto_drop.judge(
                self.until(turn, stream), attention[turn], settings, self.messages[: turn + 1], ()
            ).stream
        yield len(self.stream.messages), stream


def homes_of(messages: Sequence[JSON]) -> list[int]:
    """The messages that get needles, in the order in which they are asked for; none without an observation in the first
    half."""
    half = messages[: len(messages) // 2 + 1]
    observations = [i for i, m in enumerate(half) if (m.get("content") or "").startswith("<ephemeral_observation")]
    homes = sorted(observations, key=lambda i: len(messages[i]["content"]))[-NUM_HOMES:]
    return [*homes[:-1], *homes[-1:] * NUM_ON_END]


def planted(messages: Sequence[JSON], homes: Sequence[int]) -> list[JSON]:
    """The conversation with needles in these messages, within their tags, and turns at its end that ask for one after
    the other."""
    notes: dict[int, list[str]] = {}
    asked = []
    for home, (name, token) in zip(homes, NEEDLES.items(), strict=False):
        notes.setdefault(home, []).append(f"\nNote: the {name} token of this build is {token}.\n")
        asked += [
            {"role": "user", "content": f"Which {name} token was noted above? Repeat it exactly."},
            {"role": "assistant", "content": f"The {name} token of this build is {token}."},
        ]
    found = list(messages)
    for home, lines in notes.items():
        text, count = messages[home]["content"], len(lines) + 1
        inside = text.index(">") + 1, text.rindex("</")
        cuts = [0, *(min(max(i * len(text) // count, inside[0]), inside[1]) for i in range(1, count)), len(text)]
        parts = [text[a:b] + line for (a, b), line in zip(pairwise(cuts), [*lines, ""], strict=True)]
        found[home] = {**messages[home], "content": "".join(parts)}
    return [*found, *asked]


def needs(replay: Replay) -> dict[tuple[int, int], set[str]]:
    """By (turn, message of the observation): the words that the turn can only have from there."""
    texts = [json.dumps([m.get("content"), m.get("tool_calls")], ensure_ascii=False) for m in replay.messages]
    words = [{w for w in WORD.findall(text) if re.search(r"[\d_./]", w[1:-1])} for text in texts]
    found: dict[tuple[int, int], set[str]] = {}
    for turn in replay.turns:
        for word in words[turn]:
            homes = [i for i in range(turn) if word in texts[i]]
            if len(homes) == 1 and replay.messages[homes[0]].get("content", "").startswith("<ephemeral_observation"):
                found.setdefault((turn, homes[0]), set()).add(word)
    return found


@dataclass
class Row:
    """Of one epsilon over all trajectories: observations and their tokens, those that went, needs and misses."""

    epsilon: float
    observations: int = 0
    dropped: int = 0
    tokens: int = 0
    tokens_dropped: int = 0
    needs: int = 0
    misses: int = 0
    asked_once: int = 0
    gone_once: int = 0
    asked_on_end: int = 0
    gone_on_end: int = 0


def measure(replay: Replay, attention: dict[int, Attention], rows: Sequence[Row], homes: Sequence[int]) -> None:
    """Adds a trajectory to each row; its last turns ask for needles in the messages `homes`."""
    messages = replay.stream.messages
    asks = dict(zip(replay.turns[-len(homes) :], homes, strict=True))
    first_on_end = len(homes) - NUM_ON_END
    blocks = {i: b for i, m in enumerate(messages) for b in m.blocks if b.kind == "observation" and b.start < b.end}
    for row in rows:
        settings = types.AutoDrop(epsilon=row.epsilon)
        wanted = needs(replay)
        for turn, stream in replay.judged(attention, settings):
            layout = stream.layout

            def is_gone(block: Block, layout: Layout = layout) -> bool:
                return layout.num_visible_in(block.start, block.end) < block.end - block.start

            if turn in asks:
                nth = list(asks).index(turn)
                if nth <= first_on_end:
                    row.asked_once += 1
                    row.gone_once += is_gone(blocks[asks[turn]])
                if nth >= first_on_end:
                    row.asked_on_end += 1
                    row.gone_on_end += is_gone(blocks[asks[turn]])
            elif turn < min(asks):
                at_end = stream
                for block in [blocks[i] for at, i in wanted if at == turn and i in blocks]:
                    if block.end <= messages[turn].start - auto_drop.NUM_RECENT_TOKENS:
                        row.needs += 1
                        row.misses += is_gone(block)
        seen = [b for b in blocks.values() if b.end <= len(at_end.tokens)]
        gone = [b.end - b.start - at_end.layout.num_visible_in(b.start, b.end) for b in seen]
        row.observations += len(blocks)
        row.tokens += sum(b.end - b.start for b in blocks.values())
        row.dropped += sum(count > 0 for count in gone)
        row.tokens_dropped += sum(gone)


def cost(loaded: LoadedModel) -> str:
    """CPU time of a decode step with and without noting attention, as a table. One thread; the best of 15 rounds."""
    torch.set_num_threads(1)
    lines = ["| visible tokens | decode step, ms | sampled step, ms | over all steps |", "|---|---|---|---|"]
    config = loaded.config
    kv = KV(loaded.model, config.max_positions // PAGE_SIZE, PAGE_SIZE)
    for pages in (*kv.k_pages, *kv.v_pages):
        pages.normal_()
    for count in (1024, 4096, config.max_positions):
        plan = build_plan(
            [SequencePlan([count - 1], range(count // PAGE_SIZE), [(0, count, 0, 0)])], loaded.model.rotary, PAGE_SIZE
        )
        at = torch.tensor([count - 1])
        step = StepInput(torch.tensor([1]), at, at, plan, torch.tensor([0]))
        taken: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(15):
            for is_sampled in (False, True):
                noted, mass = Attention(count), torch.zeros(len(plan.page_table))
                begun = time.thread_time()
                loaded.model.forward(step, kv.k_pages, kv.v_pages, mass if is_sampled else None)
                if is_sampled:
                    noted.add(mass.numpy(), [(0, count, 0, 0)], PAGE_SIZE)
                taken[is_sampled].append((time.thread_time() - begun) * 1e3)
        plain, sampled = min(taken[False]), min(taken[True])
        more = (sampled / plain - 1) / SAMPLED_EVERY
        lines.append(f"| {count} | {plain:.1f} | {sampled:.1f} | +{more:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=Path, default=TRAJECTORIES)
    parser.add_argument("--max-tokens", type=int, default=7000)
    parser.add_argument("--only", action="append", metavar="NAME", help="of these names alone; repeatable")
    parser.add_argument("--cost", action="store_true", help="measure what noting attention takes instead")
    options = parser.parse_args()
    paths = [] if options.cost else chosen(parser, options.trajectories, options.only)
    console = Console()
    loaded = loader.load("default", weights="int8")
    if options.cost:
        print(cost(loaded))
        return
    rows = [Row(epsilon) for epsilon in EPSILONS]
    spread: list[float] = []
    for path in paths:
        messages = read(path).tagged()
        stream = render(types.RenderRequest(messages=messages, add_generation_prompt=False), Chat(loaded.tokenizer))
        fits = [i for i, m in enumerate(stream.messages) if m.role == "assistant" and m.end <= options.max_tokens]
        if len(fits) < MIN_TURNS:
            console.print(f"[dim]{path.stem}: skipped, {too_short(len(fits), options.max_tokens)}")
            continue
        messages = messages[: fits[-1] + 1]
        homes = homes_of(messages)
        if not homes:
            console.print(f"[dim]{path.stem}: skipped, its first half has no observation to plant a needle in")
            continue
        replay = Replay(loaded, planted(messages, homes), options.max_tokens + 1000)
        attention = {turn: replay.attention(turn) for turn in replay.turns}
        measure(replay, attention, rows, homes)
        for turn in replay.turns:
            context = auto_drop.Context(replay.messages, replay.until(turn, Stream(timeline=Timeline())).spans())
            spread += [share for _, share in auto_drop.shares(context, attention[turn])]
        misses = [(row.epsilon, row.misses, row.gone_once, row.gone_on_end) for row in rows]
        console.print(f"[dim]{path.stem}: {len(replay.turns)} turns; so far {misses}")
    if not spread:
        parser.exit(1, "there is no observation to judge\n")
    print("| epsilon | observations dropped | of their tokens | needed, gone | asked once, gone | asked on end, gone |")
    print("|---" * 6 + "|")
    for row in rows:
        freed = row.tokens_dropped / row.tokens
        went = f"{row.dropped} of {row.observations} | {freed:.0%} | {row.misses} of {row.needs}"
        needles = f"{row.gone_once} of {row.asked_once} | {row.gone_on_end} of {row.asked_on_end}"
        print(f"| {row.epsilon} | {went} | {needles} |")
    print("shares, by tenths:", [round(q, 3) for q in statistics.quantiles(spread, n=10)])
    Path("out").mkdir(exist_ok=True)
    Path("out/auto-drop.json").write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
