"""Metrics of several passes as those of one. Pure.

A metric is named `name:reduction`. Means are weighted by the trained tokens of each pass (`tokens:sum`), because the
engine takes its means over trained tokens. So the metrics of a batch do not depend on where it was cut into requests.
Other SDKs of this protocol weight means by datums; their means of a batch of several requests depend on the cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

TOKENS = "tokens:sum"


def reduce_metrics(passes: Sequence[Mapping[str, float]], datums: Sequence[int]) -> dict[str, float]:
    """The metrics of all passes together; `datums` has the number of datums of each pass.

    `ess:mean`, the effective sample size as a share of the tokens, is exact too. `ratio_p99:max` is an upper bound: a
    quantile cannot be joined. A pass without trained tokens has no means, and does not count in those of the others.
    Where a server does not report `tokens:sum`, means are weighted by datums. A name without a reduction, or with one
    that is not known here, is treated as a mean.
    """
    if len(passes) == 1:
        return dict(passes[0])
    count_tokens = all(TOKENS in metrics for metrics in passes)
    weights = [metrics[TOKENS] if count_tokens else float(count) for metrics, count in zip(passes, datums, strict=True)]
    weighted = list(zip(passes, weights, strict=True))
    names = dict.fromkeys(name for metrics in passes for name in metrics)
    reduced = {}
    for name in names:
        reduction = name.rpartition(":")[2]
        values = [metrics[name] for metrics in passes if name in metrics]
        match reduction:
            case "sum":
                reduced[name] = sum(values)
            case "min":
                reduced[name] = min(values)
            case "max":
                reduced[name] = max(values)
            case "unique":
                reduced |= {f"{name}_{place}" if place else name: value for place, value in enumerate(values)}
            case _ if any(weight and name not in metrics for metrics, weight in weighted):
                continue  # a mean over some of the tokens would pass for one over all
            case "slack":  # how far the largest is above the mean
                reduced[name] = max(values) - _mean(name, weighted)
            case _:
                reduced[name] = _ess(weighted) if name == "ess:mean" else _mean(name, weighted)
    return reduced


def _mean(name: str, weighted: Sequence[tuple[Mapping[str, float], float]]) -> float:
    """NaN where nothing has a weight."""
    parts = [(metrics[name], weight) for metrics, weight in weighted if weight]
    total = sum(weight for _, weight in parts)
    return sum(value * weight for value, weight in parts) / total if total else math.nan


def _ess(weighted: Sequence[tuple[Mapping[str, float], float]]) -> float:
    """(Σr)² / (n·Σr²) over all tokens, from the mean ratio and the share of each pass: Σr² = n·mean² / share."""
    ratios = [
        (metrics.get("ratio:mean", math.nan), metrics["ess:mean"], weight) for metrics, weight in weighted if weight
    ]
    squares = sum(weight * mean * mean / share for mean, share, weight in ratios if share)
    total = sum(weight for *_, weight in ratios)
    together = sum(weight * mean for mean, _, weight in ratios)
    exact = together * together / (total * squares) if total and 0 < squares < math.inf else math.nan
    return exact if math.isfinite(exact) else _mean("ess:mean", weighted)  # ratios beyond float64, or none reported
