"""LangChain and LangGraph: a middleware that marks what tools say, keeps to one session, and drops from it.

    agent = create_agent(model, tools, middleware=[AkvMiddleware(akv_client, "agent-1", policy)])

`model` is a `ChatOpenAI` whose `base_url` is the AKV server's. A run on a thread of a checkpointer has a session of its
own, named after the thread, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import ToolMessage, convert_to_openai_messages

from akv_sdk.client import Client
from akv_sdk.integrations import Report, drop, in_session, log_drops, marked
from akv_sdk.policies import Policy


class AkvMiddleware(AgentMiddleware[Any, Any]):
    """The conversation is in `session` (of a thread: `session-thread`). Before each turn `policy` drops what it names
    of the turns before, and `report` is told. What the graph keeps is unchanged."""

    def __init__(self, client: Client, session: str, policy: Policy | None = None, report: Report = log_drops) -> None:
        super().__init__()
        self._client = client
        self._session = session
        self._policy = policy
        self._report = report

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        return handler(self._before(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        return await handler(await asyncio.to_thread(self._before, request))

    def _before(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        messages = [
            message.model_copy(update={"content": marked(message.content, message.tool_call_id)})
            if isinstance(message, ToolMessage)
            else message
            for message in request.messages
        ]
        info = request.runtime.execution_info
        name = f"{self._session}-{info.thread_id}" if info and info.thread_id else self._session
        sent = [request.system_message, *messages] if request.system_message else messages
        drop(self._client.session(name), convert_to_openai_messages(sent), self._policy, self._report)
        given = request.model_settings.get("extra_body", getattr(request.model, "extra_body", None))
        settings = {**request.model_settings, "extra_body": in_session(given, name)}
        return request.override(messages=messages, model_settings=settings)
