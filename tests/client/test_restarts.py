"""A server that dies, and programs that end, in the middle of a loop: real processes, real signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from server_process import FAKE, REAL, ServerProcess
from waiting import HANG_S

import mint
from mint.types import AdamParams, Datum, ModelInput, SamplingParams

pytestmark = pytest.mark.restarts


def sft_loop(client: mint.ServiceClient, steps: int, before_step: Callable[[int], None]) -> list[Any]:
    """Every loss, digest and sample of a small loop, pipelined as recipes do it."""
    training = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
    seen: list[Any] = []
    for step in range(steps):
        before_step(step)
        data = [Datum(model_input=ModelInput.from_ints([5, 6, 7 + step]), loss_fn_inputs={"target_tokens": [6, 7, 8]})]
        passed, stepped = training.forward_backward(data, "cross_entropy"), training.optim_step(AdamParams())
        sampler = training.save_weights_and_get_sampling_client()
        sampled = sampler.sample(ModelInput.from_ints([1, 2]), 2, SamplingParams(max_tokens=3))
        seen += [passed.result().metrics, stepped.result().state_digest, sampled.result().sequences]
        seen.append(stepped.result().metrics)
    return seen


@pytest.mark.parametrize(
    ("script", "kills"), [(FAKE, 2), pytest.param(REAL, 1, marks=pytest.mark.slow)], ids=["fake", "torch"]
)
def test_a_server_killed_and_started_again_changes_not_one_bit_of_a_loop(
    tmp_path: Path, script: str, kills: int
) -> None:
    with ServerProcess(tmp_path / "calm", script) as server, mint.ServiceClient(base_url=server.url) as client:
        expected = sft_loop(client, 3, lambda _step: None)

    with ServerProcess(tmp_path / "stormy", script) as server, mint.ServiceClient(base_url=server.url) as client:

        def strike(step: int) -> None:
            if 0 < step <= kills:
                server.kill()
                threading.Timer(0.3, server.start).start()

        assert sft_loop(client, 3, strike) == expected


PROGRAM = """
import sys
import mint
from mint.client import session
from mint.client.connection import server_connection
from mint.types import AdamParams, Datum, ModelInput
session.CLOSE_S = float(sys.argv[2])
server_connection.NOTIFY_TIMEOUT_S = 3600.0
client = mint.ServiceClient(base_url=sys.argv[1])
training = client.create_lora_training_client("mint/tiny", rank=4)
data = [Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})]
while True:
    training.forward_backward(data, "cross_entropy")
    training.optim_step(AdamParams()).result()
    print(client.session_id, flush=True)
"""


def session_is_active(url: str, session_id: str) -> bool:
    return httpx.post(f"{url}/api/v1/session_heartbeat", json={"session_id": session_id}).status_code == 200


def run_program(url: str, *, close_s: float = 3.0) -> tuple[subprocess.Popen[str], str]:
    """A loop that has come as far as its first step, and its session."""
    command = [sys.executable, "-c", PROGRAM, url, str(close_s)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_ctrl_c_leaves_nothing_running_on_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        child, session_id = run_program(server.url)
        assert session_is_active(server.url, session_id)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=HANG_S)
        assert "KeyboardInterrupt" in errors and child.returncode != 0
        assert not session_is_active(server.url, session_id)


def test_ctrl_c_twice_ends_a_program_whose_server_does_not_answer(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        child, _ = run_program(server.url, close_s=3600)
        server.kill()
        with deaf_at(server.port) as deaf:
            deaf.settimeout(HANG_S)
            connection, _ = deaf.accept()  # the program waits for an answer
            child.send_signal(signal.SIGINT)
            assert child.stderr is not None
            while "KeyboardInterrupt" not in child.stderr.readline():
                pass
            assert child.poll() is None  # it closes its session, and would wait an hour for that
            give_up_at = time.monotonic() + HANG_S
            while child.poll() is None and time.monotonic() < give_up_at:
                child.send_signal(signal.SIGINT)
                time.sleep(0.5)
            connection.close()
        assert child.poll() is not None
        child.communicate()


@contextmanager
def deaf_at(port: int) -> Iterator[socket.socket]:
    """Takes connections, and never answers."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deaf.bind(("127.0.0.1", port))
        deaf.listen(64)
        yield deaf


def test_closing_waits_for_no_server_that_is_gone_and_not_for_long_for_one_that_is_deaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.client.connection.server_connection.NOTIFY_TIMEOUT_S", 3600.0)
    with ServerProcess(tmp_path) as server:
        gone, deaf_client = (mint.ServiceClient(base_url=server.url) for _ in range(2))
        waiting = gone.create_lora_training_client("mint/tiny", rank=4)
        _ = deaf_client.session_id
        server.kill()
        future = waiting.optim_step()
        monkeypatch.setattr("mint.client.session.CLOSE_S", 3600.0)
        gone.close()
        with pytest.raises(mint.errors.SessionEndedError):
            future.result(timeout=HANG_S)
        monkeypatch.setattr("mint.client.session.CLOSE_S", 0.5)
        with deaf_at(server.port):
            deaf_client.close()


@pytest.mark.parametrize("strike", ["pause", "kill"])
def test_a_session_is_opened_while_its_server_is_paused_or_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: str
) -> None:
    monkeypatch.setattr("mint.client.session.CONNECT_PATIENCE_S", 0.2)
    with ServerProcess(tmp_path) as server, mint.ServiceClient(base_url=server.url) as client:
        server.pause(3600.0 if strike == "kill" else 1.5)
        if strike == "kill":  # with the connection of a client that waits
            threading.Timer(0.5, lambda: (server.kill(), time.sleep(0.7), server.start())).start()
        began = time.monotonic()
        assert client.session_id
        assert time.monotonic() - began > 1.0


def test_a_server_that_takes_connections_and_never_answers_is_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mint.client.session.OPEN_PATIENCE_S", 0.5)
    with deaf_at(0) as deaf, pytest.raises(mint.APIConnectionError, match="ReadTimeout"):
        mint.ServiceClient(base_url=f"http://127.0.0.1:{deaf.getsockname()[1]}").get_server_capabilities()


def test_a_server_that_was_never_there_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.client.session.CONNECT_PATIENCE_S", 0.5)
    with pytest.raises(mint.APIConnectionError, match="Is the server running") as caught:
        mint.ServiceClient(base_url=f"http://127.0.0.1:{free_port()}").get_server_capabilities()
    assert caught.value.category == "server"
