"""From logits to a token: temperature, top-k, top-p (in this order), one uniform number per row, inverse CDF.

Every row is treated alone, so a row's token does not depend on the rows beside it. Knows nothing of jobs or streams.

Letters: R rows · K draws of one row · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.device_arrays import upload

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: float32 could not tell the difference."""

CACHED_ENTRIES = 1 << 19
"""Logits of which all is made while they are in the cache: 2 MB."""

_BLOCK = 64


def exponentials(logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`exp(logits - max)` [R, V], in `out` if given, and the logsumexp [R] from logits float32 [R, V]: for a row the
    same bits, whatever the others are."""
    best = logits.amax(1, keepdim=True)
    weights = torch.sub(logits, best, out=out).exp_()
    # The sum of a lone row would be split over threads, and added in another order.
    total = weights.sum(1) if len(weights) > 1 else weights.expand(2, -1).sum(1)[:1]
    return weights, total.log_().add_(best.squeeze(1))


def draw(
    logits: Tensor, uniforms: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> tuple[Tensor, Tensor]:
    """As `choose`, and the logprob of each token under the logits as they are, float32 [R]."""
    size = len(logits) if logits.is_cuda else cached_rows(logits)
    room = torch.empty(min(len(logits), 2 * size), logits.shape[1], device=logits.device)
    as_they_are = bool((temperature == 1).all())
    parts = []
    for rows in row_blocks(len(logits), size):
        own, rule = logits[rows], (temperature[rows], top_k[rows], top_p[rows])
        weights, normaliser = exponentials(own, room[: len(own)])
        tokens = choose(own, uniforms[rows], *rule, weights if as_they_are else None)
        parts.append((tokens, own.gather(1, tokens[:, None]).squeeze(1) - normaliser))
    tokens, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, logprobs


def cached_rows(logits: Tensor) -> int:
    """Rows of logits [R, V] that fit the cache."""
    return max(2, CACHED_ENTRIES // logits.shape[1])


def row_blocks(count: int, size: int) -> Iterator[slice]:
    """Runs of `size` to twice as many rows; a lone row only where it is the only one."""
    for start in range(0, max(1, count - size + 1), size):
        yield slice(start, start + size if count - start >= 2 * size else count)


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
            return _inverse_cdf(weights, _column(uniforms, logits.device)).squeeze(1)
        (rows,) = upload(logits.device, np.flatnonzero(chosen))
        own = logits if chosen.all() else logits[rows]
        if kind == "greedy":
            tokens[rows] = own.argmax(1)
            continue
        draws, heat, k, p = (_column(array[chosen], logits.device) for array in (uniforms, temperature, top_k, top_p))
        tokens[rows] = _draw(own, draws, heat) if kind == "plain" else _draw_restricted(own, draws, heat, k, p)
    return tokens


def processed_logprobs(
    logits: Tensor, tokens: Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> Tensor:
    """Logprob of each chosen token, float32 [R], under the distribution that `choose` drew it from; greedy: 0."""
    heat, k, p = (_column(array, logits.device) for array in (temperature, top_k, top_p))
    greedy = heat < GREEDY_BELOW
    scaled = logits / heat.masked_fill(greedy, 1.0).float()
    chosen = scaled.gather(1, tokens[:, None]).squeeze(1)
    normaliser = scaled.logsumexp(1)
    restricted = ~greedy.squeeze(1) & (((k > 0) & (k < logits.shape[1])) | (p < 1)).squeeze(1)
    if restricted.any():
        own = restricted.nonzero().squeeze(1)
        weights, ids = _restrict(logits[own], heat[own], k[own], p[own])
        kept = scaled[own].gather(1, ids).masked_fill_(weights == 0, -torch.inf)
        normaliser[own] = kept.logsumexp(1)
    return (chosen - normaliser).masked_fill_(greedy.squeeze(1), 0.0)


def draw_many(logits: Tensor, uniforms: np.ndarray, temperature: float) -> Tensor:
    """Tokens int64 [R, K] drawn with replacement, one per uniform number [R, K]; logits float32 [R, V]."""
    if temperature < GREEDY_BELOW:
        return logits.argmax(1, keepdim=True).expand(-1, uniforms.shape[1])
    weights = (logits - logits.amax(1, keepdim=True)).div_(temperature).exp_()
    return _inverse_cdf(weights, torch.from_numpy(uniforms).to(logits.device))


def _draw(logits: Tensor, draws: Tensor, temperature: Tensor) -> Tensor:
    weights = (logits - logits.amax(1, keepdim=True)).div_(temperature.float()).exp_()
    return _inverse_cdf(weights, draws).squeeze(1)


def _draw_restricted(logits: Tensor, draws: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    weights, ids = _restrict(logits, temperature, top_k, top_p)
    return ids.gather(1, _inverse_cdf(weights, draws)).squeeze(1)


def _restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [R, V], best first and 0 where top-k or top-p excludes, and the tokens they belong to."""
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).div_(temperature.float()).exp_()
    rank = torch.arange(weights.shape[1], device=logits.device)
    weights.masked_fill_((top_k > 0) & (rank >= top_k), 0.0)
    # The nucleus is the smallest set that reaches top_p: a token stays if those before it do not reach it.
    total = weights.double().cumsum(1)
    before = total - weights
    weights.masked_fill_((before >= top_p * total[:, -1:]) & (rank > 0), 0.0)
    return weights, ids


def _inverse_cdf(weights: Tensor, draws: Tensor) -> Tensor:
    """The tokens [R, K] whose stretch of the cumulated `weights` [R, V] holds `draws` [R, K]; never one of weight 0.

    Two levels: cumulating block sums and then one block costs a fraction of cumulating a large vocabulary.
    """
    missing = -weights.shape[1] % _BLOCK
    padded = F.pad(weights, (0, missing)) if missing else weights  # padding copies, even by nothing
    blocks = padded.view(len(weights), -1, _BLOCK)
    block, rest = _search(blocks.sum(2), draws)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).flatten(0, 1)
    index, _ = _search(inside, rest.reshape(-1, 1))
    return (block * _BLOCK + index.view_as(block)).clamp_(max=weights.shape[1] - 1)


def _search(weights: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the cells that hold the fractions `draws` [R, K] of the total, and the fractions within those cells."""
    cumulated = weights.double().cumsum(1)
    total = cumulated[:, -1:]
    # Below the total even after rounding, so that a cell of positive weight is found.
    wanted = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    # Logits that are not finite find no cell; any will do, for the sampler then fails that job.
    cell = torch.searchsorted(cumulated, wanted, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, cell).double()
    start = cumulated.gather(1, cell) - weight
    return cell, ((wanted - start) / weight).clamp_(0.0, 1.0)


def _column(array: np.ndarray, device: torch.device) -> Tensor:
    return upload(device, array)[0][:, None]
