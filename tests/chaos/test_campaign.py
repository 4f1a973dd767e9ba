"""The campaign passes over a sound service, and finds bugs that are planted into it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mint.chaos.faults import read_case
from mint.chaos.outcome import TrialOutcome, differences
from mint.chaos.plan import other_cases, shortages

PLANTED = Path(__file__).parents[1] / "planted"

COMMAND = """
import sys
from mint.chaos import supervised_process
from mint.cli.main import app
supervised_process.PRELOADED += sys.argv.pop(1).split()
app()
"""
"""`mint`, with modules that plant a bug into all processes that it starts."""


def run_chaos(*arguments: str, planted: str = "") -> tuple[int, dict[str, Any]]:
    """The exit code and the report of `mint chaos`."""
    command = [sys.executable, "-c", COMMAND, planted, "chaos", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=PLANTED)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_kills_and_a_power_loss_change_no_bit() -> None:
    code, report = run_chaos("--quick")
    assert (code, report["violations"]) == (0, [])
    assert report["kills"] >= 6 and report["not_reached"] == []
    assert all(part["violated"] == 0 for part in report["parts"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_kills_are_two_and_the_report_names_what_they_left_out() -> None:
    code, report = run_chaos("--kills", "2", "--no-points", "--faults", "none")
    assert (code, report["violations"]) == (0, [])
    assert report["kills"] == 2
    assert report["scenarios_left_out"] == ["embedded-grpo"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_change_no_bit() -> None:
    code, report = run_chaos("--kills", "100", "--faults", "none")
    assert (code, report["violations"], report["points_never_reached"]) == (0, [], [])
    assert {part["name"]: part["kills"] for part in report["parts"]}["random kills"] == 100
    assert report["scenarios_left_out"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("planted", "case"),
    [
        ("acknowledged_before_sync", "http power-loss:after_accept_before_reply/optim_step#3"),
        ("no_folder_sync", "embedded-sft power-loss:after_commit/save_weights#2"),
        ("no_replay", "http kill:after_commit/forward_backward#3"),
        ("no_deduplication", "http kill:after_accept_before_reply/optim_step#2"),
    ],
)
def test_a_planted_bug_is_found(planted: str, case: str) -> None:
    code, report = run_chaos("--case", case, planted=planted)
    assert code == 1
    assert [violated["case"] for violated in report["violations"]] == [case]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_power_loss_takes_nothing_from_a_program_with_the_service_in_itself() -> None:
    cases = [case for case in other_cases(["power-loss"]) if case.scenario != "http"]
    code, report = run_chaos(*(argument for case in cases for argument in ("--case", str(case))))
    assert (code, report["violations"]) == (0, [])
    assert report["kills"] == sum(len(case.lives) for case in cases) >= 10


def test_after_a_shortage_of_memory_the_values_are_those_of_a_run_with_that_shortage() -> None:
    clean, short = outcome(loss=0.1, digest="a"), outcome(loss=0.2, digest="b")
    assert differences(clean, outcome(loss=0.2, digest="b"), [short]) == []
    assert differences(clean, outcome(loss=0.1, digest="a"), [short]) == []
    assert differences(clean, outcome(loss=0.2, digest="a"), [short]) == ["sft: 'loss' has other bits"]
    assert len(differences(clean, outcome(loss=0.2, digest="b"))) == 2


def test_a_shortage_is_run_alone_at_every_pass_of_each_tenant_that_it_may_have_struck() -> None:
    short = "memory=2:before_exec/forward_backward"
    assert [str(case) for case in shortages(read_case(f"http {short}#2+kill:after_commit#1"))] == [
        f"embedded-{tenant} {short}#{hit}" for tenant in ("sft", "grpo") for hit in (1, 2)
    ]
    assert shortages(read_case("http memory=1:before_exec/forward_backward#2")) == []  # recomputation changes no bit


def outcome(**values: Any) -> TrialOutcome:
    return TrialOutcome(read_case("http"), {"sft": values}, jobs={"sft": len(values)})


def test_a_value_that_is_lost_or_differs_in_one_bit_is_a_violation() -> None:
    clean = outcome(loss=0.1, digest="a")
    assert differences(clean, outcome(loss=0.1, digest="a")) == []
    assert differences(clean, outcome(loss=0.1 + 2e-18, digest="a")) == []  # the same double
    assert len(differences(clean, outcome(loss=0.10000000000000002, digest="a"))) == 1
    assert len(differences(clean, outcome(digest="a"))) == 2  # the value, and the count of jobs
