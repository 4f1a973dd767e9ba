"""Sampling from models of transformers whose caches have too little memory: the same samples, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import LORA, job, train
from small_models import write_other_model

from mint.engine.memory.cache_budget import CacheBudget
from mint.engine.protocol import CANCELLED, SampleJob, SampleResult, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.engine.transformers.base import TransformersBase
from mint.engine.transformers.decoder import TransformersDecoder
from mint.engine.transformers.sampler import CacheUse, TransformersSampler

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Of the shape of `write_other_model`: 2 layers, keys and values, 2 heads of 16 numbers in float32."""

Heard = dict[tuple[int, int], list[tuple[int, float]]]

CACHED = pytest.mark.parametrize("family", ["glm4", "olmo_hybrid"])  # a shared prompt, and separate ones


def _engine(folder: Path, cache_bytes: int | None = None) -> TorchEngine:
    engine = TorchEngine(
        dtype="float32", threads=1, device="cpu", implementation="transformers", kv_cache_bytes=cache_bytes
    )
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    train(engine, "m", steps=1)
    engine.publish("m", "w")
    return engine


def _base(engine: TorchEngine) -> TransformersBase:
    base = engine._bases["base"]
    assert isinstance(base, TransformersBase)
    return base


def _bytes_for(engine: TorchEngine, sequences: int, tokens: int) -> int:
    return _base(engine)._cache_budget.cost.of(sequences, tokens)


def _run(engine: TorchEngine, jobs: Sequence[SampleJob], heard: Heard | None = None) -> list[SampleResult]:
    """Samples jobs together; the caches never take more than their budget."""
    told: Heard = {} if heard is None else heard
    base = _base(engine)
    sampler = base.open_sampler()
    weights = engine._published["w"].weights
    for place, own in enumerate(jobs):

        def listen(sample: int, token: int, logprob: float, place: int = place) -> None:
            told.setdefault((place, sample), []).append((token, logprob))

        sampler.add(str(place), own, weights, listen)
    results: dict[str, SampleResult] = {}
    while sampler.keys:
        results |= sampler.step()
        held = sum(part.cache.size_bytes for part in sampler._running if part.cache is not None)
        assert held <= base._cache_budget.limit_bytes
    assert not sampler._running and not sampler._waiting
    return [results[str(place)] for place in range(len(jobs))]


def _assert_same(found: SampleResult, expected: SampleResult) -> None:
    """Equal tokens, and logprobs up to rounding: a prefill rounds otherwise than decoding does."""
    assert found.error is None and expected.error is None
    assert len(found.samples) == len(expected.samples)
    for own, other in zip(found.samples, expected.samples, strict=True):
        assert own.tokens.tolist() == other.tokens.tolist() and own.stopped == other.stopped
        assert np.abs(own.logprobs - other.logprobs).max(initial=0) <= 1e-4
    if expected.prompt_logprobs is not None and found.prompt_logprobs is not None:
        assert np.array_equal(found.prompt_logprobs[1:], expected.prompt_logprobs[1:])


