"""The tests are tested: each bug that is planted into the service makes the tests fail that are there to find it.

A bug is a module of `tests/planted` that replaces a function when it is imported. `mint chaos` finds some of them, too:
`tests/chaos/test_campaign.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANTED = Path(__file__).parent / "planted"

ANY_SEQUENCE = "tests/service/test_any_sequence.py::test_no_sequence_of_300_loses_doubles_reorders_or_shows_anything"
POWER_LOSS = "tests/service/test_power_loss.py::"
RECOVERY = "tests/service/test_recovery.py::"
SAMPLING = "tests/service/test_sampling.py::"

FOUND_BY: dict[str, tuple[str, ...]] = {
    "no_deduplication": (
        "tests/service/test_exactly_once.py::test_a_copy_of_a_request_gets_the_same_promise_and_the_same_bytes",
        ANY_SEQUENCE,
    ),
    "acknowledged_before_sync": (
        POWER_LOSS + "test_a_request_runs_while_it_is_synced_and_nobody_is_told_before",
        ANY_SEQUENCE,
    ),
    "snapshot_with_pending_gradient": (RECOVERY + "test_an_open_gradient_survives_a_restart", ANY_SEQUENCE),
    "no_folder_sync": (POWER_LOSS + "test_after_any_request_nothing_acknowledged_is_lost",),
    "replay_samples_again": (SAMPLING + "test_the_same_seed_samples_the_same_in_every_process",),
    "stale_owner_writes": (RECOVERY + "test_two_processes_share_a_folder_and_only_the_dead_are_taken_over",),
    "permanent_error_as_409": (
        "tests/server/test_statuses.py::test_a_request_that_can_never_succeed_is_refused_for_good",
    ),
    "sessions_expire_by_downtime": (
        "tests/service/test_session_lifetime.py::test_downtime_of_any_length_ends_no_session",
    ),
    "hidden_nan": (
        "tests/engine/test_training.py::test_a_non_finite_gradient_leaves_the_state_and_clears_itself",
        "tests/engine/test_training.py::test_a_step_that_would_break_the_weights_is_not_taken",
    ),
    "read_across_tenants": (
        "tests/server/test_route_tenancy.py::test_what_others_own_is_not_there_in_the_words_for_what_nobody_owns",
        ANY_SEQUENCE,
    ),
    "checkpoints_of_all_owners": (
        "tests/server/test_route_tenancy.py::test_what_others_own_is_not_there_in_the_words_for_what_nobody_owns",
    ),
    "no_replay": (RECOVERY + "test_an_open_gradient_survives_a_restart", ANY_SEQUENCE),
}
"""Bug → each of the tests that must find it."""

QUICK = "no_deduplication"


def failed_tests(tests: tuple[str, ...], planted: str | None) -> set[str]:
    """Those of the tests that fail, without their parameters, while a bug is planted."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--timeout", "900"]
    if planted is not None:
        command += ["-p", planted]
    path = os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [*command, *tests], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    found = set(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", ended.stdout, re.MULTILINE))
    assert bool(found) == bool(ended.returncode), ended.stdout
    return found


@cache
def passes_without_bug(test: str) -> bool:
    return not failed_tests((test,), None)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug == QUICK else pytest.mark.slow) for bug in FOUND_BY])
def test_a_planted_bug_is_found_by_each_of_its_tests(bug: str) -> None:
    tests = FOUND_BY[bug] if bug != QUICK else FOUND_BY[bug][:1]
    assert all(passes_without_bug(test) for test in tests)
    assert failed_tests(tests, bug) == set(tests)


def test_every_bug_has_a_test_that_finds_it() -> None:
    assert {path.stem for path in PLANTED.glob("*.py")} == FOUND_BY.keys()
