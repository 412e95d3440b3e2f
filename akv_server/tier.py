"""Where evicted KV goes instead of being lost: host memory or a file, and back where that beats computing it again.

Owns blocks by key: their bytes, their limit, the order in which they go (least recently used first), and the rates by
which loading is chosen or not. Knows no tree, no token and no request: a key is 32 bytes that say all.

`Tier` copies between pages and a storage. A storage may lose any block at any time; what it gives back is what it was
given, or None. `Memory` keeps blocks in this process (pinned where there is a GPU); `File` keeps them in one file that
outlives it:

    head | record 0 | record 1 | ...        record: header (key, time of writing, digests) | written shifts | K and V

Every digest is keyed by the fingerprint of the model and of all that shapes a block, so a record that is damaged, cut
short, half overwritten or another model's does not pass. The file is a cache, never synced: after a crash of the
machine, what had not reached the disk does not pass either.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from akv_server.errors import AkvError, invalid
from akv_server.kv import KV

log = logging.getLogger("akv")

Array = np.ndarray

FILE_BYTES_PER_S = 5e8  # start values, until there are measurements
MEMORY_BYTES_PER_S = 1e10
_MAX_PENDING_BYTES = 2**27  # copied, not yet written to the file
_CLOSE_S = 10  # for what is still to be written when the server stops


class Rate:
    """So much a second, of late. Starts from an estimate that a twentieth of a second of measurements outweighs."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._amount, self._seconds = start / 20, 1 / 20

    @property
    def per_s(self) -> float:
        return self._amount / self._seconds

    def add(self, amount: float, seconds: float) -> None:
        self._amount, self._seconds = 0.9 * self._amount + amount, 0.9 * self._seconds + seconds

    def fade(self) -> None:
        """A hundredth of the way back to the estimate: what is no longer measured is no longer known."""
        self._amount += 0.01 * (self._start * self._seconds - self._amount)


@dataclass(frozen=True, slots=True)
class Block:
    """K and V of `page_size` tokens in all layers, and the shift that each key is rotated by."""

    kv: Tensor  # [2, num_layers, page_size, num_kv_heads, head_dim], in host memory
    written: Array  # int32 [page_size]
    wait: Callable[[], None]  # returns once `kv` can be read by the CPU


class Storage(ABC):
    """Blocks by key. Thread-safe."""

    bytes_per_s: float  # an estimate to start from
    num_damaged = 0  # blocks that did not pass

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: bytes) -> bool: ...

    @abstractmethod
    def has_room(self) -> bool:
        """Whether a block given now would be kept; else it is not worth copying."""

    @abstractmethod
    def put(self, key: bytes, block: Block) -> None: ...

    @abstractmethod
    def get(self, key: bytes) -> Block | None:
        """The block, or None where it is gone or damaged (then it is gone). It counts as used."""

    @abstractmethod
    def flush(self) -> None:
        """Returns once everything given so far is where it stays."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything. Nothing may be called after it."""


class Memory(Storage):
    """Blocks in the memory of this process."""

    bytes_per_s = MEMORY_BYTES_PER_S

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        """Raises AkvError `invalid_request` where not one block has room."""
        if num_bytes < block_bytes:
            raise invalid("kv_host_gb", f"{num_bytes} bytes do not hold one block of {block_bytes}")
        self._max_blocks = num_bytes // block_bytes
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def has_room(self) -> bool:
        return True

    def put(self, key: bytes, block: Block) -> None:
        with self._lock:
            while len(self._blocks) >= self._max_blocks:
                self._blocks.popitem(last=False)
            self._blocks[key] = block

    def get(self, key: bytes) -> Block | None:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def flush(self) -> None:
        return

    def close(self) -> None:
        self._blocks.clear()


_MAGIC, _VERSION = b"AKV tier", 1
_HEAD = struct.Struct("<8sI32sQ")  # magic, version, fingerprint, bytes of a record; then a digest
_HEAD_BYTES = 4096
_RECORD = struct.Struct("<32sQ32s")  # key, time of writing (a counter), digest of key and body; then a digest
_DIGEST_BYTES = 32


