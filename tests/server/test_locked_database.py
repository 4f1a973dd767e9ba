"""While another process locks the database, whatever needs no write is answered, and nothing is lost."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_harness import API, Person, make_key, pass_input, running, sample_body
from waiting import HANG_S

from mint.compose.serving import MAX_THREADS
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import FRESH_S

TIMEOUT = "mint.server.store.database.BUSY_TIMEOUT_S"


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    other = sqlite3.connect(data_dir / JOURNAL_FILE, isolation_level=None, timeout=HANG_S)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def passing(model: str, seq_id: int) -> dict[str, object]:
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": pass_input()}


def accepted(person: Person, body: dict[str, object]) -> str:
    """The id of a request that is sent until it is accepted."""
    give_up_at = time.monotonic() + HANG_S
    while (response := person.send("POST", f"{API}/forward_backward", body)).status_code == 503:
        assert time.monotonic() < give_up_at
    return response.json()["request_id"]


def test_requests_that_wait_for_the_lock_keep_nobody_else_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMEOUT, 10 * HANG_S)
    key = make_key(tmp_path, "ada")
    with running(tmp_path) as server:
        person = Person(server, key)
        session = person.session()
        model = person.model(session)
        sampler = person.sampler(session)
        finished = person.post("forward_backward", passing(model, 1))["request_id"]
        result = person.result(finished)
        names: list[str] = []
        waiting = [
            threading.Thread(target=lambda n=number: names.append(accepted(person, passing(model, n))))
            for number in range(2, MAX_THREADS + 4)
        ]
        with locked(tmp_path):
            for thread in waiting:
                thread.start()
            for round_number in range(2):
                time.sleep(FRESH_S)  # the key must be read again
                assert person.send("GET", "/healthz").status_code == 200
                assert person.post("session_heartbeat", {"session_id": session}) == {}
                assert person.result(finished) == result
                assert person.done("asample", sample_body(sampler, round_number))["sequences"]
                assert Person(server, "tml-unknown").send("POST", f"{API}/session_heartbeat", {}).status_code == 401
            assert names == []
        for thread in waiting:
            thread.join()
        assert len(names) == len(waiting)
        assert all(person.result(name)["metrics"] for name in names)


def test_sampling_goes_on_while_results_of_training_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMEOUT, 0.2)
    with running(tmp_path) as server:
        person = Person(server)
        session = person.session()
        model = person.model(session)
        sampler = person.sampler(session)
        names: list[str] = []
        trains = threading.Event()

        def train() -> None:
            for number in range(1, 40):
                names.append(accepted(person, passing(model, number)))
                trains.set()

        trainer = threading.Thread(target=train)
        trainer.start()
        assert trains.wait(HANG_S)
        with locked(tmp_path):
            for number in range(10):
                assert person.done("asample", sample_body(sampler, number))["sequences"]
        trainer.join()
        assert all(person.result(name)["metrics"] for name in names)
        assert len(names) == 39
