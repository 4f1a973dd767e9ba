"""`mint bench` measures this machine; `python -m benchmarks` refuses at once what it cannot compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from mint.cli.bench import print_report
from mint.cli.main import app as mint_app
from mint.compose.throughput import Speed, ThroughputReport
from mint.engine.machine_limits import Rates, StepShape
from mint.models.random_base import ModelShape


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
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert named in result.output
    assert list(tmp_path.iterdir()) == []


def test_mint_bench_says_how_fast_this_machine_samples_and_trains_and_how_fast_it_could() -> None:
    sizes = ["--batch-size", "2", "--group-size", "2", "--prompt-tokens", "8", "--max-tokens", "4", "--repeats", "1"]
    result = CliRunner().invoke(mint_app, ["bench", "--model", "tiny", *sizes, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    for work, tokens in (("sampling", 2 * 2 * 4), ("training", 2 * 2 * (8 + 4))):
        speed = report[work]
        assert speed["tokens_per_step"] == tokens
        assert speed["tokens_per_second"] == pytest.approx(tokens / speed["seconds"][0])
        assert 0 < speed["share_of_limit"] < 1
    assert set(report["product_flops_per_second"]) == {"64", "512", "2048"}
    assert 1e8 < report["read_bytes_per_second"] < 1e13


def test_mint_bench_prints_a_table_for_people() -> None:
    speed = Speed(tokens=100, seconds=[0.5, 0.5], limit_seconds=[0.25, 0.25])
    rates: Rates = {"block": {"64": 9.5e10}, "unembedding": {"64": 1e11}, "read": 3.5e10}
    settings = {"dtype": "float32", "threads": 1, "device": "cpu", "kernels": "native"}
    console = Console(width=120, record=True)
    print_report(console, ThroughputReport("mint/tiny", StepShape(ModelShape()), settings, speed, speed, [rates], 0.1))
    text = console.export_text()
    assert all(part in text for part in ("sampling", "training", "200", "400", "50%", "35 GB/s", "95 with 64 rows"))


def test_mint_bench_refuses_sequences_longer_than_the_context() -> None:
    result = CliRunner().invoke(mint_app, ["bench", "--model", "tiny", "--prompt-tokens", "500", "--max-tokens", "32"])
    assert result.exit_code == 1
    assert "context of 512" in result.output
