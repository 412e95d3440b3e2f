"""Models for all frameworks' tests, loaded once."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from akv_server import loader
from akv_server.loader import LoadedModel
from tests.chats import QWEN_LIKE
from tests.frameworks.harness import ScriptedServer, read_file
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


@pytest.fixture
def run_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, ScriptedServer], str]:
    """Runs a file of `examples/integrations` against a server, in a folder with the files that `ANSWERS` reads, and
    gives what it printed."""
    examples = Path(__file__).resolve().parents[2] / "examples" / "integrations"
    for name in ("src/app.py", "naïve é.txt", "a", "b", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(read_file(name, 30))

    def run(name: str, agent: ScriptedServer) -> str:
        path = str(examples / name)
        assert len(Path(path).read_text().splitlines()) <= 40
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [path, agent.root])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run
