"""A running service over the fake engine, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_harness import Harness, open_service

from mint.server.service.service import Service
from mint.server.worker import snapshot_policy


@pytest.fixture(autouse=True)
def small_states_are_saved_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine's steps take microseconds, so that a snapshot would always be more than a part of a step."""
    monkeypatch.setattr(snapshot_policy, "MAX_SHARE", 1e9)


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
