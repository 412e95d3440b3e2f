"""Server-driven drops: what attention the engine notes, what the policy makes of it, and how it is told over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
from akv_bench.trajectories import read
from akv_kernels import select
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import akv_sdk
from akv_sdk import types
from akv_server import auto_drop, cli, files, loader
from akv_server.attention import SAMPLED_EVERY, Attention
from akv_server.batch import Request
from akv_server.blocks import Block
from akv_server.engine import Engine, EngineConfig
from akv_server.journal import Journal, Saved
from akv_server.ops import Op
from akv_server.streams import Message, Stream
from tests.clients import GREEDY, some_tokens
from tests.conversations import tagged
from tests.models import tiny_model
from tests.perf.auto_drop import Replay, planted
from tests.server import Server, akv_serve
from tests.truth import Truth

JSON = dict[str, Any]

# --- what the engine notes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def engine(path: Path) -> Engine:
    model = loader.load_model(files.resolve(str(path)), backend=select("cpu"))
    return Engine(model, EngineConfig(num_pages=64, max_step_tokens=64))


def run(engine: Engine, *requests: tuple[list[int], tuple[Op, ...], int, Attention | None]) -> list[list[int]]:
    outcomes: dict[int, list[int]] = {}
    for i, (tokens, history, count, attention) in enumerate(requests):

        def on_done(outcome: Any, i: int = i) -> None:
            outcomes[i] = outcome.tokens

        engine.submit(
            Request(f"{i}", f"{i}", tokens, history, GREEDY, count, frozenset(), on_done, attention=attention)
        )
    while engine.step():
        engine.check()
    return [outcomes[i] for i in range(len(requests))]


def by_page(weights: np.ndarray, visible: np.ndarray, page_size: int = 16) -> np.ndarray:
    """A token's weight as the mean over the visible ones of its page."""
    out = np.zeros(len(weights))
    for first in range(0, len(weights), page_size):
        page = np.arange(first, min(first + page_size, len(weights)))
        page = page[visible[page]]
        out[page] = weights[page].mean() if len(page) else 0
    return out


@pytest.mark.parametrize("history", [(), (Op("drop", 100, 21, 70, repos=True),)], ids=["whole", "dropped"])
def test_what_is_noted_equals_the_truth(engine: Engine, path: Path, history: tuple[Op, ...]) -> None:
    tokens, noted = some_tokens(112), Attention(112)
    (generated,) = run(engine, (tokens, history, 2, noted))  # one decode step: the first token, which sees the prompt
    truth = Truth(path)
    truth.logits(tokens + generated[:1], history)
    visible = np.array([not (history and 21 <= i < 70) for i in range(112)])
    expected = by_page(truth.attention[112, :112].numpy(), visible)
    assert noted.num_steps == 1
    assert np.abs(noted.density - expected).max() < 1e-4
    assert noted.density[~visible].sum() == 0


def test_attention_is_noted_at_every_so_many_decode_steps_and_never_beside_prefill(engine: Engine) -> None:
    calls: list[tuple[int, bool]] = []
    forward = engine.model.forward
    engine.model.forward = lambda step, k, v, mass=None: (  # type: ignore[method-assign]
        calls.append((len(step.token_ids), mass is not None)) or forward(step, k, v, mass)
    )
    noted = Attention(40)
    run(engine, (some_tokens(40, 1), (), 2 * SAMPLED_EVERY + 6, noted), (some_tokens(90, 2), (), 50, None))
    assert noted.num_steps == sum(is_sampled for _, is_sampled in calls) == 3
    assert all(rows <= 2 for rows, is_sampled in calls if is_sampled)
    plain = run(engine, (some_tokens(40, 3), (), 9, None)), run(engine, (some_tokens(40, 3), (), 9, Attention(40)))
    assert plain[0] == plain[1]  # and it changes no answer


# --- what the policy makes of it --------------------------------------------------------------------------------------

SETTINGS = types.AutoDrop(epsilon=0.5)


def stream_of(*lengths: int, tail: int = 600) -> Stream:
    """A system prompt, then user messages, each a block of this many tokens between tags of 4, then an answer."""
    messages = [Message("s", "system", 0, 40, 4, 36, blocks=(Block("s", 20, 30),))]
    for i, length in enumerate(lengths):
        start, end = messages[-1].end, messages[-1].end + length + 8
        messages.append(Message(i, "user", start, end, start, end, blocks=(Block(f"b{i}", start + 4, end - 4),)))
    start = messages[-1].end
    messages.append(Message("a", "assistant", start, start + tail, start, start + tail))
    return Stream(tokens=list(range(start + tail)), messages=tuple(messages))


