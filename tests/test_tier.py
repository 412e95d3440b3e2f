"""The host tier: evicted KV comes back from a file or host memory, only to whom it belongs, and whole or not at all."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from akv_server import cli, files, loader, tier
from akv_server.engine import Engine, EngineConfig
from akv_server.errors import AkvError
from akv_server.kv import KV
from akv_server.model import checksum
from akv_server.ops import Op, Timeline
from akv_server.planning import block_keys
from akv_server.tier import Block, File, Memory, Rate
from tests.clients import Client, assert_right, drop, finish, idle, run, some_tokens
from tests.models import tiny_model
from tests.truth import Truth

PAGE = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def model(path):
    return loader.load_model(files.resolve(str(path)))


@pytest.fixture(scope="module")
def truth(path):
    return Truth(path)


class Known(Rate):
    """A rate that no measurement changes, so that no test depends on time."""

    def add(self, amount: float, seconds: float) -> None:
        pass

    def fade(self) -> None:
        pass


def always_loading(engine: Engine) -> Engine:
    engine.tier.prefill_rate = Known(1)
    return engine


class Opener:
    """Opens engines with a tier, and sees to it that they are stopped."""

    def __init__(self, folder: Path) -> None:
        self.disk = folder / "kv"
        self.engines: list[Engine] = []

    def __call__(self, model, *, kind: str = "disk", size: int = 2**22, **config) -> Engine:
        where = {"disk_path": self.disk, "disk_bytes": size} if kind == "disk" else {"host_bytes": size}
        config = {"num_pages": 24, "max_step_tokens": 64, **config}
        self.engines.append(always_loading(Engine(model, EngineConfig(**config, **where))))
        return self.engines[-1]

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()
        self.engines.clear()


@pytest.fixture
def opened(tmp_path):
    opener = Opener(tmp_path)
    yield opener
    opener.stop()


both = pytest.mark.parametrize("kind", ["disk", "host"])

HISTORY = (drop(40, 120, 200), drop(130, 150, 230))
TOKENS = some_tokens(300, seed=9)


def again(engine: Engine, tokens=TOKENS, history=HISTORY, **more) -> Client:
    engine.evict_all()
    engine.tier.storage.flush()
    return run(engine, Client(tokens, history, max_tokens=4, known=len(tokens), **more))


@both
def test_what_was_evicted_is_loaded_and_not_prefilled(model, truth, opened, kind):
    engine = opened(model, kind=kind)
    first = run(engine, Client(TOKENS, HISTORY, max_tokens=4))
    assert first.outcome.prefilled_tokens == 300
    assert engine.stats()["tokens_loaded"] == 0
    back = again(engine)
    outcome = back.outcome
    tail = 300 % PAGE  # no whole block
    assert (outcome.prefilled_tokens, outcome.replayed_tokens) == (0, tail)
    assert outcome.cached_tokens == 300 - tail
    stats = engine.stats()
    hidden = 80 + 20  # whoever goes on does not see these: they stay where they are
    assert stats["tokens_loaded"] == 300 - tail - hidden
    assert stats["tokens_stored"] >= 300 - tail
    assert back.ids == first.ids
    assert_right(back, truth)
    # a stored block is not stored again
    again(engine)
    assert engine.stats()["tokens_stored"] == stats["tokens_stored"]


@both
def test_a_restored_span_is_loaded(model, truth, opened, kind):
    engine = opened(model, kind=kind)
    run(engine, Client(TOKENS, HISTORY, max_tokens=4))
    undone = (*HISTORY, Op("restore", 300, 130, 150, repos=True))
    back = again(engine, [*TOKENS, 5, 6], undone)
    assert back.outcome.prefilled_tokens + back.outcome.replayed_tokens == 302 % PAGE
    assert engine.stats()["tokens_loaded"] == 288 - 80
    assert_right(back, truth)


@both
def test_only_what_is_lacking_is_loaded(model, truth, opened, kind):
    engine = opened(model, kind=kind)
    run(engine, Client(TOKENS, HISTORY, max_tokens=4))
    engine.cache.tree.evict(12)
    resident, _ = engine.residency("", TOKENS, Timeline(HISTORY))
    assert 0 < resident < 200
    back = run(engine, Client(TOKENS, HISTORY, max_tokens=4))
    assert engine.stats()["tokens_loaded"] == 288 - 100 - resident
    assert_right(back, truth)


def test_nobody_else_gets_it(model, truth, opened):
    engine = opened(model, kind="host")
    run(engine, Client(TOKENS, HISTORY, max_tokens=4, salt="tenant"))
    engine.evict_all()

    def loaded(tokens, history, salt):
        before = engine.stats()["tokens_loaded"]
        engine.evict_all()
        client = run(engine, Client(tokens, history, max_tokens=2, salt=salt))
        assert_right(client, truth)
        return engine.stats()["tokens_loaded"] - before

    assert loaded(TOKENS, HISTORY, "other") == 0
    assert loaded(TOKENS, HISTORY, "") == 0
    assert loaded([*TOKENS[:100], (TOKENS[100] + 1) % 300, *TOKENS[101:]], HISTORY, "tenant") == 96, (
        "the next saw all of it"
    )
    assert loaded(TOKENS, (), "tenant") == 192, "up to the first op both are one"
    assert loaded(TOKENS, (drop(40, 121, 200),), "tenant") == 192
    assert loaded(TOKENS, (drop(40, 120, 200),), "tenant") == 224 - 80
    halves = (drop(40, 80, 200), drop(80, 120, 200))
    assert loaded(TOKENS, (*halves, HISTORY[1]), "tenant") == 192, "the second half moved, too"


def test_a_key_says_salt_tokens_and_ops_and_nothing_later():
    tokens = np.array(TOKENS[:64], np.int32)

    def keys(salt, tokens, *history, first=0):
        points = [(p.at, p.digest) for p in Timeline(history).points]
        return list(block_keys(salt, tokens, points, PAGE, range(first, 5)).values())

    plain = keys("a", tokens)
    assert len(set(plain)) == 4
    assert keys("a", tokens[:63]) == plain[:3]
    assert keys("a", tokens, first=2) == plain[2:]
    assert not set(keys("b", tokens)) & set(plain)
    changed = tokens.copy()
    changed[31] += 1
    assert [a == b for a, b in zip(keys("a", changed), plain, strict=True)] == [True, False, False, False]
    edited = keys("a", tokens, drop(3, 9, 32))
    assert [a == b for a, b in zip(edited, plain, strict=True)] == [True, True, False, False]
    assert edited == keys("a", tokens, Op("drop", 32, 3, 9), Op("repos", 32, 9, None, -6))
    assert not set(edited[2:]) & set(keys("a", tokens, drop(3, 9, 33))[2:])
    assert keys("a", tokens, drop(3, 9, 64)) == plain


def test_forgotten_tokens_do_not_keep_their_block_away(model, truth, opened):
    engine = opened(model, kind="host")
    history = (Op("drop", 40, 40, 71, repos=True, mode="forget"),)
    first = run(engine, Client(TOKENS, history, max_tokens=4))
    back = again(engine, history=history)
    assert engine.stats()["tokens_loaded"] == 288 - 31
    assert back.outcome.replayed_tokens == 300 - 288
    assert back.ids == first.ids
    assert_right(back, truth)


def test_compacted_keys_come_back_with_the_shift_they_have(model, truth, opened):
    engine = opened(model, num_pages=160, compact_tokens_per_step=64)
    tokens = some_tokens(640)
    run(engine, Client(tokens))
    history = tuple(drop(start, start + 10, 640) for start in range(10, 640, 20))
    run(engine, Client([*tokens, 1, 2], history, max_tokens=2))
    idle(engine)
    moved = engine.stats()["tokens_moved"]
    assert moved > 100
    back = again(engine, [*tokens, 1, 2], history)
    assert engine.stats()["tokens_loaded"] == 320
    assert_right(back, truth)
    undone = (*history[:-1], *(Op("restore", 642, op.start, op.end, repos=True) for op in reversed(history[:-1])))
    assert_right(again(engine, [*tokens, 1, 2, 3], undone), truth)


# A file that outlives the server -----------------------------------------------------------------------------------


@pytest.fixture
def left(model, opened):
    """A file that an engine has left behind, and its answer."""
    first = run(opened(model), Client(TOKENS, HISTORY, max_tokens=4))
    opened.stop()
    return first.ids


def test_a_restarted_server_loads_what_the_last_one_had(model, truth, opened, left):
    engine = opened(model)
    assert engine.stats()["tier_blocks"] == (300 + 4) // PAGE
    back = again(engine)
    assert (back.outcome.cached_tokens, engine.stats()["tokens_loaded"]) == (288, 188)
    assert back.ids == left
    assert_right(back, truth)


def test_another_model_gets_nothing(path, truth, opened, left, tmp_path):
    other = loader.load_model(files.resolve(str(tiny_model(tmp_path, "llama", seed=1))))
    engine = opened(other)
    assert engine.stats()["tier_blocks"] == 0
    assert again(engine).outcome.replayed_tokens == 300
    assert engine.stats()["tokens_loaded"] == 0
    assert_right(again(engine), Truth(tmp_path / "tiny-llama-1"))


def test_a_fingerprint_is_of_the_weights(path, model, tmp_path):
    found = files.resolve(str(path))
    again = loader.load_model(found)
    assert again.fingerprint() == model.fingerprint()
    assert loader.load_model(found, weights_as="bfloat16").fingerprint() != model.fingerprint()
    assert loader.load_model(found, weights_as="int8").fingerprint() != model.fingerprint()
    again._layers[1].down.weight[3, 5] += 1e-3
    assert again.fingerprint() != model.fingerprint()


def test_a_checksum_changes_with_every_word():
    """As a GPU computes it, where weights are too far away to be hashed byte by byte."""
    words = torch.randint(-(2**63), 2**63 - 1, (2**20 + 77,))
    expected = sum((2 * i + 1) * word for i, word in enumerate(words.tolist())) % 2**64
    assert checksum(words) == expected
    for place in (0, 5, 2**20 - 1, 2**20, len(words) - 1):
        changed = words.clone()
        changed[place] ^= 1 << 63 - 1
        assert checksum(changed) != expected


def test_damage_anywhere_is_noticed_and_replayed(model, truth, opened, left):
    """Bits flipped at places spread over the file, each time with what they damage asked for."""
    whole = opened.disk.read_bytes()
    random_ = random.Random(0)
    ends = [0, 8, 12, 44, 60, 4096, 4096 + 31, 4096 + 35, 4096 + 70, 4096 + 100, 4096 + 104]
    noticed = 0
    for place in [*ends, *(random_.randrange(4096, len(whole)) for _ in range(12))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random_.randrange(8)
        opened.disk.write_bytes(damaged)
        if place < 8:
            with pytest.raises(AkvError, match="no file of AKV's"):
                opened(model)
            assert opened.disk.read_bytes() == damaged
            continue
        engine = opened(model)
        is_header = 4096 <= place < 4096 + 104  # of the first record: noticed when the file is opened
        assert (engine.stats()["tier_damaged"], engine.stats()["tier_blocks"] > 0) == (is_header, place >= 84)
        back = again(engine)
        assert back.ids == left, f"byte {place}"
        outcome = back.outcome
        assert outcome.cached_tokens + outcome.replayed_tokens + outcome.absent_tokens == 300
        assert outcome.absent_tokens in (0, PAGE) or place < 4096, "a block that nobody sees is not computed again"
        if place < 4096:
            assert outcome.replayed_tokens == (12 if place >= 84 else 300)
        else:  # one block at most, and what no block has
            assert 12 <= outcome.replayed_tokens <= 12 + PAGE
        noticed += outcome.replayed_tokens > 12
        opened.stop()
    assert noticed >= 10, "some damage only blocks that nobody sees"


@pytest.mark.parametrize("keep", [0, 20, 4096, 4097, 4096 + 90, 0.3, 0.99, -1])
def test_a_truncated_file_gives_what_is_left(model, opened, left, keep):
    whole = opened.disk.read_bytes()
    size = int(keep * len(whole)) if isinstance(keep, float) else keep % len(whole)
    opened.disk.write_bytes(whole[:size])
    engine = opened(model)
    back = again(engine)
    assert back.ids == left
    assert engine.stats()["tokens_loaded"] < 188 or size > 0.9 * len(whole)
    assert (engine.stats()["tokens_loaded"] > 0) == (size > 0.2 * len(whole))


def test_every_block_damaged_while_the_server_runs(model, truth, opened, left):
    engine = opened(model)
    content = bytearray(opened.disk.read_bytes())
    for place in range(4096 + 500, len(content), 1000):
        content[place] ^= 255
    opened.disk.write_bytes(content)
    back = again(engine)
    assert back.ids == left
    assert back.outcome.replayed_tokens >= 300 - PAGE
    assert engine.stats()["tier_damaged"] > 10
    assert_right(again(engine), truth)


COUNTERS = ("tokens_cached", "tokens_cached_session", "tokens_cached_tier", "tokens_cached_shared", "tokens_loaded")
COUNTERS += ("tokens_prefilled", "tokens_replayed")


def test_no_counter_falls_when_blocks_do_not_come(model, opened, left):
    """What was said to be in the tier, and was not, is counted as computed; never first one and then the other."""
    engine = opened(model, load_tokens_per_step=32)
    content = bytearray(opened.disk.read_bytes())
    for place in range(4096 + 50_000, len(content), 1000):
        content[place] ^= 255
    opened.disk.write_bytes(content)
    client = Client(TOKENS, HISTORY, max_tokens=4, known=200)
    engine.submit(client.request())
    seen = [engine.stats()]
    while not engine.scheduler.is_idle:
        engine.step()
        seen.append(engine.stats())
    assert client.ids == left
    for before, after in itertools.pairwise(seen):
        assert all(before[name] <= after[name] for name in COUNTERS)
    outcome, last = client.outcome, seen[-1]
    assert 0 < outcome.cached_tokens == last["tokens_cached"]
    assert 0 < outcome.replayed_tokens == last["tokens_replayed"]
    assert 0 < outcome.prefilled_tokens == last["tokens_prefilled"]
    assert outcome.cached_tokens + outcome.replayed_tokens + outcome.prefilled_tokens + outcome.absent_tokens == 300
    assert last["tokens_cached_tier"] == last["tokens_cached"]
    assert engine.stats()["tier_damaged"] > 0


def test_a_file_that_is_none_of_ours_is_left_alone(model, opened, tmp_path):
    opened.disk.write_text("my thesis")
    with pytest.raises(AkvError, match="delete it if you do not need it"):
        opened(model)
    assert opened.disk.read_text() == "my thesis"
    with pytest.raises(AkvError, match="cannot keep KV in"):
        Opener(tmp_path / "nowhere")(model)


@pytest.mark.parametrize(("kind", "name"), [("disk", "kv_disk_gb"), ("host", "kv_host_gb")])
def test_a_limit_of_no_block_is_refused_by_name(model, opened, kind, name):
    with pytest.raises(AkvError, match=rf"{name}.* not hold one block") as caught:
        opened(model, size=5000, kind=kind)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("more", [[], ["--kv-host-gb", "1"]])
def test_the_limit_of_a_file_needs_the_file(more, capsys):
    assert cli.main(["serve", "--model", "/nowhere", "--kv-disk-gb", "1", *more]) == 2
    assert "akv: --kv-disk-gb is the limit of a file: it needs --kv-disk" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--kv-disk-gb", "--kv-host-gb"])
def test_less_than_a_byte_is_no_limit(option, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--model", "/nowhere", option, "1e-10"])
    assert ended.value.code == 2
    assert f"argument {option}: '1e-10' is no number of gigabytes" in capsys.readouterr().err


def test_another_version_and_another_shape_are_begun_anew(model, opened, left, monkeypatch):
    opened(model, page_size=8)
    assert opened.engines[-1].stats()["tier_blocks"] == 0
    opened.stop()
    again(opened(model))
    opened.stop()
    monkeypatch.setattr(tier, "_VERSION", 2)
    assert opened(model).stats()["tier_blocks"] == 0


def test_one_server_a_file(model, opened):
    opened(model)
    with pytest.raises(AkvError, match="another server is using it"):
        opened(model)


def test_a_smaller_limit_keeps_what_fits(model, opened, left):
    size = os.path.getsize(opened.disk)
    engine = opened(model, size=size // 2)
    assert 0 < engine.stats()["tier_blocks"] < 300 // PAGE
    assert os.path.getsize(opened.disk) <= size // 2
    assert again(engine).ids == left


def test_a_killed_server_leaves_a_usable_file(model, path, opened):
    """It dies while it writes; the next one trusts only what is whole."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.test_tier import *\n"
        "model = loader.load_model(files.resolve(sys.argv[1]))\n"
        "engine = Opener(Path(sys.argv[2]))(model, num_pages=40)\n"
        "for seed in range(1000):\n"
        "    run(engine, Client(some_tokens(300, seed=seed)))\n"
        "    print(seed, flush=True)\n"
    )
    root = Path(__file__).resolve().parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(opened.disk.parent)], cwd=root, stdout=subprocess.PIPE
    )
    for line in child.stdout:
        if int(line) >= 3:
            break
    child.kill()
    child.wait()
    engine = opened(model)
    assert engine.stats()["tier_blocks"] >= 300 // PAGE
    plain = Engine(model, EngineConfig(num_pages=40))
    for seed in range(4):
        tokens = some_tokens(300, seed=seed)
        assert again(engine, tokens, ()).ids == run(plain, Client(tokens, max_tokens=4)).ids
    assert engine.stats()["tokens_loaded"] >= 288


