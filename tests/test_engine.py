"""The engine on a tiny model, held to a dense float64 truth: edited streams, sharing, replay, preemption, counters."""

from __future__ import annotations

import random
import time

import pytest
import torch
from akv_kernels import reference, select

from akv_server import files, loader
from akv_server.engine import Engine, EngineConfig
from akv_server.errors import AkvError
from akv_server.ops import Op, Timeline
from akv_server.sampler import SamplingParams
from tests.clients import VOCAB, Client, assert_right, drop, finish, idle, run, some_tokens
from tests.models import tiny_model
from tests.truth import Truth


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def model(path):
    return loader.load_model(files.resolve(str(path)), backend=select("cpu"))


@pytest.fixture(scope="module")
def truth(path):
    return Truth(path)


@pytest.fixture
def engine(model):
    return Engine(model, EngineConfig(num_pages=64, max_step_tokens=64))


def test_plain_generation_equals_the_truth(engine, truth):
    client = run(engine, Client(some_tokens(150), max_tokens=12))
    assert len(client.ids) == 12
    assert client.outcome.finish_reason == "length"
    assert (client.outcome.prefilled_tokens, client.outcome.cached_tokens) == (150, 0)
    assert_right(client, truth)


def test_scores_of_a_prompt_equal_the_truth(engine, truth):
    tokens = some_tokens(200)
    client = run(engine, Client(tokens, score=4))
    logprobs = truth.logits(tokens).log_softmax(-1)
    assert client.outcome.prompt_scores[0] is None
    for i in range(1, 200):
        score, top = client.outcome.prompt_scores[i]
        assert score == pytest.approx(logprobs[i - 1, tokens[i]].item(), abs=2e-4)
        assert top[0][1] == pytest.approx(logprobs[i - 1].max().item(), abs=2e-4)
    more = some_tokens(230, seed=1)[200:]
    again = run(engine, Client(tokens + more, score=4))
    assert again.outcome.cached_tokens == 200
    assert all(score is None for score in again.outcome.prompt_scores[:201])
    assert all(score is not None for score in again.outcome.prompt_scores[201:])


def test_error_is_at_most_twice_that_of_torch_float32(engine, path, truth):
    tokens = some_tokens(300, seed=3)
    history = (drop(40, 120, 200), drop(150, 180, 240))
    exact = truth.logits(tokens, history).log_softmax(-1)
    single = Truth(path, torch.float32).logits(tokens, history).double().log_softmax(-1)
    client = run(engine, Client(tokens, history, score=0))
    wanted = torch.tensor([exact[i - 1, tokens[i]] for i in range(1, 300)])
    by_torch = torch.tensor([single[i - 1, tokens[i]] for i in range(1, 300)])
    ours = torch.tensor([client.outcome.prompt_scores[i][0] for i in range(1, 300)])
    assert (ours - wanted).abs().mean() <= 2 * (by_torch - wanted).abs().mean()
    assert (ours - wanted).abs().max() <= 2 * (by_torch - wanted).abs().max()


def test_after_a_drop_only_new_tokens_are_prefilled(engine, truth):
    tokens = some_tokens(400)
    first = run(engine, Client(tokens[:300], max_tokens=4))
    stream = tokens[:300] + first.ids
    history = (drop(37, 201, len(stream)),)
    second = run(engine, Client(stream + tokens[300:], history, max_tokens=8, known=len(stream)))
    assert (second.outcome.prefilled_tokens, second.outcome.replayed_tokens) == (100, 0)
    assert second.outcome.cached_tokens == len(stream)
    assert_right(second, truth)
    third = run(engine, Client(stream + tokens[300:], history, max_tokens=8))
    assert (third.outcome.prefilled_tokens, third.outcome.replayed_tokens) == (0, 0)
    assert third.ids == second.ids


def test_two_histories_of_one_text_are_never_mixed(engine, truth):
    tokens = some_tokens(400)
    history = (drop(50, 250, 300),)
    run(engine, Client(tokens[:300]))
    clients = [Client(tokens, history, max_tokens=10), Client(tokens, (), max_tokens=10)]
    run(engine, *clients)
    for client in clients:
        assert client.outcome.prefilled_tokens == 100
        assert_right(client, truth)
    assert clients[0].ids != clients[1].ids or True  # the truth above is the test


def test_salts_share_nothing(engine):
    tokens = some_tokens(100)
    run(engine, Client(tokens, max_tokens=1, salt="a"))
    other = run(engine, Client(tokens, max_tokens=1, salt="b"))
    assert (other.outcome.cached_tokens, other.outcome.prefilled_tokens) == (0, 100)


