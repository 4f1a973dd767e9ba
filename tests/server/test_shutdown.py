"""A signal ends the server in order: nobody who was promised a result loses it, and nobody waits for long."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from waiting import HANG_S, wait_until

import mint
from mint.compose.http_server import HttpServer, http_config, url_of
from mint.types import AdamParams, Datum, ModelInput, SamplingParams
from tests.server.server_harness import API, Person, running

SCRIPT = Path(__file__).with_name("fake_serve.py")


@contextmanager
def process(data_dir: Path, port: int, **flags: Any) -> Iterator[subprocess.Popen[str]]:
    settings = {"port": port, "data_dir": str(data_dir), "log_format": "json", **flags}
    command = [sys.executable, str(SCRIPT), json.dumps(settings)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline().startswith("mint serves ")
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def stop(child: subprocess.Popen[str], number: int = signal.SIGTERM) -> list[dict[str, Any]]:
    """The log. Where something is waited for that takes longer than it should, the server does not end at all."""
    child.send_signal(number)
    _, log = child.communicate(timeout=HANG_S)
    return [json.loads(line) for line in log.splitlines()]


def datum() -> Datum:
    return Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_has_nothing_to_do_ends_at_once_and_well(tmp_path: Path, number: int) -> None:
    with process(tmp_path, free_port(), stop_within_s=3600) as idle:
        log = stop(idle, number)
    assert idle.returncode == 0
    assert any(line["event"].startswith("stopped") for line in log)
    assert not (list((tmp_path / "instances").glob("*.lock")) and list(tmp_path.glob("*-wal")))


def test_a_client_that_waits_for_a_result_is_told_to_ask_again(tmp_path: Path) -> None:
    answered: list[int] = []
    with running(tmp_path, stop_within_s=3600) as server:
        server.service.results.long_poll_s = 3600.0
        person = Person(server)
        model = person.model(person.session())
        behind = person.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})  # 1 is missing
        waiting = threading.Thread(
            target=lambda: answered.append(person.send("POST", f"{API}/retrieve_future", behind).status_code)
        )
        waiting.start()
        wait_until(lambda: server.service.futures.waiter_count == 1)
    waiting.join()
    assert answered == [408]


def test_a_request_that_is_not_done_when_the_server_stops_may_be_sent_again() -> None:
    begun = threading.Event()

    async def never_done(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = HttpServer(http_config(never_done, drain_s=1), release_clients=lambda: None)
        serving = threading.Thread(target=server.run, args=([bound],))
        serving.start()
        found: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: found.append(httpx.get(url_of("127.0.0.1", bound), timeout=HANG_S)))
        asking.start()
        assert begun.wait(HANG_S)
        server.should_exit = True
        asking.join()
        serving.join()
    (response,) = found
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "Send the same request again" in response.json()["error"]


def test_a_server_takes_connections_until_it_has_finished() -> None:
    begun, answered = threading.Event(), threading.Event()

    async def ok(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def finish() -> None:
        begun.set()
        while not answered.is_set():
            await asyncio.sleep(0.01)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = HttpServer(http_config(ok, drain_s=HANG_S), finish=finish)
        serving = threading.Thread(target=server.run, args=([bound],))
        serving.start()
        wait_until(lambda: server.started)
        server.should_exit = True
        assert begun.wait(HANG_S)
        assert httpx.get(url_of("127.0.0.1", bound), timeout=HANG_S).status_code == 200
        answered.set()
        serving.join()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_server_does_not_wait_for_ever_until_it_has_finished(interrupted: bool) -> None:
    begun = threading.Event()

    async def finish() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def none(scope: Any, receive: Any, send: Any) -> None:
        pass

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = HttpServer(http_config(none, drain_s=2 * HANG_S if interrupted else 1), finish=finish)
        serving = threading.Thread(target=server.run, args=([bound],))
        serving.start()
        wait_until(lambda: server.started)
        server.should_exit = True
        assert begun.wait(HANG_S)
        if interrupted:
            server.handle_exit(signal.SIGINT, None)
        serving.join(HANG_S)
        assert not serving.is_alive()


def test_a_loop_goes_on_over_a_restart_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Under load: steps, samples and long polls; the process is ended in the midst of it, and another one started."""
    port = free_port()
    outcomes: list[Any] = []

    def loop() -> None:
        try:
            with mint.ServiceClient(base_url=f"http://127.0.0.1:{port}") as service:
                model = service.create_lora_training_client("mint/tiny", rank=4, seed=1)
                for _ in range(12):
                    passed = model.forward_backward([datum()], "cross_entropy")
                    stepped = model.optim_step(AdamParams(learning_rate=0.01))
                    outcomes.append((passed.result(timeout=HANG_S).metrics["loss:sum"], stepped.result(timeout=HANG_S)))
                sampler = service.create_sampling_client(base_model="mint/tiny")
                prompt = ModelInput.from_ints([5, 6])
                found = sampler.sample(prompt, num_samples=1, sampling_params=SamplingParams(max_tokens=3))
                outcomes.append(found.result(timeout=HANG_S))
        except Exception as error:
            outcomes.append(error)

    with process(tmp_path, port, slow=0.1, stop_within_s=3600) as first:
        thread = threading.Thread(target=loop)
        thread.start()
        wait_until(lambda: len(outcomes) >= 3)
        log = stop(first)
    assert first.returncode == 0
    assert not any("Traceback" in line.get("exception", "") for line in log)
    with process(tmp_path, port, slow=0.0) as second:
        thread.join(2 * HANG_S)
        log = stop(second)
    assert len(outcomes) == 13 and not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    # the state is the last snapshot's; at most the pass whose step was still to come is run again
    restored = [re.search(r"restored from snapshot \d+ and (\d+) requests", line["event"]) for line in log]
    assert [int(found[1]) <= 1 for found in restored if found is not None] == [True], log


