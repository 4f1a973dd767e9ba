"""Samples from replicas: the bits of one process, also if a replica is lost, and each token is told once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_data import LORA, job
from small_models import write_model
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from clusters import cluster, torch_engine

from mint.cluster.engine import ClusterEngine
from mint.cluster.replicas import Replicas
from mint.engine.protocol import CANCELLED, Engine, LogitRules, SampleJob, SampleResult, StopRule
from mint.errors import InvalidRequestError, NotFoundError

pytestmark = pytest.mark.slow

VERSIONS = 3
SILENCE_S = 5.0


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return with_weights(torch_engine(), folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ClusterEngine]:
    engine = cluster(1, samplers=2)
    yield with_weights(engine, folder)
    engine.close()


def with_weights(engine: Any, folder: Path) -> Any:
    """The engine with base `base` and some versions of weights on it."""
    engine.load_base("base", str(folder))
    for number in range(VERSIONS):
        engine.load_weights(f"w{number}", "base", LORA, random_weights(folder, number))
    return engine


def random_weights(folder: Path, seed: int) -> dict[str, np.ndarray]:
    """Weights of a lora on the base."""
    shapes = torch_engine()
    shapes.load_base("base", str(folder))
    shapes.create_model("m", "base", LORA)
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.1, array.shape).astype(np.float32) for name, array in shapes.read_weights("m").items()
    }


def some_jobs(count: int = 12, *, tokens: int = 40) -> list[SampleJob]:
    """Jobs of several weights, which share beginnings; some have rules, or ask for more than tokens."""
    rng = np.random.default_rng(4)
    heads = [rng.integers(3, 90, 70) for _ in range(3)]
    words = tuple(b"%d " % token for token in range(97))
    jobs = []
    for number in range(count):
        prompt = np.concatenate([heads[number % 3], rng.integers(3, 90, 1 + number)])
        weights_id = None if number % 4 == 3 else f"w{number % VERSIONS}"
        own = job(prompt.tolist(), weights_id=weights_id, num_samples=1 + number % 4, max_tokens=tokens, seed=number)
        if number % 5 == 1:
            own = replace(own, stop=StopRule(frozenset([5]), (b"7 1",), words))
        if number % 5 == 2:
            own = replace(own, prompt_logprobs=True, topk_sample_logprobs=3, logprobs_mode="both", top_p=0.9)
        if number % 5 == 3:
            own = replace(own, rules=LogitRules(allowed=np.arange(10, 60), repetition_penalty=1.2))
        jobs.append(own)
    return jobs


def bits(result: SampleResult) -> list[object]:
    """All numbers of a result, to the last bit; what was cached is left out."""
    found: list[object] = [result.error]
    found += [None if result.prompt_logprobs is None else result.prompt_logprobs.tobytes()]
    for sample in result.samples:
        found += [sample.tokens.tobytes(), sample.logprobs.tobytes(), sample.stopped]
        found += [None if sample.topk is None else (sample.topk.tokens.tobytes(), sample.topk.logprobs.tobytes())]
        found += [None if sample.processed is None else sample.processed.tobytes()]
    return found


def test_samples_have_the_bits_of_one_process_on_both_replicas(alone: Engine, engine: ClusterEngine) -> None:
    jobs = some_jobs()
    expected = [bits(result) for result in alone.sample(jobs)]
    engine.sample(jobs[:1])
    wait_until(lambda: engine.sample(jobs[:1]) and len(engine.replica_processes) == 2)
    assert [bits(result) for result in engine.sample(jobs)] == expected
    state = engine.cluster_state
    assert [own["sequences"] for own in state["replicas"]] == [0, 0] and state["versions"] == VERSIONS
    assert all(own["loras"] for own in state["replicas"]), "one replica has sampled everything"
    assert engine.sampling_counters()["sampled"] > 0 and engine.kv_pages()["total"] > 0


def test_replicas_come_and_go_while_jobs_run_and_give_the_same_bits(alone: Engine, engine: ClusterEngine) -> None:
    jobs = some_jobs(tokens=200)
    expected = [bits(result) for result in alone.sample(jobs)]
    lost = engine.cluster_state["samplers_lost"]
    batch, results = engine.open_batch(), {}
    for place, own in enumerate(jobs):
        batch.add(str(place), own)
    while not all(own["sequences"] for own in engine.cluster_state["replicas"]):
        results |= batch.step()
    engine.resize(samplers=1)
    while batch.keys:
        results |= batch.step()
    assert [bits(results[str(place)]) for place in range(len(jobs))] == expected
    assert [bits(result) for result in engine.sample(jobs)] == expected
    assert len(engine.replica_processes) == 1
    engine.resize(samplers=2)
    wait_until(lambda: engine.sample(jobs[:1]) and len(engine.replica_processes) == 2)
    assert [bits(result) for result in engine.sample(jobs)] == expected
    assert engine.cluster_state["samplers_lost"] == lost


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_jobs_of_a_lost_replica_run_again_and_no_token_is_told_twice(
    alone: Engine, engine: ClusterEngine, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(engine._sampling, "_silence_s", SILENCE_S)
    jobs = some_jobs(tokens=300)
    expected = alone.sample(jobs)
    lost = engine.cluster_state["samplers_lost"]
    batch, results = engine.open_batch(), {}
    heard: dict[str, list[tuple[int, int, float]]] = {}
    for place, own in enumerate(jobs):
        told = heard.setdefault(str(place), [])
        batch.add(str(place), own, lambda *token, told=told: told.append(token))
    while sum(map(len, heard.values())) < 200:
        results |= batch.step()
    victim = max(engine.cluster_state["replicas"], key=lambda own: own["sequences"])["process"]
    os.kill(victim, how)
    while batch.keys:
        results |= batch.step()
    assert engine.cluster_state["samplers_lost"] == lost + 1
    for place, result in enumerate(expected):
        assert bits(results[str(place)]) == bits(result)
        for index, sample in enumerate(result.samples):
            told = [(token, logprob) for which, token, logprob in heard[str(place)] if which == index]
            raw = sample.logprobs.tolist()
            assert told == list(zip(sample.tokens.tolist(), raw, strict=True))
    wait_until(lambda: engine.sample(jobs[:1]) and len(engine.replica_processes) == 2)
    wait_until(lambda: not Path(f"/proc/{victim}").exists())


def test_weights_that_are_dropped_serve_the_jobs_that_use_them(
    alone: Engine, engine: ClusterEngine, folder: Path
) -> None:
    own = replace(some_jobs()[0], weights_id="dropped", max_tokens=300)
    for each in (alone, engine):
        each.load_weights("dropped", "base", LORA, random_weights(folder, VERSIONS))
    batch = engine.open_batch()
    batch.add("own", own)
    engine.drop_weights("dropped")
    results = {}
    while batch.keys:
        results |= batch.step()
    assert bits(results["own"]) == bits(alone.sample([own])[0])
    with pytest.raises(NotFoundError):
        batch.add("late", own)
    assert not batch.keys


def test_a_cancelled_job_ends_at_once_and_its_replica_is_free_again(engine: ClusterEngine) -> None:
    batch = engine.open_batch()
    batch.add("long", job([3, 4], num_samples=4, max_tokens=400))
    batch.add("short", job([3, 4], max_tokens=4))
    results = {}
    while "short" not in results:
        results |= batch.step()
    batch.cancel("long")
    assert batch.step()["long"].error == CANCELLED and not batch.keys
    assert sum(own["sequences"] for own in engine.cluster_state["replicas"]) == 0


def test_a_job_that_fails_on_a_replica_fails_alone(alone: Engine, engine: ClusterEngine) -> None:
    jobs = some_jobs()
    expected = alone.sample(jobs)
    batch, results = engine.open_batch(), {}
    heard: dict[str, list[tuple[int, int, float]]] = {}
    for place, own in enumerate(jobs):
        told = heard.setdefault(str(place), [])
        batch.add(str(place), own, lambda *token, told=told: told.append(token))
    while not any(heard.values()):
        results |= batch.step()
    for number in range(2):
        batch.add(f"bad {number}", replace(job([3, 4]), rules=LogitRules(allowed=np.array([5000]))))
    while batch.keys:
        results |= batch.step()
    assert "Error" in results["bad 0"].error and "Error" in results["bad 1"].error
    for place, result in enumerate(expected):
        assert bits(results[str(place)]) == bits(result)
        assert len(heard[str(place)]) == sum(len(sample.tokens) for sample in result.samples)
    assert engine.sample([job([3, 4])])[0].error is None


def test_a_listener_that_fails_ends_the_step(engine: ClusterEngine) -> None:
    def fails(*_token: object) -> None:
        raise ZeroDivisionError("the listener is broken")

    batch = engine.open_batch()
    batch.add("heard", job([3, 4]), fails)
    with pytest.raises(ZeroDivisionError):
        while batch.keys:
            batch.step()
    assert engine.sample([job([3, 4])])[0].error is None


def test_a_replica_with_other_numbers_is_refused(folder: Path) -> None:
    engine = cluster(1, samplers=1, rank_dtype="bfloat16")
    engine.load_base("base", str(folder))
    with pytest.raises(InvalidRequestError, match="dtype"):
        engine.sample([job([3, 4])])
    engine.close()


def test_a_replica_whose_base_has_other_weights_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    engine = cluster(1, samplers=1)
    engine.load_base("base", str(tmp_path))
    write_model(tmp_path, "tied", seed=1)  # a replica reads it with the first sample
    with pytest.raises(InvalidRequestError, match="base_fingerprint"):
        engine.sample([job([3, 4])])
    engine.close()


def test_replicas_that_cannot_start_fail_the_jobs_with_the_reason(folder: Path) -> None:
    def open_replica(_peers: object) -> Any:
        raise ValueError("there is no such device")

    replicas = Replicas(open_replica, 1, check_base=lambda _info: None)
    replicas.load_base("base", str(folder))
    batch = replicas.open_batch()
    batch.add("own", job([3, 4]))
    with pytest.raises(RuntimeError, match="no such device"):
        while batch.keys:
            batch.step()
    assert not batch.keys or replicas.state["waiting"] == 0
    replicas.close()
