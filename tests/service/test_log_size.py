"""The file of the write-ahead log stays bounded while a service runs, whatever was written to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mint.server.store.database import LOG_BYTES, Database

LARGE = 3 * LOG_BYTES


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(tmp_path / "journal.sqlite3")) as opened:
        yield opened


def log_bytes(database: Database) -> int:
    return database.durability.log_bytes()


def write(database: Database, seq_id: int, size_bytes: int) -> None:
    database.write(
        "INSERT INTO jobs (model_id, seq_id, kind, payload, sha256, status, attempts) "
        f"VALUES ('m', :seq_id, 'k', randomblob({size_bytes}), '', 'done', 0)",
        seq_id=seq_id,
    )


def test_the_log_gives_the_space_of_a_large_commit_back_with_the_next_ones(database: Database) -> None:
    write(database, 1, LARGE)
    assert log_bytes(database) > LARGE
    for seq_id in (2, 3, 4):
        write(database, seq_id, 100)
    assert log_bytes(database) <= LOG_BYTES


def test_an_idle_log_is_cut_by_housekeeping_and_a_reader_only_delays_that(database: Database) -> None:
    with database.transaction(write=False) as reader:
        assert reader.value("SELECT count(*) FROM jobs") == 0
        write(database, 1, LARGE)
        database.give_back_log()
        assert log_bytes(database) > LARGE  # the reader needs it
        assert reader.value("SELECT count(*) FROM jobs") == 0
    database.give_back_log()
    assert log_bytes(database) <= LOG_BYTES
    assert database.value("SELECT length(payload) FROM jobs") == LARGE
    write(database, 2, 100)
    assert database.value("SELECT count(*) FROM jobs") == 2


def test_a_deletion_does_not_write_as_much_as_it_frees(database: Database) -> None:
    write(database, 1, LARGE)
    database.give_back_log()
    assert log_bytes(database) == 0
    database.write("DELETE FROM jobs")
    assert log_bytes(database) < LARGE / 50