# Limits and choices ------------------------------------------------------------------------------------------------


@both
def test_the_least_recently_used_block_goes_first(model, opened, kind):
    engine = opened(model, kind=kind)
    block_bytes = engine.kv.block_bytes(PAGE)
    size = 4096 + 20 * (block_bytes + 300) if kind == "disk" else 20 * block_bytes
    opened.stop()
    engine = opened(model, kind=kind, size=size)
    for seed in (1, 2, 3):
        run(engine, Client(some_tokens(160, seed=seed)))
        engine.evict_all()
        engine.tier.storage.flush()
        if seed == 2:
            run(engine, Client(some_tokens(160, seed=1)))  # loads the first: now the second is the oldest
            engine.evict_all()
    assert engine.stats()["tier_blocks"] <= 20
    counts = {}
    for seed in (1, 3, 2):
        before = engine.stats()["tokens_loaded"]
        run(engine, Client(some_tokens(160, seed=seed)))
        counts[seed] = engine.stats()["tokens_loaded"] - before
    assert counts[1] == counts[3] == 160
    assert counts[2] < 160


def test_what_computes_faster_is_neither_stored_nor_loaded(model, opened):
    engine = opened(model, kind="host")
    run(engine, Client(TOKENS))
    engine.evict_all()
    engine.tier.prefill_rate = Known(1e12)
    assert run(engine, Client(TOKENS, known=300)).outcome.replayed_tokens == 300
    stored = engine.stats()["tokens_stored"]
    run(engine, Client(some_tokens(300, seed=4)))
    engine.evict_all()
    assert engine.stats()["tokens_stored"] == stored
    engine.tier.prefill_rate = Known(1)
    assert run(engine, Client(TOKENS, known=300)).outcome.replayed_tokens == 300 - 288


