"""An owner takes a bounded part of the journal, and what nobody needs leaves it; other owners do not notice."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from service_harness import (
    BASE,
    GOOD_PASS,
    STEP,
    Harness,
    datum,
    failure,
    make_sampler,
    open_service,
    pass_body,
    stored,
)
from waiting import wait_until

from mint.errors import NotFoundError, QuotaExceededError, SessionEndedError, StepRefusedError
from mint.server import journal_use
from mint.server.callers import Caller, Quotas
from mint.server.limits import ROW_BYTES
from mint.server.service.service import ENDED_KEPT_S, Service
from mint.server.store.database import insert
from mint.server.store.journal import FORGOTTEN_AT_ONCE, JOURNAL_FILE, Journal, record_bytes, request_bytes
from mint.server.store.rows import CheckpointRow, SessionRow, TrainingRunRow
from mint.server.worker import snapshots
from mint.server.worker.worker import HOUSEKEEPING_S

QUOTA = 1 << 20
ANN = Caller("ann", quotas=Quotas(max_journal_bytes=QUOTA))
LARGE_PASS = pass_body(*[datum(*[3] * 500)] * 20)
LARGE_METADATA = json.dumps({"user_metadata": {"note": "x" * 200_000}}).encode()


@pytest.fixture(autouse=True)
def use_is_read_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long reading takes on a busy machine."""
    monkeypatch.setattr(journal_use, "FULL_TIMES_APART", 0)


@pytest.fixture
def ann(tmp_path: Path) -> Any:
    service = open_service(tmp_path)
    yield Harness(service, caller=ANN)
    service.stop()


def used(service: Service, owner: str = "ann") -> int:
    return stored(
        service.data_dir,
        lambda journal: request_bytes(journal.database, owner) + record_bytes(journal.database, owner),
    )


def passes_until_refused(harness: Harness, model_id: str, *, first_seq: int = 1) -> int:
    """Sends large passes without a step; the number of the first one that fails for the quota."""
    for seq_id in range(first_seq, first_seq + 100):
        try:
            harness.run("forward_backward", model_id, seq_id, LARGE_PASS)
        except QuotaExceededError as error:
            assert error.field == "max_journal_bytes" and str(QUOTA) in str(error) and "optim_step" in str(error)
            return seq_id
    raise AssertionError("no pass was refused")


def test_passes_without_a_step_stay_within_the_owners_quota_and_another_owner_trains_on(ann: Harness) -> None:
    bob = Harness(ann.service, caller=Caller("bob", quotas=Quotas(max_journal_bytes=QUOTA)))
    mine, bobs = ann.create_model(), bob.create_model()
    refused = passes_until_refused(ann, mine)
    assert 2 < refused < 30
    assert job_payload(ann, f"{mine}:{refused}") is None
    # Never half a step. Then there is room again, without help from anybody.
    assert isinstance(failure(lambda: ann.run("optim_step", mine, refused + 1, STEP)), StepRefusedError)
    assert used(ann.service) < QUOTA / 2
    ann.run("forward_backward", mine, refused + 2, LARGE_PASS)
    ann.run("optim_step", mine, refused + 3, STEP)
    for step in range(3):
        bob.run("forward_backward", bobs, 2 * step + 1, LARGE_PASS)
        bob.run("optim_step", bobs, 2 * step + 2, STEP)


def test_a_loop_that_steps_never_comes_near_its_quota(ann: Harness) -> None:
    model_id = ann.create_model()
    for step in range(30):
        ann.run("forward_backward", model_id, 2 * step + 1, GOOD_PASS)
        ann.run("optim_step", model_id, 2 * step + 2, STEP)
    assert used(ann.service) < QUOTA / 4


