"""A mean with its 95 % interval, never a bare number: intervals, pass@k, and the estimate of a held-out set. Pure.

Letters: N held-out items · K completions of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from mint.rl.adapter import Task
from mint.rl.rollout import Group

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean reward over `n` items with its 95 % interval; `ungraded` completions count as 0.

    `pass_at["4"]` estimates the chance that at least one of 4 completions is a success; `parts` are the means of the
    reward's named parts; `categories` are mean, low, high, n and success of the items of each `Task.category`.
    """

    mean: float
    low: float
    high: float
    n: int
    temperature: float
    ungraded: int = 0
    success: float = 0.0
    pass_at: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    categories: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Estimate:
        """From a row of `evaluations.jsonl`; its other fields are ignored."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})


def wilson(successes: float, n: float) -> tuple[float, float]:
    """The Wilson score interval (95 %) of a proportion (Wilson 1927); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    spread = Z95**2 / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def students(z: float, freedom: float) -> float:
    """Student's quantile with the probability of the normal quantile `z` (Abramowitz and Stegun 26.7.5, second order).

    A variance that is estimated from few values makes large deviations likelier.
    """
    if freedom <= 0:
        return math.inf
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(
    means_N: Sequence[float], *, proportion: bool = False, bounds: tuple[float, float] | None = None
) -> tuple[float, float, float]:
    """Mean, low and high of one value per item, by Student's t.

    If all values are equal, their spread says nothing. With known `bounds`, up to the share `wilson(0, n)[1]` of the
    items may then differ, and each may be anywhere within the bounds.

    Args:
        means_N: With several completions per item, give their mean: completions of one item are not independent, and
            the error is that between items (clustered errors, arXiv 2411.00640).
        proportion: Each value counts successes, so that it lies in [0, 1]. If all are 0 or 1, the interval is Wilson's,
            which is right also when all are equal.
        bounds: The lowest and the highest possible value; (0, 1) for a proportion.
    """
    values = np.asarray(means_N, dtype=np.float64)
    n = len(values)
    mean = float(values.mean()) if n else 0.0
    if proportion and bool(np.isin(values, (0.0, 1.0)).all()):
        low, high = wilson(float(values.sum()), n)
        return mean, min(low, mean), max(high, mean)  # all right is 1 up to rounding
    bounds = (0.0, 1.0) if proportion else bounds
    if bounds is not None and n and bool((values == values[0]).all()):
        _, others = wilson(0, n)
        return mean, mean - others * max(0.0, mean - bounds[0]), mean + others * max(0.0, bounds[1] - mean)
    half = students(Z95, n - 1) * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    if bounds is None:
        return mean, mean - half, mean + half
    # the approximation does not know that a value is bounded
    return mean, max(min(bounds[0], mean), mean - half), min(max(bounds[1], mean), mean + half)


def reward_interval(task: Task, means_N: Sequence[float]) -> tuple[float, float, float]:
    """`interval` of one mean reward per item, within the task's range; undeclared, it is from 0 to that of a success.

    Rewards of 0 and 1 are a proportion, unless the task declares another range.
    """
    declared = task.reward_range
    if declared in (None, (0.0, 1.0)) and all(0.0 <= value <= 1.0 for value in means_N):
        return interval(means_N, proportion=True)
    return interval(means_N, bounds=declared or (min(0.0, *means_N), max(task.success_reward, *means_N)))


def pass_at_k(successes: int, n: int, k: int) -> float:
    """The unbiased estimate of P(at least one success in k) from `successes` of n >= k (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def estimate(task: Task, groups: Sequence[Group], *, completions: int, temperature: float) -> Estimate:
    """The estimate from groups that should have `completions` rollouts each; missing and ungraded ones count as 0."""
    total = _estimate(task, groups, completions=completions, temperature=temperature)
    by_category: dict[str, list[Group]] = {}
    for group in groups:
        name = task.category(group.item)
        if name is not None:
            by_category.setdefault(name, []).append(group)
    categories = {}
    for name, own in sorted(by_category.items()):
        tasks = {id(one): one for one in (task.task_of(group.item) for group in own)}
        # A category of one task is read on the scale of that task.
        of = next(iter(tasks.values())) if len(tasks) == 1 else task
        found = _estimate(of, own, completions=completions, temperature=temperature, tasks=task)
        numbers = {"mean": found.mean, "low": found.low, "high": found.high}
        categories[name] = {**numbers, "n": float(found.n), "success": found.success}
    return replace(total, categories=categories)


def _estimate(
    task: Task, groups: Sequence[Group], *, completions: int, temperature: float, tasks: Task | None = None
) -> Estimate:
    """That of all groups, without categories. `task` gives the scale of the rewards, `tasks` knows whose item is
    whose; without it, `task` does."""
    rewards_NK = [_padded([rollout.reward or 0.0 for rollout in group.rollouts], completions) for group in groups]
    graded = [rollout for group in groups for rollout in group.rollouts if rollout.reward is not None]
    solved_N = [
        sum(map((tasks or task).task_of(group.item).is_success, rewards))
        for group, rewards in zip(groups, rewards_NK, strict=True)
    ]
    mean, low, high = reward_interval(task, [float(np.mean(rewards)) for rewards in rewards_NK])
    if task.reward_range is not None:  # the normal interval does not know that a reward is bounded
        low, high = max(low, min(mean, task.reward_range[0])), min(high, max(mean, task.reward_range[1]))
    names = sorted({name for rollout in graded for name in rollout.parts})
    total = max(1, completions * len(groups))
    return Estimate(
        mean=mean,
        low=low,
        high=high,
        n=len(groups),
        temperature=temperature,
        ungraded=completions * len(groups) - len(graded),
        success=sum(solved_N) / total,
        pass_at={
            str(k): float(np.mean([pass_at_k(solved, completions, k) for solved in solved_N]))
            for k in powers_of_two(completions)
            if groups
        },
        parts={name: sum(rollout.parts.get(name, 0.0) for rollout in graded) / total for name in names},
    )


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, … up to `limit`."""
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]


def _padded(rewards: list[float], count: int) -> list[float]:
    return rewards + [0.0] * (count - len(rewards))