def test_a_fork_copies_at_most_one_page(engine, truth):
    tokens = some_tokens(133)
    run(engine, Client(tokens))
    assert engine.stats()["pages_copied"] == 0
    for seed in range(5):
        fork = run(engine, Client(tokens + some_tokens(20, seed=seed + 10), max_tokens=3))
        assert fork.outcome.prefilled_tokens == 20
        assert_right(fork, truth)
    assert engine.stats()["pages_copied"] == 4  # the first goes on in place


def test_requests_of_one_prefix_compute_it_once_even_at_the_same_time(engine):
    tokens = some_tokens(320)
    clients = [Client(tokens + some_tokens(5, seed=i + 1), max_tokens=4) for i in range(6)]
    run(engine, *clients)
    assert sum(client.outcome.prefilled_tokens for client in clients) <= 320 + 6 * (5 + 16)


def rolling_agent(engine: Engine, turns: int, *, in_own_words: bool = False):
    """An agent that drops most of each turn's observation behind it; after each turn, the request."""
    tokens: list[int] = []
    timeline = Timeline()
    for turn in range(turns):
        start = len(tokens)
        tokens = tokens + some_tokens(12, seed=turn)
        client = run(engine, Client(tokens, timeline.history, max_tokens=2, known=start, timeline=timeline))
        yield client
        tokens = tokens + client.ids
        history = (*timeline.history, drop(start + 1, start + 11, len(tokens)))
        timeline = Timeline(history) if in_own_words else Timeline(history, timeline)


@pytest.mark.parametrize("in_own_words", [False, True])
def test_a_turn_costs_what_is_new_in_it_however_many_ops_came_before(model, in_own_words):
    engine = Engine(model, EngineConfig(num_pages=128, compact_tokens_per_step=0))
    walked = []
    for client in rolling_agent(engine, 60, in_own_words=in_own_words):
        assert (client.outcome.prefilled_tokens, client.outcome.replayed_tokens) == (12, 0)
        walked.append(engine.cache.tree.num_edges_walked - sum(walked))
    assert engine.stats()["tree_edges"] == 60
    assert max(walked) <= 2, "the edge of the last turn, and none of those before"
    assert engine.scheduler.num_plans == 60


def test_forks_that_wait_for_their_prefix_are_planned_twice(engine):
    """Once when they come, and once when it is there; not in each of the steps that compute it."""
    tokens = some_tokens(600)
    clients = [Client(tokens + some_tokens(5, seed=i + 1), max_tokens=2) for i in range(6)]
    run(engine, *clients)
    assert engine.num_steps > 600 / 64
    assert engine.scheduler.num_plans == 1 + 5 * 2
    assert sum(client.outcome.prefilled_tokens for client in clients) <= 600 + 6 * (5 + 16)


def test_who_waits_for_room_is_planned_again_only_when_there_is_more(model):
    engine = Engine(model, EngineConfig(num_pages=16))
    first, second = Client(some_tokens(150), max_tokens=60), Client(some_tokens(120, seed=1), max_tokens=2)
    engine.submit(first.request())
    engine.step()
    run(engine, second)
    assert engine.num_steps > 60
    assert engine.stats()["preemptions"] == 0
    assert engine.scheduler.num_plans == 3
    assert second.outcome.prefilled_tokens == 120


def test_tokens_lost_while_nobody_sees_them_are_not_called_cached(model):
    engine = Engine(model, EngineConfig(num_pages=64, compact_tokens_per_step=0))
    tokens, history = some_tokens(160), (drop(32, 96, 160),)
    run(engine, Client(tokens))
    run(engine, Client([*tokens, 1], history))
    engine.cache.tree.evict(3)  # of the four pages of the span
    before = engine.stats()
    client = run(engine, Client([*tokens, 1, 2, 3], history, max_tokens=1, known=161))
    outcome = client.outcome
    assert (outcome.cached_tokens, outcome.absent_tokens) == (161 - 48, 48)
    assert (outcome.prefilled_tokens, outcome.replayed_tokens) == (2, 0)
    after = engine.stats()
    assert after["tokens_cached"] - before["tokens_cached"] == 161 - 48
    assert after["tokens_cached_session"] - before["tokens_cached_session"] == 161 - 48
    back = run(engine, Client([*tokens, 1, 2, 3, 4], (*history, Op("restore", 163, 32, 96, repos=True)), known=163))
    assert (back.outcome.replayed_tokens, back.outcome.prefilled_tokens) == (48, 1)
    assert (back.outcome.cached_tokens, back.outcome.absent_tokens) == (163 - 48, 0)


