"""pydantic-ai: a capability that marks what tools say, keeps each conversation to one session, and drops from it.

    agent = Agent(model, tools=tools, capabilities=[AkvCapability(akv_client, policy)])

`model` is an `OpenAIChatModel` whose `base_url` is the AKV server's. A session has the name of its conversation, so a
run that goes on with the messages of an earlier one (`message_history`) goes on in its session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic_ai import RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelMessage, ModelRequest, SystemPromptPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.settings import ModelSettings

from akv_sdk.client import AsyncClient
from akv_sdk.integrations import Report, drop_async, in_session, log_drops, marked
from akv_sdk.policies import Policy


@dataclass
class AkvCapability(AbstractCapability[Any]):
    """Before each turn `policy` drops what it names of the turns before, and `report` is told. What the run keeps is
    unchanged."""

    client: AsyncClient
    policy: Policy | None = None
    report: Report = log_drops

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        name = ctx.conversation_id
        assert name is not None, "a run has a conversation"
        messages = [_with_marks(message) for message in request_context.messages]
        instructions = request_context.model_request_parameters.instruction_parts
        sent = list(_sent(messages))
        if instructions:  # they follow the system prompt
            at = next((i for i, message in enumerate(sent) if message["role"] != "system"), len(sent))
            sent.insert(at, {"role": "system"})
        await drop_async(self.client.session(name), sent, self.policy, self.report)
        settings = request_context.model_settings or ModelSettings()
        body = in_session(settings.get("extra_body"), name)
        return replace(request_context, messages=messages, model_settings={**settings, "extra_body": body})


def _with_marks(message: ModelMessage) -> ModelMessage:
    """The message with each tool's output in it as an ephemeral block, named by its call's id."""
    if not isinstance(message, ModelRequest):
        return message
    parts = [
        replace(part, content=marked(part.model_response_str(), part.tool_call_id))
        if type(part) is ToolReturnPart and part.outcome == "success" and not part.files
        else part
        for part in message.parts
    ]
    return replace(message, parts=parts)


def _sent(messages: list[ModelMessage]) -> Iterator[dict[str, Any]]:
    """The messages of the chat API that these become, as far as policies look at them."""
    for message in messages:
        if isinstance(message, ModelRequest):
            for part in message.parts:
                if isinstance(part, ToolReturnPart):
                    yield {"role": "tool", "name": part.tool_name, "content": part.model_response_str()}
                else:
                    yield {"role": "system" if isinstance(part, SystemPromptPart) else "user"}
        elif message.parts:
            calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
            called = [{"id": call.tool_call_id, "function": {"name": call.tool_name}} for call in calls]
            yield {"role": "assistant", "tool_calls": called}
