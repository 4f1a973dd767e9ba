"""Predicts before a run how many groups will have a signal, and how many tokens that costs. Pure.

A group of G completions is informative only if not all of them succeed and not all of them fail:
P(informative | p, G) = 1 − p^G − (1 − p)^G. With an estimate of p from few samples, this formula is biased low (a
seldom solved item looks hopeless), and the unbiased estimator C(c, G) / C(n, G) of p^G does not exist for G > n. So
pass rates get a Beta prior fitted to all items (empirical Bayes), and the expectation over each item's posterior is
taken exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mint.errors import InvalidRequestError
from mint.rl.estimate import Z95

GROUP_SIZES = (4, 6, 8, 10, 12, 14, 16)

ENOUGH_INFORMATIVE = 0.5
"""The recommended group size is the smallest with at least this share of informative groups."""

MEANS = tuple(step / 40 for step in range(1, 40))
CONCENTRATIONS = tuple(0.1 * 1.5**power for power in range(20))
"""The grid on which the Beta prior is fitted: its mean, and its weight in samples (0.1 to 220)."""

Counts = tuple[int, int]
"""(successes, samples) of one item."""


@dataclass(frozen=True)
class Option:
    """A group size: its share of informative groups with the 95 % interval over items, and its cost."""

    group_size: int
    informative: float
    low: float
    high: float
    tokens_per_step: float
    tokens_per_informative_token: float


@dataclass(frozen=True)
class Plan:
    """`options` by rising group size. With partial credit, groups are informative at least as often as predicted."""

    items: int
    pass_rate: float
    mean_tokens: float
    batch_size: int
    options: tuple[Option, ...]

    @property
    def recommended(self) -> Option:
        """The smallest group size with enough informative groups, else the largest."""
        good = (option for option in self.options if option.informative >= ENOUGH_INFORMATIVE)
        return next(good, self.options[-1])


def informative_probability(pass_rate: float, group_size: int) -> float:
    """P(rewards of a group are not all equal), for independent samples that succeed with `pass_rate`."""
    return 1.0 - pass_rate**group_size - (1.0 - pass_rate) ** group_size


def plan(
    counts: Sequence[Counts], *, mean_tokens: float, batch_size: int, group_sizes: Sequence[int] = GROUP_SIZES
) -> Plan:
    """The prediction for a batch of `batch_size` items like those of `counts`.

    `mean_tokens` is the mean length of a sample.

    Raises:
        InvalidRequestError: no item was sampled, or successes are not between 0 and the samples.
    """
    for place, (successes, samples) in enumerate(counts):
        if not 0 <= successes <= samples or samples < 1:
            raise InvalidRequestError(
                "is no (successes, samples)",
                field=f"counts[{place}]",
                value=(successes, samples),
                remedy="Pass 0 <= successes <= samples, and at least one sample",
            )
    if not counts:
        raise InvalidRequestError("is empty", field="counts", value=[], remedy="Sample at least one item to plan from")
    prior = fit_beta(counts)
    options = tuple(
        _option(counts, prior, size, mean_tokens=mean_tokens, batch_size=batch_size) for size in sorted(group_sizes)
    )
    pass_rate = sum(successes / samples for successes, samples in counts) / len(counts)
    return Plan(len(counts), pass_rate, mean_tokens, batch_size, options)


def plan_for_rate(pass_rate: float, *, mean_tokens: float, batch_size: int) -> Plan:
    """The prediction if every item has the same pass rate. It is the best case for this mean rate, because the
    probability is concave in p. No item is measured: `items` is 0."""
    options = []
    for size in GROUP_SIZES:
        share = informative_probability(pass_rate, size)
        options.append(_priced(size, (share, share, share), mean_tokens=mean_tokens, batch_size=batch_size))
    return Plan(0, pass_rate, mean_tokens, batch_size, tuple(options))


def fit_beta(counts: Sequence[Counts]) -> tuple[float, float]:
    """(a, b) of the Beta distribution of pass rates with the highest likelihood of `counts`, on a grid."""
    candidates = [(mean * size, (1 - mean) * size) for mean in MEANS for size in CONCENTRATIONS]
    kinds = {count: counts.count(count) for count in set(counts)}

    def likelihood(prior: tuple[float, float]) -> float:
        a, b = prior
        return sum(
            many * (_log_beta(a + successes, b + samples - successes) - _log_beta(a, b))
            for (successes, samples), many in kinds.items()
        )

    return max(candidates, key=likelihood)


def expected_informative(count: Counts, prior: tuple[float, float], group_size: int) -> tuple[float, float]:
    """Mean and variance of f(p) = 1 − p^G − (1 − p)^G over the posterior of one item's pass rate, in closed form."""
    a = prior[0] + count[0]
    b = prior[1] + count[1] - count[0]

    def moment(rights: int, wrongs: int) -> float:
        """E[p^rights (1 − p)^wrongs]."""
        return math.exp(_log_beta(a + rights, b + wrongs) - _log_beta(a, b))

    g = group_size
    silent = moment(g, 0) + moment(0, g)
    squared = moment(2 * g, 0) + moment(0, 2 * g) + 2 * moment(g, g)
    return max(0.0, 1.0 - silent), max(0.0, squared - silent**2)


def _option(
    counts: Sequence[Counts], prior: tuple[float, float], group_size: int, *, mean_tokens: float, batch_size: int
) -> Option:
    expected = [expected_informative(count, prior, group_size) for count in counts]
    mean = sum(share for share, _ in expected) / len(expected)
    # Law of total variance: between items, and within the posterior of each.
    variance = sum((share - mean) ** 2 + unknown for share, unknown in expected) / len(expected)
    half = Z95 * math.sqrt(variance / len(expected))
    interval = (mean, max(0.0, mean - half), min(1.0, mean + half))
    return _priced(group_size, interval, mean_tokens=mean_tokens, batch_size=batch_size)


def _priced(group_size: int, interval: tuple[float, float, float], *, mean_tokens: float, batch_size: int) -> Option:
    return Option(
        group_size,
        *interval,
        tokens_per_step=batch_size * group_size * mean_tokens,
        tokens_per_informative_token=1.0 / interval[0] if interval[0] > 0 else math.inf,
    )


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
