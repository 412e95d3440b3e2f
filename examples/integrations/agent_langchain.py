"""A LangChain agent. What its tool said leaves the cache when it is old; nothing is prefilled again."""

import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import akv_sdk
from akv_sdk.integrations.langchain import AkvMiddleware
from akv_sdk.types import LayoutReply

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def read_file(path: str, limit: float = 30) -> str:
    """Reads the beginning of a file."""
    return "\n".join(Path(path).read_text().splitlines()[: int(limit)])


def report(layout: LayoutReply) -> None:
    print(f"dropped {layout.changed}, visible {layout.visible_tokens} of {layout.stream_tokens} tokens")


with akv_sdk.Client(URL) as akv, akv.session() as session:
    middleware = AkvMiddleware(akv, session.name, akv_sdk.LastNObservations(1), report)
    model = ChatOpenAI(model="default", base_url=f"{URL}/v1", api_key=SecretStr("none"), max_completion_tokens=300)
    agent = create_agent(model, [read_file], system_prompt="You code.", middleware=[middleware])
    result = agent.invoke({"messages": [HumanMessage("Find the bug.")]})
    print(result["messages"][-1].text)
