"""smolagents: a step callback that marks what an agent observes and drops from its session.

    model = OpenAIModel("default", api_base=f"{url}/v1", api_key="none", extra_body=in_session(None, session.name))
    agent = CodeAgent(tools, model, step_callbacks=[AkvStep(session, policy)])

A plan (`planning_interval`) and the answer of an agent that is out of steps are asked for in conversations of their
own: in the same session they make its stream diverge, and what was dropped is decided again.
"""

from __future__ import annotations

from typing import Any

from smolagents import ActionStep, MultiStepAgent
from smolagents.models import get_clean_message_list, tool_role_conversions

from akv_sdk.integrations import Report, drop, log_drops, marked
from akv_sdk.policies import Policy
from akv_sdk.session import Session


class AkvStep:
    """After each step its observation is an ephemeral block in the agent's memory, `policy` drops what it names of what
    the model has seen, and `report` is told."""

    def __init__(self, session: Session, policy: Policy | None = None, report: Report = log_drops) -> None:
        self._session = session
        self._policy = policy
        self._report = report

    def __call__(self, step: ActionStep, agent: MultiStepAgent) -> None:
        if step.observations:
            # A user message will hold it, in which tags count wherever they stand.
            text = step.observations.replace("ephemeral_observation", "ephemeral-observation")
            step.observations = marked(text, f"step-{len(agent.memory.steps)}")
        seen: list[dict[str, Any]] = get_clean_message_list(agent.write_memory_to_messages(), tool_role_conversions)
        drop(self._session, seen, self._policy, self._report)
