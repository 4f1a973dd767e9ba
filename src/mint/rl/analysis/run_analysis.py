"""Analyses of a run folder: diagnosis, bisection over its checkpoints, token counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from mint.errors import InvalidRequestError
from mint.rl.analysis.bisect import Regression, find_regression
from mint.rl.analysis.diagnosis import diagnose, is_contradicted
from mint.rl.analysis.run_record import Row, RunRecord
from mint.rl.estimate import Estimate, wilson
from mint.rl.finding import Finding
from mint.rl.heldout_evaluation import GREEDY, SAMPLED
from mint.rl.tracking.token_counts import TokenCounts, token_counts_by_item, token_counts_of_steps
from mint.runs.reader import RunReader

BISECT_METRICS = ("heldout", "heldout_sampled", "success")
"""The metrics of `mint bisect --metric`: mean reward greedy and at temperature 1, and the greedy success rate."""

CACHED_STEPS = 10
"""Steps whose rollouts are cached; no rule of the diagnosis looks back further."""

EvaluateCheckpoint = Callable[[str], Mapping[float, Estimate]]
"""Checkpoint → its held-out estimates by temperature."""


class _RolloutsByStep(Mapping[int, list[Row]]):
    """The rollouts of each step of a run, read on demand, with a cache of the last steps."""

    def __init__(self, reader: RunReader) -> None:
        self._read = lru_cache(CACHED_STEPS)(lambda step: reader.rows(step, light=True))
        self._steps = reader.steps()

    def __getitem__(self, step: int) -> list[Row]:
        rows = self._read(step)
        if not rows:
            raise KeyError(step)
        return [*rows]

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def diagnose_run(folder: Path) -> list[Finding]:
    """Diagnoses the whole log of a run; adds the findings of the live run that the log alone does not show, and leaves
    out those that the end of the run contradicts. The rules are about rewards: of a run without them, only the findings
    of the live run.

    Raises:
        NotFoundError: the folder holds no run.
    """
    reader = RunReader(folder)
    noted = [Finding(**row) for row in reader.findings()]
    if not has_rewards(reader):
        return sorted(noted, key=lambda one: one.step)
    record = RunRecord(
        config=reader.config,
        metrics=reader.metrics(),
        evaluations=reader.evaluations(),
        rollouts=_RolloutsByStep(reader),
        warnings=[(row["step"], row["warning"]) for row in reader.warnings()],
    )
    found = diagnose(record)
    codes = {finding.code for finding in found}
    findings = [*found, *(finding for finding in noted if finding.code not in codes)]
    return sorted((one for one in findings if not is_contradicted(one, record)), key=lambda one: one.step)


def has_rewards(reader: RunReader) -> bool:
    """Whether the diagnosis has rules for a run: False for one of SFT, DPO or distillation that has taken a step."""
    metrics = reader.metrics()
    return not metrics or any("reward/mean" in row for row in metrics)


def bisect_run(folder: Path, metric: str, evaluate: EvaluateCheckpoint) -> Regression:
    """Finds between which two checkpoints of a run `metric` fell. Evaluations in the log are not repeated.

    Raises:
        InvalidRequestError: unknown metric, fewer than two checkpoints, or a damaged file.
    """
    require_bisect_metric(metric)
    reader = RunReader(folder)
    checkpoints = {row["step"]: row["checkpoint"] for row in reader.checkpoints()}
    if len(checkpoints) < 2:
        raise InvalidRequestError(
            "has fewer than two checkpoints",
            field="run",
            value=str(folder),
            remedy="Run again with a smaller save_every",
        )
    known: dict[str, dict[float, Estimate]] = {}
    for row in reader.evaluations():
        if row["step"] in checkpoints and "temperature" in row:
            known.setdefault(checkpoints[row["step"]], {})[row["temperature"]] = Estimate.from_dict(row)

    return find_regression(
        [path for _, path in sorted(checkpoints.items())],
        lambda checkpoint: select_metric(evaluate(checkpoint), metric),
        known={checkpoint: select_metric(estimates, metric) for checkpoint, estimates in known.items()},
    )


def run_token_counts(folder: Path) -> tuple[TokenCounts, dict[int, TokenCounts]]:
    """Token counts of the whole run, and by item, those with the most generated tokens first.

    Raises:
        NotFoundError: the folder holds no run.
    """
    reader = RunReader(folder)
    items: dict[int, TokenCounts] = {}
    for step in reader.steps():
        for item, counts in token_counts_by_item(reader.rows(step, light=True)).items():
            items[item] = items.get(item, TokenCounts()) + counts
    by_tokens = sorted(items.items(), key=lambda entry: -entry[1].generated)
    return token_counts_of_steps(reader.metrics()), dict(by_tokens)


def select_metric(estimates: Mapping[float, Estimate], metric: str) -> Estimate:
    """The estimate that `metric` names.

    Raises:
        InvalidRequestError: unknown metric.
    """
    if metric == "heldout":
        return estimates[GREEDY]
    if metric == "heldout_sampled":
        return estimates[SAMPLED]
    if metric == "success":
        greedy = estimates[GREEDY]
        low, high = wilson(greedy.success * greedy.n, greedy.n)
        return replace(greedy, mean=greedy.success, low=low, high=high)
    raise _unknown(metric)


def require_bisect_metric(metric: object) -> str:
    """The metric, if it is one of `BISECT_METRICS`.

    Raises:
        InvalidRequestError: it is not.
    """
    if not isinstance(metric, str) or metric not in BISECT_METRICS:
        raise _unknown(metric)
    return metric


def _unknown(metric: object) -> InvalidRequestError:
    remedy = f"Choose one of {', '.join(BISECT_METRICS)}"
    return InvalidRequestError("is not a metric", field="metric", value=metric, remedy=remedy)
