"""`mint worker --join URL`: a second machine samples, with the bits of one; it is cut off, comes back, and leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from joined_workers import MODEL, Process, Server
from sdk_run import run
from waiting import wait_until

import mint
from mint import types
from mint.cluster.external.lora_archive import read_archive, write_archive
from mint.cluster.versions import Version, packed
from mint.engine.protocol import LoraSpec

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """What a run gives where one process trains and samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_HOME", str(tmp_path_factory.mktemp("alone")))
        patch.setenv("MINT_THREADS", "1")
        with mint.ServiceClient() as service:
            return run(service, MODEL, 4)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """The processes of a test, which end with it."""
    processes: list[Process] = []
    yield processes
    for process in reversed(processes):
        process.end(signal.SIGKILL)


def joined(server: Server, folder: Path, *inside: str) -> Process:
    worker = Process(folder, "worker", "--join", server.url, "--model", MODEL, key=server.key, inside=inside)
    worker.wait_for("mint worker at")
    return worker


def address_of(worker: Process) -> str:
    [address] = re.findall(r"mint worker at (\S+) samples", worker.log)
    return address


def test_a_lora_is_the_same_after_its_way() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(3, 2)).astype("float32") for name in ("a.lora_A.weight", "a.lora_B.weight")}
    layout, vector = packed(weights)
    lora = LoraSpec(2, 5, True, False, True)
    shape, found = read_archive(write_archive(Version("7", "b", lora, layout, vector.nbytes, vector)))
    assert shape == lora and {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in weights.items()
    }


def test_workers_sample_the_bits_of_one_process_and_may_be_killed_or_leave(
    alone: list[object], tmp_path: Path, started: list[Process]
) -> None:
    server = Server(tmp_path / "server")
    started.append(server)
    first = joined(server, tmp_path / "first")
    started.append(first)

    def disturb(step: int) -> None:
        if step == 0:
            started.append(joined(server, tmp_path / "second"))
            first.end(signal.SIGKILL)

    with mint.ServiceClient(base_url=server.url, api_key=server.key) as service:
        assert run(service, MODEL, 4, disturb) == alone
        second = started[-1]
        base = service.create_sampling_client(base_model=MODEL)
        params = types.SamplingParams(max_tokens=400, seed=1, stop=["no such text"])
        future = base.sample(types.ModelInput.from_ints([20, 30]), 16, params)
        wait_until(lambda: any(host["sequences"] for host in server.samplers()))
        assert second.end() == 0  # it ends what it has
        assert len(future.result().sequences) == 16
        assert {*re.findall(r"the sampler (\S+) is lost", server.log)} == {address_of(first)}  # the second has left
        wait_until(lambda: not any(host["up"] for host in server.samplers()))


def test_strangers_neither_join_nor_read_loras_nor_use_a_worker(tmp_path: Path, started: list[Process]) -> None:
    server = Server(tmp_path / "server")
    started.append(server)
    stranger = Process(tmp_path / "x", "worker", "--join", server.url, key="tml-mint-none")
    started.append(stranger)
    assert stranger.process.wait(120) == 1 and "does not take this worker" in stranger.log
    assert server.samplers() == []
    path = f"{server.url}/api/v1/samplers/loras/none"
    assert httpx.get(path).status_code == 401
    assert httpx.get(path, headers={"X-API-Key": server.key}).status_code == 404
    started.append(joined(server, tmp_path / "worker"))
    [worker] = server.samplers()
    for path in ("/health", "/v1/models"):
        assert httpx.get(worker["address"] + path).status_code == 401


# --- two machines ------------------------------------------------------------------------------------------------

NAME = f"mint{os.getpid() % 100000}"
HERE, THERE = "10.213.77.1", "10.213.77.2"


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=20)


@pytest.fixture
def other_machine() -> Iterator[tuple[str, ...]]:
    """A network namespace, joined to this one by a cable; what a command that runs there begins with."""
    try:
        ip("netns", "add", NAME)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs ip, and the right to make network namespaces")
    try:
        ip("link", "add", f"{NAME}a", "type", "veth", "peer", "name", f"{NAME}b", "netns", NAME)
        ip("addr", "add", f"{HERE}/30", "dev", f"{NAME}a")
        ip("link", "set", f"{NAME}a", "up")
        ip("-n", NAME, "addr", "add", f"{THERE}/30", "dev", f"{NAME}b")
        ip("-n", NAME, "link", "set", f"{NAME}b", "up")
        yield ("ip", "netns", "exec", NAME)
    finally:
        ip("link", "del", f"{NAME}a", check=False)
        ip("netns", "del", NAME, check=False)


def test_a_second_machine_joins_works_is_cut_off_comes_back_and_leaves(
    alone: list[object], tmp_path: Path, started: list[Process], other_machine: tuple[str, ...]
) -> None:
    server = Server(tmp_path / "server", HERE)
    started.append(server)
    far = joined(server, tmp_path / "far", *other_machine)
    started.append(far)
    assert [host["address"].startswith(f"http://{THERE}:") for host in server.samplers()] == [True]
    was_lost = threading.Event()

    def cut_and_mend() -> None:
        ip("link", "set", f"{NAME}a", "down")
        try:
            wait_until(lambda: not server.samplers()[0]["up"])
            was_lost.set()
        finally:
            ip("link", "set", f"{NAME}a", "up")
            ip("addr", "replace", f"{HERE}/30", "dev", f"{NAME}a")

    def disturb(step: int) -> None:
        if step == 1:  # the next samples wait for the cable
            threading.Thread(target=cut_and_mend).start()
        if step == 2:
            assert was_lost.is_set() and server.samplers()[0]["up"]
            started.append(joined(server, tmp_path / "near"))
            far.end()

    with mint.ServiceClient(base_url=server.url, api_key=server.key) as service:
        assert run(service, MODEL, 4, disturb) == alone
    wait_until(lambda: len(server.samplers()) == 1)
    assert server.samplers()[0]["address"].startswith(f"http://{HERE}:") and far.process.poll() is not None
