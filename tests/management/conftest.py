"""A real server with the fake engine, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from default_engine import fake_engine
from http_server import http_app
from owners import Place, owner_is_key

from mint.compose.embedded import open_embedded
from mint.server.all_routes import ROUTES
from mint.server.http.app import create_app


@contextmanager
def _opened(data_dir: Path) -> Iterator[Place]:
    running = open_embedded(data_dir=data_dir, engine=fake_engine())
    try:
        app = create_app(running.service, ROUTES, authenticate=owner_is_key)
        with http_app(running, app) as url:
            here = Place(url, running.service, running.data_dir)
            with here.open:
                yield here
    finally:
        running.release()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A server of the test's own."""
    with _opened(tmp_path / "data") as here:
        yield here


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One server for all tests of a module that change nothing."""
    with _opened(tmp_path_factory.mktemp("shared")) as here:
        yield here
