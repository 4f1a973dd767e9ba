"""Logprobs of targets and their gradient, in chunks of rows: past `KEPT_ENTRIES`, one chunk of logits exists at a time.

Knows nothing of losses, examples or sampling.

Letters: T rows (hidden states) · U pairs (a row and one of its targets) · E hidden size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.decoder import Decoder
from mint.engine.lora import LoraRows

CHUNK_ENTRIES = 1 << 20
"""Logits computed at once: 4 MB in float32, so that a chunk stays in the cache."""

KEPT_ENTRIES = 1 << 22
"""Up to this many logits (16 MB, and their softmax) are kept for the backward instead of being computed again."""


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
        gradient: bool = False,
    ) -> None:
        """Hidden states [T, E]; target `targets[u]` is predicted from row `rows[u]`: distinct pairs, rows ascending,
        both int64 [U]. All logits are divided by `temperature`; with `gradient`, one lora covers all rows."""
        self._decoder, self._hidden, self._loras = decoder, hidden, loras
        self._rows, self._targets = rows, torch.from_numpy(targets).to(hidden.device)
        # On the device and not a Python number: by those, a GPU multiplies with the rounded reciprocal.
        self._heat = torch.tensor(temperature, dtype=torch.float32, device=hidden.device)
        self._tempered = temperature != 1.0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self.logprobs, self.entropies = torch.empty(len(rows)), torch.empty(len(hidden))
        keep = gradient and len(hidden) * decoder.config.vocab_size <= KEPT_ENTRIES
        for chunk in _chunks(rows, len(hidden), decoder.config.vocab_size, hidden.device):
            self._run(chunk, keep=keep)

    def hidden_gradient(self, slopes: np.ndarray) -> Tensor:
        """The gradient for hidden of Σ slopes · logprobs, slopes float32 [U]; that of an unembedding lora is added to
        its `.grad`. Many logits are computed again rather than kept. To be called once.
        """
        if self._tempered:
            slopes = slopes / np.float32(self._heat.item())
        gradient = torch.zeros_like(self._hidden)
        device, vocab_size = self._hidden.device, self._decoder.config.vocab_size
        if self._kept:
            pull = _Pull(self._rows, self._targets, slopes, len(self._hidden))
            chunks = _chunks(self._rows, len(self._hidden), vocab_size, device)
            for chunk, (leaf, logits, shares) in zip(chunks, self._kept, strict=True):
                gradient[chunk.rows] = pull.back(chunk, leaf, logits, shares)
            return gradient
        used = np.flatnonzero(slopes)
        trained, places = np.unique(self._rows[used], return_inverse=True)
        pull = _Pull(places, self._targets[torch.from_numpy(used).to(device)], slopes[used], len(trained))
        for chunk in _chunks(places, len(trained), vocab_size, device):
            own = torch.from_numpy(trained[chunk.rows]).to(device)
            leaf = self._hidden[own].requires_grad_()
            with torch.enable_grad():
                logits = self._decoder.logits(leaf, self._loras)
            shares = torch.softmax(self._temper(logits.detach()), dim=1)
            gradient[own] = pull.back(chunk, leaf, logits, shares)
        return gradient

    def _run(self, chunk: _Chunk, *, keep: bool) -> None:
        leaf = self._hidden[chunk.rows].detach().requires_grad_(keep)
        with torch.set_grad_enabled(keep):
            recorded = self._decoder.logits(leaf, self._loras)
        logits = self._temper(recorded.detach())
        normaliser = logits.logsumexp(1)
        self.logprobs[chunk.pairs] = logits[chunk.places, self._targets[chunk.pairs]] - normaliser[chunk.places]
        # H = log Z - Σ p·z
        shares = (logits - normaliser[:, None]).exp_()
        self.entropies[chunk.rows] = normaliser - torch.linalg.vecdot(shares, logits)
        if keep:
            self._kept.append((leaf, recorded, shares))

    def _temper(self, logits: Tensor) -> Tensor:
        return logits / self._heat if self._tempered else logits


@dataclass(frozen=True)
class _Chunk:
    """Consecutive `rows`, their `pairs`, and the row of each pair within the chunk, int64."""

    rows: slice
    pairs: slice
    places: Tensor


class _Pull:
    """From the slopes of pairs, whose rows ascend, to the gradient of their hidden states."""

    def __init__(self, rows: np.ndarray, targets: Tensor, slopes: np.ndarray, count: int) -> None:
        """`count` rows in all; rows int64, targets int64, slopes float32, all [U]."""
        # Summed here, for a GPU would add in another order each time.
        totals = np.bincount(rows, weights=slopes, minlength=count).astype(np.float32)
        self._totals, self._slopes = (torch.from_numpy(array).to(targets.device) for array in (totals, slopes))
        self._targets = targets

    def back(self, chunk: _Chunk, hidden: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
        """The gradient for the leaf `hidden` of Σ slopes · logprobs; overwrites `shares`, the softmax of `logits`."""
        # d logprob / d logits = onehot - softmax
        gradient = shares.mul_(-self._totals[chunk.rows, None])
        gradient[chunk.places, self._targets[chunk.pairs]] += self._slopes[chunk.pairs]
        logits.backward(gradient)
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad


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
    """Runs of rows whose logits may exist at once."""
    size = max(16, CHUNK_ENTRIES // vocab_size)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
