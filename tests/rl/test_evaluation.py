"""Intervals against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mint.rl.evaluation import estimate, wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (0, 64), (1, 7), (32, 64), (64, 64), (487, 512), (1, 100_000)])
def test_wilson_intervals_are_scipy_s(successes: int, n: int) -> None:
    expected = stats.binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_no_samples_say_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_fractional_rewards_get_the_normal_interval() -> None:
    rewards = np.random.default_rng(0).uniform(size=200)
    found = estimate(rewards.tolist(), temperature=1.0)
    half = stats.norm.ppf(0.975) * stats.sem(rewards)
    assert (found.mean, found.low, found.high) == pytest.approx(
        (rewards.mean(), rewards.mean() - half, rewards.mean() + half)
    )
