"""The log of a run as the diagnosis reads it: the whole of it, and the view of it at one step. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mint.rl.analysis.step_statistics import StepMetrics, graded, metric

Row = Mapping[str, Any]

STILL_SHARE = 0.005
"""Share of the reward's range; a mean that stays within it over a whole run counts as constant."""


@dataclass(frozen=True)
class RunRecord:
    """The log of a run, oldest first.

    `rollouts` are rows of `rollouts.jsonl`, or a mapping from step to rows that reads on demand. They may be those of
    the last steps only; rules that need rollouts then find nothing in earlier steps. `warnings` are (step, message).
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[StepMetrics] = ()
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
        """The run up to the step at `place` of the metrics."""
        metrics = self.metrics[: place + 1]
        step = int(metrics[-1]["step"])
        return StepView(
            self.config,
            metrics,
            [row for row in self.evaluations if int(row["step"]) <= step],
            self.rows_by_step,
            [message for at, message in self.warnings if at == step],
        )


@dataclass(frozen=True)
class StepView:
    """A run up to and including one step. `warnings` are the server's warnings in that step."""

    config: Mapping[str, Any]
    metrics: Sequence[StepMetrics]
    evaluations: Sequence[Row]
    rows_by_step: Mapping[int, list[Row]]
    warnings: Sequence[str]

    @property
    def now(self) -> StepMetrics:
        """The metrics of the last step."""
        return self.metrics[-1]

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.now["step"])

    def last(self, steps: int) -> Sequence[StepMetrics]:
        """The metrics of the last `steps` steps, or of as many as there are."""
        return self.metrics[-steps:]

    def rows(self, steps: int) -> list[Row]:
        """The rollouts of the last `steps` steps, as far as they are in the record."""
        return [row for step in range(self.step - steps + 1, self.step + 1) for row in self.rows_by_step.get(step, ())]

    @cached_property
    def reward_floor(self) -> float:
        """The lowest possible reward: as declared, else 0 or the lowest seen."""
        declared = self.config.get("reward_range")
        if declared:
            return float(declared[0])
        return min([0.0, *(metric(step, "reward/min") for step in self.metrics)])

    @cached_property
    def reward_ceiling(self) -> float:
        """The highest possible reward: as declared, else that of a success or the highest seen."""
        declared = self.config.get("reward_range")
        if declared:
            return float(declared[1])
        seen = (metric(step, "reward/max") for step in self.metrics)
        return max([float(self.config.get("success_reward", 1.0)), *seen])

    @cached_property
    def only_compares(self) -> bool:
        """Whether rewards differ within groups while their mean is constant, as with a pairwise judge. Then the mean
        reward does not say how good the policy is."""
        means = [metric(step, "reward/mean") for step in self.metrics if graded([step]) > 0]
        varied = any(metric(step, "reward/std") > 0 for step in self.metrics)
        return (
            bool(means)
            and varied
            and max(means) - min(means) <= STILL_SHARE * (self.reward_ceiling - self.reward_floor)
        )
