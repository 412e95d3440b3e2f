"""openai-agents: its runner keeps the conversation as Responses items and writes chat messages from them each turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, ScriptedServer, read_file, scripted

agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-frameworks")
from openai import AsyncOpenAI  # noqa: E402

agents.set_tracing_disabled(True)


def agent_of(model: Any, **options: Any) -> Any:
    return agents.Agent(
        "coder", instructions="You code.", model=model, tools=[agents.function_tool(read_file)], **options
    )


async def answer_of(run: Any) -> str:
    """The final output of a run, streamed or not."""
    if isinstance(run, agents.RunResultStreaming):
        async for _ in run.stream_events():
            pass
        return run.final_output
    return (await run).final_output


@pytest.mark.parametrize("run", ["run", "run_streamed"])
def test_each_turn_prefills_only_what_is_new(loaded: LoadedModel, run: str) -> None:
    async def main(agent: ScriptedServer) -> str:
        async with AsyncOpenAI(base_url=agent.url, api_key="none", max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel("default", client)
            settings = agents.ModelSettings(extra_body={"akv": {"session": "agent"}})
            coder = agent_of(model, model_settings=settings)
            return await answer_of(getattr(agents.Runner, run)(coder, "Find the bug."))

    with scripted(loaded, ANSWERS) as agent:
        assert asyncio.run(main(agent)).strip() == "It is done."
    agent.check_each_turn_prefills_only_what_is_new()


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    with scripted(models["plain"], ANSWERS, drop_before=None) as agent:
        output = run_example("agent_openai_agents.py", agent)
    agent.check_each_turn_prefills_only_what_is_new()
    agent.check_observations_are_blocks(False, False, False, True, True)
    assert output.strip().endswith("It is done.")
