"""The state file: what is acknowledged survives whatever happens to the server; a file that is not right is refused."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

import akv_sdk
from akv_sdk import types
from akv_server import cli, loader, serving
from akv_server.blocks import Block
from akv_server.errors import AkvError
from akv_server.journal import Done, Journal, Saved
from akv_server.loader import LoadedModel
from akv_server.ops import Op, Timeline
from akv_server.sessions import DAY_S, MAX_KEYS, MAX_SESSIONS, Sessions
from akv_server.streams import Message, Stream, continued, drop, named_spans
from tests.models import tiny_model
from tests.processes import Forge
from tests.server import load_tiny, serving_model
from tests.test_sessions import WINDOW, FakeCache, feed, refused, run

NO_OPS = Timeline()
NUM_KILLS = 60 if os.environ.get("AKV_SOAK") else 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def plain(saved: Saved) -> tuple[Any, ...]:
    """All that a session is, as values that compare."""
    return saved.salt, replace(saved.stream, timeline=NO_OPS), saved.stream.timeline.history, saved.done


def restored(journal: Journal) -> dict[tuple[str, str], tuple[Any, ...]]:
    return {(e.tenant, e.name): plain(journal.load(e.tenant, e.name).result()) for e in journal.entries()}


def identity(rng: Random) -> Any:
    calls = tuple(("f", f'{{"a": {rng.randrange(9)}}}') for _ in range(rng.randrange(3)))
    return "tool", f"text {rng.randrange(100)} ü \ud800", calls, None


def evolved(saved: Saved, rng: Random) -> Saved:
    """What a turn or an op may make of a session."""
    stream = saved.stream
    n = len(stream.tokens)
    kind = rng.randrange(4)
    if kind == 0:
        tokens = stream.tokens[: rng.randrange(n // 2, n + 1)] + [
            rng.randrange(50_000) for _ in range(rng.randrange(900))
        ]
        after = continued(stream, tokens or [1], head="[]").stream
        start = after.messages[-1].end if after.messages else 0
        if start < len(after.tokens):
            block = Block(f"b{start}", start, len(after.tokens), kind="tool_input", tool_call_id="c")
            message = Message(
                identity(rng), "tool", start, len(after.tokens), start, start, "id", (block,), is_open=True
            )
            after = replace(after, messages=(*after.messages, message))
        after = replace(after, num_known=len(after.tokens), closes_gaps=rng.random() < 0.5)
        return replace(saved, stream=after)
    if kind == 3:
        done = Done(uuid.uuid4().hex, "request", 3, (Op("repos", n, 0, None, delta=-4),))
        return replace(saved, salt=f"salt {rng.randrange(3)}", done=(*saved.done[-5:], done))
    start = rng.randrange(n + 1)
    spans = named_spans(stream, [(start, rng.randrange(start, n + 1))])
    try:
        return replace(saved, stream=drop(stream, spans, repos=rng.random() < 0.5, forget=kind == 2).stream)
    except AkvError:
        return saved


def test_whatever_is_saved_is_found_again(path: Path) -> None:
    """Only what changed is written; a file opened anew must add up to the same, each time."""
    rng = Random(3)
    expected: dict[tuple[str, str], Saved] = {}
    for _ in range(6):
        with closing(Journal(path)) as journal:
            assert restored(journal) == {key: plain(saved) for key, saved in expected.items()}
        with closing(Journal(path)) as journal:
            for key in [("", "a"), ("t", "a"), ("t", "\x00 ü")] * 8:
                if key in expected and rng.random() < 0.1:
                    del expected[key]
                    journal.delete(*key)
                else:
                    expected[key] = evolved(expected.get(key, Saved("salt", Stream([1]))), rng)
                    journal.save(*key, expected[key], 1e9 + len(expected))
    assert expected


def test_tokens_are_kept_in_few_runs(path: Path) -> None:
    """A stream that grows token by token is not rewritten each time, nor does it lie in a row for each."""
    with closing(Journal(path)) as journal:
        tokens: list[int] = list(range(5000))
        for i in range(300):
            tokens = [*tokens, i]
            journal.save("", "s", Saved("", Stream(tokens)), 1.0)
    with closing(sqlite3.connect(path)) as db:
        sizes = [size // 4 for (size,) in db.execute("SELECT length(data) FROM parts ORDER BY start")]
    assert sizes == [5001, 299]


def test_one_write_that_fails_takes_no_other_with_it(path: Path) -> None:
    with closing(Journal(path)) as journal:
        gate = threading.Event()
        journal._submit(gate.wait)  # so that the next three share a commit
        saves = [journal.save("", name, Saved("", Stream([1])), 1.0) for name in ("a", "\ud800", "b")]
        gate.set()
        assert saves[0].result() is saves[2].result() is None
        assert isinstance(saves[1].exception(), AkvError)
        assert {name for _, name in restored(journal)} == {"a", "b"}


# What cannot be vouched for ------------------------------------------------------------------------------------------


def full(path: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """A file with a few sessions, closed."""
    rng = Random(5)
    with closing(Journal(path)) as journal:
        journal.bind("f1", "one")
        for name in "abcd":
            saved = Saved("salt", Stream(list(range(2000))))
            for _ in range(6):
                saved = evolved(saved, rng)
            journal.save("tenant", name, saved, 5.0)
        return restored(journal)


def test_a_damaged_file_is_never_misread(path: Path) -> None:
    """A byte anywhere, or the end of the file: either it does not matter, or the file is refused when it is opened."""
    expected = full(path)
    data = path.read_bytes()
    rng = Random(7)
    num_refused = 0
    for attempt in range(150):
        damaged = bytearray(data)
        at = rng.randrange(len(data))
        if attempt % 5 == 0:
            del damaged[at:]
        else:
            damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            with closing(Journal(path)) as journal:
                found = restored(journal)
        except AkvError as refusal:
            num_refused += str(path) in refusal.message
        else:
            assert found == expected or not damaged  # an empty file is a new one
    assert num_refused > 60


def test_foreign_files_are_refused(path: Path, tmp_path: Path) -> None:
    def reason() -> str:
        with pytest.raises(AkvError) as caught:
            Journal(path)
        return caught.value.message

    path.write_text("no database, but long enough to be taken for the beginning of one" * 50)
    assert "no SQLite database" in reason()
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE cats (name TEXT)")
    assert "database of something else" in reason()
    path.unlink()
    full(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 7")
    assert "schema version 7" in reason()
    path.unlink()
    full(path)
    with closing(Journal(path)) as journal:
        assert "another server uses it" in reason()
        journal.bind("f1", "renamed")
        with pytest.raises(AkvError, match="belongs to another model, 'one'; this one is 'two'"):
            journal.bind("f2", "two")
    path = tmp_path / "no" / "folder"
    assert "No such file" in reason()
    assert oct((tmp_path / "state").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("DELETE FROM meta", "it has sessions, but does not say of which model"),
        ("UPDATE meta SET value = '{'", "the row of its model"),
        ("UPDATE meta SET value = replace(value, 'f1', 'f2')", "the row of its model"),
        ("UPDATE meta SET key = 'modal'", "the row of its modal"),
    ],
)
def test_sessions_are_of_the_model_that_the_file_names(path: Path, change: str, reason: str) -> None:
    """No model gets the sessions of one that is not named any more; without sessions there is nothing to protect."""
    full(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute(change).rowcount == 1
        db.commit()
    for _ in range(2):
        with pytest.raises(AkvError) as caught, closing(Journal(path)) as journal:
            journal.bind("f2", "two")
        assert f"it is damaged ({reason})" in caught.value.message
    path.unlink()
    with closing(Journal(path)):
        pass
    with closing(Journal(path)) as journal:
        journal.bind("f2", "two")


def test_the_command_refuses_before_it_loads_anything(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("not a state file" * 100)
    assert cli.main(["serve", "--model", "no-such-model", "--port", "0", "--state", str(path)]) == 1
    assert f"akv: the state file {path} cannot be used" in capsys.readouterr().err


def test_the_commands_options_arrive(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    services: list[Any] = []
    monkeypatch.setattr(serving, "serve", lambda listener, service, api_keys: services.append(service))
    model = str(tiny_model(tmp_path))
    options = ["--model", model, "--weights", "float32", "--port", "0", "--pool-tokens", "64"]
    with closing(Journal(path)) as journal:
        journal.bind(loader.load(model, weights="float32").fingerprint, "tiny")
        journal.save("", "s", Saved("", Stream([1])), time.time())
    for more, limits in [([], (DAY_S, MAX_SESSIONS)), (["--session-ttl", "7", "--max-sessions", "5"], (7, 5))]:
        assert cli.main(["serve", *options, "--state", str(path), *more]) == 0
        assert f"state    {path}, 1 sessions" in capsys.readouterr().out
        sessions = services.pop().sessions
        assert (sessions._ttl_s, sessions._max_sessions) == limits


def test_a_model_is_the_same_under_any_name_and_another_is_not(tmp_path: Path) -> None:
    loaded = load_tiny(tmp_path, seed=0)
    assert load_tiny(tmp_path, seed=0, name="elsewhere").fingerprint == loaded.fingerprint
    others = [{"seed": 1}, {"seed": 0, "rope_theta": 500.0, "name": "theta"}]
    assert len({loaded.fingerprint, *(load_tiny(tmp_path, **other).fingerprint for other in others)}) == 3


# Sessions on a journal -----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make(journal: Journal | None = None, **limits: Any) -> tuple[Sessions, Clock]:
    clock = Clock()
    return Sessions(FakeCache(), window=WINDOW, page_size=16, journal=journal, clock=clock, **limits), clock


def op(name: str = "s", start: int = 10, end: int = 30) -> types.DropRequest:
    return types.DropRequest(session=name, spans=[(start, end)])


def move(delta: int = 3) -> types.ReposRequest:
    return types.ReposRequest(session="s", start=50, delta=delta)


def test_sessions_are_as_they_were(path: Path) -> None:
    async def first(journal: Journal) -> list[dict[str, Any]]:
        sessions, _ = make(journal)
        await feed(sessions, "s", list(range(100)), cache_salt="pepper")
        await sessions.drop("", op())
        await sessions.fork("", "s", "copy")
        await sessions.repos("", move())
        await feed(sessions, "gone", [1, 2])
        await sessions.delete("", "gone")
        await feed(sessions, "s", [1], tenant="other")
        return [info.model_dump(exclude={"idle_s"}) for info in (await sessions.list("")).data]

    async def second(journal: Journal, expected: list[dict[str, Any]]) -> None:
        sessions, _ = make(journal)
        assert len(sessions) == 3
        assert not any(session.is_loaded for session in sessions._sessions.values())
        found = (await sessions.list("")).data
        assert sorted((info.model_dump(exclude={"idle_s"}) for info in found), key=str) == sorted(expected, key=str)
        assert [session.is_loaded for session in sessions._sessions.values()].count(False) == 1
        assert sessions._sessions["", "s"].salt == "('', 'pepper')"
        prompt = [*range(100), 7, 8]
        async with sessions.turn("", "copy", lambda s: continued(s, prompt), cache_salt="pepper") as turn:
            assert turn.stream.num_known == 101  # so that computing it again counts as a replay
        with refused("session_not_found", "session"):
            await sessions.info("", "gone")

    with closing(Journal(path)) as journal:
        expected = asyncio.run(first(journal))
    with closing(Journal(path)) as journal:
        run(second(journal, expected))


class Slow(Journal):
    """A journal whose writes end when a test says so, well or not."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[Future[None]] = []

    def save(self, tenant: str, name: str, saved: Saved, used_s: float) -> Future[None]:
        self.asked.append(Future())
        return self.asked[-1]