def test_what_is_computed_is_counted_when_it_is(engine):
    client = Client(some_tokens(300), max_tokens=1)
    engine.submit(client.request())
    engine.step()
    assert engine.stats()["tokens_prefilled"] == 64
    engine.abort(client.request().request_id)
    assert (client.outcome.prefilled_tokens, client.outcome.finish_reason) == (64, "abort")
    again = run(engine, Client(some_tokens(300), max_tokens=1))
    assert (again.outcome.cached_tokens, again.outcome.prefilled_tokens) == (64, 236)
    assert engine.stats()["tokens_prefilled"] == 300


def test_restore_brings_tokens_back_without_computing(engine, truth):
    tokens = some_tokens(300)
    history = (drop(50, 150, 200), Op("restore", 250, 50, 150, repos=True))
    run(engine, Client(tokens[:200]))
    run(engine, Client(tokens[:250], history[:1]))
    client = run(engine, Client(tokens, history, max_tokens=6))
    assert client.outcome.prefilled_tokens == 50
    assert_right(client, truth)


def test_forgotten_tokens_are_never_computed(engine, truth):
    tokens = some_tokens(300)
    run(engine, Client(tokens[:200]))
    history = (drop(80, 160, 80, mode="forget"),)
    client = run(engine, Client(tokens, history, max_tokens=6, known=200))
    assert (client.outcome.cached_tokens, client.outcome.replayed_tokens) == (80, 40)
    assert client.outcome.prefilled_tokens == 100
    assert_right(client, truth)
    # exactly as if the span had never been in the text
    plain = run(engine, Client(tokens[:80] + tokens[160:], max_tokens=6, salt="plain"))
    assert plain.ids == client.ids


def test_forgetting_the_end_goes_on_from_what_is_left(engine):
    tokens = some_tokens(120)
    plain = run(engine, Client(tokens[:100], max_tokens=5))
    client = run(engine, Client(tokens, (drop(100, 120, 100, mode="forget"),), max_tokens=5, salt="x"))
    assert client.ids == plain.ids
    with pytest.raises(AkvError, match="forgotten"):
        run(engine, Client(tokens, (drop(0, 120, 0, mode="forget"),), max_tokens=1))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_replay_gives_the_same_answer(path, truth, backend):
    model = loader.load_model(files.resolve(str(path)), backend=reference if backend == "reference" else select("cpu"))
    tokens = some_tokens(420)
    histories = [
        (),
        (drop(30, 90, 150),),
        (drop(30, 90, 150), drop(160, 210, 230), Op("restore", 300, 160, 210, repos=True)),
    ]
    for history in histories:
        warm = Engine(model, EngineConfig(num_pages=64, max_step_tokens=64))
        for cut in (100, 150, 230, 300, 400):
            run(warm, Client(tokens[:cut], tuple(op for op in history if op.at < cut)))
        wanted = run(warm, Client(tokens, history, max_tokens=8))
        assert wanted.outcome.prefilled_tokens == 20
        warm.evict_all()
        assert warm.stats()["pages_free"] == 64
        replayed = run(warm, Client(tokens, history, max_tokens=8, known=400))
        assert replayed.outcome.replayed_tokens == 400
        cold = run(Engine(model, EngineConfig(num_pages=64)), Client(tokens, history, max_tokens=8))
        assert wanted.ids == replayed.ids == cold.ids
        assert_right(cold, truth)


def test_a_stream_far_longer_than_the_pool_is_served_and_replayed(model, truth):
    tokens = some_tokens(900)
    history = tuple(drop(at - 170, at - 30, at) for at in range(200, 900, 140))
    small = Engine(model, EngineConfig(num_pages=22, max_step_tokens=32))  # 352 tokens
    done = 0
    for cut in [*range(200, 900, 140), 900]:
        client = run(small, Client(tokens[:cut], tuple(op for op in history if op.at < cut), max_tokens=1, known=done))
        assert client.outcome.replayed_tokens == 0
        done = cut
    small.evict_all()
    replayed = run(small, Client(tokens, history, max_tokens=8, known=done))
    assert replayed.outcome.replayed_tokens == 900
    assert_right(replayed, truth)


