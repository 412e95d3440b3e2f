"""Blocks: the parts of a message that can be dropped by themselves, found in its text and then in its tokens.

Owns what marks an observation and what marks reasoning, and which tokens stand for a range of characters. Knows neither
templates nor streams: a text is a string, and indexes count from its beginning.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from akv_sdk.policies.context import without_notes
from akv_sdk.types import BlockKind
from akv_server.tools import THINK_CLOSING, THINK_OPENING

NamedRange = tuple[str, int, int]  # a name and [begin, end), in characters
CallRange = tuple[str | None, int, int]  # the id of a call and [begin, end), in characters


@dataclass(frozen=True, slots=True)
class Block:
    """A named part of a message; `[start, end)` are the tokens of its inside, counted from where its owner says.
    `tool_call_id` is that of the call whose arguments a `tool_input` is."""

    id: str
    start: int
    end: int
    kind: BlockKind = "observation"
    tool_call_id: str | None = None

    def moved(self, by: int) -> Block:
        return replace(self, start=self.start + by, end=self.end + by)


class TextTokens:
    """Token ids of a text, and the characters `[begin, end)` that each stands for."""

    def __init__(self) -> None:
        self.ids, self._begins, self._ends = array("I"), array("I"), array("I")

    def add(self, token_id: int, begin: int, end: int) -> None:
        self.ids.append(token_id)
        self._begins.append(begin)
        self._ends.append(end)

    def extend(self, ids: Iterable[int], ranges: Sequence[tuple[int, int]], at: int) -> None:
        """Tokens of a text that begins at character `at`; `ranges` count from there."""
        self.ids.extend(ids)
        self._begins.extend([at + begin for begin, _ in ranges])
        self._ends.extend([at + end for _, end in ranges])

    def inside(self, begin: int, end: int) -> tuple[int, int]:
        """The tokens that lie wholly within characters `[begin, end)`."""
        low = bisect_left(self._begins, begin)
        return low, max(low, bisect_right(self._ends, end))

    def end_of(self, num_tokens: int) -> int:
        """How many characters the first tokens stand for."""
        return self._ends[num_tokens - 1] if num_tokens else 0

    def blocks(
        self, observations: Iterable[NamedRange], thoughts: Iterable[tuple[int, int]], inputs: Iterable[CallRange]
    ) -> tuple[Block, ...]:
        """The blocks of a text in which these lie, in characters; `inputs` are arguments of calls."""
        return (
            *(Block(name, *self.inside(begin, end)) for name, begin, end in observations),
            *(Block(f"thinking-{n}", *self.inside(*inner), "thinking") for n, inner in enumerate(thoughts)),
            *(
                Block(f"input-{n}", *self.inside(begin, end), "tool_input", call_id)
                for n, (call_id, begin, end) in enumerate(inputs)
            ),
        )


def find_observations(text: str, given: str, role: str) -> Iterator[NamedRange]:
    """`(id, begin, end)` of the inside of each observation in `text`, which a template made of the content `given`.

    A tool result is one block or none, behind notes of what is no longer shown: it is data, and tags within it mean
    nothing. Elsewhere tags pair up as brackets do, a pair within a pair is part of it, and a tag without a partner is
    text.
    """
    tags = list(_TAG.finditer(given))
    if len(tags) < 2:
        return
    for pattern in (_TAG, _TAG_IN_JSON):
        places = list(pattern.finditer(text))
        if len(places) == len(tags):
            break
    else:
        return
    if role == "tool":
        whole = without_notes(given.strip())
        is_block = tags[0]["id"] and whole.startswith(tags[0].group()) and not tags[-1]["id"]
        if is_block and whole.endswith(tags[-1].group()):
            yield tags[0]["id"], places[0].end(), places[-1].start()
        return
    pairs: list[tuple[int, int]] = []
    open_tags: list[int] = []
    for i, tag in enumerate(tags):
        if tag["id"]:
            open_tags.append(i)
        elif open_tags:
            first = open_tags.pop()
            while pairs and pairs[-1][0] > first:
                pairs.pop()
            pairs.append((first, i))
    for first, last in pairs:
        yield tags[first]["id"], places[first].end(), places[last].start()


def find_thoughts(text: str, *, is_open: bool = False) -> list[tuple[int, int]]:
    """`(begin, end)` of what stands between the tags of reasoning in an answer. `is_open`: the template opened one
    before the text. One that was never closed, or says nothing, is none."""
    before = THINK_OPENING if is_open else ""
    found = ((match.start(1), match.end(1)) for match in _THOUGHT.finditer(before + text) if match[1].strip())
    return [(begin - len(before), end - len(before)) for begin, end in found]


_TAG = re.compile(r'<ephemeral_observation\s+id="(?P<id>[^"\\<>\n]{1,200})"\s*>|</ephemeral_observation>')
_TAG_IN_JSON = re.compile(_TAG.pattern.replace('"', r'\\"'))  # as a template writes it that makes JSON of content
_THOUGHT = re.compile(f"{THINK_OPENING}(.*?){THINK_CLOSING}", re.DOTALL)