def test_nothing_is_acknowledged_before_it_is_durable(path: Path) -> None:
    async def work(journal: Slow) -> None:
        async def ending(call: Any, error: AkvError | None = None) -> Any:
            task = asyncio.ensure_future(call)
            num_before = len(journal.asked)
            while len(journal.asked) == num_before:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            assert not task.done()
            if error:
                journal.asked[-1].set_exception(error)
            else:
                journal.asked[-1].set_result(None)
            return await task

        sessions, _ = make(journal)
        await ending(feed(sessions, "s", list(range(100))))
        assert (await ending(sessions.drop("", op()))).changed == 20
        before = await sessions.info("", "s")
        full_disk = AkvError("internal_error", "the disk is full")
        with refused("internal_error"):
            await ending(sessions.repos("", move(), key="k"), full_disk)
        assert await sessions.info("", "s") == before
        with refused("internal_error"):
            await ending(sessions.fork("", "s", "copy"), full_disk)
        assert len(sessions) == 1
        assert len((await ending(sessions.repos("", move(), key="k"))).ops) == 2
        with refused("internal_error"):
            await ending(feed(sessions, "s", [*range(100), 7, 8]), full_disk)

    with closing(Slow(path)) as journal:
        run(work(journal))


@pytest.mark.parametrize("fails", [False, True])
def test_a_repeated_op_is_not_answered_before_the_first_one_is_durable(path: Path, fails: bool) -> None:
    """Whoever sent the first one waits for it no longer, so the repetition changes nothing; but it must be written."""

    async def work(journal: Slow) -> None:
        async def written(num_writes: int) -> None:
            while len(journal.asked) < num_writes:
                await asyncio.sleep(0.001)

        sessions, _ = make(journal)
        turn = asyncio.create_task(feed(sessions, "s", list(range(100))))
        await written(1)
        journal.asked[0].set_result(None)
        await turn
        first = asyncio.create_task(sessions.drop("", op()))
        await written(2)
        first.cancel()
        await asyncio.wait([first])
        if fails:
            journal.asked[1].set_exception(AkvError("internal_error", "the disk is full"))
        again = asyncio.create_task(sessions.drop("", op()))
        await asyncio.sleep(0.02)
        assert not again.done()
        await written(3 if fails else 2)
        journal.asked[-1].set_result(None)
        reply = await again
        assert (reply.changed, len(reply.ops)) == (0, 1)

    with closing(Slow(path)) as journal:
        run(work(journal))


