"""A loss of power takes what was not synced to the disk: all that was accepted is done again, and ends in the same."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from default_engine import fake_engine
from service_harness import GOOD_PASS, STEP, Harness, Op, open_service, script, send_op
from waiting import wait_until

from mint.chaos.power_loss import Disk, path_of
from mint.engine.fake_engine import FakeEngine
from mint.errors import JournalError
from mint.server import storage_state
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import snapshot_policy, snapshots


@pytest.fixture(params=[0, 10_000], ids=["small states", "large states"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Harness, Disk]:
    if request.param:
        monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 100)
        monkeypatch.setattr(snapshot_policy, "LARGE_INTERVAL_S", 0.0)
    disk = Disk(tmp_path / "data", lambda fsync: monkeypatch.setattr(os, "fsync", fsync))
    service = open_service(tmp_path / "data", engine=FakeEngine(state_bytes=request.param))
    request.addfinalizer(service.stop)
    return Harness(service), disk


def check(found: Path, harness: Harness, model_id: str, seen: dict[int, bytes]) -> None:
    """That everything acknowledged so far is there, or becomes so again, and leads to the same state."""
    service = open_service(found, engine=fake_engine())
    try:
        again = Harness(service, harness.session_id)
        assert {i: again.answer(f"{model_id}:{i + 1}") for i in seen} == seen
        # the next request brings the model back, and goes on from where it was
        last = len(seen) + 1
        assert again.run("save_weights", model_id, last, {"path": "after"})
        assert again.digest(model_id) == harness.digest(model_id)
    finally:
        service.stop()


def test_after_any_request_nothing_acknowledged_is_lost(opened: tuple[Harness, Disk], tmp_path: Path) -> None:
    harness, disk = opened
    model_id = harness.create_model()
    ops, seen = script(6), dict[int, bytes]()
    for i in range(len(ops)):
        seen[i] = harness.answer(send_op(harness, model_id, ops, i))
        if i % 3 == 2:
            check(disk.after_power_loss(tmp_path / f"found{i}"), harness, model_id, seen)


def test_a_long_queue_may_run_without_anything_accepted_in_between(
    opened: tuple[Harness, Disk], tmp_path: Path
) -> None:
    harness, disk = opened
    model_id = harness.create_model()
    ops: list[Op] = [("forward_backward", GOOD_PASS), ("optim_step", STEP)] * 14
    first = 12  # one by one, until the oldest requests and states are gone for good
    seen = {i: harness.answer(send_op(harness, model_id, ops, i)) for i in range(first)}
    go_on = threading.Event()

    def hold() -> None:
        go_on.wait(120)

    harness.service.call_soon(hold)
    names = {i: send_op(harness, model_id, ops, i) for i in range(first, len(ops))}
    go_on.set()
    seen |= {i: harness.answer(name) for i, name in names.items()}
    check(disk.after_power_loss(tmp_path / "found"), harness, model_id, seen)
    assert disk.journal_syncs < 2 * len(ops), "results are not waited for one by one"


class Syncs:
    """Stands in for the disk below the journal: each sync waits until it may end, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end = threading.Event()
        self.fails = False
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, handle: int) -> None:
        if not path_of(handle).name.endswith("-wal"):
            return self._fsync(handle)
        assert self.may_end.wait(60)
        if self.fails:
            raise OSError(errno.EIO, "input/output error")
        return self._fsync(handle)


def test_a_request_runs_while_it_is_synced_and_nobody_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = open_service(tmp_path)
    harness = Harness(service)
    model_id = harness.create_model()
    syncs = Syncs(monkeypatch)
    names: list[str] = []

    def send() -> None:
        names.append(harness.send("forward_backward", model_id, 1, GOOD_PASS))

    sender = threading.Thread(target=send)
    sender.start()

    def is_done() -> bool:
        row = harness.stored(lambda journal: journal.job(model_id, 1))
        return row is not None and row.status == "done"

    wait_until(is_done)
    told = threading.Event()
    service.call_soon(told.set)  # behind that request
    assert told.wait(60)
    assert names == []
    assert asyncio.run(service.futures.wait(f"{model_id}:1", 0.05)) is None
    syncs.may_end.set()
    sender.join(60)
    assert harness.wait(names[0])["loss_fn_outputs"]
    service.stop()


