"""An environment of its own for other people's programs, from the package registry."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest


def install(folder: Path, *requirements: str) -> Path:
    """The folder of the programs of a new environment; skips the test where there is no registry."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    command = [programs / "python", "-m", "pip", "install", "-q", *requirements]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no package registry: {installed.stderr[-300:]}")
    return programs