def test_a_key_applies_an_op_once(path: Path) -> None:
    async def work(journal: Journal | None, is_again: bool) -> None:
        sessions, _ = make(journal)
        if not is_again:
            await feed(sessions, "s", list(range(100)))
        for _ in range(3):
            reply = await sessions.repos("", move(), key="one")
            assert (reply.changed, [o.delta for o in reply.applied], len(reply.ops)) == (51, [3], 1)
        with refused("invalid_request", "Idempotency-Key"):
            await sessions.repos("", move(4), key="one")
        with refused("invalid_request", "Idempotency-Key"):
            await sessions.drop("", op(), key="one")

    run(work(None, False))
    with closing(Journal(path)) as journal:
        run(work(journal, False))
    with closing(Journal(path)) as journal:
        run(work(journal, True))


def test_the_last_keys_are_remembered(path: Path) -> None:
    def there_and_back(number: int) -> types.ReposRequest:
        return move(-3 if number % 2 else 3)

    async def work() -> None:
        sessions, _ = make()
        await feed(sessions, "s", list(range(100)))
        for i in range(3 * MAX_KEYS):
            await sessions.repos("", there_and_back(i), key=str(i))
            old = max(0, i - MAX_KEYS + 1)
            last = [await sessions.repos("", there_and_back(old), key=str(old)) for _ in range(2)]
            assert len(last[1].ops) == i + 1
        assert len(sessions._sessions["", "s"].done) <= 2 * MAX_KEYS

    run(work())


