"""A server of the OpenAI API that is not AKV: streams a few words, and says what it reused where llama.cpp says it.

Its one slot holds the last prompt; what a new one has in common with it counts as reused. A token is a character.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from akv_server.streams import num_common

WORDS = ["so ", "it ", "is"]
OVERFLOW = {"code": 400, "message": "request exceeds the available context size", "type": "exceed_context_size_error"}


@dataclass
class Rival:
    """Where it listens, what it was asked, and how it behaves.

    `card` is its model's, unless it is `not_ready`; `props` is the reply of that route, if it has one; `ends` makes
    what stands beside the choices of the last chunk from the lengths of a prompt and of what was reused of it; `refuse`
    gives a status, headers and a body for a request, or None to answer it.
    """

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    slot: str = ""
    card: dict[str, Any] = field(default_factory=lambda: {"id": "other-model", "owned_by": "somebody"})
    props: dict[str, Any] | None = None
    not_ready: tuple[int, dict[str, str], Any] | None = None
    ends: Callable[[int, int], dict[str, Any]] = lambda prompt, reused: {"timings": {"cache_n": reused}}
    refuse: Callable[[dict[str, Any], int], tuple[int, dict[str, str], Any] | None] = lambda body, attempt: None


def as_llama_cpp(rival: Rival, n_ctx: int, *, is_old: bool = False) -> None:
    """Makes it answer as `llama-server` does. An old one has no status for what fails in a stream, and says less."""
    rival.card = {"id": "m.gguf", "owned_by": "llamacpp", "meta": {"n_ctx_train": 131072}}
    rival.props = {"default_generation_settings": {"n_ctx": n_ctx}, "total_slots": 1}
    stream = b"error: " + json.dumps(OVERFLOW).encode() + b"\n\ndata: [DONE]\n\n"

    def ends(prompt: int, reused: int) -> dict[str, Any]:
        timings = {"prompt_n": prompt - reused, "predicted_n": 3}
        if is_old:
            return {"timings": timings}
        usage = {"completion_tokens": 3, "prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": reused}}
        return {"usage": usage, "timings": {"cache_n": reused, **timings}}

    def refuse(body: dict[str, Any], attempt: int) -> tuple[int, dict[str, str], Any] | None:
        num_tokens = len(prompt_of(body["messages"]))
        if num_tokens < n_ctx:
            return None
        error = {**OVERFLOW, "n_prompt_tokens": num_tokens, "n_ctx": n_ctx}
        return (200, {"Content-Type": "text/event-stream"}, stream) if is_old else (400, {}, {"error": error})

    rival.ends, rival.refuse = ends, refuse


def prompt_of(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)


@contextmanager
def rival_server() -> Iterator[Rival]:
    rival = Rival()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._whole(*(rival.not_ready or (200, {}, {"object": "list", "data": [rival.card]})))
            elif self.path == "/props" and rival.props is not None:
                self._whole(200, {}, rival.props)
            else:
                self._whole(404, {}, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rival.asked.append(body)
            if refused := rival.refuse(body, len(rival.asked)):
                self._whole(*refused)
                return
            prompt = prompt_of(body["messages"])
            reused = num_common(prompt, rival.slot)
            rival.slot = prompt
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for word in WORDS[: body["max_tokens"]]:
                self._chunk({"choices": [{"index": 0, "delta": {"content": word}}]})
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(WORDS[: body["max_tokens"]])}
            self._chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            self._chunk({"choices": [], "usage": usage, **rival.ends(len(prompt), reused)})
            self.wfile.write(b"data: [DONE]\n\n")

        def _chunk(self, chunk: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def _whole(self, status: int, headers: dict[str, str], body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        rival.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield rival
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
