"""What a request's `context_management` lets go of its stream, and whether its marks speak of what is there.

Owns asking the policies of Anthropic's edits, and when their drops take effect. Pure: knows neither sessions nor the
engine. Whether something may go at all is for `akv_sdk.policies` to say: the same guard that clients use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from akv_sdk import types
from akv_sdk.policies import Context, ContextEdits, decide
from akv_sdk.policies.context import Message, spans_of
from akv_server import streams
from akv_server.errors import AkvError, invalid
from akv_server.streams import Stream


@dataclass(frozen=True, slots=True)
class Management:
    """What a request says besides its messages about what may go and what shall go.

    Attributes:
        messages: of the request; empty for a prompt that is text.
        num_fitting: positions, or visible tokens, that the server has room for.
    """

    messages: Sequence[Message]
    marks: Sequence[types.Mark]
    edits: types.ContextManagement | None
    num_fitting: int

    def apply(self, stream: Stream, num_common: int) -> tuple[Stream, list[types.AppliedEdit]]:
        """The stream of a prompt after its edits, and what they did. `num_common` of its tokens its session had before.

        What lies within those goes before the prompt's new tokens are computed, so that it does not bear on them. What
        is new goes where the answer begins; where it would not even fit, it is forgotten without being computed.
        Raises AkvError that names the mark which speaks of nothing in the stream.
        """
        spans = stream.spans()
        self._check_marks(stream, spans)
        if self.edits is None or not self.edits.edits or not spans:
            return stream, []
        ops = [streams.wire_of(op) for op in stream.timeline.history]
        policy = ContextEdits(self.edits)
        drops = decide(policy, Context(self.messages, spans, ops, self.marks))
        if not drops:
            return stream, []
        after = streams.drop_ahead(
            stream, spans_of(drops), known=num_common, until=spans[-1].end, num_fitting=self.num_fitting
        )
        return after, policy.applied_edits(drops)

    def _check_marks(self, stream: Stream, spans: Sequence[types.MessageSpan]) -> None:
        for i, mark in enumerate(self.marks):
            at = f"akv.marks[{i}]"
            if mark.span is not None:
                start, end = mark.span
                if not start <= end <= len(stream.tokens):
                    message = f"{at}.span: [{start}, {end}) does not lie in a stream of {len(stream.tokens)} tokens"
                    raise AkvError("span_out_of_range", message, param=f"{at}.span")
                continue
            assert mark.message is not None
            if mark.message >= len(spans):
                raise invalid(f"{at}.message", f"there is no message {mark.message}, the request has {len(spans)}")
            home = spans[mark.message]
            if mark.tool_call_id is not None and mark.tool_call_id != home.tool_call_id:
                own = "none" if home.tool_call_id is None else repr(home.tool_call_id[:100])
                raise invalid(f"{at}.tool_call_id", f"message {mark.message} has another, {own}")
            if mark.block is not None and mark.block not in [block.id for block in home.blocks]:
                raise invalid(f"{at}.block", f"message {mark.message} has no block {mark.block[:100]!r}")
