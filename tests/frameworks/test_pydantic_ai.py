"""pydantic-ai: takes an answer apart (its reasoning is a part) and writes it anew each turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import pytest

import akv_sdk
from akv_sdk.types import LayoutReply
from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, ScriptedServer, call, read_file, scripted

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make test-frameworks")
pytest.importorskip("openai", reason="openai is not installed: make test-frameworks")
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from akv_sdk.integrations import pydantic_ai as integration

SESSION: Any = {"extra_body": {"akv": {"session": "agent"}}}


def model_of(server: ScriptedServer) -> OpenAIChatModel:
    return OpenAIChatModel("default", provider=OpenAIProvider(base_url=server.url, api_key="none"))


async def read_to_the_end(_: object, events: AsyncIterable[object]) -> None:
    """With it, a run asks for streams."""
    async for _ in events:
        pass


def read(path: str, limit: float = 3) -> dict[str, str]:
    """Reads the beginning of a file, and says so in an object."""
    return {"path": path, "text": read_file(path, limit)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_each_turn_prefills_only_what_is_new(loaded: LoadedModel, stream: bool) -> None:
    with scripted(loaded, ANSWERS) as server:
        agent = Agent(model_of(server), system_prompt="You code.", tools=[read_file], model_settings=SESSION)

        handler = read_to_the_end if stream else None
        output = agent.run_sync("Find the bug.", event_stream_handler=handler).output
        assert output.strip() == "It is done."
    server.check_each_turn_prefills_only_what_is_new()
    assert all(exchange.request.get("stream", False) == stream for exchange in server.exchanges)


def test_the_capability(loaded: LoadedModel) -> None:
    """Two runs of one conversation, the second with the messages of the first, on an agent with instructions, a system
    prompt, a tool that answers with an object, and one that asks for another try."""
    layouts: list[LayoutReply] = []
    answers = (
        "Ah. " + call("read", '{"path": "a", "limit": 9}') + call("guess", "{}"),
        call("read", '{"limit": 12, "path": "b"}'),
        "It was b.",
        call("read", '{"path": "a", "limit": 9}'),
        "It was b again.",
    )

    def guess() -> str:
        raise ModelRetry("guess again")

    async def run() -> None:
        async with akv_sdk.AsyncClient(server.root) as client:
            policy = akv_sdk.DropRepeats()
            agent = Agent(
                model_of(server),
                system_prompt="You code.",
                instructions="Be brief.",
                tools=[read, guess],
                capabilities=[integration.AkvCapability(client, policy, layouts.append)],
            )
            first = await agent.run("Find the bug.")
            assert first.output == "It was b."
            second = await agent.run("Really?", message_history=first.all_messages())
            assert second.output == "It was b again."
            assert "ephemeral" not in str(second.all_messages())
            await agent.run("Yes?", message_history=second.all_messages())

    with scripted(loaded, (*answers, "Yes."), drop_before=None) as server:
        asyncio.run(run())
    server.check_each_turn_prefills_only_what_is_new()
    assert [layout.changed > 0 for layout in layouts] == [False, False, False, False, True]
    server.check_observations_are_blocks(False, True, True)
    assert [span.role for span in server.exchanges[-1].akv.spans][:3] == ["system", "system", "user"]


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    with scripted(models["plain"], ANSWERS, drop_before=None) as server:
        output = run_example("agent_pydantic_ai.py", server)
    server.check_each_turn_prefills_only_what_is_new()
    server.check_observations_are_blocks(False, False, False, True, True)
    assert output.strip().endswith("It is done.")
