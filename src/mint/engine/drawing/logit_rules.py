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
from mint.engine.drawing.token_masks import MaskTable, TokenMasks
from mint.engine.protocol import LogitRules, SampleJob
from mint.engine.transfers import upload


@dataclass(frozen=True)
class SequenceRules:
    """The rules of one sequence."""

    rules: LogitRules
    prompt: np.ndarray
    ends: np.ndarray


_FLAGS = np.dtype([("masked", np.bool_), ("grammar", np.bool_), ("changing", np.bool_)])
"""`masked`: tokens are excluded, by `allowed` or a grammar · `changing`: rules do more than that."""


class LogitRuleTable:
    """The rules of all sequences that have some, by slot."""

    def __init__(self) -> None:
        self._of: dict[int, SequenceRules] = {}
        self._flags: np.ndarray = np.zeros(0, _FLAGS)
        self._masks = MaskTable()
        self._unopened: list[int] = []
        self._ends = np.zeros(0, np.int64)  # of any grammar there was

    def add(self, slots: np.ndarray, job: SampleJob) -> None:
        """Starts the rules of a job's samples in `slots`."""
        rules = job.rules
        if rules is None:
            return
        own = SequenceRules(rules, np.unique(job.prompt), np.array(sorted(job.stop.token_ids), np.int64))
        self._of |= dict.fromkeys(slots.tolist(), own)
        missing = int(slots.max()) + 1 - len(self._flags)
        if missing > 0:
            self._flags = np.concatenate([self._flags, np.zeros(max(missing, len(self._flags)), _FLAGS)])
        has_grammar = rules.grammar is not None
        if rules.grammar is not None:
            self._ends = np.union1d(self._ends, sorted(rules.grammar.ends))
        is_masked = has_grammar or rules.allowed is not None
        changes = rules != LogitRules(allowed=rules.allowed, grammar=rules.grammar)
        self._flags[slots] = (is_masked, has_grammar, changes)
        if is_masked:
            self._unopened += slots.tolist()

    def remove(self, slots: np.ndarray) -> None:
        """Forgets the rules of `slots`."""
        for slot in slots.tolist() if self._of else ():
            if self._of.pop(slot, None) is not None and self._flags[slot]["masked"]:
                self._masks.close(slot)
        if self._unopened:
            self._unopened = [slot for slot in self._unopened if slot in self._of]

    def note(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Adds a token to each of `slots`, both [N]; returns whether its grammar ends there, bool [N]."""
        ended = np.zeros(len(slots), bool)
        going_on = self._flags["grammar"][slots]
        if not going_on.any():
            return ended
        for row in np.flatnonzero((tokens[:, None] == self._ends).any(1) & going_on).tolist():
            grammar = self._of[int(slots[row])].rules.grammar
            ended[row] = grammar is not None and int(tokens[row]) in grammar.ends
        going_on &= ~ended
        self._masks.advance(slots[going_on], tokens[going_on])
        return ended

    def ready(self, slots: np.ndarray, patience_s: float | None) -> np.ndarray:
        """Whether the masks of each of `slots` [N] are written, bool [N], after waiting for them up to `patience_s`, or
        until they are."""
        found = np.ones(len(slots), bool)
        at = np.flatnonzero(self._flags["grammar"][slots])
        if len(at):
            found[at] = self._masks.ready(slots[at], patience_s)
        return found

    def changing(self, slots: np.ndarray) -> np.ndarray:
        """Whether the rules of each of `slots` do more than to exclude tokens, bool [N]."""
        found: np.ndarray = self._flags["changing"][slots]
        return found

    def masks(self, slots: np.ndarray, width: int) -> TokenMasks | None:
        """Which tokens each of `slots` [N] may draw next, for those that may not draw all; None if all may."""
        for slot in self._unopened:
            rules = self._of[slot].rules
            self._masks.open(slot, rules.allowed, rules.grammar, width)
        self._unopened = []
        at = np.flatnonzero(self._flags["masked"][slots])
        return TokenMasks(at, self._masks.read(slots[at])) if len(at) else None

    def apply(
        self, logits: Tensor, slots: np.ndarray, temperature: np.ndarray, drawn: Callable[[int], np.ndarray]
    ) -> None:
        """Changes logits float32 [N, V], one row for each of `slots` [N], in place; `temperature` float64 [N].

        `drawn(slot)` are the tokens that a sequence has drawn, int64 [T].
        """
        own = [self._of[slot] for slot in slots.tolist()]
        masks = self.masks(slots, logits.shape[1])
        if masks is not None:
            masks.exclude(logits)
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
