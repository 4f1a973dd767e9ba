"""Prompts, data and weights can be read by the owner of a data directory alone: new or old, however it is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from default_engine import fake_engine
from typer.testing import CliRunner

from mint.cli.main import app
from mint.compose.embedded import open_embedded
from mint.runs.log import RunLog
from mint.server.store.journal import JOURNAL_FILE, Journal
from tests.server.server_harness import Person, pass_input, running


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def readable_by_others(folder: Path) -> list[str]:
    """What in a folder another user can reach and read, or list."""
    found = []
    for path in sorted(folder.iterdir()):
        mode = path.stat().st_mode
        if mode & 0o077:
            found.append(f"{path.name} {mode & 0o777:o}")
            if path.is_dir() and mode & 0o011:
                found += [f"{path.name}/{inner}" for inner in readable_by_others(path)]
    return found


def wider_than_0700(folder: Path) -> list[str]:
    """The folders below a folder that others may list or enter, also if they cannot reach them."""
    return [path.name for path in sorted(folder.rglob("*")) if path.is_dir() and path.stat().st_mode & 0o077]


def train(person: Person) -> None:
    """Leaves a payload, a snapshot, published weights and a checkpoint."""
    model_id = person.model(person.session())
    data = {"model_id": model_id, "seq_id": 1, "forward_backward_input": pass_input()}
    person.done("forward_backward", data)
    person.done("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.001}})
    person.done("save_weights_for_sampler", {"model_id": model_id, "seq_id": 3, "sampling_session_seq_id": 0})
    person.done("save_weights", {"model_id": model_id, "seq_id": 4, "path": "kept"})


def serve(folder: Path) -> None:
    with running(folder) as server:
        train(Person(server))
        assert readable_by_others(folder) in ([], ["notes.txt 644"])


def embed(folder: Path) -> None:
    embedded = open_embedded(data_dir=folder, engine=fake_engine())
    assert readable_by_others(folder) in ([], ["notes.txt 644"])
    embedded.release()


def make_key(folder: Path) -> None:
    arguments = ["keys", "create", "--owner", "ann", "--data-dir", str(folder)]
    assert CliRunner().invoke(app, arguments).exit_code == 0


WAYS = [serve, embed, make_key]


@pytest.mark.parametrize("mask", [0o000, 0o022])
@pytest.mark.parametrize("use", WAYS)
def test_a_new_data_directory_is_its_owners_alone(tmp_path: Path, use: Callable[[Path], None], mask: int) -> None:
    with umask(mask):
        use(tmp_path / "data")
    assert readable_by_others(tmp_path) == []
    assert readable_by_others(tmp_path / "data") == []
    assert wider_than_0700(tmp_path) == []


@pytest.mark.parametrize("use", WAYS)
def test_what_an_older_version_left_readable_is_tightened_and_logged(
    tmp_path: Path, use: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    with umask(0o022):
        serve(folder)
        (folder / "runs" / "one").mkdir(parents=True)
        (folder / "journal.schema1.sqlite3").write_bytes(b"")
        (folder / "notes.txt").write_text("not mint's")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for end in ("-wal", "-shm"):
        (folder / f"{JOURNAL_FILE}{end}").touch(mode=0o644)
    caplog.clear()
    with caplog.at_level("WARNING"):
        use(folder)
    told = " ".join(record.getMessage() for record in caplog.records)
    for name in (JOURNAL_FILE, "checkpoints", "runs", "journal.schema1.sqlite3"):
        assert name in told
    assert readable_by_others(folder) == ["notes.txt 644"]
    assert folder.stat().st_mode & 0o777 == 0o755  # it was somebody else's to make


def test_a_command_that_only_lists_tightens_the_journal_too(tmp_path: Path) -> None:
    Journal(tmp_path / JOURNAL_FILE).close()
    (tmp_path / JOURNAL_FILE).chmod(0o644)
    assert CliRunner().invoke(app, ["runs", "list", "--data-dir", str(tmp_path)]).exit_code == 0
    assert readable_by_others(tmp_path) == []


def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with umask(0o000):
        log = RunLog(tmp_path / "runs" / "run")
        log.start({"learning_rate": 0.1}, resume=False)
        log.append("rollouts.jsonl", {"prompt": "secret"})
    assert wider_than_0700(tmp_path) == []
    assert readable_by_others(tmp_path / "runs" / "run") == []
    assert json.loads((tmp_path / "runs" / "run" / "rollouts.jsonl").read_text()) == {"prompt": "secret"}
