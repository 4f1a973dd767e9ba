"""Tokens are drawn with the probabilities of the softmax, and their logprobs are those."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import chisquare

from benchmarks.peers.drawing import draw


@pytest.mark.parametrize("vocabulary", [256, 100])
def test_frequencies_follow_the_softmax_with_and_without_blocks(vocabulary: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, vocabulary).astype(np.float32)
    probabilities = np.exp(log_softmax(logits.astype(np.float64)))
    rows = 40_000
    tokens, logprobs = draw(np.tile(logits, (rows, 1)), rng)
    counts = np.bincount(tokens, minlength=vocabulary)
    often = probabilities * rows > 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(probabilities[often], probabilities[~often].sum()) * rows
    assert chisquare(observed, expected).pvalue > 1e-3
    assert logprobs == pytest.approx(np.log(probabilities)[tokens], abs=1e-5)


def test_rows_are_drawn_from_their_own_logits_however_large() -> None:
    logits = np.full((3, 384), -1e4, dtype=np.float32)
    places = [0, 200, 383]
    logits[np.arange(3), places] = 1e4
    tokens, logprobs = draw(logits, np.random.default_rng(1))
    assert tokens.tolist() == places
    assert logprobs.tolist() == [0.0, 0.0, 0.0]
