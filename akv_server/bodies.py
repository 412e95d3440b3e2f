"""Request bodies on their way in: how much of them is held at once, and when a large one is worked on.

Owns the bounds on their size and on the time they take to arrive, and that of the large ones only one at a time is made
fields and tokens, in a thread. Knows neither HTTP nor what is in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from akv_server.errors import AkvError

MAX_BODY_BYTES = 32 * 2**20
LARGE_BYTES = 2**18  # half a second's work
ARRIVAL_S = 120.0

T = TypeVar("T")


class Bodies:
    """All bodies of one server. The large ones that are being received or wait for their turn hold no more memory than
    two of the largest that are allowed."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES, arrival_s: float = ARRIVAL_S) -> None:
        self._max_bytes = max_bytes
        self._arrival_s = arrival_s
        self._room = 2 * max_bytes
        self._room_changed = asyncio.Condition()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def read(
        self, parts: AsyncIterable[bytes], num_declared: int | None, make: Callable[[bytes], T]
    ) -> AsyncIterator[T]:
        """What `make` makes of a body, which comes in `parts` and says that it is `num_declared` bytes long.

        The block is for whatever takes time or memory because the body is large: no other large one is worked on in
        it. Raises AkvError for a body that is too large or takes too long to arrive, and what `make` raises.
        """
        size = self._max_bytes if num_declared is None else num_declared
        async with self._held(size if LARGE_BYTES < size <= self._max_bytes else 0):
            data = await self._received(parts)
            if len(data) <= LARGE_BYTES:
                yield make(data)
                return
            async with self._turn:
                yield await asyncio.to_thread(make, data)

    @asynccontextmanager
    async def _held(self, num_bytes: int) -> AsyncIterator[None]:
        if not num_bytes:
            yield
            return
        async with self._room_changed:
            await self._room_changed.wait_for(lambda: self._room >= num_bytes)
            self._room -= num_bytes
        try:
            yield
        finally:
            self._room += num_bytes
            async with self._room_changed:
                self._room_changed.notify_all()

    async def _received(self, parts: AsyncIterable[bytes]) -> bytes:
        """The body, if it is not too large. What is beyond the bound is read and thrown away for a while, so that a
        client that only listens once it has sent everything hears the refusal."""
        kept: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._arrival_s):
                async for part in parts:
                    size += len(part)
                    if size <= self._max_bytes:
                        kept.append(part)
                    elif size > 8 * self._max_bytes:
                        break
                    else:
                        kept.clear()
        except TimeoutError:
            message = f"the body did not arrive within {self._arrival_s:g} s"
            raise AkvError("invalid_request", message, status=408) from None
        if size > self._max_bytes:
            raise AkvError("request_too_large", f"the body is larger than {self._max_bytes} bytes")
        return b"".join(kept)
