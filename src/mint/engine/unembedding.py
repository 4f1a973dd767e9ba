"""Logprobs of targets and their gradient, in chunks of rows: one chunk of logits exists at a time.

Where a row has one target and the unembedding is frozen, the gradient of the logprob is made together with it, and only
multiplied by its slope later; for other rows the logits are computed again. Knows nothing of losses, examples or
sampling.

Letters: T rows (hidden states) · U pairs (a row and one of its targets) · E hidden size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.choice import cached_rows, exponentials, row_blocks
from mint.engine.decoder import Decoder
from mint.engine.lora import UNEMBED, LoraRows

CHUNK_ENTRIES, MIN_CHUNK_ROWS = 1 << 20, 192
"""Logits computed at once: 4 MB in float32; but never fewer than so many rows, for each chunk reads the whole
unembedding, and from there on products are no faster."""


class TargetLogprobs:
    """Logprob of each target, float32 [U], and entropy of each row's distribution, float32 [T]; and, if asked, the
    gradient of the logprobs."""

    def __init__(
        self,
        decoder: Decoder,
        hidden: Tensor,
        rows: np.ndarray,
        targets: np.ndarray,
        loras: list[LoraRows],
        *,
        temperature: float = 1.0,
        trained: np.ndarray | None = None,
    ) -> None:
        """Hidden states [T, E]; target `targets[u]` is predicted from row `rows[u]`: distinct pairs, rows ascending,
        both int64 [U]. All logits are divided by `temperature`. `trained` [U] are the pairs that may have a gradient
        (None: none has); one lora covers all rows then."""
        self._decoder, self._hidden, self._loras = decoder, hidden, loras
        self._rows, self._targets = rows, torch.from_numpy(targets).to(hidden.device)
        # On the device and not a Python number: by those, a GPU multiplies with the rounded reciprocal.
        self._heat = torch.tensor(temperature, dtype=torch.float32, device=hidden.device)
        self._tempered = temperature != 1.0
        self.logprobs, self.entropies = (torch.empty(len(x), device=hidden.device) for x in (rows, hidden))
        # Pairs whose gradient is made at once: those that are the only ones trained in their rows.
        self._single = np.zeros(len(rows), bool)
        if trained is not None and all(own.site(UNEMBED) is None for own in loras):
            self._single = trained & (np.bincount(rows[trained], minlength=len(hidden)) == 1)[rows]
        self._unit = torch.zeros_like(hidden) if self._single.any() else None
        with torch.no_grad():
            for chunk in _chunks(rows, len(hidden), decoder.config.vocab_size, hidden.device):
                self._run(chunk)

    @torch.no_grad()
    def hidden_gradient(self, slopes: np.ndarray) -> Tensor:
        """The gradient for hidden of Σ slopes · logprobs, slopes float32 [U], 0 where not trained; that of an
        unembedding lora is added to its `.grad`."""
        if self._tempered:
            slopes = slopes / np.float32(self._heat.item())
        device = self._hidden.device
        # Summed here, for a GPU would add in another order each time.
        totals = np.bincount(self._rows, weights=slopes, minlength=len(self._hidden)).astype(np.float32)
        gradient = torch.zeros_like(self._hidden)
        if self._unit is not None:
            gradient = self._unit * torch.from_numpy(totals).to(device)[:, None]
        used = np.flatnonzero((slopes != 0) & ~self._single)
        trained, places = np.unique(self._rows[used], return_inverse=True)
        targets = self._targets[torch.from_numpy(used).to(device)]
        pair_slopes, row_slopes = (torch.from_numpy(array).to(device) for array in (slopes[used], totals[trained]))
        for chunk in _chunks(places, len(trained), self._decoder.config.vocab_size, device):
            own = torch.from_numpy(trained[chunk.rows]).to(device)
            hidden = self._hidden[own]
            weights, _ = exponentials(self._logits(hidden))
            # d logprob / d logits = onehot - softmax
            pull = weights.mul_((-row_slopes[chunk.rows] / weights.sum(1))[:, None])
            pull[chunk.places, targets[chunk.pairs]] += pair_slopes[chunk.pairs]
            gradient[own] = self._decoder.logits_gradient(pull, hidden, self._loras)
        return gradient

    def _run(self, chunk: _Chunk) -> None:
        hidden = self._hidden[chunk.rows]
        logits = self._logits(hidden)
        at_targets = logits[chunk.places, self._targets[chunk.pairs]]
        normaliser = torch.empty(len(hidden), device=hidden.device)
        single = np.zeros(len(hidden), bool)
        single[self._rows[chunk.pairs][self._single[chunk.pairs]] - chunk.rows.start] = True
        # Takes the place of the logits, those of earlier rows being done with.
        pulls, filled = logits.view(self._decoder.dtype)[:, : logits.shape[1]], 0
        size = len(hidden) if hidden.is_cuda else cached_rows(logits)
        room = torch.empty_like(logits[: 2 * size])
        for rows in row_blocks(len(hidden), size):
            own, mask = logits[rows], single[rows]
            weights, normaliser[rows] = exponentials(own, room[: len(own)])
            total = weights.sum(1)
            # H = log Z - Σ p·z
            spread = torch.linalg.vecdot(weights, own).div_(total)
            self.entropies[chunk.rows][rows] = normaliser[rows] - spread
            if mask.any():
                weights.div_(-total[:, None])
                trained = weights if mask.all() else weights[torch.from_numpy(np.flatnonzero(mask)).to(hidden.device)]
                pulls[filled : filled + len(trained)] = trained
                filled += len(trained)
        self.logprobs[chunk.pairs] = at_targets - normaliser[chunk.places]
        if self._unit is not None and filled:
            # d logprob / d logits = onehot - softmax; its slope will only multiply it.
            pairs = torch.from_numpy(np.flatnonzero(self._single[chunk.pairs])).to(hidden.device)
            order = torch.arange(filled, device=hidden.device)
            rest = torch.expm1(self.logprobs[chunk.pairs][pairs]).neg_()
            pulls[order, self._targets[chunk.pairs][pairs]] = rest.to(pulls.dtype)
            own = chunk.places[pairs]
            gradient = self._decoder.logits_gradient(pulls[:filled], hidden[own], self._loras)
            self._unit[own + chunk.rows.start] = gradient

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._decoder.logits(hidden, self._loras)
        return logits.div_(self._heat) if self._tempered else logits


@dataclass(frozen=True)
class _Chunk:
    """Consecutive `rows`, their `pairs`, and the row of each pair within the chunk, int64."""

    rows: slice
    pairs: slice
    places: Tensor


def top_logprobs(decoder: Decoder, hidden: Tensor, count: int, loras: list[LoraRows]) -> list[list[tuple[int, float]]]:
    """The `count` most probable tokens after each of hidden [T, E], best first."""
    found: list[list[tuple[int, float]]] = []
    for rows in row_slices(len(hidden), decoder.config.vocab_size):
        logits = decoder.logits(hidden[rows], loras)
        best = logits.topk(min(count, logits.shape[1]), dim=1)
        logprobs = (best.values - logits.logsumexp(1, keepdim=True)).tolist()
        found += [list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), logprobs, strict=True)]
    return found


def _chunks(rows: np.ndarray, count: int, vocab_size: int, device: torch.device) -> Iterator[_Chunk]:
    """`count` rows in order, with the pairs whose ascending `rows` fall into each chunk."""
    for own in row_slices(count, vocab_size):
        first, last = np.searchsorted(rows, (own.start, own.stop)).tolist()
        places = torch.from_numpy(rows[first:last] - own.start).to(device)
        yield _Chunk(own, slice(first, last), places)


def row_slices(count: int, vocab_size: int) -> Iterator[slice]:
    """Runs of rows whose logits may exist at once, of about one size."""
    size = max(MIN_CHUNK_ROWS, CHUNK_ENTRIES // vocab_size)
    size = -(-count // max(1, -(-count // size)))
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + size, count))
