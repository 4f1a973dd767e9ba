"""Training is compared only between sides with the same loss and gradient, and its data is that of a GRPO step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sides import silent

from benchmarks.compare.base_models import adapter_files, base_model_folder
from benchmarks.compare.contenders import BENCH_BASE, ENVIRONMENTS, make_worker, mint_worker
from benchmarks.compare.report import comparison_row, side_row
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.train import check_same_training, computed_rows, peers_of, train_spec, workloads
from benchmarks.compare.turns import Measured, take_turns
from mint.errors import RequestFailedError
from mint.models.random_base import SHAPES


def side(name: str, **changes: Any) -> Measured:
    step = {"wall_s": 1.0, "cpu_s": 1.0, "idle_cpu_s": 0.0, "tokens": 5120}
    step |= {"loss": changes.get("loss", -0.01), "gradient_norm": changes.get("gradient_norm", 0.5)}
    ready = {"probe_logprob": -490.0, "trained_parameters": 155_648, "dtype": "float32", "threads": 1}
    ready |= {key: value for key, value in changes.items() if key in ready}
    finished = {"probe_logprob": changes.get("after", -489.0), "versions": {}}
    return Measured(name, ready, [step, step], finished, peak_rss_bytes=2**20)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": -0.011},
        {"loss": float("nan")},
        {"gradient_norm": 0.502},
        {"after": -490.0},
        {"after": -488.9},
        {"probe_logprob": -490.1},
        {"trained_parameters": 155_000},
        {"threads": 2},
    ],
)
def test_unequal_training_is_never_compared(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestFailedError, match="peer"):
        check_same_training([side("mint"), side("peer", **changes)], same_sequences=True)


def test_sides_with_fewer_sequences_are_compared_by_where_they_start() -> None:
    check_same_training([side("mint"), side("peer", loss=-0.3, after=-480.0)], same_sequences=False)
    with pytest.raises(RequestFailedError, match="peer"):
        check_same_training([side("mint"), side("peer", probe_logprob=-480.0)], same_sequences=False)


def test_advantages_cancel_out_within_each_group_and_are_divided_by_the_tokens(tmp_path: Path) -> None:
    shape = GrpoShape(prompts=3, group=4, max_tokens=7)
    spec = train_spec(shape, base_model=tmp_path, steps=2, threads=1, dtype="float32")
    advantages = np.array(spec["advantages"]).reshape(6, 4) * 12 * 7
    assert np.allclose(advantages.sum(axis=1), 0)
    assert 0.3 < np.abs(advantages).mean() < 1.5
    assert np.array(spec["completions"]).shape == (24, 7)
    assert len(spec["prompts"]) == 6


def test_training_is_measured_with_shared_prompts_and_without_any(tmp_path: Path) -> None:
    shared, distinct = workloads(GrpoShape(prompts=3, group=4, prompt_tokens=10, max_tokens=5))
    assert (shared.trained_tokens, distinct.trained_tokens) == (180, 180)
    assert len(train_spec(distinct, base_model=tmp_path, steps=1, threads=1, dtype="float32")["prompts"]) == 12
    assert workloads(distinct) == [distinct]
    assert computed_rows("mint", shared) == computed_rows("hf-shared", shared) == 3 * 10 + 12 * 4
    assert computed_rows("hf-best", shared) == computed_rows("hf-best", distinct) == 12 * 15
    assert computed_rows("mint", distinct) == 12 * 14
    assert "hf-shared" in peers_of(shared)
    assert "hf-shared" not in peers_of(distinct)


def test_time_is_also_compared_for_each_computed_row() -> None:
    rows = [side_row(side("mint"), "train") | {"computed_rows": 100}]
    rows += [side_row(side("peer"), "train") | {"computed_rows": 250}]
    comparison = comparison_row(rows, {})
    assert comparison["cpu_ratios"] == {"peer": 1}
    assert comparison["row_ratios"] == {"peer": pytest.approx(0.4)}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_peers_with_an_environment(name: str) -> None:
    for peer in peers_of(GrpoShape(model=SHAPES[name])).values():
        assert peer.environment in ENVIRONMENTS
        assert peer.overrides["settings"]["micro_batch"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transformers_and_mint_take_the_same_training_step(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    shape = GrpoShape(prompts=2, group=3, prompt_tokens=5, max_tokens=4)
    base = base_model_folder(tmp_path, shape.model, seed=0, say=silent)
    adapter = adapter_files(tmp_path, shape, seed=0, base_name=BENCH_BASE)
    spec = train_spec(shape, base_model=base, steps=3, threads=1, dtype="float32") | {
        "adapter": str(adapter.folder),
        "adapter_archive": str(adapter.archive),
    }
    workers = [mint_worker(spec, tmp_path)]
    for name, peer in peers_of(shape).items():
        workers.append(make_worker(name, peer, spec, tmp_path, {"trl": Path(sys.executable)}))
    workers.append(mint_worker(spec, tmp_path, "engine"))
    sides = take_turns(workers, warm_ups=1, repeats=2, say=silent)
    assert [each.failure for each in sides] == [""] * 5
    check_same_training(sides, same_sequences=True)
