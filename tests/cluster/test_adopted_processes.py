"""In a Ray that outlives it, the next start of a server takes its ranks and replicas over; without one they end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from ray_nodes import ray_nodes
from sdk_run import run
from served_cluster import serving, working

import mint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 5
SIZES = ("--trainers=2", "--samplers=1")
LONG, SHORT_S = {"MINT_LEASE_S": "900"}, 30


@pytest.mark.parametrize("by", ["auto", "client"])
def test_a_server_that_starts_again_takes_its_processes_over(tmp_path: Path, folder: Path, by: str) -> None:
    with serving(tmp_path / "alone", folder, os.environ) as server, mint.ServiceClient(base_url=server.url) as service:
        alone = run(service, "base", STEPS)
    with ray_nodes(3) as nodes:  # no more room than they need
        options = (f"--cluster={nodes.address if by == 'client' else 'auto'}", *SIZES)
        environment = nodes.environment | LONG | {"RAY_ADDRESS": nodes.gcs}
        with serving(tmp_path / "data", folder, environment, *options) as server:
            left: list[list[int]] = []

            def disturb(step: int) -> None:
                if step in (1, 3):
                    left.append(sorted(working(nodes.processes(0))))
                    server.kill()
                    server.start()

            with mint.ServiceClient(base_url=server.url) as service:
                assert run(service, "base", STEPS, disturb) == alone
            assert sorted(working(nodes.processes(0))) == left[0] == left[1] and len(left[0]) == 3
            assert server.log.count("2 ranks are taken over") == 2
            state = server.cluster()
            assert state is not None and state["lost"] == 0 and state["samplers_lost"] == 0


def test_processes_end_without_a_server_and_give_their_places_back(tmp_path: Path, folder: Path) -> None:
    with ray_nodes(3) as nodes:
        environment = nodes.environment | {"MINT_LEASE_S": str(SHORT_S), "RAY_ADDRESS": nodes.gcs}
        with serving(tmp_path / "data", folder, environment, "--cluster=auto", *SIZES) as server:
            with mint.ServiceClient(base_url=server.url) as service:
                first = run(service, "base", 2)
            left = working(nodes.processes(0))
            assert len(left) == 3
            time.sleep(2 * SHORT_S)
            assert working(left) == left, "the server renews their leases, also while it has nothing for them to do"
            server.kill()
            began = time.monotonic()
            wait_until(lambda: not working(left))
            assert time.monotonic() - began > SHORT_S / 2
            server.start()
            with mint.ServiceClient(base_url=server.url) as service:
                assert run(service, "base", 2) == first
            assert "are taken over" not in server.log


def test_ranks_that_are_frozen_when_the_server_starts_again_are_replaced(tmp_path: Path, folder: Path) -> None:
    with serving(tmp_path / "alone", folder, os.environ) as server, mint.ServiceClient(base_url=server.url) as service:
        alone = run(service, "base", 3)
    with ray_nodes(3) as nodes:
        environment = nodes.environment | LONG | {"RAY_ADDRESS": nodes.gcs}
        with serving(tmp_path / "data", folder, environment, "--cluster=auto", *SIZES) as server:

            def disturb(step: int) -> None:
                state = server.cluster()
                if step == 1 and state is not None:
                    os.kill(state["ranks"][0], signal.SIGSTOP)
                    server.kill()
                    server.start()

            with mint.ServiceClient(base_url=server.url) as service:
                assert run(service, "base", 3, disturb) == alone
            assert "are taken over" not in server.log
