"""A disk that cannot be written delays what was accepted, and fails none of it: all results keep their bits."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service_harness import (
    GOOD_PASS,
    STEP,
    Harness,
    Op,
    clean_results,
    failure,
    make_sampler,
    open_service,
    script,
    send_op,
    send_sample,
)
from waiting import HANG_S, wait_until

from mint.chaos.power_loss import path_of
from mint.errors import JournalError
from mint.server import storage_state
from mint.server.callers import LOCAL
from mint.server.limits import MAX_SNAPSHOTS
from mint.server.store import checkpoint_folders
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import recovery, samplers, snapshot_policy, snapshots


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_state, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(storage_state, "LONGEST_PAUSE_S", 0.02)


class FaultyDisk:
    """Lets writes of files and syncs fail, from the n-th on, for so many in a row; for ever until `repair`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self.writes = 0
        self.first, self.last, self.error = 1 << 60, 1 << 60, errno.ENOSPC
        fsync, replace, mkstemp = os.fsync, Path.replace, tempfile.mkstemp

        def faulty_fsync(handle: int) -> None:
            self._write(path_of(handle))
            fsync(handle)

        def faulty_replace(path: Path, target: Path) -> Path:
            self._write(Path(target))
            return replace(path, target)

        def faulty_mkstemp(*arguments: Any, **named: Any) -> tuple[int, str]:
            self._write(Path(named.get("dir") or "/"))
            return mkstemp(*arguments, **named)

        monkeypatch.setattr(os, "fsync", faulty_fsync)
        monkeypatch.setattr(Path, "replace", faulty_replace)
        monkeypatch.setattr(tempfile, "mkstemp", faulty_mkstemp)

    def fail(self, first: int, count: int, error: int) -> None:
        self.writes, self.first, self.last, self.error = 0, first, first + count - 1, error

    def break_down(self) -> None:
        self.fail(1, 1 << 60, errno.ENOSPC)

    def repair(self) -> None:
        self.first = 1 << 60

    def _write(self, path: Path) -> None:
        if not path.is_relative_to(self._data_dir):
            return
        with self._lock:
            self.writes += 1
            if self.first <= self.writes <= self.last:
                raise OSError(self.error, os.strerror(self.error))


def patiently(send: Callable[[], str]) -> str:
    """Sends a request as clients do: again, while the server says 503."""
    give_up_at = time.monotonic() + HANG_S
    while True:
        try:
            return send()
        except JournalError:
            assert time.monotonic() < give_up_at
            time.sleep(0.005)


STRIDE = 8
"""Each of the four faults below strikes at every eighth write, and together they strike at every second one."""


@pytest.mark.parametrize("small_bytes", [100_000_000, 100], ids=["small states", "large states"])
@pytest.mark.parametrize(
    ("error", "first", "count"), [(errno.ENOSPC, 1, 5), (errno.EIO, 3, 1), (errno.EROFS, 5, 3), (errno.EMFILE, 7, 2)]
)
def test_any_write_may_fail_and_nothing_accepted_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, first: int, count: int, small_bytes: int
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", small_bytes)
    monkeypatch.setattr(snapshot_policy, "LARGE_INTERVAL_S", 0.0)
    ops = script(4)
    clean = clean_results(tmp_path / "clean", ops)
    disk = FaultyDisk(monkeypatch, tmp_path)
    while run_struck(tmp_path / f"struck{first}", disk, ops, clean, fault=(first, count, error)):
        first += STRIDE
    assert first > 3 * STRIDE


