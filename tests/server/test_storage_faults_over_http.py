"""What clients and operators of a server see while its disk is full."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from server_harness import API, Person, pass_input, running, sample_body
from waiting import HANG_S

from mint import ServiceClient
from mint.server import storage_state
from mint.server.ops.metrics import Metrics
from mint.server.ops.overview import Overview
from mint.types import AdamParams, Datum, ModelInput, TensorData


class FullDisk:
    """Lets no file be made in a folder, until `repair`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._is_full = threading.Event()
        mkstemp = tempfile.mkstemp

        def full_mkstemp(*arguments: Any, **named: Any) -> tuple[int, str]:
            if self._is_full.is_set() and Path(named.get("dir") or "/").is_relative_to(folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return mkstemp(*arguments, **named)

        monkeypatch.setattr(tempfile, "mkstemp", full_mkstemp)

    def fill(self) -> None:
        self._is_full.set()

    def repair(self) -> None:
        self._is_full.clear()


def wait_for_status(person: Person, status: int) -> dict[str, Any]:
    give_up_at = time.monotonic() + HANG_S
    while time.monotonic() < give_up_at:
        response = person.send("GET", "/readyz")
        if response.status_code == status:
            return response.json()
        time.sleep(0.02)
    raise AssertionError(f"/readyz did not answer {status}")


def test_a_full_disk_is_told_to_clients_and_operators_and_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_state, "LONGEST_PAUSE_S", 0.1)
    disk = FullDisk(monkeypatch, tmp_path)
    with running(tmp_path) as server:
        person = Person(server)
        session = person.session()
        model, sampler = person.model(session), person.sampler(session)
        person.done("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": pass_input()})
        disk.fill()
        step = person.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})["request_id"]
        problems = wait_for_status(person, 503)["problems"]
        assert len(problems) == 1 and "No space left on device" in problems[0] and str(tmp_path) not in problems[0]

        body = {"model_id": model, "seq_id": 3, "forward_backward_input": pass_input()}
        began = time.monotonic()
        refused = person.send("POST", f"{API}/forward_backward", body)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert time.monotonic() - began >= 1.0, "some clients send again at once"
        assert "No space left on device" in refused.json()["error"]

        assert person.done("asample", sample_body(sampler))["sequences"]
        assert person.send("GET", f"{API}/models").status_code == 200
        assert "mint_storage_working 0.0" in person.send("GET", "/metrics").text
        overview = Overview(server.service, Metrics())()
        assert "No space left on device" in overview["storage_problem"]

        disk.repair()
        assert person.result(step)["state_digest"]
        wait_for_status(person, 200)
        assert "mint_storage_working 1.0" in person.send("GET", "/metrics").text
        person.done("forward_backward", body)


def test_a_loop_of_the_sdk_holds_no_code_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_state, "LONGEST_PAUSE_S", 0.1)
    disk = FullDisk(monkeypatch, tmp_path)

    def train(url: str) -> list[str | None]:
        client = ServiceClient(base_url=url)
        model = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
        targets = TensorData(data=[2, 3, 4], dtype="int64")
        datum = Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": targets})
        digests: list[str | None] = []
        for _ in range(4):
            model.forward_backward([datum], "cross_entropy")
            digests.append(model.optim_step(AdamParams(learning_rate=0.001)).result().state_digest)
            begun.set()
        model.save_state("end").result()
        client.close()
        return digests

    begun = threading.Event()
    with running(tmp_path / "clean") as server:
        clean = train(server.url)
    begun.clear()

    def fill_for_a_while() -> None:
        assert begun.wait(HANG_S)
        disk.fill()
        time.sleep(3.0)
        disk.repair()

    with running(tmp_path / "full") as server:
        filler = threading.Thread(target=fill_for_a_while)
        filler.start()
        assert train(server.url) == clean
        filler.join()
