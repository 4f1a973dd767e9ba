"""Advantages, loss weights and the KL penalty: against plain numpy, closed forms and an enumerated policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest

from mint.rl import Group, RLConfig, Rollout
from mint.rl.config import AdvantageName
from mint.rl.rollout import RolloutStopReason, Turn
from mint.rl.training.advantages import (
    apply_truncation_penalty,
    group_advantages,
    has_unequal_rewards,
    loss_weights,
    rollout_advantages,
    turn_advantages,
)
from mint.rl.training.kl_reference import kl_penalty


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


def rollout(reward: float | None, length: int = 2, stop_reason: RolloutStopReason = "stop") -> Rollout:
    return Rollout([Turn([1], [2] * length, [-1.0] * length)], "x", stop_reason, reward=reward)


def group(*rollouts: Rollout) -> Group:
    return Group("sample", 0, [1], list(rollouts))


def test_every_estimator_gives_the_textbook_numbers() -> None:
    one = group(*(rollout(reward) for reward in (1.0, 1.0, 1.0, 0.0)))
    other = group(*(rollout(reward) for reward in (0.0, 0.5, 0.0, 0.5)))
    found = {
        name: [item.advantage for item in rollout_advantages([one, other], RLConfig(advantage=name))]
        for name in ("center", "rloo", "std", "std_batch")
    }
    centred = np.array([0.25, 0.25, 0.25, -0.75, -0.25, 0.25, -0.25, 0.25])
    batch = np.array([1, 1, 1, 0, 0, 0.5, 0, 0.5])
    assert found["center"] == pytest.approx(centred)
    assert found["rloo"] == pytest.approx(centred * 4 / 3)
    assert found["std"][:4] == pytest.approx(centred[:4] / (np.array([1, 1, 1, 0.0]).std(ddof=1) + 1e-4))
    assert found["std_batch"] == pytest.approx(centred / (batch.std(ddof=1) + 1e-4))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_leave_one_out_is_unbiased_and_the_centred_gradient_is_too_small_by_a_factor(count: int) -> None:
    """Expected gradients of a policy with three answers, by summation over all groups (arXiv 2402.14740)."""
    policy = np.array([0.2, 0.5, 0.3])
    rewards = np.array([1.0, -0.5, 0.25])
    scores = np.eye(3) - policy  # row a: the gradient of log policy[a] by the logits
    exact = policy * (rewards - policy @ rewards)

    def expected(estimator: AdvantageName) -> np.ndarray:
        total = np.zeros(3)
        for answers in map(list, itertools.product(range(3), repeat=count)):
            advantages = group_advantages(rewards[answers], estimator)
            total += policy[answers].prod() * (advantages @ scores[answers]) / count
        return total

    np.testing.assert_allclose(expected("rloo"), exact, atol=1e-12)
    np.testing.assert_allclose(expected("center"), exact * (count - 1) / count, atol=1e-12)


def test_reinforce_plus_plus_normalizes_over_the_whole_batch() -> None:
    """Both variants of arXiv 2501.03262, and one with a baseline of the user's own, in plain numpy."""
    rng = np.random.default_rng(2)
    rewards_BG = [rng.normal(size=size) for size in (3, 5, 2)] + [np.full(4, 0.3)]
    groups = [group(*(rollout(float(reward)) for reward in rewards)) for rewards in rewards_BG]

    def whitened(left_BG: list[np.ndarray]) -> np.ndarray:
        joined = np.concatenate(left_BG)
        return (joined - joined.mean()) / (joined.std(ddof=1) + 1e-4)

    def found(**fields: Any) -> np.ndarray:
        config = RLConfig(advantage="reinforce++", **fields)
        return np.array([one.advantage for one in rollout_advantages(groups, config)])

    by_group = found()
    assert by_group == pytest.approx(whitened([rewards - rewards.mean() for rewards in rewards_BG]), abs=1e-12)
    assert not by_group[-4:].any(), "equal rewards have no signal"
    assert found(baseline="batch") == pytest.approx(whitened(rewards_BG), abs=1e-12)
    assert found(baseline=best) == pytest.approx(
        whitened([rewards - rewards.max() for rewards in rewards_BG]), abs=1e-12
    )


def best(group: Group) -> float:
    return max(group.rewards)


def test_the_soft_overlong_punishment_is_that_of_its_paper() -> None:
    """R(y) of DAPO with L_max = 10 and L_cache = 4, scaled by the penalty."""

    def paper(length: int) -> float:
        if length <= 10 - 4:
            return 0.0
        return (10 - 4 - length) / 4 if length <= 10 else -1.0

    config = RLConfig(truncation="soft", truncation_penalty=2.0, max_tokens=10, overlong_buffer=4)
    for length in range(1, 11):
        ((one,),) = (each.rollouts for each in apply_truncation_penalty([group(rollout(1.0, length))], config))
        assert one.reward == pytest.approx(1.0 + 2.0 * paper(length))
        assert one.parts.get("truncation", 0.0) == pytest.approx(2.0 * paper(length))
    ((cut,),) = (each.rollouts for each in apply_truncation_penalty([group(rollout(1.0, 10, "length"))], config))
    assert cut.reward == -1.0


