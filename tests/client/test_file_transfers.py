"""A server that is gone while a file is on its way is not a file that cannot be read or written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ports import free_port

from mint.client.connection.endpoint import Endpoint
from mint.client.connection.file_transfers import download
from mint.client.connection.http_transport import HttpTransport
from mint.client.connection.server_connection import ServerConnection
from mint.client.rest_client import RestClient
from mint.errors import ConnectionLostError


def test_an_upload_to_a_server_that_is_gone_says_so(tmp_path: Path) -> None:
    file = tmp_path / "state.tar.gz"
    file.write_bytes(b"bytes")
    with RestClient(f"http://127.0.0.1:{free_port()}", "key") as rest, pytest.raises(ConnectionLostError):
        rest.upload_checkpoint(file).result()


def test_a_download_from_a_server_that_is_gone_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def ask() -> None:
        server = ServerConnection(Endpoint(url, None, {}), HttpTransport(url))
        try:
            await download(server, f"{url}/file", tmp_path / "state.tar.gz")
        finally:
            await server.close()

    with pytest.raises(ConnectionLostError):
        asyncio.run(ask())
    assert list(tmp_path.iterdir()) == []
