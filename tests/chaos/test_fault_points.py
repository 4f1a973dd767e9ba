"""Every named place is a place in the code, and every line that a report prints can be run again."""

from __future__ import annotations

import random

import pytest

from mint.chaos import plan
from mint.chaos.fault_points import FAULT_POINTS, OPERATIONS, resolve
from mint.chaos.faults import ACTIONS, SCENARIOS, Fault, read_case
from mint.errors import InvalidRequestError


@pytest.mark.parametrize("point", FAULT_POINTS, ids=lambda point: point.name)
def test_every_fault_point_is_a_function(point) -> None:
    assert callable(resolve(point.target)[2])


def test_every_operation_is_a_function_and_names_are_unique() -> None:
    assert all(callable(resolve(operation.target)[2]) for operation in OPERATIONS)
    assert len({point.name for point in FAULT_POINTS}) == len(FAULT_POINTS)


@pytest.mark.parametrize(
    "line",
    [
        "http",
        "http kill:before_exec/optim_step#2 kill:@0.5",
        "embedded-sft disk-full=3:snapshot_open#1+clock=-90000:before_accept#4",
        *(line for lines in plan.OTHER_FAULTS.values() for line in lines if "#" in line and "@" not in line),
    ],
)
def test_a_printed_case_is_read_back(line: str) -> None:
    case = read_case(line)
    assert read_case(str(case)) == case
    assert str(case) == line


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("elsewhere", "elsewhere"),
        ("http boom:@1", "boom"),
        ("http kill:nowhere#1", "nowhere"),
        ("http kill", "kill"),
        ("http kill:@x", "kill:@x"),
        ("http stop:before_exec#1", "stop"),
    ],
)
def test_a_line_that_is_no_case_is_refused_by_name(line: str, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        read_case(line)


def test_every_other_fault_is_an_action_and_every_action_is_tried() -> None:
    tried = {fault.action for lines in plan.OTHER_FAULTS.values() for line in lines for fault in _faults(line)}
    assert tried == set(ACTIONS)


def _faults(line: str) -> list[Fault]:
    return [fault for life in read_case(line).lives for fault in life]


HITS = [
    ("before_exec", "optim_step"),
    ("after_commit", "optim_step"),
    ("before_exec", "forward"),
    ("mid_write", "a"),
] * 3


def test_every_point_with_every_kind_of_work_is_struck_once_and_in_an_order_that_can_happen() -> None:
    recovering = [("during_replay", "forward_backward"), ("before_exec", "optim_step")]
    cases = plan.enumerated(HITS, recovering, "http")
    struck = [(fault.point, fault.kind) for case in cases for life in case.lives for fault in life]
    assert set(struck) == {*HITS, recovering[0], ("after_commit", "forward_backward")}
    for case in cases[:-1]:
        positions = [len(HITS) - 1 - HITS[::-1].index((life[0].point, life[0].kind)) for life in case.lives]
        assert positions == sorted(positions)


PLACES = dict.fromkeys(SCENARIOS, HITS)


def test_a_seed_gives_the_same_kills_again() -> None:
    def cases(seed: int) -> list[str]:
        return [str(case) for case in plan.random_cases(random.Random(seed), PLACES, 80)]

    assert cases(1) == cases(1) != cases(2)
    assert {line.split()[0] for line in cases(1)} == set(SCENARIOS)


@pytest.mark.parametrize("kills", [1, 2, 3, 4, 5, 11, 100])
def test_random_kills_are_as_many_as_asked_and_strike_every_scenario_that_they_suffice_for(kills: int) -> None:
    cases = plan.random_cases(random.Random(0), PLACES, kills, first=SCENARIOS)
    assert sum(len(case.lives) for case in cases) == kills
    assert max(len(case.lives) for case in cases) <= plan.LIVES
    assert {case.scenario for case in cases} == set(SCENARIOS[:kills])
