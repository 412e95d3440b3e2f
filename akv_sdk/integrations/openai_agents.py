"""openai-agents: a filter that marks what tools say, and a model that keeps to one session and drops from it.

    model = AkvModel(OpenAIChatCompletionsModel("default", openai_client), akv_client.session("agent-1"), policy)
    await Runner.run(agent, task, run_config=RunConfig(model=model, call_model_input_filter=mark_outputs))

One model is one conversation: agents with other instructions, which hand over to each other, each need a session of
their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from agents import Model, ModelSettings
from agents.items import ModelResponse, TResponseInputItem, TResponseStreamEvent
from agents.models.chatcmpl_converter import Converter
from agents.retry import ModelRetryAdvice, ModelRetryAdviceRequest
from agents.run_config import CallModelData, ModelInputData

from akv_sdk.integrations import Report, drop_async, in_session, log_drops, marked
from akv_sdk.policies import Policy
from akv_sdk.session import AsyncSession

Input = str | list[TResponseInputItem]


def mark_outputs(data: CallModelData[Any]) -> ModelInputData:
    """A `call_model_input_filter`: what tools said goes out as ephemeral blocks, named by their calls' ids. What the
    runner keeps is unchanged."""
    items: list[Any] = list(data.model_data.input)
    for i, item in enumerate(items):
        if item.get("type") == "function_call_output":
            items[i] = {**item, "output": marked(item["output"], item["call_id"])}
    return ModelInputData(items, data.model_data.instructions)


class AkvModel(Model):
    """Any model of chat completions on an AKV server, with its conversation in `session`. Before each turn `policy`
    drops what it names of the turns before, and `report` is told."""

    def __init__(
        self, model: Model, session: AsyncSession, policy: Policy | None = None, report: Report = log_drops
    ) -> None:
        self._model = model
        self._session = session
        self._policy = policy
        self._report = report

    async def get_response(
        self, system_instructions: str | None, input: Input, model_settings: ModelSettings, *args: Any, **kwargs: Any
    ) -> ModelResponse:
        settings = await self._before(system_instructions, input, model_settings)
        return await self._model.get_response(system_instructions, input, settings, *args, **kwargs)

    async def stream_response(
        self, system_instructions: str | None, input: Input, model_settings: ModelSettings, *args: Any, **kwargs: Any
    ) -> AsyncIterator[TResponseStreamEvent]:
        settings = await self._before(system_instructions, input, model_settings)
        async for event in self._model.stream_response(system_instructions, input, settings, *args, **kwargs):
            yield event

    def get_retry_advice(self, request: ModelRetryAdviceRequest) -> ModelRetryAdvice | None:
        return self._model.get_retry_advice(request)

    async def close(self) -> None:
        await self._model.close()

    async def _before(self, instructions: str | None, input: Input, settings: ModelSettings) -> ModelSettings:
        messages: list[Any] = list(Converter.items_to_messages(input))
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        await drop_async(self._session, messages, self._policy, self._report)
        return replace(settings, extra_body=in_session(settings.extra_body, self._session.name))
