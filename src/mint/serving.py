"""`mint serve`: the composition root of the server process: settings → engine + service + app, behind a socket."""

from __future__ import annotations

from pathlib import Path

import uvicorn

from mint.config import read_settings
from mint.embedded import open_embedded


def serve(*, host: str, port: int, data_dir: Path | None = None) -> None:
    """Serves until told to stop."""
    running = open_embedded(data_dir=data_dir or read_settings().home_dir)
    try:
        uvicorn.run(running.app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=20)
    finally:
        running.release()
