"""A running service over the fake engine, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from default_engine import fake_engine
from service_harness import Harness, open_service, services_have
from two_lanes import TwoLanes

from mint.server.service.service import Service
from mint.server.worker import snapshot_policy


@pytest.fixture(autouse=True)
def small_states_are_saved_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine's steps take microseconds, so that a snapshot would always be more than a part of a step."""
    monkeypatch.setattr(snapshot_policy, "MAX_SHARE", 1e9)


BOTH_LANES = (
    "test_checkpoints", "test_concurrent_acceptance", "test_exactly_once", "test_job_removal", "test_memory_shortage",
    "test_model_memory", "test_recovery", "test_results", "test_sampler_files", "test_sampling",
    "test_session_lifetime",
)  # fmt: skip
"""The tests that run with an engine of one lane, and with one of two."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in BOTH_LANES:
        metafunc.parametrize("lanes", [fake_engine, TwoLanes], ids=["1 lane", "2 lanes"], indirect=True)


@pytest.fixture(autouse=True)
def lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes services with this engine."""
    with services_have(getattr(request, "param", fake_engine)):
        yield


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    service = open_service(tmp_path / "data")
    yield Harness(service)
    service.stop()


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests of a module."""
    service = open_service(tmp_path_factory.mktemp("data"))
    yield service
    service.stop()
