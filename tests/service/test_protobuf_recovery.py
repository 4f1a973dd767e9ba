"""A restart replays protobuf requests and compares protobuf results; data directories of older versions come along."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from service_harness import GOOD_PASS, STEP, Harness, failure, open_service

from mint import wire
from mint.errors import RecoveryDivergedError
from mint.server.callers import LOCAL
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.schema import SCHEMA_VERSION
from mint.types import ForwardBackwardOutput
from mint.wire.codec import Encoding
from mint.wire.requests import ForwardBackwardRequest

LATER_COLUMNS = {
    "sessions": ["owner", "details", "created_at", "suspended_s"],
    "jobs": ["encoding", "micro_batching", "result_sha256", "replay"],
    "models": ["settings_sha256"],
    "checkpoints": ["owner", "public", "expires_at", "size_bytes", "user_metadata", "expired_s"],
    "samplers": ["model_id", "sha256"],
}


def send_proto(harness: Harness, model_id: str, seq_id: int) -> str:
    body = json.dumps({"model_id": model_id, "seq_id": seq_id, **GOOD_PASS}).encode()
    written = wire.encode(wire.decode(ForwardBackwardRequest, body), Encoding.PROTO)
    return harness.service.training.submit(LOCAL, "forward_backward", written, Encoding.PROTO).request_id


def worked(folder: Path) -> tuple[Harness, str]:
    """A stopped service whose model has a step, a pass by JSON and one by protobuf behind it."""
    harness = Harness(open_service(folder))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    harness.run("forward_backward", model_id, 3, GOOD_PASS)
    harness.wait(send_proto(harness, model_id, 4))
    harness.service.stop()
    return harness, model_id


def reopen(harness: Harness, folder: Path) -> Harness:
    return Harness(open_service(folder), harness.session_id)


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / JOURNAL_FILE)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def results_as_json(folder: Path) -> int:
    """Rewrites the stored results as older versions wrote them, without checksums; how many."""
    with closing(sqlite3.connect(folder / JOURNAL_FILE)) as database:
        rows = database.execute("SELECT rowid, result FROM jobs WHERE kind = 'forward_backward'").fetchall()
        for rowid, result in rows:
            assert not result.startswith(b"{")
            old = wire.result_as_json(result, ForwardBackwardOutput)
            database.execute("UPDATE jobs SET result = ?, result_sha256 = NULL WHERE rowid = ?", (old, rowid))
        database.execute("UPDATE models SET settings_sha256 = NULL")
        database.commit()
        return len(rows)


def expected_digest(folder: Path) -> str:
    harness = Harness(open_service(folder))
    model_id = harness.create_model()
    for seq_id, (kind, body) in enumerate(
        [("forward_backward", GOOD_PASS), ("optim_step", STEP), *[("forward_backward", GOOD_PASS)] * 2], start=1
    ):
        harness.run(kind, model_id, seq_id, body)
    digest = harness.run("optim_step", model_id, 5, STEP)["state_digest"]
    harness.service.stop()
    return digest


def test_passes_sent_as_protobuf_are_replayed_bit_for_bit(tmp_path: Path) -> None:
    harness, model_id = worked(tmp_path / "one")
    again = reopen(harness, tmp_path / "one")
    assert again.run("optim_step", model_id, 5, STEP)["state_digest"] == expected_digest(tmp_path / "two")
    again.service.stop()


def test_a_waiting_protobuf_request_is_carried_out_after_a_restart(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    name = send_proto(harness, model_id, 2)  # number 1 has not arrived
    harness.service.stop()
    again = reopen(harness, tmp_path)
    again.run("forward_backward", model_id, 1, GOOD_PASS)
    assert again.wait(name)["metrics"]["tokens:sum"] == 3.0
    assert send_proto(again, model_id, 2) == name
    again.service.stop()


def test_results_that_were_stored_as_json_are_compared_and_given_out_all_the_same(tmp_path: Path) -> None:
    harness, model_id = worked(tmp_path / "one")
    assert results_as_json(tmp_path / "one") == 3
    again = reopen(harness, tmp_path / "one")
    assert again.run("optim_step", model_id, 5, STEP)["state_digest"] == expected_digest(tmp_path / "two")
    assert again.wait(f"{model_id}:4")["loss_fn_outputs"]
    again.service.stop()


def test_a_result_of_other_bits_is_noticed_in_either_encoding(tmp_path: Path) -> None:
    for name in ("json", "proto"):
        harness, model_id = worked(tmp_path / name)
        if name == "json":
            results_as_json(tmp_path / name)
            change(
                tmp_path / name,
                "UPDATE jobs SET result = CAST(replace(CAST(result AS TEXT), '-', '') AS BLOB) WHERE seq_id = 4",
            )
        else:
            change(
                tmp_path / name,
                "UPDATE jobs SET result = (SELECT zeroblob(0)), result_sha256 = NULL WHERE seq_id = 4",
                "UPDATE models SET settings_sha256 = NULL",
            )
        again = reopen(harness, tmp_path / name)
        error = failure(lambda: again.run("optim_step", model_id, 5, STEP))  # noqa: B023
        assert isinstance(error, RecoveryDivergedError) and "request 4" in str(error)
        again.service.stop()


def make_schema_1(folder: Path) -> None:
    """Takes a data directory back to the first schema, as its version of mint had left it."""
    results_as_json(folder)
    dropped = [f"ALTER TABLE {table} DROP COLUMN {name}" for table, names in LATER_COLUMNS.items() for name in names]
    change(
        folder,
        "DROP INDEX ix_sessions_metadata",
        "DROP INDEX ix_checkpoints_metadata",
        "DROP INDEX ix_checkpoints_created",
        "DROP INDEX ix_checkpoints_owner_created",
        "DROP INDEX ix_checkpoints_expiring",
        "DROP INDEX ix_checkpoints_expired",
        "DROP INDEX ix_samplers_model_id",
        *dropped,
        "DROP TABLE runs",
        "DROP TABLE keys",
        "PRAGMA user_version = 1",
    )


def tables_of(path: Path) -> dict[str, list[str]]:
    with closing(sqlite3.connect(path)) as database:
        names = [
            name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        return {name: sorted(row[1] for row in database.execute(f"PRAGMA table_info({name})")) for name in names}


def test_a_data_directory_of_the_first_schema_goes_on_and_is_kept_beside(tmp_path: Path) -> None:
    folder, fresh = tmp_path / "old", tmp_path / "new"
    harness = Harness(open_service(folder))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    path = harness.run("save_weights", model_id, 3, {"path": "kept"})["path"]
    harness.run("forward_backward", model_id, 4, GOOD_PASS)
    harness.service.stop()
    make_schema_1(folder)
    before = tables_of(folder / JOURNAL_FILE)
    again = reopen(harness, folder)
    metrics = again.run("optim_step", model_id, 5, STEP)["metrics"]
    assert metrics["step"] == 2.0
    run = again.stored(lambda journal: journal.run(model_id))
    assert run is not None and (run.owner, run.base_model) == ("local", "mint/tiny")
    body = {"session_id": again.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
    again.wait(again.submit("load_weights", body))
    again.service.stop()
    (backup,) = folder.glob("*.schema1.*")
    assert tables_of(backup) == before
    with closing(sqlite3.connect(folder / JOURNAL_FILE)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    open_service(fresh).stop()
    assert tables_of(folder / JOURNAL_FILE) == tables_of(fresh / JOURNAL_FILE)


@pytest.mark.parametrize("statement", ["DROP TABLE jobs", "ALTER TABLE jobs ADD COLUMN encoding VARCHAR"])
def test_a_migration_that_fails_changes_nothing(tmp_path: Path, statement: str) -> None:
    _, _ = worked(tmp_path)
    make_schema_1(tmp_path)
    change(tmp_path, statement)
    before = tables_of(tmp_path / JOURNAL_FILE)
    assert "journal" in str(failure(lambda: open_service(tmp_path)))
    assert tables_of(tmp_path / JOURNAL_FILE) == before
