"""What `mint plan` prints for scripts, and which options it refuses because they would have no effect."""

from __future__ import annotations

import json

import pytest
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


@pytest.mark.parametrize(
    ("words", "field", "remedy"),
    [
        (("--pass-rate", "0.5", "--throughput"), "--throughput", "Give --model"),
        (("--pass-rate", "0.5", "--gpus", "8xH100"), "--gpus", "Give --model"),
        (("--pass-rate", "0.5", "--tenants", "3"), "--tenants", "Give --gpus"),
        (("--gpus", "8xH100"), "--gpus", "Give --model"),
        ((*MEMORY, "--tenants", "3"), "--tenants", "Give --gpus"),
        (("--pass-rate", "0.5", "--context", "64"), "--context", "Give --model"),
        (("--pass-rate", "0.5", "--device", "cuda"), "--device", "Give --model"),
        (("--pass-rate", "0.5", "--group", "4"), "--group-size", "Give --model"),
        ((*MEMORY, "--mean-tokens", "64"), "--mean-tokens", "Give --pass-rate"),
        ((*MEMORY, "--batch-size", "4"), "--batch-size", "Give --pass-rate"),
        (("--model", "mint/tiny", "--gpus", "8xH100", "--throughput"), "--throughput", "Leave it out, or --gpus"),
        (("--model", "mint/tiny", "--gpus", "8xH100", "--device", "cuda"), "--device", "Leave it out, or --gpus"),
        ((*MEMORY, "--gpus", "8xH100"), "--device-memory", "Leave it out, or --gpus"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(words: tuple[str, ...], field: str, remedy: str) -> None:
    answer = plan(*words, "--json")
    assert answer.exit_code == 1, answer.output
    refusal = json.loads(answer.stdout)
    assert refusal["field"] == field and refusal["value"]
    assert remedy in refusal["remedy"]
