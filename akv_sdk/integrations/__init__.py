"""Agent frameworks on AKV: a module for each, which imports its framework. Importing `akv_sdk` imports none of them.

Owns what the modules share: marking a tool's output, naming the session in a request, and dropping by a policy before
a turn. Knows no framework. The framework keeps and resends its own conversation; the server knows it again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from akv_sdk.errors import SessionNotFound
from akv_sdk.policies import Policy
from akv_sdk.policies.context import tags_of
from akv_sdk.session import AsyncSession, Session
from akv_sdk.types import LayoutReply

Report = Callable[[LayoutReply], object]
"""Called before each turn but the first with what the session comes to; `changed` counts the tokens just dropped."""

logger = logging.getLogger(__name__)


def marked(content: Any, block_id: str) -> Any:
    """A tool's output, a text or a list of text parts, as one ephemeral block. Mutates nothing; what is empty or
    neither of the two comes back as it is."""
    opening, closing = tags_of(re.sub(r'["\\<>\n]', "_", block_id)[:200])
    if isinstance(content, str) and content:
        return f"{opening}\n{content}\n{closing}"
    if isinstance(content, list) and content:
        kind = content[0].get("type", "text") if isinstance(content[0], Mapping) else "text"
        return [{"type": kind, "text": opening}, *content, {"type": kind, "text": closing}]
    return content


def in_session(extra_body: object, session: str) -> dict[str, Any]:
    """An `extra_body` (None is an empty one) that names the session, too."""
    given = dict(extra_body) if isinstance(extra_body, Mapping) else {}
    return {**given, "akv": {**given.get("akv", {}), "session": session}}


def log_drops(layout: LayoutReply) -> None:
    """The report where none is given."""
    if layout.changed:
        message = "%s: dropped %d tokens, %d of %d are visible"
        logger.info(message, layout.session, layout.changed, layout.visible_tokens, layout.stream_tokens)


def drop(
    session: Session, messages: Iterable[Mapping[str, Any]], policy: Policy | None, report: Report = log_drops
) -> None:
    """Before a turn, drops what the policy names of the turns before it. `messages` are those that the framework is
    about to send; what is new in them the server has not seen, and no policy either. Nothing where the session is new,
    or was lost: the policy then decides afresh once the server has it."""
    session.messages = [dict(message) for message in messages]
    try:
        layout: LayoutReply = session.info()
        edited = session.apply(policy) if policy else None
    except SessionNotFound:
        return
    report(edited or layout)


async def drop_async(
    session: AsyncSession, messages: Iterable[Mapping[str, Any]], policy: Policy | None, report: Report = log_drops
) -> None:
    """`drop` on an `AsyncSession`."""
    session.messages = [dict(message) for message in messages]
    try:
        layout: LayoutReply = await session.info()
        edited = await session.apply(policy) if policy else None
    except SessionNotFound:
        return
    report(edited or layout)
