"""The scripts of deploy/ for Slurm and SkyPilot start a Ray of two nodes on this machine, and a server trains there.

Slurm's `srun` and `scontrol` are programs of this test: they start what they are given at once, on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")
pytest.importorskip("yaml")

import yaml
from ports import free_port
from ray_nodes import descendants, end

import mint
from mint import types

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "deploy"
START_LIMIT_S = 300

PROGRAMS = {
    "mint": f'exec {sys.executable} -m mint "$@"',
    "python": f'exec {sys.executable} "$@"',
    "scontrol": r"echo first; echo second",
    # A second node on one machine needs ports of its own.
    "ray": f"""
case " $* " in
    *" --head "*) set -- "$@" --temp-dir="$RAY_FOLDER" ;;
    *) set -- "$@" --dashboard-agent-listen-port="$SECOND_PORT" ;;
esac
exec {sys.executable} -m ray.scripts.scripts "$@" --node-ip-address=127.0.0.1 --object-store-memory=100000000 \\
    --disable-usage-stats --min-worker-port=0 --max-worker-port=0""",
    "srun": """
while [[ $1 == --* ]]; do shift; done
if [[ $1 == hostname ]]; then echo 127.0.0.1; else exec "$@"; fi""",
}


@pytest.fixture
def environment(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A home folder with a virtual environment of the programs above, and Ray's own folder, of a short path."""
    programs = tmp_path / "mint-env" / "bin"
    programs.mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f"export PATH={programs}:$PATH\n")
    folder = Path("/tmp") / f"ray-{os.getpid()}-{free_port()}"
    yield {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MINT_", "SLURM_"))} | {
        "HOME": str(tmp_path),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")]),
        "RAY_FOLDER": str(folder),
        "RAY_PORT": str(free_port()),
        "SECOND_PORT": str(free_port()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "MINT_THREADS": "1",
    }
    subprocess.run(["rm", "-rf", folder], check=True)


def wait_for(url: str, script: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + START_LIMIT_S
    while not answers(url):
        assert script.poll() is None and time.monotonic() < give_up_at, log.read_text()
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/healthz", timeout=5).status == 200
    except OSError:
        return False


def train(url: str) -> list[int]:
    """One step; the processes of the ranks that took it."""
    with mint.ServiceClient(base_url=url, api_key="none") as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=2, seed=1)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
        client.forward_backward([datum], loss_fn="cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    state = json.load(urllib.request.urlopen(f"{url}/readyz", timeout=30))
    return state["cluster"]["ranks"]


def test_the_script_for_slurm_trains_on_two_nodes_and_ends_in_time(environment: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    job = environment | {"SLURM_JOB_NODELIST": "first,second", "SLURM_CPUS_PER_TASK": "2"}
    log = tmp_path / "log"
    with log.open("wb") as file:
        words = ["bash", str(FOLDER / "slurm.sbatch"), "--port", str(port)]
        script = subprocess.Popen(words, env=job, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for(url, script, log)
        assert "2 of 2 nodes have joined" in log.read_text(), log.read_text()
        assert len(train(url)) == 2
        script.send_signal(signal.SIGTERM)  # as Slurm a minute before the end
        assert script.wait(60) == 0, log.read_text()
        assert "stopped within" in log.read_text()
        assert (tmp_path / "mint-data" / "journal.sqlite3").is_file()
    finally:
        end_all(script)


def test_the_script_for_skypilot_trains_on_two_nodes(environment: dict[str, str], tmp_path: Path) -> None:
    task = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    given = {name: str(value) for name, value in task["envs"].items()} | environment | {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_CPUS_PER_NODE": "2",
        "RAY_AUTH_TOKEN": 64 * "a",
        "MINT_TRAINERS": "2",
        "MINT_SERVE_PORT": str(port),
    }  # fmt: skip
    nodes = []
    for node in (1, 0):  # the one that joins waits for the head
        with (tmp_path / f"log{node}").open("wb") as file:
            words = ["bash", "-c", task["run"]]
            more = {"SKYPILOT_NODE_RANK": str(node)}
            nodes.append(subprocess.Popen(words, env=given | more, stdout=file, stderr=file, start_new_session=True))
    try:
        wait_for(url, nodes[1], tmp_path / "log0")
        assert len(train(url)) == 2
    finally:
        for node in nodes:
            end_all(node)


def end_all(started: subprocess.Popen[bytes]) -> None:
    """A job that ends takes all of its processes with it. Some of Ray's have left the tree, but not the session."""
    session = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _session_of(entry) == started.pid
    ]
    for pid in {*session, *descendants([*session, started.pid])}:
        end(pid)
    started.wait()


def _session_of(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:  # it has ended
        return None
