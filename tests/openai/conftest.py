"""One server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai_server import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openai")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_THREADS", "1")
        patch.setenv("MINT_HOME", str(folder))
        with serving(folder) as running:
            yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {server.keys['ada']}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as opened:
        yield opened
