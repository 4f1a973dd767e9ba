"""Grades completions: calls the task's grader and checks that the reward is finite and within its declared range.

A grader that fails, hangs, leaves its range or cannot judge costs its own completions and no others; the reason is kept
with them.

Letters: B groups of a batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from mint.errors import MintError
from mint.rl.adapter import RLAdapter, Task, task_name
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.retries import Retries
from mint.rl.calls.user_call import CallResult
from mint.rl.reward import Reward, UnsupportedError


class RewardError(MintError):
    """A grader returned something that is no reward, or a reward outside its declared range."""


@dataclass(frozen=True)
class Grade:
    """A reward with its parts, or None and the reason. `seconds` is the time of the call that gave it, which may have
    graded others, too, and `seconds_of` those of its graders by name. `retries` counts the failures before it; of the
    grades of one call, only the first has them."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    unsupported: bool = False
    timed_out: bool = False
    seconds: float = 0.0
    retries: int = 0
    seconds_of: Mapping[str, float] = field(default_factory=dict)


def checked_reward(task: Task, returned: Any) -> Reward:
    """The reward, checked against the task's declared range.

    Raises:
        RewardError: it is not a finite number, or outside `task.reward_range`, or its `info` has a cost that is no
            number of at least 0; names the grader.
    """
    reward = returned if isinstance(returned, Reward) else None
    value: Any = returned if reward is None else reward.value
    if getattr(value, "shape", None) in ((), (1,)):  # a number of numpy or torch
        value = value.item()
    if isinstance(value, Fraction | Decimal):
        with suppress(ValueError, OverflowError):  # too large for a float: refused below
            value = float(value)
    grader = task_name(task)
    if not _is_finite(value):
        raise RewardError(
            f"the reward {value!r} of {grader} is not a finite number",
            remedy="Return a number or a Reward, or raise an exception",
        )
    low, high = task.reward_range or (-math.inf, math.inf)
    if not low <= value <= high:
        raise RewardError(
            f"the reward {value:g} of {grader} is outside its declared range [{low:g}, {high:g}]",
            field=f"{grader}.reward_range",
            value=value,
            remedy="Correct the grader, or declare the range that it keeps",
        )
    if reward is None:
        return Reward(float(value))
    cost = reward.info.get("cost", 0.0)
    if not _is_finite(cost) or cost < 0:
        raise RewardError(
            f"the cost {cost!r} of {grader} is not a finite number of at least 0",
            field="Reward.info",
            value={"cost": cost},
            remedy="Give the cost of the call as a number, or leave it out",
        )
    # Not `replace`: a subclass may be made of other arguments.
    return Reward(float(value), reward.parts, reward.info, reward.grader_seconds)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Grader:
    """Grades the completions of one task: all that it is given at once, in the order that it is given them."""

    def __init__(self, adapter: RLAdapter, calls: CallPool, retries: Retries | None = None) -> None:
        """Without `retries`, a grader that fails is not asked again."""
        self.adapter = adapter
        self._calls = calls
        self._retries = retries or Retries()

    @property
    def grades_batches(self) -> bool:
        """Whether the task grades all completions of a batch at once."""
        return type(self.adapter).compute_batch_rewards is not RLAdapter.compute_batch_rewards

    @property
    def grades_groups(self) -> bool:
        """Whether the task grades the completions of a group at once."""
        return type(self.adapter).compute_group_rewards is not RLAdapter.compute_group_rewards

    async def group(self, responses: Sequence[str], item: Any) -> list[Grade]:
        """One grade per response to one item, in order: by `compute_group_rewards` if the task has it, else one by
        one."""
        if not self.grades_groups:
            return await self.one_by_one([(response, item) for response in responses])
        result = await self._call(self.adapter.compute_group_rewards, responses, item)
        if result.error is None and result.value is None:
            return await self.one_by_one([(response, item) for response in responses])
        return self._grades_of(result, len(responses), item)

    async def compares(self, responses: Sequence[str], item: Any) -> bool:
        """Whether `compute_group_rewards` grades these completions against each other, and does not pass them on."""
        if not self.grades_groups:
            return False
        result = await self._call(self.adapter.compute_group_rewards, responses, item)
        return result.error is not None or result.value is not None

    async def batch(self, responses_B: Sequence[Sequence[str]], items_B: Sequence[Any]) -> list[list[Grade]] | None:
        """The grades of all groups of a batch by `compute_batch_rewards`; None if that passes them on."""
        result = await self._call(self.adapter.compute_batch_rewards, responses_B, items_B)
        if result.error is None and result.value is None:
            return None
        groups = [] if result.error is not None else list(result.value)
        if result.error is None and len(groups) != len(responses_B):
            result = replace(result, error=_wrong_count(self.adapter, "groups", len(groups), len(responses_B)))
        if result.error is not None:
            groups = [None] * len(responses_B)
        # The failures before this one call count once: with the first group that has a response.
        first = next((place for place, responses in enumerate(responses_B) if responses), 0)
        return [
            self._grades_of(
                replace(result, value=rewards, attempts=result.attempts if place == first else 1), len(responses), item
            )
            for place, (rewards, responses, item) in enumerate(zip(groups, responses_B, items_B, strict=True))
        ]

    async def one_by_one(self, pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
        """One grade per (response, item), in order, each by `compute_reward`."""
        results = await asyncio.gather(*(self._call(self.adapter.compute_reward, *pair) for pair in pairs))
        return [_grade(self.adapter.task_of(item), result) for (_, item), result in zip(pairs, results, strict=True)]

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> CallResult:
        return await self._retries.call(self._calls, function, *arguments)

    def _grades_of(self, result: CallResult, count: int, item: Any) -> list[Grade]:
        """The grades of a group, the completions of one item, that was judged by one call."""
        task = self.adapter.task_of(item)
        values = [] if result.error is not None else list(result.value)
        if result.error is None and len(values) != count:
            result = replace(result, error=_wrong_count(task, "rewards", len(values), count))
        calls = [replace(result, attempts=result.attempts if place == 0 else 1) for place in range(count)]
        if result.error is not None:
            return [_failed(call) for call in calls]
        return [
            Grade(None, error="the judge gave no verdict on it", seconds=call.seconds, retries=call.attempts - 1)
            if value is None
            else _grade(task, replace(call, value=value))
            for call, value in zip(calls, values, strict=True)
        ]


def _wrong_count(adapter: Task, what: str, given: int, wanted: int) -> RewardError:
    return RewardError(
        f"{task_name(adapter)} returned {given} {what} for {wanted}", remedy="Return one for each, None for no verdict"
    )


def _grade(adapter: Task, result: CallResult) -> Grade:
    if result.error is not None:
        return _failed(result)
    try:
        reward = checked_reward(adapter, result.value)
    except MintError as error:
        return Grade(None, error=str(error), seconds=result.seconds, retries=result.attempts - 1)
    return Grade(
        reward.value,
        reward.parts,
        reward.info,
        seconds=result.seconds,
        retries=result.attempts - 1,
        seconds_of=reward.grader_seconds,
    )


def _failed(result: CallResult) -> Grade:
    return Grade(
        None,
        error=result.failure,
        unsupported=isinstance(result.error, UnsupportedError),
        timed_out=result.timed_out,
        seconds=result.seconds,
        retries=result.attempts - 1,
    )