def test_what_a_token_takes_is_measured(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    cost = _base(_engine(tmp_path))._cache_budget.cost
    assert (cost.sequence, cost.token) == (0, TOKEN_BYTES)


def test_a_hybrid_takes_some_for_each_sequence_and_some_for_each_token(tmp_path: Path) -> None:
    write_other_model(tmp_path, "olmo_hybrid")
    cost = _base(_engine(tmp_path))._cache_budget.cost
    # One layer in four attends. The states of the others: at least 4 heads of 8 × 8 numbers in each of 3 layers.
    assert cost.token == TOKEN_BYTES // 2 and cost.sequence >= 3 * 4 * 8 * 8 * 4


@CACHED
@pytest.mark.parametrize("fitting", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_group_that_is_larger_than_the_cache_has_the_samples_of_a_large_one(
    tmp_path: Path, family: str, fitting: int
) -> None:
    write_other_model(tmp_path, family)
    group = job([5, 6, 7] * 9, num_samples=8, max_tokens=60, seed=3, prompt_logprobs=True)
    large = _engine(tmp_path)
    small = _engine(tmp_path, _bytes_for(large, fitting, 27 + 60))
    heard: Heard = {}
    (expected,), (found,) = _run(large, [group]), _run(small, [group], heard)
    _assert_same(found, expected)
    assert large.sampling_counters()["preemptions"] == 0 < small.sampling_counters()["preemptions"]
    for index, sample in enumerate(found.samples):
        assert heard[0, index] == list(zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True))


@CACHED
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_any_jobs_in_a_small_cache_have_the_samples_that_they_have_alone(
    tmp_path: Path, family: str, seed: int
) -> None:
    write_other_model(tmp_path, family)
    rng = np.random.default_rng(seed)
    jobs = [
        job(
            rng.integers(3, 97, int(rng.choice([1, 9, 40]))).tolist(),
            num_samples=int(rng.integers(1, 7)),
            max_tokens=int(rng.choice([0, 1, 2, 25, 50])),
            seed=int(rng.integers(1 << 40)),
            stop=StopRule(frozenset(rng.integers(0, 97, 2).tolist())),
            prompt_logprobs=bool(rng.random() < 0.3),
            cache_scope=str(rng.integers(2)),
        )
        for _ in range(8)
    ]
    jobs.append(job([8] * 30, num_samples=6, max_tokens=50, seed=seed))
    large = _engine(tmp_path)
    expected = [large.sample([own])[0] for own in (_with_weights(own) for own in jobs)]
    small = _engine(tmp_path, _bytes_for(large, 3, 90))
    for found, alone in zip(_run(small, jobs), expected, strict=True):
        _assert_same(found, alone)
    assert small.sampling_counters()["preemptions"] > 0


def _with_weights(own: SampleJob) -> SampleJob:
    return replace(own, weights_id="w")


def test_a_sequence_that_does_not_fit_alone_fails_alone_and_names_the_setting(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    engine = _engine(tmp_path, 50 * TOKEN_BYTES)
    jobs = [job([3, 4], max_tokens=9), job([5, 6], num_samples=2, max_tokens=70), job([7] * 60, max_tokens=3)]
    fine, grown, long = _run(engine, [*jobs])
    for failed in (grown, long):
        assert failed.error is not None and "50 tokens" in failed.error and "MINT_KV_CACHE_MIB" in failed.error
    _assert_same(fine, _run(_engine(tmp_path), jobs[:1])[0])


def test_a_sequence_that_fills_the_cache_fits(tmp_path: Path) -> None:
    """Its last token is drawn and never run."""
    write_other_model(tmp_path, "glm4")
    own = job([3] * 10, num_samples=3, max_tokens=41)
    _assert_same(_run(_engine(tmp_path, 50 * TOKEN_BYTES), [own])[0], _run(_engine(tmp_path), [own])[0])


def test_a_cancelled_group_leaves_nothing(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    engine = _engine(tmp_path, 200 * TOKEN_BYTES)
    sampler = _base(engine).open_sampler()
    sampler.add("gone", job([5] * 20, num_samples=8, max_tokens=100), None, None)
    while not engine.sampling_counters()["preemptions"]:
        sampler.step()
    sampler.cancel("gone")
    assert sampler.step()["gone"].error == CANCELLED
    assert not sampler.keys and not sampler._running and not sampler._waiting


def _fail_logits(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """These calls of `logits`, counted from 1, find no memory."""
    plain: Callable[..., Any] = TransformersDecoder.logits
    count = 0

    def fails(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count in calls:
            raise torch.OutOfMemoryError
        return plain(*arguments)

    monkeypatch.setattr(TransformersDecoder, "logits", fails)


@pytest.mark.parametrize("family", ["glm4", "olmo_hybrid", "none"])
@pytest.mark.parametrize("failing", [{1}, {7}, {7, 8, 9}])
def test_where_the_device_is_out_of_memory_a_group_goes_on_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, failing: set[int]
) -> None:
    write_other_model(tmp_path, "glm4" if family == "none" else family)
    group = job([5, 6, 7] * 5, num_samples=8, max_tokens=20)
    expected, engine = _run(_engine(tmp_path), [group])[0], _engine(tmp_path)
    if family == "none":
        _base(engine)._cache_use = CacheUse.NONE
    _fail_logits(monkeypatch, failing)
    heard: Heard = {}
    (found,) = _run(engine, [group], heard)
    _assert_same(found, expected)
    assert all(len(heard[0, index]) == 20 for index in range(8))
    assert engine.sampling_counters()["preemptions"] >= 8


def test_one_sequence_without_memory_is_an_error_of_now_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_other_model(tmp_path, "glm4")
    own = job([5, 6, 7], max_tokens=20)
    engine = _engine(tmp_path)
    (expected,) = _run(engine, [own])
    _fail_logits(monkeypatch, {5, 6})
    sampler = _base(engine).open_sampler()
    sampler.add("one", own, engine._published["w"].weights, None)
    results: dict[str, SampleResult] = {}
    failures = 0
    while sampler.keys:
        try:
            results |= sampler.step()
        except MemoryError:
            failures += 1
    assert failures == 2
    _assert_same(results["one"], expected)


def test_jobs_wait_for_room_in_the_order_of_their_turns(tmp_path: Path) -> None:
    write_other_model(tmp_path, "glm4")
    engine = _engine(tmp_path)
    base = _base(engine)
    cost = base._cache_budget.cost
    budget = CacheBudget(cost, cost.of(4, 40))
    sampler = TransformersSampler(base._decoder, base._cache_use, budget, base._counters)
    for number in range(4):
        sampler.add(str(number), job([5 + number] * 20, num_samples=2, max_tokens=20), None, None)
    ended: list[str] = []
    while sampler.keys:
        ended += sorted(sampler.step())
    assert ended == ["0", "1", "2", "3"]
