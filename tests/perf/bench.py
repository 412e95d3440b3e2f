"""`make bench`: what a drop costs, and prefill and decode beside transformers, as ratios within one run.

Every figure is measured here, on this machine, in this run: rivals take turns, so that a busy moment hits all, and the
median counts. Keep the machine quiet. Prints a table and writes out/bench.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from akv_bench.trajectories import read
from rich.console import Console
from rich.table import Table
from torch import Tensor

from akv_sdk import types
from akv_server import files, loader, tokenizer_files, weights
from akv_server.batch import Request
from akv_server.chat import Chat
from akv_server.engine import Engine, EngineConfig
from akv_server.model import Model, ModelConfig
from akv_server.ops import Op, Timeline
from akv_server.prompts import render
from akv_server.sampler import SamplingParams
from tests.perf.runs import NEW, Run, drop_against_none, some_tokens, take_turns

CONTEXT = 2048
OUT = Path("out/bench.json")


def settle(engine: Engine) -> None:
    """Lets an idle engine do what compaction is left."""
    while engine.cache.is_sparse and engine.config.compact_tokens_per_step:
        engine.step()


def every_second_block(engine: Engine) -> int:
    """Pages that a stream of 64 blocks of 10 tokens sees once each second block is dropped and the stream goes on."""
    tokens = some_tokens(64 * 10, seed=3)
    Run(engine, tokens, max_tokens=0, salt="blocks")
    history = tuple(Op("drop", len(tokens), start, start + 10, repos=True) for start in range(10, len(tokens), 20))
    tokens = tokens + some_tokens(16, seed=4)
    Run(engine, tokens, history, max_tokens=8, salt="blocks")
    settle(engine)
    return engine.residency("blocks", tokens, Timeline(history))[1]


@dataclass(frozen=True)
class Turn:
    """What an agent's stream gains before its turn, and for each observation in that the spans which go once it is old
    (relative to the turn's beginning)."""

    tokens: list[int]
    drops: list[list[tuple[int, int]]]


TRAJECTORY = Path(__file__).resolve().parents[3] / "shared" / "trajectories" / "coding-swesmith-moto7331-xml.json"
NUM_TURNS, OBSERVATION_TOKENS, KEPT_OBSERVATIONS, LINE_HEAD = 14, 2000, 2, 2


def recorded_agent() -> list[Turn]:
    """A recorded SWE-agent at the shell, its longest outputs cut. Of each line of an old observation the first two
    tokens stay (the number of a line of code, the beginning of a path): an outline, in many short pieces. Observations
    that go whole leave no more than 6 % of the slots in the pages of any recorded stream unseen."""
    loaded = tokenizer_files.load(files.resolve("default"))
    recorded = read(TRAJECTORY)
    stream = render(types.RenderRequest(messages=recorded.tagged(), add_generation_prompt=False), Chat(loaded))
    breaks = {token for token in set(stream.tokens) if b"\n" in loaded.token_bytes(token)}
    turns, start = [], 0
    for answer in recorded.turns[:NUM_TURNS]:
        turn = Turn([], [])
        for block in (b for m in stream.messages[:answer] for b in m.blocks if b.kind == "observation"):
            if block.start >= start:
                turn.tokens.extend(stream.tokens[start : block.start])
                begin = len(turn.tokens)
                turn.tokens.extend(stream.tokens[block.start : block.end][:OBSERVATION_TOKENS])
                turn.drops.append(list(line_tails(turn.tokens, begin, breaks)))
                start = block.end
        turn.tokens.extend(stream.tokens[start : stream.messages[answer].start])
        turns.append(turn)
        start = stream.messages[answer].start
    return turns


def synthetic_agent() -> list[Turn]:
    """One of about the same shape: each turn with an observation of 80 lines of 9 tokens, and 50 tokens beside it."""
    lines = [(25 + 9 * i + LINE_HEAD, 25 + 9 * (i + 1)) for i in range(80)]
    return [Turn(some_tokens(25 + 80 * 9 + 25, seed=1000 + turn), [lines]) for turn in range(NUM_TURNS)]


def line_tails(tokens: list[int], start: int, breaks: set[int]) -> Iterator[tuple[int, int]]:
    """What of the lines from `start` on lies behind their first tokens."""
    begin = start
    for i in range(start, len(tokens)):
        if tokens[i] in breaks or i == len(tokens) - 1:
            if begin + LINE_HEAD < i:
                yield begin + LINE_HEAD, i
            begin = i + 1


@dataclass
class RollingDrop:
    """What came of an agent: its stream, the tokens that it wrote, and the longest decode step on the way."""

    timeline: Timeline
    tokens: list[int]
    written: list[int]
    longest_s: float


def rolling_drop(engine: Engine, turns: list[Turn]) -> RollingDrop:
    """An agent that writes 16 tokens in each turn and keeps its last observations whole."""
    agent = RollingDrop(Timeline(), [], [], 0.0)
    old: list[list[tuple[int, int]]] = []
    for turn in turns:
        start = len(agent.tokens)
        agent.tokens = agent.tokens + turn.tokens
        old += [[(start + a, start + b) for a, b in spans] for spans in turn.drops]
        history = agent.timeline.history
        run = Run(engine, agent.tokens, history, max_tokens=16, salt="rolling", timeline=agent.timeline)
        agent.longest_s = max(agent.longest_s, *(b - a for a, b in itertools.pairwise(run.token_times_s)))
        assert run.outcome is not None
        agent.written += run.outcome.tokens
        agent.tokens = agent.tokens + run.outcome.tokens
        while len(old) > KEPT_OBSERVATIONS:
            at = len(agent.tokens)
            history = (*history, *(Op("drop", at, a, b, repos=True) for a, b in old.pop(0)))
        agent.timeline = Timeline(history, agent.timeline)
    settle(engine)
    return agent


def compaction(model: Model, turns: list[Turn], rounds: int) -> dict[str, float]:
    """What compaction saves, and what it costs the step beside it: off and on take turns."""
    on_config = EngineConfig(num_pages=768)
    engines = [Engine(model, config) for config in (replace(on_config, compact_tokens_per_step=0), on_config)]
    figures: dict[str, float] = {}
    for name, engine in zip(("off", "on"), engines, strict=True):
        figures[f"blocks_pages_{name}"] = every_second_block(engine)

    def longest_step(name: str, engine: Engine) -> Callable[[int], float]:
        def run(_: int) -> float:
            engine.evict_all()
            moved = engine.stats()["tokens_moved"]
            agent = rolling_drop(engine, turns)
            figures[f"rolling_pages_{name}"] = engine.residency("rolling", agent.tokens, agent.timeline)[1]
            figures[f"rolling_moved_{name}"] = engine.stats()["tokens_moved"] - moved
            return agent.longest_s

        return run

    off, on = take_turns(rounds, longest_step("off", engines[0]), longest_step("on", engines[1]))
    assert figures["rolling_moved_off"] == 0 < figures["rolling_moved_on"]
    assert figures["rolling_pages_on"] < figures["rolling_pages_off"]
    return figures | {
        "longest_step_off_ms": off * 1e3,
        "longest_step_on_ms": on * 1e3,
        "longest_step_on_over_off": on / off,
    }


def transformers_model(config: ModelConfig) -> torch.nn.Module:
    """The same weights in transformers, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_q_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=True,
        )
    ).eval()
    with torch.no_grad(), weights.open_weights(files.resolve("default")) as (_, source):
        for name, parameter in model.named_parameters():
            parameter.copy_(source(name))
    return model


def against_transformers(engines: dict[str, Engine], rounds: int) -> dict[str, float]:
    """Prefill of 2,048 tokens, and decode behind them, in tokens/s and ms a token."""
    model = transformers_model(next(iter(engines.values())).model.config)
    prompt = some_tokens(CONTEXT, seed=2)
    decode_tokens = 16
    decode: dict[str, list[float]] = {name: [] for name in ("transformers", *engines)}

    def theirs(_: int) -> float:
        with torch.inference_mode():
            start = time.perf_counter()
            out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            prefilled = time.perf_counter() - start
            times = []
            for _ in range(decode_tokens):
                start = time.perf_counter()
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                times.append(time.perf_counter() - start)
        decode["transformers"].append(statistics.median(times))
        return prefilled

    def ours(name: str) -> Callable[[int], float]:
        def run(round_: int) -> float:
            engines[name].evict_all()
            result = Run(engines[name], prompt, max_tokens=decode_tokens + 1)
            decode[name].append(result.inter_token_s)
            return result.ttft_s

        return run

    prefill = take_turns(rounds, theirs, *(ours(name) for name in engines))
    figures: dict[str, float] = {}
    for name, prefill_s in zip(("transformers", *engines), prefill, strict=True):
        decode_s = statistics.median(decode[name])
        figures[f"{name}_prefill_tokens_per_s"] = CONTEXT / prefill_s
        figures[f"{name}_decode_ms"] = decode_s * 1e3
        figures[f"{name}_prefill_over_transformers"] = prefill[0] / prefill_s
        figures[f"{name}_decode_over_transformers"] = statistics.median(decode["transformers"]) / decode_s
    return figures


def quantisation_cost(engines: dict[str, Engine]) -> dict[str, float]:
    """Mean KL(float32 || int8) per token, in nats, over this repository's own prose and code."""
    encode = tokenizer_files.load(files.resolve("default")).encode
    root = Path(__file__).resolve().parents[2]
    texts = [p.read_text() for p in (root / "README.md", root / "akv_server/ops.py", root / "akv_sdk/types.py")]
    total, count = 0.0, 0
    for text in texts:
        tokens = encode(text)[:1024]
        p, q = (all_logits(engine, tokens).log_softmax(-1) for engine in engines.values())
        total += float((p.exp() * (p - q)).sum())
        count += len(tokens)
    return {"int8_mean_kl_nats": total / count, "int8_kl_tokens": count}


def all_logits(engine: Engine, tokens: list[int]) -> Tensor:
    """float64 [num_tokens, vocab]: every logit of a prompt, taken where the engine scores it."""
    rows: list[Tensor] = []
    forward = engine.model.forward

    def keep(*args: object) -> Tensor:
        logits = forward(*args)  # type: ignore[arg-type]
        rows.append(logits.double())
        return logits

    engine.model.forward = keep  # type: ignore[method-assign]
    try:
        engine.evict_all()
        engine.submit(
            Request("kl", "kl", tokens, (), SamplingParams(), 0, frozenset(), lambda _: None, num_prompt_logprobs=0)
        )
        while engine.step():
            pass
    finally:
        del engine.model.forward
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    console = Console()
    found = files.resolve("default")
    engines = {
        kind: Engine(loader.load_model(found, weights_as=kind), EngineConfig(num_pages=512))
        for kind in ("float32", "int8")
    }
    figures: dict[str, float] = {}
    for kind, engine in engines.items():
        console.print(f"[dim]first token after a drop, {kind} weights …")
        figures |= {f"{kind}_{name}": value for name, value in drop_against_none(engine, rounds).items()}
    is_recorded = TRAJECTORY.exists()
    about = "a recorded agent" if is_recorded else f"no {TRAJECTORY.name} beside this clone: a synthetic agent"
    console.print(f"[dim]compaction, int8 weights, {about} …")
    turns = recorded_agent() if is_recorded else synthetic_agent()
    figures |= {"rolling_is_recorded": is_recorded, **compaction(engines["int8"].model, turns, rounds)}
    console.print("[dim]prefill and decode beside transformers …")
    figures |= against_transformers(engines, rounds)
    console.print("[dim]what int8 weights cost in quality …")
    figures |= quantisation_cost(engines)
    report(console, figures)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"machine": machine, "rounds": rounds, **figures}, indent=1))
    console.print(f"[dim]{machine}; medians of {rounds} rounds or more; all figures in {OUT}")


