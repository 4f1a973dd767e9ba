"""Logprobs of targets and their gradient, in chunks of rows: one chunk of logits exists at a time.

Where a row has one trained target and the unembedding is frozen, the gradient of the logprob is computed together with
it, and multiplied by its slope later. For other rows the logits are computed again.

Letters: T rows (hidden states) · U pairs (a row and one of its targets) · E hidden size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import UNEMBED, LoraRows
from mint.engine.model.functions import exponentials
from mint.engine.model.operations import Operations
from mint.engine.transfers import upload

MIN_CHUNK_ROWS = 192
"""Logits are never computed for fewer rows at once: each chunk reads the whole unembedding, and products of more rows
are no faster."""


class Unembedding(Protocol):
    """The part of a decoder that makes logits of hidden states."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def device(self) -> torch.device:
        """Where hidden states are."""
        ...

    @property
    def operations(self) -> Operations:
        """The operations of the decoder's device."""
        ...

    def logits(self, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """Float32 logits [T, V], which the caller may overwrite; `loras` may cover more rows than there are."""
        ...

    def logits_gradient(self, grad: Tensor, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """From the gradient for `logits` [T, V] that for hidden [T, E]; a lora's is added to its `.grad`."""
        ...


LOG_ZERO = -1e4
"""Stands for the logarithm of a probability of 0, so that their product is 0."""


class TargetLogprobs:
    """Logprob of each target, float32 [U], and entropy of each row's distribution, float32 [T]; and, if asked, the
    gradient of the logprobs."""

    def __init__(
        self,
        decoder: Unembedding,
        hidden: Tensor,
        rows: np.ndarray,
        targets: np.ndarray,
        loras: list[LoraRows],
        *,
        temperature: float = 1.0,
        trained: np.ndarray | None = None,
    ) -> None:
        """Hidden states [T, E]; target `targets[u]` is predicted from row `rows[u]`: distinct pairs, rows ascending,
        both int64 [U]. All logits are divided by `temperature`. `trained` [U] are the pairs whose gradient may be
        computed at once where it is cheaper (None: none is, as the gradient of entropies needs it); one lora covers all
        rows then."""
        self._decoder = decoder
        self._hidden = hidden
        self._loras = loras
        self._rows = rows
        self._targets = upload(hidden.device, targets)[0]
        # A tensor on the device: for a Python number, a GPU multiplies with the rounded reciprocal instead of dividing.
        self._divisor = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
        self._temperature = np.float32(temperature)
        self.logprobs = torch.empty(len(rows), device=hidden.device)
        self.entropies = torch.empty(len(hidden), device=hidden.device)
        # Pairs whose gradient is computed at once: the only trained ones of their rows.
        self._single = np.zeros(len(rows), bool)
        if trained is not None and loras[0].site(UNEMBED) is None:
            self._single = trained & (np.bincount(rows[trained], minlength=len(hidden)) == 1)[rows]
        self._unit = torch.zeros_like(hidden) if self._single.any() else None
        with torch.no_grad():
            for chunk in _chunks(decoder, rows, len(hidden)):
                self._run(chunk)

    @torch.no_grad()
    def hidden_gradient(self, slopes: np.ndarray, entropy_slopes: np.ndarray | None = None) -> Tensor:
        """The gradient for hidden of Σ slopes · logprobs + Σ entropy_slopes · entropies; that of an unembedding lora is
        added to its `.grad`.

        `slopes` float32 [U], 0 where not trained. `entropy_slopes` float32 [T] needs that `trained` was None.
        """
        slopes = slopes / self._temperature
        device = self._hidden.device
        # Summed on the host, because a GPU would add in another order each time.
        totals = np.bincount(self._rows, weights=slopes, minlength=len(self._hidden)).astype(np.float32)
        if self._unit is None:
            gradient = torch.zeros_like(self._hidden)
        else:
            gradient = self._unit * upload(device, totals)[0][:, None]
        used = np.flatnonzero((slopes != 0) & ~self._single)
        trained = np.unique(self._rows[used])
        if entropy_slopes is not None:
            trained = np.union1d(trained, np.flatnonzero(entropy_slopes))
        if not len(trained):
            return gradient
        places = np.searchsorted(trained, self._rows[used])
        used_pairs, trained_rows = upload(device, used, trained)
        targets = self._targets[used_pairs]
        pair_slopes, row_slopes = upload(device, slopes[used], totals[trained])
        entropy_row_slopes = None
        if entropy_slopes is not None:
            (entropy_row_slopes,) = upload(device, (entropy_slopes[trained] / self._temperature).astype(np.float32))
        for chunk in _chunks(self._decoder, places, len(trained)):
            own = trained_rows[chunk.rows]
            hidden = self._hidden[own]
            logits = self._logits(hidden)
            weights, _ = exponentials(logits)
            totals_of_rows = weights.sum(1)
            # d logprob / d logits = onehot - softmax
            factors = -row_slopes[chunk.rows] / totals_of_rows
            if entropy_row_slopes is None:
                logits_grads = weights.mul_(factors[:, None])
            else:
                # d H / d logits = -softmax · (log softmax + H)
                logits.sub_(logits.logsumexp(1, keepdim=True)).clamp_(min=LOG_ZERO)
                logits.add_(self.entropies[own][:, None]).mul_(
                    (-entropy_row_slopes[chunk.rows] / totals_of_rows)[:, None]
                )
                logits_grads = weights.mul_(logits.add_(factors[:, None]))
            logits_grads[chunk.places, targets[chunk.pairs]] += pair_slopes[chunk.pairs]
            gradient[own] = self._decoder.logits_gradient(logits_grads, hidden, self._loras)
        return gradient

    def _run(self, chunk: _Chunk) -> None:
        hidden = self._hidden[chunk.rows]
        logits = self._logits(hidden)
        at_targets = logits[chunk.places, self._targets[chunk.pairs]]
        single = np.zeros(len(hidden), bool)
        single[self._rows[chunk.pairs][self._single[chunk.pairs]] - chunk.rows.start] = True
        operations = self._decoder.operations
        normaliser, self.entropies[chunk.rows], logits_grads = operations.softmax_statistics(logits, single)
        self.logprobs[chunk.pairs] = at_targets - normaliser[chunk.places]
        if self._unit is not None and len(logits_grads):
            # d logprob / d logits = onehot - softmax, multiplied by its slope later.
            (pairs,) = upload(hidden.device, np.flatnonzero(self._single[chunk.pairs]))
            order = torch.arange(len(logits_grads), device=hidden.device)
            rest = torch.expm1(self.logprobs[chunk.pairs][pairs]).neg_()
            logits_grads[order, self._targets[chunk.pairs][pairs]] = rest.to(logits_grads.dtype)
            own = chunk.places[pairs]
            gradient = self._decoder.logits_gradient(logits_grads, hidden[own], self._loras)
            self._unit[own + chunk.rows.start] = gradient

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._decoder.logits(hidden, self._loras)
        return logits if self._temperature == 1 else logits.div_(self._divisor)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive `rows`, their `pairs`, and the row of each pair within the chunk, int64."""

    rows: slice
    pairs: slice
    places: Tensor


def top_logprobs(
    decoder: Unembedding, hidden: Tensor, count: int, loras: list[LoraRows]
) -> list[list[tuple[int, float]]]:
    """The `count` most probable tokens after each of hidden [T, E], best first."""
    found: list[list[tuple[int, float]]] = []
    for rows in row_slices(len(hidden), decoder.vocab_size, decoder.operations.logits_at_once):
        logits = decoder.logits(hidden[rows], loras)
        tokens, logprobs = most_probable(logits, count)
        found += [list(zip(*pair, strict=True)) for pair in zip(tokens.tolist(), logprobs.tolist(), strict=True)]
    return found


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens of each row of logits [T, V], best first, and their logprobs; all V if fewer."""
    best = logits.topk(min(count, logits.shape[1]), dim=1)
    return best.indices, best.values - logits.logsumexp(1, keepdim=True)


def _chunks(decoder: Unembedding, rows: np.ndarray, count: int) -> list[_Chunk]:
    """`count` rows in order, with the pairs whose ascending `rows` fall into each chunk."""
    slices = row_slices(count, decoder.vocab_size, decoder.operations.logits_at_once)
    size = slices[0].stop if slices else 1
    places = upload(decoder.device, rows % size)[0]
    chunks = []
    first = 0
    for own in slices:
        last = int(np.searchsorted(rows, own.stop))
        chunks.append(_Chunk(own, slice(first, last), places[first:last]))
        first = last
    return chunks


def row_slices(count: int, vocab_size: int, entries: int) -> list[slice]:
    """Runs of rows whose logits are about `entries` in number; all of one size, but for the last."""
    size = max(MIN_CHUNK_ROWS, entries // vocab_size)
    size = max(1, -(-count // max(1, -(-count // size))))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
