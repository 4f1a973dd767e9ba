"""A data directory whose journal is lost is not begun anew: its files would be taken for orphans, and nobody asked for
a key."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from service_harness import STEP, Harness, datum, open_service, pass_body

from mint.compose.serving import check
from mint.config import ServeSettings
from mint.errors import JournalError
from mint.server.ids import session_of
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.session_catalog import SessionCatalog
from mint.server.store.training_run_catalog import TrainingRunCatalog
from mint.types import SessionSearchRequest


def trained(folder: Path) -> str:
    """Trains and saves a model with a service of its own; the id of the model."""
    harness = Harness(open_service(folder))
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, pass_body(datum(1, 2, 3)))
    harness.run("optim_step", model_id, 2, STEP)
    harness.run("save_weights", model_id, 3, {"path": "final"})
    harness.service.stop()
    return model_id


def files_of(folder: Path) -> set[str]:
    names = ("snapshots", "published", "checkpoints")
    return {str(path.relative_to(folder)) for name in names for path in (folder / name).rglob("*")}


def lose_journal(folder: Path, how: str) -> None:
    for path in folder.glob(f"{JOURNAL_FILE}*"):
        path.unlink()
    if how == "empty":
        (folder / JOURNAL_FILE).touch()
    if how == "made by a command":
        Journal(folder / JOURNAL_FILE, OpenFor.COMMAND).close()


@pytest.mark.parametrize("how", ["missing", "empty", "made by a command"])
def test_a_lost_journal_is_refused_until_it_is_restored(tmp_path: Path, how: str) -> None:
    trained(tmp_path)
    copy = tmp_path / "backup.sqlite3"
    shutil.copy(tmp_path / JOURNAL_FILE, copy)
    files = files_of(tmp_path)
    lose_journal(tmp_path, how)
    with pytest.raises(JournalError, match=r"is lost: .*in snapshots/, 1 in checkpoints/.*Restore") as caught:
        open_service(tmp_path)
    assert str(tmp_path) in str(caught.value)
    [schema] = [result for result in check(ServeSettings(data_dir=tmp_path)) if result.check == "schema"]
    assert not schema.ok and "is lost" in schema.text
    assert files_of(tmp_path) == files

    for path in tmp_path.glob(f"{JOURNAL_FILE}*"):
        path.unlink()
    shutil.copy(copy, tmp_path / JOURNAL_FILE)
    open_service(tmp_path).stop()
    [schema] = [result for result in check(ServeSettings(data_dir=tmp_path)) if result.check == "schema"]
    assert schema.ok


def test_one_who_moves_the_files_away_begins_anew(tmp_path: Path) -> None:
    first = trained(tmp_path)
    lose_journal(tmp_path, "missing")
    for name in ("snapshots", "checkpoints"):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    second = trained(tmp_path)
    with closing(Journal(tmp_path / JOURNAL_FILE, OpenFor.READING)) as journal:
        sessions = SessionCatalog(journal).search_sessions(None, SessionSearchRequest()).sessions
        runs = TrainingRunCatalog(journal, tmp_path).runs(None).training_runs
    assert [session.session_id for session in sessions] == [session_of(second)] != [session_of(first)]
    assert [run.training_run_id for run in runs] == [second]


def test_an_unfinished_file_beside_a_new_journal_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / ".probe.1.tmp").touch()
    open_service(tmp_path).stop()
