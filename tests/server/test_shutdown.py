"""A signal ends the server in order: nobody who was promised a result loses it, and nobody waits for long."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mint
from mint.types import AdamParams, Datum, ModelInput, SamplingParams

SCRIPT = Path(__file__).with_name("fake_serve.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process(data_dir: Path, port: int, **flags: Any) -> Iterator[subprocess.Popen[str]]:
    settings = {"port": port, "data_dir": str(data_dir), "log_format": "json", **flags}
    command = [sys.executable, str(SCRIPT), json.dumps(settings)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline().startswith("mint serves ")
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def stop(running: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until the end, and the log."""
    started_at = time.monotonic()
    running.send_signal(number)
    _, log = running.communicate(timeout=30)
    return time.monotonic() - started_at, [json.loads(line) for line in log.splitlines()]


def datum() -> Datum:
    return Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_has_nothing_to_do_ends_at_once_and_well(tmp_path: Path, number: int) -> None:
    with process(tmp_path, free_port()) as running:
        seconds, log = stop(running, number)
    assert running.returncode == 0 and seconds < 3
    assert any(line["event"].startswith("stopped") for line in log)
    assert not (list((tmp_path / "instances").glob("*.lock")) and list(tmp_path.glob("*-wal")))


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
                    outcomes.append((passed.result(timeout=60).metrics["loss:sum"], stepped.result(timeout=60)))
                sampler = service.create_sampling_client(base_model="mint/tiny")
                prompt = ModelInput.from_ints([5, 6])
                found = sampler.sample(prompt, num_samples=1, sampling_params=SamplingParams(max_tokens=3))
                outcomes.append(found.result(timeout=60))
        except Exception as error:
            outcomes.append(error)

    with process(tmp_path, port, slow=0.1) as first:
        thread = threading.Thread(target=loop)
        thread.start()
        while len(outcomes) < 3:
            time.sleep(0.02)
        seconds, log = stop(first)
    assert first.returncode == 0 and seconds < 5
    assert not any("Traceback" in line.get("exception", "") for line in log)
    with process(tmp_path, port, slow=0.0) as second:
        thread.join(60)
        _, log = stop(second)
    assert len(outcomes) == 13 and not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    # the state is the last snapshot's; at most the pass whose step was still to come is run again
    restored = [re.search(r"restored from snapshot \d+ and (\d+) requests", line["event"]) for line in log]
    assert [int(found[1]) <= 1 for found in restored if found is not None] == [True], log


def test_what_runs_for_too_long_is_left_to_the_next_process(tmp_path: Path) -> None:
    port = free_port()
    with process(tmp_path, port, slow=30.0, stop_within_s=2.0) as first:
        client = mint.ServiceClient(base_url=f"http://127.0.0.1:{port}")
        model = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
        model.forward_backward([datum()], "cross_entropy").result(timeout=20)
        step = model.optim_step(AdamParams(learning_rate=0.01))
        time.sleep(0.5)
        seconds, log = stop(first)
    assert first.returncode == 0 and seconds < 4
    assert any("runs it again" in line["event"] for line in log)
    with process(tmp_path, port) as second:
        step.result(timeout=60)
        client.close()
        stop(second)
