"""Logprobs of targets and their gradient, in chunks of rows: [rows, vocabulary] never exists for all rows at once.

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
"""Logits held at once: 4 MB in float32, so that a chunk stays in the cache."""


def target_logprobs(decoder: Decoder, hidden: Tensor, targets: Tensor, loras: list[LoraRows]) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each distribution, float32 [U]; hidden [U, E], targets int64 [U].

    No gradient is recorded: it is made by `add_hidden_gradient`.
    """
    logprobs, entropies = torch.empty(len(targets)), torch.empty(len(targets))
    with torch.no_grad():
        for rows in _chunks(len(targets), decoder.config.vocab_size):
            logits = decoder.logits(hidden[rows], loras)
            chosen = logits.gather(1, targets[rows, None]).squeeze(1)
            normaliser = logits.logsumexp(1)
            logprobs[rows] = chosen - normaliser
            # H = log Z - Σ p·z
            entropies[rows] = normaliser - torch.linalg.vecdot((logits - normaliser[:, None]).exp_(), logits)
    return logprobs, entropies


def top_logprobs(decoder: Decoder, hidden: Tensor, count: int, loras: list[LoraRows]) -> list[list[tuple[int, float]]]:
    """The `count` most probable tokens after each of hidden [U, E], best first."""
    found: list[list[tuple[int, float]]] = []
    for rows in _chunks(len(hidden), decoder.config.vocab_size):
        logits = decoder.logits(hidden[rows], loras)
        best = logits.topk(min(count, logits.shape[1]), dim=1)
        logprobs = (best.values - logits.logsumexp(1, keepdim=True)).tolist()
        found += [list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), logprobs, strict=True)]
    return found


def hidden_gradient(decoder: Decoder, hidden: Tensor, targets: Tensor, slopes: Tensor, loras: list[LoraRows]) -> Tensor:
    """The gradient for hidden [U, E] of Σ slopes · logprobs; that of an unembedding lora is added to its `.grad`.

    Logits are computed again rather than kept.
    """
    gradient = torch.zeros_like(hidden)
    for rows in _chunks(len(targets), decoder.config.vocab_size):
        leaf = hidden[rows].detach().requires_grad_()
        leaf.grad = gradient[rows]  # a view, which the backward fills
        with torch.enable_grad():
            logits = decoder.logits(leaf, loras)
        # d logprob / d logits = onehot - softmax
        slope = slopes[rows, None]
        logits_gradient = torch.softmax(logits.detach(), dim=1).mul_(-slope)
        logits_gradient.scatter_add_(1, targets[rows, None], slope)
        logits.backward(logits_gradient)
    return gradient


def _chunks(count: int, vocab_size: int) -> Iterator[slice]:
    size = max(16, CHUNK_ENTRIES // vocab_size)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