# Expiry --------------------------------------------------------------------------------------------------------------


def test_idle_sessions_expire(path: Path) -> None:
    async def work(journal: Journal) -> None:
        sessions, clock = make(journal, ttl_s=60)
        await feed(sessions, "old", [1, 2])
        await feed(sessions, "used", list(range(100)))
        clock.now_s += 40
        await sessions.drop("", op("used"))
        await sessions.info("", "old")  # to look at a session is not to use it
        clock.now_s += 40
        with refused("session_not_found", "session"):
            await sessions.drop("", op("old", 0, 1))
        with refused("session_not_found", "session"):
            await sessions.info("", "old")
        assert [info.session for info in (await sessions.list("")).data] == ["used"]
        async with sessions.turn("", "used", lambda stream: continued(stream, list(range(100)))) as turn:
            clock.now_s += 1000
            sessions.expire()
            sessions.keep_prompt(turn)
        assert (await sessions.info("", "used")).stream_tokens == 100
        clock.now_s += 61
        assert (await sessions.list("")).data == []
        assert sessions.num_expired == 2

    with closing(Journal(path)) as journal:
        run(work(journal))
        assert journal.entries() == []
        journal.save("", "long ago", Saved("", Stream([1])), time.time() - 100).result()
        journal.save("", "just now", Saved("", Stream([1])), time.time() - 10).result()
        assert len(make(journal, ttl_s=60)[0]) == 1
        assert [entry.name for entry in journal.entries()] == ["just now"]


