"""A server in a process of its own, to be killed and started again on the same port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from ports import free_port
from waiting import HANG_S

FAKE = """
import sys
from pathlib import Path
from mint.config import ServeSettings
from mint.engine.fake_engine import FakeEngine
from mint.compose.serving import serve
serve(ServeSettings(port=int(sys.argv[1]), data_dir=Path(sys.argv[2])), announce=print, engine=FakeEngine())
"""
REAL = """
import sys
from mint.cli.main import app
sys.argv[1:] = ["serve", "--port", sys.argv[1], "--data-dir", sys.argv[2]]
app()
"""


class ServerProcess:
    """`mint serve`, or the same server over the fake engine, or any script that takes a port and a folder."""

    def __init__(self, folder: Path, script: str = FAKE) -> None:
        self.folder, self._script = folder, script
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        self.wait_until_up()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._script, str(self.port), str(self.folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MINT_THREADS": "1"},
        )

    def wait_until_up(self, patience_s: float = HANG_S) -> None:
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at:
            try:
                if httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                assert self._process.poll() is None, f"the server has ended with {self._process.returncode}"
            time.sleep(0.05)
        raise AssertionError("the server did not come up")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self, seconds: float) -> None:
        """Stops the process for a time. The system goes on taking connections for it."""
        self._process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, self._process.send_signal, (signal.SIGCONT,))
        timer.daemon = True
        timer.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_exception: Any) -> None:
        self.kill()
