"""A page of the database's file that cannot be read stops the models that need it, and nobody else."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from service_harness import GOOD_PASS, STEP, Harness, datum, failure, open_service, pass_body

from mint.errors import DamagedDataError, MintError, RecoveryDivergedError
from mint.server.ops.readiness import Readiness
from mint.server.ops.stopped_models import stopped_models
from mint.server.store.journal import JOURNAL_FILE, Finish, Journal

PAGE_BYTES = 4096
LARGE_PASS = pass_body(*[datum(*range(20, 220)) for _ in range(8)])


def journal_of_two(data_dir: Path) -> tuple[Harness, str, str]:
    """A stopped service with two models; the first has large requests, the last of which waits for another."""
    harness = Harness(open_service(data_dir))
    damaged, sound = harness.create_model(0), harness.create_model(1)
    for seq_id in range(1, 7):
        harness.run("forward_backward", damaged, seq_id, LARGE_PASS)
    harness.send("forward_backward", damaged, 8, LARGE_PASS)
    harness.run("forward_backward", sound, 1, GOOD_PASS)
    harness.service.stop()
    return harness, damaged, sound


def overwrite_a_page(data_dir: Path, place: tuple[str, int]) -> None:
    """Fills a page with rubbish without which the request at this place cannot be read, and everything else can."""
    file, copy = data_dir / JOURNAL_FILE, data_dir / "copy.sqlite3"
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        places = database.execute("SELECT model_id, seq_id FROM jobs").fetchall()
    for page in range(1, file.stat().st_size // PAGE_BYTES):
        shutil.copy(file, copy)
        fill(copy, page)
        with closing(sqlite3.connect(copy)) as database:
            if all(can_read(database, other) == (other != place) for other in places) and can_read_others(database):
                return fill(file, page)
    raise AssertionError("no page has this request alone")


def fill(file: Path, page: int) -> None:
    with file.open("r+b") as content:
        content.seek(page * PAGE_BYTES)
        content.write(b"\xab" * PAGE_BYTES)


def can_read(database: sqlite3.Connection, place: tuple[str, int]) -> bool:
    try:
        return len(database.execute("SELECT * FROM jobs WHERE model_id = ? AND seq_id = ?", place).fetchall()) == 1
    except sqlite3.DatabaseError:
        return False


def can_read_others(database: sqlite3.Connection) -> bool:
    try:
        for table in ("models", "sessions", "runs", "snapshots", "samplers"):
            database.execute(f"SELECT * FROM {table}").fetchall()
        return True
    except sqlite3.DatabaseError:
        return False


def errors_of(harness: Harness, *request_ids: str) -> list[MintError]:
    return [failure(partial(harness.wait, request_id)) for request_id in request_ids]


def problems(harness: Harness) -> tuple[str, ...]:
    return asyncio.run(Readiness(harness.service).problems())


@pytest.mark.parametrize("lost", [3, 8])
def test_one_unreadable_request_stops_its_model_alone(tmp_path: Path, lost: int) -> None:
    before, damaged, sound = journal_of_two(tmp_path)
    overwrite_a_page(tmp_path, (damaged, lost))
    found: tuple[str, ...] = ()
    for seq_id in (2, 3):  # the second process finds what the first one has stored of it
        harness = Harness(open_service(tmp_path), before.session_id)
        harness.send("forward_backward", damaged, 7, GOOD_PASS)
        errors = errors_of(harness, f"{damaged}:7", f"{damaged}:8")
        assert all(isinstance(error, DamagedDataError | RecoveryDivergedError) for error in errors), errors
        assert any("the journal is damaged" in str(error) for error in errors)
        assert harness.run("forward", sound, seq_id, {"forward_input": GOOD_PASS["forward_backward_input"]})
        assert Harness(harness.service).create_model()
        assert errors_of(harness, harness.send("optim_step", damaged, 7 + seq_id, STEP))
        found += problems(harness)
        harness.service.stop()
        [stopped] = stopped_models(tmp_path, lambda state, digest: True)
        assert stopped.model_id == damaged
    assert any("the journal is damaged" in problem for problem in found)


def test_a_result_that_cannot_be_stored_for_damage_fails_its_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(open_service(tmp_path))
    damaged, sound = harness.create_model(0), harness.create_model(1)
    finish_job = Journal.finish_job

    def finish(journal: Journal, finish: Finish) -> bool:
        if finish.model_id == damaged:
            raise DamagedDataError("the journal is damaged")
        return finish_job(journal, finish)

    monkeypatch.setattr(Journal, "finish_job", finish)
    for seq_id in (1, 2):
        [error] = errors_of(harness, harness.send("forward_backward", damaged, seq_id, GOOD_PASS))
        assert isinstance(error, DamagedDataError | RecoveryDivergedError) and "damaged" in str(error)
        assert harness.run("forward_backward", sound, seq_id, GOOD_PASS)
    harness.service.stop()
