"""A client that leaves in the middle of a stream: nothing is written to it any more."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from akv_server.loader import LoadedModel
from tests.server import serving_model


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/messages"])
def test_nothing_is_written_to_who_has_left(loaded: LoadedModel, route: str, caplog: pytest.LogCaptureFixture) -> None:
    """The whole answer waits to be sent when the connection is reset: the loop stood still while it was computed."""
    loops: list[asyncio.AbstractEventLoop] = []
    go_on = threading.Event()

    def around(app: ASGIApp) -> ASGIApp:
        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            loops.append(asyncio.get_running_loop())
            await app(scope, receive, send)

        return noting

    prompt = {"prompt": [5] * 20} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a b"}]}
    body = json.dumps({**prompt, "model": "default", "max_tokens": 64, "temperature": 0, "stream": True})
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving_model(loaded, around=around) as server, caplog.at_level(logging.WARNING):
        where = urlsplit(server.url)
        assert where.hostname and where.port
        with socket.create_connection((where.hostname, where.port)) as client:
            client.sendall((head + body).encode())
            assert client.recv(1).startswith(b"H")
            loops[0].call_soon_threadsafe(go_on.wait, 30)
            while server.engine.stats()["running"]:
                time.sleep(0.005)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        go_on.set()
        assert server.client().get("/health").status_code == 200
    assert [record.getMessage() for record in caplog.records] == []
    assert server.engine.stats()["tokens_generated"] == 64
