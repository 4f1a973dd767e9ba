"""Says when a sampled sequence ends: at a stop token, or as soon as its bytes contain a stop string.

Knows nothing of probabilities or text encodings: a rule brings the bytes of the vocabulary.

Letters: R sequences of one step.
"""

from __future__ import annotations

import numpy as np

from mint.engine.protocol import StopRule


class StopChecker:
    """Watches many sequences, each with its own rule. Stop tokens are compared for all sequences at once."""

    def __init__(self) -> None:
        # Stop tokens of each sequence, padded with -1.
        self._ids = np.zeros((0, 1), np.int64)
        # Of sequences with stop strings: the rule, and the end of the text.
        self._texts: dict[int, tuple[StopRule, bytes]] = {}
        # Of these: the tokens whose text cannot be the beginning of a stop string, counted down.
        self._early: dict[int, int] = {}

    def add(self, sequences: np.ndarray, rule: StopRule, *, min_tokens: int = 0) -> None:
        """Starts to watch `sequences` (non-negative numbers, [R]), whose text is empty. A stop string ends a sequence
        if it begins after `min_tokens`."""
        height = int(sequences.max()) + 1
        width = max(1, len(rule.token_ids))
        missing = max(0, height - len(self._ids)), max(0, width - self._ids.shape[1])
        if any(missing):
            missing = missing[0] and max(missing[0], len(self._ids)), missing[1]
            self._ids = np.pad(self._ids, ((0, missing[0]), (0, missing[1])), constant_values=-1)
        self._ids[sequences] = -1
        self._ids[sequences, : len(rule.token_ids)] = sorted(rule.token_ids)
        if rule.strings:
            self._texts |= dict.fromkeys(sequences.tolist(), (rule, b""))
            self._early |= dict.fromkeys(sequences.tolist() if min_tokens else (), min_tokens)

    def remove(self, sequences: np.ndarray) -> None:
        for sequence in sequences.tolist() if self._texts else ():
            self._texts.pop(sequence, None)
            self._early.pop(sequence, None)

    def stopped(self, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Adds one token to each of `sequences`; returns whether it was the last, bool [R]."""
        stopped = (self._ids[sequences] == tokens[:, None]).any(axis=1)
        if self._texts:
            for row, (sequence, token) in enumerate(zip(sequences.tolist(), tokens.tolist(), strict=True)):
                if not stopped[row] and sequence in self._texts:
                    stopped[row] = self._matches(sequence, token)
        return stopped

    def _matches(self, sequence: int, token: int) -> bool:
        if self._early.get(sequence, 0):
            self._early[sequence] -= 1
            return False
        rule, before = self._texts[sequence]
        # A padded vocabulary has tokens without text.
        piece = rule.vocabulary[token] if token < len(rule.vocabulary) else b""
        # A new match ends in the new piece, so of the earlier text only the longest string's length matters.
        text = before + piece
        if any(string in text for string in rule.strings):
            return True
        keep = max(len(string) for string in rule.strings) - 1
        self._texts[sequence] = rule, text[-keep:] if keep else b""
        return False
