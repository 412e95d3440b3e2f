"""OpenHands' SDK: keeps events, without what the model thought, and makes messages of them anew for each turn. It needs
Python 3.12 and goes with none of the others in one environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, read_file, scripted

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for one on the network
os.environ.setdefault("OPENHANDS_SUPPRESS_BANNER", "1")
os.environ.setdefault("LOG_AUTO_CONFIG", "false")  # else it writes everything that anybody logs to the console
pytest.importorskip("openhands.sdk", reason="openhands-sdk is not installed: make test-openhands")
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor, register_tool
from pydantic import SecretStr


class ReadFileAction(Action):
    path: str
    limit: float = 3


class ReadFileObservation(Observation):
    pass


class ReadFile(ToolExecutor[ReadFileAction, ReadFileObservation]):
    def __call__(self, action: ReadFileAction, conversation: Any = None) -> ReadFileObservation:
        return ReadFileObservation.from_text(text=read_file(action.path, action.limit))


class ReadFileTool(ToolDefinition[ReadFileAction, ReadFileObservation]):
    name = "read_file"

    @classmethod
    def create(cls, conv_state: Any = None, **params: Any) -> Sequence[ReadFileTool]:
        return [
            cls(
                description="Reads the beginning of a file.",
                action_type=ReadFileAction,
                observation_type=ReadFileObservation,
                executor=ReadFile(),
            )
        ]


register_tool("read_file", ReadFileTool)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_each_turn_prefills_only_what_is_new(loaded: LoadedModel, tmp_path: Path, stream: bool) -> None:
    with scripted(loaded, ANSWERS) as server:
        llm = LLM(
            model="openai/default",
            base_url=server.url,
            api_key=SecretStr("none"),
            usage_id="agent",
            stream=stream,
            num_retries=0,
            litellm_extra_body={"akv": {"session": "agent"}},
        )
        agent = Agent(llm=llm, tools=[Tool(name="read_file")])
        conversation = Conversation(agent=agent, workspace=tmp_path, visualizer=None)
        conversation.send_message("Find the bug.")
        conversation.run()
    server.check_each_turn_prefills_only_what_is_new()
