"""What a client package is asked to do: named checks against a server, each with its outcome as one line of JSON.

Run in the package's own environment: imports nothing of mint. Knows no package.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

QUESTION = "Which animal?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Target:
    """The server and the model that a driver was started with: `python DRIVER MODEL`, address and key from outside."""

    url: str
    key: str
    model: str


def target() -> Target:
    """What the environment and the command line name."""
    return Target(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], sys.argv[1])


CHECKS: dict[str, Callable[[], object]] = {}


def check(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Adds a function; it fails by raising."""

    def add(run: Callable[[], object]) -> Callable[[], object]:
        CHECKS[name] = run
        return run

    return add


def report(*packages: str) -> None:
    """Runs all checks in order, and prints the versions of `packages` and then a line for each check."""
    print(json.dumps({"versions": {package: version(package) for package in packages}}))
    for name, run in CHECKS.items():
        row: dict[str, Any] = {"name": name, "outcome": "ok", "detail": ""}
        try:
            run()
        except Exception as error:  # the boundary: whatever a check raises is its outcome
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            row |= {"outcome": "failed", "detail": f"{type(error).__name__}: {str(error)[:400]} [{place}]"}
        print(json.dumps(row), flush=True)


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    """Asserts that a call ends with that error, whose text has `words`."""
    try:
        value = call()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return
    raise AssertionError(f"accepted: {value!r}")
