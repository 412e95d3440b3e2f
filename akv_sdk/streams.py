"""Stream and AsyncStream: a streamed completion as an iterator of events. Thin twins, as the clients they read from.

Own the reply while it comes in. Know nothing of what its events mean, which `_events.py` reads, nor of a session: a
`Turn` says what to send, once the first event is asked for, and takes the whole reply in at its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import httpx

from akv_sdk import types
from akv_sdk._events import Event, StreamReader
from akv_sdk._transport import cut_short, transport_error
from akv_sdk._wire import Turn

if TYPE_CHECKING:
    from akv_sdk.client import AsyncClient, Client


class Stream:
    """A streamed completion: an iterator of events, and `final` once it has ended.

    The request is sent with the first `next`. Leaving early (`close`, the end of a `with`, dropping the last reference)
    disconnects, which ends the generation on the server.
    """

    def __init__(self, client: Client, turn: AbstractContextManager[Turn]) -> None:
        self._reader = StreamReader()
        self._events = _events(client, turn, self._reader)
        self._ahead: deque[Event] = deque()
        self._is_begun = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        if self._ahead:
            return self._ahead.popleft()
        self._is_begun = True
        return next(self._events)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._ahead.clear()
        self._events.close()

    def read_ahead(self) -> None:
        """Reads the rest of a reply that has begun; its events stay for whoever iterates. The server is done with a
        reply only when all of it was taken off its hands."""
        if self._is_begun:
            self._ahead.extend(self._events)

    @property
    def final(self) -> types.Completion:
        """The whole completion. Raises RuntimeError before the stream has ended."""
        return _ended(self._reader)


class AsyncStream:
    """`Stream` for `async for`. Where it is left early, `aclose` (or `async with`) disconnects at once; without that it
    happens when the event loop collects the iterator."""

    def __init__(self, client: AsyncClient, turn: AbstractContextManager[Turn]) -> None:
        self._reader = StreamReader()
        self._events = _async_events(client, turn, self._reader)
        self._ahead: deque[Event] = deque()
        self._is_begun = False
        self._reading = asyncio.Lock()  # one task may iterate while another reads ahead

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        async with self._reading:
            if self._ahead:
                return self._ahead.popleft()
            self._is_begun = True
            return await anext(self._events)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._ahead.clear()
        await self._events.aclose()

    async def read_ahead(self) -> None:
        if self._is_begun:
            async with self._reading:
                async for event in self._events:
                    self._ahead.append(event)

    @property
    def final(self) -> types.Completion:
        return _ended(self._reader)


def _events(client: Client, turn: AbstractContextManager[Turn], reader: StreamReader) -> Generator[Event, None, None]:
    with turn as asked:
        response = client._open(asked.call)
        try:
            for chunk in response.iter_bytes():
                yield from reader.push(chunk)
        except httpx.HTTPError as error:
            if reader.final is None:
                raise transport_error(error, asked.call) from error
        finally:
            response.close()
        if reader.final is None:
            raise cut_short(response)
        asked.take(reader.final)


async def _async_events(
    client: AsyncClient, turn: AbstractContextManager[Turn], reader: StreamReader
) -> AsyncGenerator[Event, None]:
    with turn as asked:
        response = await client._open(asked.call)
        try:
            async for chunk in response.aiter_bytes():
                for event in reader.push(chunk):
                    yield event
        except httpx.HTTPError as error:
            if reader.final is None:
                raise transport_error(error, asked.call) from error
        finally:
            await response.aclose()
        if reader.final is None:
            raise cut_short(response)
        asked.take(reader.final)


def _ended(reader: StreamReader) -> types.Completion:
    if reader.final is None:
        raise RuntimeError("final: the stream has not ended")
    return reader.final
