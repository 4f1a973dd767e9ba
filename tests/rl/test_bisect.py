"""The search for the step at which a metric fell."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from mint.errors import InvalidRequestError
from mint.rl.analysis.bisect import find_regression
from mint.rl.estimate import Estimate

NAMES = [f"step-{step:03d}" for step in range(64)]


def evaluation(mean: float, half: float = 0.05) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=512, temperature=0.0)


def reader(value: Callable[[int], float], read: list[str], half: float = 0.05) -> Callable[[str], Estimate]:
    def look(name: str) -> Estimate:
        read.append(name)
        return evaluation(value(NAMES.index(name)), half)

    return look


@pytest.mark.parametrize("fault", [1, 2, 17, 31, 32, 62, 63])
def test_an_injected_fall_is_found_in_about_log2_evaluations(fault: int) -> None:
    read: list[str] = []
    found = find_regression(NAMES, reader(lambda step: 0.8 if step < fault else 0.3, read))
    assert (found.verdict, found.good, found.bad) == ("found", NAMES[fault - 1], NAMES[fault])
    assert found.evaluations == len(read) == len(set(read)) <= math.ceil(math.log2(64)) + 2


def test_a_fall_after_a_rise_is_found_from_an_evaluation_that_the_log_has() -> None:
    read: list[str] = []
    value = reader(lambda step: 0.3 + 0.01 * step if step <= 40 else 0.2, read)
    known = {NAMES[32]: evaluation(0.62), "another-run": evaluation(1.0)}
    found = find_regression(NAMES, value, known=known)
    assert (found.good, found.bad) == (NAMES[40], NAMES[41])
    assert NAMES[32] not in read
    assert found.evaluations == len(read)


def test_without_a_regression_it_says_so_after_two_evaluations() -> None:
    read: list[str] = []
    found = find_regression(NAMES, reader(lambda step: 0.5 + step / 200, read))
    assert (found.verdict, found.good, found.bad, found.evaluations) == ("none", None, None, 2)
    assert "is the best" in found.explanation


def test_a_fall_within_the_noise_is_no_regression() -> None:
    noisy = find_regression(NAMES, reader(lambda step: 0.5 if step < 20 else 0.45, [], half=0.1))
    assert noisy.verdict == "none"
    assert "noise" in noisy.explanation


def test_a_slow_decline_is_said_to_be_uncertain_in_place() -> None:
    found = find_regression(NAMES, reader(lambda step: 0.9 - step / 100, []))
    assert found.verdict == "uncertain"
    assert "overlap" in found.explanation


@pytest.mark.parametrize("checkpoints", [[], ["one"], ["one", "one"]])
def test_there_must_be_something_to_search(checkpoints: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="checkpoints"):
        find_regression(checkpoints, lambda name: evaluation(0.5))
