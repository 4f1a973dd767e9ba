"""Sampling is compared only between sides that sampled everything, from the same weights, with true logprobs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sides import MACHINE, silent
from rich.console import Console

from benchmarks.compare.base_models import adapter_files, base_model_folder
from benchmarks.compare.contenders import BENCH_BASE, ENVIRONMENTS, make_worker, mint_worker
from benchmarks.compare.grpo import PEERS as GRPO_PEERS
from benchmarks.compare.report import comparison_row, limit_row, print_table, side_row
from benchmarks.compare.sample import PEERS, check_same_samples, step_spec
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.turns import ROOT, Measured, take_turns
from mint.errors import RequestFailedError

SHAPE = GrpoShape()
RATES = [{"block": {"64": 1e11}, "unembedding": {"64": 1e11}, "read": 3e10}]


def side(name: str, *, seconds: float = 1.0, without: str = "", **changes: Any) -> Measured:
    step = {"wall_s": seconds, "cpu_s": seconds, "idle_cpu_s": 0.0}
    step |= {"tokens": 2048, "completion_lengths": changes.pop("lengths", [32] * 64)}
    ready = {"probe_logprob": -490.0, "base_probe_logprob": -494.0, "dtype": "float32", "threads": 1}
    ready |= {key: value for key, value in changes.items() if key in ready}
    ready.pop(without, None)
    finished = {"sample_logprob_error": changes.get("sample_logprob_error", 1e-6), "versions": {}}
    return Measured(name, ready, [step, step], finished, peak_rss_bytes=2**20)


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": [32] * 63 + [31]},
        {"lengths": [32] * 63},
        {"probe_logprob": -489.9},
        {"without": "probe_logprob", "base_probe_logprob": -493.9},
        {"sample_logprob_error": 0.01},
        {"dtype": "bfloat16"},
        {"threads": 2},
    ],
)
def test_unequal_samples_are_never_compared(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestFailedError, match="peer"):
        check_same_samples([side("mint"), side("peer", **changes)], SHAPE)


def test_a_side_without_a_lora_is_compared_by_the_base() -> None:
    check_same_samples([side("mint"), side("llama", without="probe_logprob")], SHAPE)
    other_base = side("llama", without="probe_logprob", base_probe_logprob=-493.9)
    with pytest.raises(RequestFailedError, match="llama has a base_probe_logprob"):
        check_same_samples([side("mint"), other_base], SHAPE)


def test_a_side_that_failed_is_said_to_and_not_compared() -> None:
    sides = [side("mint"), Measured("hf", {}, (), {}, 0, "out of memory"), side("hf-best", seconds=2.0)]
    check_same_samples(sides, SHAPE)
    rows = [side_row(each, "sample") for each in sides]
    comparison = comparison_row(rows, MACHINE)
    assert rows[1] == {"bench": "sample", "contender": "hf", "failure": "out of memory"}
    assert comparison["ratios"] == {"hf-best": 2.0}


def test_the_share_of_the_limit_is_that_of_tokens_per_second(tmp_path: Path) -> None:
    rows = [side_row(side("mint"), "sample"), side_row(side("peer", seconds=4.0), "sample")]
    limit = limit_row("sample", 2048, [0.5, 0.5], RATES)
    comparison = comparison_row(rows, MACHINE, limit)
    assert comparison["ratio_to_limit"] == comparison["cpu_ratio_to_limit"] == {"mint": 0.5, "peer": 0.125}
    everything = [*rows, {"bench": "sample", "contender": "hf", "failure": "[out] of memory"}, limit, comparison]
    assert json.loads(json.dumps(everything)) == everything
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    print_table(everything, console)
    text = console.export_text()
    assert all(part in text for part in ("4.00x", "50%", "12%", "limit", "failed", "hf: [out] of memory"))


def test_fewer_tokens_in_less_time_are_not_faster() -> None:
    few = side("peer", seconds=0.5)
    few = replace(few, steps=[{**step, "tokens": 512} for step in few.steps])
    comparison = comparison_row([side_row(side("mint"), "sample"), side_row(few, "sample")], MACHINE)
    assert comparison["ratios"] == {"peer": 2.0}


def test_every_peer_has_an_environment_and_a_worker() -> None:
    for peer in (PEERS | GRPO_PEERS).values():
        assert peer.environment in ENVIRONMENTS or (peer.environment is None and peer.worker == "mint_service")
        assert (ROOT / "benchmarks" / "peers" / f"{peer.worker}.py").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transformers_and_mint_sample_from_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    shape = GrpoShape(prompts=2, group=2, prompt_tokens=5, max_tokens=4)
    base = base_model_folder(tmp_path, shape.model, seed=0, say=silent)
    adapter = adapter_files(tmp_path, shape, seed=0, base_name=BENCH_BASE)
    spec = step_spec("sample", shape, base_model=base, steps=2, threads=1, dtype="float32") | {
        "adapter": str(adapter.folder),
        "adapter_archive": str(adapter.archive),
    }
    pythons = {"trl": Path(sys.executable)}
    names = ["hf", "hf-best", "hf-shared", "hf-merged"]
    workers = [mint_worker(spec, tmp_path)]
    workers += [make_worker(name, PEERS[name], spec, tmp_path, pythons) for name in names]
    workers.append(mint_worker(spec, tmp_path, "engine"))
    sides = take_turns(workers, warm_ups=1, repeats=1, say=silent)
    assert [each.failure for each in sides] == [""] * 6
    check_same_samples(sides, shape)
