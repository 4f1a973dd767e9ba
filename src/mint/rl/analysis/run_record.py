"""What diagnosis reads: a run's log, the view of it at one step, and means that know their noise. Pure.

Knows the names of the run folder's columns, not what is wrong with a run (`rules_*`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Row = Mapping[str, Any]
Numbers = Mapping[str, float]

LEAST_CORRELATION, UNKNOWN_CORRELATION = 0.2, 0.5
"""Rollouts of one prompt are taken to be correlated at least this much, when a mean's standard error is estimated."""


STILL_SHARE = 0.005
"""Of the reward's range: a mean that stays within it over a whole run does not move."""


@dataclass(frozen=True)
class RunRecord:
    """The log of a run, oldest first. `rollouts` may be those of the last few steps only; a rule that looks at them is
    silent about the other steps. They may also come by step, from something that reads a step when it is asked for.
    `warnings` are (step, the server's words)."""

    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Numbers] = ()
    evaluations: Sequence[Row] = ()
    rollouts: Sequence[Row] | Mapping[int, list[Row]] = ()
    warnings: Sequence[tuple[int, str]] = ()

    @cached_property
    def rows_by_step(self) -> Mapping[int, list[Row]]:
        """The rollouts of each step."""
        if isinstance(self.rollouts, Mapping):
            return self.rollouts
        by_step: dict[int, list[Row]] = {}
        for row in self.rollouts:
            by_step.setdefault(int(row["step"]), []).append(row)
        return by_step

    def at(self, place: int) -> StepView:
        """The run as it was after the step at `place` of the metrics."""
        metrics = self.metrics[: place + 1]
        step = int(metrics[-1]["step"])
        return StepView(
            self.config,
            metrics,
            [row for row in self.evaluations if int(row["step"]) <= step],
            self.rows_by_step,
            [words for at, words in self.warnings if at == step],
        )


@dataclass(frozen=True)
class StepView:
    """A run up to and including one step. `warnings` are the server's words in that step."""

    config: Mapping[str, Any]
    metrics: Sequence[Numbers]
    evaluations: Sequence[Row]
    rows_by_step: Mapping[int, list[Row]]
    warnings: Sequence[str]

    @property
    def now(self) -> Numbers:
        """The metrics of the last step."""
        return self.metrics[-1]

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.now["step"])

    def last(self, steps: int) -> Sequence[Numbers]:
        """The metrics of the last `steps` steps, or of as many as there are."""
        return self.metrics[-steps:]

    def rows(self, steps: int) -> list[Row]:
        """The rollouts of the last `steps` steps, as far as they are in the record."""
        return [row for step in range(self.step - steps + 1, self.step + 1) for row in self.rows_by_step.get(step, ())]

    @cached_property
    def reward_floor(self) -> float:
        """The lowest reward that the task can give: as declared, else 0 or the lowest seen."""
        declared = self.config.get("reward_range")
        return float(declared[0]) if declared else min(0.0, *(get(step, "reward/min") for step in self.metrics))

    @cached_property
    def reward_ceiling(self) -> float:
        """The highest reward: as declared, else that of a success or the highest seen."""
        declared = self.config.get("reward_range")
        if declared:
            return float(declared[1])
        seen = (get(step, "reward/max") for step in self.metrics)
        return max(float(self.config.get("success_reward", 1.0)), *seen)

    @cached_property
    def only_compares(self) -> bool:
        """Whether rewards differ within groups but their mean never moves, as a judge's who shares out a fixed sum:
        then neither level nor change of the mean says how good the policy is."""
        means = [get(step, "reward/mean") for step in self.metrics if graded([step]) > 0]
        varied = any(get(step, "reward/std") > 0 for step in self.metrics)
        return varied and max(means) - min(means) <= STILL_SHARE * (self.reward_ceiling - self.reward_floor)


@dataclass(frozen=True)
class RewardWindow:
    """A mean over some steps, the variance of one rollout around it, and how many independent rollouts it is worth."""

    mean: float
    variance: float
    count: float

    @property
    def mean_error(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(self.variance / self.count) if self.count else math.inf

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval."""
        return self.mean - 1.96 * self.mean_error

    def above(self, other: RewardWindow) -> float:
        """By how many standard errors this mean lies above `other`; infinite where neither has any noise.

        The variance is pooled: a handful of equal rewards is no proof of a mean without noise.
        """
        if not (self.count and other.count):
            return 0.0
        pooled = (self.count * self.variance + other.count * other.variance) / (self.count + other.count)
        difference, noise = self.mean - other.mean, math.sqrt(pooled * (1 / self.count + 1 / other.count))
        if noise:
            return difference / noise
        return math.copysign(math.inf, difference) if difference else 0.0


def get(metrics: Numbers, name: str, default: float = 0.0) -> float:
    """A metric that a step may lack."""
    return float(metrics.get(name, default))


def mean(steps: Sequence[Numbers], name: str) -> float:
    """The mean of a metric over steps; a step that lacks it counts as 0."""
    return sum(get(step, name) for step in steps) / max(1, len(steps))


def total(steps: Sequence[Numbers], name: str) -> float:
    """The sum of a metric over steps."""
    return sum(get(step, name) for step in steps)


def graded_groups(steps: Sequence[Numbers]) -> float:
    """Groups with at least two rewards."""
    return total(steps, "groups/total") - total(steps, "groups/failed")


def informative_share(steps: Sequence[Numbers]) -> float:
    """Of those, the share with unequal rewards."""
    return total(steps, "groups/used") / max(1.0, graded_groups(steps))


def graded(steps: Sequence[Numbers]) -> float:
    """Rollouts with a reward."""
    return total(steps, "rollouts/count") - total(steps, "rollouts/ungraded")


def reward_window(steps: Sequence[Numbers], name: str = "reward/mean") -> RewardWindow:
    """The mean reward over steps that graded something. Rollouts of one prompt count as less than one each: Kish's
    design effect 1 + (G − 1)·ρ, with ρ taken as the share of groups whose rewards are all equal."""
    known = [step for step in steps if graded([step]) > 0]
    if not known:
        return RewardWindow(0.0, 0.0, 0.0)
    count = 0.0
    for step in known:
        rollouts = graded([step])
        per_group = rollouts / max(1.0, graded_groups([step]))
        varied = get(step, "reward/std") > 0  # a step of equal rewards says nothing about correlation
        correlation = max(LEAST_CORRELATION, 1.0 - informative_share([step])) if varied else UNKNOWN_CORRELATION
        count += rollouts / (1.0 + max(0.0, per_group - 1.0) * correlation)
    variance = sum(get(step, "reward/std") ** 2 for step in known) / len(known)
    return RewardWindow(mean(known, name), variance, count)


def best_window(steps: Sequence[Numbers], longest: int) -> tuple[int, RewardWindow] | None:
    """The place after, and the mean of, the window of at most `longest` neighbouring steps that is most surely high
    (highest lower end of its 95 % interval); None where nothing was graded."""
    single = [reward_window([step]) for step in steps]
    best: tuple[int, RewardWindow] | None = None
    for end in range(1, len(steps) + 1):
        mean_sum = variance_sum = count = length = 0.0
        for window in reversed(single[max(0, end - longest) : end]):
            length += window.count > 0
            mean_sum, variance_sum = mean_sum + window.mean, variance_sum + window.variance
            count += window.count
            if length:
                joined = RewardWindow(mean_sum / length, variance_sum / length, count)
                if best is None or joined.low > best[1].low:
                    best = (end, joined)
    return best