@pytest.mark.parametrize("models", [1, 12])
def test_a_loop_whose_snapshots_are_rare_trains_on_beyond_its_quota_and_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: int
) -> None:
    monkeypatch.setattr(snapshots, "is_due", lambda times, *, is_small: False)  # as of a large state on a slow disk
    harness = Harness(open_service(tmp_path), caller=ANN)
    names = [harness.create_model(number) for number in range(models)]
    digests = {}
    for step in range(160 // models):
        for name in names:
            harness.run("forward_backward", name, 2 * step + 1, LARGE_PASS)
            digests[name] = harness.run("optim_step", name, 2 * step + 2, STEP)["state_digest"]
    assert harness.run("save_weights", names[0], 2 * step + 3, {"path": "final"})["path"]
    assert used(harness.service) < QUOTA
    harness.service.stop()
    harness = Harness(open_service(tmp_path), harness.session_id, caller=ANN)
    harness.restore(names[-1])
    assert harness.digest(names[-1]) == digests[names[-1]]
    harness.service.stop()


def test_near_the_quota_unread_results_of_passes_may_be_gone_after_a_crash_and_nothing_else_is(tmp_path: Path) -> None:
    ann = Harness(open_service(tmp_path), caller=ANN)
    for _ in range(3):  # more than half of the quota
        ann.service.sessions.create(ANN, LARGE_METADATA)
    trained, scored = ann.create_model(0), ann.create_model(1)
    ann.run("forward_backward", trained, 1, GOOD_PASS)
    step = ann.run("optim_step", trained, 2, STEP)
    forward = {"forward_input": LARGE_PASS["forward_backward_input"]}
    results = [ann.run("forward", scored, seq_id, forward) for seq_id in range(1, 9)]
    ann.service.stop()  # what is in memory is gone
    ann = Harness(open_service(tmp_path), ann.session_id, caller=ANN)
    error = failure(lambda: ann.wait(f"{scored}:1"))
    assert isinstance(error, NotFoundError) and "max_journal_bytes" in str(error)
    assert ann.wait(f"{scored}:8") == results[-1]
    assert ann.wait(f"{trained}:2") == step
    ann.restore(trained)
    assert ann.digest(trained) == step["state_digest"]
    ann.service.stop()


def test_a_model_can_be_saved_when_steps_are_no_longer_accepted(ann: Harness) -> None:
    model_id, full = ann.create_model(0), ann.create_model(1)
    with pytest.raises(QuotaExceededError):
        for seq_id in range(2, 2 * QUOTA // ROW_BYTES):  # they wait for request 1
            ann.send("optim_step", full, seq_id, STEP)
    with pytest.raises(QuotaExceededError):
        ann.run("optim_step", model_id, 1, STEP)
    assert ann.run("save_weights", model_id, 1, {"path": "final"})["path"]
    ann.service.sessions.finish(ANN, ann.session_id)


def test_a_copy_of_an_accepted_request_is_recognized_though_the_quota_is_used_up(ann: Harness) -> None:
    model_id = ann.create_model()
    refused = passes_until_refused(ann, model_id)
    assert ann.send("forward_backward", model_id, 1, LARGE_PASS) == f"{model_id}:1"
    error = failure(lambda: ann.run("forward_backward", model_id, refused, LARGE_PASS))
    assert isinstance(error, QuotaExceededError)


def test_a_request_without_room_fails_for_that_after_a_restart_too(tmp_path: Path) -> None:
    ann = Harness(open_service(tmp_path), caller=ANN)
    model_id = ann.create_model()
    waiting = [ann.send("forward_backward", model_id, seq_id, LARGE_PASS) for seq_id in range(2, 40)]  # for request 1
    without_room = [name for name in waiting if job_payload(ann, name) is None]
    assert 5 < len(without_room) < len(waiting) - 5
    ann.service.stop()
    ann = Harness(open_service(tmp_path), ann.session_id, caller=ANN)
    ann.send("forward_backward", model_id, 1, GOOD_PASS)
    for name in waiting:
        if name in without_room:
            assert isinstance(failure(lambda name=name: ann.wait(name)), QuotaExceededError)
        else:
            assert ann.wait(name)["loss_fn_outputs"]
    ann.service.stop()


def job_payload(harness: Harness, request_id: str) -> bytes | None:
    model_id, _, seq_id = request_id.rpartition(":")
    row = harness.stored(lambda journal: journal.job(model_id, int(seq_id)))
    assert row is not None
    return row.payload


def test_once_errors_have_no_room_either_requests_are_refused_without_a_row(ann: Harness) -> None:
    model_id = ann.create_model()
    small = {"optimizer_params": None, **STEP, "note": "x" * 3000}
    for seq_id in range(2, 2000):  # they wait for request 1
        try:
            ann.send("optim_step", model_id, seq_id, small)
        except QuotaExceededError as error:
            assert error.status == 403
            assert ann.stored(lambda journal: journal.job(model_id, seq_id)) is None  # noqa: B023
            break
    else:
        raise AssertionError("no request was refused")
    assert used(ann.service) < 1.2 * QUOTA


def test_metadata_of_living_sessions_and_models_count(ann: Harness) -> None:
    service = ann.service
    error = failure(lambda: [service.sessions.create(ANN, LARGE_METADATA) for _ in range(20)])
    assert isinstance(error, QuotaExceededError) and error.status == 403
    model = {"session_id": ann.session_id, "model_seq_id": 0, "base_model": BASE, "user_metadata": {"n": "x" * 40_000}}
    error = failure(lambda: service.training.submit(ANN, "create_model", json.dumps(model).encode()))
    assert isinstance(error, QuotaExceededError)
    assert used(service) <= QUOTA


def test_samplers_count(ann: Harness) -> None:
    error = failure(lambda: [make_sampler(ann, number) for number in range(QUOTA // ROW_BYTES + 10)])
    assert isinstance(error, QuotaExceededError)


def test_ended_sessions_make_room_for_new_ones_and_those_with_a_checkpoint_stay(ann: Harness) -> None:
    service = ann.service
    model_id = ann.create_model()
    ann.run("save_weights", model_id, 1, {"path": "kept"})
    service.sessions.finish(ANN, ann.session_id)
    for _ in range(40):  # 8 MB of metadata
        session_id = service.sessions.create(ANN, LARGE_METADATA).session_id
        service.sessions.finish(ANN, session_id)
        assert used(service) <= QUOTA
    assert isinstance(failure(lambda: service.sessions.finish(ANN, session_id)), SessionEndedError)
    assert ann.stored(lambda journal: journal.session(ann.session_id) and journal.run(model_id)) is not None


def test_the_records_of_sessions_that_ended_long_ago_go_in_batches(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    old = [service.sessions.create(ANN, b"{}").session_id for _ in range(FORGOTTEN_AT_ONCE + 3)]
    recent, living = (Harness(service) for _ in range(2))
    models = [recent.create_model(), living.create_model()]
    for session_id in old:
        service.sessions.finish(ANN, session_id)
    service.sessions.finish(recent.caller, recent.session_id)
    service.stop()
    long_ago = time.time() - ENDED_KEPT_S
    with closing(Journal(tmp_path / JOURNAL_FILE)) as journal:
        journal.database.write("UPDATE sessions SET ended_at = :then WHERE owner = 'ann'", then=long_ago - 3600)
        assert journal.forget_ended(before=long_ago) == FORGOTTEN_AT_ONCE

    clock = [0.0]
    service = open_service(tmp_path, clock=lambda: clock[0])
    clock[0] += HOUSEKEEPING_S
    service.call_soon(lambda: None)  # wakes the worker, which keeps house
    wait_until(lambda: not any(stored(tmp_path, lambda journal, name=name: journal.session(name)) for name in old))
    for harness, model_id in zip((recent, living), models, strict=True):
        assert harness.stored(lambda journal, one=harness: journal.session(one.session_id))
        assert harness.stored(lambda journal, name=model_id: journal.run(name))
    service.stop()


def bytes_read() -> int:
    """How many bytes this process has read from files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.removeprefix("rchar: ")) for line in lines if line.startswith("rchar: "))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count what is read")
def test_an_owners_metadata_are_counted_without_reading_them(tmp_path: Path) -> None:
    metadata = {"note": "x" * 200_000}
    size = len(json.dumps(metadata))
    with closing(Journal(tmp_path / JOURNAL_FILE)) as journal, journal.database.transaction() as transaction:
        for number in range(40):
            name = f"{number}:train:0"
            session = SessionRow(str(number), "i", metadata, 0.0, owner="ann", details=metadata)
            run = TrainingRunRow(name, str(number), "ann", 0.0, 0.0, user_metadata=metadata)
            checkpoint = CheckpointRow(name, "weights", "w", "f", 0.0, owner="ann", user_metadata=metadata)
            for table, row in (("sessions", session), ("runs", run), ("checkpoints", checkpoint)):
                transaction.execute(insert(type(row), table), **vars(row))
    with closing(Journal(tmp_path / JOURNAL_FILE)) as journal:  # with nothing in its cache
        before = bytes_read()
        assert record_bytes(journal.database, "ann") == 40 * (4 * size + 3 * ROW_BYTES)
        assert bytes_read() - before < size
