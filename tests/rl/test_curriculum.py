"""Just hard enough: simulated policies that learn and forget."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mint.rl.rollouts.curriculum import Curriculum

GROUP = 8


class Policy:
    """Items with skills from hopeless to solved; an item that is practised gets easier, as its group informs."""

    def __init__(self, size: int, seed: int, *, speed: float) -> None:
        self.random = np.random.default_rng(seed)
        self.skill = self.random.normal(0.0, 4.0, size)
        self.speed = speed

    def visit(self, item: int) -> float:
        successes = self.random.binomial(GROUP, 1 / (1 + math.exp(-self.skill[item])))
        self.skill[item] += self.speed * (0 < successes < GROUP)
        return successes / GROUP


def run(size: int, *, steps: int, batch: int, uniform: bool, seed: int, speed: float = 0.3) -> list[list[float]]:
    """Success rates of the items asked, by step."""
    policy, curriculum = Policy(size, seed, speed=speed), Curriculum(size, seed=seed)
    order = np.random.default_rng(seed)
    history = []
    for step in range(1, steps + 1):
        items = order.integers(size, size=batch).tolist() if uniform else curriculum.choose(step, batch)
        rates = [policy.visit(item) for item in items]
        for item, rate in zip(items, rates, strict=True):
            curriculum.record(item, rate, step)
        history.append(rates)
    return history


def informative(history: list[list[float]]) -> float:
    return float(np.mean([0 < rate < 1 for rates in history for rate in rates]))


@pytest.mark.parametrize("seed", range(3))
def test_more_groups_carry_a_signal_than_with_uniform_choice(seed: int) -> None:
    ours = informative(run(400, steps=60, batch=16, uniform=False, seed=seed)[20:])
    uniform = informative(run(400, steps=60, batch=16, uniform=True, seed=seed)[20:])
    assert ours > uniform + 0.15, (ours, uniform)


@pytest.mark.parametrize("seed", range(3))
def test_solved_items_are_at_most_a_tenth_of_the_samples_after_fifty_steps(seed: int) -> None:
    policy, curriculum = Policy(400, seed, speed=0.3), Curriculum(400, seed=seed)
    asked_solved = asked = 0
    for step in range(1, 81):
        items = curriculum.choose(step, 16)
        if step > 50:
            asked_solved += sum(curriculum.state_of(item) in ("solved", "retired") for item in items)
            asked += len(items)
        for item in items:
            curriculum.record(item, policy.visit(item), step)
    assert curriculum.metrics()["curriculum/solved"] > 100
    assert 0 < asked_solved <= 0.1 * asked


def test_a_solved_item_that_is_forgotten_comes_back() -> None:
    curriculum = Curriculum(40, seed=0)
    for item in range(40):
        for visit in range(1, 5):
            curriculum.record(item, 1.0 if item < 10 else 0.5, visit)
    assert curriculum.state_of(3) == "retired"
    for step in range(5, 200):
        for item in curriculum.choose(step, 8):
            curriculum.record(item, 0.25 if item == 3 else 1.0 if item < 10 else 0.5, step)
        if curriculum.state_of(3) == "in_band":
            return
    pytest.fail("item 3 was never re-tested")


def test_too_hard_items_are_tried_again_rarely_but_are() -> None:
    curriculum = Curriculum(64, seed=1)
    for item in range(64):
        curriculum.record(item, 0.0 if item < 32 else 0.5, 1)
    counts = np.zeros(64)
    for step in range(2, 102):
        for item in curriculum.choose(step, 8):
            counts[item] += 1
            curriculum.record(item, 0.0 if item < 32 else 0.5, step)
    assert 0.02 < counts[:32].sum() / counts.sum() < 0.1


def test_all_items_are_explored() -> None:
    curriculum = Curriculum(100, seed=2)
    for step in range(1, 81):
        for item in curriculum.choose(step, 8):
            curriculum.record(item, 0.5, step)
    assert curriculum.metrics()["curriculum/unseen"] == 0


def test_one_lucky_group_retires_nothing_and_standings_add_up_to_the_dataset() -> None:
    curriculum = Curriculum(5, seed=0)
    for item, rates in enumerate([[], [0.0], [0.5], [1.0], [1.0, 1.0, 1.0]]):
        for step, rate in enumerate(rates, start=1):
            curriculum.record(item, rate, step)
    states = [curriculum.state_of(item) for item in range(5)]
    assert states == ["unseen", "too_hard", "in_band", "solved", "retired"]
    assert sum(curriculum.metrics().values()) == 5


def test_no_item_is_chosen_twice_in_a_step_unless_there_are_too_few() -> None:
    curriculum = Curriculum(20, seed=0)
    first, refill = curriculum.choose(1, 8), curriculum.choose(1, 8)
    assert len({*first, *refill}) == 16
    assert sorted(curriculum.choose(2, 40)) == sorted([*range(20), *range(20)])


def test_the_same_state_chooses_the_same_after_a_round_trip_through_json() -> None:
    one = Curriculum(50, seed=3, low=0.1, high=0.9, retire_at=0.99, retest_share=0.2)
    for step in range(1, 6):
        for item in one.choose(step, 8):
            one.record(item, (item % 5) / 4, step)
    other = Curriculum.from_dict(json.loads(json.dumps(one.to_dict())))
    assert other.to_dict() == one.to_dict()
    assert [one.choose(step, 8) for step in (6, 7)] == [other.choose(step, 8) for step in (6, 7)]


def test_another_seed_chooses_otherwise() -> None:
    assert Curriculum(50, seed=0).choose(1, 8) != Curriculum(50, seed=1).choose(1, 8)
