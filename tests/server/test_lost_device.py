"""A GPU that fails for good ends the server's process; a process manager starts it again, and everything goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from waiting import HANG_S, wait_until

import mint
from mint.compose.embedded import open_embedded
from mint.compose.lost_device import is_device_lost
from mint.engine.fake_engine import FakeEngine
from mint.engine.protocol import AdamSpec, LoraSpec
from mint.errors import RequestFailedError
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.types import AdamParams
from tests.server.fake_serve import FATAL_RATE, FATAL_SEED
from tests.server.test_shutdown import SCRIPT, datum, process, stop


def take_step(model: mint.TrainingClient, learning_rate: float = 0.01) -> str | None:
    model.forward_backward([datum()], "cross_entropy")
    return model.optim_step(AdamParams(learning_rate=learning_rate)).result(timeout=HANG_S).state_digest


def digests_of_a_run(client: mint.ServiceClient) -> list[str | None]:
    model = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
    return [take_step(model, rate) for rate in (0.01, FATAL_RATE, 0.01)]


def test_a_server_whose_device_is_lost_ends_and_the_next_one_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    port = free_port()
    found: list[str | None] = []

    def loop() -> None:
        with mint.ServiceClient(base_url=f"http://127.0.0.1:{port}") as client:
            found.extend(digests_of_a_run(client))

    with process(tmp_path / "lost", port, loses_device=True) as first:
        thread = threading.Thread(target=loop)
        thread.start()
        _, log = first.communicate(timeout=HANG_S)
    assert first.returncode == 70
    assert [line for line in log.splitlines() if '"critical"' in line and "device-side assert" in line], log
    assert log.count("this process ends, to be started again") == 1
    with process(tmp_path / "lost", port) as second:
        thread.join(2 * HANG_S)
        stop(second)
    with process(tmp_path / "clean", port) as clean:
        with mint.ServiceClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert digests_of_a_run(client) == found
        stop(clean)


@pytest.mark.slow
def test_a_request_that_loses_the_device_each_time_is_failed_alone(tmp_path: Path) -> None:
    port = free_port()
    with process(tmp_path, port, loses_device=True) as first:
        client = mint.ServiceClient(base_url=f"http://127.0.0.1:{port}")
        model = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
        other = client.create_lora_training_client("mint/tiny", rank=4, seed=2)
        take_step(model)
        model.forward_backward([datum()], "cross_entropy")
        deadly = model.optim_step(AdamParams(learning_rate=FATAL_RATE))
        first.communicate(timeout=HANG_S)
    for _ in range(4):
        settings = {"port": port, "data_dir": str(tmp_path), "loses_device": True}
        again = subprocess.run(  # it may end before it says that it serves
            [sys.executable, str(SCRIPT), json.dumps(settings)], check=False, timeout=HANG_S, capture_output=True
        )
        assert again.returncode == 70
    with process(tmp_path, port, loses_device=True) as last:
        with pytest.raises(RequestFailedError, match="died 5 times"):
            deadly.result(timeout=HANG_S)
        take_step(model)
        take_step(other)
        client.close()
        stop(last)


@pytest.mark.slow
def test_a_sample_that_loses_the_device_each_time_is_failed_alone(tmp_path: Path) -> None:
    port = free_port()
    prompt = mint.ModelInput.from_ints([5, 6])
    settings = {"port": port, "data_dir": str(tmp_path), "loses_device": True, "slow": 0.05}
    found: dict[int, Any] = {}

    def sample(sampler: mint.SamplingClient, seed: int) -> None:
        params = mint.SamplingParams(max_tokens=40, seed=seed)
        try:
            found[seed] = sampler.sample(prompt, 1, params).result(timeout=2 * HANG_S).sequences[0].tokens
        except RequestFailedError as error:
            found[seed] = error

    with process(tmp_path, port, loses_device=True, slow=0.05) as first:
        client = mint.ServiceClient(base_url=f"http://127.0.0.1:{port}")
        sampler = client.create_sampling_client(base_model="mint/tiny")
        threads = [threading.Thread(target=sample, args=(sampler, seed)) for seed in (1, 2, FATAL_SEED)]
        for thread in threads:  # the last one joins the batch of the others
            thread.start()
            time.sleep(0.3)
        first.communicate(timeout=HANG_S)
    assert first.returncode == 70
    statuses = []
    while len(found) < 3 and len(statuses) < 8:
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: child.poll() is not None or len(found) == 3)  # noqa: B023
        if child.poll() is None:
            child.terminate()
        statuses.append(child.wait(HANG_S))
    assert statuses == [70, 70, 70, 70, 0]
    assert isinstance(found[FATAL_SEED], RequestFailedError) and "died 5 times" in str(found[FATAL_SEED])
    with process(tmp_path / "clean", port) as clean:
        other = mint.ServiceClient(base_url=f"http://127.0.0.1:{port}").create_sampling_client(base_model="mint/tiny")
        for seed in (1, 2):
            answer = other.sample(prompt, 1, mint.SamplingParams(max_tokens=40, seed=seed)).result(timeout=HANG_S)
            assert answer.sequences[0].tokens == found[seed]
        stop(clean)


class Failing(FakeEngine):
    """Its device is lost in the first step with `FATAL_RATE`."""

    is_lost = False
    calls_after = 0

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        self.is_lost |= adam.learning_rate == FATAL_RATE
        self._fail_if_lost()
        return super().optim_step(model_id, adam)

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        self._fail_if_lost()
        return super().create_model(model_id, base, lora)

    def _fail_if_lost(self) -> None:
        if self.is_lost:
            self.calls_after += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_program_with_an_embedded_service_is_told_to_start_again(tmp_path: Path) -> None:
    engine = Failing()
    client = mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=tmp_path, engine=engine))
    model = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
    saved = model.save_state("before").result(timeout=HANG_S).path
    with pytest.raises(RequestFailedError, match=r"illegal memory access .*start it again"):
        take_step(model, FATAL_RATE)
    for _ in range(2):  # restores the model, which fails, and stops nothing for good
        with pytest.raises(RequestFailedError, match="start it again"):
            take_step(model)
    with pytest.raises(RequestFailedError, match="start it again"):
        client.create_lora_training_client("mint/tiny", rank=4, seed=2)
    assert engine.calls_after == 1
    journal = Journal(tmp_path / JOURNAL_FILE)
    assert journal.stopped_models() == []
    journal.close()
    client.close()
    client = mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=tmp_path, engine=FakeEngine()))
    take_step(client.create_training_client_from_state(saved))
    client.close()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
        (ValueError("an illegal memory access"), False),
        (MemoryError(), False),
    ],
)
def test_only_errors_that_stay_count_as_a_lost_device(error: Exception, is_lost: bool) -> None:
    assert is_device_lost(error) == is_lost
    try:
        try:
            raise error
        except Exception as cause:
            raise KeyError("in a kernel's wrapper") from cause
    except KeyError as wrapped:
        assert is_device_lost(wrapped) == is_lost