def test_the_soft_overlong_punishment_of_an_episode_counts_its_tokens_or_its_longest_turn() -> None:
    turns = [Turn([1], [2] * length, [-0.5] * length) for length in (3, 9)]
    episode = Group("", 0, [1], [Rollout(turns, "", "env", reward=1.0, turn_rewards=(0.5, 0.5))])
    config = RLConfig(truncation="soft", truncation_penalty=1.0, max_tokens=10, overlong_buffer=4)

    def rewards(config: RLConfig) -> tuple[float | None, Sequence[float]]:
        ((one,),) = (each.rollouts for each in apply_truncation_penalty([episode], config))
        return one.reward, one.turn_rewards

    assert rewards(config) == (0.25, [0.5, -0.25])
    assert rewards(config.changed(max_episode_tokens=14)) == (0.5, [0.5, 0.0])


def test_groups_do_not_touch_one_another() -> None:
    rng = np.random.default_rng(0)
    groups = [group(*(rollout(float(reward)) for reward in rng.uniform(size=4))) for _ in range(5)]
    forward = [item.advantage for item in rollout_advantages(groups, RLConfig())]
    backward = [item.advantage for item in rollout_advantages(groups[::-1], RLConfig())]
    assert np.reshape(forward, (5, 4)).tolist() == np.reshape(backward, (5, 4))[::-1].tolist()
    assert np.reshape(forward, (5, 4)).sum(axis=1) == pytest.approx(np.zeros(5), abs=1e-12)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("keep", [0.5, -0.5]), ("mask", [0.0]), ("penalize", [0.25, -0.25])],
)
def test_a_cut_off_sample_is_kept_masked_or_penalized(policy: str, expected: list[float]) -> None:
    config = RLConfig(truncation=policy, truncation_penalty=0.5)
    (only,) = apply_truncation_penalty([group(rollout(1.0, stop_reason="length"), rollout(0.0))], config)
    assert [item.advantage for item in rollout_advantages([only], config)] == expected
    assert has_unequal_rewards(only, config) == any(expected)
    if policy == "penalize":
        assert only.rollouts[0].parts == {"reward": 1.0, "truncation": -0.5}


def test_an_ungraded_sample_is_left_out_of_the_mean() -> None:
    found = rollout_advantages([group(rollout(1.0), rollout(None), rollout(0.0))], RLConfig())
    assert [item.advantage for item in found] == [0.5, -0.5]


def test_normalization_weighs_tokens_as_each_paper_says() -> None:
    chosen = rollout_advantages([group(rollout(1.0, length=2), rollout(0.0, length=6))], RLConfig())

    def weights(name: str) -> list[float]:
        return loss_weights(chosen, RLConfig(loss_normalization=name, batch_size=3, group_size=2, max_tokens=10))

    assert weights("sum") == [1.0, 1.0]
    assert weights("constant") == [1 / 60, 1 / 60]
    assert weights("token") == [1 / 8, 1 / 8]
    assert weights("sequence") == [1 / (2 * 2), 1 / (6 * 2)]


@pytest.mark.parametrize("estimator", get_args(AdvantageName))
def test_turn_advantages_compare_what_is_still_to_come_at_the_same_turn(estimator: AdvantageName) -> None:
    random = np.random.default_rng(0)
    rewards_GN = [random.normal(size=turns).tolist() for turns in (3, 1, 4, 3)]
    found = turn_advantages(rewards_GN, estimator, batch_std=0.7)
    for turn in range(4):
        returns = {place: sum(rewards[turn:]) for place, rewards in enumerate(rewards_GN) if len(rewards) > turn}
        values = np.array(list(returns.values()))
        count = len(values)
        scale = {
            "center": 1.0,
            "rloo": count / max(1, count - 1),
            "std": 1 / (values.std(ddof=1) + 1e-4) if count > 1 else 0.0,
            "std_batch": 1 / (0.7 + 1e-4),
            "reinforce++": 1 / (0.7 + 1e-4),
        }[estimator]
        for place, value in returns.items():
            assert found[place][turn] == pytest.approx(scale * (value - values.mean()), abs=1e-12)


def test_with_turn_credit_the_tokens_of_a_turn_have_its_advantage_and_one_turn_has_that_of_the_rollout() -> None:
    def episode(*rewards: float) -> Rollout:
        turns = [Turn([1], [2] * (place + 1), [-0.5] * (place + 1)) for place in range(len(rewards))]
        return Rollout(turns, "", "env", reward=sum(rewards), turn_rewards=rewards)

    early = Group("", 0, [1], [episode(1.0, 0.0), episode(0.0, 1.0)])
    by_rollout = rollout_advantages([early], RLConfig())
    assert not any(one.advantages_T.any() for one in by_rollout), "both have the reward 1"
    one, other = rollout_advantages([early], RLConfig(credit="turn"))
    assert (one.advantages_T.tolist(), other.advantages_T.tolist()) == ([0.0, -0.5, -0.5], [0.0, 0.5, 0.5])
    single = Group("", 0, [1], [episode(1.0), episode(0.25)])
    plain, credited = (rollout_advantages([single], RLConfig(credit=credit)) for credit in ("rollout", "turn"))
    assert [each.advantages_T.tolist() for each in plain] == [each.advantages_T.tolist() for each in credited]


def test_the_truncation_penalty_is_the_last_turns() -> None:
    cut = Rollout([Turn([1], [2], [-0.5])] * 2, "", "max_turns", reward=1.0, turn_rewards=(0.25, 0.75))
    config = RLConfig(truncation="penalize", truncation_penalty=0.5)
    ((penalized,),) = (group.rollouts for group in apply_truncation_penalty([Group("", 0, [1], [cut])], config))
    assert (penalized.reward, list(penalized.turn_rewards)) == (0.5, [0.25, 0.25])
