"""mini-swe-agent. What its commands printed leaves the cache when it is old; nothing is prefilled again."""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment

import akv_sdk
from akv_sdk.integrations.mini_swe_agent import AkvModel
from akv_sdk.types import LayoutReply

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def report(layout: LayoutReply) -> None:
    print(f"dropped {layout.changed}, visible {layout.visible_tokens} of {layout.stream_tokens} tokens")


model = AkvModel(
    model_name="openai/default",
    model_kwargs={"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 300},
    policy=akv_sdk.LastNObservations(1),
    report=report,
)
agent = DefaultAgent(
    model,
    LocalEnvironment(),  # what the model says is run on this machine: put a container in its place
    system_template="You code. Call bash. When you are done: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    instance_template="{{ task }}",
    step_limit=20,
)
print(agent.run("Find the bug.")["exit_status"])
