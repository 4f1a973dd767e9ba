"""How many groups will have a signal, checked against enumeration and simulation."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from mint.errors import InvalidRequestError
from mint.rl.analysis.planner import GROUP_SIZES, Counts, informative_probability, plan, plan_for_rate


@pytest.mark.parametrize(
    ("pass_rate", "group_size", "all_equal"),
    [(0.02, 4, 0.922), (0.05, 4, 0.815), (0.1, 4, 0.656), (0.5, 4, 0.125), (0.95, 4, 0.815), (0.1, 16, 0.185)],
)
def test_the_share_of_silent_groups_is_that_of_the_closed_form(
    pass_rate: float, group_size: int, all_equal: float
) -> None:
    assert 1 - informative_probability(pass_rate, group_size) == pytest.approx(all_equal, abs=5e-4)


def test_the_closed_form_is_the_enumeration_of_all_outcomes() -> None:
    pass_rate, group_size = 0.3, 5
    enumerated = sum(
        pass_rate ** sum(outcome) * (1 - pass_rate) ** (group_size - sum(outcome))
        for outcome in itertools.product((0, 1), repeat=group_size)
        if 0 < sum(outcome) < group_size
    )
    assert informative_probability(pass_rate, group_size) == pytest.approx(enumerated)


def sampled(rates: list[float], samples: int, seed: int) -> list[Counts]:
    generator = random.Random(seed)
    return [(sum(generator.random() < rate for _ in range(samples)), samples) for rate in rates]


@pytest.mark.parametrize("shape", [(0.5, 0.5), (2.0, 2.0), (1.0, 9.0), (9.0, 1.0)])
def test_eight_samples_an_item_foretell_the_share_for_sixteen_better_than_plain_rates_do(
    shape: tuple[float, float],
) -> None:
    ours, plain = [], []
    for seed in range(20):
        generator = random.Random(1000 + seed)
        rates = [generator.betavariate(*shape) for _ in range(64)]
        counts = sampled(rates, 8, seed)
        truth = statistics.fmean(informative_probability(rate, 16) for rate in rates)
        ours.append(plan(counts, mean_tokens=1, batch_size=1, group_sizes=[16]).options[0].informative - truth)
        plain.append(statistics.fmean(informative_probability(c / n, 16) for c, n in counts) - truth)
    assert abs(statistics.fmean(ours)) < 0.03
    assert abs(statistics.fmean(ours)) < abs(statistics.fmean(plain))


def test_the_interval_covers_the_share_of_new_items() -> None:
    covered = 0
    for seed in range(40):
        generator = random.Random(seed)
        counts = sampled([generator.betavariate(1, 1) for _ in range(64)], 8, seed)
        option = plan(counts, mean_tokens=1, batch_size=1, group_sizes=[4]).options[0]
        covered += option.low <= 0.6 <= option.high  # E[1 − p⁴ − (1 − p)⁴] = 1 − 2/5 for uniform p
    assert covered >= 34


def test_tokens_are_counted_and_the_smallest_sufficient_group_is_recommended() -> None:
    planned = plan([(1, 10)] * 32 + [(0, 10)] * 4 + [(2, 10)] * 8, mean_tokens=20, batch_size=8)
    assert [option.group_size for option in planned.options] == list(GROUP_SIZES)
    first = planned.options[0]
    assert first.tokens_per_step == 8 * 4 * 20
    assert first.tokens_per_informative_token == pytest.approx(1 / first.informative)
    assert planned.recommended.informative >= 0.5
    smaller = [option for option in planned.options if option.group_size < planned.recommended.group_size]
    assert smaller
    assert all(option.informative < 0.5 for option in smaller)


def test_a_known_rate_is_planned_exactly_and_a_hopeless_one_costs_infinitely_much() -> None:
    planned = plan_for_rate(0.5, mean_tokens=10, batch_size=2)
    assert [option.informative for option in planned.options] == [
        informative_probability(0.5, size) for size in GROUP_SIZES
    ]
    assert plan_for_rate(0.0, mean_tokens=10, batch_size=2).options[0].tokens_per_informative_token == float("inf")


@pytest.mark.parametrize("counts", [[], [(3, 2)], [(0, 0)], [(-1, 4)]])
def test_impossible_counts_are_refused(counts: list[Counts]) -> None:
    with pytest.raises(InvalidRequestError, match="counts"):
        plan(counts, mean_tokens=1, batch_size=1)
