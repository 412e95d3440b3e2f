"""A real server for tests: a tiny model, uvicorn on a free loopback port, in a thread of this process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from akv_server import loader, serving
from akv_server.completions import Completions
from akv_server.engine import Engine
from akv_server.journal import Journal
from akv_server.loader import LoadedModel
from tests.models import tiny_model


@dataclass(frozen=True)
class Server:
    """Where it listens, and its inside: `engine` for counters, evicting and `check()`."""

    url: str
    service: Completions

    @property
    def engine(self) -> Engine:
        assert isinstance(self.service.engine, Engine)
        return self.service.engine

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": 60, **options})  # type: ignore[arg-type]


def load_tiny(folder: Path, **config: object) -> LoadedModel:
    """A tiny random Llama in float32 (2 layers, window 2048, vocabulary of bytes and a few words)."""
    return loader.load(str(tiny_model(folder, **config)), weights="float32")  # type: ignore[arg-type]


@contextmanager
def serving_model(
    loaded: LoadedModel,
    *,
    pool_tokens: int = 4096,
    api_keys: Sequence[tuple[str, str]] = (),
    journal: Journal | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Iterator[Server]:
    """Serves a loaded model until the block ends. `around` may put something between the network and the server."""
    listener = serving.listen("127.0.0.1", 0)
    with listener, serving.running(loaded, pool_tokens=pool_tokens, max_running=16, journal=journal) as service:
        server = serving.make_server(service, api_keys)
        server.config.app = around(server.config.app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn", daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        try:
            yield Server(serving.url(listener), service)
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive(), "the server did not stop"


@contextmanager
def akv_serve(*options: str) -> Iterator[tuple[str, int]]:
    """The command itself, as a process: its address and process id."""
    command = [sys.executable, "-m", "akv_server.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"serving +(http://\S+)/v1", line):
                yield found[1], process.pid
                break
        else:
            raise AssertionError("the server did not start")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
