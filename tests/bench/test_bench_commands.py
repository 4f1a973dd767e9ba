"""`mint bench` refuses what it cannot do before anything is installed, written or started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mint.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sample", "--shape", "huge"], "qwen3-0.6b"),
        (["train", "--shape", "huge"], "qwen3-0.6b"),
        (["tenants", "--shape", "huge"], "qwen3-0.6b"),
        (["sample", "--prompt-tokens", "500", "--new", "32"], "512"),
        (["sample", "--peer", "verl"], "llama"),
        (["train", "--peer", "llama"], "hf-best"),
        (["grpo", "--peer", "trl", "--peer", "trl"], "twice"),
    ],
)
def test_what_cannot_be_timed_is_refused_at_once(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code != 0
    assert named in result.output
    assert list(tmp_path.iterdir()) == []