def train(port: int, steps: int) -> tuple[mint.ServiceClient, mint.TrainingClient, list[str | None]]:
    client = mint.ServiceClient(base_url=f"http://127.0.0.1:{port}")
    model = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
    return client, model, [take_step(model) for _ in range(steps)]


def take_step(model: mint.TrainingClient) -> str | None:
    model.forward_backward([datum()], "cross_entropy")
    return model.optim_step(AdamParams(learning_rate=0.01)).result(timeout=HANG_S).state_digest


def replayed(log: list[dict[str, Any]]) -> list[int]:
    """How many requests were replayed for each model that was restored."""
    found = [re.search(r"restored from snapshot \d+ and (\d+) requests", line["event"]) for line in log]
    return [int(match[1]) for match in found if match is not None]


@pytest.mark.slow
def test_large_states_are_saved_at_a_stop_so_that_the_next_start_replays_nothing(tmp_path: Path) -> None:
    port = free_port()
    with process(tmp_path / "stopped", port, large_states=True) as first:
        client, model, _ = train(port, 5)
        stop(first)
    with process(tmp_path / "stopped", port, large_states=True) as second:
        digest = take_step(model)
        client.close()
        assert replayed(stop(second)) == [0]
    with process(tmp_path / "clean", port) as clean:
        client, _, digests = train(port, 6)
        client.close()
        stop(clean)
    assert digests[-1] == digest


def test_what_runs_for_too_long_is_left_to_the_next_process(tmp_path: Path) -> None:
    port = free_port()
    with process(tmp_path, port, slow=3600.0, stop_within_s=1.0) as first:
        client = mint.ServiceClient(base_url=f"http://127.0.0.1:{port}")
        model = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
        model.forward_backward([datum()], "cross_entropy").result(timeout=HANG_S)
        step = model.optim_step(AdamParams(learning_rate=0.01))
        assert first.stdout is not None and first.stdout.readline() == "a step begins\n"
        log = stop(first)
    assert first.returncode == 0
    assert any("runs it again" in line["event"] for line in log)
    with process(tmp_path, port) as second:
        step.result(timeout=HANG_S)
        client.close()
        stop(second)
