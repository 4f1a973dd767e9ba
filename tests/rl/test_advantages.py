"""Advantages and the KL penalty, against closed forms and an enumerated policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mint.rl.advantages import group_advantages, kl_penalty


@pytest.mark.parametrize("estimator", ["center", "rloo", "std"])
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_the_rewards(estimator: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rewards = rng.normal(size=rng.integers(2, 17)).tolist()
        advantages = group_advantages(rewards, estimator)
        assert abs(advantages.sum()) < 1e-9
        assert np.argsort(advantages).tolist() == np.argsort(rewards).tolist()


def test_the_named_estimators_give_their_papers_numbers() -> None:
    rewards = [1.0, 1.0, 1.0, 0.0]
    assert group_advantages(rewards, "center") == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert group_advantages(rewards, "rloo") == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert group_advantages(rewards, "std") == pytest.approx([0.5, 0.5, 0.5, -1.5], rel=1e-3)


@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1 + 0.2] * 3, [0.7], []])
def test_equal_rewards_give_exactly_no_signal(rewards: list[float]) -> None:
    assert not group_advantages(rewards).any()


def test_the_kl_penalty_gives_the_exact_gradient_of_the_kl_of_the_whole_completion() -> None:
    """Two steps of a policy over 3 tokens, all 9 completions enumerated; gradient by central difference in float64."""
    rng = np.random.default_rng(1)
    theta, base = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))  # row 0: first token; row 1 + a: second after a
    coef = 0.3

    def log_softmax(table: np.ndarray) -> np.ndarray:
        return table - np.log(np.exp(table).sum(axis=1, keepdims=True))

    def steps(table: np.ndarray, first: int, second: int) -> np.ndarray:
        logp = log_softmax(table)
        return np.array([logp[0, first], logp[1 + first, second]])

    def kl(table: np.ndarray) -> float:
        total = 0.0
        for pair in itertools.product(range(3), repeat=2):
            policy = steps(table, *pair)
            total += float(np.exp(policy.sum()) * (policy.sum() - steps(base, *pair).sum()))
        return total

    numeric, estimated, h = np.zeros_like(theta), np.zeros_like(theta), 1e-5
    for place in np.ndindex(*theta.shape):
        bump = np.zeros_like(theta)
        bump[place] = h
        numeric[place] = coef * (kl(theta + bump) - kl(theta - bump)) / (2 * h)
        for pair in itertools.product(range(3), repeat=2):
            policy = steps(theta, *pair)
            score = (steps(theta + bump, *pair) - steps(theta - bump, *pair)) / (2 * h)
            penalty = kl_penalty(policy, steps(base, *pair), coef)
            estimated[place] += float(np.exp(policy.sum()) * (penalty * score).sum())
    np.testing.assert_allclose(estimated, numeric, atol=1e-8)