def test_rates_are_measured_and_a_slow_tier_is_tried_again(model, opened):
    rate = Rate(1000)
    for _ in range(100):
        rate.add(10, 1.0)
    assert rate.per_s == pytest.approx(10, rel=0.01)
    for _ in range(1000):
        rate.fade()
    assert rate.per_s == pytest.approx(1000, rel=0.01)

    engine = opened(model, kind="host", max_step_tokens=64)
    engine.tier.prefill_rate, engine.tier.load_rate = Rate(123.0), Rate(456.0)
    run(engine, Client(TOKENS))
    assert engine.tier.prefill_rate.per_s != 123.0
    again(always_loading(engine))
    assert engine.tier.load_rate.per_s != 456.0


def test_a_step_loads_no_more_than_it_may(model, opened):
    engine = opened(model, kind="host", load_tokens_per_step=48)
    run(engine, Client(TOKENS))
    engine.evict_all()
    engine.submit(Client(TOKENS).request())
    seen = []
    while not engine.scheduler.is_idle:
        before = engine.stats()["tokens_loaded"]
        engine.step()
        engine.check()
        seen.append(engine.stats()["tokens_loaded"] - before)
    assert max(seen) == 48
    assert sum(seen) == 288


def test_a_full_queue_drops_instead_of_waiting(model, tmp_path):
    kv = KV(model, 4, PAGE)
    storage = File(tmp_path / "kv", 2**22, kv, PAGE, b"model")
    started = storage._lock
    wait = lambda: started.acquire() and started.release()  # noqa: E731
    block = Block(torch.randn(kv.block_shape(PAGE)), np.arange(PAGE, dtype=np.int32), wait)
    storage._max_pending = 5
    with started:  # the writer cannot go on
        for i in range(5):
            assert storage.has_room()
            storage.put(bytes([i]) * 32, block)
        assert not storage.has_room()
        assert torch.equal(storage.get(bytes(32)).kv, block.kv), "what waits is there already"
    storage.flush()
    assert storage.has_room()
    for i in range(5):
        found = storage.get(bytes([i]) * 32)
        assert torch.equal(found.kv, block.kv)
        assert found.written.tolist() == list(range(PAGE))
    storage.close()