def report(console: Console, figures: dict[str, float]) -> None:
    goals = Table(title="Ratios within this run")
    for column in ("what", "float32", "int8", "goal"):
        goals.add_column(column, justify="left" if column == "what" else "right")
    for what, key, goal in (
        (f"TTFT of {NEW} tokens after a drop / with no drop", "after_drop_over_no_drop", "<= 1.05"),
        ("re-prefill / TTFT after the drop", "re_prefill_over_after_drop", ">= 15"),
        (f"prefill of {CONTEXT} tokens, speed over transformers", "prefill_over_transformers", ">= 1.5"),
        (f"decode at {CONTEXT} tokens, speed over transformers", "decode_over_transformers", ">= 3"),
    ):
        goals.add_row(what, *(f"{figures[f'{kind}_{key}']:.2f}" for kind in ("float32", "int8")), goal)
    console.print(goals)
    absolute = Table(title="As measured")
    for column in ("", "transformers", "AKV float32", "AKV int8"):
        absolute.add_column(column, justify="right" if column else "left")
    kinds = ("transformers", "float32", "int8")
    for what, key, form in (
        (f"prefill of {CONTEXT}, tokens/s", "prefill_tokens_per_s", "{:.0f}"),
        (f"decode at {CONTEXT}, ms a token", "decode_ms", "{:.1f}"),
        ("TTFT after the drop, ms", "ttft_after_drop_ms", "{:.1f}"),
        ("TTFT with no drop, ms", "ttft_no_drop_ms", "{:.1f}"),
        ("TTFT re-prefilled, ms", "ttft_re_prefill_ms", "{:.0f}"),
    ):
        values = [figures.get(f"{kind}_{key}") for kind in kinds]
        absolute.add_row(what, *("" if value is None else form.format(value) for value in values))
    console.print(absolute)
    pages = Table(title="Compaction")
    agent = "recorded" if figures["rolling_is_recorded"] else "synthetic"
    for column in ("", "off", "on", "on / off", "goal"):
        pages.add_column(column, justify="right" if column else "left")
    for what, key, form in (
        ("pages seen, every second of 64 blocks dropped", "blocks_pages", "{:.0f}"),
        (f"pages seen, rolling drop of a {agent} agent", "rolling_pages", "{:.0f}"),
    ):
        off, on = figures[f"{key}_off"], figures[f"{key}_on"]
        pages.add_row(what, form.format(off), form.format(on), f"{on / off:.2f}", "")
    pages.add_row("tokens moved by it", "0", f"{figures['rolling_moved_on']:.0f}", "", "")
    off, on = figures["longest_step_off_ms"], figures["longest_step_on_ms"]
    pages.add_row("longest decode step, ms", f"{off:.1f}", f"{on:.1f}", f"{on / off:.2f}", "<= 1.10")
    console.print(pages)
    console.print(
        f"mean KL(float32 || int8): {figures['int8_mean_kl_nats']:.4f} nats a token "
        f"over {figures['int8_kl_tokens']:.0f} tokens of this repository"
    )


if __name__ == "__main__":
    main()
