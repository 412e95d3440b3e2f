"""An agent of pydantic-ai. What its tool said leaves the cache when it is old; nothing is prefilled again."""

import asyncio
import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import akv_sdk
from akv_sdk.integrations.pydantic_ai import AkvCapability
from akv_sdk.types import LayoutReply

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def read_file(path: str, limit: float = 30) -> str:
    """Reads the beginning of a file."""
    return "\n".join(Path(path).read_text().splitlines()[: int(limit)])


def report(layout: LayoutReply) -> None:
    print(f"dropped {layout.changed}, visible {layout.visible_tokens} of {layout.stream_tokens} tokens")


async def main() -> None:
    async with akv_sdk.AsyncClient(URL) as akv:
        provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
        model = OpenAIChatModel("default", provider=provider, settings={"max_tokens": 300})
        capability = AkvCapability(akv, akv_sdk.LastNObservations(1), report)
        agent = Agent(model, instructions="You code.", tools=[read_file], capabilities=[capability])
        result = await agent.run("Find the bug.")
        print(result.output)


asyncio.run(main())
