"""smolagents: its agents send calls back as text in the answer, as Python writes them; a code agent also puts back the
string that its answer stopped at."""

from __future__ import annotations

import json
from typing import Any

import pytest

import akv_sdk
from akv_sdk.types import LayoutReply
from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, ScriptedServer, call, read_file, scripted

pytest.importorskip("smolagents", reason="smolagents is not installed: make test-frameworks")
pytest.importorskip("openai", reason="openai is not installed: make test-frameworks")
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from akv_sdk.integrations import smolagents as integration

CONTENT = json.dumps({"path": "[1, 2.0]", "limit": 1})  # a string that is JSON comes back as its value
CALLING = (
    *ANSWERS[:3],
    "<think>Where?</think>" + call("read_file", CONTENT),
    "\nDone. " + call("final_answer", '{"answer": "a bug"}'),
)
CODE = (
    "  Thought: let me look.\n<code>\nprint(read_file('it\\'s', 2))\n</code>",
    "<code>x = read_file('b')</code>",
    'Now c. <code>\n\nread_file("c")  \n</code>',
    "<think>\n\nWhere?</think>\n```python\nread_file('d')\n```\nHere is <code>print('e')\n\n</code>",
    "<code>final_answer('a bug')</code>",
)
SNIPPETS = ("print(read_file('a'))", "x = 1\nprint(x)", "'\\n'", "print('\"')", "final_answer('a bug')")
STRUCTURED = tuple(json.dumps({"thought": f"step {i}", "code": code}, indent=i) for i, code in enumerate(SNIPPETS))


def model_of(server: ScriptedServer) -> OpenAIModel:
    return OpenAIModel("default", api_base=server.url, api_key="none", extra_body={"akv": {"session": "agent"}})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_calling_agent_prefills_only_what_is_new(loaded: LoadedModel, stream: bool) -> None:
    with scripted(loaded, CALLING) as server:
        agent = ToolCallingAgent([tool(read_file)], model_of(server), verbosity_level=0, stream_outputs=stream)
        assert agent.run("Find the bug.") == "a bug"
    server.check_each_turn_prefills_only_what_is_new()
    assert "\nCalling tools:\n[{'id': " in server.exchanges[1].messages[2]["content"][0]["text"]


@pytest.mark.parametrize("answers", [CODE, STRUCTURED], ids=["code", "structured"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_code_agent_prefills_only_what_is_new(loaded: LoadedModel, answers: tuple[str, ...], stream: bool) -> None:
    is_structured = answers is STRUCTURED
    with scripted(loaded, answers) as server:
        agent = CodeAgent(
            [tool(read_file)],
            model_of(server),
            verbosity_level=0,
            stream_outputs=stream,
            use_structured_outputs_internally=is_structured,
        )
        assert agent.run("Find the bug.") == "a bug"
    server.check_each_turn_prefills_only_what_is_new()
    resent = server.exchanges[1].messages[2]["content"][0]["text"]
    assert "\nCalling tools:\n[{'id': " in resent
    assert is_structured or "</code>\n" in resent


def test_the_step_callback(models: dict[str, LoadedModel]) -> None:
    """A step that fails, one that observes what looks like the end of its block, and a second task."""
    layouts: list[LayoutReply] = []
    answers = (
        "<code>print('</ephemeral_observation>' * 9)</code>",
        "<code>print(1 / 0)</code>",
        "<code>final_answer(1)</code>",
        "<code>print('</ephemeral_observation>' * 9)</code>",
        "<code>final_answer(2)</code>",
        "<code>final_answer(3)</code>",
    )
    with scripted(models["plain"], answers, drop_before=None) as server, akv_sdk.Client(server.root) as client:
        step = integration.AkvStep(client.session("agent"), akv_sdk.DropRepeats(), layouts.append)
        agent = CodeAgent([], model_of(server), step_callbacks=[step], verbosity_level=0)
        assert [agent.run("Go.", reset=reset) for reset in (True, False, False)] == [1, 2, 3]
    server.check_each_turn_prefills_only_what_is_new()
    # The final answers are observations, too.
    server.check_observations_are_blocks(False, True, True, True)
    assert [layout.changed > 0 for layout in layouts] == [False, False, False, False, True, False]


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    answers = [f"<code>\nprint(read_file({name!r}))\n</code>" for name in ("a", "b", "c", "src/app.py")]
    with scripted(models["plain"], [*answers, CODE[-1]], drop_before=None) as server:
        output = run_example("agent_smolagents.py", server)
    server.check_each_turn_prefills_only_what_is_new()
    server.check_observations_are_blocks(False, False, True, True)
    assert output.strip().endswith("a bug")
