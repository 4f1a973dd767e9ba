"""A real server on a free port of this machine: the app of a service, behind uvicorn, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from mint.compose.embedded import EmbeddedService, open_embedded


@contextmanager
def http_server(data_dir: Path, **options: Any) -> Iterator[str]:
    """Serves the service of a folder (`options` as in `open_embedded`); the base URL."""
    running = open_embedded(data_dir=data_dir, **options)
    try:
        with http_app(running) as url:
            yield url
    finally:
        running.release()


@contextmanager
def http_app(running: EmbeddedService, app: Any = None) -> Iterator[str]:
    """Serves a running service, by its own app or by another one over it."""
    server = uvicorn.Server(uvicorn.Config(app or running.app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
