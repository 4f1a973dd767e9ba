"""A command that is asked for `--json` prints a document in any case: what it found, or the error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mint.cli.main import app
from mint.server.store.journal import JOURNAL_FILE

QUESTIONS = {
    "checkpoints list": ("checkpoints", "list"),
    "checkpoints delete": ("checkpoints", "delete", "mint://sess-1:train:0/weights/a", "--yes"),
    "sessions list": ("sessions", "list"),
    "runs list": ("runs", "list"),
    "keys list": ("keys", "list"),
    "keys show": ("keys", "show", "0123456789ab"),
    "keys create": ("keys", "create", "--owner", "ann"),
    "recover": ("recover",),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_an_unusable_journal_is_an_error_in_json(tmp_path: Path, question: tuple[str, ...]) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(b"no database at all" * 1000)
    answer = CliRunner().invoke(app, [*question, "--data-dir", str(tmp_path), "--json"])
    assert answer.exit_code == 1
    error = json.loads(answer.stdout)
    assert error["code"] == "DamagedDataError" and "journal" in error["error"] and error["remedy"]
    assert "DamagedDataError: " in answer.stderr


@pytest.mark.parametrize("question", [("rollouts", "none"), ("diagnose", "none"), ("runs", "show", "none")], ids=str)
def test_a_run_that_is_not_there_is_an_error_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    answer = CliRunner().invoke(app, [*question, "--json"])
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["error"]
