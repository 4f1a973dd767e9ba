"""From logits to tokens: temperature, top-k, top-p (in this order), one uniform number per row, inverse CDF.

Every row is treated alone, so a row's token does not depend on the rows beside it. This is the reference in torch; a
CPU with native kernels draws by `engine/cpu/draw.py`. Knows the columns of `Sequences` that say how a sequence draws;
knows nothing of jobs.

Letters: R rows of logits · N sequences that draw · K draws of one row · V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.drawing.random_stream import uniform_of
from mint.engine.drawing.token_masks import TokenMasks
from mint.engine.model.functions import exponentials, row_blocks
from mint.engine.model.operations import Operations
from mint.engine.transfers import upload

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: float32 could not tell the difference."""

_BLOCK = 64


class Draw(Protocol):
    """Draws the next token of each sequence, as a function of that sequence's row alone."""

    def __call__(
        self,
        logits: Tensor,
        rows: np.ndarray,
        table: np.ndarray,
        slots: np.ndarray,
        masks: TokenMasks | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws for the sequences in `slots` [N] of `table`, from `rows` [N] of the logits float32 [R, V]; `masks` say
        which tokens some of the N may draw. Of a sequence that may draw none, the token is any.

        Returns tokens int64 [N], their logprobs float32 [N] under the unprocessed logits, which are not finite where
        the logits are not, and the normalisers float32 [N], which are subtracted from the logits. `table` is
        structured: `stream` (uint64), `emitted` (int64), `temperature` (float64), `top_k` (int64) and `top_p` (float64)
        are read; the uniform number of a draw is `uniform_of(stream, emitted)`.
        """
        ...


class TorchDraw:
    """`Draw` in torch."""

    def __init__(self, operations: Operations, rows_at_once: int | None = None) -> None:
        """`rows_at_once`: as `draw` takes them; None: as many as the operations say."""
        self._operations = operations
        self._rows_at_once = rows_at_once

    def __call__(
        self,
        logits: Tensor,
        rows: np.ndarray,
        table: np.ndarray,
        slots: np.ndarray,
        masks: TokenMasks | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if masks is None:
            return self._draw(logits, rows, table[slots])
        at = masks.at
        # Their first draw is thrown away: it gives the normalisers of the logits as they are.
        tokens, logprobs, normalisers = self._draw(logits, rows, without_restrictions(table[slots], at))
        allowed = take(logits, rows[at]).clone()
        TokenMasks(np.arange(len(at)), masks.bits).exclude(allowed)
        tokens[at], _, _ = self._draw(allowed, np.arange(len(at)), table[slots[at]])
        logprobs[at] = logits_at(logits, rows[at], tokens[at]) - normalisers[at]
        return tokens, logprobs, normalisers

    def _draw(self, logits: Tensor, rows: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = draw(
            take(logits, rows),
            uniform_of(own["stream"], own["emitted"]),
            *rules(own),
            rows_at_once=self._rows_at_once or self._operations.rows_in_cache(logits.shape[1]),
        )
        # All in one transfer; a float64 holds each exactly.
        columns = torch.stack([column.double() for column in found]).cpu().numpy()
        return columns[0].astype(np.int64), columns[1].astype(np.float32), columns[2].astype(np.float32)


def without_restrictions(own: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The structured rules `own` [N], of which those in `rows` draw plainly."""
    table = own.copy()
    table["temperature"][rows], table["top_k"][rows], table["top_p"][rows] = 1.0, -1, 1.0
    return table


def logits_at(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The logits [R, V] at N places, float32 [N]."""
    places = (torch.from_numpy(part).to(logits.device) for part in (rows, tokens))
    found: np.ndarray = logits[tuple(places)].cpu().numpy()
    return found


def processed(logits: Tensor, rows: np.ndarray, own: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logprobs, float32 [N], of tokens [N] under the distributions that they were drawn from, by `rows` [N] of logits
    [R, V] and the rules in the structured `own` [N]."""
    chosen = torch.from_numpy(tokens).to(logits.device)
    found: np.ndarray = processed_logprobs(take(logits, rows), chosen, *rules(own)).cpu().numpy()
    return found


def take(logits: Tensor, rows: np.ndarray) -> Tensor:
    """`rows` [N] of the logits [R, V], without a copy where N is R: then they are all rows in order."""
    return logits if len(rows) == len(logits) else logits[upload(logits.device, rows)[0]]


def rules(own: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Temperature, top-k and top-p of sequences, as contiguous copies: torch takes no strided columns."""
    return own["temperature"].copy(), own["top_k"].copy(), own["top_p"].copy()


def draw(
    logits: Tensor,
    uniforms: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    *,
    rows_at_once: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `choose`, with the logprob of each token under the unprocessed logits, and the normaliser that is in it,
    both float32 [R]; handles about `rows_at_once` rows together."""
    size = rows_at_once or max(1, len(logits))
    scratch = torch.empty(min(len(logits), 2 * size), logits.shape[1], device=logits.device)
    as_they_are = bool((temperature == 1).all())
    parts = []
    for rows in row_blocks(len(logits), size):
        own = logits[rows]
        rule = (temperature[rows], top_k[rows], top_p[rows])
        weights, normaliser = exponentials(own, scratch[: len(own)])
        tokens = choose(own, uniforms[rows], *rule, weights if as_they_are else None)
        parts.append((tokens, own.gather(1, tokens[:, None]).squeeze(1) - normaliser, normaliser))
    tokens, logprobs, normalisers = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, logprobs, normalisers


def choose(
    logits: Tensor,
    uniforms: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    weights: Tensor | None = None,
) -> Tensor:
    """A token per row, int64 [R]; logits float32 [R, V], the rest float64 or int64 [R]. `top_k` <= 0 is off.

    `weights` [R, V] saves work where all temperatures are 1: the logits' `exponentials`.
    """
    greedy = temperature < GREEDY_BELOW
    restricted = ~greedy & (((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for kind in ("greedy", "plain", "restricted"):
        chosen = {"greedy": greedy, "plain": ~greedy & ~restricted, "restricted": restricted}[kind]
        if not chosen.any():
            continue
        if kind == "plain" and weights is not None and chosen.all():
            return inverse_cdf(weights, _column(uniforms, logits.device)).squeeze(1)
        (rows,) = upload(logits.device, np.flatnonzero(chosen))
        own = logits if chosen.all() else logits[rows]
        if kind == "greedy":
            tokens[rows] = own.argmax(1)
            continue
        draws, temperatures, k, p = (
            _column(array[chosen], logits.device) for array in (uniforms, temperature, top_k, top_p)
        )
        tokens[rows] = (
            _draw(own, draws, temperatures) if kind == "plain" else draw_restricted(own, draws, temperatures, k, p)
        )
    return tokens


def processed_logprobs(
    logits: Tensor, tokens: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> Tensor:
    """Logprob of each chosen token, float32 [R], under the distribution that `choose` drew it from; greedy: 0."""
    temperatures, k, p = (_column(array, logits.device) for array in (temperature, top_k, top_p))
    greedy = temperatures < GREEDY_BELOW
    scaled = logits / temperatures.masked_fill(greedy, 1.0).float()
    chosen = scaled.gather(1, tokens[:, None]).squeeze(1)
    normaliser = scaled.logsumexp(1)
    restricted = ~greedy.squeeze(1) & (((k > 0) & (k < logits.shape[1])) | (p < 1)).squeeze(1)
    if restricted.any():
        own = restricted.nonzero().squeeze(1)
        weights, ids = _restrict(logits[own], temperatures[own], k[own], p[own])
        allowed = scaled[own].gather(1, ids).masked_fill_(weights == 0, -torch.inf)
        normaliser[own] = allowed.logsumexp(1)
    return (chosen - normaliser).masked_fill_(greedy.squeeze(1), 0.0)


def draw_many(logits: Tensor, uniforms: np.ndarray, temperature: float) -> Tensor:
    """Tokens int64 [R, K] drawn with replacement, one per uniform number [R, K]; logits float32 [R, V]."""
    if temperature < GREEDY_BELOW:
        return logits.argmax(1, keepdim=True).expand(-1, uniforms.shape[1])
    weights = (logits - logits.amax(1, keepdim=True)).div_(temperature).exp_()
    return inverse_cdf(weights, torch.from_numpy(uniforms).to(logits.device))


def _draw(logits: Tensor, draws: Tensor, temperature: Tensor) -> Tensor:
    weights = (logits - logits.amax(1, keepdim=True)).div_(temperature.float()).exp_()
    return inverse_cdf(weights, draws).squeeze(1)


def draw_restricted(logits: Tensor, draws: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Tokens int64 [R] of those that top-k and top-p leave; `draws` and the rules are columns [R, 1]."""
    weights, ids = _restrict(logits, temperature, top_k, top_p)
    return ids.gather(1, inverse_cdf(weights, draws)).squeeze(1)


def _restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [R, V], best first and 0 where top-k or top-p excludes, and the tokens they belong to."""
    # Stable: equal logits keep the order of their tokens, on every device.
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).div_(temperature.float()).exp_()
    rank = torch.arange(weights.shape[1], device=logits.device)
    weights.masked_fill_((top_k > 0) & (rank >= top_k), 0.0)
    # The nucleus is the smallest set that reaches top_p: a token stays if those before it do not reach it.
    total = weights.double().cumsum(1)
    before = total - weights
    weights.masked_fill_((before >= top_p * total[:, -1:]) & (rank > 0), 0.0)
    return weights, ids


def inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The tokens [R, K] whose stretch of the cumulated `weights` [R, V] holds `draws` [R, K]; never one of weight 0.

    Two levels: cumulating block sums and then one block costs a fraction of cumulating a large vocabulary.
    """
    missing = -weights.shape[1] % _BLOCK
    padded = F.pad(weights, (0, missing)) if missing else weights  # pad copies even if nothing is missing
    blocks = padded.view(len(weights), -1, _BLOCK)
    block, rest = _search(blocks.sum(2), draws)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).flatten(0, 1)
    index, _ = _search(inside, rest.reshape(-1, 1))
    return (block * _BLOCK + index.view_as(block)).clamp_(max=weights.shape[1] - 1)


def _search(weights: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the places where the cumulated weights reach the fractions `draws` [R, K] of the total, and the fractions
    within those places."""
    cumulated = weights.double().cumsum(1)
    total = cumulated[:, -1:]
    # Below the total even after rounding, so that a place of positive weight is found.
    wanted = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    # Logits that are not finite find no place; any will do, because the sampler then fails that job.
    place = torch.searchsorted(cumulated, wanted, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, place).double()
    start = cumulated.gather(1, place) - weight
    return place, ((wanted - start) / weight).clamp_(0.0, 1.0)


def _column(array: np.ndarray, device: torch.device) -> Tensor:
    return upload(device, array)[0][:, None]
