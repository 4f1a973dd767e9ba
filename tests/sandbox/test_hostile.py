"""No program harms the host and no hack earns anything, whoever runs the sandbox and whichever engine grades."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import HACKS, HOSTILE  # ty: ignore[unresolved-import]

from mint.sandbox import sandbox_level

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
"""What another user may run: the interpreter of the tests can live in a closed home."""


def trial(python: str, engines: list[str], **options: Any) -> dict[str, Any]:
    """The report of `trial.py`; KeyError-free access to each program is what the tests below need."""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [python, str(HERE / "trial.py"), *engines], env=environment, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    if not report["after_programs"]["level"]:
        pytest.skip(f"no such engine here: {engines}")
    return report


def report_as_nobody() -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"there is no {SYSTEM_PYTHON}")
    version = subprocess.run(
        [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True
    )
    if version.stdout.strip() != b"True":
        pytest.skip(f"{SYSTEM_PYTHON} is older than 3.11")
    if not all(folder.stat().st_mode & 0o005 == 0o005 for folder in (HERE, *HERE.parents)):
        pytest.skip("another user cannot read this checkout")
    return trial(SYSTEM_PYTHON, ["zygote"], user=NOBODY, group=NOBODY, extra_groups=[])


@pytest.fixture(
    scope="module",
    params=[
        "this user, all engines",
        pytest.param("this user, zygote", marks=pytest.mark.slow),
        pytest.param("nobody, zygote", marks=pytest.mark.slow),
    ],
)
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    if "zygote" not in sandbox_level().engines:
        pytest.skip(f"not on this machine: {sandbox_level().missing}")
    if request.param.startswith("nobody"):
        found = report_as_nobody()
        assert found["after_programs"]["user"] == NOBODY
        return found
    return trial(sys.executable, ["monty", "zygote"] if "all" in request.param else ["zygote"])


@pytest.mark.parametrize("program", HOSTILE)
def test_a_hostile_program_leaves_the_host_unharmed(report: dict[str, Any], program: str) -> None:
    outcome = report[program]
    assert outcome["harm"] == []
    assert outcome["engine"] in ("monty", "zygote")
    assert outcome["stdout_bytes"] <= 64 << 10


@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_earns_nothing(report: dict[str, Any], hack: str) -> None:
    assert not report[hack]["won"]
    assert report[hack]["harm"] == []


def test_after_the_programs_no_process_is_left_and_honest_code_still_runs(report: dict[str, Any]) -> None:
    assert report["after_programs"]["strays"] == []
    assert report["after_programs"]["honest"] == 4


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("memory bomb", {"memory"}),
        ("memory bomb in steps", {"memory"}),
        ("busy loop", {"timeout"}),
        ("busy loop in CPython", {"timeout"}),
        ("ignores signals", {"timeout"}),
        ("waits for ever", {"timeout"}),
        ("output flood", {"output"}),
        ("raw output flood", {"output"}),
        ("result flood", {"output", "memory"}),
        ("crash", {"crashed"}),
        ("exits hard", {"crashed"}),
        ("writes to the result pipe", {"crashed"}),
        ("forges lines with the nonce", {"crashed"}),
        ("sleep", {"ok"}),
    ],
)
def test_the_status_names_the_limit(report: dict[str, Any], program: str, status: set[str]) -> None:
    assert report[program]["status"] in status


def test_the_list_is_as_long_as_promised() -> None:
    assert len(HOSTILE) >= 30
    assert len(HACKS) >= 10