class LyingKernel:
    """A kernel that forgets, after a failed sync, that the log was not written: the next sync says nothing of it.

    What was not durable at a failed sync becomes so only if it is written again. `power_loss` gives the log as the disk
    has it then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self._log = log
        self._durable = log.read_bytes()
        self._lost: list[range] = []
        self.fails = 0
        self.failed = 0
        self._fsync, self._pwrite = os.fsync, os.pwrite
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def fsync(self, handle: int) -> None:
        if path_of(handle) != self._log:
            return self._fsync(handle)
        content = self._log.read_bytes()
        if self.fails:
            self.fails -= 1
            self.failed += 1
            self._lost.append(range(len(self._durable), len(content)))
            raise OSError(errno.EIO, "input/output error")
        kept = bytearray(content)
        for hole in self._lost:
            kept[hole.start : hole.stop] = bytes(len(hole))
        self._durable = bytes(kept)
        return None

    def pwrite(self, handle: int, content: bytes, offset: int) -> int:
        if path_of(handle) == self._log:
            end = offset + len(content)
            self._lost = [hole for hole in self._lost if not (offset <= hole.start and hole.stop <= end)]
        return self._pwrite(handle, content, offset)

    def power_loss(self, found: Path) -> Path:
        shutil.copytree(self._log.parent, found)
        (found / "journal.sqlite3-shm").unlink()
        (found / self._log.name).write_bytes(self._durable)
        return found


@pytest.mark.parametrize("failures", [1, 3])
def test_after_a_failed_sync_the_log_is_written_again_and_nothing_acknowledged_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    service = open_service(tmp_path / "data")
    harness = Harness(service)
    model_id = harness.create_model()
    kernel = LyingKernel(monkeypatch, tmp_path / "data" / f"{JOURNAL_FILE}-wal")
    kernel.fails = failures
    ops: list[Op] = [("forward_backward", GOOD_PASS), ("optim_step", STEP)] * 2
    with pytest.raises(JournalError):
        send_op(harness, model_id, ops, 0)
    with pytest.raises(JournalError, match="storage has not been working since"):  # not even the next good sync helps
        send_op(harness, model_id, ops, 1)
    wait_until(lambda: service.storage_problem is None)
    assert kernel.failed == failures
    seen = {i: harness.answer(send_op(harness, model_id, ops, i)) for i in range(len(ops))}
    check(kernel.power_loss(tmp_path / "found"), harness, model_id, seen)
    service.stop()


def test_a_log_that_is_no_longer_whole_after_a_failed_sync_is_written_to_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir, session_id = tmp_path / "data", tmp_path / "session"

    def lose_what_was_not_synced() -> None:
        monkeypatch.setattr(storage_state, "FIRST_PAUSE_S", 60.0)  # nothing is tried before the log is damaged
        service = open_service(data_dir)
        harness = Harness(service)
        session_id.write_text(harness.session_id)
        model_id = harness.create_model()
        log = data_dir / f"{JOURNAL_FILE}-wal"
        whole = log.stat().st_size
        kernel = LyingKernel(monkeypatch, log)
        kernel.fails = 1
        with pytest.raises(JournalError):
            harness.send("forward_backward", model_id, 1, GOOD_PASS)
        with log.open("r+b") as file:  # the kernel has dropped a page that it could not write
            file.seek(whole)
            file.write(bytes(4096))
        with pytest.raises(JournalError, match="lost"):
            service.probe_storage()
        with pytest.raises(JournalError):
            harness.send("forward_backward", model_id, 1, GOOD_PASS)
        assert service.storage_problem is not None
        service.stop()
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=lose_what_was_not_synced)
    child.start()
    child.join()
    assert child.exitcode == 0
    service = open_service(data_dir)
    harness = Harness(service, session_id.read_text())
    model_id = f"{harness.session_id}:train:0"
    assert harness.run("forward_backward", model_id, 1, GOOD_PASS)["loss_fn_outputs"]
    service.stop()


def test_a_transaction_is_durable_when_it_returns_unless_it_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal.sqlite3")
    durability = journal.durability
    syncs: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (syncs.append(handle), sync(handle)))
    for durable in (True, False, True):
        with journal.database.transaction(durable=durable):
            pass
        commit, before = durability.newest_commit, len(syncs)
        with journal.database.transaction(write=False):
            pass
        assert (durability.newest_commit, len(syncs)) == (commit, before), "reading commits and syncs nothing"
        durability.wait_durable(commit)
        assert len(syncs) == before + (not durable)
    journal.close()


def test_a_file_is_written_again_until_the_disk_takes_it_and_a_durable_result_is_told_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL_FILE)
    tries: list[int] = []

    def write() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "no space left on device")

    journal.durability.submit(journal.storage.keep_trying, "a snapshot", write).result(60)
    assert len(tries) == 3
    heard: list[int] = []
    journal.durability.call_when_durable(0, lambda: heard.append(1))
    assert heard == [1]
    journal.close()


def test_a_model_and_a_sampler_that_were_announced_are_there_at_once_after_a_power_loss(
    opened: tuple[Harness, Disk], tmp_path: Path
) -> None:
    harness, disk = opened
    model_id = harness.create_model()
    found = disk.after_power_loss(tmp_path / "found")
    sampler = harness.run("save_weights_for_sampler", model_id, 1, {"sampling_session_seq_id": 0})
    for number, folder in enumerate((found, disk.after_power_loss(tmp_path / "found-later"))):
        journal = Journal(folder / JOURNAL_FILE)
        model = journal.model(model_id)
        assert model is not None and model.base_model is not None
        if number:
            assert journal.sampler(sampler["sampling_session_id"]) is not None
        journal.close()


def test_a_sampler_whose_weights_were_not_synced_is_published_again_after_a_power_loss(
    opened: tuple[Harness, Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is synced by others' requests while the weights still wait for the disk."""
    harness, disk = opened
    model_id, other = harness.create_model(), harness.create_model(1)
    may_sync, sync = threading.Event(), os.fsync

    def slow(handle: int) -> None:
        if path_of(handle).parent.name == "published":
            may_sync.wait(60)
        sync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    name = harness.send("save_weights_for_sampler", model_id, 1, {"sampling_session_seq_id": 0})
    written = harness.service.data_dir / "published"
    wait_until(lambda: any(written.iterdir()))
    for _ in range(50):  # until the publication is committed, should it be so before the weights are durable
        row = harness.stored(lambda journal: journal.job(model_id, 1))
        if row is not None and row.status == "done":
            break
        time.sleep(0.01)
    harness.send("forward_backward", other, 1, GOOD_PASS)
    found = disk.after_power_loss(tmp_path / "found")
    may_sync.set()
    harness.wait(name)
    service = open_service(found)
    again = Harness(service, harness.session_id)
    sampler = again.wait(name)["sampling_session_id"]
    assert again.sample(sampler, 0)["sequences"]
    service.stop()
