"""The sandboxes of the tests: one per set of engines, skipped with the reason where this machine lacks one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mint.sandbox import Limits, Sandbox

LIMITS = Limits(cpu_s=1, wall_s=60.0)
"""The processor's time is what a loop runs out of here: a busy machine does not add to it."""


def opened(*engines: str) -> Iterator[Sandbox]:
    with Sandbox(LIMITS, engines=engines, workers=2) as sandbox:
        if sandbox.level.engines != engines:
            pytest.skip(f"not on this machine: {sandbox.level.missing}")
        yield sandbox


@pytest.fixture(scope="session")
def monty() -> Iterator[Sandbox]:
    yield from opened("monty")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Sandbox]:
    yield from opened("zygote")


@pytest.fixture(scope="session")
def both() -> Iterator[Sandbox]:
    yield from opened("monty", "zygote")


@pytest.fixture(scope="session", params=["monty", "zygote"])
def either(request: pytest.FixtureRequest) -> Sandbox:
    return request.getfixturevalue(request.param)
