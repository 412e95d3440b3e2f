"""A loop around the openai package. What its tool said leaves the cache when it is old; nothing is prefilled again."""

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

import akv_sdk
from akv_sdk.integrations import drop, marked
from akv_sdk.integrations.openai import extra_body, report_of

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "number"}}}
TOOL: Any = {"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS}}


def read_file(path: str, limit: float = 30) -> str:
    return "\n".join(Path(path).read_text().splitlines()[: int(limit)])


messages: list[Any] = [{"role": "system", "content": "You code."}, {"role": "user", "content": "Find the bug."}]
complete = OpenAI(base_url=f"{URL}/v1", api_key="none").chat.completions.create
with akv_sdk.Client(URL) as akv, akv.session() as session:
    for _ in range(10):
        drop(session, messages, akv_sdk.LastNObservations(1))
        body = extra_body(session.name)
        reply = complete(model="default", messages=messages, tools=[TOOL], max_tokens=300, extra_body=body)
        if told := report_of(reply):
            print(f"dropped {told.dropped_tokens}, prefilled {told.prefilled_tokens} of {told.stream_tokens} tokens")
        message: Any = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            output = read_file(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": marked(output, call.id)})
        if not message.tool_calls:
            break
    print(messages[-1]["content"])
