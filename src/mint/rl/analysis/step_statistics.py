"""Sums and means over the metrics of steps, and mean rewards with their standard error. Pure.

Knows the names of the metrics, not what is wrong with a run (`signal_rules`, `policy_rules`, `reward_rules`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

StepMetrics = Mapping[str, float]
"""The metrics of one step by name."""

LEAST_CORRELATION = 0.2
"""The lowest correlation of the rollouts of one prompt that the standard error of a mean assumes."""

UNKNOWN_CORRELATION = 0.5
"""The correlation assumed for a step of equal rewards, which says nothing about it."""


@dataclass(frozen=True)
class RewardWindow:
    """A mean over some steps, the variance of one rollout, and the effective number of independent rollouts."""

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
        """By how many standard errors this mean lies above `other`; infinite if both variances are 0.

        The variance is pooled, because a few equal rewards do not prove that there is no noise.
        """
        if not (self.count and other.count):
            return 0.0
        pooled = (self.count * self.variance + other.count * other.variance) / (self.count + other.count)
        difference = self.mean - other.mean
        noise = math.sqrt(pooled * (1 / self.count + 1 / other.count))
        if noise:
            return difference / noise
        return math.copysign(math.inf, difference) if difference else 0.0


def metric(metrics: StepMetrics, name: str, default: float = 0.0) -> float:
    """A metric of a step, or `default` if the step lacks it."""
    return float(metrics.get(name, default))


def mean(steps: Sequence[StepMetrics], name: str) -> float:
    """The mean of a metric over steps; a step that lacks it counts as 0."""
    return sum(metric(step, name) for step in steps) / max(1, len(steps))


def total(steps: Sequence[StepMetrics], name: str) -> float:
    """The sum of a metric over steps."""
    return sum(metric(step, name) for step in steps)


def graded_groups(steps: Sequence[StepMetrics]) -> float:
    """The number of groups with at least two rewards."""
    return total(steps, "groups/total") - total(steps, "groups/failed")


def informative_share(steps: Sequence[StepMetrics]) -> float:
    """The share of `graded_groups` with unequal rewards."""
    return (total(steps, "groups/used") + total(steps, "groups/untrained")) / max(1.0, graded_groups(steps))


def graded(steps: Sequence[StepMetrics]) -> float:
    """The number of rollouts with a reward."""
    return total(steps, "rollouts/count") - total(steps, "rollouts/ungraded")


def reward_window(steps: Sequence[StepMetrics], name: str = "reward/mean") -> RewardWindow:
    """The mean reward over the steps with graded rollouts.

    The effective number of rollouts follows Kish's design effect 1 + (G − 1)·ρ; ρ is estimated as the share of groups
    whose rewards are all equal.
    """
    known = [step for step in steps if graded([step]) > 0]
    if not known:
        return RewardWindow(0.0, 0.0, 0.0)
    count = 0.0
    for step in known:
        rollouts = graded([step])
        per_group = rollouts / max(1.0, graded_groups([step]))
        varied = metric(step, "reward/std") > 0  # a step of equal rewards says nothing about correlation
        correlation = max(LEAST_CORRELATION, 1.0 - informative_share([step])) if varied else UNKNOWN_CORRELATION
        count += rollouts / (1.0 + max(0.0, per_group - 1.0) * correlation)
    variance = sum(metric(step, "reward/std") ** 2 for step in known) / len(known)
    return RewardWindow(mean(known, name), variance, count)


@dataclass(frozen=True)
class RewardTrend:
    """By how much the mean reward has risen, and the standard error of this number.

    `scatter` is the error from the scatter of the steps alone. `error` is not below what the rollouts within the steps
    let expect, so it is the larger one where few steps happen to lie close together.
    """

    rise: float
    error: float
    scatter: float


def reward_trend(steps: Sequence[StepMetrics]) -> RewardTrend:
    """The rise from the first to the last step along the least-squares line through the mean rewards of the steps with
    graded rollouts."""
    windows = _graded_windows(steps)
    count = len(windows)
    if count < 3:
        return RewardTrend(0.0, math.inf, math.inf)
    places = [place - (count - 1) / 2 for place in range(count)]
    spread = sum(place**2 for place in places)
    mean_reward = sum(window.mean for window in windows) / count
    slope = sum(place * window.mean for place, window in zip(places, windows, strict=True)) / spread
    residuals = [window.mean - mean_reward - slope * place for place, window in zip(places, windows, strict=True)]
    return _trend(slope * (count - 1), (count - 1) ** 2 / spread, windows, residuals)


def reward_change(steps: Sequence[StepMetrics], first: int) -> RewardTrend:
    """The mean of the steps after the first `first` ones minus the mean of these, over steps with graded rollouts.

    A line through all steps says little of a run that rises early and then stays at its level; this difference says
    more.
    """
    windows = _graded_windows(steps)
    early, late = windows[:first], windows[first:]
    if len(early) < 2 or len(late) < 2:
        return RewardTrend(0.0, math.inf, math.inf)
    means = [sum(window.mean for window in part) / len(part) for part in (early, late)]
    residuals = [window.mean - mean for part, mean in zip((early, late), means, strict=True) for window in part]
    return _trend(means[1] - means[0], 1 / len(early) + 1 / len(late), windows, residuals)


def _graded_windows(steps: Sequence[StepMetrics]) -> list[RewardWindow]:
    """The mean reward of each step with graded rollouts."""
    return [window for step in steps if (window := reward_window([step])).count]


def _trend(rise: float, factor: float, windows: Sequence[RewardWindow], residuals: Sequence[float]) -> RewardTrend:
    """`factor` times the variance of one step is the variance of `rise`. The residuals are those of two parameters."""
    rest = sum(residual**2 for residual in residuals) / (len(windows) - 2)
    within = sum(window.mean_error**2 for window in windows) / len(windows)
    return RewardTrend(rise, math.sqrt(factor * max(rest, within)), math.sqrt(factor * rest))


def best_window(steps: Sequence[StepMetrics], longest: int) -> tuple[int, RewardWindow] | None:
    """The best window of at most `longest` consecutive steps, and the place after it; None if nothing was graded.

    The best window has the highest lower end of its 95 % interval.
    """
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
