"""mini-swe-agent: a loop around litellm; its commands are calls of a tool, or blocks in the answer's text."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import akv_sdk
from akv_sdk.types import LayoutReply
from akv_server.loader import LoadedModel
from tests.frameworks.harness import ScriptedServer, call, scripted

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for one on the network
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(Path(tempfile.gettempdir()) / "akv-mini-swe-agent"))
pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: make test-frameworks")
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

from akv_sdk.integrations import mini_swe_agent as integration

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = ("printf 'a\\n b'", "echo '</ephemeral_observation>'", "false", "echo é", DONE)


def calls() -> list[str]:
    """The commands as calls, two of them at once, written as no framework would write them."""
    made = [call("bash", f'{{"command":   "{command}"}}'.replace("\\", "\\\\")) for command in COMMANDS]
    return [f"  Let me look.\n\n{made[0]}\n{made[3]}", f"<think>\n\nHm.</think>{made[1]}", *made[2:]]


def blocks() -> list[str]:
    return [f"\nTHOUGHT: hm\n\n```mswea_bash_command\n{command}\n```\n  " for command in COMMANDS]


def run(server: ScriptedServer, folder: Path, file: str, **config: Any) -> None:
    """An agent as its command line makes it from a file that comes with it, but for `config`."""
    settings = yaml.safe_load((package_dir / "config" / file).read_text())
    own = {"api_base": server.url, "api_key": "none", **config.pop("model_kwargs", {})}
    model_config = {**settings["model"], "cost_tracking": "ignore_errors", **config}
    model = get_model("openai/default", {**model_config, "model_kwargs": {**settings["model"]["model_kwargs"], **own}})
    templates = {name: settings["agent"][name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(model, LocalEnvironment(cwd=str(folder)), **templates, output_path=folder / "run.json")
    assert agent.run("Find the bug.")["exit_status"] == "Submitted"
    assert (folder / "run.json").read_text()


CASES = {"calls": ("mini.yaml", "litellm", calls()), "blocks": ("mini_textbased.yaml", "litellm_textbased", blocks())}
SESSION = {"extra_body": {"akv": {"session": "agent"}}}


@pytest.mark.parametrize(("file", "model_class", "answers"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("template", [{}, {"observation_template": integration.OBSERVATION_TEMPLATE}], ids=["", "own"])
def test_each_turn_prefills_only_what_is_new(
    loaded: LoadedModel, tmp_path: Path, file: str, model_class: str, answers: list[str], template: Any
) -> None:
    with scripted(loaded, answers) as server:
        run(server, tmp_path, file, model_class=model_class, model_kwargs=SESSION, **template)
    server.check_each_turn_prefills_only_what_is_new()
    if template:
        blocks = [block for span in server.exchanges[-1].akv.spans for block in span.blocks]
        ids = [block.id for block in blocks if block.kind == "observation"]
        assert ids == [f"step-{i}" for i in ((1, 1, 2, 3, 4) if model_class == "litellm" else (1, 2, 3, 4))]


def test_an_answer_that_it_does_not_keep(loaded: LoadedModel, tmp_path: Path) -> None:
    """One without a command. The conversation goes on without it, and so does the stream; what was dropped before it
    stays dropped."""
    answers = [*calls()[:3], "I have no idea.", *calls()[3:]]
    with scripted(loaded, answers) as server:
        run(server, tmp_path, "mini.yaml", model_kwargs=SESSION)
    without = server.exchanges[4]
    (warning,) = without.akv.warnings
    assert warning.startswith("stream_diverged: messages[9]")
    assert without.akv.dropped_tokens == server.exchanges[-1].akv.dropped_tokens == server.num_dropped > 0
    kept = without.akv.spans[8]
    new = without.akv.stream_tokens - without.num_generated - kept.end
    assert kept.role == "tool" and new - 4 <= without.akv.prefilled_tokens <= new


def test_the_model_class(loaded: LoadedModel, tmp_path: Path) -> None:
    """As a file names it; the observations of one turn, and then all, are blocks of their own."""
    answers = [*calls()[:4], *calls()[:1], calls()[4]]
    name = f"{integration.__name__}.{integration.AkvModel.__name__}"
    with scripted(loaded, answers, drop_before=None) as server:
        run(server, tmp_path, "mini.yaml", model_class=name, last_n_observations=2)
    server.check_each_turn_prefills_only_what_is_new()
    server.check_observations_are_blocks(False, False, False, True, True, True, True)


def test_a_policy_in_code(models: dict[str, LoadedModel]) -> None:
    layouts: list[LayoutReply] = []
    answers = [calls()[1], calls()[3], calls()[1], calls()[3], calls()[4]]
    with scripted(models["plain"], answers, drop_before=None) as server:
        model = integration.AkvModel(
            model_name="openai/default",
            model_kwargs={"api_base": server.url, "api_key": "none", "extra_body": {"seed": 1}},
            session="agent",
            policy=akv_sdk.DropRepeats(),
            report=layouts.append,
        )
        agent = DefaultAgent(model, LocalEnvironment(), system_template="You code.", instance_template="{{ task }}")
        assert agent.run("Find the bug.")["exit_status"] == "Submitted"
    server.check_each_turn_prefills_only_what_is_new()
    server.check_observations_are_blocks(False, True, True, True)
    assert [layout.changed > 0 for layout in layouts] == [False, False, False, True]
    assert {layout.session for layout in layouts} == {"agent"}
    assert server.exchanges[0].request["seed"] == 1


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    with scripted(models["plain"], calls(), drop_before=None) as server:
        output = run_example("agent_mini_swe_agent.py", server)
    server.check_each_turn_prefills_only_what_is_new()
    server.check_observations_are_blocks(False, False, False, True, True)
    assert output.strip().endswith("Submitted")
