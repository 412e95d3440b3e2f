"""Models for all frameworks' tests, loaded once."""

from __future__ import annotations

import json

import pytest

from akv_server import loader
from akv_server.loader import LoadedModel
from tests.chats import QWEN_LIKE
from tests.models import CHAT_TEMPLATE, tiny_model

TEMPLATES = {"plain": CHAT_TEMPLATE, "qwen": QWEN_LIKE}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """Tiny models with a long window: `plain` has a template that knows no tools, as the default model's; `qwen` has
    one that writes tools and calls itself and closes a turn of results by what follows."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, template in TEMPLATES.items():
        path = tiny_model(folder, name=name, max_position_embeddings=32768)
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        found[name] = loader.load(str(path), weights="float32")
    return found


@pytest.fixture(params=list(TEMPLATES))
def loaded(models: dict[str, LoadedModel], request: pytest.FixtureRequest) -> LoadedModel:
    """Each of the models in turn."""
    return models[request.param]
