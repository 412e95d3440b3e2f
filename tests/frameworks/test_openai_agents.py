"""openai-agents: its runner keeps the conversation as Responses items and writes chat messages from them each turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import akv_sdk
from akv_sdk.types import LayoutReply
from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, ScriptedServer, read_file, scripted

agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-frameworks")
from openai import AsyncOpenAI  # noqa: E402

from akv_sdk.integrations import openai_agents  # noqa: E402

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


def test_the_model_keeps_to_its_session_and_leaves_what_the_runner_keeps(loaded: LoadedModel) -> None:
    """Two runs of one conversation, the second on what the first has kept, with a tool that answers in parts."""
    layouts: list[LayoutReply] = []

    def read_parts(path: str, limit: float = 3) -> Any:
        return [agents.ToolOutputText(text=line) for line in read_file(path, limit).splitlines()]

    async def main(agent: ScriptedServer) -> list[Any]:
        client = AsyncOpenAI(base_url=agent.url, api_key="none", max_retries=0)
        async with akv_sdk.AsyncClient(agent.root) as akv, client:
            chat = agents.OpenAIChatCompletionsModel("default", client)
            policy = akv_sdk.LastNObservations(1)
            model = openai_agents.AkvModel(chat, akv.session("agent"), policy, layouts.append)
            tool = agents.function_tool(read_parts, name_override="read_file")
            settings = agents.ModelSettings(extra_body={"akv": {"on_miss": "forget"}, "top_k": 5})
            coder = agents.Agent("coder", instructions="You code.", model=model, tools=[tool], model_settings=settings)
            config = agents.RunConfig(call_model_input_filter=openai_agents.mark_outputs)
            streamed = agents.Runner.run_streamed(coder, "Find the bug.", run_config=config)
            await answer_of(streamed)
            more = [*streamed.to_input_list(), {"role": "user", "content": "Is that all?"}]
            return (await agents.Runner.run(coder, more, run_config=config)).to_input_list()

    with scripted(loaded, [*ANSWERS, "Yes."], drop_before=None) as agent:
        kept = asyncio.run(main(agent))
    agent.check_each_turn_prefills_only_what_is_new()
    agent.check_observations_are_blocks(False, False, False, False, True)
    assert "ephemeral_observation" not in str(kept)
    for exchange in agent.exchanges:
        assert exchange.request["akv"] == {"on_miss": "forget", "session": "agent"}
        assert exchange.request["top_k"] == 5
    assert [layout.dropped_tokens for layout in layouts] == [e.akv.dropped_tokens for e in agent.exchanges[1:]]
    assert sum(layout.changed for layout in layouts) == layouts[-1].dropped_tokens


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    with scripted(models["plain"], ANSWERS, drop_before=None) as agent:
        output = run_example("agent_openai_agents.py", agent)
    agent.check_each_turn_prefills_only_what_is_new()
    agent.check_observations_are_blocks(False, False, False, True, True)
    assert output.strip().endswith("It is done.")
