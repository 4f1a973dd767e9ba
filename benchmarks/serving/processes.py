"""A `mint serve` process on a temporary folder with API keys, and what can be read of it from outside."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import ApiKeys

START_S = 120.0


@dataclass
class ServerProcess:
    """A server that can be killed and started again on the same folder and port."""

    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    url: str = ""

    def start(self) -> float:
        """Starts it; returns the seconds until it answered."""
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        began = time.monotonic()
        log = (self.folder / "server.log").open("ab")
        command = [sys.executable, "-c", "from mint.cli.main import app; app()", "serve", "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--data-dir", str(self.folder / "data")], stderr=log, stdout=log)
        while self.get("/readyz")[0] != 200:
            if self.process.poll() is not None or time.monotonic() - began > START_S:
                raise RuntimeError((self.folder / "server.log").read_text()[-2000:])
            time.sleep(0.05)
        return time.monotonic() - began

    def kill(self) -> None:
        """As the out-of-memory killer does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """As an operator does."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def get(self, path: str, key: str = "") -> tuple[int, bytes]:
        """Status and body; status 0 if nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers={"x-api-key": key} if key else {})
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def metrics(self, key: str) -> dict[str, float]:
        """The server's metrics by name and labels."""
        lines = self.get("/metrics", key)[1].decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    @property
    def memory_mib(self) -> float:
        """The resident memory."""
        return self._status("VmRSS:") / 1024

    @property
    def peak_memory_mib(self) -> float:
        """The largest resident memory so far."""
        return self._status("VmHWM:") / 1024

    @property
    def descriptors(self) -> int:
        """The open file descriptors."""
        return len(list(Path(f"/proc/{self._id}/fd").iterdir()))

    @property
    def threads(self) -> int:
        """The threads."""
        return int(self._status("Threads:"))

    @property
    def cpu_s(self) -> float:
        """The CPU time of all threads."""
        parts = Path(f"/proc/{self._id}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def files(self) -> tuple[int, float]:
        """The files of the data directory, and their MiB."""
        sizes = []
        for path in (self.folder / "data").rglob("*"):
            try:
                if path.is_file():
                    sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue
        return len(sizes), sum(sizes) / 2**20

    @property
    def _id(self) -> int:
        if self.process is None:
            raise RuntimeError("it was not started")
        return self.process.pid

    def _status(self, name: str) -> float:
        lines = Path(f"/proc/{self._id}/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(name))


@contextmanager
def serving(folder: Path, owners: Sequence[str]) -> Generator[tuple[ServerProcess, dict[str, str]]]:
    """A server, and a key of each owner."""
    (folder / "data").mkdir(parents=True)
    database = Database(folder / "data" / JOURNAL_FILE)
    keys = {owner: ApiKeys(database).create(owner)[0] for owner in owners}
    database.close()
    server = ServerProcess(folder)
    os.environ["MINT_SERVE_OPERATORS"] = owners[0]
    server.start()
    try:
        yield server, keys
    finally:
        server.stop()


@dataclass
class Probe:
    """Asks for one address again and again over one connection, and keeps the times, in seconds."""

    url: str
    path: str = "/healthz"
    key: str = ""
    every_s: float = 0.02
    seconds: list[float] = field(default_factory=list)
    failures: int = 0

    def __enter__(self) -> Probe:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        while not self._is_over.is_set():
            began = time.perf_counter()
            try:
                connection.request("GET", self.path, headers={"x-api-key": self.key} if self.key else {})
                response = connection.getresponse()
                response.read()
                if response.status == 200:
                    self.seconds.append(time.perf_counter() - began)
                else:
                    self.failures += 1
            except OSError:
                self.failures += 1
                connection.close()
            self._is_over.wait(self.every_s)

    def row(self, name: str, idle: Probe | None = None) -> str:
        """A line of a table: count, p50, p99, worst, and the ratio of p99 to that of `idle`."""
        p50, p99 = percentile(self.seconds, 0.5) * 1e3, percentile(self.seconds, 0.99) * 1e3
        ratio = "" if idle is None else f"{p99 / (percentile(idle.seconds, 0.99) * 1e3):.1f}×"
        worst = max(self.seconds, default=float("nan")) * 1e3
        return f"| {name} | {len(self.seconds)} | {p50:.1f} | {p99:.1f} | {worst:.1f} | {ratio} | {self.failures} |"


PROBE_HEAD = (
    "| /healthz | answers | p50 ms | p99 ms | worst ms | p99 to idle | failures |\n|---|---|---|---|---|---|---|"
)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; NaN of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
