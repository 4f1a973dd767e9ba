"""Whatever two owners and the machine do, in whatever order: P2 to P5 and P11 of docs/reliability.md, from a model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from service_machine import ServiceMachine


def run(sequences: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        ServiceMachine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            phases=[Phase.generate],  # to shrink a sequence takes minutes, and needs one that fails every time
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_sequence_loses_doubles_reorders_or_shows_anything() -> None:
    run(25, 15, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_sequence_of_300_loses_doubles_reorders_or_shows_anything() -> None:
    """The same sequences each time: the planted bugs must be found by them."""
    run(300, 30, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_sequence_of_2_000_loses_doubles_reorders_or_shows_anything() -> None:
    run(2_000, 30, derandomize=False)