def test_preempted_requests_are_replayed_not_failed(model, truth):
    small = Engine(model, EngineConfig(num_pages=24, max_step_tokens=64))
    clients = [Client(some_tokens(90, seed=i), max_tokens=40) for i in range(5)]
    run(small, *clients)
    stats = small.stats()
    assert stats["preemptions"] > 0
    assert stats["tokens_prefilled"] == sum(client.outcome.prefilled_tokens for client in clients) == 5 * 90
    assert stats["tokens_replayed"] > sum(client.outcome.replayed_tokens for client in clients) == 0
    assert stats["tokens_cached"] == 0, "what a request had computed itself is not found"
    for client in clients:
        assert client.outcome.finish_reason == "length"
        assert len(client.ids) == 40
        assert_right(client, truth)


def test_a_preempted_request_can_be_aborted_while_it_waits(model):
    small = Engine(model, EngineConfig(num_pages=24, max_step_tokens=64))
    clients = [Client(some_tokens(90, seed=i), max_tokens=40) for i in range(5)]
    for client in clients:
        small.submit(client.request())
    while not small.stats()["preemptions"]:
        small.step()
    for client in clients:
        small.abort(str(id(client)))
    assert [client.outcome.finish_reason for client in clients] == ["abort"] * 5
    small.check()
    assert small.scheduler.is_idle


def test_a_full_pool_ends_an_answer_it_cannot_hold(model, truth):
    """One drop of 8 tokens leaves 501 of 512 visible: there is room for 11 more, less what a page wastes."""
    tokens = some_tokens(508)
    small = Engine(model, EngineConfig(num_pages=32, compact_above=1.0))
    run(small, Client(tokens))
    client = run(small, Client([*tokens, 3], (drop(100, 108, 508),), max_tokens=100))
    assert client.outcome.error is None
    assert client.outcome.finish_reason == "length"
    assert 0 < len(client.ids) <= 11
    assert_right(client, truth)


def test_a_fault_in_idle_compaction_does_not_stop_the_engine(model):
    engine = Engine(model, EngineConfig(num_pages=160))
    tokens = some_tokens(640)
    run(engine, Client(tokens))
    history = tuple(drop(start, start + 10, len(tokens)) for start in range(10, len(tokens), 20))

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    move, engine.kv.move = engine.kv.move, broken
    client = Client([*tokens, 1], history, max_tokens=1)
    engine.start()
    engine.submit(client.request())
    while client.outcome is None or engine.stats()["running"]:
        time.sleep(0.01)
    engine.kv.move = move
    again = Client([*tokens, 1, 2], history, max_tokens=1)
    engine.submit(again.request())
    deadline = time.monotonic() + 60
    while again.outcome is None and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.stop()
    assert again.outcome.finish_reason == "length"
    engine.check()


def test_what_cannot_fit_alone_is_refused_and_others_go_on(model):
    small = Engine(model, EngineConfig(num_pages=8))
    with pytest.raises(AkvError) as refusal:
        small.submit(Client(some_tokens(200)).request())
    assert refusal.value.code == "out_of_pages"
    with pytest.raises(AkvError) as refusal:
        small.submit(Client(some_tokens(3000)).request())
    assert refusal.value.code == "context_length_exceeded"
    # a replay needs the dropped span once more, and here that does not fit
    late = run(small, Client(some_tokens(150), (drop(0, 100, 140),), max_tokens=2))
    assert late.outcome.finish_reason == "error"
    assert late.outcome.error.code == "out_of_pages"
    assert run(small, Client(some_tokens(50), max_tokens=2)).outcome.finish_reason == "length"


def test_abort_frees_the_work_at_once(engine):
    client = Client(some_tokens(200), max_tokens=1000)
    request = client.request()
    engine.submit(request)
    for _ in range(8):
        engine.step()
    assert client.ids
    engine.abort(request.request_id)
    assert client.outcome.finish_reason == "abort"
    assert engine.scheduler.is_idle
    engine.check()
    assert engine.evict_all() > 0
    assert engine.stats()["pages_free"] == 64


def test_generation_ends_at_the_window(path):
    model = loader.load_model(files.resolve(str(path)), backend=select("cpu"))
    engine = Engine(model, EngineConfig(num_pages=140))
    window = model.config.max_positions
    client = run(engine, Client(some_tokens(window - 5), max_tokens=100))
    assert (len(client.ids), client.outcome.finish_reason) == (5, "length")
    # after a drop with repos the same stream has room again
    tokens = client.tokens + client.ids
    longer = run(engine, Client([*tokens, 7], (drop(100, 1900, len(tokens)),), max_tokens=100))
    assert (longer.outcome.prefilled_tokens, len(longer.ids)) == (1, 100)


