"""LangChain and LangGraph: an agent's graph keeps messages of its own and writes the conversation anew each turn."""

from __future__ import annotations

from typing import Any

import pytest

from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, read_file, scripted

pytest.importorskip("langchain.agents", reason="langchain is not installed: make test-frameworks")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-frameworks")
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

TASK: Any = {"messages": [{"role": "user", "content": "Find the bug."}]}


def model_of(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="default", base_url=url, api_key="none", max_retries=0, **options)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("version", ["v0", "v1"])
def test_each_turn_prefills_only_what_is_new(loaded: LoadedModel, streaming: bool, version: str) -> None:
    with scripted(loaded, ANSWERS) as agent:
        extra = {"extra_body": {"akv": {"session": "agent"}}}
        model = model_of(agent.url, streaming=streaming, output_version=version, **extra)
        graph = create_agent(model, [read_file], system_prompt="You code.")
        assert graph.invoke(TASK)["messages"][-1].text.strip() == "It is done."
    agent.check_each_turn_prefills_only_what_is_new()


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    with scripted(models["plain"], ANSWERS, drop_before=None) as agent:
        output = run_example("agent_langchain.py", agent)
    agent.check_each_turn_prefills_only_what_is_new()
    agent.check_observations_are_blocks(False, False, False, True, True)
    assert output.strip().endswith("It is done.")
