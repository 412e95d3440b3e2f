"""What can go wrong, as exceptions. Knows neither HTTP nor the wire's bodies; `_wire.py` decides which one a reply is.

AkvError
├── TransportError               no usable reply came
│   ├── ConnectionFailed         connection_failed      refused, reset, or cut short
│   ├── Timeout                  timeout                the server was silent for longer than `timeout_s`
│   └── BadReply                 bad_reply              an answer that is not one of this API
├── EmptySummary                 empty_summary          a summariser wrote nothing; the session is as it was
└── ApiError                     (any other code)       the server refused; nothing was changed
    ├── InvalidRequest           invalid_request        also raised here, before anything is sent
    │   ├── SpanOutOfRange       span_out_of_range
    │   ├── ContextLengthExceeded  context_length_exceeded
    │   ├── ReposUnsupported     repos_unsupported
    │   └── RequestTooLarge      request_too_large
    ├── Unauthorized             unauthorized
    ├── NotFound                 not_found
    │   ├── SessionNotFound      session_not_found
    │   └── ModelNotFound        model_not_found
    ├── PositionConflict         position_conflict
    ├── StreamDiverged           stream_diverged
    ├── SessionBusy              session_busy           also raised here, while a session's own answer is written
    ├── OutOfPages               out_of_pages           retried by the client, honouring Retry-After
    └── InternalError            internal_error
"""

from __future__ import annotations


class AkvError(Exception):
    """Root of the tree.

    Args:
        message: one sentence, for people.
        code: stable, for programs; each class has its own, so it is given only for codes this version does not know.
        param: the field at fault (`spans[2]`, `messages[0].content`).
        status: HTTP status, where a reply came.
        retry_after_s: when it is worth trying again, where the server said so.
        request_id: the reply's `X-Request-ID`, to find the request in the server's log.
    """

    code: str = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s
        self.request_id = request_id

    def __str__(self) -> str:
        where = "" if self.param is None or self.message.startswith(self.param) else f"{self.param}: "
        return f"{where}{self.message} [{self.code}]"


class TransportError(AkvError):
    code = "transport_error"


class ConnectionFailed(TransportError):
    """No reply, or only a part of one. `sent` is False where the request cannot have reached the server."""

    code = "connection_failed"

    def __init__(self, message: str, *, sent: bool = True, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.sent = sent


class Timeout(TransportError):
    code = "timeout"


class BadReply(TransportError):
    code = "bad_reply"


class EmptySummary(AkvError):
    code = "empty_summary"


class ApiError(AkvError):
    code = "api_error"


class InvalidRequest(ApiError):
    code = "invalid_request"


class SpanOutOfRange(InvalidRequest):
    code = "span_out_of_range"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ReposUnsupported(InvalidRequest):
    code = "repos_unsupported"


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"


class Unauthorized(ApiError):
    code = "unauthorized"


class NotFound(ApiError):
    code = "not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class PositionConflict(ApiError):
    code = "position_conflict"


class StreamDiverged(ApiError):
    code = "stream_diverged"


class SessionBusy(ApiError):
    code = "session_busy"


class OutOfPages(ApiError):
    code = "out_of_pages"


class InternalError(ApiError):
    code = "internal_error"


ERROR_OF_CODE: dict[str, type[ApiError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        SpanOutOfRange,
        ContextLengthExceeded,
        ReposUnsupported,
        RequestTooLarge,
        Unauthorized,
        NotFound,
        SessionNotFound,
        ModelNotFound,
        PositionConflict,
        StreamDiverged,
        SessionBusy,
        OutOfPages,
        InternalError,
    )
}
