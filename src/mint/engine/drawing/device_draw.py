"""The draw of a step that stays on the device: fixed shapes, and nothing is read back, so that a graph can hold it.

The same numbers as `draw.draw`: the uniform numbers come from the same counters, and every row is treated alone. There,
the host sorts rows by how they draw. Here each way is computed for all rows, and each row takes its own.

Letters: R rows of logits · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.draw import GREEDY_BELOW, draw_restricted, inverse_cdf
from mint.engine.drawing.random_stream import uniform_of
from mint.engine.model.functions import exponentials, row_blocks

RULES = 4
"""Numbers that say how a row draws."""


@dataclass(frozen=True)
class DrawRules:
    """How each row draws: `columns` float64 [4, R] are its uniform number, temperature, top-k and top-p.
    `is_restricted`: whether top-k or top-p excludes a token in any row, which costs a sort of all logits."""

    columns: np.ndarray
    is_restricted: bool

    @classmethod
    def of(cls, own: np.ndarray, emitted: np.ndarray) -> DrawRules:
        """Those of the sequences `own` [R], structured as `Draw` reads them, after so many tokens each, int64 [R]."""
        uniforms = uniform_of(own["stream"], emitted)
        rules = [uniforms, own["temperature"], own["top_k"].astype(np.float64), own["top_p"]]
        is_sampled = own["temperature"] >= GREEDY_BELOW
        is_restricted = is_sampled & ((own["top_k"] > 0) | (own["top_p"] < 1))
        return cls(np.stack(rules), bool(is_restricted.any()))


def draw_rows(logits: Tensor, rules: Tensor, *, is_restricted: bool, rows_at_once: int | None = None) -> Tensor:
    """Tokens, their logprobs under the unprocessed logits, and the normalisers in these: float64 [3, R], which holds
    each exactly, of logits float32 [R, V]. `rules` as in `DrawRules`; `rows_at_once` as `draw` takes them."""
    size = rows_at_once or max(1, len(logits))
    parts = [_draw_block(logits[rows], rules[:, rows], is_restricted) for rows in row_blocks(len(logits), size)]
    return torch.cat(parts, dim=1)


def _draw_block(logits: Tensor, rules: Tensor, is_restricted: bool) -> Tensor:
    uniforms, temperature, top_k, top_p = (own[:, None] for own in rules)
    is_greedy = temperature < GREEDY_BELOW
    temperature = temperature.masked_fill(is_greedy, 1.0)
    _, normaliser = exponentials(logits)
    scaled = (logits - logits.amax(1, keepdim=True)).div_(temperature.float()).exp_()
    tokens = inverse_cdf(scaled, uniforms)
    if is_restricted:
        excludes = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1)
        tokens = torch.where(excludes, draw_restricted(logits, uniforms, temperature, top_k, top_p)[:, None], tokens)
    tokens = torch.where(is_greedy, logits.argmax(1, keepdim=True), tokens)
    logprobs = logits.gather(1, tokens).squeeze(1) - normaliser
    return torch.stack([tokens.squeeze(1).double(), logprobs.double(), normaliser.double()])
