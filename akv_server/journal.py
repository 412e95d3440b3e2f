"""The state file: every session's stream, ops and idempotency keys, in SQLite, so that they outlive the server.

Owns the file, the one thread that touches it, what is written (only what changed since the last time), and refusing a
file that it cannot vouch for. Knows no HTTP and no event loop: whoever saves gets a future that is done once the disk
has it. Saves are carried out in the order in which they were asked for; those that wait together share one commit.

    meta      which model the file belongs to
    sessions  one row each: its name, and how many tokens, messages, ops and keys it has
    parts     its tokens in runs, as they came, and its messages, ops and keys one by one

Every row carries a checksum; all of them are verified when the file is opened.
"""

from __future__ import annotations

import json
import logging
import queue
import sqlite3
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from akv_server.blocks import Block
from akv_server.errors import AkvError
from akv_server.ops import Op, Timeline
from akv_server.streams import Message, Stream, num_common

log = logging.getLogger("akv")

APPLICATION_ID = 0x414B5653  # "AKVS"
SCHEMA = 2
_TOKENS, _MESSAGES, _OPS, _KEYS = range(4)
_TABLES = """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, used_s REAL NOT NULL, data BLOB NOT NULL,
        sum INTEGER NOT NULL, UNIQUE (tenant, name)
    );
    CREATE TABLE parts (
        session INTEGER NOT NULL, kind INTEGER NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL,
        sum INTEGER NOT NULL, PRIMARY KEY (session, kind, start)
    ) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Done:
    """What came of an op request that its client gave a key: `request` identifies what was asked."""

    key: str
    request: str
    changed: int
    applied: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """All that is kept of a session."""

    salt: str
    stream: Stream
    done: tuple[Done, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A session in the file; `used_s` is when it was last saved, in seconds since 1970."""

    tenant: str
    name: str
    used_s: float


Key = tuple[str, str]
Job = tuple[Callable[[], Any], "Future[Any]"]


