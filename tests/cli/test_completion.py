"""Completion in a shell: names of runs, and settings with their values."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mint.cli.main import app


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words of a command line."""
    line = ["mint", *words]
    asked = {"_MINT_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(words))}
    return CliRunner().invoke(app, [], prog_name="mint", env=asked).stdout.split()


@pytest.fixture(autouse=True)
def _two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    for name in ("math-1", "chat-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")


def test_a_shell_completes_the_names_of_runs() -> None:
    assert completed("diagnose", "ma") == ["math-1"]
    assert completed("train", "rl", "init_from", "=", "ch") == ["chat-1"]


def test_a_shell_completes_the_settings_of_the_recipe() -> None:
    assert completed("train", "rl", "batch") == ["batch_size=", "batch_size=8"]
    assert completed("train", "sft", "batch") == ["batch_size=", "batch_size=16"]
    assert completed("train", "dpo", "be") == ["betas=", "beta="]
    assert completed("train", "dpo", "group") == []
    assert completed("eval", "mint/tiny", "math", "heldout_sa") == ["heldout_samples=", "heldout_samples=1"]


def test_a_shell_completes_the_words_that_name_the_data() -> None:
    assert completed("train", "dpo", "da") == ["data="]
    assert completed("train", "distill", "te") == ["teacher=", "temperature="]
    assert completed("train", "rl", "task", "=", "m") == ["math"]


@pytest.mark.parametrize("words", [("lr_schedule=l",), ("lr_schedule", "=", "l")])
def test_a_shell_completes_the_values_of_a_setting_that_has_few(words: tuple[str, ...]) -> None:
    """bash splits a word at `=`; zsh and fish do not."""
    assert [word.rpartition("=")[2] for word in completed("train", "rl", *words)] == ["linear"]
    assert completed("train", "rl", "curriculum", "=", "t") == ["true"]
    assert completed("train", "rl", "steps", "=", "1") == []
