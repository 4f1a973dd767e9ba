"""A running service over the fake engine, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_harness import Harness, open_service


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    service = open_service(tmp_path / "data")
    yield Harness(service)
    service.stop()