def test_decode_is_not_starved_by_a_long_prefill(engine):
    talker = Client(some_tokens(20), max_tokens=60)
    engine.submit(talker.request())
    while len(talker.ids) < 3:
        engine.step()
    long = Client(some_tokens(700, seed=1), max_tokens=1)
    engine.submit(long.request())
    while not long.ids:
        before = len(talker.ids)
        engine.step()
        assert len(talker.ids) == before + 1 or talker.outcome
    finish(engine)


def test_answers_do_not_depend_on_chunks_or_company(model):
    tokens, history = some_tokens(350, seed=5), (drop(60, 170, 260),)
    seen = set()
    for max_step_tokens in (7, 33, 512):
        for company in (0, 3):
            engine = Engine(model, EngineConfig(num_pages=128, max_step_tokens=max_step_tokens))
            others = [Client(some_tokens(120, seed=i), max_tokens=30) for i in range(company)]
            client = run(engine, *others, Client(tokens, history, max_tokens=10))
            seen.add(tuple(client.ids))
    assert len(seen) == 1


def test_seeded_sampling_repeats_and_survives_preemption(model):
    hot = SamplingParams(temperature=1.0, seed=11)
    roomy = run(Engine(model, EngineConfig(num_pages=64)), Client(some_tokens(90), max_tokens=40, sampling=hot))
    small = Engine(model, EngineConfig(num_pages=24, max_step_tokens=64))
    clients = [Client(some_tokens(90, seed=i), max_tokens=40, sampling=hot) for i in (3, 2, 1, 0)]
    run(small, *clients)
    assert small.stats()["preemptions"] > 0
    assert clients[-1].ids == roomy.ids


def every_second_block(model, **compaction) -> tuple[Engine, Client, int]:
    """A stream of 64 blocks of 10 tokens, every second one dropped, going on; and the pages that it then sees."""
    engine = Engine(model, EngineConfig(num_pages=160, **compaction))
    tokens = some_tokens(64 * 10)
    run(engine, Client(tokens))
    history = tuple(drop(start, start + 10, len(tokens)) for start in range(10, len(tokens), 20))
    run(engine, Client(tokens + some_tokens(8, seed=1), history, max_tokens=8))
    idle(engine)
    tokens += some_tokens(8, seed=1)
    _, pages = engine.residency("", tokens, Timeline(history))
    return engine, run(engine, Client(tokens + some_tokens(20, seed=2), history, max_tokens=12)), pages


def test_compaction_gathers_survivors_and_changes_no_answer(model, truth):
    off, without, pages_off = every_second_block(model, compact_tokens_per_step=0)
    on, with_, pages_on = every_second_block(model, compact_tokens_per_step=64)
    assert off.stats()["compactions"] == 0
    assert on.stats()["compactions"] > 5
    assert on.stats()["tokens_moved"] <= 64 * on.stats()["compactions"]
    assert pages_off == 41  # there is a survivor in every page
    assert pages_on <= (32 * 10) / 16 + 6
    assert with_.outcome.prefilled_tokens == 20
    assert with_.ids == without.ids
    assert_right(with_, truth)
    for ours, plain in zip(with_.generated, without.generated, strict=True):
        assert ours.logprob == pytest.approx(plain.logprob, abs=1e-5)


def test_what_lay_between_the_survivors_is_restored_free_or_replayed(model, truth):
    engine, client, _ = every_second_block(model, compact_tokens_per_step=64)
    tokens = client.tokens + client.ids
    back = [Op("restore", len(tokens), op.start, op.end, repos=True) for op in reversed(client.history[-3:])]
    restoring = Client([*tokens, 5], (*client.history, *back), max_tokens=6, known=len(tokens))
    restored = run(engine, restoring)
    assert (restored.outcome.prefilled_tokens, restored.outcome.replayed_tokens) == (1, 0)
    assert_right(restored, truth)
    engine.evict_all()
    again = run(engine, Client(restoring.tokens, restoring.history, max_tokens=6, known=len(restoring.tokens)))
    assert again.outcome.replayed_tokens == len(restoring.tokens)
    assert again.ids == restored.ids


