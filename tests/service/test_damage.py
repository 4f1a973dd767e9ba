"""Bytes that are not those that were written are found when they are read: named, never used, never served."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from default_engine import torch_engine
from service_harness import GOOD_PASS, STEP, Harness, datum, failure, make_sampler, open_service, pass_body

import mint.wire as wire
from mint.engine.state_digest import digest_of_state
from mint.errors import CheckpointError, DamagedDataError, RecoveryDivergedError
from mint.server.ids import file_stem
from mint.server.ops.readiness import Readiness
from mint.server.ops.stopped_models import stopped_models
from mint.server.store.checkpoint_folders import MANIFEST_FILE, OPTIMIZER_FILE, WEIGHTS_FILE, read_checkpoint
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.rows import ENCODINGS
from mint.server.store.snapshot_files import read_snapshot, read_weights

FLIPS = 200
"""Of each of six kinds of bytes: 1,200 together."""


def edit(data_dir: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(data_dir / JOURNAL_FILE)) as database:
        assert database.execute(statement, values).rowcount == 1
        database.commit()


def stop_with_a_pending_step(harness: Harness, model_id: str) -> None:
    """Stops a service that has accepted a step, number 4, and waits for the pass before it."""
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    harness.send("optim_step", model_id, 4, STEP)
    harness.service.stop()


def test_a_pending_payload_that_was_changed_is_not_run_and_its_model_stops(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id, other = harness.create_model(0), harness.create_model(1)
    harness.run("forward_backward", other, 1, GOOD_PASS)
    stop_with_a_pending_step(harness, model_id)
    edit(tmp_path, "UPDATE jobs SET payload = replace(payload, '0.001', '0.901') WHERE seq_id = 4")
    service = open_service(tmp_path)
    harness = Harness(service, harness.session_id)
    harness.send("forward_backward", model_id, 3, GOOD_PASS)
    error = failure(lambda: harness.wait(f"{model_id}:4"))
    assert isinstance(error, DamagedDataError) and "payload of request 4 (optim_step)" in str(error) and error.remedy
    after = failure(lambda: harness.run("optim_step", model_id, 5, STEP))
    assert isinstance(after, RecoveryDivergedError) and "damaged" in str(after)
    assert harness.run("optim_step", other, 2, STEP)["state_digest"]
    service.stop()


DAMAGED_COLUMNS = {
    "status": ("UPDATE jobs SET status = 'dooe' WHERE seq_id = 4", "status of request 4"),
    "status of a result": ("UPDATE jobs SET status = 'done' WHERE seq_id = 4", "request 4 (optim_step) is done"),
    "status of an error": ("UPDATE jobs SET status = 'failed' WHERE seq_id = 4", "status of request 4"),
    "encoding": ("UPDATE jobs SET encoding = 'application/jsoo' WHERE seq_id = 4", "encoding of request 4"),
    "attempts": ("UPDATE jobs SET attempts = 'many' WHERE seq_id = 4", "attempts of request 4"),
    "applied_seq, lower": ("UPDATE models SET applied_seq = 1", "applied_seq"),
    "applied_seq, higher": ("UPDATE models SET applied_seq = 9", "lost finished requests"),
    "applied_seq, no number": ("UPDATE models SET applied_seq = 'two'", "applied_seq"),
}


@pytest.mark.parametrize(("statement", "told"), DAMAGED_COLUMNS.values(), ids=DAMAGED_COLUMNS)
def test_a_damaged_column_of_a_pending_request_is_named_and_stops_its_model(
    tmp_path: Path, statement: str, told: str
) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    stop_with_a_pending_step(harness, model_id)
    edit(tmp_path, statement)
    service = open_service(tmp_path)
    harness = Harness(service, harness.session_id)
    other = harness.create_model(1)
    with suppress(DamagedDataError):  # of some, the journal says that request 3 has run
        harness.send("forward_backward", model_id, 3, GOOD_PASS)
    error = failure(lambda: harness.wait(f"{model_id}:4"))
    assert isinstance(error, DamagedDataError | RecoveryDivergedError) and told in str(error)
    after = failure(lambda: harness.run("optim_step", model_id, 5, STEP))
    assert isinstance(after, RecoveryDivergedError | DamagedDataError) and "damaged" in str(after)
    assert harness.run("forward_backward", other, 1, GOOD_PASS)
    problems = asyncio.run(Readiness(service).problems())
    assert any("the journal is damaged" in problem and model_id not in problem for problem in problems)
    service.stop()
    [stopped] = stopped_models(tmp_path, lambda state, digest: True)
    assert stopped.model_id == model_id


def test_the_store_knows_every_encoding_of_a_request() -> None:
    assert set(ENCODINGS) == set(wire.Encoding)


@pytest.mark.parametrize("statement", ["status = 'pending'", "status = 'dooe'", "encoding = 'application/jsoo'"])
def test_a_damaged_column_of_a_finished_request_is_named_when_its_result_is_read(
    tmp_path: Path, statement: str
) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    harness.service.stop()
    edit(tmp_path, f"UPDATE jobs SET {statement}, result = NULL WHERE seq_id = 1")
    service = open_service(tmp_path)
    error = failure(lambda: Harness(service, harness.session_id).wait(f"{model_id}:1"))
    assert isinstance(error, DamagedDataError) and "of request 1 (forward_backward)" in str(error)
    service.stop()


@pytest.mark.parametrize("applied_seq", [1, 9, "'two'"])
def test_a_model_that_waits_for_nothing_stops_if_its_last_request_is_damaged(
    tmp_path: Path, applied_seq: int | str
) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    harness.service.stop()
    edit(tmp_path, f"UPDATE models SET applied_seq = {applied_seq}")
    service = open_service(tmp_path)
    error = failure(lambda: Harness(service, harness.session_id).run("forward_backward", model_id, 3, GOOD_PASS))
    assert isinstance(error, DamagedDataError) and ("applied_seq" in str(error) or "lost finished" in str(error))
    service.stop()


@pytest.mark.parametrize("lost", [(3,), (3, 4)])
def test_a_model_whose_finished_requests_are_lost_stops(lost: tuple[int, ...], tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    for seq_id, (kind, body) in enumerate([("forward_backward", GOOD_PASS), ("optim_step", STEP)] * 2, start=1):
        harness.run(kind, model_id, seq_id, body)
    harness.service.stop()
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as database:
        database.execute("DELETE FROM snapshots WHERE seq_id > 2")
        database.execute(f"DELETE FROM jobs WHERE seq_id IN {(*lost, -1)}")
        database.commit()
    service = open_service(tmp_path)
    error = failure(lambda: Harness(service, harness.session_id).run("optim_step", model_id, 5, STEP))
    assert isinstance(error, RecoveryDivergedError | DamagedDataError) and "lost finished requests" in str(error)
    service.stop()


def test_a_stored_result_that_was_changed_is_not_served(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.service.stop()
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as database:
        result = bytearray(database.execute("SELECT result FROM jobs WHERE seq_id = 1").fetchone()[0])
    result[len(result) // 2] ^= 1
    edit(tmp_path, "UPDATE jobs SET result = ? WHERE seq_id = 1", bytes(result))
    service = open_service(tmp_path)
    harness = Harness(service, harness.session_id)
    error = failure(lambda: harness.wait(f"{model_id}:1"))
    assert isinstance(error, DamagedDataError) and "result of request 1" in str(error)
    replayed = failure(lambda: harness.run("optim_step", model_id, 2, STEP))
    assert isinstance(replayed, DamagedDataError)
    service.stop()


@pytest.mark.parametrize("changed", ["request", "model"])
def test_a_snapshot_is_that_of_its_own_model_and_request_only(tmp_path: Path, changed: str) -> None:
    """After a row that names a later request, a replay would leave out those between them."""
    harness = Harness(open_service(tmp_path))
    model_id, other = harness.create_model(0), harness.create_model(1)
    digests = {}
    for number, name in enumerate((model_id, other)):
        for seq_id in (1, 3, 5):
            harness.run("forward_backward", name, seq_id, pass_body(datum(1, 2, 3 + number, seq_id)))
            digests[name] = harness.run("optim_step", name, seq_id + 1, STEP)["state_digest"]
    harness.service.stop()
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as database:
        if changed == "request":
            database.execute("DELETE FROM snapshots WHERE seq_id > 2")
            database.execute("UPDATE snapshots SET seq_id = 6")
        else:
            database.execute("DELETE FROM snapshots WHERE model_id = ?", (model_id,))
            database.execute("UPDATE snapshots SET model_id = ? WHERE model_id = ?", (model_id, other))
        database.commit()
    harness = Harness(open_service(tmp_path), harness.session_id)
    harness.restore(model_id)
    assert harness.digest(model_id) == digests[model_id]
    harness.service.stop()


@pytest.mark.parametrize("table", ["models", "samplers"])
def test_settings_that_were_changed_stop_the_model_and_the_sampler(tmp_path: Path, table: str) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    sampler = harness.run("save_weights_for_sampler", model_id, 1, {"sampling_session_seq_id": 0})
    harness.service.stop()
    edit(tmp_path, f"UPDATE {table} SET lora = replace(lora, '\"rank\": 8', '\"rank\": 9')")
    service = open_service(tmp_path)
    harness = Harness(service, harness.session_id)
    if table == "models":
        error = failure(lambda: harness.run("forward_backward", model_id, 2, GOOD_PASS))
    else:
        error = failure(lambda: harness.sample(sampler["sampling_session_id"], 0))
    assert isinstance(error, DamagedDataError)
    assert harness.sample(make_sampler(harness, 1), 0)["sequences"]
    service.stop()


def test_damaged_weights_of_a_sampler_are_told_without_the_servers_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(open_service(tmp_path))
    saved = harness.run("save_weights_for_sampler", harness.create_model(), 1, {"sampling_session_seq_id": 0})
    sampler_id = saved["sampling_session_id"]
    [file] = (tmp_path / "published").iterdir()
    harness.service.stop()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    harness = Harness(open_service(tmp_path), harness.session_id)
    error = failure(lambda: harness.sample(sampler_id, 0))
    assert isinstance(error, CheckpointError) and sampler_id in str(error) and "Save the weights" in str(error)
    assert str(tmp_path) not in str(error) and str(file) in caplog.text
    harness.service.stop()


def test_rows_and_files_of_an_older_mint_without_checksums_are_read(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.service.stop()
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as database:
        database.execute("UPDATE jobs SET result_sha256 = NULL")
        database.execute("UPDATE models SET settings_sha256 = NULL")
        database.commit()
    service = open_service(tmp_path)
    harness = Harness(service, harness.session_id)
    assert harness.wait(f"{model_id}:1") and harness.run("optim_step", model_id, 2, STEP)
    service.stop()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Harness, str]]:
    """A small model of the real engine, with everything that is stored of it. No flip leaves a trace."""
    harness = Harness(open_service(tmp_path_factory.mktemp("trained"), engine=torch_engine()))
    model_id = harness.create_model(rank=2)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    harness.run("save_weights", model_id, 3, {"path": "kept"})
    harness.run("save_weights_for_sampler", model_id, 4, {"sampling_session_seq_id": 0})
    harness.run("forward_backward", model_id, 5, GOOD_PASS)
    yield harness, model_id
    harness.service.stop()


def flip_bits(path: Path, read: Callable[[], object], seed: int) -> int:
    """Flips one random bit of a file after another, half of them in its first 4 KiB; how many `read` accepts."""
    rng = random.Random(seed)
    sound = path.read_bytes()
    accepted = 0
    for number in range(FLIPS):
        place = rng.randrange(min(len(sound), 4096) if number % 2 else len(sound))
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([sound[place] ^ 1 << rng.randrange(8)]))
        try:
            accepted += bool(read())
        except (CheckpointError, DamagedDataError):
            pass
        finally:
            with path.open("r+b") as file:
                file.seek(place)
                file.write(sound[place : place + 1])
    assert read(), "the file is sound again"
    return accepted


def test_no_flipped_bit_of_a_snapshot_is_accepted(trained: tuple[Harness, str]) -> None:
    harness, model_id = trained
    service = harness.service
    row = harness.stored(lambda journal: journal.snapshots(model_id)[0])
    path = service.data_dir / row.file

    def read() -> bool:
        return digest_of_state(read_snapshot(path, row)) == row.digest

    assert flip_bits(path, read, seed=1) == 0


@pytest.mark.parametrize("name", [WEIGHTS_FILE, OPTIMIZER_FILE, MANIFEST_FILE])
def test_no_flipped_bit_of_a_checkpoint_is_accepted(trained: tuple[Harness, str], name: str) -> None:
    harness, model_id = trained
    row = harness.stored(lambda journal: journal.checkpoint(model_id, "weights", "kept"))
    assert row is not None
    folder = harness.service.data_dir / row.folder
    assert flip_bits(folder / name, lambda: read_checkpoint(folder, optimizer=True), seed=2) == 0


def test_no_flipped_bit_of_published_weights_is_accepted(trained: tuple[Harness, str]) -> None:
    harness, _ = trained
    name = f"published/{file_stem(f'{harness.session_id}:sample:0')}.safetensors"
    path = harness.service.data_dir / name
    assert flip_bits(path, lambda: read_weights(path, must_be_sealed=True), seed=3) == 0


def test_no_flipped_bit_of_a_payload_or_a_result_is_accepted(trained: tuple[Harness, str], tmp_path: Path) -> None:
    harness, model_id = trained
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as copy:
        with closing(sqlite3.connect(harness.service.data_dir / JOURNAL_FILE)) as source:
            source.backup(copy)
        sound = {
            (seq_id, column): bytes(value)
            for seq_id, *values in copy.execute("SELECT seq_id, payload, result FROM jobs ORDER BY seq_id")
            for column, value in zip(("payload", "result"), values, strict=True)
            if value
        }
    rng = random.Random(4)
    journal = Journal(tmp_path / JOURNAL_FILE)
    for _ in range(FLIPS):
        (seq_id, column), content = rng.choice(list(sound.items()))
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        statement = f"UPDATE jobs SET {column} = :value WHERE seq_id = :seq_id"
        with journal.database.transaction(durable=False) as transaction:
            transaction.execute(statement, value=bytes(flipped), seq_id=seq_id)
        row = journal.job(model_id, seq_id)
        assert row is not None
        with pytest.raises(DamagedDataError, match=f"the {column} of request {seq_id}"):
            row.verify()
        with journal.database.transaction(durable=False) as transaction:
            transaction.execute(statement, value=content, seq_id=seq_id)
        restored = journal.job(model_id, seq_id)
        assert restored is not None
        restored.verify()
    journal.close()
