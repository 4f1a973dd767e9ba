"""The limit follows from measured rates by the formulas of its docstring, and is what the machine can do at most."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mint.bench.limits import decode_rows, sampling_seconds, training_seconds
from mint.bench.shapes import SHAPES, GrpoShape
from mint.bench.turns import Worker

LARGE = SHAPES["qwen3-0.6b"]
RATES = {
    "block": {"64": 300e9, "512": 400e9},
    "unembedding": {"64": 300e9, "512": 400e9},
    "read": 36e9,
}


def test_the_large_shape_has_the_stated_parameters() -> None:
    assert LARGE.block_parameters == pytest.approx(440.4e6, rel=1e-3)
    assert LARGE.unembedding_parameters == pytest.approx(155.6e6, rel=1e-3)
    assert 16 * LARGE.lora_parameters_per_rank == pytest.approx(10.1e6, rel=1e-2)


def test_a_single_sequence_is_bound_by_reading_all_weights_for_each_token() -> None:
    shape = GrpoShape(model=LARGE, prompts=1, group=1, prompt_tokens=1, max_tokens=1001)
    assert decode_rows(shape) == 64
    seconds = sampling_seconds(shape, RATES, "bfloat16")
    assert 1000 / seconds == pytest.approx(36e9 / (2 * 596e6), rel=1e-2)
    assert sampling_seconds(shape, RATES, "float32") == pytest.approx(2 * seconds, rel=1e-2)


def test_many_sequences_are_bound_by_arithmetic() -> None:
    shape = GrpoShape(model=LARGE, prompt_tokens=1, max_tokens=1001)
    parameters = 440.4e6 + 155.6e6 + 10.1e6
    assert 64_000 / sampling_seconds(shape, RATES, "bfloat16") == pytest.approx(300e9 / (2 * parameters), rel=1e-2)


def test_a_group_s_prompt_is_prefilled_once() -> None:
    short, long = (GrpoShape(model=LARGE, prompt_tokens=tokens) for tokens in (100, 612))
    more = sampling_seconds(long, RATES, "bfloat16") - sampling_seconds(short, RATES, "bfloat16")
    assert more == pytest.approx(8 * 512 * 2 * (440.4e6 + 10.1e6) / 400e9, rel=1e-2)


def test_training_counts_frozen_weights_twice_and_the_unembedding_at_targets_only() -> None:
    shape = GrpoShape(model=LARGE, prompts=2, group=4, prompt_tokens=10, max_tokens=6)
    computed, targets = 2 * 10 + 8 * 5, 8 * 6
    flops = computed * (4 * 440.4e6 + 6 * 10.1e6) + targets * 4 * 155.6e6
    assert training_seconds(shape, RATES) == pytest.approx(flops / 400e9, rel=1e-2)


def test_rates_are_measured_for_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    spec = {
        "threads": 1,
        "dtype": "float32",
        "linears": [[128, 128], [384, 128]],
        "hidden": 128,
        "vocabulary": 512,
        "rows": [64, 512],
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "mint.bench.limits_peer", str(tmp_path / "spec.json")]
    with Worker("limit", command, log_path=tmp_path / "log", environment={"OMP_NUM_THREADS": "1"}) as worker:
        worker.hear("ready", timeout_s=60)
        rates = worker.ask("step", answer="step", timeout_s=60)
    for kind in ("block", "unembedding"):
        assert set(rates[kind]) == {"64", "512"}
        assert all(1e8 < rate < 1e14 for rate in rates[kind].values())
    assert 1e8 < rates["read"] < 1e13
