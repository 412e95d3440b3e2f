"""Client side of AKV: talk to a server, keep an agent's session, drop what the model no longer needs to see.

    with akv_sdk.Client() as client, client.session() as session:
        session.user("Find the bug.")
        block_id = session.observe(output, tool="bash")
        reply = session.complete(max_tokens=200)
        session.drop(blocks=[block_id])

Pulls in httpx and pydantic, never the server. `akv_sdk.tokens` builds the model's tiktoken encoding.
"""

from akv_sdk._wire import Event, Params, SessionParams
from akv_sdk.client import AsyncClient, AsyncStream, Client, Stream
from akv_sdk.errors import (
    AkvError,
    ApiError,
    BadReply,
    ConnectionFailed,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    OutOfPages,
    PositionConflict,
    ReposUnsupported,
    RequestTooLarge,
    SessionBusy,
    SessionNotFound,
    SpanOutOfRange,
    StreamDiverged,
    Timeout,
    TransportError,
    Unauthorized,
)
from akv_sdk.policy import LastNObservations, Policy
from akv_sdk.session import AsyncSession, Session
from akv_sdk.types import (
    AkvReply,
    Block,
    CacheStats,
    Completion,
    LayoutReply,
    MessageSpan,
    Op,
    SegmentInfo,
    SessionInfo,
    Usage,
)

__all__ = [
    "AkvError",
    "AkvReply",
    "ApiError",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "BadReply",
    "Block",
    "CacheStats",
    "Client",
    "Completion",
    "ConnectionFailed",
    "ContextLengthExceeded",
    "Event",
    "InternalError",
    "InvalidRequest",
    "LastNObservations",
    "LayoutReply",
    "MessageSpan",
    "ModelNotFound",
    "NotFound",
    "Op",
    "OutOfPages",
    "Params",
    "Policy",
    "PositionConflict",
    "ReposUnsupported",
    "RequestTooLarge",
    "SegmentInfo",
    "Session",
    "SessionBusy",
    "SessionInfo",
    "SessionNotFound",
    "SessionParams",
    "SpanOutOfRange",
    "Stream",
    "StreamDiverged",
    "Timeout",
    "TransportError",
    "Unauthorized",
    "Usage",
]
