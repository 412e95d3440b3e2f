"""A small server for tests of the SDK: keeps streams and ops for real, a token per character, and logs what was asked.

Answers as httpx.MockTransport wants it. Knows nothing of the real server.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from akv_sdk import types
from tests.test_sdk_client import Chunks

PAGE = 16


class Refused(Exception):
    def __init__(self, status: int, code: str, param: str | None = None):
        self.reply = httpx.Response(status, json={"error": {"message": code, "code": code, "param": param}})


class FakeServer:
    """Streams of characters and their ops, kept naively: what is visible is worked out token by token, each time."""

    def __init__(self) -> None:
        self.streams: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, Any]] = []
        self.replies: list[Chunks] = []  # streamed ones
        self.padding = ""  # comes before every message: another one makes the same messages lie elsewhere
        self.failures: list[Refused] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.log.append((f"{request.method} {request.url.path}", body))
        try:
            if self.failures:
                raise self.failures.pop(0)
            return self.route(request.method, request.url.path, body)
        except Refused as refused:
            return refused.reply

    def route(self, method: str, path: str, body: Any) -> httpx.Response:
        if path == "/v1/chat/completions":
            return self.complete(body)
        if path == "/v1/render":
            return httpx.Response(200, json=self.rendered(body))
        if path == "/detokenize":
            return httpx.Response(200, json={"prompt": "".join(map(chr, body["tokens"]))})
        if path.startswith("/v1/cache/sessions/"):
            name = path.split("/")[4]
            stream = self.get(name)
            if method == "DELETE":
                del self.streams[name]
                return httpx.Response(200, json={})
            if path.endswith("/fork"):
                name = body.get("session") or f"{name}-copy"
                self.streams[name] = {**stream, "ops": list(stream["ops"])}
            return httpx.Response(200, json=self.info(name))
        return httpx.Response(200, json=self.edit(path.split("/")[-1], body))

    def get(self, name: str) -> dict[str, Any]:
        if not all(reply.is_closed for reply in self.replies):
            raise Refused(500, "internal_error")  # a real one waits for the end of its answer, and for its reader
        if name not in self.streams:
            raise Refused(404, "session_not_found", "session")
        return self.streams[name]

    def complete(self, body: Any) -> httpx.Response:
        name, messages = body["akv"]["session"], body["messages"]
        kept = self.streams.get(name, {"ops": []})
        stream = self.streams[name] = {"messages": messages, "ops": body["akv"].get("ops", kept["ops"])}
        message = {"role": "assistant", "content": f"answer {len(messages)}"}
        if body.get("max_tokens") == 0:
            message["content"] = ""
        else:
            stream["messages"] = [*messages, message]
        info = self.info(name)
        akv = {**info, "prefilled_tokens": 0, "replayed_tokens": 0}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return httpx.Response(200, json={"choices": [choice], "usage": usage, "akv": akv})
        chunks = [{"choices": [{"index": 0, "delta": {"content": letter}}]} for letter in message["content"]]
        lines = [json.dumps(chunk) for chunk in [*chunks, {"choices": [], "usage": usage, "akv": akv}]] + ["[DONE]"]
        self.replies.append(Chunks(*(f"data: {line}\n\n".encode() for line in lines)))
        return httpx.Response(200, stream=self.replies[-1])

    def render(self, stream: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        at, spans = 0, []
        for i, message in enumerate(stream["messages"]):
            start = at
            content_start = start + len(f"{self.padding}<{message['role']}>")
            content = message["content"] or ""
            content = content if isinstance(content, str) else "".join(part["text"] for part in content)
            content_end = content_start + len(content)
            at = content_end + len("</>")
            blocks = [
                {"id": found[1], "start": content_start + found.start(2), "end": content_start + found.end(2)}
                for found in re.finditer(
                    r'<ephemeral_observation id="(.*?)">(.*?)</ephemeral_observation>', content, re.S
                )
            ]
            ends = {"start": start, "end": at, "content_start": content_start, "content_end": content_end}
            spans.append({"message": i, "role": message["role"], "blocks": blocks, **ends})
        return at, spans

    def rendered(self, body: Any) -> dict[str, Any]:
        _, spans = self.render(body)
        for block in (block for span in spans for block in span["blocks"]):
            block["visible"] = True
        text = "".join(f"{self.padding}<{m['role']}>{m['content'] or ''}</>" for m in body["messages"])
        return {"tokens": [ord(letter) for letter in text], "text": text, "spans": spans}

    def visible(self, stream: dict[str, Any]) -> list[bool]:
        visible = [True] * self.render(stream)[0]
        for op in stream["ops"]:
            if op["op"] != "repos":
                visible[op["start"] : op["end"]] = [op["op"] == "restore"] * (op["end"] - op["start"])
        return visible

    def info(self, name: str) -> dict[str, Any]:
        stream = self.get(name)
        num_tokens, spans = self.render(stream)
        visible = self.visible(stream)
        for span in spans:
            for block in span["blocks"]:
                block["visible"] = any(visible[block["start"] : block["end"]])
        runs = re.finditer("1+", "".join("01"[seen] for seen in visible))
        return {
            "session": name,
            "stream_tokens": num_tokens,
            "visible_tokens": sum(visible),
            "dropped_tokens": num_tokens - sum(visible),
            "next_position": num_tokens,
            "ops": stream["ops"],
            "segments": [{"start": r.start(), "end": r.end(), "shift": 0, "written_shift": 0} for r in runs],
            "spans": spans,
            "resident_tokens": 0,
            "pages": 0,
            "fragmentation": 0.0,
            "generating": False,
            "idle_s": 0.0,
        }

    def edit(self, kind: str, body: Any) -> dict[str, Any]:
        stream = self.get(body["session"])
        before, applied = self.visible(stream), []
        if kind == "repos":
            spans = [[body["start"], body.get("end")]]
        elif "blocks" in body:
            blocks = {block["id"]: block for span in self.render(stream)[1] for block in span["blocks"]}
            if unknown := set(body["blocks"]) - set(blocks):
                raise Refused(400, "invalid_request", f"blocks[{body['blocks'].index(min(unknown))}]")
            spans = [[blocks[name]["start"], blocks[name]["end"]] for name in body["blocks"]]
        else:
            spans = body.get("spans") or [[page * PAGE, (page + 1) * PAGE] for page in body["pages"]]
        for start, end in spans:
            if (end or 0) > len(before):
                raise Refused(400, "span_out_of_range", "spans[0]")
            wanted = kind == "restore"
            if kind != "repos" and all(seen == wanted for seen in self.visible(stream)[start:end]):
                continue
            op = {"op": kind, "at": len(before), "start": start, "end": end, "delta": body.get("delta", 0)}
            if kind != "repos":
                op["repos"] = bool(body["repos"])
            if body.get("mode") == "forget":
                op |= {"mode": "forget", "at": start}
            op = types.Op.model_validate(op).model_dump()
            applied.append(op)
            stream["ops"] = [*stream["ops"], op]
        changed = sum(a != b for a, b in zip(before, self.visible(stream), strict=True))
        layout = {name: value for name, value in self.info(body["session"]).items() if name != "spans"}
        return {**layout, "changed": changed, "applied": applied}

    def restart(self) -> None:
        self.streams.clear()

    def routes(self) -> list[str]:
        return [route for route, _ in self.log]

    def last(self, route: str) -> Any:
        return [body for seen, body in self.log if seen == route][-1]


CHAT, DROP, RENDER = "POST /v1/chat/completions", "POST /v1/cache/drop", "POST /v1/render"


def with_observations(session: Any, count: int) -> list[str]:
    """Turns of an agent: after each observation the model goes on."""
    session.system("You are an agent.")
    session.user("Find the bug.")
    blocks = []
    for i in range(count):
        blocks.append(session.observe(f"output {i}", tool="bash", tool_call_id=f"call-{i}"))
        session.complete()
    return blocks