def test_the_least_recently_used_go_when_there_are_too_many() -> None:
    async def work() -> None:
        sessions, _ = make(max_sessions=3)
        async with sessions.turn("", "busy", lambda stream: continued(stream, [1, 2])) as turn:
            sessions.keep_prompt(turn)
            for name in "abc":
                await feed(sessions, name, list(range(100)))
            await sessions.drop("", op("b"))
            await sessions.fork("", "c", "d")
            assert [info.session for info in (await sessions.list("")).data] == ["busy", "c", "d"]

    run(work())


# Through HTTP and the SDK --------------------------------------------------------------------------------------------


class Lossy(httpx.HTTPTransport):
    """Loses the reply of the first attempt at every op, after the server has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        key = request.headers.get("idempotency-key")
        if key is not None and key not in self.lost:
            self.lost.add(key)
            response.read()
            raise httpx.ReadError("the reply was lost", request=request)
        return response


def test_the_sdk_moves_once_though_the_reply_was_lost(loaded: LoadedModel) -> None:
    transport = Lossy()
    with serving_model(loaded) as server, akv_sdk.Client(server.url, transport=transport) as client:
        session = client.session("s")
        session.user("one two three four five")
        session.complete(max_tokens=8, temperature=0)
        for delta in (5, 6):
            reply = session.repos(3, None, delta)
        assert [applied.delta for applied in session.ops] == [5, 6]
        assert reply.segments[-1].shift == 11
        assert len(transport.lost) == 2


def test_a_key_over_http(loaded: LoadedModel) -> None:
    with serving_model(loaded) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": [5] * 40, "max_tokens": 4, "akv": {"session": "s"}})
        body = {"session": "s", "start": 3, "delta": 2}
        for headers, num_ops in [({"Idempotency-Key": "k"}, 1), ({"Idempotency-Key": "k"}, 1), ({}, 2), ({}, 3)]:
            reply = client.post("/v1/cache/repos", json=body, headers=headers)
            assert len(reply.json()["ops"]) == num_ops
        for key, status in [("k" * 201, 400), ("k", 400)]:
            reply = client.post("/v1/cache/repos", json={**body, "delta": 1}, headers={"Idempotency-Key": key})
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, "Idempotency-Key")


def test_a_full_disk_puts_off_and_is_logged_once(
    loaded: LoadedModel, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written is not done, is refused as one to be tried again, and is done once there is room."""

    def limit(num_pages: int) -> None:
        journal._submit(lambda: journal._db.execute(f"PRAGMA max_page_count = {num_pages}").fetchone()).result()

    message = "the state file could not be read or written: database or disk is full"
    body = {"prompt": [5] * 1500, "max_tokens": 1, "akv": {"session": "s"}}
    with closing(Journal(path)) as journal, serving_model(loaded, journal=journal) as server, server.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        limit(1)  # no more than it has
        for route in ("/v1/cache/sessions/s/fork", "/v1/completions"):
            reply = client.post(route, json={"session": "t"} if "fork" in route else {**body, "akv": {"session": "t"}})
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "10")
            assert (reply.json()["error"]["code"], reply.json()["error"]["message"]) == ("internal_error", message)
        with akv_sdk.Client(server.url, max_retries=0) as sdk, pytest.raises(akv_sdk.InternalError) as caught:
            sdk.fork("s", "u")
        assert (caught.value.status, caught.value.retry_after_s) == (503, 10)
        limit(2**30)
        assert client.post("/v1/cache/sessions/s/fork", json={"session": "u"}).status_code == 200
    logged = [(record.getMessage(), record.exc_info) for record in caplog.records if record.name == "akv"]
    assert logged == [(message.replace("file", f"file {path}"), None)]


