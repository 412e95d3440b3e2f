"""An agent of openai-agents. What its tool said leaves the cache when it is old; nothing is prefilled again."""

import asyncio
import sys
from pathlib import Path

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

import akv_sdk
from akv_sdk.integrations.openai_agents import AkvModel, mark_outputs
from akv_sdk.types import LayoutReply

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


@function_tool
def read_file(path: str, limit: float = 30) -> str:
    """Reads the beginning of a file."""
    return "\n".join(Path(path).read_text().splitlines()[: int(limit)])


def report(layout: LayoutReply) -> None:
    print(f"dropped {layout.changed}, visible {layout.visible_tokens} of {layout.stream_tokens} tokens")


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    async with akv_sdk.AsyncClient(URL) as akv, akv.session() as session, client:
        chat = OpenAIChatCompletionsModel("default", client)
        model = AkvModel(chat, session, akv_sdk.LastNObservations(1), report)
        config = RunConfig(model=model, call_model_input_filter=mark_outputs, tracing_disabled=True)
        agent = Agent(
            "coder", instructions="You code.", tools=[read_file], model_settings=ModelSettings(max_tokens=300)
        )
        result = await Runner.run(agent, "Find the bug.", run_config=config)
        print(result.final_output)


asyncio.run(main())
