"""A Ray cluster whose nodes are on this machine, started as an operator starts them: `ray start`."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ports import free_port
from waiting import wait_until

ATTEMPTS = 4
"""How often a node is started: on a busy machine, Ray gives up after 30 seconds."""


class RayNodes:
    """A head and further nodes. `address` is that of the client server, `gcs` what a program on a node uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        port, client = free_port(), free_port()
        self.gcs, self.address = f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MINT_"))
        } | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")]),
        }
        self._head = ("--head", f"--port={port}", f"--ray-client-server-port={client}", f"--temp-dir={folder}")

    def add(self, cpus: int) -> None:
        """Starts a node; the first one is the head."""
        place = (f"--address={self.gcs}",) if self._nodes else (*self._head, "--include-dashboard=false")
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *place]
        words += [f"--num-cpus={cpus}", "--node-ip-address=127.0.0.1", f"--object-store-memory={100 << 20}"]
        words += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"]
        file = self._folder / f"node{len(self._nodes)}.log"
        for _ in range(ATTEMPTS):
            with file.open("wb") as log:
                node = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            wait_until(lambda own=node: b"Ray runtime started" in file.read_bytes() or own.poll() is not None)
            if node.poll() is None:
                self._nodes.append(node)
                return
        raise AssertionError(file.read_text())

    def __len__(self) -> int:
        """How many nodes were started, also those that were lost."""
        return len(self._nodes)

    def processes(self, node: int) -> list[int]:
        """All processes of a node, the ranks and replicas among them."""
        return [self._nodes[node].pid, *descendants([self._nodes[node].pid])]

    def close(self) -> None:
        for node in range(len(self._nodes)):
            for pid in self.processes(node):
                end(pid)
        for own in self._nodes:
            own.wait()


def descendants(pids: Sequence[int]) -> list[int]:
    """The children of some processes, their children, and so on."""
    children = [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and parent_of(entry) in pids
    ]
    return [*children, *descendants(children)] if children else []


def parent_of(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_nodes(*cpus: int) -> Iterator[RayNodes]:
    """A cluster with nodes of so many processors."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # sockets need a short path
        nodes = RayNodes(Path(folder))
        try:
            for count in cpus:
                nodes.add(count)
            yield nodes
        finally:
            nodes.close()