def test_the_sdk_makes_an_expired_session_anew(loaded: LoadedModel) -> None:
    with serving_model(loaded) as server, akv_sdk.Client(server.url) as client:
        sessions = server.service.sessions

        def expire(name: str) -> None:
            if name == "s":
                sessions._ttl_s = -1.0
                sessions.expire()
                sessions._ttl_s = 60.0
                assert len(sessions) == 0
                with pytest.raises(akv_sdk.SessionNotFound):
                    client.session_info(name)

        def conversation(name: str) -> tuple[str, tuple[types.Op, ...]]:
            session = client.session(name)
            session.system("be brief")
            blocks = [session.observe("one two three")]
            session.complete(max_tokens=0)
            expire(name)
            session.drop(blocks=blocks)
            blocks.append(session.observe("four five six"))
            expire(name)
            session.complete(max_tokens=0)
            expire(name)
            assert session.drop(blocks=blocks).changed > 0
            session.user("and now?")
            expire(name)
            return session.complete(max_tokens=8, temperature=0).text, session.ops

        text, ops = conversation("undisturbed")
        assert len(ops) == 2
        client.delete_session("undisturbed")
        assert conversation("s") == (text, ops)
        assert sessions.num_expired == 4


# Kill -9 -------------------------------------------------------------------------------------------------------------


class Reaper:
    """Kills a server, again and again, at some moment after one of the next requests was sent."""

    def __init__(self, forge: Forge, num_kills: int) -> None:
        self.num_left = num_kills
        self._forge = forge
        self._rng = Random(time.time_ns())
        self._timer = threading.Timer(0, lambda: None)
        self._countdown = 1

    def sending(self) -> None:
        self._countdown -= 1
        if self._countdown == 0 and self.num_left:
            longest_s = self._rng.choice([0.004, 0.02, 0.1])  # about what an op, a short and a long answer take
            self._timer = threading.Timer(self._rng.uniform(0, longest_s), self._kill)
            self._timer.start()

    def _kill(self) -> None:
        self._forge.kill()
        self.num_left -= 1

    def lost(self) -> None:
        self._timer.join()
        self._countdown = self._rng.randrange(1, 6)
        self._forge.start()


