"""A code agent of smolagents. What it observed leaves the cache when it is old; nothing is prefilled again."""

import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, tool

import akv_sdk
from akv_sdk.integrations import in_session
from akv_sdk.integrations.smolagents import AkvStep
from akv_sdk.types import LayoutReply

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


@tool
def read_file(path: str, limit: int = 30) -> str:
    """Reads the beginning of a file.

    Args:
        path: of the file.
        limit: how many lines.
    """
    return "\n".join(Path(path).read_text().splitlines()[:limit])


def report(layout: LayoutReply) -> None:
    print(f"dropped {layout.changed}, visible {layout.visible_tokens} of {layout.stream_tokens} tokens")


with akv_sdk.Client(URL) as akv, akv.session() as session:
    extra = in_session(None, session.name)
    model = OpenAIModel("default", api_base=f"{URL}/v1", api_key="none", extra_body=extra, max_tokens=300)
    step = AkvStep(session, akv_sdk.LastNObservations(1), report)
    agent = CodeAgent([read_file], model, step_callbacks=[step], verbosity_level=0)
    print(agent.run("Find the bug."))
