"""Each fault, planted into a real run on mint/tiny, is found, and no other error with it; healthy runs raise none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.detection.faults import FAULTS, HEALTHY, Fault, findings, is_right
from benchmarks.detection.proof import run, runs
from mint.rl.analysis.diagnosis import CODES
from mint.rl.finding import Finding

pytestmark = pytest.mark.learns

LONGER = {
    "grader wants curt replies", "grader counts letters", "brevity pays more than truth", "training rewards the slip",
    "trainer wants certainty", "trainer wants length", "learning rate 0.1", "grader changes its mind", "five items",
    "advantages with the wrong sign", "reward changes its sign", "learning rate 1e-7", "judge prefers the first place",
    "grader lets all pass from step 7", "grader throws dice", "sampler stays behind",
    "logprobs tempered by 0.6", "grader raises on 1 of 4",
}  # fmt: skip


def marked(fault: Fault) -> object:
    return pytest.param(fault, id=fault.name, marks=pytest.mark.slow if fault.name in LONGER else ())


@pytest.mark.parametrize("fault", [marked(fault) for fault in FAULTS])
def test_a_planted_fault_is_found_and_no_other_error_with_it(fault: Fault, tmp_path: Path) -> None:
    found = findings(fault, tmp_path / "run")
    assert is_right(fault, found), [(finding.severity, finding.code, finding.evidence) for finding in found]


def test_every_code_has_a_planted_fault() -> None:
    assert {fault.code for fault in FAULTS} == CODES.keys()


def assert_healthy(found: list[Finding]) -> None:
    assert [finding for finding in found if finding.severity != "info"] == []


def test_a_short_healthy_run_raises_neither_error_nor_warning(tmp_path: Path) -> None:
    assert_healthy(findings(replace(HEALTHY, settings=()), tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_raises_neither_error_nor_warning(seed: int, tmp_path: Path) -> None:
    assert_healthy(findings(HEALTHY, tmp_path / "run", seed=seed))


PROVED = {"code: every completion earns 0", "digits: one prompt 300 times", "code: too few tokens", "healthy tools"}
"""A small sample of `benchmarks.detection.proof`, whose tasks and seeds set no threshold."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROVED))
def test_faults_in_other_tasks_and_at_other_seeds_are_named(name: str) -> None:
    fault, seed = next((fault, seed) for fault, seed in runs(30, 30) if fault.name == name)
    row = run(fault, seed)
    assert row["right"], row
