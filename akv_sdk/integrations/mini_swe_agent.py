"""mini-swe-agent: a model class that marks what commands print, keeps to one session, and drops from it.

    model:
      model_class: akv_sdk.integrations.mini_swe_agent.AkvModel
      model_name: openai/default
      model_kwargs: {api_base: "http://127.0.0.1:8000/v1", api_key: none}
      last_n_observations: 5

One model is one conversation, as mini-swe-agent makes them for a batch. With a model class of its own, `model_kwargs`
may name the session (`extra_body: {akv: {session: agent-1}}`) and `observation_template` mark what commands print.
"""

from __future__ import annotations

from typing import Any, Literal

from minisweagent.models.litellm_model import LitellmModel, LitellmModelConfig

from akv_sdk.client import DEFAULT_URL, Client
from akv_sdk.integrations import Report, drop, in_session, log_drops, marked
from akv_sdk.policies import LastNObservations, Policy

OBSERVATION_TEMPLATE = """\
<ephemeral_observation id="step-{{ n_model_calls }}">
exit status {{ output.returncode }}{% if output.exception_info %} ({{ output.exception_info }}){% endif %}
{{ output.output | replace("ephemeral_observation", "ephemeral-observation") }}
</ephemeral_observation>"""
"""An `observation_template` for any of mini-swe-agent's model classes."""


class AkvModelConfig(LitellmModelConfig):
    """`session`: of the conversation, by default one of its own. `last_n_observations`: how many stay visible, by
    default all. What a self-hosted model costs is not known, so nobody asks for it."""

    session: str | None = None
    last_n_observations: int | None = None
    cost_tracking: Literal["default", "ignore_errors"] = "ignore_errors"


class AkvModel(LitellmModel):
    """Before each turn `policy` (in a file: `last_n_observations`) drops what it names of the turns before, and
    `report` is told."""

    def __init__(self, *, policy: Policy | None = None, report: Report = log_drops, **config: Any) -> None:
        super().__init__(config_class=AkvModelConfig, **config)
        n, options = self.config.last_n_observations, self.config.model_kwargs
        client = Client(options.setdefault("api_base", f"{DEFAULT_URL}/v1"), api_key=options.get("api_key"))
        self._session = client.session(self.config.session)
        self._policy = LastNObservations(n) if policy is None and n is not None else policy
        self._report = report
        options["extra_body"] = in_session(options.get("extra_body"), self._session.name)

    def query(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        drop(self._session, messages, self._policy, self._report)
        message: dict[str, Any] = super().query(messages, **options)
        return message

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        found = super().format_observation_messages(message, outputs, template_vars)
        return [{**m, "content": marked(m["content"], m["tool_call_id"])} if "tool_call_id" in m else m for m in found]
