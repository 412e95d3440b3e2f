"""What both twins do with httpx and need not wait for: its options, a call's request, and an error for what went wrong.

Knows no session. `transport` of a client is the one seam: nothing here opens a connection.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from akv_sdk import _wire
from akv_sdk._wire import Call
from akv_sdk.errors import ApiError, BadReply, ConnectionFailed, Timeout, TransportError

T = TypeVar("T")
MAX_CONNECT_S = 10.0


def http_options(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"base_url: {base_url!r} is not an http or https address")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s: {timeout_s} is not greater than 0")
    return {
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key is not None else {},
        "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, MAX_CONNECT_S)),
        # A proxy of the environment cannot reach this machine's own loopback for us.
        "trust_env": url.hostname not in ("localhost", "127.0.0.1", "::1"),
    }


def headers_of(call: Call[T]) -> dict[str, str]:
    """The headers of every attempt to send a call."""
    headers = {} if call.body is None else {"Content-Type": "application/json"}
    return headers | {"Idempotency-Key": uuid.uuid4().hex} if call.keyed else headers


def request_of(http: httpx.Client | httpx.AsyncClient, call: Call[T], headers: dict[str, str]) -> httpx.Request:
    return http.build_request(call.method, call.path, content=call.body, headers=headers)


def refusal(response: httpx.Response, body: bytes) -> ApiError:
    return _wire.error_of_reply(response.status_code, response.headers, body, now=datetime.now(UTC))


def cut_short(response: httpx.Response) -> ConnectionFailed:
    request_id = response.headers.get("x-request-id")
    return ConnectionFailed("the stream ended before the server said that it was done", request_id=request_id)


def transport_error(error: httpx.HTTPError, call: Call[T]) -> TransportError:
    where = f"{call.method} {call.path}"
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectionFailed(f"{where}: cannot connect: {reason}", sent=False)
    if isinstance(error, httpx.TimeoutException):
        return Timeout(f"{where}: no answer in time: {reason}")
    if isinstance(error, httpx.DecodingError | httpx.TooManyRedirects):
        return BadReply(f"{where}: {reason}")
    return ConnectionFailed(f"{where}: {reason}")
