"""Binary search for the two checkpoints between which a metric fell, with as few evaluations as possible.

Knows checkpoints by name only; the caller evaluates them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mint.errors import InvalidRequestError
from mint.rl.estimate import Estimate

RegressionVerdict = Literal["found", "uncertain", "none"]
"""`found`: the intervals on both sides of the fall do not overlap. `uncertain`: the metric fell, but noise hides where.
`none`: the last checkpoint is not worse than an earlier one by more than noise."""


@dataclass(frozen=True)
class Regression:
    """The metric fell from `good` to its successor `bad`; None without a regression.

    `evaluations` counts new evaluations; `estimates` holds all that were used, by checkpoint.
    """

    verdict: RegressionVerdict
    good: str | None
    bad: str | None
    evaluations: int
    explanation: str
    estimates: Mapping[str, Estimate] = field(default_factory=dict, repr=False)


def find_regression(
    checkpoints: Sequence[str],
    evaluate: Callable[[str], Estimate],
    *,
    known: Mapping[str, Estimate] | None = None,
) -> Regression:
    """Searches `checkpoints` (oldest first) for the fall before the last one, with about log2(n) + 2 evaluations.

    A checkpoint is good if its mean lies above the middle between the best and the last. Of several falls one is found.
    `known` estimates are not made again.

    Raises:
        InvalidRequestError: fewer than two checkpoints, or one twice.
    """
    if len(checkpoints) < 2 or len(set(checkpoints)) < len(checkpoints):
        raise InvalidRequestError(
            "must be at least two, all different",
            field="checkpoints",
            value=list(checkpoints),
            remedy="Train with a smaller save_every, so that there are more checkpoints",
        )
    estimates = {name: value for name, value in (known or {}).items() if name in set(checkpoints)}
    before = len(estimates)

    def estimate_at(place: int) -> Estimate:
        name = checkpoints[place]
        if name not in estimates:
            estimates[name] = evaluate(name)
        return estimates[name]

    end = estimate_at(len(checkpoints) - 1)
    estimate_at(0)  # the first is always compared, even if a later one was known before
    places = [place for place, name in enumerate(checkpoints) if name in estimates]
    good = max(places, key=lambda place: estimate_at(place).mean)
    best = estimate_at(good)
    if not _is_better(best, end):
        return Regression(
            "none",
            None,
            None,
            len(estimates) - before,
            _no_fall(checkpoints[good], best, checkpoints[-1], end),
            estimates,
        )
    middle = (best.mean + end.mean) / 2
    bad = len(checkpoints) - 1
    while bad - good > 1:
        inside = [place for place in range(good + 1, bad) if checkpoints[place] in estimates]
        place = inside[len(inside) // 2] if inside else (good + bad) // 2
        if estimate_at(place).mean > middle:
            good = place
        else:
            bad = place
    high = estimate_at(good)
    low = estimate_at(bad)
    sure = _is_better(high, low)
    return Regression(
        "found" if sure else "uncertain",
        checkpoints[good],
        checkpoints[bad],
        len(estimates) - before,
        f"{_words(checkpoints[good], high)} → {_words(checkpoints[bad], low)}"
        + ("" if sure else ": the intervals overlap; evaluate more samples to be sure of the place"),
        estimates,
    )


def _is_better(one: Estimate, other: Estimate) -> bool:
    """Whether the interval of `one` lies above that of `other`."""
    return one.low > other.high


def _no_fall(best_name: str, best: Estimate, last_name: str, last: Estimate) -> str:
    if best_name == last_name:
        return f"no regression: the last checkpoint is the best, {_words(last_name, last)}"
    return (
        f"no regression beyond noise: best {_words(best_name, best)}, last {_words(last_name, last)}; "
        "evaluate more samples to see a smaller one"
    )


def _words(name: str, estimate: Estimate) -> str:
    return f"{name} {estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
