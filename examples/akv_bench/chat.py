"""One server of the OpenAI API, whoever wrote it: a streamed chat, timed, and what it cost in tokens.

Owns the wire: bodies, chunks, where each kind of server says what it reused, and its errors as those of the SDK. An AKV
server takes the `akv` object besides, and says more. Knows nothing of strategies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from akv_bench.measure import Stopwatch, Turn
from akv_bench.trajectories import Message
from akv_sdk import ApiError, AsyncClient, BadReply, ConnectionFailed, MessageSpan, Timeout
from akv_sdk.errors import ERROR_OF_CODE

MAX_ATTEMPTS = 4  # of a request that the server puts off (429, 503)
TIMEOUT_S = 1800.0  # of silence; a prefill on a small machine, behind fifteen others, takes a while


@dataclass(frozen=True)
class Reply:
    """What came of a request. `spans` are where an AKV server put the messages; `says_reused`: the server told what it
    reused of the prompt, instead of leaving all of it to count as prefilled."""

    text: str
    prompt_tokens: int  # that the model saw
    prefilled_tokens: int
    reused_tokens: int
    generated_tokens: int
    stream_tokens: int
    says_reused: bool
    spans: list[MessageSpan] = field(default_factory=list)


def turn_of(watch: Stopwatch, reply: Reply, before: Sequence[Reply] = ()) -> Turn:
    """A step that ended with this reply; `before` are those to requests that led to it, as for a summary."""
    replies = [*before, reply]
    return Turn(
        ttft_s=watch.ttft_s,
        gaps_s=tuple(watch.gaps_s),
        prefilled_tokens=sum(each.prefilled_tokens for each in replies),
        reused_tokens=sum(each.reused_tokens for each in replies),
        visible_tokens=max(each.prompt_tokens + each.generated_tokens for each in replies),
        stream_tokens=reply.stream_tokens,
        generated_tokens=sum(each.generated_tokens for each in replies),
    )


class Endpoint:
    """A server. Made by `connect`; used as a context manager.

    Attributes:
        name: for the report.
        model: the first that it serves.
        window_tokens: the model's window, where the server says it.
        client: the SDK's, for what only an AKV server has; None for any other.
        hides_reuse: it answered without saying what it reused.
    """

    def __init__(self, name: str, url: str, api_key: str | None = None) -> None:
        self.name = name
        self.model = ""
        self.window_tokens: int | None = None
        self.client: AsyncClient | None = None
        self.hides_reuse = False
        self._url, self._api_key = url.rstrip("/").removesuffix("/v1"), api_key
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(TIMEOUT_S, connect=10.0),
            # A server may close an idle connection at any time, llama.cpp's after seconds: a request must not race it.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=1.0),
            # A proxy of the environment cannot reach this machine's own loopback for us.
            trust_env=urlsplit(self._url).hostname not in ("localhost", "127.0.0.1", "::1"),
        )

    async def connect(self) -> None:
        """Asks what is served there. Raises AkvError where that is no server of this API."""
        where = f"{self.name}: GET {self._url}/v1/models"
        try:
            response = await self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionFailed(f"{where}: cannot connect: {error or type(error).__name__}") from error
        if not response.is_success:
            raise _refusal(response, f"{where}: ")
        try:
            card = response.json()["data"][0]
            self.model, window, owner = str(card["id"]), card.get("max_model_len"), card.get("owned_by")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise BadReply(f"{where}: names no model") from None
        self.window_tokens = window if isinstance(window, int) else None
        if owner == "akv":
            self.client = AsyncClient(self._url, api_key=self._api_key, timeout_s=TIMEOUT_S)
        elif owner == "llamacpp":
            self.window_tokens = await self._llama_cpp_window()

    async def _llama_cpp_window(self) -> int | None:
        """What a slot of llama.cpp's server holds. Its model card says no more than what the model was trained for."""
        try:
            props = (await self._http.get("/props")).json()
            return int(props["default_generation_settings"]["n_ctx"]) or None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
        if self.client is not None:
            await self.client.close()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        watch: Stopwatch | None = None,
        akv: dict[str, Any] | None = None,
    ) -> Reply:
        """The model's greedy answer; `watch` is told of each token. A request that the server puts off is sent again
        when it says, on the running watch. Raises AkvError."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.client is not None:
            body["return_token_ids"] = True
            if akv is not None:
                body["akv"] = akv
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                reply = await self._stream(body, watch or Stopwatch())
                self.hides_reuse |= not reply.says_reused
                return reply
            except ApiError as error:
                if error.status not in (429, 503) or attempt == MAX_ATTEMPTS:
                    raise
                await asyncio.sleep(1.0 if error.retry_after_s is None else error.retry_after_s)
        raise AssertionError("the last attempt returns or raises")

    async def _stream(self, body: dict[str, Any], watch: Stopwatch) -> Reply:
        reader = _Reader(watch)
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                pending = b""
                async for chunk in response.aiter_bytes():
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        field_name, _, data = line.partition(b":")
                        if field_name in (b"data", b"error"):
                            reader.read(data.strip(), is_error=field_name == b"error")
        except httpx.TimeoutException as error:
            raise Timeout(f"{self.name}: silent for {TIMEOUT_S:.0f} s") from error
        except httpx.HTTPError as error:
            raise ConnectionFailed(f"{self.name}: {error or type(error).__name__}") from error
        return reader.reply()


class _Reader:
    """The chunks of one stream, put together."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._text: list[str] = []
        self._num_seen = 0
        self._is_done = False
        self._ends: dict[str, Any] = {}  # what stands beside the choices: usage, timings, akv

    def read(self, data: bytes, *, is_error: bool = False) -> None:
        """A line's value. `is_error`: its name says so, as with llama.cpp before it answered with a status."""
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = json.loads(data)
            choices = chunk.get("choices") or []
            if is_error or chunk.get("error"):
                raise _error_of(chunk.get("error") or chunk, None)
            for choice in choices:
                self._take(choice)
        except (ValueError, AttributeError, TypeError):
            raise BadReply(f"a chunk of the stream is not one of this API: {data[:200]!r}") from None
        self._ends |= {
            key: chunk[key] for key in ("usage", "timings", "akv", "tokens_cached") if chunk.get(key) is not None
        }

    def _take(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        self._text.append(text)
        if choice.get("token_ids") is not None:
            num_tokens = len(choice["token_ids"])
        else:  # a chunk is a token, as far as anybody says
            num_tokens = int(bool(text or delta.get("reasoning_content") or delta.get("tool_calls")))
        if choice.get("finish_reason") and self._num_seen + num_tokens == 0:
            num_tokens = 1  # an answer that is nothing but its end
        self._num_seen += num_tokens
        self._watch.saw(num_tokens)

    def reply(self) -> Reply:
        if not self._is_done:
            raise ConnectionFailed("the stream ended before the server said that it was done")
        usage, timings, akv = (self._ends.get(key) or {} for key in ("usage", "timings", "akv"))
        prompt = usage.get("prompt_tokens")
        if prompt is None and "prompt_n" in timings:
            prompt = timings["prompt_n"] + timings.get("cache_n", 0)
        if prompt is None:
            raise BadReply("the stream has no usage")
        reused = _reused_tokens(prompt, usage, timings, self._ends.get("tokens_cached"))
        prefilled = akv["prefilled_tokens"] + akv["replayed_tokens"] if akv else prompt - (reused or 0)
        generated = usage.get("completion_tokens", self._num_seen)
        return Reply(
            text="".join(self._text),
            prompt_tokens=prompt,
            prefilled_tokens=prefilled,
            reused_tokens=reused or 0,
            generated_tokens=generated,
            stream_tokens=akv.get("stream_tokens", prompt + generated),
            says_reused=reused is not None,
            spans=[MessageSpan.model_validate(span) for span in akv.get("spans", ())],
        )


def _reused_tokens(prompt: int, usage: dict[str, Any], timings: dict[str, Any], tokens_cached: Any) -> int | None:
    """Where servers say how much of a prompt they had: OpenAI, AKV, vLLM and SGLang in `usage`, llama.cpp in `timings`
    (older ones only what they computed, or beside the choices). None: nowhere."""
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        return int(details["cached_tokens"])
    if "cache_n" in timings:
        return int(timings["cache_n"])
    if "prompt_n" in timings:
        return max(0, prompt - int(timings["prompt_n"]))
    return None if tokens_cached is None else min(prompt, int(tokens_cached))


def _refusal(response: httpx.Response, where: str = "") -> ApiError:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"HTTP {response.status_code}: {response.text[:200] or 'empty reply'}"}
    retry_after = response.headers.get("retry-after", "")
    return _error_of(error, response.status_code, float(retry_after) if retry_after.isdigit() else None, where)


def _error_of(error: Any, status: int | None, retry_after_s: float | None = None, where: str = "") -> ApiError:
    """Codes are words with AKV and OpenAI; llama.cpp has its word in `type` and a number for a code."""
    if not isinstance(error, dict):
        error = {"message": str(error)}
    words = [error.get(key) for key in ("code", "type")]
    code = next((word for word in words if isinstance(word, str) and word), f"http_{status}" if status else None)
    kind = ERROR_OF_CODE.get(code or "", ApiError)
    message = where + str(error.get("message"))
    return kind(message, code=code, param=error.get("param"), status=status, retry_after_s=retry_after_s)
