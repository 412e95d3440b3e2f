"""A real server whose model says what a test wants it to, and the record of all that a framework sent it.

The framework is the real package and resends its own version of the conversation; the server renders, matches, computes
and parses as ever. Only the choice of each next token is the script's (`tests/scripted.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from akv_sdk.types import AkvReply, DropRequest
from akv_server.errors import AkvError
from akv_server.loader import LoadedModel
from tests.scripted import Script
from tests.server import Server, serving_model

JSON = dict[str, Any]
POOL_TOKENS = 32768
DROP_BEFORE = 2


def call(name: str, arguments: str) -> str:
    """A tool call as a model of the Hermes or Qwen kind writes it; `arguments` are taken letter by letter."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWERS = (
    "  Let me look.\n\n" + call("read_file", '{"path": "src/app.py",   "limit": 20.0}') + "\n",
    call("read_file", '{"limit":5,"path":"na\\u00efve é.txt"}'),
    call("read_file", '{"path": "a"}') + "\n\n" + call("read_file", '{"path": "b", "limit": 1e1}'),
    "<think>\nWhere is it?\n</think>\n\n" + call("read_file", '{"path": "c"}'),
    "\nIt is done.  ",
)
"""Five turns, written as no framework would write them: space around texts and calls, and within arguments, that is not
needed; a float that is whole, and an exponent; escapes that are not needed; keys out of order; two calls at once."""


def read_file(path: str, limit: float = 3) -> str:
    """Reads the beginning of a file.

    Args:
        path: of the file.
        limit: how many lines.
    """
    return "\n".join(f"{path} line {i}" for i in range(int(limit)))


@dataclass
class Exchange:
    """One request and what became of it: the reply's body or, of a stream, all that its chunks say besides text.
    `num_generated` counts the answer's tokens, its end among them."""

    request: JSON
    status: int = 0
    reply: JSON = field(default_factory=dict)
    num_generated: int = 0

    def count_token(self) -> None:
        self.num_generated += 1

    @property
    def akv(self) -> AkvReply:
        return AkvReply.model_validate(self.reply["akv"])

    @property
    def messages(self) -> list[JSON]:
        return self.request["messages"]


@dataclass
class ScriptedServer:
    """Where it listens, and what happened there. Before request number `drop_before` (from 0) the first observation,
    which is the message after the first answer, is dropped; `num_dropped` is how many tokens that took."""

    server: Server
    answers: Sequence[str]
    drop_before: int | None
    exchanges: list[Exchange] = field(default_factory=list)
    num_dropped: int = 0

    @property
    def url(self) -> str:
        """What an OpenAI client calls its base URL."""
        return f"{self.server.url}/v1"

    @property
    def root(self) -> str:
        """What an AKV client calls its base URL."""
        return self.server.url

    def next_answer(self) -> tuple[str, Callable[[], object]]:
        """What the model says to the request that came last, and what counts the tokens of that."""
        at = len(self.exchanges) - 1
        if at >= len(self.answers):
            raise AkvError("invalid_request", "the script is over", param="messages")
        return self.answers[at], self.exchanges[at].count_token

    def check_each_turn_prefills_only_what_is_new(self) -> None:
        """One conversation, on one session, that was asked for every answer of the script; each turn computed what was
        not in the stream after the turn before, and nothing else; and the drop holds to the end."""
        assert [exchange.status for exchange in self.exchanges] == [200] * len(self.answers)
        num_before, session = 0, self.exchanges[0].akv.session
        assert session is not None
        for i, exchange in enumerate(self.exchanges):
            akv = exchange.akv
            assert akv.session == session
            assert akv.warnings == []
            assert akv.prefilled_tokens == akv.stream_tokens - num_before - exchange.num_generated, exchange.messages
            assert akv.replayed_tokens == 0
            assert [span.role for span in akv.spans] == [*(m["role"] for m in exchange.messages), "assistant"]
            if usage := exchange.reply.get("usage"):
                assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] == akv.prefilled_tokens
            if self.drop_before is not None:
                assert akv.dropped_tokens == (self.num_dropped if i >= self.drop_before else 0)
            num_before = akv.stream_tokens
        assert self.drop_before is None or self.num_dropped > 0
        self.server.engine.check()

    def check_observations_are_blocks(self, *visible: bool) -> None:
        """Every observation of the conversation is a marked block; at the end these are visible, and nothing else is
        dropped."""
        akv = self.exchanges[-1].akv
        blocks = [block for span in akv.spans for block in span.blocks if block.kind == "observation"]
        assert [block.visible for block in blocks] == list(visible)
        assert akv.dropped_tokens == sum(block.end - block.start for block in blocks if not block.visible) > 0


@contextmanager
def scripted(
    loaded: LoadedModel, answers: Sequence[str], *, drop_before: int | None = DROP_BEFORE
) -> Iterator[ScriptedServer]:
    """Serves until the block ends. A request beyond the last answer is refused."""
    door: list[_Door] = []

    def around(app: ASGIApp) -> ASGIApp:
        door.append(_Door(app))
        return door[0]

    with serving_model(loaded, pool_tokens=POOL_TOKENS, around=around) as server:
        state = ScriptedServer(server, answers, drop_before)
        door[0].state = state
        server.service._grammars = Script(server.service, state.next_answer)  # type: ignore[assignment]
        yield state


class _Door:
    """Writes down every chat request and its reply on their way, and drops when it is time."""

    state: ScriptedServer

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/chat/completions":
            await self._app(scope, receive, send)
            return
        body, sent = b"", b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        state = self.state
        if state.drop_before == len(state.exchanges):
            await self._drop()
        exchange = Exchange(json.loads(body))
        state.exchanges.append(exchange)
        bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replayed() -> Message:
            return next(bodies, None) or await receive()

        async def noted(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            sent += message.get("body", b"")
            if not message.get("more_body", False):
                exchange.reply = _read(sent)
            await send(message)

        await self._app(scope, replayed, noted)

    async def _drop(self) -> None:
        state = self.state
        akv = state.exchanges[-1].akv
        assert akv.session is not None
        sessions = state.server.service.sessions
        spans = (await sessions.info("", akv.session)).spans
        answers = [i for i, span in enumerate(spans) if span.role == "assistant"]
        observation = spans[answers[0] + 1]
        body = DropRequest(session=akv.session, spans=[(observation.content_start, observation.content_end)])
        state.num_dropped = (await sessions.drop("", body)).changed


def _read(sent: bytes) -> JSON:
    """A reply's JSON; of a stream, what its chunks say, the later over the earlier."""
    if not sent.startswith(b"data: "):
        return json.loads(sent) if sent.startswith(b"{") else {}
    lines = (line[6:] for line in sent.split(b"\n") if line.startswith(b"data: {"))
    return {key: value for line in lines for key, value in json.loads(line).items() if value is not None}
