"""Predictions for a GPU: the document and the data say the same, and the bounds follow from the shapes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_predictions import PREDICTIONS, Prediction, card_of, compare, model_of, verdict
from mint.models.random_base import SHAPES

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = {
    4: [("sample-64", "H100"), ("sample-256", "H100"), ("sample-64", "24 GB"), ("sample-256", "24 GB")],
    2: [("train-long", "H100"), ("train-long", "24 GB")],
}
BANDWIDTH, ARITHMETIC = {"H100": 3350e9, "24 GB": 1008e9}, {"H100": 989e12, "24 GB": 165e12}
CONTEXT, LONG = 160, 16_384


def _number(cell: str) -> float | None:
    found = re.match(r"[\d,]+", cell)
    return float(found[0].replace(",", "")) if found else None


def test_the_document_has_these_predictions() -> None:
    text = (ROOT / "docs/gpu.md").read_text().partition("## Predictions")[2].partition("## Measuring")[0]
    found = set()
    for line in text.splitlines():
        if not re.match(r"\| \d", line):
            continue
        size, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        model = f"qwen3-{size.lower()}"
        figures = COLUMNS[2 if len(cells) == 5 else 4]
        if len(cells) == 5:
            del cells[2]  # prime-rl's
        for (figure, card), bound, expected in zip(figures, cells[::2], cells[1::2], strict=True):
            found.add(Prediction(model, figure, card, _number(bound), _number(expected)))
    assert found == set(PREDICTIONS)


@pytest.mark.parametrize("own", PREDICTIONS, ids=lambda own: f"{own.model} {own.figure} {own.card}")
def test_bounds_follow_from_the_shape_and_the_card(own: Prediction) -> None:
    shape = SHAPES[own.model]
    weights = shape.block_parameters + shape.unembedding_parameters
    if own.bound is None or own.expected is None:
        assert weights * 2 + 256 * CONTEXT * _cache_bytes(own.model) * 4 > 24e9  # a quarter of what is left
        return
    if own.figure == "train-long":
        attention = 7 * shape.heads * shape.head_size * shape.layers * (LONG / 2) * 2
        bound = ARITHMETIC[own.card] / (4 * weights + attention)
    else:
        rows = int(own.figure.removeprefix("sample-"))
        seconds = (2 * weights + rows * CONTEXT * _cache_bytes(own.model)) / BANDWIDTH[own.card]
        bound = rows / seconds
        assert own.expected == pytest.approx(rows / (seconds / 0.6 + 0.5e-3), rel=0.01)
    assert own.bound == pytest.approx(bound, rel=0.01) and own.expected < own.bound


def _cache_bytes(model: str) -> int:
    """Of one token, in bfloat16."""
    shape = SHAPES[model]
    return 2 * 2 * shape.layers * shape.kv_heads * shape.head_size


def _lines(device: str, speed: float) -> list[dict[str, Any]]:
    shape = {"model": asdict(SHAPES["qwen3-8b"])}
    row = {"stage": "bench-8b", "figure": "sample-64", "shape": shape, "tokens_per_second": speed}
    return [{"stage": "bench-8b", "device": device}, row | {"contender": "mint-engine"}, row | {"contender": "hf-best"}]


def test_what_mint_measured_is_compared_with_what_was_predicted_for_the_card() -> None:
    (row,) = compare(_lines("NVIDIA H100 80GB HBM3", 3_650.0))
    assert (row["model"], row["predicted"], row["ratio"]) == ("qwen3-8b", 7_300, 0.5)
    assert verdict(row) == "as predicted, or near it"
    verdicts = [verdict(row) for speed in (3_600.0, 13_000.0) for row in compare(_lines("NVIDIA H100 PCIe", speed))]
    assert verdicts == ["too slow: see stage profile", "above the bound: the measurement or the prediction is wrong"]
    (unknown,) = compare(_lines("AMD Instinct MI300X", 9_000.0))
    assert unknown["ratio"] is None and verdict(unknown) == "nothing was predicted"
    assert card_of("NVIDIA GeForce RTX 4090") == "24 GB" and model_of({"hidden": 1, "layers": 1}) is None


@pytest.mark.slow
def test_the_stage_of_8b_and_the_comparison_run_on_a_processor(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    on_cpu = [
        "--device",
        "cpu",
        "--shape",
        "tiny",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--home",
        str(tmp_path / "home"),
    ]
    for stage in ("bench-8b", "long-8b"):
        run("benchmarks.gpu_session", stage, str(tmp_path), *on_cpu)
        lines = [json.loads(line) for line in (tmp_path / f"{stage}.jsonl").read_text().splitlines()]
        assert not [line for line in lines if "failure" in line]
    printed = run("benchmarks.gpu_predictions", str(tmp_path), "--card", "H100").splitlines()
    assert [line.split()[1] for line in printed] == ["sample-64", "sample-256", "train-64", "train-long"]
    assert all(line.endswith("nothing was predicted") for line in printed)