def test_a_disk_that_fails_loses_the_cache_and_nothing_else(model, truth, opened, monkeypatch):
    engine = opened(model)
    first = run(engine, Client(TOKENS, HISTORY, max_tokens=4))

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fail)
    assert again(engine).ids == first.ids
    assert engine.stats()["tier_blocks"] == 0
    monkeypatch.undo()
    engine.evict_all()
    engine.tier.storage.flush()
    assert engine.stats()["tier_blocks"] > 0
    monkeypatch.setattr(os, "preadv", fail)
    assert again(engine).ids == first.ids
    assert engine.stats()["tokens_loaded"] == 0


def test_blocks_of_every_dtype_come_back_bit_for_bit(path, tmp_path):
    for weights_as in ("float32", "bfloat16"):
        model = loader.load_model(files.resolve(str(path)), weights_as=weights_as)
        kv = KV(model, 4, PAGE)
        kv._k.normal_()
        kv._v.normal_()
        slots = np.array([3, 60, 17, *range(20, 33)], np.int32)
        for storage in (
            Memory(2**22, kv.block_bytes(PAGE)),
            File(tmp_path / weights_as, 2**22, kv, PAGE, model.fingerprint()),
        ):
            block, wait = kv.take_out(slots)
            storage.put(b"k" * 32, Block(block, slots, wait))
            storage.flush()
            k, v = kv._k.clone(), kv._v.clone()
            kv._k.zero_()
            kv._v.zero_()
            found = storage.get(b"k" * 32)
            kv.put_back(found.kv, slots)
            for now, before in ((kv._k, k), (kv._v, v)):
                now, before = now.flatten(1, 2), before.flatten(1, 2)
                others = np.setdiff1d(np.arange(64), slots)
                assert torch.equal(now[:, slots], before[:, slots])
                assert not now[:, others].any()
            kv._k.copy_(k)
            kv._v.copy_(v)
            storage.close()


