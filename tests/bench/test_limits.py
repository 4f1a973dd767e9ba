"""The limit follows from measured rates by the formulas of its docstring, and is what the machine can do at most."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.compare.report import bandwidth_row, flops_row
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.turns import Worker
from benchmarks.compare.utilisation import datasheet_flops, decode_bytes, training_flops
from mint.engine.machine_limits import (
    SAMPLING_REST_S,
    TRAINING_REST_S,
    Rates,
    decode_rows,
    expected_sampling_seconds,
    expected_training_seconds,
    least_training_flops,
    sampling_seconds,
    training_seconds,
)
from mint.models.random_base import SHAPES, ModelShape

LARGE = SHAPES["qwen3-0.6b"]
RATES: Rates = {
    "block": {"64": 300e9, "512": 380e9, "2048": 400e9},
    "unembedding": {"64": 300e9, "512": 390e9, "2048": 350e9},
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
    parameters = 440.4e6 + 155.6e6
    assert 64_000 / sampling_seconds(shape, RATES, "bfloat16") == pytest.approx(300e9 / (2 * parameters), rel=1e-2)


def test_a_group_s_prompt_is_prefilled_once() -> None:
    short, long = (GrpoShape(model=LARGE, prompt_tokens=tokens) for tokens in (100, 612))
    more = sampling_seconds(long, RATES, "bfloat16") - sampling_seconds(short, RATES, "bfloat16")
    assert more == pytest.approx(8 * 512 * 2 * 440.4e6 / 400e9, rel=1e-2)


def test_what_is_no_product_is_expected_to_take_a_time_for_each_number_that_the_layers_make() -> None:
    shape = GrpoShape(model=LARGE, prompts=2, group=4, prompt_tokens=10, max_tokens=6)
    of_row = 28 * (2048 + 1024 + 1024 + 1024 + 3072 + 3072 + 1024)
    numbers = (2 * 10 + 8 * 5) * of_row + 8 * 6 * 151_936
    sampling = expected_sampling_seconds(shape, RATES, "bfloat16", 2) - sampling_seconds(shape, RATES, "bfloat16")
    assert sampling == pytest.approx(numbers * SAMPLING_REST_S / 2)
    training = expected_training_seconds(shape, RATES, 1) - training_seconds(shape, RATES)
    assert training == pytest.approx(numbers * TRAINING_REST_S)


def test_training_counts_frozen_weights_twice_and_the_unembedding_at_targets_only() -> None:
    shape = GrpoShape(model=LARGE, prompts=2, group=4, prompt_tokens=1, max_tokens=6)
    computed, targets = 2 * 1 + 8 * 5, 8 * 6
    first_block_inputs = computed * 2 * 1024 * (2048 + 1024 + 1024)
    flops = computed * (4 * 440.4e6 + 4 * 10.1e6) + targets * 4 * 155.6e6 - first_block_inputs
    assert training_seconds(shape, RATES) == pytest.approx(flops / 400e9, rel=1e-3)


def test_training_needs_only_keys_and_values_of_prompt_rows_in_the_last_block() -> None:
    short, long = (GrpoShape(model=LARGE, prompts=2, group=4, prompt_tokens=tokens) for tokens in (1, 101))
    of_block = (440.4e6 + 10.1e6) / 28
    outputs = 1024 * (2048 + 2048 + 3 * 3072) + 16 * (3 * (1024 + 3072) + 2 * (1024 + 2048))
    flops = 200 * 4 * (28 * of_block - outputs) - 200 * 2 * 1024 * (2048 + 1024 + 1024)
    assert least_training_flops(long) - least_training_flops(short) == pytest.approx(flops, rel=1e-3)


def test_rates_of_a_gpu_are_those_with_many_rows() -> None:
    gpu = {"64": 300e9, "8192": 800e9}  # twice as many as a CPU's
    rates: Rates = {"block": gpu, "unembedding": gpu, "read": RATES["read"]}
    shape = GrpoShape(model=LARGE, prompt_tokens=100, max_tokens=50)
    assert training_seconds(shape, rates, "cuda") == pytest.approx(training_seconds(shape, RATES) / 2)
    assert sampling_seconds(shape, rates, "bfloat16", "cuda") < sampling_seconds(shape, RATES, "bfloat16")


def test_the_model_s_flops_count_every_sequence_and_the_pairs_of_tokens_that_see_each_other() -> None:
    short, long = (GrpoShape(model=LARGE, prompts=2, group=3, prompt_tokens=t, max_tokens=6) for t in (10, 1010))
    pairs = 6 * (1016 * 1017 - 16 * 17) / 2
    dense = 6 * 1000 * (4 * 440.4e6 + 6 * 10.1e6)
    more = training_flops(long) - training_flops(short)
    # two products forward and four backward, over 28 layers of 16 heads of 128
    assert more == pytest.approx(dense + 6 * 2 * pairs * 28 * 16 * 128, rel=1e-3)


def test_decoding_reads_all_weights_and_each_sequence_s_own_keys_and_values_at_every_step() -> None:
    shape = GrpoShape(model=LARGE, prompts=2, group=3, prompt_tokens=10, max_tokens=5)
    weights = LARGE.block_parameters + LARGE.unembedding_parameters + 16 * LARGE.lora_parameters_per_rank
    tokens = 6 * (11 + 12 + 13 + 14)
    assert decode_bytes(shape, "bfloat16") == 2 * (4 * weights + tokens * 28 * 2 * 8 * 128)


def test_figures_of_a_gpu_are_shares_of_what_was_measured_and_of_the_datasheet() -> None:
    row = {"contender": "mint", "seconds_median": 2.0}
    found = flops_row(row, 400e12, 800e12, datasheet_flops("NVIDIA H100 80GB HBM3"))
    assert (found["model_teraflops"], found["utilisation"]) == (200, 0.25)
    assert found["utilisation_of_datasheet"] == pytest.approx(200 / 989)
    assert flops_row(row, 1.0, 1.0, datasheet_flops("another"))["utilisation_of_datasheet"] is None
    found = bandwidth_row(row, 2e12, {"read_bytes_per_second": 4e12})
    assert (found["decode_gigabytes_per_second"], found["bandwidth_share"]) == (1000, 0.25)
    assert flops_row({"failure": "none"}, 1.0, 1.0, None) == bandwidth_row({"failure": "none"}, 1.0, {})


@pytest.mark.slow
def test_rates_are_measured_for_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    spec = {"threads": 1, "dtype": "float32", "model": asdict(ModelShape()), "rows": [64, 512]}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "benchmarks.peers.limits", str(tmp_path / "spec.json")]
    with Worker("limit", command, log_path=tmp_path / "log", environment={"OMP_NUM_THREADS": "1"}) as worker:
        worker.hear("ready", timeout_s=60)
        rates = worker.ask("step", answer="step", timeout_s=60)
    for kind in ("block", "unembedding"):
        assert set(rates[kind]) == {"64", "512"}
        assert all(1e8 < rate < 1e14 for rate in rates[kind].values())
    assert 1e8 < rates["read"] < 1e13
