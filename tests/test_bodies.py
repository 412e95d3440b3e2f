"""Request bodies on their way in: large ones wait for room and for their turn, and bad ones cost no more than good."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from akv_sdk import types
from akv_server.bodies import LARGE_BYTES, Bodies
from akv_server.errors import AkvError
from akv_server.messages import MessagesBody
from akv_server.requests import MAX_FIELDS, ChatBody, CompletionBody, parse, read_json

MAX_BYTES = 2 * LARGE_BYTES


class Client:
    """Sends `size` bytes in two parts, the second once it is let."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_read = 0
        self.go_on = asyncio.Event()

    async def parts(self) -> AsyncIterator[bytes]:
        for i, part in enumerate((b"a" * (self.size // 2), b"b" * (self.size - self.size // 2))):
            if i:
                await self.go_on.wait()
            self.num_read += len(part)
            yield part


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_large_body_is_not_read_until_there_is_room_and_a_small_one_is() -> None:
    async def main() -> None:
        bodies = Bodies(MAX_BYTES)

        async def send(client: Client, declared: int | None) -> bytes:
            async with bodies.read(client.parts(), declared, bytes) as data:
                return data

        clients = [Client(MAX_BYTES) for _ in range(3)]
        declared = (MAX_BYTES, None, MAX_BYTES)  # one that does not say how much comes may send the most
        tasks = [asyncio.create_task(send(*one)) for one in zip(clients, declared, strict=True)]
        await settle()
        assert [client.num_read for client in clients] == [LARGE_BYTES, LARGE_BYTES, 0]
        small = Client(100)
        small.go_on.set()
        assert len(await send(small, 100)) == 100
        clients[0].go_on.set()
        assert len(await tasks[0]) == MAX_BYTES
        await settle()
        assert clients[2].num_read == LARGE_BYTES
        for task in tasks[1:]:  # they leave before they have sent all: their room is free again
            task.cancel()
        await asyncio.wait(tasks[1:])
        again = [Client(MAX_BYTES) for _ in range(2)]
        late = [asyncio.create_task(send(client, MAX_BYTES)) for client in again]
        await settle()
        assert [client.num_read for client in again] == [LARGE_BYTES, LARGE_BYTES]
        for client in again:
            client.go_on.set()
        assert [len(data) for data in await asyncio.gather(*late)] == [MAX_BYTES, MAX_BYTES]

    asyncio.run(main())


def test_of_large_bodies_one_at_a_time_is_worked_on_and_in_a_thread() -> None:
    async def main() -> None:
        bodies = Bodies(MAX_BYTES)
        at_once: list[int] = []
        threads: list[threading.Thread] = []
        running = 0

        def make(data: bytes) -> int:
            threads.append(threading.current_thread())
            return len(data)

        async def send(size: int) -> None:
            nonlocal running
            client = Client(size)
            client.go_on.set()
            async with bodies.read(client.parts(), size, make):
                running += 1
                at_once.append(running)
                await asyncio.sleep(0.01)
                running -= 1

        await asyncio.gather(*[send(LARGE_BYTES + 1) for _ in range(4)])
        assert at_once == [1, 1, 1, 1]
        assert threading.main_thread() not in threads
        at_once.clear()
        threads.clear()
        await asyncio.gather(*[send(LARGE_BYTES) for _ in range(4)])
        assert max(at_once) == 4
        assert set(threads) == {threading.main_thread()}

    asyncio.run(main())


def test_a_body_that_takes_too_long_is_refused_and_its_room_is_free() -> None:
    async def main() -> None:
        bodies = Bodies(MAX_BYTES, arrival_s=0.01)
        for _ in range(3):
            with pytest.raises(AkvError, match="did not arrive within") as raised:
                async with bodies.read(Client(MAX_BYTES).parts(), MAX_BYTES, bytes):
                    raise AssertionError("it has arrived")
            assert (raised.value.status, raised.value.code) == (408, "invalid_request")

    asyncio.run(main())


OPS = {"op": "drop", "at": 5, "start": 0}
LISTS: tuple[tuple[type[BaseModel], dict[str, Any], str, Any], ...] = (
    (CompletionBody, {}, "prompt", "x"),
    (CompletionBody, {"prompt": "x"}, "stop_token_ids", "x"),
    (CompletionBody, {"prompt": "x"}, "stop", 1),
    (ChatBody, {}, "messages", 1),
    (ChatBody, {"messages": [{}]}, "tools", 1),
    (MessagesBody, {"max_tokens": 1}, "messages", {"role": "system"}),
    (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, "tools", {}),
    (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, "system", {"type": "image"}),
    (types.AkvRequest, {}, "ops", OPS),
    (types.AkvRequest, {}, "marks", {"message": -1}),
    (types.MessageMarking, {}, "token_ids", -1),
    (types.MessageMarking, {}, "tags", 1),
    (types.ContextManagement, {}, "edits", {"type": "none"}),
    (types.DropRequest, {"session": "s"}, "spans", [1]),
    (types.DropRequest, {"session": "s"}, "blocks", 1),
    (types.DropRequest, {"session": "s"}, "pages", -1),
    (types.RestoreRequest, {"session": "s"}, "spans", [1]),
    (types.RenderRequest, {}, "messages", 1),
    (types.DetokenizeRequest, {}, "tokens", -1),
)


@pytest.mark.parametrize(("kind", "body", "name", "bad"), LISTS, ids=[f"{k.__name__}.{n}" for k, _, n, _ in LISTS])
def test_a_list_of_misfits_is_one_error(kind: type[BaseModel], body: dict[str, Any], name: str, bad: Any) -> None:
    def num_errors(num_items: int) -> int:
        with pytest.raises(ValidationError) as raised:
            kind.model_validate({**body, name: [bad] * num_items})
        return raised.value.error_count()

    assert num_errors(60) == num_errors(1)
    with pytest.raises(AkvError) as raised:
        parse(kind, {**body, name: [bad] * 60})
    assert (raised.value.param or "").startswith(f"{name}[0]")


def test_an_object_with_too_many_fields_is_refused_before_each_is_looked_at() -> None:
    def body(num_fields: int) -> bytes:
        return b'{"akv": {%s}}' % b", ".join(b'"f%d": 0' % i for i in range(num_fields))

    assert len(read_json(body(MAX_FIELDS))["akv"]) == MAX_FIELDS
    with pytest.raises(AkvError, match=f"more than {MAX_FIELDS} fields") as raised:
        read_json(body(MAX_FIELDS + 1))
    assert raised.value.code == "invalid_request"
