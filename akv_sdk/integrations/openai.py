"""The openai package by itself: what goes into `extra_body`, and what AKV says in a reply.

    reply = client.chat.completions.create(model="default", messages=messages, extra_body=extra_body("agent-1"))
    print(report_of(reply).visible_tokens)

Tool results are marked with `marked`, and `drop` drops by a policy before a turn; both are in `akv_sdk.integrations`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from akv_sdk.types import AkvReply, AkvRequest, AutoDrop, Mark, OnMiss, Op

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk


def extra_body(
    session: str | None = None,
    *,
    ops: Iterable[Op] | None = None,
    on_miss: OnMiss = "replay",
    marks: Iterable[Mark] = (),
    auto_drop: AutoDrop | bool | None = None,
) -> dict[str, Any]:
    """The `extra_body` of a completion: what `AkvRequest` has, checked before it is sent. Raises pydantic's
    ValidationError."""
    akv = AkvRequest(
        session=session,
        ops=None if ops is None else list(ops),
        on_miss=on_miss,
        marks=list(marks) or None,
        auto_drop=auto_drop,
    )
    return {"akv": akv.model_dump(mode="json", exclude_defaults=True)}


def report_of(reply: ChatCompletion | ChatCompletionChunk | Completion) -> AkvReply | None:
    """The `akv` object of a reply or of a stream's last chunk; None for a chunk before that, or from another server."""
    akv = (reply.model_extra or {}).get("akv")
    return None if akv is None else AkvReply.model_validate(akv)
