"""A server that dies, and programs that end, in the middle of a loop: real processes, real signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import FAKE, REAL, ServerProcess, free_port

import mint
from mint.types import AdamParams, Datum, ModelInput, SamplingParams


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
from mint.types import AdamParams, Datum, ModelInput
client = mint.ServiceClient(base_url=sys.argv[1])
training = client.create_lora_training_client("mint/tiny", rank=4)
data = [Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})]
print(client.session_id, flush=True)
while True:
    training.forward_backward(data, "cross_entropy")
    training.optim_step(AdamParams()).result()
"""


def session_is_active(url: str, session_id: str) -> bool:
    return httpx.post(f"{url}/api/v1/session_heartbeat", json={"session_id": session_id}).status_code == 200


def run_program(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_ctrl_c_leaves_nothing_running_on_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        child, session_id = run_program(server.url)
        assert session_is_active(server.url, session_id)
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
        assert "KeyboardInterrupt" in errors and child.returncode != 0
        assert not session_is_active(server.url, session_id)


def test_ctrl_c_twice_ends_a_program_whose_server_does_not_answer(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        child, _ = run_program(server.url)
        server.kill()
        with socket.socket() as deaf:  # takes connections, and never answers
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deaf.bind(("127.0.0.1", server.port))
            deaf.listen(64)
            time.sleep(1.5)
            for _ in range(2):
                child.send_signal(signal.SIGINT)
                time.sleep(0.5)
            child.communicate(timeout=4)


def test_closing_takes_no_longer_than_seconds_when_the_server_is_gone(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        gone, deaf_client = (mint.ServiceClient(base_url=server.url) for _ in range(2))
        waiting = gone.create_lora_training_client("mint/tiny", rank=4)
        _ = deaf_client.session_id
        server.kill()
        future = waiting.optim_step()
        began = time.monotonic()
        gone.close()
        assert time.monotonic() - began < 2
        with pytest.raises(mint.errors.SessionEndedError):
            future.result(timeout=1)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deaf.bind(("127.0.0.1", server.port))
            deaf.listen(64)
            began = time.monotonic()
            deaf_client.close()
            assert time.monotonic() - began < 12


def test_a_server_that_takes_connections_and_never_answers_is_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mint.client.http.CONNECT_PATIENCE_S", 0.5)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        began = time.monotonic()
        with pytest.raises(mint.APIConnectionError, match="ReadTimeout"):
            mint.ServiceClient(base_url=f"http://127.0.0.1:{deaf.getsockname()[1]}").get_server_capabilities()
        assert time.monotonic() - began < 5


def test_a_server_that_was_never_there_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.client.http.CONNECT_PATIENCE_S", 0.5)
    with pytest.raises(mint.APIConnectionError, match="Is the server running") as caught:
        mint.ServiceClient(base_url=f"http://127.0.0.1:{free_port()}").get_server_capabilities()
    assert caught.value.category == "server"
