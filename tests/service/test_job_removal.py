"""The jobs of an ended session leave the journal in short transactions; a death in between loses nothing of that."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import closing
from pathlib import Path

import pytest
from service_harness import GOOD_PASS, STEP, Harness, open_service, stored
from waiting import HANG_S, wait_until

from mint.server.service.service import Service
from mint.server.store import journal as journal_module
from mint.server.store.journal import JOURNAL_FILE, REMOVED_AT_ONCE, Finish, Journal
from mint.server.store.rows import JobRow, ModelRow, SessionRow, SnapshotRow, TrainingRunRow

FORK = multiprocessing.get_context("fork")
MODEL = "s:train:0"
COUNT = "SELECT count(*) FROM jobs WHERE model_id = :model_id"


def journal_with_jobs(folder: Path, count: int, *, payload: bytes = b"{}") -> Journal:
    """A session with one model and so many jobs, the last of which is pending."""
    journal = Journal(folder / JOURNAL_FILE)
    journal.add_session(SessionRow("s", "i", None, 0.0))
    run = TrainingRunRow(MODEL, "s", "local", 0.0, 0.0)
    for seq_id in range(count):
        status = "pending" if seq_id == count - 1 else "done"
        row = JobRow(MODEL, seq_id, "optim_step", payload, "", status)
        journal.add_job(row, now=0.0, model=None if seq_id else ModelRow(MODEL, "s"), run=None if seq_id else run)
    return journal


def job_count(service: Service, model_id: str) -> int:
    return stored(service.data_dir, lambda journal: journal.database.value(COUNT, model_id=model_id))


def with_steps(service: Service, count: int) -> tuple[Harness, str]:
    harness = Harness(service)
    model_id = harness.create_model()
    for step in range(count):
        harness.run("forward_backward", model_id, 2 * step + 1, GOOD_PASS)
        harness.run("optim_step", model_id, 2 * step + 2, STEP)
    return harness, model_id


@pytest.mark.parametrize("end", ["end_session", "end_model"])
def test_one_transaction_removes_a_bounded_number_of_jobs(tmp_path: Path, end: str) -> None:
    with closing(journal_with_jobs(tmp_path, 2 * REMOVED_AT_ONCE + 3)) as journal:
        getattr(journal, end)("s" if end == "end_session" else MODEL, 1.0)
        assert journal.model(MODEL) is None
        left = [journal.database.value(COUNT, model_id=MODEL)]
        while journal.remove_jobs(journal.ended_models()):
            left.append(journal.database.value(COUNT, model_id=MODEL))
        assert left == [REMOVED_AT_ONCE + 3, 3, 0]
        assert journal.ended_models() == []


def test_one_transaction_removes_a_bounded_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "REMOVED_BYTES_AT_ONCE", 1000)
    with closing(journal_with_jobs(tmp_path, 5, payload=b"x" * 600)) as journal:
        journal.end_session("s", 1.0)
        assert journal.database.value(COUNT, model_id=MODEL) == 3
        journal.remove_jobs([MODEL])
        assert journal.database.value(COUNT, model_id=MODEL) == 1


def test_a_job_that_ends_after_its_model_leaves_nothing(tmp_path: Path) -> None:
    count = REMOVED_AT_ONCE + 3
    with closing(journal_with_jobs(tmp_path, count)) as journal:
        journal.end_session("s", 1.0)
        snapshot = SnapshotRow(MODEL, count - 1, "snapshots/late", "digest")
        assert not journal.finish_job(Finish(MODEL, count - 1, "done", b"{}", snapshot=snapshot))
        assert journal.snapshots(MODEL) == []


def test_the_id_of_a_session_is_not_free_before_its_jobs_are_gone(tmp_path: Path) -> None:
    with closing(journal_with_jobs(tmp_path, REMOVED_AT_ONCE + 3)) as journal:
        journal.end_session("s", 1.0)
        assert journal.forget_ended(before=2.0) == 0
        journal.remove_jobs([MODEL])
        assert journal.forget_ended(before=2.0) == 1
        assert journal.session("s") is None


@pytest.mark.parametrize("end", ["finish", "unload_model"])
def test_a_service_removes_all_jobs_of_what_has_ended_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(journal_module, "REMOVED_AT_ONCE", 3)
    service = open_service(tmp_path)
    (ended, gone), (living, kept) = with_steps(service, 10), with_steps(service, 10)
    getattr(service.sessions, end)(ended.caller, ended.session_id if end == "finish" else gone)
    wait_until(lambda: job_count(service, gone) == 0)
    assert job_count(service, kept) == 21
    living.run("forward_backward", kept, 21, GOOD_PASS)
    service.stop()


def end_and_die(folder: Path, session_id: str) -> None:
    """Ends a session in this process, which dies after two batches."""
    journal_module.REMOVED_AT_ONCE = 2
    batches = []
    remove_jobs = Journal.remove_jobs

    def counted(journal: Journal, models: list[str]) -> bool:
        if len(batches) == 2:
            os._exit(9)
        batches.append(models)
        return remove_jobs(journal, models)

    Journal.remove_jobs = counted
    harness = Harness(open_service(folder), session_id)
    harness.service.sessions.finish(harness.caller, session_id)
    wait_until(lambda: False)


def test_the_next_process_goes_on_with_a_removal_in_which_the_last_one_died(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    harness, model_id = with_steps(service, 10)
    service.stop()
    process = FORK.Process(target=end_and_die, args=(tmp_path, harness.session_id))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 9
    assert stored(tmp_path, lambda journal: journal.database.value(COUNT, model_id=model_id)) == 21 - 3 * 2
    service = open_service(tmp_path)
    wait_until(lambda: job_count(service, model_id) == 0)
    service.stop()
