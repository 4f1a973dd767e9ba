"""What `mint plan` prints for scripts."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

from mint.cli.main import app

MEMORY = ("--model", "mint/tiny", "--context", "64", "--device-memory", "8")


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_memory_and_signal_are_a_line_of_json_each() -> None:
    answer = plan(*MEMORY, "--pass-rate", "0.5", "--json")
    assert answer.exit_code == 0, answer.output
    memory, signal = (json.loads(line) for line in answer.stdout.splitlines())
    assert memory["context"] == 64
    assert signal == json.loads(plan("--pass-rate", "0.5", "--json").stdout)