def attention_of(stream: Stream, **density: float) -> Attention:
    """1.0 for every token but those of the named blocks."""
    noted = Attention(len(stream.tokens))
    noted.density[:] = 1.0
    for message in stream.messages:
        for block in message.blocks:
            noted.density[block.start : block.end] = density.get(block.id, 1.0)
    noted.num_steps = 1
    return noted


def judged(stream: Stream, *turns: dict[str, float], settings: types.AutoDrop = SETTINGS, **said: Any) -> Any:
    """What the last of these turns comes to; each begins a token behind where the one before did."""
    found = None
    for density in turns:
        stream = replace(stream, tokens=[*stream.tokens, 0])
        found = auto_drop.judge(
            stream, attention_of(stream, **density), settings, said.get("messages", ()), said.get("marks", ())
        )
        stream = found.stream
    assert found is not None
    return found


def gone(stream: Stream) -> set[str]:
    layout = stream.layout
    blocks = [block for message in stream.messages for block in message.blocks]
    return {block.id for block in blocks if not layout.num_visible_in(block.start, block.end)}


def test_a_block_goes_after_three_quiet_turns_in_a_row_and_once() -> None:
    stream = stream_of(100, 100)
    quiet = {"b0": 0.01}
    assert gone(judged(stream, quiet, quiet).stream) == set()
    third = judged(stream, quiet, quiet, quiet)
    assert gone(third.stream) == {"b0"}
    assert [(e.type, e.cleared_tool_uses, e.cleared_input_tokens) for e in third.applied_edits] == [
        ("auto_drop", 1, 100)
    ]
    assert third.warnings == ["auto_drop: dropped b0 (100 tokens, quiet for 3 turns)"]
    assert third.stream.layout.next_position == len(third.stream.tokens) - 100
    fourth = judged(third.stream, quiet)
    assert (fourth.applied_edits, fourth.warnings) == ([], [])
    assert (
        gone(judged(stream, quiet, quiet, {}, quiet, quiet).stream) == set()
    )  # a turn that looks starts the count anew
    assert gone(judged(stream, quiet, settings=types.AutoDrop(turns=1)).stream) == {"b0"}


def test_what_is_protected_stays_however_quiet() -> None:
    stream = stream_of(100, 100, tail=200)
    quiet = [{"s": 0.0, "b0": 0.0, "b1": 0.0}] * 4
    assert gone(judged(stream, *quiet).stream) == set()  # all of it in the recent window
    stream = stream_of(100, 100)
    assert gone(judged(stream, *quiet).stream) == {"b0", "b1"}  # never the system prompt's
    pin, kept = types.Mark(message=1, block="b0", pinned=True), types.Mark(message=2, ephemeral=False)
    assert gone(judged(stream, *quiet, marks=[pin, kept]).stream) == set()
    head = judged(stream, *quiet, marks=[types.Mark(message=1, keep_head=30), kept]).stream
    assert head.layout.num_visible == len(head.tokens) - 70
    assert gone(judged(stream, *quiet, marks=[types.Mark(message=1, keep_head=37), kept]).stream) == set()  # 63 tokens
    assert gone(judged(stream_of(63, 64), *quiet).stream) == {"b1"}


def test_one_page_that_is_looked_at_keeps_a_whole_observation() -> None:
    """As when an answer copies one line of a thousand tokens: its mean is well below epsilon, its loudest page not."""
    stream = stream_of(1000, 100)
    (block,), _ = (message.blocks for message in stream.messages[1:3])
    loud, quiet = attention_of(stream, b0=0.01, b1=0.01), attention_of(stream, b0=0.01, b1=0.01)
    loud.density[block.start + 500 : block.start + 516] = 1.0
    assert loud.density[block.start : block.end].mean() < 0.03
    for noted, left in ((loud, {"b1"}), (quiet, {"b0", "b1"})):
        judged_stream = stream
        for turn in range(3):
            judged_stream = replace(judged_stream, tokens=[*stream.tokens, *range(turn)])
            noted.density = np.append(noted.density, 1.0)
            judged_stream = auto_drop.judge(judged_stream, noted, SETTINGS, (), ()).stream
        assert gone(judged_stream) == left