def run_struck(
    data_dir: Path, disk: FaultyDisk, ops: list[Op], clean: tuple[dict[int, bytes], str], fault: tuple[int, int, int]
) -> bool:
    """Runs a script while some of its writes fail, and compares; False once it makes fewer writes."""
    service = open_service(data_dir)
    harness = Harness(service)
    model_id = harness.create_model()
    disk.fail(*fault)
    results: dict[int, bytes] = {}
    for i in range(len(ops)):
        body = harness.answer(patiently(lambda i=i: send_op(harness, model_id, ops, i)))
        results[i] = body.replace(harness.session_id.encode(), b"SESSION")
    is_struck = disk.writes >= disk.first
    disk.repair()
    wait_until(lambda: service.storage_problem is None)
    assert {i for i, body in results.items() if body != clean[0][i]} == set(), f"write {fault[0]} failed"
    harness.restore(model_id)
    assert harness.digest(model_id) == clean[1]
    service.stop()
    return is_struck


def test_a_full_disk_delays_a_step_and_sampling_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk(monkeypatch, tmp_path)
    service = open_service(tmp_path)
    harness = Harness(service)
    model_id, sampler = harness.create_model(), make_sampler(harness)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    go_on = threading.Event()

    def hold() -> None:
        go_on.wait(HANG_S)

    service.call_soon(hold)
    step = harness.send("optim_step", model_id, 2, STEP)  # accepted, and then the disk is full
    disk.break_down()
    go_on.set()
    wait_until(lambda: service.storage_problem is not None)
    assert "No space left on device" in str(service.storage_problem)
    for seq_id in range(20):
        assert harness.sample(sampler, seq_id)["sequences"]
    with pytest.raises(JournalError, match=r"storage has not been working since .*No space left on device"):
        harness.send("forward_backward", model_id, 3, GOOD_PASS)
    wait_until(lambda: "storage has not been working" in service.results.queue_position(LOCAL, step).reason)
    assert service.results.queue_position(LOCAL, step).status == "held"
    row = harness.stored(lambda journal: journal.job(model_id, 2))
    assert row is not None and row.status == "pending"
    disk.repair()
    assert harness.wait(step)["state_digest"]
    assert service.storage_problem is None
    harness.run("forward_backward", model_id, 3, GOOD_PASS)
    service.stop()


def test_a_service_stops_while_its_disk_is_full_and_the_next_one_runs_what_was_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops: list[Op] = [("forward_backward", GOOD_PASS), ("optim_step", STEP)]
    clean, _ = clean_results(tmp_path / "clean", ops)
    disk = FaultyDisk(monkeypatch, tmp_path)
    service = open_service(tmp_path / "data")
    harness = Harness(service)
    model_id = harness.create_model()
    send_op(harness, model_id, ops, 0)
    go_on = threading.Event()

    def hold() -> None:
        go_on.wait(HANG_S)

    service.call_soon(hold)
    step = harness.send("optim_step", model_id, 2, STEP)
    disk.break_down()
    go_on.set()
    wait_until(lambda: service.storage_problem is not None)
    service.stop()
    disk.repair()
    service = open_service(tmp_path / "data")
    assert Harness(service, harness.session_id).answer(step) == clean[1]
    service.stop()


def test_requests_behind_one_that_was_refused_for_a_full_disk_are_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(monkeypatch, tmp_path)
    service = open_service(tmp_path, gap_timeout_s=1.0)
    harness = Harness(service)
    model_id = harness.create_model()
    second = harness.send("forward_backward", model_id, 2, GOOD_PASS)
    disk.break_down()
    failure(lambda: harness.send("forward_backward", model_id, 1, GOOD_PASS))
    time.sleep(1.5)  # longer than a missing request is waited for
    disk.repair()
    wait_until(lambda: service.storage_problem is None)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    assert harness.wait(second)["loss_fn_outputs"]
    service.stop()


def test_a_database_that_is_locked_delays_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.server.store.database.BUSY_TIMEOUT_S", 0.1)
    ops = script(2)
    clean, _ = clean_results(tmp_path / "clean", ops)
    service = open_service(tmp_path / "data")
    harness = Harness(service)
    model_id = harness.create_model()
    other = sqlite3.connect(tmp_path / "data" / JOURNAL_FILE, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalError):
        send_op(harness, model_id, ops, 0)
    assert "locked" in str(service.storage_problem)
    threading.Timer(0.5, other.execute, ("ROLLBACK",)).start()
    results = {i: harness.answer(patiently(lambda i=i: send_op(harness, model_id, ops, i))) for i in range(len(ops))}
    session = harness.session_id.encode()
    assert {i: body.replace(session, b"SESSION") for i, body in results.items()} == clean
    other.close()
    service.stop()


