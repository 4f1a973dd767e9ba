"""Sequences that give their pages back and go on later: the tokens and bits of a cache in which all fit at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Twin
from engine_data import LORA, job, train
from failing_decoder import fail_logits
from small_models import write_model

from mint.engine.drawing.token_masks import packed
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.protocol import CANCELLED, LogitBias, LogitRules, SampleJob, SampleResult, StopRule
from mint.engine.torch_engine import TorchEngine

PAGE_BYTES = 2 * 2 * 2 * PAGE_POSITIONS * 16 * 4
"""Keys and values of two layers with two kv heads of 16 numbers in float32."""

VOCAB = 97

Heard = dict[tuple[str, int], list[tuple[int, float]]]
Fresh = Callable[[int], TorchEngine]


class ThirdsGrammar:
    """Token i is i modulo 3, so that a state that missed a token, or has one twice, excludes what was drawn."""

    ends = frozenset({1})

    def __init__(self) -> None:
        self._count = 0

    def start(self) -> ThirdsGrammar:
        return ThirdsGrammar()

    def allowed(self, bits: np.ndarray) -> None:
        bits[:] = packed(np.arange(3 + self._count % 3, VOCAB, 3), VOCAB)

    def advance(self, token: int) -> None:
        assert token % 3 == self._count % 3
        self._count += 1


@pytest.fixture
def fresh(engine: TorchEngine, twin: Twin) -> Fresh:
    """Makes an engine with published weights and so many pages."""
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    return lambda pages: twin(engine, {"w": ("m", LORA)}, kv_cache_bytes=pages * PAGE_BYTES)


def _run(engine: TorchEngine, jobs: Sequence[SampleJob], heard: Heard | None = None) -> list[SampleResult]:
    batch = engine.open_batch()
    told: Heard = {} if heard is None else heard
    for place, own in enumerate(jobs):

        def listen(sample: int, token: int, logprob: float, key: str = str(place)) -> None:
            told.setdefault((key, sample), []).append((token, logprob))

        batch.add(str(place), own, listen)
    results: dict[str, SampleResult] = {}
    while batch.keys:
        results |= batch.step()
    pages = engine.kv_pages()
    assert pages["in_use"] == pages["cached"]
    return [results[str(place)] for place in range(len(jobs))]


def _bits(result: SampleResult) -> list[bytes]:
    assert result.error is None
    found = [] if result.prompt_logprobs is None else [result.prompt_logprobs.tobytes()]
    for sample in result.samples:
        found += [sample.tokens.tobytes(), sample.logprobs.tobytes(), bytes([sample.stopped])]
        found += [] if sample.processed is None else [sample.processed.tobytes()]
        found += [] if sample.topk is None else [sample.topk.tokens.tobytes(), sample.topk.logprobs.tobytes()]
    return found


def _preempted(engine: TorchEngine) -> int:
    return engine.sampling_counters()["preemptions"]


@pytest.mark.parametrize("pages", [6, 12])
def test_a_group_that_is_larger_than_the_cache_has_the_samples_of_a_large_one(fresh: Fresh, pages: int) -> None:
    group = job([5] * 70, weights_id="w", num_samples=8, max_tokens=200, seed=3, prompt_logprobs=True)
    heard: Heard = {}
    large, small = fresh(200), fresh(pages)
    expected, found = _run(large, [group]), _run(small, [group], heard)
    assert _bits(found[0]) == _bits(expected[0])
    assert _preempted(large) == 0 and _preempted(small) >= 4
    for index, sample in enumerate(expected[0].samples):
        assert len(sample.tokens) == 200
        assert heard["0", index] == list(zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True))


def test_a_group_with_more_samples_than_pages_begins_in_part(fresh: Fresh) -> None:
    group = job([5, 6], num_samples=24, max_tokens=80)
    small = fresh(8)
    assert _bits(_run(small, [group])[0]) == _bits(_run(fresh(200), [group])[0])


@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": True}, {"max_tokens": 1}])
def test_prompts_that_fill_the_cache_are_computed_one_after_the_other(fresh: Fresh, asked: dict[str, Any]) -> None:
    jobs = [
        job([3 + n] * 300, **{"weights_id": "w", "num_samples": 3, "max_tokens": 20, "seed": n, **asked})
        for n in range(4)
    ]
    expected = [_bits(result) for result in _run(fresh(200), jobs)]
    assert [_bits(result) for result in _run(fresh(6), jobs)] == expected


def test_what_a_sequence_has_drawn_decides_its_rules_after_a_pause_as_before(fresh: Fresh) -> None:
    bias = LogitBias(np.array([7]), np.array([2.0], np.float32))
    penalties = LogitRules(
        bias=bias, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, min_tokens=70
    )
    vocabulary = [bytes([65 + token % 26]) for token in range(VOCAB)]
    shared: dict[str, Any] = {"weights_id": "w", "num_samples": 4, "max_tokens": 130}
    jobs = [
        job([4] * 20, rules=LogitRules(grammar=ThirdsGrammar()), seed=1, topk_sample_logprobs=3, **shared),
        job([5] * 20, rules=penalties, seed=2, logprobs_mode="both", stop=StopRule(frozenset({7})), **shared),
        job([6] * 20, seed=3, stop=StopRule(strings=(b"ABC", b"DE"), vocabulary=vocabulary), **shared),
        job([7] * 20, seed=4, temperature=0.7, top_k=20, top_p=0.9, logprobs_mode="processed", **shared),
    ]
    expected = _run(fresh(400), jobs)
    small = fresh(7)
    assert [_bits(result) for result in _run(small, jobs)] == [_bits(result) for result in expected]
    assert _preempted(small) >= 4
    assert any(sample.stopped for sample in expected[2].samples)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_any_jobs_in_a_small_cache_have_their_own_bits(fresh: Fresh, seed: int) -> None:
    """They come and go, of several scopes, with beginnings in common."""
    rng = np.random.default_rng(seed)
    jobs = []
    for _ in range(10):
        tokens = np.random.default_rng(int(rng.integers(2))).integers(2, VOCAB, int(rng.choice([1, 33, 64, 100])))
        jobs.append(
            job(
                tokens.tolist(),
                weights_id=[None, "w"][int(rng.integers(2))],
                num_samples=int(rng.integers(2, 8)),
                max_tokens=int(rng.choice([0, 1, 2, 70, 120])),
                seed=int(rng.integers(1 << 40)),
                stop=StopRule(frozenset(rng.integers(0, VOCAB, 1).tolist())),
                prompt_logprobs=bool(rng.random() < 0.3),
                cache_scope=str(rng.integers(2)),
            )
        )
    jobs[4] = job([9] * 64, num_samples=8, max_tokens=120, seed=seed)
    large = fresh(400)
    expected = [_bits(large.sample([own])[0]) for own in jobs]
    engine = fresh(int(rng.integers(4, 7)))
    batch, results, waiting = engine.open_batch(), dict[str, SampleResult](), list(range(len(jobs)))
    while batch.keys or waiting:
        if waiting and rng.random() < 0.2:
            batch.add(str(waiting[0]), jobs[waiting.pop(0)])
        if rng.random() < 0.02:
            batch.cancel(str(rng.integers(4)))
        results |= batch.step()
    for place, own in enumerate(expected):
        result = results[str(place)]
        assert result.error == CANCELLED or _bits(result) == own
    pages = engine.kv_pages()
    assert pages["in_use"] == pages["cached"]


def test_a_cancelled_group_leaves_nothing_of_its_preempted_sequences(fresh: Fresh) -> None:
    engine = fresh(9)
    batch = engine.open_batch()
    batch.add("gone", job([5] * 70, num_samples=8, max_tokens=300))
    while not _preempted(engine):
        batch.step()
    batch.cancel("gone")
    assert batch.step()["gone"].error == CANCELLED
    pages = engine.kv_pages()
    assert not batch.keys and pages["in_use"] == pages["cached"]
    own = job([3, 4], max_tokens=100, num_samples=3)
    assert _bits(_run(engine, [own])[0]) == _bits(fresh(200).sample([own])[0])


def test_a_sequence_that_does_not_fit_alone_fails_alone_and_names_the_setting(fresh: Fresh) -> None:
    small, large = job([3, 4], max_tokens=9), job([5, 6], num_samples=2, max_tokens=300)
    engine = fresh(4)
    results = _run(engine, [small, large, small, job([7] * 400)])
    for failed in (results[1], results[3]):
        assert failed.error is not None and "256 tokens" in failed.error and "MINT_KV_CACHE_MIB" in failed.error
    assert _bits(results[0]) == _bits(results[2]) == _bits(fresh(4).sample([small])[0])


def test_a_sequence_that_fills_the_cache_to_its_last_position_fits(fresh: Fresh) -> None:
    """Its last token is drawn and never run, so it takes no position."""
    own = job([3] * 10, num_samples=2, max_tokens=4 * PAGE_POSITIONS - 10 + 1)
    assert _bits(_run(fresh(4), [own])[0]) == _bits(_run(fresh(200), [own])[0])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, lambda: RuntimeError("[enforce] can't allocate memory")])
@pytest.mark.parametrize("failing", [{2, 40}, {41, 42, 43}])
def test_where_the_device_is_out_of_memory_a_group_goes_on_with_half_its_rows(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch, failing: set[int], error: Callable[[], Exception]
) -> None:
    group = job([5] * 10, weights_id="w", num_samples=8, max_tokens=60)
    heard: Heard = {}
    expected = _bits(_run(fresh(200), [group], heard)[0])
    fail_logits(monkeypatch, failing, error)
    engine = fresh(200)
    again: Heard = {}
    assert _bits(_run(engine, [group], again)[0]) == expected
    assert again == heard and _preempted(engine) >= 4


FAMILIES = ["qwen3_moe", "qwen3_5_text", "gpt_oss"]


@pytest.mark.parametrize(
    ("dtype", "is_native"),
    [pytest.param("float32", False, marks=pytest.mark.slow, id="torch"), pytest.param("bfloat16", True, id="native")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_goes_on_with_the_same_bits(
    tmp_path: Path, native_folder: Path, family: str, dtype: str, is_native: bool
) -> None:
    write_model(tmp_path, "tied", family=family)
    jobs = [job([5 + n] * 40, weights_id="w", num_samples=6, max_tokens=100, seed=n) for n in range(2)]
    found = []
    for size in (1 << 26, 1 << 18):
        engine = TorchEngine(
            dtype=dtype,  # ty: ignore[invalid-argument-type]
            threads=1,
            device="cpu",
            native=native_folder if is_native else None,
            kv_cache_bytes=size,
        )
        engine.load_base("base", str(tmp_path))
        engine.create_model("m", "base", LORA)
        train(engine, "m", steps=1)
        engine.publish("m", "w")
        found.append([_bits(result) for result in _run(engine, jobs)])
        if size < 1 << 20:
            assert _preempted(engine) > 0
    assert found[0] == found[1]
