"""A `ServiceClient` over the fake engine, in process, for every test of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mint
from mint.embedded import open_embedded
from mint.engine.fake_engine import FakeEngine

MakeClient = Callable[..., mint.ServiceClient]


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[MakeClient]:
    """Makes clients, each with a service of its own over the same folder."""
    clients: list[mint.ServiceClient] = []

    def make(folder: str = "data", **options: Any) -> mint.ServiceClient:
        engine = options.pop("engine", None) or FakeEngine()
        opened = lambda: open_embedded(data_dir=tmp_path / folder, engine=engine, **options)  # noqa: E731
        clients.append(mint.ServiceClient(open_embedded=opened))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client: MakeClient) -> mint.ServiceClient:
    return make_client()
