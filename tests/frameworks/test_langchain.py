"""LangChain and LangGraph: an agent's graph keeps messages of its own and writes the conversation anew each turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import akv_sdk
from akv_sdk.types import LayoutReply
from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, read_file, scripted

pytest.importorskip("langchain.agents", reason="langchain is not installed: make test-frameworks")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-frameworks")
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from akv_sdk.integrations.langchain import AkvMiddleware

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


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_an_agent_that_has_a_name_puts_it_on_its_answers(loaded: LoadedModel, streaming: bool) -> None:
    with scripted(loaded, ANSWERS) as agent:
        model = model_of(agent.url, streaming=streaming, extra_body={"akv": {"session": "agent"}})
        create_agent(model, [read_file], system_prompt="You code.", name="researcher").invoke(TASK)
    sent = [m.get("name") for m in agent.exchanges[-1].messages if m["role"] == "assistant"]
    assert sent == ["researcher"] * 4
    agent.check_each_turn_prefills_only_what_is_new()


def test_arguments_are_written_again_and_content_comes_as_blocks(models: dict[str, LoadedModel]) -> None:
    """What makes the test above one: the framework does not resend what the model wrote."""
    with scripted(models["plain"], ANSWERS) as agent:
        model = model_of(agent.url, output_version="v1", extra_body={"akv": {"session": "agent"}})
        create_agent(model, [read_file], system_prompt="You code.").invoke(TASK)
    answers = [message for message in agent.exchanges[-1].messages if message["role"] == "assistant"]
    assert answers[0]["content"] == [{"type": "text", "text": "  Let me look."}]
    assert answers[1]["tool_calls"][0]["function"]["arguments"] == '{"limit": 5, "path": "naïve é.txt"}'
    assert answers[2]["tool_calls"][1]["function"]["arguments"] == '{"path": "b", "limit": 10.0}'


def test_a_graph_of_ones_own(loaded: LoadedModel) -> None:
    """LangGraph without LangChain's agent."""
    with scripted(loaded, ANSWERS) as agent:
        model = model_of(agent.url, extra_body={"akv": {"session": "agent"}}).bind_tools([read_file])
        graph = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode([read_file]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        assert graph.compile().invoke(TASK)["messages"][-1].text.strip() == "It is done."
    agent.check_each_turn_prefills_only_what_is_new()


def read_parts(path: str, limit: float = 3) -> list[Any]:
    """Reads a file, and answers as tools of MCP servers do."""
    return [{"type": "text", "text": line} for line in read_file(path, limit).splitlines()]


def test_the_middleware_leaves_what_the_graph_keeps(loaded: LoadedModel) -> None:
    """Two runs on one thread, waited for, with a tool that answers in parts."""
    layouts: list[LayoutReply] = []
    on_thread: Any = {"configurable": {"thread_id": "t1"}}

    async def main(graph: Any) -> list[Any]:
        await graph.ainvoke(TASK, on_thread)
        more = {"messages": [{"role": "user", "content": "Is that all?"}]}
        return (await graph.ainvoke(more, on_thread))["messages"]

    with scripted(loaded, [*ANSWERS, "Yes."], drop_before=None) as agent, akv_sdk.Client(agent.root) as akv:
        middleware = AkvMiddleware(akv, "agent", akv_sdk.LastNObservations(1), layouts.append)
        model = model_of(agent.url, extra_body={"akv": {"on_miss": "forget"}, "top_k": 5})
        tool = StructuredTool.from_function(read_parts, name="read_file")
        graph = create_agent(
            model, [tool], system_prompt="You code.", middleware=[middleware], checkpointer=InMemorySaver()
        )
        kept = asyncio.run(main(graph))
    agent.check_each_turn_prefills_only_what_is_new()
    agent.check_observations_are_blocks(False, False, False, False, True)
    assert "ephemeral_observation" not in str(kept)
    for exchange in agent.exchanges:
        assert exchange.request["akv"] == {"on_miss": "forget", "session": "agent-t1"}
        assert exchange.request["top_k"] == 5
    assert [layout.dropped_tokens for layout in layouts] == [e.akv.dropped_tokens for e in agent.exchanges[1:]]
    assert sum(layout.changed for layout in layouts) == layouts[-1].dropped_tokens


def test_the_example(models: dict[str, LoadedModel], run_example: Any) -> None:
    with scripted(models["plain"], ANSWERS, drop_before=None) as agent:
        output = run_example("agent_langchain.py", agent)
    agent.check_each_turn_prefills_only_what_is_new()
    agent.check_observations_are_blocks(False, False, False, True, True)
    assert output.strip().endswith("It is done.")
