"""`mint serve` as a process that is killed, frozen and started again, with its ranks and replicas."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from ports import free_port
from ray_nodes import descendants, end
from waiting import wait_until

PROCESSES = ("ray::Rank", "ray::Replica")


class Server:
    """`mint serve` on one port and data directory, started as often as asked."""

    def __init__(self, folder: Path, model: Path | None, environment: Mapping[str, str], *options: str) -> None:
        """Offers the model in a folder as `base`; None: those that are registered."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "mint.cli.main", "serve", f"--port={port}", f"--data-dir={folder}"]
        self._words = [*words, *([] if model is None else [f"--model=base={model}"]), *options]
        own = {"MINT_THREADS": "1", "MINT_MICRO_BATCH_ROWS": "64", "MINT_HOME": str(folder)}
        self._environment = {**environment, **own}
        self._log = folder / "server.log"
        folder.mkdir()
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._words, env=self._environment, stdout=log, stderr=log)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        end(self.process.pid)
        self.process.wait()

    def cluster(self) -> dict[str, Any] | None:
        """What the server says of its ranks and replicas; None while it does not answer."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).json().get("cluster")
        except (httpx.TransportError, ValueError):
            return None

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()


@contextmanager
def serving(folder: Path, model: Path | None, environment: Mapping[str, str], *options: str) -> Iterator[Server]:
    server = Server(folder, model, environment, *options)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.process.terminate()
        server.process.wait()


def working(pids: Sequence[int]) -> list[int]:
    """Those of some processes that are ranks or replicas, and still run."""
    return [pid for pid in pids if command_of(pid).startswith(PROCESSES)]


def workers_of(server: Server) -> list[int]:
    """The ranks and replicas on the Ray that a server has started."""
    return working(descendants([server.process.pid]))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