def test_the_first_page_counts_on_neither_side() -> None:
    """An observation that begins in it is judged by the rest of it; one that lies within it not at all."""
    messages = (
        Message("o", "user", 0, 14, 2, 13, blocks=(Block("tiny", 5, 12),)),
        Message("u", "user", 14, 120, 14, 120, blocks=(Block("first", 15, 118),)),
        Message("a", "assistant", 120, 800, 120, 800),
    )
    stream = Stream(tokens=list(range(800)), messages=messages)
    noted = attention_of(stream, tiny=0.0, first=0.0)
    noted.density[:16] = 1000.0
    found = {target.block: share for target, share in auto_drop.shares(auto_drop.Context((), stream.spans()), noted)}
    assert found == {"first": 0.0}
    noted.density[16:32] = 2.0  # a page that is looked at, in part or whole
    found = {target.block: share for target, share in auto_drop.shares(auto_drop.Context((), stream.spans()), noted)}
    assert found == {"first": 2.0}


def test_a_turn_without_a_sample_counts_for_nobody() -> None:
    stream = judged(stream_of(100), {"b0": 0.0}, {"b0": 0.0}).stream
    found = auto_drop.judge(stream, Attention(len(stream.tokens)), SETTINGS, (), ())
    assert found.stream is stream
    assert gone(judged(stream, {"b0": 0.0}).stream) == {"b0"}


def test_a_dry_run_only_says_so() -> None:
    found = judged(stream_of(100), *[{"b0": 0.0}] * 3, settings=types.AutoDrop(dry_run=True))
    assert gone(found.stream) == set() and found.applied_edits == []
    assert found.warnings == ["auto_drop: dry run, would drop b0 (100 tokens, quiet for 3 turns)"]


def test_an_answer_that_is_asked_for_again_or_goes_on_is_one_turn() -> None:
    """It counts as it went last."""
    stream = stream_of(100, 100)
    answer = stream.messages[-1]

    def again(stream: Stream, num_prompt: int = answer.content_start, **density: float) -> Stream:
        noted = attention_of(stream, **density)
        noted.density = noted.density[:num_prompt]
        return auto_drop.judge(stream, noted, SETTINGS, (), ()).stream

    for _ in range(4):
        stream, _ = again(stream, b0=0.0, b1=0.0).truncated(answer.content_start)
        stream = replace(stream, tokens=list(range(answer.end)), messages=(*stream.messages, answer))
    stream = again(stream, answer.content_start + 300, b0=0.0)  # b1 is looked at now
    assert stream.counted == (answer.content_start,)
    assert [block[:2] for block in stream.quiet] == [(44, 144)]
    second = judged(stream, {"b0": 0.0, "b1": 0.0}).stream
    assert gone(second) == set()
    third = judged(second, {"b0": 0.0, "b1": 0.0}).stream
    assert gone(third) == {"b0"}
    assert gone(judged(third, {"b1": 0.0}).stream) == {"b0", "b1"}


def test_counts_are_cut_with_the_stream() -> None:
    quiet = {"b0": 0.0, "b1": 0.0}
    stream = judged(stream_of(100, 100), quiet, {"b0": 0.0}, quiet).stream
    n = len(stream.tokens)
    assert stream.counted == (n - 2, n - 1, n)
    assert stream.quiet == ((44, 144, n - 2), (152, 252, n))
    shorter, _ = stream.truncated(n - 1)  # without the third turn
    assert (shorter.counted, shorter.quiet) == ((n - 2, n - 1), ((44, 144, n - 2),))
    shorter, _ = stream.truncated(n - 2)  # nor the second
    assert gone(judged(shorter, quiet).stream) == set()
    assert gone(judged(shorter, quiet, quiet).stream) == {"b0"}
    shorter, _ = stream.truncated(stream.messages[1].end)
    assert (shorter.counted, shorter.quiet) == ((), ())


def test_counts_outlive_the_server(tmp_path: Path) -> None:
    stream = judged(stream_of(100, 100), {"b0": 0.0}).stream
    for _ in range(2):
        with closing(Journal(tmp_path / "state")) as journal:
            journal.save("", "s", Saved("salt", stream), 0.0).result()
    with closing(Journal(tmp_path / "state")) as journal:
        found = journal.load("", "s").result().stream
    assert (found.quiet, found.counted) == (stream.quiet, stream.counted)
    assert found.quiet and found.counted


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 9), st.floats(0.01, 3), st.integers(600, 4000))
def test_a_share_is_that_of_an_older_token(short: int, long: int, steps: int, level: float, tail: int) -> None:
    """A block at `level` times the others' density: neither its length nor the stream's bears on its share, nor what
    the recent window gets, nor the number of steps."""
    stream = stream_of(short, long, tail=tail)
    noted = attention_of(stream, b0=level)
    noted.density[-auto_drop.NUM_RECENT_TOKENS :] = 77.0
    noted.density *= steps
    noted.num_steps = steps
    first, second = (share for _, share in auto_drop.shares(auto_drop.Context((), stream.spans()), noted))
    assert first == pytest.approx(level)
    assert second == pytest.approx(1.0) or level < 1.0 < second or second < 1.0 < level


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
    server.engine.check()


