"""A task may declare any scale of rewards: penalties only, successes below zero, or no range at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mint.recipes.math import DEMO
from mint.rl import RLAdapter, run_grpo
from mint.rl.reward import RewardRange


class FewDigits(RLAdapter):
    """Each digit costs; no digit is a success."""

    reward_range = (-1.0, 0.0)
    success_reward = 0.0

    def build_dataset(self) -> Sequence[str]:
        return ["1 + 1", "2 + 2", "3 + 3"]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item}?\nA:")

    def compute_reward(self, response: str, item: str) -> float:
        return -sum(character.isdigit() for character in response) / 16


@pytest.mark.parametrize(
    ("declared", "success", "shares"),
    [
        ((0.0, 1.0), 1.0, {0.0: 0.0, 0.25: 0.25, 1.0: 1.0}),
        ((-1.0, 0.0), 0.0, {-1.0: 0.0, -0.75: 0.25, 0.0: 1.0}),
        ((-2.0, 0.0), -1.0, {-2.0: 0.0, -1.5: 0.5, -1.0: 1.0, 0.0: 1.0}),
        ((-1.0, 1.0), 0.5, {-1.0: 0.0, 0.0: 2 / 3, 0.5: 1.0, 1.0: 1.0}),
        (None, 2.0, {-5.0: 0.0, 1.0: 0.5, 3.0: 1.0}),
        (None, 0.0, {-5.0: 0.0, -0.1: 0.0, 0.0: 1.0}),
        ((0.0, 1.0), 0.0, {0.0: 1.0, 1.0: 1.0}),
    ],
)
def test_partial_credit_counts_from_the_low_end_of_the_range(
    declared: RewardRange | None, success: float, shares: dict[float, float]
) -> None:
    task = FewDigits()
    task.reward_range = declared
    task.success_reward = success
    assert {reward: task.solved_share(reward) for reward in shares} == pytest.approx(shares)


def test_a_run_whose_successes_earn_zero_trains_and_its_curriculum_sees_them() -> None:
    settings = {"batch_size": 3, "group_size": 4, "steps": 2, "heldout_size": 0, "curriculum": True}
    result = run_grpo(FewDigits(), DEMO.changed(**settings))
    assert result.steps == 2
