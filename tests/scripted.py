"""A model that is told what to say: it stands where a server's grammars do, and holds each answer to one text.

The text is written in tokens of one byte, as no tokenizer cuts it: an answer that the server does not know again when
it comes back is rendered anew, and shows in the tokens prefilled. All else of the server is as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from akv_server.completions import Completions
from akv_server.grammar import Constraint, Shape


class Script:
    """`next_answer` is asked once for each answer: for its text, and what to call with each of its tokens."""

    def __init__(self, service: Completions, next_answer: Callable[[], tuple[str, Callable[[], object]]]) -> None:
        self._num_vocab = service._num_vocab
        self._end_id = min(service.chat.end_ids)
        names = ((service.tokenizer.token_bytes(token_id), token_id) for token_id in range(self._num_vocab))
        self._bytes = {name: token_id for name, token_id in names if len(name) == 1}
        self._next_answer = next_answer

    def constraint(self, shape: Shape) -> Callable[[], Constraint]:
        text, on_token = self._next_answer()
        ids = [self._bytes[bytes([byte])] for byte in text.encode()]
        return lambda: _Said([*ids, self._end_id], self._num_vocab, on_token)


class _Said(Constraint):
    def __init__(self, ids: list[int], num_vocab: int, on_token: Callable[[], object]) -> None:
        self._left = ids[::-1]
        self._num_vocab = num_vocab
        self._on_token = on_token

    def mask(self) -> Any:
        mask = np.zeros(self._num_vocab, np.bool_)
        mask[self._left[-1]] = True
        return mask

    def take(self, token_id: int) -> bool:
        assert token_id == self._left.pop()
        self._on_token()
        return not self._left