class Agent:
    """Turns of one session. The first message holds a block, the second fills the recent window behind it."""

    def __init__(
        self, client: httpx.Client, auto: Any, session: str | None = None, first: str | None = None, **akv: Any
    ):
        self._client, self._session = client, session or uuid4().hex
        self.auto = auto
        text = tagged("log", "1 failed, 2 passed. " * 8) if first is None else first
        self._messages: list[JSON] = [
            {"role": "user", "content": text, "akv": akv},
            {"role": "user", "content": "go on " * 110},
        ]

    def turn(self, **fields: Any) -> JSON:
        akv = {"session": self._session} | ({} if self.auto is None else {"auto_drop": self.auto})
        body = {"messages": self._messages, "max_tokens": 26, "temperature": 0, "ignore_eos": True, "akv": akv}
        reply = self._client.post("/v1/chat/completions", json=body | fields)
        assert reply.status_code == 200, reply.text
        if fields.get("stream"):
            chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            found = chunks[-1]["akv"]
        else:
            text, found = reply.json()["choices"][0]["message"]["content"], reply.json()["akv"]
        self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        return found

    def take_back(self) -> None:
        """The last turn is to be asked for again."""
        del self._messages[-2:]


ALL = {"epsilon": 10}  # whatever a random model looks at, no share reaches ten


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_of_the_third_quiet_turn_announces_the_drop(client: httpx.Client, stream: bool) -> None:
    agent = Agent(client, ALL)
    first, second, third, fourth = (agent.turn(stream=stream) for _ in range(4))
    assert [a["applied_edits"] for a in (first, second, fourth)] == [[], [], []]
    block = third["spans"][0]["blocks"][0]
    num_tokens = block["end"] - block["start"]
    (edit,) = third["applied_edits"]
    assert (edit["type"], edit["cleared_tool_uses"], edit["cleared_input_tokens"]) == ("auto_drop", 1, num_tokens)
    assert f"auto_drop: dropped log ({num_tokens} tokens, quiet for 3 turns)" in third["warnings"]
    assert not block["visible"] and third["dropped_tokens"] == num_tokens
    (op,) = third["ops"]
    assert (op["start"], op["end"], op["at"], op["repos"]) == (
        block["start"],
        block["end"],
        third["stream_tokens"],
        True,
    )
    assert fourth["ops"] == third["ops"]
    assert fourth["replayed_tokens"] == 0 and fourth["prefilled_tokens"] < 30


def test_it_is_off_unless_asked_for_and_needs_a_block_that_is_closed(client: httpx.Client) -> None:
    for auto, first in ((None, None), (False, None), (ALL, '<ephemeral_observation id="log">' + "never closed " * 9)):
        agent = Agent(client, auto, first=first)
        replies = [agent.turn() for _ in range(4)]
        assert all(reply["ops"] == [] and reply["applied_edits"] == [] for reply in replies)


def test_a_dry_run_over_http_leaves_the_stream_alone(client: httpx.Client) -> None:
    agent = Agent(client, ALL | {"dry_run": True, "turns": 2})
    _, second = agent.turn(), agent.turn()
    assert any(line.startswith("auto_drop: dry run, would drop log") for line in second["warnings"])
    assert second["ops"] == [] and second["dropped_tokens"] == 0
    agent.auto = ALL | {"turns": 2}
    assert agent.turn()["applied_edits"][0]["type"] == "auto_drop"


def test_an_answer_that_is_asked_for_three_times_is_one_quiet_turn(client: httpx.Client) -> None:
    agent = Agent(client, ALL)
    for again in range(3):
        if again:
            agent.take_back()
        assert agent.turn()["applied_edits"] == []
    assert agent.turn()["applied_edits"] == []
    agent.take_back()
    assert agent.turn()["applied_edits"] == []
    assert [edit["type"] for edit in agent.turn()["applied_edits"]] == ["auto_drop"]


def test_a_session_of_the_sdk_asks_for_them_by_request_and_sees_what_went(server: Server) -> None:
    with akv_sdk.Client(server.url) as client, client.session() as session:
        block = session.observe("1 failed, 2 passed. " * 8)
        for said in ("go on " * 110, "more", "and more"):
            session.user(said)
            settings = akv_sdk.AutoDrop(epsilon=10, turns=2, dry_run=said == "more")
            reply = session.complete(max_tokens=26, temperature=0, ignore_eos=True, auto_drop=settings)
            if said == "more":
                assert any("dry run, would drop obs-1" in warning for warning in reply.akv.warnings)
            assert session.is_visible(block) == (said != "and more")
        assert [edit.type for edit in reply.akv.applied_edits] == ["auto_drop"]
        assert session.ops == tuple(reply.akv.ops) != ()
        assert not session.spans[0].blocks[0].visible
        session.user("and?")
        assert session.complete(max_tokens=1, auto_drop=False).akv.replayed_tokens == 0


