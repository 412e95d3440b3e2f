"""litellm: calls any provider, keeps an answer as an object of its own, and needs nothing of AKV but `extra_body`."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from akv_server.loader import LoadedModel
from tests.frameworks.harness import ANSWERS, ScriptedServer, read_file, scripted
from tests.frameworks.test_openai import TOOL

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for one on the network
litellm = pytest.importorskip("litellm", reason="litellm is not installed: make test-frameworks")


def run(server: ScriptedServer, *, provider: str, stream: bool, as_dict: bool) -> None:
    """An agent's loop to its end; it keeps an answer as litellm's object, or as the dict of that."""
    messages: list[Any] = [{"role": "system", "content": "You code."}, {"role": "user", "content": "Find the bug."}]
    while True:
        reply = litellm.completion(
            model=f"{provider}/default",
            api_base=server.url,
            api_key="none",
            messages=messages,
            tools=[TOOL],
            stream=stream,
            extra_body={"akv": {"session": "agent"}},
        )
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump() if as_dict else message)
        if not message.tool_calls:
            return
        for made in message.tool_calls:
            result = read_file(**json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("as_dict", [False, True], ids=["object", "dict"])
def test_each_turn_prefills_only_what_is_new(loaded: LoadedModel, provider: str, stream: bool, as_dict: bool) -> None:
    with scripted(loaded, ANSWERS) as server:
        run(server, provider=provider, stream=stream, as_dict=as_dict)
    server.check_each_turn_prefills_only_what_is_new()