def test_a_data_directory_that_is_moved_away_delays_what_was_accepted_until_it_is_back(tmp_path: Path) -> None:
    ops: list[Op] = [("forward_backward", GOOD_PASS), ("optim_step", STEP)]
    clean, _ = clean_results(tmp_path / "clean", ops)
    data_dir, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    service = open_service(data_dir)
    harness = Harness(service)
    model_id = harness.create_model()
    data_dir.rename(elsewhere)
    with pytest.raises(JournalError, match="No such file or directory"):
        send_op(harness, model_id, ops, 0)
    with pytest.raises(JournalError, match=r"storage has not been working since .*No such file or directory"):
        send_op(harness, model_id, ops, 1)
    shutil.rmtree(data_dir, ignore_errors=True)  # of what was tried since
    elsewhere.rename(data_dir)
    wait_until(lambda: service.storage_problem is None)
    results = {i: harness.answer(patiently(lambda i=i: send_op(harness, model_id, ops, i))) for i in range(len(ops))}
    session = harness.session_id.encode()
    assert {i: body.replace(session, b"SESSION") for i, body in results.items()} == clean
    service.stop()


def test_a_model_is_not_given_up_because_the_disk_fails_while_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = open_service(tmp_path)
    harness = Harness(service)
    model_id = harness.create_model()
    for seq_id in (1, 3):
        harness.run("forward_backward", model_id, seq_id, GOOD_PASS)
        digest = harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"]
    service.stop()
    service = open_service(tmp_path)
    reads: list[str] = []
    read = Journal.snapshots

    def fail_once(journal: Journal, name: str) -> Any:
        reads.append(name)
        if len(reads) == 1:
            raise JournalError("the journal cannot be used: disk I/O error")
        return read(journal, name)

    monkeypatch.setattr(Journal, "snapshots", fail_once)
    monkeypatch.setattr("mint.server.worker.worker.JOURNAL_RETRY_S", 0.01)
    harness2 = Harness(service, harness.session_id)
    harness2.run("forward_backward", model_id, 5, GOOD_PASS)
    assert len(reads) == 2 and harness2.digest(model_id) == digest
    service.stop()


OUT_OF_DESCRIPTORS_CALLS = MAX_SNAPSHOTS + 1


def test_a_model_is_not_given_up_because_descriptors_run_out_while_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.server.worker.worker.JOURNAL_RETRY_S", 0.01)
    service = open_service(tmp_path)
    harness = Harness(service)
    model_id = harness.create_model()
    for seq_id in (1, 3, 5, 7):
        harness.run("forward_backward", model_id, seq_id, GOOD_PASS)
        digest = harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"]
    harness.run("save_weights", model_id, 9, {"path": "kept"})
    service.stop()
    service = open_service(tmp_path)
    struck = [
        run_out_of_descriptors(monkeypatch, recovery, "read_snapshot"),
        run_out_of_descriptors(monkeypatch, checkpoint_folders, "check_files"),
    ]
    harness2 = Harness(service, harness.session_id)
    harness2.restore(model_id)
    harness2.run("load_weights", model_id, 11, {"path": f"mint://{model_id}/weights/kept", "optimizer": True})
    assert min(map(len, struck)) > OUT_OF_DESCRIPTORS_CALLS
    assert harness2.digest(model_id) == digest
    service.stop()


