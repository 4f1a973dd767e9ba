"""From what a grader answers to a reward that may be trained on: finite, within its declared range, its parts named.

A grader that fails, hangs, leaves its range or cannot judge costs its own completions and no others; what happened is
kept with them. Knows nothing of policies or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mint.errors import MintError
from mint.rl.adapter import Answered, RLAdapter, Task
from mint.rl.call_pool import Answer, CallPool
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


def accept(task: Task, answered: Any) -> Reward:
    """The reward, checked against the task's declared range.

    Raises:
        RewardError: it is not a finite number, or outside `task.reward_range`; names the grader.
    """
    reward = answered if isinstance(answered, Reward) else None
    value: Any = answered if reward is None else reward.value
    grader = type(task).__name__
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


def grade_completions(calls: CallPool, adapter: RLAdapter, responses: Sequence[str], sample: Any) -> list[Grade]:
    """One grade per response of one sample, in order: by the group's judge where there is one, else each alone."""
    (answer,) = calls.run([lambda: adapter.compute_group_rewards(responses, sample)])
    if answer.error is not None:
        return [_failed(answer) for _ in responses]
    if answer.value is not None:
        return [_grade_one_of_group(adapter, value) for value in answer.value]
    return [_grade(adapter, answer) for answer in calls.run([_call(adapter, text, sample) for text in responses])]


def grade_single(calls: CallPool, adapter: RLAdapter, responses: Sequence[str], samples: Sequence[Any]) -> list[Grade]:
    """One grade per (response, sample) pair, each judged alone."""
    pairs = zip(responses, samples, strict=True)
    return [_grade(adapter, answer) for answer in calls.run([_call(adapter, *pair) for pair in pairs])]


def _call(adapter: RLAdapter, text: str, sample: Any) -> Any:
    return lambda: adapter.compute_reward(text, sample)


def _grade_one_of_group(adapter: RLAdapter, value: Answered | None) -> Grade:
    if value is None:
        return Grade(None, error="the judge gave no verdict on it")
    return _grade(adapter, Answer(value))


def _grade(adapter: RLAdapter, answer: Answer) -> Grade:
    if answer.error is not None:
        return _failed(answer)
    try:
        reward = accept(adapter, answer.value)
    except MintError as error:
        return Grade(None, error=str(error))
    return Grade(reward.value, reward.parts, reward.info)


def _failed(answer: Answer) -> Grade:
    unsupported = isinstance(answer.error, UnsupportedError)
    return Grade(None, error=answer.failure, unsupported=unsupported, timed_out=answer.timed_out)