class Journal:
    """An open state file. Held exclusively until `close`.

    Raises AkvError("invalid_request") where the file is no state file, of another schema, damaged, in use, or cannot be
    read or written at all.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._known: dict[Key, Saved] = {}  # as the file has it
        self._staged: dict[Key, Saved | None] = {}  # by the transaction under way
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._logged: set[str] = set()  # why the disk failed, said once each
        try:
            self.path.touch(mode=0o600)  # it holds what people said
            self._db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise self._refused(_reason(error)) from error
        self._thread = threading.Thread(target=self._run, name="akv-journal", daemon=True)
        self._thread.start()

    def bind(self, fingerprint: str, model: str) -> None:
        """Ties a new file to a model; refuses one that belongs to another, or has sessions of nobody knows which."""

        def bind() -> None:
            row = self._db.execute("SELECT value FROM meta WHERE key = 'model'").fetchone()
            if row is None:
                if self._db.execute("SELECT 1 FROM sessions").fetchone():
                    raise self._damaged("it has sessions, but does not say of which model")
                value = json.dumps({"fingerprint": fingerprint, "name": model})
                self._db.execute("INSERT INTO meta VALUES ('model', ?, ?)", (value, _sum("model", value)))
            elif (other := json.loads(row[0]))["fingerprint"] != fingerprint:
                raise self._refused(f"it belongs to another model, {other['name']!r}; this one is {model!r}")

        self._submit(bind).result()

    def entries(self) -> list[Entry]:
        """The sessions in the file, the one that was used longest ago first."""
        rows = "SELECT tenant, name, used_s FROM sessions ORDER BY used_s"
        found: Future[list[Entry]] = self._submit(lambda: [Entry(*row) for row in self._db.execute(rows)])
        return found.result()

    def load(self, tenant: str, name: str) -> Future[Saved]:
        """A session of the file."""
        return self._submit(lambda: self._load(tenant, name))

    def save(self, tenant: str, name: str, saved: Saved, used_s: float) -> Future[None]:
        """Writes a session; the future is done once it is durable. It may be cancelled, the write may not."""
        return self._submit(lambda: self._save((tenant, name), saved, used_s))

    def delete(self, tenant: str, name: str) -> Future[None]:
        """Forgets a session, if it is there."""
        return self._submit(lambda: self._delete((tenant, name)))

    def close(self) -> None:
        """Carries out what was asked for, then lets go of the file."""
        self._jobs.put(None)
        self._thread.join()
        self._db.close()

    # Opening -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        db = self._db
        db.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second server on one file would tear it
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN EXCLUSIVE")
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        (num_tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        is_new = not (application or schema or num_tables)
        if not is_new and application != APPLICATION_ID:
            raise self._refused("it is a database of something else")
        if not is_new and schema != SCHEMA:
            raise self._refused(f"it has schema version {schema}, this server knows {SCHEMA}")
        if is_new:
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute("COMMIT")
        if db.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise self._refused("its file system cannot hold a write-ahead log")
        if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise self._refused("it is damaged")
        self._verify()

    def _verify(self) -> None:
        """Every row against its checksum, and every session against what it says that it has."""
        for key, value, total in self._db.execute("SELECT * FROM meta"):
            if total != _sum(key, value):
                raise self._damaged(f"the row of its {key}")
        counts: dict[tuple[int, int], int] = {}
        for session, kind, start, data, total in self._db.execute("SELECT * FROM parts"):
            where = counts.get((session, kind), 0)
            if start != where or total != _sum(session, kind, start, data):
                raise self._damaged(f"a part of session {session}")
            counts[session, kind] = where + (len(data) // 4 if kind == _TOKENS else 1)
        for row, tenant, name, used_s, data, total in self._db.execute("SELECT * FROM sessions"):
            if total != _sum(row, tenant, name, used_s, data):
                raise self._damaged(f"the row of session {row}")
            lengths = json.loads(data)["lengths"]
            if lengths != [counts.pop((row, kind), 0) for kind in range(len(lengths))]:
                raise self._damaged(f"session {name!r} lacks a part")
        if counts:
            raise self._damaged("it has parts of no session")

    def _refused(self, reason: str) -> AkvError:
        return AkvError("invalid_request", f"the state file {self.path} cannot be used: {reason}", param="state")

    def _damaged(self, what: str) -> AkvError:
        return self._refused(f"it is damaged ({what}); move it away to start without it")

    # The thread ----------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((work, future))
        return future

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._jobs.get()]
            while not self._jobs.empty():
                batch.append(self._jobs.get())
            is_open = None not in batch
            self._commit([job for job in batch if job is not None])

    def _commit(self, jobs: Sequence[Job]) -> None:
        """Carries out the jobs in one transaction, and if that fails one by one: none suffers for another."""
        results: list[Any] = []
        error: BaseException | None = None
        self._staged = {}
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for work, _ in jobs:
                results.append(work())
            self._db.execute("COMMIT")
        except AkvError as refused:
            error = refused
        except Exception as failed:
            error = self._failure(failed)
        if error is not None:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if len(jobs) > 1:
                for job in jobs:
                    self._commit([job])
                return
        else:
            for key, saved in self._staged.items():
                if saved is None:
                    self._known.pop(key, None)
                else:
                    self._known[key] = saved
        for i, (_, future) in enumerate(jobs):
            if not future.set_running_or_notify_cancel():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(results[i])

    def _failure(self, error: Exception) -> AkvError:
        """What whoever asked is told. A disk that fails may do so for long and at every request: it is logged once."""
        reason = _reason(error)
        message = f"the state file could not be read or written: {reason}"
        if not isinstance(error, sqlite3.OperationalError):
            log.exception("the state file %s could not be read or written", self.path)
            return AkvError("internal_error", message)
        if reason not in self._logged:
            self._logged.add(reason)
            log.error("the state file %s could not be read or written: %s", self.path, reason)
        return AkvError("internal_error", message, status=503, retry_after_s=_RETRY_AFTER_S)

    # What a job does -----------------------------------------------------------------------------------------------

    def _save(self, key: Key, saved: Saved, used_s: float) -> None:
        known = self._staged[key] if key in self._staged else self._known.get(key)
        tenant, name = key
        lists = _lists(saved)
        lengths = [len(saved.stream.tokens), *map(len, lists)]
        data = _dumps({"salt": saved.salt, "stream": _plain(saved.stream), "lengths": lengths})
        row = self._row(key)
        if row is None:
            cursor = self._db.execute("INSERT INTO sessions VALUES (NULL, ?, ?, ?, x'', 0)", (tenant, name, used_s))
            assert cursor.lastrowid is not None
            row = cursor.lastrowid
        self._db.execute(
            "UPDATE sessions SET used_s = ?, data = ?, sum = ? WHERE id = ?",
            (used_s, data, _sum(row, tenant, name, used_s, data), row),
        )
        self._save_tokens(row, [] if known is None else known.stream.tokens, saved.stream.tokens)
        before: list[Sequence[Any]] = [()] * len(lists) if known is None else _lists(known)
        for kind, (old, new) in enumerate(zip(before, lists, strict=True), start=_MESSAGES):
            common = _num_equal(old, new)
            self._cut(row, kind, common)
            self._add(row, kind, ((i, _dumps(_plain(new[i]))) for i in range(common, len(new))))
        self._staged[key] = saved

    def _save_tokens(self, row: int, old: list[int], new: list[int]) -> None:
        """Adds a run behind what both have in common; the run that this point lies in is written anew from its start,
        and so is a short one, that there be few."""
        start = num_common(old, new)
        if start == len(old) == len(new):
            return
        last = self._db.execute(
            "SELECT max(start) FROM parts WHERE session = ? AND kind = ? AND start < ?", (row, _TOKENS, start)
        ).fetchone()[0]
        if last is not None and (start < len(old) or start - last < _SHORT_RUN):
            start = last
        self._cut(row, _TOKENS, start)
        if start < len(new):
            self._add(row, _TOKENS, [(start, _bytes_of(new[start:]))])

    def _cut(self, row: int, kind: int, start: int) -> None:
        self._db.execute("DELETE FROM parts WHERE session = ? AND kind = ? AND start >= ?", (row, kind, start))

    def _add(self, row: int, kind: int, parts: Iterable[tuple[int, bytes]]) -> None:
        rows = ((row, kind, start, data, _sum(row, kind, start, data)) for start, data in parts)
        self._db.executemany("INSERT INTO parts VALUES (?, ?, ?, ?, ?)", rows)

    def _delete(self, key: Key) -> None:
        row = self._row(key)
        if row is not None:
            self._db.execute("DELETE FROM parts WHERE session = ?", (row,))
            self._db.execute("DELETE FROM sessions WHERE id = ?", (row,))
        self._staged[key] = None

    def _row(self, key: Key) -> int | None:
        found = self._db.execute("SELECT id FROM sessions WHERE tenant = ? AND name = ?", key).fetchone()
        return None if found is None else int(found[0])

    def _load(self, tenant: str, name: str) -> Saved:
        key = tenant, name
        row = self._row(key)
        if row is None:
            raise AkvError("session_not_found", f"there is no session {name[:200]!r}", param="session")
        (data,) = self._db.execute("SELECT data FROM sessions WHERE id = ?", (row,)).fetchone()
        about = json.loads(data)
        tokens: list[int] = []
        for part in self._parts(row, _TOKENS):
            tokens += _ints_of(part)
        messages = tuple(_message(json.loads(part)) for part in self._parts(row, _MESSAGES))
        history = tuple(Op(**json.loads(part)) for part in self._parts(row, _OPS))
        done = tuple(_done(json.loads(part)) for part in self._parts(row, _KEYS))
        rest = {name: _frozen(value) for name, value in about["stream"].items()}
        stream = Stream(tokens=tokens, messages=messages, timeline=Timeline(history), **rest)
        self._staged[key] = saved = Saved(about["salt"], stream, done)
        return saved

    def _parts(self, row: int, kind: int) -> Iterator[bytes]:
        found = self._db.execute("SELECT data FROM parts WHERE session = ? AND kind = ? ORDER BY start", (row, kind))
        return (data for (data,) in found)


_SHORT_RUN = 1024  # tokens
_RETRY_AFTER_S = 10  # somebody has to make room on the disk


def _lists(saved: Saved) -> list[Sequence[Any]]:
    return [saved.stream.messages, saved.stream.timeline.history, saved.done]


def _num_equal(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them: tuples become lists. What is stored apart is left out."""
    apart = {"tokens", "messages", "timeline"} if isinstance(value, Stream) else set()
    return {f.name: _plain_value(getattr(value, f.name)) for f in fields(value) if f.name not in apart}


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain_value(item) for item in value]
    return asdict(value) if isinstance(value, Block | Op) else value


def _frozen(value: Any) -> Any:
    """A value that was hashable before JSON made lists of its tuples."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _message(plain: dict[str, Any]) -> Message:
    blocks = tuple(Block(**{key: _frozen(value) for key, value in block.items()}) for block in plain.pop("blocks"))
    return Message(**{key: _frozen(value) for key, value in plain.items()}, blocks=blocks)


def _done(plain: dict[str, Any]) -> Done:
    applied = tuple(Op(**op) for op in plain.pop("applied"))
    return Done(**plain, applied=applied)


def _bytes_of(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _ints_of(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def _dumps(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _sum(*parts: object) -> int:
    """CRC-32 of a row: of its columns one after another."""
    total = 0
    for part in parts:
        total = zlib.crc32(part if isinstance(part, bytes) else repr(part).encode(), total)
    return total


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if "locked" in text:
        return "another server uses it"
    if "not a database" in text:
        return "it is no SQLite database, or a damaged one"
    if "malformed" in text:
        return "it is damaged; move it away to start without it"
    return text
