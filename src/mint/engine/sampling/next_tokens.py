"""One step of sampling after the forward: draws the next token of each sequence, and records it.

Letters: N sequences that draw · R rows of logits · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.draw import Draw, processed, take
from mint.engine.sampling.sequences import Sequences

DIVERGED = "The weights give logits that are not finite: they have diverged. Sample from an earlier checkpoint"
NO_TOKEN = (
    "The sampling rules of this request exclude every token: allowed_token_ids, logit_bias, min_tokens and "
    "structured_outputs contradict one another, or the grammar is too complex. Relax one of them"
)


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
    own = sequences.of[slots]
    ruled = np.flatnonzero(own["ruled"])
    # The policy's own logprobs: rules change what is drawn, not what the policy says of it.
    table = _without_restrictions(own, ruled) if len(ruled) else own
    everyone = np.arange(len(slots))
    tokens, logprobs, normalisers = draw(logits, rows, table, everyone)
    finite = np.isfinite(logprobs)
    possible = np.ones(len(slots), bool)
    changed = logits
    if len(ruled):
        changed = take(logits, rows[ruled]).clone()
        sequences.rules.apply(changed, slots[ruled], own["temperature"][ruled], sequences.tokens)
        tokens[ruled], _, _ = draw(changed, np.arange(len(ruled)), own, ruled)
        logprobs[ruled] = _at(logits, rows[ruled], tokens[ruled]) - normalisers[ruled]
        possible[ruled] = np.isfinite(_at(changed, np.arange(len(ruled)), tokens[ruled]))
    drawn_from = None
    if own["processed"].any() or own["both"].any():
        drawn_from = np.zeros(len(slots), np.float32)
        asked = own["processed"] | own["both"]
        plain = np.flatnonzero(asked & ~own["ruled"])
        if len(plain):
            drawn_from[plain] = processed(logits, rows[plain], own[plain], tokens[plain])
        inside = np.flatnonzero(asked[ruled])
        if len(inside):
            drawn_from[ruled[inside]] = processed(changed, inside, own[ruled[inside]], tokens[ruled[inside]])
        logprobs = np.where(own["processed"], drawn_from, logprobs)
    if own["width"].any():
        sequences.note_best(slots, rows, logits)
    ended = sequences.note(slots, tokens, logprobs, drawn_from if own["both"].any() else None)
    return NextTokens(tokens, logprobs, ended, finite, possible)


def _without_restrictions(own: np.ndarray, ruled: np.ndarray) -> np.ndarray:
    """The structured rows `own` [N], of which those in `ruled` draw plainly: their draw is thrown away."""
    table = own.copy()
    table["temperature"][ruled], table["top_k"][ruled], table["top_p"][ruled] = 1.0, -1, 1.0
    return table


def _at(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The logits [R, V] at N places, float32 [N]."""
    places = (torch.from_numpy(part).to(logits.device) for part in (rows, tokens))
    found: np.ndarray = logits[tuple(places)].cpu().numpy()
    return found
