"""What a grader answers is checked before anything is trained on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from mint.errors import InvalidRequestError
from mint.rl import Reward, RLAdapter, UnsupportedError
from mint.rl.adapter import as_task
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.rollouts.grading import Grader, RewardError, checked_reward


class Graded(RLAdapter):
    """The reward is what the sample's table says."""

    reward_range = (0.0, 1.0)

    def build_dataset(self) -> Sequence[Any]:
        return [{}]

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        return [1]

    def compute_reward(self, response: str, item: dict[str, Any]) -> Any:
        answer = item[response]
        if isinstance(answer, Exception):
            raise answer
        return answer


def grades(answers: dict[str, Any], adapter: RLAdapter | None = None):
    calls = CallPool(timeout_s=60)
    found = run_in_own_thread(Grader(adapter or Graded(), calls).group(list(answers), answers))
    calls.close()
    return found


def test_numbers_and_rewards_with_parts_are_accepted() -> None:
    plain, parts = grades({"a": 0.5, "b": Reward(0.75, {"right": 1.0, "too long": -0.25}, {"engine": "x"})})
    assert (plain.reward, plain.error) == (0.5, None)
    assert (parts.reward, parts.parts["too long"], parts.info["engine"]) == (0.75, -0.25, "x")


@pytest.mark.parametrize(
    "wrong", [math.nan, math.inf, "1.0", None, 1.01, -0.01, np.array([1.0, 1.0]), Decimal("sNaN"), Fraction(10**400)]
)
def test_what_is_no_reward_or_out_of_range_costs_its_completion_and_names_the_grader(wrong: Any) -> None:
    bad, good = grades({"a": wrong, "b": 1.0})
    assert bad.reward is None
    assert "Graded" in (bad.error or "")
    assert good.reward == 1.0


def test_the_range_error_names_field_value_and_range() -> None:
    with pytest.raises(RewardError, match=r"2 of Graded is outside its declared range \[0, 1\]"):
        checked_reward(Graded(), 2.0)


@pytest.mark.parametrize("cost", ["0.25", None, math.nan, -0.5])
def test_a_cost_that_is_no_number_is_refused_and_not_left_out_of_the_sum(cost: Any) -> None:
    bad, good = grades({"a": Reward(1.0, info={"cost": cost}), "b": Reward(1.0, info={"cost": 0.25})})
    assert bad.reward is None and "the cost" in (bad.error or "") and "Graded" in (bad.error or "")
    assert good.info["cost"] == 0.25


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"parts"):
        Reward(1.0, {"right": 0.5})


def test_unsupported_is_not_an_ordinary_failure() -> None:
    unsupported, failed = grades({"a": UnsupportedError("no sandbox here"), "b": ValueError("bad grader")})
    assert (unsupported.reward, unsupported.unsupported) == (None, True)
    assert (failed.reward, failed.unsupported) == (None, False)
    assert "ValueError: bad grader" in (failed.error or "")


class ByGroup(Graded):
    """Ranks the group by length."""

    async def compute_group_rewards(self, responses: Sequence[str], item: Any) -> Sequence[float | None]:
        longest = max(len(response) for response in responses)
        return [None if response == "?" else len(response) / longest for response in responses]


def test_a_group_judge_sees_all_responses_once_and_may_pass_on_one() -> None:
    first, second, passed = grades({"ab": 0.0, "abcd": 0.0, "?": 0.0}, ByGroup())
    assert (first.reward, second.reward, passed.reward) == (0.5, 1.0, None)


def test_a_group_judge_that_fails_costs_its_group() -> None:
    class Fails(Graded):
        def compute_group_rewards(self, responses: Sequence[str], item: Any) -> Sequence[float]:
            raise RuntimeError("the judge is away")

    assert [grade.error for grade in grades({"a": 1.0, "b": 0.0}, Fails())] == ["RuntimeError: the judge is away"] * 2


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), np.int64(1), np.bool_(True), torch.tensor(0.5), np.array([1.0]), Fraction(1, 2), Decimal("0.3")],
)
def test_a_real_number_of_any_type_is_a_reward(value: Any) -> None:
    found = checked_reward(Graded(), value)
    assert found.value == float(np.ravel(value)[0]) and type(found.value) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [("reward_range", (1, 0)), ("reward_range", (math.nan, 1)), ("reward_range", (0, 0)), ("reward_range", (0,)),
     ("reward_range", "01"), ("success_reward", math.nan), ("success_reward", 1.5), ("success_reward", -0.5)],
)  # fmt: skip
def test_rewards_that_no_rollout_can_have_are_refused_when_a_run_begins(name: str, value: Any) -> None:
    task = Graded()
    setattr(task, name, value)
    with pytest.raises(InvalidRequestError, match=rf"Graded\.{name} = "):
        as_task(task)


def test_a_range_that_cannot_reach_success_reward_is_refused_with_the_bounds() -> None:
    task = Graded()
    task.reward_range = (0.0, 0.5)
    with pytest.raises(InvalidRequestError, match=r"Graded\.success_reward = 1\.0.* outside reward_range, 0 to 0\.5"):
        as_task(task)
    task.success_reward = 0.5
    assert as_task(task).is_success(0.5)


def test_an_adapter_without_the_base_class_keeps_its_success_reward() -> None:
    class Plain:
        reward_range = (0.0, 10.0)
        success_reward = 10.0
        build_dataset = make_prompt = compute_reward = Graded.build_dataset

    assert not as_task(Plain()).is_success(1.0)
