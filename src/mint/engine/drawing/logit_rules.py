"""Rules that change the logits of a sequence before a token is drawn: excluded tokens, biases, penalties, a grammar.

The rules apply in vLLM's order: the tokens that `allowed` and the grammar let through; `bias`; no end before
`min_tokens`; the repetition, frequency and presence penalties; `min_p`, after the temperature. Temperature, top-k and
top-p follow in `draw`. A row depends on its own logits and its own sequence alone.

Letters: N sequences with rules · V vocabulary · T tokens that a sequence has drawn · J places (row, token).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.draw import GREEDY_BELOW
from mint.engine.protocol import GrammarState, LogitRules, SampleJob
from mint.engine.upload import upload


@dataclass
class SequenceRules:
    """The rules of one sequence, and how far its grammar has come."""

    rules: LogitRules
    prompt: np.ndarray
    ends: np.ndarray
    grammar: GrammarState | None
    only_masks: bool
    """Whether tokens are excluded, and no logit is changed otherwise."""


class LogitRuleTable:
    """The rules of all sequences that have some, by slot."""

    def __init__(self) -> None:
        self._of: dict[int, SequenceRules] = {}

    def add(self, slots: np.ndarray, job: SampleJob) -> None:
        """Starts the rules of a job's samples in `slots`."""
        rules = job.rules
        if rules is None:
            return
        prompt = np.unique(job.prompt)
        only_masks = rules == LogitRules(allowed=rules.allowed, grammar=rules.grammar)
        ends = np.array(sorted(job.stop.token_ids), np.int64)
        for slot in slots.tolist():
            grammar = None if rules.grammar is None else rules.grammar.start()
            self._of[slot] = SequenceRules(rules, prompt, ends, grammar, only_masks)

    def remove(self, slots: np.ndarray) -> None:
        """Forgets the rules of `slots`."""
        for slot in slots.tolist() if self._of else ():
            self._of.pop(slot, None)

    def note(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Adds a token to each of `slots`, both [N]; returns whether its grammar ends there, bool [N]."""
        ended = np.zeros(len(slots), bool)
        for row, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
            grammar = self._of[slot].grammar
            if grammar is not None:
                grammar.advance(token)
                ended[row] = grammar.has_ended
        return ended

    def apply(
        self, logits: Tensor, slots: np.ndarray, temperature: np.ndarray, drawn: Callable[[int], np.ndarray]
    ) -> None:
        """Changes logits float32 [N, V], one row for each of `slots` [N], in place; `temperature` float64 [N].

        `drawn(slot)` are the tokens that a sequence has drawn, int64 [T].
        """
        own = [self._of[slot] for slot in slots.tolist()]
        _mask(logits, own)
        if all(sequence.only_masks for sequence in own):
            return
        tokens = [drawn(slot) for slot in slots.tolist()]
        _add_biases(logits, own, tokens)
        _penalise(logits, own, tokens)
        _apply_min_p(logits, own, temperature)


def _add_biases(logits: Tensor, own: list[SequenceRules], tokens: list[np.ndarray]) -> None:
    bias, early = _Places(logits.device), _Places(logits.device)
    for row, (sequence, so_far) in enumerate(zip(own, tokens, strict=True)):
        if sequence.rules.bias is not None:
            bias.add(row, sequence.rules.bias.tokens, sequence.rules.bias.values)
        if len(so_far) < sequence.rules.min_tokens:
            early.add(row, sequence.ends, -math.inf)
    bias.add_to(logits)
    early.add_to(logits)


def _penalise(logits: Tensor, own: list[SequenceRules], tokens: list[np.ndarray]) -> None:
    repeated, counted = _Places(logits.device), _Places(logits.device)
    for row, (sequence, so_far) in enumerate(zip(own, tokens, strict=True)):
        rules = sequence.rules
        if rules.repetition_penalty != 1:
            repeated.add(row, np.union1d(sequence.prompt, so_far), rules.repetition_penalty)
        if rules.frequency_penalty or rules.presence_penalty:
            known, counts = np.unique(so_far, return_counts=True)
            counted.add(row, known, -(rules.frequency_penalty * counts + rules.presence_penalty))
    repeated.divide(logits)
    counted.add_to(logits)


class _Places:
    """Values at J places of logits [N, V]; no place twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, tokens: np.ndarray, values: np.ndarray | float) -> None:
        """A value, or one for each, at `tokens` of a row."""
        self._rows.append(np.full(len(tokens), row))
        self._tokens.append(tokens)
        self._values.append(np.broadcast_to(values, len(tokens)).astype(np.float32))

    def add_to(self, logits: Tensor) -> None:
        """Adds the values."""
        if self._rows:
            rows, tokens, values = self._tensors()
            logits[rows, tokens] = logits[rows, tokens] + values

    def divide(self, logits: Tensor) -> None:
        """Divides positive logits by the values, and multiplies the others (the CTRL paper, arXiv 1909.05858)."""
        if self._rows:
            rows, tokens, values = self._tensors()
            found = logits[rows, tokens]
            logits[rows, tokens] = torch.where(found > 0, found / values, found * values)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens = upload(self._device, np.concatenate(self._rows), np.concatenate(self._tokens))
        (values,) = upload(self._device, np.concatenate(self._values))
        return rows, tokens, values


def _mask(logits: Tensor, own: list[SequenceRules]) -> None:
    """Excludes what `allowed` or the grammar of a sequence excludes."""
    width = logits.shape[1]
    rows, masks = [], []
    for row, sequence in enumerate(own):
        parts = [] if sequence.rules.allowed is None else [packed(sequence.rules.allowed, width)]
        if sequence.grammar is not None:
            parts.append(sequence.grammar.allowed())
        if parts:
            rows.append(row)
            masks.append(parts[0] if len(parts) == 1 else parts[0] & parts[1])
    if not rows:
        return
    excluded = np.unpackbits(~np.stack(masks), axis=1, count=width, bitorder="little").view(np.bool_)
    (flags,) = upload(logits.device, excluded)
    if len(rows) == len(own):
        logits.masked_fill_(flags, -torch.inf)
    else:
        (places,) = upload(logits.device, np.array(rows))
        logits[places] = logits[places].masked_fill_(flags, -torch.inf)


def packed(tokens: np.ndarray, width: int) -> np.ndarray:
    """Token ids as bits, uint8 [ceil(width / 8)]: bit i % 8, from the lowest, of byte i // 8 stands for token i."""
    flags = np.zeros(width, bool)
    flags[tokens] = True
    return np.packbits(flags, bitorder="little")


def _apply_min_p(logits: Tensor, own: list[SequenceRules], temperature: np.ndarray) -> None:
    """Excludes tokens whose probability is below `min_p` times the largest (arXiv 2407.01082)."""
    least = np.array([sequence.rules.min_p for sequence in own])
    rows = np.flatnonzero((least > 0) & (temperature >= GREEDY_BELOW))
    if not len(rows):
        return
    (places,) = upload(logits.device, rows)
    (below,) = upload(logits.device, (temperature[rows] * np.log(least[rows])).astype(np.float32))
    chosen = logits[places]
    chosen.masked_fill_(chosen < chosen.amax(1, keepdim=True) + below[:, None], -torch.inf)
    logits[places] = chosen
