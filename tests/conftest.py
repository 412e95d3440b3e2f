"""Fixtures that more than one test module needs."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import pytest
from hypothesis import settings

import akv_sdk
from akv_server import files, tokenizer_files
from akv_server.chat import Chat
from akv_server.tokenizer import Tokenizer
from tests.chats import SPECIAL, TEMPLATES
from tests.tokenizers_for_tests import save, small_tokenizer

if TYPE_CHECKING:
    from openai import OpenAI

    from akv_server.loader import LoadedModel
    from tests.server import Server

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
settings.register_profile("akv", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("akv")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden values and real trajectories that lies beside the project; absent in a bare clone."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip("golden values and trajectories (../shared) are not beside this clone")
    return folder


@pytest.fixture(scope="session")
def default_tokenizer() -> Tokenizer:
    """The default model's tokenizer, from its GGUF file."""
    return tokenizer_files.load(files.resolve("default"))


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory) -> dict[str, Path]:
    """By the name of a template of `tests/chats.py`, a model's folder with it and a small tokenizer."""
    base = tmp_path_factory.mktemp("chat")
    return {
        name: save(
            small_tokenizer(kind, SPECIAL),
            base / name,
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            chat_template=template,
        )
        for name, (kind, template) in TEMPLATES.items()
    }


@pytest.fixture(scope="session")
def chats(model_folders) -> dict[str, Chat]:
    return {name: Chat(tokenizer_files.from_directory(folder)) for name, folder in model_folders.items()}


@pytest.fixture(scope="session")
def default_chat(default_tokenizer) -> Chat:
    return Chat(default_tokenizer)


# A server, imported only where one is asked for: most tests need none, and no torch.


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model with a folder to itself."""
    from tests.server import load_tiny

    return load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    """A real server of the tiny model, with a pool of 4,096 tokens."""
    from tests.server import serving_model

    with serving_model(loaded) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
def name(server: Server) -> Iterator[str]:
    """A fresh session name; whatever a test did, the cache must still hold together after it."""
    yield uuid4().hex
    server.engine.check()


class Blocking:
    """A client, session or stream of the SDK's asyncio half, driven as if it were of the other: what is awaitable is
    awaited on `loop`. Lets one test hold both twins to the same behaviour."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.inner, self._loop = inner, loop

    def _outside(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            value = self._loop.run_until_complete(value)
        return Blocking(value, self._loop) if type(value).__name__.startswith("Async") else value

    def __getattr__(self, name: str) -> Any:
        if name == "close" and hasattr(self.inner, "aclose"):
            name = "aclose"
        value = getattr(self.inner, name)
        return (lambda *args, **kwargs: self._outside(value(*args, **kwargs))) if callable(value) else value

    def __iter__(self) -> Blocking:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run_until_complete(anext(self.inner))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Blocking:
        self._loop.run_until_complete(self.inner.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.run_until_complete(self.inner.__aexit__(*error))


@pytest.fixture(params=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`connect(transport=…)` gives an SDK client, in turn each of the twins; all are closed at the end."""
    loop = asyncio.new_event_loop()
    clients: list[Any] = []

    def connect(**options: Any) -> Any:
        client = getattr(akv_sdk, request.param)("http://akv.test", **options)
        clients.append(client if request.param == "Client" else Blocking(client, loop))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    loop.close()
