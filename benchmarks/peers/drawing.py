"""Draws tokens from logits with numpy, for a library that gives logits only.

Imports only numpy, so that a peer in an environment without mint can use it.
"""

from __future__ import annotations

import numpy as np

VOCABULARY_BLOCK = 128


def draw(logits: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One token of each row [rows, vocabulary] at temperature 1, and its logprob. The logits are overwritten.

    The cumulative sum is taken over blocks of the vocabulary first, then within one: a tenth of the additions.
    """
    rows, vocabulary = logits.shape
    block = VOCABULARY_BLOCK if vocabulary % VOCABULARY_BLOCK == 0 else vocabulary
    logits -= logits.max(axis=1, keepdims=True)
    weights = np.exp(logits, out=logits).reshape(rows, -1, block)
    bounds = weights.sum(axis=2).cumsum(axis=1, dtype=np.float64)
    targets = rng.random(rows) * bounds[:, -1]
    blocks = np.minimum((bounds <= targets[:, None]).sum(axis=1), bounds.shape[1] - 1)
    everyone = np.arange(rows)
    before = np.where(blocks > 0, bounds[everyone, blocks - 1], 0.0)
    inner = weights[everyone, blocks].cumsum(axis=1, dtype=np.float64)
    places = np.minimum((inner <= (targets - before)[:, None]).sum(axis=1), block - 1)
    chosen = weights[everyone, blocks, places]
    return blocks * block + places, np.log(chosen) - np.log(bounds[:, -1])
