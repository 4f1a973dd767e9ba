"""Grades completions: calls the task's grader and checks that the reward is finite and within its declared range.

A grader that fails, hangs, leaves its range or cannot judge costs its own completions and no others; the reason is kept
with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mint.errors import MintError
from mint.rl.adapter import Graded, RLAdapter, Task, task_name
from mint.rl.call_pool import CallPool, CallResult, UserCall
from mint.rl.reward import Reward, UnsupportedError


class RewardError(MintError):
    """A grader returned something that is no reward, or a reward outside its declared range."""


@dataclass(frozen=True)
class Grade:
    """A reward with its parts, or None and the reason."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    unsupported: bool = False
    timed_out: bool = False


def checked_reward(task: Task, returned: Any) -> Reward:
    """The reward, checked against the task's declared range.

    Raises:
        RewardError: it is not a finite number, or outside `task.reward_range`; names the grader.
    """
    reward = returned if isinstance(returned, Reward) else None
    value: Any = returned if reward is None else reward.value
    grader = task_name(task)
    if not _is_finite(value):
        raise RewardError(
            f"the reward {value!r} of {grader} is not a finite number", remedy="Return a number, or raise an exception"
        )
    low, high = task.reward_range or (-math.inf, math.inf)
    if not low <= value <= high:
        raise RewardError(
            f"the reward {value:g} of {grader} is outside its declared range [{low:g}, {high:g}]",
            field=f"{grader}.reward_range",
            value=value,
            remedy="Correct the grader, or declare the range that it keeps",
        )
    return Reward(float(value)) if reward is None else Reward(float(value), reward.parts, reward.info)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def grade_group(calls: CallPool, adapter: RLAdapter, responses: Sequence[str], item: Any) -> list[Grade]:
    """One grade per response to one item, in order: by `compute_group_rewards` if the task has it, else one by one."""
    (result,) = calls.run([lambda: adapter.compute_group_rewards(responses, item)])
    if result.error is not None:
        return [_failed(result) for _ in responses]
    if result.value is not None:
        return [_grade_one_of_group(adapter, value) for value in result.value]
    return grade_one_by_one(calls, adapter, [(response, item) for response in responses])


def grade_one_by_one(calls: CallPool, adapter: RLAdapter, pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
    """One grade per (response, item), in order, each by `compute_reward`."""
    return [_grade(adapter, result) for result in calls.run([_reward_call(adapter, *pair) for pair in pairs])]


def _reward_call(adapter: RLAdapter, response: str, item: Any) -> UserCall:
    return lambda: adapter.compute_reward(response, item)


def _grade_one_of_group(adapter: RLAdapter, value: Graded | None) -> Grade:
    if value is None:
        return Grade(None, error="the judge gave no verdict on it")
    return _grade(adapter, CallResult(value))


def _grade(adapter: RLAdapter, result: CallResult) -> Grade:
    if result.error is not None:
        return _failed(result)
    try:
        reward = checked_reward(adapter, result.value)
    except MintError as error:
        return Grade(None, error=str(error))
    return Grade(reward.value, reward.parts, reward.info)


def _failed(result: CallResult) -> Grade:
    unsupported = isinstance(result.error, UnsupportedError)
    return Grade(None, error=result.failure, unsupported=unsupported, timed_out=result.timed_out)
