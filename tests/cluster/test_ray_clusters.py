"""Ranks and replicas in a Ray cluster that was started before: the bits of one process, also when a node is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from ray_nodes import RayNodes, ray_nodes

from mint.cluster.ray_runtime import Place, RayStartError, start_ray

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "attached_program.py"
TIMEOUT_S = 400.0


def run(nodes: RayNodes, address: str, model: Path, data_dir: Path, *, samplers: int, **more: str) -> Any:
    """What the program prints that trains with two ranks at an address."""
    words = [sys.executable, str(PROGRAM), address, "2", str(samplers), str(model), str(data_dir)]
    done = subprocess.run(
        words, env=nodes.environment | more, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_program_in_a_ray_cluster_gives_the_bits_of_one_process(tmp_path: Path, folder: Path) -> None:
    with ray_nodes(4) as nodes:
        alone = run(nodes, "none", folder, tmp_path / "alone", samplers=0)
        by_address = run(nodes, nodes.address, folder, tmp_path / "client", samplers=1)
        on_the_node = run(nodes, "auto", folder, tmp_path / "auto", samplers=1, RAY_ADDRESS=nodes.gcs)
    for found in (by_address, on_the_node):
        assert found["seen"] == alone["seen"]
        assert found["state"]["running"] == 2 and found["state"]["sampling"] == 1


def test_with_a_node_lost_fewer_ranks_go_on_with_the_same_bits(tmp_path: Path, folder: Path) -> None:
    with ray_nodes(1, 1) as nodes:
        alone = run(nodes, "none", folder, tmp_path / "alone", samplers=0)
        lost = nodes.processes(1)[0]  # the rank there is a process of its own later
        found = run(nodes, nodes.address, folder, tmp_path / "lost", samplers=0, END=str(lost))
    assert found["seen"] == alone["seen"]
    assert found["state"]["trainers"] == 2 and found["state"]["running"] == 1 and found["state"]["lost"] >= 1


def test_an_address_without_a_cluster_is_named() -> None:
    with ray_nodes() as nodes, pytest.raises(RayStartError, match=f"no Ray answers at {nodes.address}"):
        start_ray(Place(nodes.address))
