"""From a loaded model to a server that listens: sizes the pool, starts the engine, runs uvicorn. Owns no state."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from akv_server.app import create_app
from akv_server.completions import Completions
from akv_server.engine import Engine, EngineConfig
from akv_server.errors import AkvError
from akv_server.journal import Journal
from akv_server.loader import LoadedModel
from akv_server.sessions import DAY_S, MAX_SESSIONS

PAGE_SIZE = 16
POOL_SHARE = 0.5  # of the memory that is free once the weights are loaded
GRACE_S = 5  # for answers under way when the server is told to stop


def default_pool_tokens(loaded: LoadedModel, device: str) -> int:
    """Room for one full window, or for as much as half of the free memory holds."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
    else:
        free = _available_bytes()
    return min(loaded.config.max_positions, max(int(free * POOL_SHARE / pool_bytes(loaded, 1)), PAGE_SIZE))


def _available_bytes() -> int:
    """Memory of this machine that can be had without swapping; half of all of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def pool_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Bytes that K and V of so many tokens take, over all layers."""
    config = loaded.config
    num_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return num_tokens * num_values * loaded.model.kv_dtype.itemsize


@contextmanager
def running(
    loaded: LoadedModel,
    *,
    pool_tokens: int,
    max_running: int,
    kv_disk: tuple[Path, int] | None = None,
    kv_host_bytes: int = 0,
    journal: Journal | None = None,
    session_ttl_s: float = DAY_S,
    max_sessions: int = MAX_SESSIONS,
    auto_drop: Callable[[str], bool] = lambda tenant: False,
) -> Iterator[Completions]:
    """The service around a started engine, which is stopped at the end. `kv_disk` is a file for evicted KV and its
    limit in bytes. Raises AkvError where the journal belongs to another model, or that file cannot be used."""
    if journal is not None:
        journal.bind(loaded.fingerprint, loaded.config.name)
    num_pages = -(-pool_tokens // PAGE_SIZE)
    disk_path, disk_bytes = kv_disk or (None, 0)
    engine = Engine(
        loaded.model,
        EngineConfig(
            num_pages,
            PAGE_SIZE,
            max_running=max_running,
            disk_path=disk_path,
            disk_bytes=disk_bytes,
            host_bytes=kv_host_bytes,
        ),
    )
    engine.start()
    try:
        yield Completions(
            engine,
            loaded.tokenizer,
            loaded.config,
            pool=engine.config,
            journal=journal,
            session_ttl_s=session_ttl_s,
            max_sessions=max_sessions,
            auto_drop=auto_drop,
        )
    finally:
        engine.stop()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError, most often because the port is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, which gives answers under way a grace when it is told to stop, and then ends them with an error."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopped = AkvError("internal_error", "the server was stopped before the answer was complete")
        ending = asyncio.get_running_loop().call_later(GRACE_S, self._engine.fail_all, stopped)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def make_server(service: Completions, api_keys: Sequence[tuple[str, str]]) -> Server:
    app = create_app(service, api_keys=tuple(api_keys))
    assert isinstance(service.engine, Engine)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2 * GRACE_S, ws="none"
    )
    return Server(config, service.engine)


def serve(listener: socket.socket, service: Completions, api_keys: Sequence[tuple[str, str]]) -> None:
    """Serves until told to stop (SIGINT or SIGTERM, which then raise KeyboardInterrupt here)."""
    asyncio.run(make_server(service, api_keys).serve(sockets=[listener]))
