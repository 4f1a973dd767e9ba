"""A real vLLM as the sampler: it learns as with mint's own, and one that does not apply loras is refused."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from vllm_server import NAME, TINY, VllmServer

import mint
from mint.cluster.external.engine import ExternalEngine
from mint.cluster.external.samplers import ExternalSamplers
from mint.engine.protocol import LoraSpec, ModelState, SampleJob, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError
from mint.recipes.task_registry import load_task
from mint.rl import run_grpo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 30

PROMPT = np.array([55, 32, 284, 275, 227, 24, 272, 227, 29, 283, 39, 32])
"""A question of the math task."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    own = VllmServer(tmp_path_factory.mktemp("vllm"), "--enable-scale-out")
    try:
        own.start()
        yield own
    finally:
        own.kill()


def trainer() -> TorchEngine:
    return TorchEngine(dtype="float32", threads=1, device="cpu")


def job(weights_id: str | None, seed: int = 0) -> SampleJob:
    return SampleJob(str(TINY), weights_id, PROMPT, 4, 12, 1.0, -1, 1.0, seed, StopRule(frozenset({205})))


def test_loras_are_applied_and_logprobs_are_those_of_the_trainer(server: VllmServer) -> None:
    engine = ExternalEngine(trainer(), ExternalSamplers([server.address]))
    try:
        engine.load_base(str(TINY), str(TINY))
        effective = engine.create_model("m", str(TINY), LoraSpec(16, 7, True, True, True))
        assert effective["sampler_promise"] == "measured" and effective["sampler_gap_at_start"] < 1e-4
        rng = np.random.default_rng(3)
        start = engine.read_state("m").weights
        noise = {name: rng.normal(0, 0.03, array.shape).astype(np.float32) for name, array in start.items()}
        engine.write_state("m", ModelState({n: start[n] if "lora_A" in n else noise[n] for n in start}))
        engine.publish("m", "w")
        results = engine.sample([*(job("w", seed) for seed in range(8)), job(None)])
        assert all(result.error is None and len(result.samples) == 4 for result in results)
        details = results[0].samples[0].details
        assert details is not None and details["weight_versions"][0]["end"] == len(results[0].samples[0].tokens)
        again = engine.sample([job("w", 3)])[0].samples
        assert [each.tokens.tolist() for each in again] == [each.tokens.tolist() for each in results[3].samples]
        engine.drop_weights("w")
    finally:
        engine.close()
    names = [model["id"] for model in httpx.get(f"{server.address}/v1/models").json()["data"]]
    assert names == [NAME]


def test_it_learns_as_with_the_local_sampler(
    server: VllmServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice = load_task("math", seed=0)
    results = {}
    for name in ("local", "vllm"):
        monkeypatch.setenv("MINT_HOME", str(tmp_path / name))
        monkeypatch.setenv("MINT_SAMPLER", f"vllm={server.address}" if name == "vllm" else "")
        config = choice.config.model_copy(update={"steps": STEPS, "run_dir": tmp_path / name / "run"})
        with caplog.at_level(logging.WARNING):
            results[name] = run_grpo(choice.adapter, config)
    local, other = results["local"], results["vllm"]
    print({name: (own.heldout_before, own.heldout_after, own.max_abs_logprob_diff) for name, own in results.items()})
    for temperature in (0.0, 1.0):
        assert other.heldout_after[temperature].low > other.heldout_before[temperature].high
        mine, its = local.heldout_after[temperature], other.heldout_after[temperature]
        assert its.low <= mine.high and mine.low <= its.high
    assert 0 < other.max_abs_logprob_diff < 1e-3
    assert not [finding for finding in other.findings if finding.severity == "error"]
    rows = [json.loads(line) for line in (tmp_path / "vllm" / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [
        row["metrics"]["mismatch/k3"] if "metrics" in row else row["mismatch/k3"]
        for row in rows
        if "mismatch" in str(row)
    ]
    assert len(gaps) == STEPS and max(gaps) < 1e-6
    effective = json.loads((tmp_path / "vllm" / "run" / "effective.json").read_text())
    assert effective["sampler"] == server.address
    assert effective["truncated_by_default"]["loss_fn_config"] == {"tis_cap": 2.0}
    assert "the trainer's logprobs differ" in caplog.text


def test_a_vllm_that_is_killed_and_comes_back_costs_no_request(server: VllmServer) -> None:
    engine = ExternalEngine(trainer(), ExternalSamplers([server.address]))
    try:
        engine.load_base(str(TINY), str(TINY))
        engine.create_model("m", str(TINY), LoraSpec(8, 7, True, True, False))
        engine.publish("m", "w")
        results: list[Any] = []
        jobs = [job("w", seed) for seed in range(64)]
        thread = threading.Thread(target=lambda: results.extend(engine.sample(jobs)))
        thread.start()
        while not engine.cluster_state["external"]["hosts"][0]["sequences"]:
            time.sleep(0.01)
        server.kill()
        while engine.cluster_state["external"]["hosts"][0]["up"]:
            time.sleep(0.01)
        server.start()
        thread.join(300)
        assert len(results) == 64 and all(result.error is None for result in results)
        assert engine.cluster_state["external"]["hosts"][0]["lost"] == 1
    finally:
        engine.close()


REFUSED = {
    "no scale-out": ((), "--enable-scale-out"),
    "loras on two layers": (("--enable-scale-out", "--lora-target-modules", "q_proj", "v_proj"), "LoRA"),
}
"""The options of a vLLM that must not be used, and a word of the refusal."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_vllm_that_does_not_apply_loras_is_refused_at_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, word = REFUSED[name]
    server = VllmServer(tmp_path, *options)
    try:
        server.start()
        monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("MINT_SAMPLER", f"vllm={server.address}")
        with mint.ServiceClient() as service, pytest.raises(InvalidRequestError, match=word) as refused:
            service.create_lora_training_client(base_model="mint/tiny", rank=8)
        print(refused.value)
    finally:
        server.kill()
