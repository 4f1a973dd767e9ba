"""The text of each sampled token id, logged once per run, so that a run can be read without its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mint.tokenizer import token_pieces


class TokenPieces:
    """Makes the rows for token ids that a run has not logged yet."""

    def __init__(self, tokenizer: Any, known: Iterable[int] = ()) -> None:
        """`known` ids are logged already."""
        self.tokenizer = tokenizer
        self._known = np.fromiter(sorted(set(known)), dtype=np.int64)

    def new_rows(self, step: int, tokens: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
        """One row for each new id in `tokens`, the token ids of each rollout of `step`.

        A piece that is not valid UTF-8 by itself, such as a part of a character, also has its `bytes` in hexadecimal.
        """
        joined = [np.asarray(ids, dtype=np.int64) for ids in tokens if len(ids)]
        if not joined:
            return []
        new = np.setdiff1d(np.concatenate(joined), self._known)
        self._known = np.union1d(self._known, new)
        ids = new.tolist()
        pieces = zip(ids, token_pieces(self.tokenizer, ids), strict=True)
        return [_row(step, one, piece, is_special=special) for one, (piece, special) in pieces]


def _row(step: int, one: int, piece: bytes, *, is_special: bool) -> dict[str, Any]:
    text = piece.decode("utf-8", "replace") if piece else f"⟨{one}⟩"
    row = {"step": step, "id": one, "text": text, "special": is_special}
    return row if not piece or text.encode() == piece else {**row, "bytes": piece.hex()}
