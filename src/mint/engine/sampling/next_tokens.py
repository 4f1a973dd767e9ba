"""One step of sampling after the forward: draws the next token of each sequence, and records it.

Letters: N sequences that draw · R rows of logits · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mint.engine.drawing.draw import Draw, logits_at, processed, take, without_restrictions
from mint.engine.drawing.token_masks import TokenMasks
from mint.engine.protocol import NO_TOKEN
from mint.engine.sampling.sequences import Sequences
from mint.engine.transfers import for_float64

DIVERGED = "The weights give logits that are not finite: they have diverged. Sample from an earlier checkpoint"


def finite_rows(numbers: Tensor) -> np.ndarray:
    """Whether all numbers of a row are finite: bool [N] for float32 [N, W]. NaN and infinity reach the extremes, so
    each number is read twice; `isfinite` would read and write it several times."""
    return (numbers.amin(1).isfinite() & numbers.amax(1).isfinite()).cpu().numpy()


@dataclass(frozen=True)
class NextTokens:
    """For each of N sequences its token int64, the logprob float32 as its job asked, whether it has ended, and whether
    the draw was sound: the logits were finite, and a token was possible."""

    tokens: np.ndarray
    logprobs: np.ndarray
    ended: np.ndarray
    finite: np.ndarray
    possible: np.ndarray

    @property
    def is_sound(self) -> bool:
        """Whether all draws were sound."""
        return bool(self.finite.all() and self.possible.all())

    def error(self, rows: np.ndarray) -> str | None:
        """The error of the first of `rows` that is not sound; None if all are."""
        if not self.finite[rows].all():
            return DIVERGED
        return None if self.possible[rows].all() else NO_TOKEN


def next_tokens(draw: Draw, sequences: Sequences, slots: np.ndarray, rows: np.ndarray, logits: Tensor) -> NextTokens:
    """Draws for `slots` [N], from their `rows` [N] of the logits float32 [R, V], and adds the tokens to `sequences`."""
    logits = for_float64(logits)
    own = sequences.of[slots]
    ruled = np.flatnonzero(own["ruled"])
    changing, masks = ruled, None
    if len(ruled):
        are_changing = sequences.rules.changing(slots[ruled])
        changing, only_masked = ruled[are_changing], ruled[~are_changing]
        masks = sequences.rules.masks(slots[only_masked], logits.shape[1])
        if masks is not None:
            masks = TokenMasks(only_masked[masks.at], masks.bits)
    # The policy's own logprobs: rules change what is drawn, not what the policy says of it. Of sequences whose logits
    # change, the first draw is thrown away.
    table = without_restrictions(own, changing) if len(changing) else own
    everyone = np.arange(len(slots))
    tokens, logprobs, normalisers = draw(logits, rows, table, everyone, masks)
    finite = np.isfinite(logprobs)
    possible = np.ones(len(slots), bool)
    if masks is not None:
        possible[masks.at] = masks.allow(tokens[masks.at])
        finite[masks.at] = np.isfinite(normalisers[masks.at])
    changed = logits
    if len(changing):
        changed = take(logits, rows[changing]).clone()
        sequences.rules.apply(changed, slots[changing], own["temperature"][changing], sequences.tokens)
        tokens[changing], _, _ = draw(changed, np.arange(len(changing)), own, changing)
        logprobs[changing] = logits_at(logits, rows[changing], tokens[changing]) - normalisers[changing]
        possible[changing] = np.isfinite(logits_at(changed, np.arange(len(changing)), tokens[changing]))
    drawn_from = None
    if own["processed"].any() or own["both"].any():
        drawn_from = np.zeros(len(slots), np.float32)
        asked = own["processed"] | own["both"]
        inside = np.flatnonzero(asked[changing])
        if len(inside):
            drawn_from[changing[inside]] = processed(changed, inside, own[changing[inside]], tokens[changing[inside]])
        asked[changing] = False
        plain = np.flatnonzero(asked)
        if len(plain):
            allowed = take(logits, rows[plain])
            if masks is not None:
                allowed = allowed.clone()
                masks.of(plain).exclude(allowed)
            everything = np.arange(len(plain))
            drawn_from[plain] = processed(allowed, everything, own[plain], tokens[plain])
        logprobs = np.where(own["processed"], drawn_from, logprobs)
    if own["width"].any():
        sequences.note_best(slots, rows, logits)
    ended = sequences.note(slots, tokens, logprobs, drawn_from if own["both"].any() else None)
    return NextTokens(tokens, logprobs, ended, finite, possible)


def record_drawn(sequences: Sequences, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> NextTokens:
    """Adds `tokens` int64 [N] that a device has drawn for `slots` [N], with their logprobs float32 [N], to `sequences`,
    of which none has logit rules, or asked for anything else."""
    ended = sequences.note(slots, tokens, logprobs)
    return NextTokens(tokens, logprobs, ended, np.isfinite(logprobs), np.ones(len(slots), bool))
