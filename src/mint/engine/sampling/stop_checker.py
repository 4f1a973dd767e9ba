"""When a sampled sequence ends: at a stop token, or when its bytes come to contain a stop string.

Knows nothing of tokens' probabilities or of text encodings: the vocabulary's bytes come with the rule. Letters: R
sequences of one step.
"""

from __future__ import annotations

import numpy as np

from mint.engine.protocol import StopRule


class StopChecker:
    """Follows many sequences, each under its own rule; stop tokens are compared for all of them at once."""

    def __init__(self) -> None:
        """None followed."""
        self._ids = np.zeros((0, 1), np.int64)  # of each sequence, filled up with -1, which no token is
        self._texts: dict[int, tuple[StopRule, bytes]] = {}  # those with strings: the rule and the end of the text

    def add(self, sequences: np.ndarray, rule: StopRule) -> None:
        """Follows `sequences` (non-negative numbers, [R]) under `rule`, from an empty text on."""
        height, width = int(sequences.max()) + 1, max(1, len(rule.token_ids))
        missing = max(0, height - len(self._ids)), max(0, width - self._ids.shape[1])
        if any(missing):
            missing = missing[0] and max(missing[0], len(self._ids)), missing[1]
            self._ids = np.pad(self._ids, ((0, missing[0]), (0, missing[1])), constant_values=-1)
        self._ids[sequences] = -1
        self._ids[sequences, : len(rule.token_ids)] = sorted(rule.token_ids)
        if rule.strings:
            self._texts |= dict.fromkeys(sequences.tolist(), (rule, b""))

    def remove(self, sequences: np.ndarray) -> None:
        """Follows these no more."""
        for sequence in sequences.tolist() if self._texts else ():
            self._texts.pop(sequence, None)

    def stopped(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Takes one more token of each of `sequences`; bool [R], whether it was the last."""
        stopped = (self._ids[sequences] == tokens[:, None]).any(axis=1)
        if self._texts:
            for row, (sequence, token) in enumerate(zip(sequences.tolist(), tokens.tolist(), strict=True)):
                if not stopped[row] and sequence in self._texts:
                    stopped[row] = self._matches(sequence, token)
        return stopped

    def _matches(self, sequence: int, token: int) -> bool:
        rule, before = self._texts[sequence]
        # A matrix may be padded to more tokens than there are: those have no text.
        piece = rule.vocabulary[token] if token < len(rule.vocabulary) else b""
        # A new match must end in the new piece, so of the text before only the longest string's length matters.
        text = before + piece
        if any(string in text for string in rule.strings):
            return True
        keep = max(len(string) for string in rule.strings) - 1
        self._texts[sequence] = rule, text[-keep:] if keep else b""
        return False