def test_a_request_aborted_while_it_loads_leaves_nothing(model, opened):
    engine = opened(model, kind="host", load_tokens_per_step=32)
    run(engine, Client(TOKENS))
    engine.evict_all()
    client = Client(TOKENS, max_tokens=3)
    engine.submit(client.request())
    engine.step()
    assert engine.stats()["tokens_loaded"] == 32
    engine.abort(client.request().request_id)
    engine.check()
    assert client.outcome.finish_reason == "abort"
    engine.evict_all()
    assert engine.stats()["pages_free"] == 24


@both
def test_evicting_from_another_thread_changes_no_answer(model, opened, kind):
    """evict_all() may be called at any time: while blocks are loaded, and while the file is written."""
    prompts = [some_tokens(150, seed=seed % 3) + some_tokens(30, seed=seed) for seed in range(24)]
    plain = Engine(model, EngineConfig(num_pages=64))
    expected = [run(plain, Client(tokens, max_tokens=4)).ids for tokens in prompts]
    engine = opened(model, kind=kind, load_tokens_per_step=32, max_running=3)
    engine.start()
    clients = [Client(tokens, max_tokens=4) for tokens in prompts]
    for client in clients:
        engine.submit(client.request())
    deadline = time.monotonic() + 60
    while any(client.outcome is None for client in clients):
        assert time.monotonic() < deadline
        engine.evict_all()
        engine.check()
    assert [client.ids for client in clients] == expected
    assert engine.stats()["tokens_loaded"] > 0


