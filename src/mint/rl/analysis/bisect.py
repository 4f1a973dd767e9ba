"""Between which two checkpoints did a metric fall? A binary search that reads as few of them as it needs to.

Knows checkpoints by name only; `read` is the caller's, and so are the readings that the run has made already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mint.errors import InvalidRequestError
from mint.rl.estimate import Estimate

RegressionVerdict = Literal["found", "uncertain", "none"]
"""`found`: the readings on both sides of the fall do not overlap. `uncertain`: it is there, but noise hides where.
`none`: the last checkpoint is not worse than an earlier one by more than noise and tolerance."""


@dataclass(frozen=True)
class Regression:
    """The metric fell from `good` to its successor `bad`; None without a regression.

    `evaluations` counts fresh readings; `readings` holds all that were used, by checkpoint; `explanation` is in words.
    """

    verdict: RegressionVerdict
    good: str | None
    bad: str | None
    evaluations: int
    explanation: str
    readings: Mapping[str, Estimate] = field(default_factory=dict, repr=False)


def find_regression(
    checkpoints: Sequence[str],
    read: Callable[[str], Estimate],
    *,
    tolerance: float = 0.0,
    known: Mapping[str, Estimate] | None = None,
    higher_is_better: bool = True,
) -> Regression:
    """Searches `checkpoints` (oldest first) for the fall that the last one suffers from, in about log2(n) + 2 readings.

    A reading counts as good above the middle between the best and the last. Of several falls one is found, as with any
    bisection. `known` readings are not made again; `tolerance` is a fall that does not matter.

    Raises:
        InvalidRequestError: fewer than two checkpoints, or one twice.
    """
    if len(checkpoints) < 2 or len(set(checkpoints)) < len(checkpoints):
        raise InvalidRequestError(
            "must be at least two different ones",
            field="checkpoints",
            value=list(checkpoints),
            remedy="Train with a smaller save_every, so that there is something between which to search",
        )
    readings = {name: value for name, value in (known or {}).items() if name in set(checkpoints)}
    before = len(readings)

    def look(place: int) -> Estimate:
        name = checkpoints[place]
        if name not in readings:
            readings[name] = read(name)
        return readings[name]

    end, _ = look(len(checkpoints) - 1), look(0)
    sign = 1.0 if higher_is_better else -1.0
    places = [place for place, name in enumerate(checkpoints) if name in readings]
    good = max(places, key=lambda place: sign * look(place).mean)
    best = look(good)
    if not _is_better(best, end, sign, tolerance):
        return Regression(
            "none",
            None,
            None,
            len(readings) - before,
            _no_fall(checkpoints[good], best, checkpoints[-1], end),
            readings,
        )
    middle = (best.mean + end.mean) / 2
    bad = len(checkpoints) - 1
    while bad - good > 1:
        inside = [place for place in range(good + 1, bad) if checkpoints[place] in readings]
        place = inside[len(inside) // 2] if inside else (good + bad) // 2
        if sign * look(place).mean > sign * middle:
            good = place
        else:
            bad = place
    high, low = look(good), look(bad)
    sure = _is_better(high, low, sign, 0.0)
    return Regression(
        "found" if sure else "uncertain",
        checkpoints[good],
        checkpoints[bad],
        len(readings) - before,
        f"{_words(checkpoints[good], high)} → {_words(checkpoints[bad], low)}"
        + ("" if sure else ": the intervals overlap; read more samples to be sure of the place"),
        readings,
    )


def _is_better(one: Estimate, other: Estimate, sign: float, tolerance: float) -> bool:
    """Whether the intervals do not overlap and the means differ by more than `tolerance`."""
    apart = one.low > other.high if sign > 0 else one.high < other.low
    return apart and sign * (one.mean - other.mean) > tolerance


def _no_fall(best_name: str, best: Estimate, last_name: str, last: Estimate) -> str:
    if best_name == last_name:
        return f"no regression: the last checkpoint reads best, {_words(last_name, last)}"
    return (
        f"no regression beyond noise and tolerance: best {_words(best_name, best)}, last {_words(last_name, last)}; "
        "read more samples to see a smaller one"
    )


def _words(name: str, reading: Estimate) -> str:
    return f"{name} {reading.mean:.3f} [{reading.low:.3f}, {reading.high:.3f}]"
