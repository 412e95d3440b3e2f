"""The server's error: one class, one table of stable codes. Knows no HTTP library; `app.py` turns it into a reply."""

from __future__ import annotations

STATUS_OF_CODE = {
    "invalid_request": 400,
    "span_out_of_range": 400,
    "position_conflict": 409,
    "context_length_exceeded": 400,
    "stream_diverged": 409,
    "repos_unsupported": 400,
    "unauthorized": 401,
    "session_not_found": 404,
    "model_not_found": 404,
    "not_found": 404,
    "session_busy": 409,
    "request_too_large": 413,
    "internal_error": 500,
    "out_of_pages": 503,
}


class AkvError(Exception):
    """A refusal that a caller can act on. Raised before anything is changed.

    Args:
        code: one of `STATUS_OF_CODE`; stable, for programs.
        message: one sentence, for people; says what was wrong and what would be right.
        param: the field at fault, as the caller named it (`spans[2]`, `messages[0].content`).
        retry_after_s: when it is worth trying again (`out_of_pages`, `session_busy`, a full disk).
        status: of the HTTP reply, where it is not the code's own.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status or STATUS_OF_CODE[code]
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def invalid(param: str, message: str) -> AkvError:
    """The error for a field of a request that is not as it has to be."""
    return AkvError("invalid_request", f"{param}: {message}", param=param)