@both
@pytest.mark.parametrize("seed", range(4))
def test_random_agents_equal_the_truth(model, truth, opened, kind, seed):
    """As in test_engine, with pools still smaller and a tier behind them that now and then loses a block."""
    random_ = random.Random(seed)
    engine = opened(
        model,
        kind=kind,
        num_pages=random_.choice([18, 22, 30]),
        max_step_tokens=random_.choice([16, 64]),
        load_tokens_per_step=random_.choice([16, 64]),
        compact_above=random_.choice([0, 0.4]),
        size=random_.choice([2**16 * 4, 2**20]),
    )
    streams = [([], ()) for _ in range(3)]
    base = some_tokens(60, seed=seed)
    for _ in range(12):
        clients = []
        for i, (tokens, history) in enumerate(streams):
            if len(tokens) > 220:
                continue
            tokens = (tokens or list(base)) + random_.choices(range(300), k=random_.randrange(1, 30))
            client = Client(tokens, history, max_tokens=random_.randrange(3))
            clients.append((i, client))
            engine.submit(client.request())
            if random_.random() < 0.3:
                engine.step()
        if random_.random() < 0.4:
            engine.evict_all()
        finish(engine)
        for i, client in clients:
            assert client.outcome.error is None
            outcome = client.outcome
            assert min(outcome.cached_tokens, outcome.prefilled_tokens, outcome.replayed_tokens) >= 0
            assert_right(client, truth)
            tokens, history = client.tokens + client.ids, client.history
            n = len(tokens)
            start, end = sorted((random_.randint(0, n), random_.randint(0, n)))
            end = min(end, start + 60)
            match random_.choice(["drop", "drop", "restore", "none"]):
                case "drop":
                    history += (Op("drop", n, start, end, repos=random_.random() < 0.8),)
                case "restore" if history:
                    old = random_.choice(history)
                    history += (replace(old, kind="restore", at=n),)
            try:
                Timeline(history)
            except AkvError:  # a restore that finds its place taken
                history = client.history
            streams[i] = (tokens, history)
    assert engine.stats()["tokens_loaded"] > 0
    engine.evict_all()
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]