class File(Storage):
    """Blocks in a file of records of one size. A thread of its own writes them."""

    bytes_per_s = FILE_BYTES_PER_S

    def __init__(self, path: Path, num_bytes: int, kv: KV, page_size: int, fingerprint: bytes) -> None:
        """Opens or makes the file and reads which blocks it has. One that is another model's, another version's or
        damaged at its head is begun anew; one that is no such file at all is left alone.

        Raises AkvError `invalid_request` where the file cannot be used.
        """
        self._shape, self._dtype, self._page_size = kv.block_shape(page_size), kv.dtype, page_size
        self._written_bytes = 4 * page_size
        self._body_bytes = self._written_bytes + kv.block_bytes(page_size)
        self._record_bytes = _RECORD.size + _DIGEST_BYTES + self._body_bytes
        num_records = (num_bytes - _HEAD_BYTES) // self._record_bytes
        if num_records < 1:
            raise _unusable(path, f"{num_bytes} bytes (kv_disk_gb) do not hold one block of {self._record_bytes}")
        shape = f"{self._dtype} {self._shape} {sys.byteorder}".encode()
        self._secret = hashlib.blake2b(fingerprint + shape, digest_size=32).digest()
        self._lock = threading.Condition()
        self._records: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: dict[bytes, Block] = {}
        self._queue: deque[tuple[bytes, int, Block]] = deque()
        self._max_pending = max(4, _MAX_PENDING_BYTES // self._body_bytes)
        self._clock = 0
        self._closing = self._has_failed = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error
        try:
            _lock_file(self._fd, path)
            self._open_head(path)
            os.truncate(self._fd, min(os.fstat(self._fd).st_size, _HEAD_BYTES + num_records * self._record_bytes))
            self._scan()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise _unusable(path, error.strerror or str(error)) from error
            raise
        used = set(self._records.values())
        self._free = [record for record in range(num_records - 1, -1, -1) if record not in used]
        self._thread = threading.Thread(target=self._write_all, name="akv-tier", daemon=True)
        self._thread.start()

    def _digest(self, *parts: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(key=self._secret, digest_size=_DIGEST_BYTES)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _open_head(self, path: Path) -> None:
        head = _HEAD.pack(_MAGIC, _VERSION, self._secret, self._record_bytes)
        head += self._digest(head)
        found = os.pread(self._fd, len(head), 0)
        if found == head:
            return
        if found and not found.startswith(_MAGIC):
            raise _unusable(path, "it is no file of AKV's, or its head is damaged; delete it if you do not need it")
        if found:
            log.warning("%s is of another model or version, or damaged: its blocks are not used", path)
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, head.ljust(_HEAD_BYTES, b"\0"), 0)

    def _scan(self) -> None:
        found: list[tuple[int, bytes, int]] = []
        for record in range((os.fstat(self._fd).st_size - _HEAD_BYTES) // self._record_bytes):
            header = os.pread(self._fd, _RECORD.size + _DIGEST_BYTES, self._offset(record))
            key, clock, _ = _RECORD.unpack_from(header)
            if self._digest(header[: _RECORD.size]) == header[_RECORD.size :]:
                found.append((clock, key, record))
            else:
                self.num_damaged += any(header)  # one that was never written is all zero
        for clock, key, record in sorted(found):
            self._records[key] = record
            self._clock = clock

    def _offset(self, record: int) -> int:
        return _HEAD_BYTES + record * self._record_bytes

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def has_room(self) -> bool:
        return len(self._queue) < self._max_pending

    def put(self, key: bytes, block: Block) -> None:
        with self._lock:
            record = self._free.pop() if self._free else self._records.popitem(last=False)[1]
            self._records[key] = record
            self._pending[key] = block
            self._queue.append((key, record, block))
            self._lock.notify_all()

    def get(self, key: bytes) -> Block | None:
        with self._lock:
            record, pending = self._records.get(key), self._pending.get(key)
            if record is None:
                return None
            self._records.move_to_end(key)
        if pending is not None:
            return pending
        block = self._read(key, record)
        if block is None:
            with self._lock:
                if self._records.get(key) == record:
                    self._forget(key)
                    self.num_damaged += 1
        return block

    def _forget(self, key: bytes) -> None:
        self._free.append(self._records.pop(key))

    def _read(self, key: bytes, record: int) -> Block | None:
        buffer = bytearray(self._record_bytes)
        try:
            if os.preadv(self._fd, [buffer], self._offset(record)) < len(buffer):
                return None
        except OSError as error:
            log.warning("a block could not be read: %s", error)
            return None
        begin = _RECORD.size + _DIGEST_BYTES
        body = memoryview(buffer)[begin:]
        found, _, digest = _RECORD.unpack_from(buffer)
        if found != key or self._digest(key, body) != digest:
            return None
        kv = torch.frombuffer(buffer, dtype=torch.uint8, offset=begin + self._written_bytes)
        written = np.frombuffer(body[: self._written_bytes], np.int32)
        return Block(kv.view(self._dtype).view(self._shape), written, lambda: None)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                key, record, block = self._queue[0]
            is_written = self._write(key, record, block)
            with self._lock:
                self._queue.popleft()
                if self._pending.get(key) is block:
                    del self._pending[key]
                    if not is_written and self._records.get(key) == record:
                        self._forget(key)
                self._lock.notify_all()

    def _write(self, key: bytes, record: int, block: Block) -> bool:
        try:
            block.wait()
            self._clock += 1
            kv = memoryview(block.kv.reshape(-1).view(torch.uint8).numpy().data)
            written = np.ascontiguousarray(block.written, np.int32).tobytes()
            header = _RECORD.pack(key, self._clock, self._digest(key, written, kv))
            header += self._digest(header)
            begin = self._offset(record)
            done = os.pwritev(self._fd, [header, written, kv], begin)
            if done < self._record_bytes:
                raise OSError(f"{done} of {self._record_bytes} bytes written")
        except Exception as error:
            if not self._has_failed:
                log.warning("evicted KV could not be written, and is lost: %s", error)
            self._has_failed = True
            return False
        return True

    def flush(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._queue)

    def close(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._queue, timeout=_CLOSE_S)
            while len(self._queue) > 1:  # the thread is at the first
                self._queue.pop()
            self._closing = True
            self._lock.notify_all()
        self._thread.join()
        os.close(self._fd)


def _unusable(path: Path, why: str) -> AkvError:
    return AkvError("invalid_request", f"cannot keep KV in {path}: {why}", param="kv_disk")


def _lock_file(fd: int, path: Path) -> None:
    """One server a file. Raises AkvError where another has it."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _unusable(path, "another server is using it") from error


class Tier:
    """Blocks copied between pages and a storage, as long as that pays."""

    def __init__(self, kv: KV, storage: Storage, page_size: int, *, prefill_per_s: float) -> None:
        """`prefill_per_s`: tokens a second, an estimate to start from."""
        self._kv = kv
        self.storage = storage
        self._page_size = page_size
        self.load_rate = Rate(storage.bytes_per_s * page_size / kv.block_bytes(page_size))
        self.prefill_rate = Rate(prefill_per_s)
        self.num_stored = 0  # tokens

    @property
    def is_faster(self) -> bool:
        return self.load_rate.per_s > self.prefill_rate.per_s

    def __contains__(self, key: bytes) -> bool:
        return key in self.storage

    def store(self, key: bytes, slots: Array, written: Array) -> None:
        """Copies what is in the slots now, unless more waits to be written than is good. int32 [page_size] each."""
        if self.storage.has_room():
            kv, wait = self._kv.take_out(slots)
            self.storage.put(key, Block(kv, written.copy(), wait))
            self.num_stored += self._page_size

    def load(
        self,
        keys: list[bytes],  # of adjacent blocks
        skip: int,  # tokens of the first one that are not wanted
        slots: Array,  # int32 [num_tokens]: where the tokens behind them go
    ) -> Array:  # int32 [<= num_tokens]
        """Brings tokens back and returns the shifts that their keys are rotated by: of fewer tokens where a block is
        gone or damaged, of those before it. Only slots of returned tokens hold anything."""
        begun = time.perf_counter()
        shifts = [np.empty(0, np.int32)]
        done = 0
        for key in keys:
            block = self.storage.get(key)
            if block is None:
                break
            count = min(self._page_size - skip, len(slots) - done)
            self._kv.put_back(block.kv[:, :, skip : skip + count], slots[done : done + count])
            shifts.append(block.written[skip : skip + count])
            done, skip = done + count, 0
        if done == len(slots):
            self._kv.synchronize()
            self.load_rate.add(done, time.perf_counter() - begun)
        return np.concatenate(shifts)

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """So long the model took for so many tokens."""
        self.prefill_rate.add(num_tokens, seconds)
        if not self.is_faster:
            self.load_rate.fade()
