"""When a sampled sequence ends: at a stop token, or when its bytes come to contain a stop string.

Knows nothing of tokens' probabilities or of text encodings: the vocabulary's bytes come with the rule.
"""

from __future__ import annotations

import numpy as np

from mint.engine.protocol import StopRule


class StopWatch:
    """Follows many sequences, each under its own rule."""

    def __init__(self, rules: list[StopRule]) -> None:
        """`rules[i]` is that of sequence i."""
        self._rules = rules
        self._tails: dict[int, bytes] = {}

    def stopped(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Takes one more token of each of `sequences`; bool, whether it was the last."""
        pairs = zip(sequences.tolist(), tokens.tolist(), strict=True)
        return np.fromiter((self._ends(sequence, token) for sequence, token in pairs), bool, len(sequences))

    def _ends(self, sequence: int, token: int) -> bool:
        rule = self._rules[sequence]
        if token in rule.token_ids:
            return True
        if not rule.strings:
            return False
        # A new match must end in the new piece, so of the text before only the longest string's length matters.
        text = self._tails.get(sequence, b"") + rule.vocabulary[token]
        if any(string in text for string in rule.strings):
            return True
        keep = max(len(string) for string in rule.strings) - 1
        self._tails[sequence] = text[-keep:] if keep else b""
        return False
