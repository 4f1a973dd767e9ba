"""Data directories of every earlier schema, made by the mint of their time, open and go on with the same bits.

`data_directories` holds what a killed process has left, and what the same version computed when it went on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from make_data_directory import STEP
from service_harness import Harness, open_service

from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.schema import SCHEMA_VERSION

ARCHIVES = Path(__file__).with_name("data_directories")
FORK = multiprocessing.get_context("fork")


def unpack(schema: int, folder: Path) -> dict[str, Any]:
    """Puts a data directory there; returns what its version computed."""
    with tarfile.open(ARCHIVES / f"schema{schema}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return json.loads((folder / "expected.json").read_text())


def goes_on(folder: Path, expected: dict[str, Any]) -> None:
    """Runs what was pending, and more, and compares everything with what the older version computed."""
    harness = Harness(open_service(folder), expected["session_id"])
    model_id = expected["model_id"]
    digests = {"14": harness.run("optim_step", model_id, 14, STEP)["state_digest"]}
    for seq_id in ("2", "4", "6", "8", "12"):
        digests[seq_id] = harness.wait(f"{model_id}:{seq_id}")["state_digest"]
    outputs = {seq_id: harness.wait(f"{model_id}:{seq_id}")["loss_fn_outputs"] for seq_id in ("11", "13")}
    assert digests == expected["digests"]
    assert [logprobs(outputs[seq_id]) for seq_id in outputs] == [
        logprobs(expected["outputs"][each]) for each in outputs
    ]
    if expected["sampler"] is not None:
        sampled = harness.sample(expected["sampler"], 0, params={"seed": 3, "max_tokens": 5})["sequences"]
        assert [each["tokens"] for each in sampled] == [each["tokens"] for each in expected["sampled"]]
    body = {"session_id": harness.session_id, "model_seq_id": 1, "path": expected["path"], "optimizer": True}
    loaded = harness.wait(harness.submit("load_weights", body))["model_id"]
    assert harness.digest(loaded) == expected["digests"]["8"]
    harness.service.stop()


def logprobs(outputs: list[dict[str, Any]]) -> list[list[float]]:
    return [row["logprobs"]["data"] for row in outputs]


def schema_of(file: Path) -> int:
    """The schema of a database that SQLite finds sound."""
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("PRAGMA quick_check").fetchone() == ("ok",)
        return database.execute("PRAGMA user_version").fetchone()[0]


def test_there_is_a_data_directory_of_every_earlier_schema() -> None:
    names = {path.name for path in ARCHIVES.iterdir()}
    assert names == {f"schema{number}.tar.gz" for number in range(1, SCHEMA_VERSION)}


@pytest.mark.parametrize("schema", range(1, SCHEMA_VERSION))
def test_a_data_directory_of_an_older_mint_goes_on_with_the_same_bits(tmp_path: Path, schema: int) -> None:
    expected = unpack(schema, tmp_path)
    goes_on(tmp_path, expected)
    assert schema_of(tmp_path / JOURNAL_FILE) == SCHEMA_VERSION
    assert schema_of(tmp_path / f"journal.schema{schema}.sqlite3") == schema


@pytest.mark.parametrize("schema", [1, 3])
def test_the_steps_of_an_older_mint_are_replayed_to_the_same_bits(tmp_path: Path, schema: int) -> None:
    expected = unpack(schema, tmp_path)
    for path in (tmp_path / "snapshots").glob("*-[68].safetensors"):  # the newest: requests 5 to 11 are run again
        path.write_bytes(b"nothing of use")
    expected["sampler"] = None  # this mint's samplers read a snapshot's file
    goes_on(tmp_path, expected)


def open_and_die(file: Path, at_step: int) -> None:
    """Opens a database in this process, which ends with the given statement, copied page, sync or rename."""
    steps = 0

    def step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    class Traced(sqlite3.Connection):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.set_trace_callback(step)

        def backup(self, target: sqlite3.Connection, **_: Any) -> None:
            super().backup(target, pages=5, progress=step)

    def traced(name: str) -> None:
        function = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            step()
            result = function(*arguments, **named)
            step()
            return result

        setattr(os, name, call)

    connect = sqlite3.connect
    sqlite3.connect = lambda *arguments, **named: connect(*arguments, factory=Traced, **named)
    for name in ("replace", "rename", "fsync", "unlink"):
        traced(name)
    Journal(file)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.restarts
def test_a_kill_at_any_step_of_a_migration_loses_nothing(tmp_path: Path) -> None:
    schemas = []
    for at_step in range(1, 1000):
        folder = tmp_path / str(at_step)
        expected = unpack(1, folder)
        child = FORK.Process(target=open_and_die, args=(folder / JOURNAL_FILE, at_step))
        child.start()
        child.join()
        copy = folder / "journal.schema1.sqlite3"
        assert not copy.exists() or schema_of(copy) == 1, at_step
        schemas.append(schema_of(folder / JOURNAL_FILE))
        assert schemas[-1] == 1 or copy.exists(), at_step
        goes_on(folder, expected)
        assert (schema_of(folder / JOURNAL_FILE), schema_of(copy)) == (SCHEMA_VERSION, 1), at_step
        if child.exitcode == 0:  # it had fewer steps
            break
        assert child.exitcode == -signal.SIGKILL
    assert schemas == [1] * schemas.count(1) + [SCHEMA_VERSION] * schemas.count(SCHEMA_VERSION)
    assert schemas.count(1) > 60 and schemas.count(SCHEMA_VERSION) > 1