@pytest.mark.parametrize("is_saved", [False, True], ids=["published", "saved"])
def test_a_sample_waits_for_the_descriptors_that_its_weights_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    monkeypatch.setattr("mint.server.worker.worker.JOURNAL_RETRY_S", 0.01)
    service = open_service(tmp_path)
    harness = Harness(service)
    model_id = harness.create_model()
    if is_saved:
        path = harness.run("save_weights_for_sampler", model_id, 1, {"path": "kept"})["path"]
        sampler = make_sampler(harness, path=path)
    else:
        published = harness.run("save_weights_for_sampler", model_id, 1, {"sampling_session_seq_id": 0})
        sampler = published["sampling_session_id"]
    expected = harness.wait(send_sample(harness, sampler, 1))
    service.stop()
    service = open_service(tmp_path)
    read = (checkpoint_folders, "check_files") if is_saved else (samplers, "read_weights")
    struck = run_out_of_descriptors(monkeypatch, *read)
    harness2 = Harness(service, harness.session_id)
    name = send_sample(harness2, sampler, 1)
    assert harness2.wait(send_sample(harness2, make_sampler(harness2, 7), 0))["sequences"]
    assert harness2.wait(name)["sequences"] == expected["sequences"]
    assert len(struck) > OUT_OF_DESCRIPTORS_CALLS and service.sampled_sequences == 0
    service.stop()


def test_a_client_is_told_that_its_sample_waits_for_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.server.worker.worker.JOURNAL_RETRY_S", 0.01)
    service = open_service(tmp_path)
    harness = Harness(service)
    published = harness.run("save_weights_for_sampler", harness.create_model(), 1, {"sampling_session_seq_id": 0})
    service.stop()
    service = open_service(tmp_path)
    there_are_some = threading.Event()
    read_weights = samplers.read_weights

    def without_descriptors(*arguments: Any, **named: Any) -> Any:
        if not there_are_some.is_set():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(tmp_path / "published"))
        return read_weights(*arguments, **named)

    monkeypatch.setattr(samplers, "read_weights", without_descriptors)
    harness = Harness(service, harness.session_id)
    name = send_sample(harness, published["sampling_session_id"], 1)
    wait_until(lambda: "cannot be run now" in service.results.queue_position(LOCAL, name).reason)
    told = service.results.queue_position(LOCAL, name).body(name)
    assert (told["status"], told["queue_state"]) == ("held", "paused_capacity")
    assert "Too many open files" in told["queue_state_reason"] and str(tmp_path) not in str(told)
    there_are_some.set()
    assert harness.wait(name)["sequences"]
    service.stop()


def run_out_of_descriptors(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """The first calls of a function find no descriptor; returns the list of its calls."""
    calls: list[str] = []
    function = getattr(module, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(calls) <= OUT_OF_DESCRIPTORS_CALLS:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            return function(*arguments, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    monkeypatch.setattr(module, name, call)
    return calls


@pytest.mark.parametrize("end", ["unload_model", "finish"])
def test_an_end_that_cannot_be_written_takes_nothing_that_was_accepted(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    service, paused, go_on = harness.service, threading.Event(), threading.Event()
    service.call_soon(lambda: (paused.set(), go_on.wait()))
    assert paused.wait(HANG_S)
    for seq_id, (kind, body) in enumerate([("forward_backward", GOOD_PASS), ("optim_step", STEP)], start=1):
        harness.send(kind, model_id, seq_id, body)
    with monkeypatch.context() as patch:
        for name in ("end_model", "end_session"):
            patch.setattr(Journal, name, _out_of_space)
        with pytest.raises(JournalError):
            if end == "finish":
                service.sessions.finish(LOCAL, harness.session_id)
            else:
                service.sessions.unload_model(LOCAL, model_id)
    go_on.set()
    assert harness.wait(f"{model_id}:1") and harness.wait(f"{model_id}:2")["state_digest"]
    assert harness.run("forward_backward", model_id, 3, GOOD_PASS)
    service.sessions.finish(LOCAL, harness.session_id)
    service.stop()


def _out_of_space(*_: object) -> None:
    raise JournalError("the journal cannot be written: no space left")
