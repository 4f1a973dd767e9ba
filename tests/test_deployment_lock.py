"""What a deployment installs is pinned with hashes: everything that the package and its extras name, at a version that
they allow and that the tests run with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "constraints" / "deployment.txt").read_text()
EXTRAS = ("cli", "rl", "local", "structured", "tasks", "trackers")
"""Those of a deployment. The others are for development, or ask for older packages than these (`verifiers`)."""

ENTRY = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^ ;]+)(?P<rest>[^\\\n]*(?:\\\n[^\\\n]*)*)", re.MULTILINE)
PINS = {canonicalize_name(entry["name"]): entry for entry in ENTRY.finditer(LOCK)}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_everything_that_an_extra_names_is_in_the_lock(extra: str) -> None:
    named = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for text in named:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= set(EXTRAS)
            continue
        pin = PINS.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{text} is missing: make lock"
        assert requirement.specifier.contains(pin["version"]), f"{text} is {pin['version']}: make lock"


def test_every_line_of_the_lock_is_an_exact_version_with_hashes() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith(("#", " "))]
    assert len(lines) == len(ENTRY.findall(LOCK)) > 100
    for name, pin in PINS.items():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", pin["rest"]), name


def test_a_deployment_gets_the_versions_that_the_tests_run_with() -> None:
    tested = dict(
        line.split("==") for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines() if "==" in line
    )
    for name, version in tested.items():
        pin = PINS.get(canonicalize_name(name))
        if pin is not None:
            assert Version(pin["version"]) == Version(version), f"{name}: make lock"
