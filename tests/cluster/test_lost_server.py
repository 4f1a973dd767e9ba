"""A server that is killed while its ranks and replicas work: they end by themselves, and each request runs once.

In a Ray cluster that goes on, the next start takes them over: `test_adopted_processes`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from ray_nodes import descendants
from sdk_run import run
from served_cluster import serving, working

import mint

pytestmark = pytest.mark.slow

STEPS, KILLED = 4, 2


def test_after_a_kill_of_the_server_the_run_is_the_same_and_nothing_is_left(tmp_path: Path, folder: Path) -> None:
    with serving(tmp_path / "alone", folder, os.environ) as server, mint.ServiceClient(base_url=server.url) as service:
        alone = run(service, "base", STEPS)
    options = ("--cluster=local", "--trainers=2", "--samplers=1")
    with serving(tmp_path / "data", folder, os.environ, *options) as server:
        left: list[int] = []

        def disturb(step: int) -> None:
            if step == KILLED:
                left.extend(working(descendants([server.process.pid])))
                server.kill()
                server.start()

        with mint.ServiceClient(base_url=server.url) as service:
            assert run(service, "base", STEPS, disturb) == alone
        assert len(left) == 3
        wait_until(lambda: not working(left))
