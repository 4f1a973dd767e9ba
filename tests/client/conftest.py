"""A `ServiceClient` over the fake engine for every test of this folder: in process, and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine
from http_server import http_server

import mint
from mint.compose.embedded import open_embedded

MakeClient = Callable[..., mint.ServiceClient]


@pytest.fixture(params=["embedded", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    """How the client reaches its service."""
    return str(request.param)


@pytest.fixture
def make_client(tmp_path: Path, transport: str) -> Iterator[MakeClient]:
    """Makes clients, each with a service of its own over the same folder."""
    with ExitStack() as stack:

        def make(folder: str = "data", **options: Any) -> mint.ServiceClient:
            engine = options.pop("engine", None) or fake_engine()
            if transport == "embedded":
                opened = lambda: open_embedded(data_dir=tmp_path / folder, engine=engine, **options)  # noqa: E731
                client = mint.ServiceClient(open_embedded=opened)
            else:
                client = mint.ServiceClient(
                    base_url=stack.enter_context(http_server(tmp_path / folder, engine=engine, **options))
                )
            return stack.enter_context(client)

        yield make


@pytest.fixture
def client(make_client: MakeClient) -> mint.ServiceClient:
    return make_client()
