"""Logprobs of targets and their gradient, in chunks of rows: past `KEPT_ENTRIES`, one chunk of logits exists at a time.

Knows nothing of losses, examples or sampling.

Letters: U rows (a hidden state and its target) · E hidden size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mint.engine.decoder import Decoder
from mint.engine.lora import LoraRows

CHUNK_ENTRIES = 1 << 20
"""Logits computed at once: 4 MB in float32, so that a chunk stays in the cache."""

KEPT_ENTRIES = 1 << 22
"""Up to this many logits (16 MB, and their softmax) are kept for the backward instead of being computed again."""


class TargetLogprobs:
    """Logprob of each target and entropy of each distribution, float32 [U]; and, if asked, their gradient."""

    def __init__(
        self,
        decoder: Decoder,
        hidden: Tensor,
        targets: Tensor,
        loras: list[LoraRows],
        *,
        temperature: float = 1.0,
        gradient: bool = False,
    ) -> None:
        """Hidden states [U, E], targets int64 [U]; all logits are divided by `temperature`; with `gradient`, one lora
        covers all rows."""
        self._decoder, self._hidden, self._targets, self._loras = decoder, hidden, targets, loras
        # On the device and not a Python number: by those, a GPU multiplies with the rounded reciprocal.
        self._heat = torch.tensor(temperature, dtype=torch.float32, device=hidden.device)
        self._tempered = temperature != 1.0
        self._kept: list[tuple[slice, Tensor, Tensor, Tensor]] = []
        self.logprobs, self.entropies = torch.empty(len(targets)), torch.empty(len(targets))
        keep = gradient and len(targets) * decoder.config.vocab_size <= KEPT_ENTRIES
        for rows in _chunks(len(targets), decoder.config.vocab_size):
            self._run(rows, keep=keep)

    def hidden_gradient(self, slopes: Tensor) -> Tensor:
        """The gradient for hidden of Σ slopes · logprobs, slopes float32 [U]; that of an unembedding lora is added to
        its `.grad`. Many logits are computed again rather than kept. To be called once.
        """
        gradient = torch.zeros_like(self._hidden)
        if self._tempered:
            slopes = slopes / self._heat
        for rows, leaf, logits, shares in self._kept:
            gradient[rows] = _pull_back(leaf, logits, shares, self._targets[rows], slopes[rows])
        if self._kept:
            return gradient
        trained = slopes.nonzero().squeeze(1)
        for rows in _chunks(len(trained), self._decoder.config.vocab_size):
            own = trained[rows]
            leaf = self._hidden[own].requires_grad_()
            with torch.enable_grad():
                logits = self._decoder.logits(leaf, self._loras)
            shares = torch.softmax(self._temper(logits.detach()), dim=1)
            gradient[own] = _pull_back(leaf, logits, shares, self._targets[own], slopes[own])
        return gradient

    def _run(self, rows: slice, *, keep: bool) -> None:
        leaf = self._hidden[rows].detach().requires_grad_(keep)
        with torch.set_grad_enabled(keep):
            recorded = self._decoder.logits(leaf, self._loras)
        logits = self._temper(recorded.detach())
        chosen = logits.gather(1, self._targets[rows, None]).squeeze(1)
        normaliser = logits.logsumexp(1)
        self.logprobs[rows] = chosen - normaliser
        # H = log Z - Σ p·z
        shares = (logits - normaliser[:, None]).exp_()
        self.entropies[rows] = normaliser - torch.linalg.vecdot(shares, logits)
        if keep:
            self._kept.append((rows, leaf, recorded, shares))

    def _temper(self, logits: Tensor) -> Tensor:
        return logits / self._heat if self._tempered else logits


def top_logprobs(decoder: Decoder, hidden: Tensor, count: int, loras: list[LoraRows]) -> list[list[tuple[int, float]]]:
    """The `count` most probable tokens after each of hidden [U, E], best first."""
    found: list[list[tuple[int, float]]] = []
    for rows in _chunks(len(hidden), decoder.config.vocab_size):
        logits = decoder.logits(hidden[rows], loras)
        best = logits.topk(min(count, logits.shape[1]), dim=1)
        logprobs = (best.values - logits.logsumexp(1, keepdim=True)).tolist()
        found += [list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), logprobs, strict=True)]
    return found


def _pull_back(hidden: Tensor, logits: Tensor, shares: Tensor, targets: Tensor, slopes: Tensor) -> Tensor:
    """The gradient for the leaf `hidden` of Σ slopes · logprobs; overwrites `shares`, the softmax of `logits`."""
    # d logprob / d logits = onehot - softmax
    gradient = shares.mul_(-slopes[:, None])
    gradient.scatter_add_(1, targets[:, None], slopes[:, None])
    logits.backward(gradient)
    return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad


def _chunks(count: int, vocab_size: int) -> Iterator[slice]:
    size = max(16, CHUNK_ENTRIES // vocab_size)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
