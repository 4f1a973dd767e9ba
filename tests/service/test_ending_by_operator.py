"""An operator ends a session of any owner, in the folder: at once at rest, else the process that serves it does so."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import GOOD_PASS, STEP, Harness, failure, open_service, stored
from typer.testing import CliRunner, Result
from waiting import HANG_S, wait_until

from mint.cli.main import app
from mint.errors import SessionEndedError
from mint.server.callers import Caller
from mint.server.service.service import Service
from mint.server.service.sessions import SILENCE_S
from mint.server.worker.worker import HOUSEKEEPING_S

FORK = multiprocessing.get_context("fork")
ANN = Caller("ann")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, service: Service, seconds: float) -> None:
        """The service keeps house afterwards."""
        self.now += seconds
        for _ in range(2):  # the worker keeps house before it looks for work, then runs this
            settled: list[None] = []
            service.call_soon(lambda settled=settled: settled.append(None))
            wait_until(lambda settled=settled: settled)


def end(data_dir: Path, session_id: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["sessions", "end", session_id, "--data-dir", str(data_dir), "--yes", *options])


def state_after(data_dir: Path, session_id: str) -> str:
    """Ends a session; what the command says of it."""
    answer = end(data_dir, session_id, "--json")
    assert answer.exit_code == 0, answer.output
    answered = json.loads(answer.stdout)
    assert answered["session_id"] == session_id
    return answered["state"]


def is_active(data_dir: Path, session_id: str) -> bool:
    row = stored(data_dir, lambda journal: journal.session(session_id))
    assert row is not None
    return row.ended_at is None


def trained(service: Service) -> tuple[Harness, str]:
    """A session with a model that has a snapshot, a sampler and a checkpoint."""
    harness = Harness(service, caller=ANN)
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    harness.run("save_weights_for_sampler", model_id, 3, {"sampling_session_seq_id": 0})
    harness.run("save_weights", model_id, 4, {"path": "kept"})
    return harness, model_id


def files(data_dir: Path) -> dict[str, int]:
    return {name: len(list((data_dir / name).iterdir())) for name in ("snapshots", "published", "checkpoints")}


NAMED_CHECKPOINT_ONLY = {"snapshots": 0, "published": 0, "checkpoints": 1}


# --- beside the process that serves it ---------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    service = open_service(tmp_path, clock=clock)
    yield service
    service.stop()


def test_the_process_that_serves_a_session_ends_it_when_it_next_keeps_house(
    tmp_path: Path, service: Service, clock: Clock
) -> None:
    harness, model_id = trained(service)
    other, others_model = trained(service)
    waiting = harness.send("optim_step", model_id, 6, STEP)  # for request 5
    assert state_after(tmp_path, harness.session_id) == "ending"
    assert is_active(tmp_path, harness.session_id)
    clock.wait(service, HOUSEKEEPING_S)
    assert isinstance(failure(lambda: harness.wait(waiting)), SessionEndedError)
    error = failure(lambda: harness.run("optim_step", model_id, 5, STEP))
    assert isinstance(error, SessionEndedError) and "operator" in str(error)
    wait_until(lambda: files(tmp_path) == {"snapshots": 1, "published": 1, "checkpoints": 2})
    assert not harness.engine.has_model(model_id)
    other.run("optim_step", others_model, 5, STEP)


def test_a_client_that_comes_back_does_not_resume_a_session_that_is_to_end(
    tmp_path: Path, service: Service, clock: Clock
) -> None:
    harness, model_id = trained(service)
    clock.wait(service, SILENCE_S + 60)
    assert harness.session_id not in service.session_owners
    assert state_after(tmp_path, harness.session_id) == "ending"
    assert isinstance(failure(lambda: harness.run("optim_step", model_id, 5, STEP)), SessionEndedError)
    wait_until(lambda: files(tmp_path) == NAMED_CHECKPOINT_ONLY)


def test_a_session_that_is_asked_to_end_twice_ends_once(tmp_path: Path, service: Service, clock: Clock) -> None:
    harness, _ = trained(service)
    assert [state_after(tmp_path, harness.session_id) for _ in range(2)] == ["ending", "ending"]
    clock.wait(service, HOUSEKEEPING_S)
    again = end(tmp_path, harness.session_id)
    assert again.exit_code == 1 and "has ended" in again.stderr


def test_a_session_that_is_to_end_does_so_though_its_process_dies_first(tmp_path: Path) -> None:
    def life() -> None:
        harness, _ = trained(open_service(tmp_path))
        assert state_after(tmp_path, harness.session_id) == "ending"
        (tmp_path / "known").write_text(harness.session_id)
        os.kill(os.getpid(), signal.SIGKILL)

    run_to_its_death(life)
    session_id = (tmp_path / "known").read_text()
    clock = Clock()
    service = open_service(tmp_path, clock=clock)
    assert is_active(tmp_path, session_id)
    clock.wait(service, HOUSEKEEPING_S)
    assert not is_active(tmp_path, session_id)
    wait_until(lambda: files(tmp_path) == NAMED_CHECKPOINT_ONLY)
    service.stop()


# --- in a folder at rest -----------------------------------------------------------------------------------------


def run_to_its_death(life: Any) -> None:
    child = FORK.Process(target=life)
    child.start()
    child.join(HANG_S)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_without_a_process_that_serves_it_a_session_ends_at_once(tmp_path: Path, is_killed: bool) -> None:
    def life() -> None:
        service = open_service(tmp_path)
        harness, model_id = trained(service)
        other, _ = trained(service)
        harness.send("optim_step", model_id, 6, STEP)
        (tmp_path / "known").write_text(f"{harness.session_id} {other.session_id}")
        if not is_killed:
            service.stop()
        os.kill(os.getpid(), signal.SIGKILL)

    run_to_its_death(life)
    session_id, other_id = (tmp_path / "known").read_text().split()
    assert state_after(tmp_path, session_id) == "ended"
    assert not is_active(tmp_path, session_id) and is_active(tmp_path, other_id)
    assert files(tmp_path) == {"snapshots": 1, "published": 1, "checkpoints": 2}
    service = open_service(tmp_path)
    assert list(service.session_owners) == [other_id] and not service.pending.training
    error = failure(lambda: Harness(service, session_id, caller=ANN).create_model())
    assert isinstance(error, SessionEndedError)
    service.stop()


def test_a_session_that_is_not_there_is_named(tmp_path: Path) -> None:
    open_service(tmp_path).stop()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    unknown = end(tmp_path, "sess-none")
    assert unknown.exit_code == 1 and "sess-none" in unknown.stderr and len(unknown.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_folder_that_was_restored_without_its_locks_is_no_obstacle(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    harness, _ = trained(service)
    service.stop()
    for path in (tmp_path / "instances").iterdir():
        path.unlink()
    (tmp_path / "instances").rmdir()
    assert state_after(tmp_path, harness.session_id) == "ended"
    assert files(tmp_path) == NAMED_CHECKPOINT_ONLY
