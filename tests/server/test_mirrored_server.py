"""A server that is killed and whose disk is gone: another one goes on from the mirror, with the bits that it has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import wait_until

import mint
from mint import types
from mint.errors import MintError
from tests.ports import free_port

pytest.importorskip("obstore", reason="pip install 'mint[mirror]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 5
Disturb = Callable[[int, "Server"], None]


class Server:
    """`mint serve` with a mirror, started as often as asked, each time on the data directory that is named."""

    def __init__(self, folder: Path, mirror: str) -> None:
        self._folder = folder
        self.mirror = mirror
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.data_dir = folder

    def start(self, name: str) -> None:
        """Serves the data directory of this name."""
        self.data_dir = self._folder / name
        words = ["serve", f"--port={self._port}", f"--data-dir={self.data_dir}", f"--mirror={self.mirror}"]
        log = self._folder / f"{name}.log"
        with log.open("ab") as written:
            self.process = subprocess.Popen(command(*words), stdout=written, stderr=written, env=environment())
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def mirror_state(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/readyz").json()["mirror"]

    def wait_mirrored(self) -> float:
        """Returns once the mirror has all that is there by now; how many seconds that took."""
        began = time.monotonic()
        wait_until(lambda: self.mirror_state()["lag_s"] + 0.2 < time.monotonic() - began)
        return time.monotonic() - began

    def lose(self) -> None:
        """Kills it, and takes its disk away."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.data_dir)

    def bring_back(self, name: str) -> str:
        """Starts it on an empty disk, from the mirror; what the command says."""
        words = ["recover", f"--from-mirror={self.mirror}", f"--data-dir={self._folder / name}"]
        done = subprocess.run(command(*words), capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
        self.start(name)
        return done.stdout


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mint.cli.main", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "MINT_THREADS": "1"}


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder, f"file://{folder}/objects")
    server.start("first")
    try:
        yield server
    finally:
        assert server.process is not None
        server.process.terminate()
        server.process.wait()


def one_step(client: mint.TrainingClient, step: int) -> list[object]:
    sampler = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, seed=step)
    samples = sampler.sample(types.ModelInput.from_ints([20 + step, 30]), 4, params).result()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([20 + step, 30, *own.tokens[:-1]]),
            loss_fn_inputs={"target_tokens": [30, *own.tokens], "weights": [0.0] + [1.0] * len(own.tokens)},
        )
        for own in samples.sequences
    ]
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
    rollouts = [[list(own.tokens), list(own.logprobs)] for own in samples.sequences]
    return [*rollouts, passed.result().metrics["loss:sum"], stepped.result().state_digest]


def run(server: Server, disturb: Disturb = lambda _step, _server: None) -> list[object]:
    seen: list[object] = []
    with mint.ServiceClient(base_url=server.url) as service:
        client = service.create_lora_training_client("mint/tiny", rank=4, seed=3)
        for step in range(STEPS):
            seen += one_step(client, step)
            disturb(step, server)
    return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    with serving(tmp_path_factory.mktemp("undisturbed")) as server:
        return run(server)


def test_a_run_whose_disk_is_lost_goes_on_from_the_mirror_with_the_same_bits(
    tmp_path: Path, undisturbed: list[object]
) -> None:
    def disturb(step: int, server: Server) -> None:
        if step in (1, 3):
            server.wait_mirrored()
            server.lose()
            assert "What was accepted after that is lost" in server.bring_back(f"after{step}")

    with serving(tmp_path) as server:
        assert run(server, disturb) == undisturbed
        assert server.mirror_state()["works"]


def test_a_client_of_what_was_lost_is_told_and_begins_again_from_its_checkpoint(
    tmp_path: Path, undisturbed: list[object]
) -> None:
    with serving(tmp_path) as server, mint.ServiceClient(base_url=server.url) as service:
        client = service.create_lora_training_client("mint/tiny", rank=4, seed=3)
        seen = [*one_step(client, 0), *one_step(client, 1)]
        path = client.save_state("kept").result().path
        server.wait_mirrored()
        one_step(client, 2)  # within the 5 seconds before the next state
        server.lose()
        server.bring_back("second")
        with pytest.raises(MintError, match="from a mirror; what came later is lost"):
            one_step(client, 3)
        again = service.create_training_client_from_state_with_optimizer(path)
        for step in range(2, STEPS):
            seen += one_step(again, step)
        assert seen == undisturbed
