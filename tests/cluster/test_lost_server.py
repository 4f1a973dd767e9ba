"""A server that is killed while its ranks and replicas work: they end by themselves, and each request runs once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from ray_nodes import descendants, ray_nodes
from sdk_run import run, undisturbed
from served_cluster import Server, serving, working

import mint

pytestmark = pytest.mark.slow

STEPS, KILLED = 4, 2


def run_on(server: Server, disturb: Callable[[int], None] = undisturbed) -> list[object]:
    with mint.ServiceClient(base_url=server.url) as service:
        return run(service, "base", STEPS, disturb)


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