def test_the_servers_own_setting_holds_for_its_tenants_and_a_request_may_say_no(
    server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(server.service, "_auto_drop", lambda tenant: asked.append(tenant) or True)
    monkeypatch.setattr(auto_drop, "judge", lambda stream, *_: auto_drop.Judged(stream, [], ["judged"]))
    assert "judged" in Agent(client, None).turn()["warnings"]
    assert "judged" not in Agent(client, False).turn()["warnings"]
    assert len(asked) == 1


def test_without_a_session_it_says_so_and_a_bad_field_is_named(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    reply = client.post("/v1/chat/completions", json=body | {"akv": {"auto_drop": True}}).json()
    assert "akv.auto_drop: without a session there are no turns to count, left aside" in reply["akv"]["warnings"]
    refused = client.post("/v1/chat/completions", json=body | {"akv": {"auto_drop": {"epsilon": 0}}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("akv.auto_drop")


# --- from the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def indifferent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer that gives a tilde little attention: its embedding, and so its key, is zero, and what the
    queries make of other keys is far from zero."""
    path = tiny_model(tmp_path_factory.mktemp("indifferent"), num_hidden_layers=1)
    weights = load_file(path / "model.safetensors")
    tilde = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("~")
    weights["model.embed_tokens.weight"][tilde] = 0
    weights["model.layers.0.self_attn.q_proj.weight"] *= 5
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("options", "drops_for"),
    [
        (["--auto-drop"], {"ann", "bob", "eve"}),
        (["--auto-drop", "ann", "--auto-drop", "eve"], {"ann", "eve"}),
        ([], {}),
    ],
    ids=["all", "some", "none"],
)
def test_the_command_says_for_whom(indifferent: Path, options: list[str], drops_for: set[str]) -> None:
    tenants = ("ann", "bob", "eve")
    keys = [option for tenant in tenants for option in ("--api-key", f"{tenant}:key of {tenant}")]
    with akv_serve("--model", str(indifferent), "--weights", "float32", *keys, *options) as (url, _):
        for tenant in tenants:
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer key of {tenant}"}, timeout=60) as client:
                # Attention is noted by the page: those of the ends hold tags, too.
                agent = Agent(client, None, first=tagged("log", "~" * 160), keep_head=16, keep_tail=16)
                *_, third = (agent.turn() for _ in range(3))
            assert [edit["type"] for edit in third["applied_edits"]] == ["auto_drop"] * (tenant in drops_for)
            assert third["dropped_tokens"] == 128 * (tenant in drops_for)


@pytest.mark.parametrize(("keys", "known"), [([], "none"), (["--api-key", "ann:1", "--api-key", "bob:2"], "ann, bob")])
def test_the_command_refuses_a_name_that_no_tenant_has(
    keys: list[str], known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--model", "/nowhere", *keys, "--auto-drop", "anne"]) == 2
    assert capsys.readouterr().err == f"akv: --auto-drop anne: no tenant of --api-key has this name ({known})\n"


# --- a needle in a real trajectory ------------------------------------------------------------------------------------


def test_an_observation_that_the_answer_needs_stays_at_the_default(shared: Path) -> None:
    """Facts are planted in a long observation of a real run; three turns in a row need one each."""
    messages = read(shared / "trajectories" / "tools-inspect-ctf78.json").tagged()[:7]
    replay = Replay(loader.load("default", weights="int8"), planted(messages, [5, 5, 5]), max_tokens=8000)
    replay.turns = replay.turns[-3:]
    attention = {turn: replay.attention(turn) for turn in replay.turns}
    (block,) = replay.stream.messages[5].blocks
    settings = types.AutoDrop()

    def num_left() -> int:
        *_, (_, stream) = replay.judged(attention, settings)
        return stream.layout.num_visible_in(block.start, block.end)

    assert num_left() == block.end - block.start
    for turn, noted in attention.items():
        context = auto_drop.Context(replay.messages, replay.until(turn, Stream()).spans())
        (share,) = (share for target, share in auto_drop.shares(context, noted) if target.message == 5)
        assert share > 4 * settings.epsilon, "and not by a hair"
        noted.density[block.start : block.end] = 0.0
    assert num_left() == 0, "nothing else has kept it"
