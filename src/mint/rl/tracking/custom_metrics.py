"""The metrics of a step that the user's own functions compute (`RLConfig.metrics`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mint.errors import InvalidRequestError
from mint.rl.finding import Finding
from mint.rl.objective import MetricsFunction, called, function_name, real_numbers
from mint.rl.rollout import Group

METRICS = "RLConfig.metrics"


def custom_metrics(groups: Sequence[Group], functions: Sequence[MetricsFunction]) -> dict[str, float]:
    """The numbers of all functions by `custom/NAME`. They may be NaN or infinite, as the mean of nothing is.

    Raises:
        InvalidRequestError: a function raised, or returned something else than numbers by name, or two of them
            returned the same name.
    """
    found: dict[str, float] = {}
    owner: dict[str, MetricsFunction] = {}
    for function in functions:
        numbers = called(METRICS, function, groups)
        if not isinstance(numbers, Mapping):
            raise _wrong(f"returned {str(numbers)[:80]}", function, "Return a dict of numbers by name")
        for name, number in numbers.items():
            if name in owner:
                taken = f"returns {name!r}, and so does {function_name(owner[name])}"
                raise _wrong(taken, function, "Give each number a name of its own")
            owner[name] = function
            found[f"custom/{name}"] = _number(function, str(name), number)
    return found


def without_nonfinite(metrics: Mapping[str, float], step: int) -> tuple[dict[str, float], Finding | None]:
    """The finite ones of `metrics`, and a finding that names the others."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    others = {name: value for name, value in metrics.items() if name not in finite}
    if not others:
        return finite, None
    listed = ", ".join(f"{name} = {value}" for name, value in others.items())
    finding = Finding(
        "custom_metric_not_finite",
        "warning",
        step,
        f"{listed} at step {step}; values that are not finite are left out of metrics.jsonl",
        "Leave the name out of the steps that have no value, for example where a list is empty",
        {"metrics": float(len(others))},
    )
    return finite, finding


def _number(function: MetricsFunction, name: str, given: Any) -> float:
    value = real_numbers(given)
    if value is None or value.shape:
        shown = " ".join(str(given).split())[:80]
        raise _wrong(f"returned {shown} for {name!r}", function, "Return one number")
    return float(value)


def _wrong(what: str, function: MetricsFunction, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(what, field=METRICS, value=function_name(function), remedy=remedy)
