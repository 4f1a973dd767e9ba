"""What is new is refused before the disk is full; what runs goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service_harness import BASE, GOOD_PASS, STEP, Harness, failure, make_sampler, open_service, stored
from waiting import wait_until

from mint.errors import JournalError, OverloadedError
from mint.server.callers import LOCAL
from mint.server.disk_space import DiskSpace
from mint.server.limits import ServerLimits, default_reserve
from mint.server.service.service import Service
from mint.server.worker.samplers import MIN_RETAINED

MIB = 1 << 20


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the disk has less room than the reserve: set it with `short[0]`."""
    state = [False]
    monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: disk.reserve_bytes - 1 if state[0] else 1 << 40))
    return state


def test_new_passes_models_and_named_saves_are_refused_below_the_reserve_and_accepted_work_goes_on(
    tmp_path: Path, short: list[bool]
) -> None:
    harness = Harness(open_service(tmp_path, limits=ServerLimits(disk_reserve_bytes=7 * MIB)))
    model_id = harness.create_model()
    accepted = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    short[0] = True
    error = failure(lambda: harness.create_model(1))
    assert isinstance(error, OverloadedError) and error.field == "disk_reserve" and str(7 * MIB) in str(error)
    assert "MINT_DISK_RESERVE_MIB" in str(error)
    assert harness.send("forward_backward", model_id, 1, GOOD_PASS) == accepted
    harness.wait(accepted)
    harness.run("optim_step", model_id, 2, STEP)
    for kind, body in (
        ("forward_backward", GOOD_PASS),
        ("forward_backward", {**GOOD_PASS, "forward_only": True}),
        ("forward", {"forward_input": GOOD_PASS["forward_backward_input"]}),
    ):
        error = failure(lambda kind=kind, body=body: harness.send(kind, model_id, 3, body))
        assert isinstance(error, JournalError) and error.status == 503 and error.field == "disk_reserve"
    assert isinstance(failure(lambda: harness.run("save_weights", model_id, 3, {"path": "a"})), OverloadedError)
    sampler = harness.run("save_weights_for_sampler", model_id, 4, {"sampling_session_seq_id": 0})
    assert harness.sample(sampler["sampling_session_id"], 0)
    short[0] = False
    assert harness.run("save_weights", model_id, 5, {"path": "a"})["path"]
    assert harness.create_model(2)
    harness.service.stop()


def test_new_sessions_and_models_leave_nothing_in_the_journal_while_the_disk_is_short(
    tmp_path: Path, short: list[bool]
) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    sampler = make_sampler(harness)
    service = harness.service
    kept = service.sessions.create(LOCAL, b'{"request_key": "%s"}' % (b"0" * 32)).session_id
    short[0] = True
    before = counted(service)
    model = {"model_seq_id": 1, "base_model": BASE}
    for refused in (
        lambda: service.sessions.create(LOCAL, b"{}"),
        lambda: harness.submit("create_model", {"session_id": harness.session_id, **model}),
        lambda: harness.submit("create_model", {"session_id": "chosen-by-a-client", **model}),
        lambda: make_sampler(harness, 1),
    ):
        error = failure(refused)
        assert isinstance(error, OverloadedError) and error.field == "disk_reserve"
    assert counted(service) == before
    # What there is goes on: a repeated request, a heartbeat, training, and every end.
    assert service.sessions.create(LOCAL, b'{"request_key": "%s"}' % (b"0" * 32)).session_id == kept
    assert harness.create_model() == model_id
    service.sessions.heartbeat(LOCAL, json.dumps({"session_id": kept}).encode())
    harness.run("optim_step", model_id, 2, STEP)
    assert make_sampler(harness) == sampler
    assert harness.sample(sampler, 0)
    service.sessions.unload_model(LOCAL, model_id)
    service.sessions.finish(LOCAL, kept)
    service.stop()


def counted(service: Service) -> list[int]:
    """How many rows each table has that a new session or model adds to."""
    tables = ("sessions", "models", "runs", "jobs", "samplers")
    return [
        stored(service.data_dir, lambda journal, name=name: journal.database.value(f"SELECT count(*) FROM {name}"))
        for name in tables
    ]


def test_a_save_that_waited_while_the_disk_filled_up_fails_in_its_turn(tmp_path: Path, short: list[bool]) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    waiting = harness.send("save_weights", model_id, 2, {"path": "a"})
    short[0] = True
    harness.run("optim_step", model_id, 1, STEP)
    assert isinstance(failure(lambda: harness.wait(waiting)), OverloadedError)
    assert not list((tmp_path / "checkpoints").iterdir())
    harness.run("optim_step", model_id, 3, STEP)
    harness.service.stop()


def test_a_load_which_writes_a_snapshot_is_refused_below_the_reserve(tmp_path: Path, short: list[bool]) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    saved = harness.run("save_weights", model_id, 1, {"path": "kept"})["path"]
    short[0] = True
    error = failure(lambda: harness.run("load_weights", model_id, 2, {"path": saved, "optimizer": True}))
    assert isinstance(error, OverloadedError) and error.field == "disk_reserve"
    assert harness.stored(lambda journal: journal.snapshots(model_id)) == []
    short[0] = False
    assert harness.run("load_weights", model_id, 3, {"path": saved, "optimizer": True})
    harness.service.stop()


def test_a_load_whose_snapshot_would_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    saved = harness.run("save_weights", model_id, 1, {"path": "kept"})["path"]
    load = {"path": saved, "optimizer": True}
    monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: disk.reserve_bytes + 16))
    error = failure(lambda: harness.run("load_weights", model_id, 2, load))
    assert isinstance(error, OverloadedError) and error.field == "disk_reserve" and "more are needed" in str(error)
    assert harness.stored(lambda journal: journal.snapshots(model_id)) == []
    monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: disk.reserve_bytes + MIB))
    assert harness.run("load_weights", model_id, 3, load)
    harness.service.stop()


def test_while_the_disk_is_short_fewer_unnamed_samplers_are_kept(tmp_path: Path, short: list[bool]) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    for number in range(MIN_RETAINED + 10):
        short[0] = number == MIN_RETAINED + 9
        harness.run("save_weights_for_sampler", model_id, number + 1, {"sampling_session_seq_id": number})
    wait_until(lambda: len(list((tmp_path / "published").iterdir())) == MIN_RETAINED)
    harness.service.stop()


def test_the_reserve_is_a_share_of_the_disk_and_no_more_than_two_gigabytes(tmp_path: Path) -> None:
    assert default_reserve(64 * MIB) == int(0.02 * 64 * MIB)
    assert default_reserve(10_000_000 * MIB) == 2048 * MIB
    assert 0 < DiskSpace(tmp_path).reserve_bytes <= 2048 * MIB < 1 << 40