class Agent:
    """A scripted conversation, the same for the same seed: completions (whole or streamed), drops and moves. Each
    request is sent again, under the same key, until it is answered."""

    def __init__(self, url: str, seed: int, reaper: Reaper | None = None) -> None:
        self.name = f"agent-{seed}"
        self.answers: list[list[int]] = []
        self.ops: list[Any] = []  # as acknowledged
        self.num_tokens = 0  # as acknowledged
        self.asked: str | None = None  # the op that is not acknowledged yet
        self.num_found = 0  # of those that a killed server had made durable before it died
        self._rng = Random(seed)
        self._reaper = reaper
        self._is_restarted = False
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def run(self) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are {self.name}."}]
        for turn in range(4):
            text = " ".join(self._rng.choice(["alpha", "beta", "gamma"]) for _ in range(self._rng.randrange(5, 40)))
            block = f'<ephemeral_observation id="b{turn}">\n{text}\n</ephemeral_observation>'
            messages.append({"role": "user", "content": block})
            messages.append({"role": "assistant", "content": self._complete(messages, stream=turn % 2 == 1)})
            self._op("drop", blocks=[f"b{turn}"], repos=self._rng.random() < 0.5)
            self._op("repos", start=self.num_tokens - 2, delta=self._rng.randrange(1, 5))
        self._http.close()

    def _complete(self, messages: list[dict[str, Any]], *, stream: bool) -> str:
        body = {"messages": messages, "max_tokens": self._rng.randrange(4, 12), "temperature": 0, "stream": stream}
        body |= {"return_token_ids": True, "akv": {"session": self.name}}
        data = self._ask("/v1/chat/completions", body, stream)
        if stream:
            chunks = [event for event in map(_event, data.split("\n\n")) if event]
            ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids") or []]
            text = "".join(choice["delta"].get("content") or "" for c in chunks for choice in c["choices"])
            akv = chunks[-1]["akv"]
        else:
            reply = httpx.Response(200, text=data).json()
            choice, akv = reply["choices"][0], reply["akv"]
            ids, text = choice["token_ids"], choice["message"]["content"]
        if self._is_restarted and self.num_tokens:
            assert akv["replayed_tokens"] > 0, "a replay of what a server had computed before it was killed"
        self._is_restarted = False
        self.answers.append(ids)
        self.num_tokens = akv["stream_tokens"]
        return text

    def _op(self, route: str, **body: Any) -> None:
        self.asked = route
        reply = httpx.Response(200, text=self._ask(f"/v1/cache/{route}", {"session": self.name, **body})).json()
        self.asked = None
        assert len(reply["applied"]) == 1
        self.ops = reply["ops"]

    def _ask(self, route: str, body: dict[str, Any], stream: bool = False) -> str:
        key, was_lost = uuid.uuid4().hex, False
        while True:
            try:
                if was_lost:
                    self._check()
                if self._reaper:
                    self._reaper.sending()
                reply = self._http.post(route, json=body, headers={"Idempotency-Key": key})
                assert reply.status_code == 200, reply.text
                if not stream or reply.text.endswith("data: [DONE]\n\n"):
                    return reply.text
            except httpx.TransportError:
                pass
            assert self._reaper
            self._reaper.lost()
            self._is_restarted = was_lost = True

    def _check(self) -> None:
        """What the server knows after it was killed: all that was acknowledged, and at most the op under way."""
        reply = self._http.get(f"/v1/cache/sessions/{self.name}")
        if reply.status_code == 404 and not self.num_tokens:
            return
        info = reply.json()
        assert info["stream_tokens"] >= self.num_tokens
        assert info["ops"][: len(self.ops)] == self.ops
        newer = [op["op"] for op in info["ops"][len(self.ops) :]]
        assert newer in ([], [self.asked])
        self.num_found += len(newer)


def _event(text: str) -> Any:
    data = text.removeprefix("data: ").strip()
    return httpx.Response(200, text=data).json() if data not in ("", "[DONE]") else None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_kill_9_at_any_moment(path: Path, tmp_path: Path) -> None:
    """What was acknowledged is there, nothing is there twice, and every answer is the one of an undisturbed run."""
    model = tiny_model(tmp_path)
    agents: list[Agent] = []
    options = ["--model", str(model), "--weights", "float32", "--pool-tokens", "4096", "--state", str(path)]
    with Forge(*options) as forge:
        url, reaper = forge.start(), Reaper(forge, NUM_KILLS)
        while reaper.num_left:
            agents.append(Agent(url, len(agents), reaper))
            agents[-1].run()
    with serving_model(load_tiny(tmp_path, name="undisturbed")) as server:
        for seed, agent in enumerate(agents):
            undisturbed = Agent(server.url, seed)
            undisturbed.run()
            assert agent.answers == undisturbed.answers
            assert agent.ops == undisturbed.ops
    num_found = sum(agent.num_found for agent in agents)
    print(f"{NUM_KILLS} kills; {num_found} of {8 * len(agents)} ops were durable and not answered when the server died")