def test_compaction_moves_a_running_sequence_without_its_noticing(model, truth):
    engine = Engine(model, EngineConfig(num_pages=160, compact_tokens_per_step=40))
    tokens = some_tokens(90 * 10)
    run(engine, Client(tokens))
    history = tuple(drop(start, start + 10, len(tokens)) for start in range(10, len(tokens), 20))
    client = Client([*tokens, 9], history, max_tokens=60)
    run(engine, client)
    assert engine.stats()["compactions"] >= 10
    assert_right(client, truth)


@pytest.mark.parametrize("seed", range(6))
def test_random_agents_equal_the_truth(model, truth, seed):
    """Several streams grow, drop, restore and forget at random under a pool too small for all of them."""
    random_ = random.Random(seed)
    config = EngineConfig(
        num_pages=random_.choice([20, 30, 64]),
        max_step_tokens=random_.choice([16, 64]),
        compact_above=random_.choice([0, 0.4]),
    )
    engine = Engine(model, config)
    streams = [([], ()) for _ in range(3)]
    base = some_tokens(60, seed=seed)
    for _ in range(12):
        clients = []
        for i, (tokens, history) in enumerate(streams):
            if len(tokens) > 220:
                continue
            tokens = (tokens or list(base)) + random_.choices(range(VOCAB), k=random_.randrange(1, 30))
            client = Client(tokens, history, max_tokens=random_.randrange(3))
            clients.append((i, client))
            engine.submit(client.request())
            if random_.random() < 0.3:
                engine.step()
        if random_.random() < 0.2:
            engine.evict_all()
        finish(engine)
        for i, client in clients:
            assert client.outcome.error is None
            assert_right(client, truth)
            tokens, history = client.tokens + client.ids, client.history
            n = len(tokens)
            start, end = sorted((random_.randint(0, n), random_.randint(0, n)))
            end = min(end, start + 60)
            kind = random_.choice(["drop", "drop", "restore", "none"])
            if kind == "drop":
                history += (Op("drop", n, start, end, repos=random_.random() < 0.8),)
            elif kind == "restore" and history:
                old = random_.choice(history)
                history += (Op("restore", n, old.start, old.end, repos=old.repos),)
            try:
                Timeline(history)
            except AkvError:  # a restore that finds its place taken
                history = client.history
            streams[i] = (tokens, history)
    engine.evict_all()
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]


def test_a_fragmented_request_alone_is_compacted_before_it_is_refused(model, truth):
    """Each turn adds 200 tokens and drops most of what the last one added: 420 visible tokens in a pool of 1,024."""
    engine = Engine(model, EngineConfig(num_pages=64))
    tokens: list[int] = []
    history: tuple[Op, ...] = ()
    for turn in range(26):
        tokens = tokens + some_tokens(200, seed=turn)
        client = run(engine, Client(tokens, history, max_tokens=2, known=max(0, len(tokens) - 200)))
        assert client.outcome.error is None, turn
        tokens = tokens + client.ids
        n = len(tokens)
        history += (Op("drop", n, n - 190, n - 10, repos=True),)
    assert engine.stats()["compactions"] > 0


@pytest.mark.parametrize("broken", ["publish", "close", "plan_compaction"])
def test_a_fault_between_steps_ends_what_runs_and_nothing_else(model, truth, broken, monkeypatch):
    """Whatever state it leaves the cache in: the engine's thread goes on with an empty one, and counters stay."""
    engine = Engine(model, EngineConfig(num_pages=32))
    long, late = some_tokens(100), some_tokens(90, seed=1)
    run(engine, Client(long, max_tokens=4))
    before = engine.stats()

    def fault(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    engine.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine.cache, broken, fault)
            patch.setattr(type(engine.cache), "is_sparse", True)  # so that compaction has its turn
            failed = [Client(long, max_tokens=8), Client(late, max_tokens=200)]
            for client in failed:
                engine.submit(client.request())
            wait_for(lambda: all(client.outcome for client in failed))
        ends = [(c.outcome.finish_reason, c.outcome.error and c.outcome.error.code) for c in failed]
        assert ("error", "internal_error") in ends
        assert set(ends) <= {("error", "internal_error"), ("length", None)}  # who had its answer keeps it
        again = Client(long, max_tokens=8)
        engine.submit(again.request())
        wait_for(lambda: again.outcome is not None and idle_now(engine))
    finally:
        engine.stop()
    assert_right(again, truth)
    engine.check()
    after = engine.stats()
    assert after["pages_free"] + after["pages_evictable"] == 32
    assert all(after[name] >= before[name] for name in before if name.startswith("tokens_"))


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.005)


def idle_now(engine):
    return not engine.stats()["running"]
