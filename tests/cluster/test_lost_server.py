"""A server that is killed while its ranks and replicas work: they end by themselves, and each request runs once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ports import free_port
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from ray_nodes import descendants, end, ray_nodes
from sdk_run import run, undisturbed

import mint

pytestmark = pytest.mark.slow

STEPS, KILLED = 4, 2
PROCESSES = ("ray::Rank", "ray::Replica")


class Server:
    """`mint serve` on one port and data directory, started as often as asked."""

    def __init__(self, folder: Path, model: Path, environment: Mapping[str, str], *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "mint.cli.main", "serve", f"--port={port}", f"--data-dir={folder}"]
        self._words = [*words, f"--model=base={model}", *options]
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


@contextmanager
def serving(folder: Path, model: Path, environment: Mapping[str, str], *options: str) -> Iterator[Server]:
    server = Server(folder, model, environment, *options)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def run_on(server: Server, disturb: Callable[[int], None] = undisturbed) -> list[object]:
    with mint.ServiceClient(base_url=server.url) as service:
        return run(service, "base", STEPS, disturb)


def working(pids: list[int]) -> list[int]:
    """Those of some processes that are ranks or replicas, and still run."""
    return [pid for pid in pids if command_of(pid).startswith(PROCESSES)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> list[object]:
    with serving(tmp_path_factory.mktemp("alone") / "data", folder, os.environ) as server:
        return run_on(server)


def run_with_a_kill(server: Server, processes: Callable[[], list[int]]) -> list[object]:
    """A run in which the server is killed and started again; its ranks and replicas of before have ended on return."""
    left: list[int] = []

    def disturb(step: int) -> None:
        if step == KILLED:
            left.extend(working(processes()))
            server.kill()
            server.start()

    seen = run_on(server, disturb)
    assert len(left) == 3
    wait_until(lambda: not working(left))
    return seen


def test_after_a_kill_of_the_server_the_run_is_the_same_and_nothing_is_left(
    tmp_path: Path, folder: Path, alone: list[object]
) -> None:
    options = ("--cluster=local", "--trainers=2", "--samplers=1")
    with serving(tmp_path / "data", folder, os.environ, *options) as server:
        assert run_with_a_kill(server, lambda: descendants([server.process.pid])) == alone


def test_in_a_ray_cluster_of_others_they_end_too_and_the_cluster_goes_on(
    tmp_path: Path, folder: Path, alone: list[object]
) -> None:
    with ray_nodes(8) as nodes:
        options = (f"--cluster={nodes.address}", "--trainers=2", "--samplers=1")
        with serving(tmp_path / "data", folder, nodes.environment, *options) as server:
            assert run_with_a_kill(server, lambda: nodes.processes(0)) == alone
            assert len(working(nodes.processes(0))) == 3
