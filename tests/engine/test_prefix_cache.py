"""Known beginnings of prompts: computed once, the same bits with and without, bounded, and gone with their weights."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Twin
from engine_data import LORA, job, train

from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.protocol import SampleJob, SampleResult
from mint.engine.sampling.prefix_cache import _Node
from mint.engine.torch_engine import TorchEngine


@pytest.fixture
def published(engine: TorchEngine) -> TorchEngine:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    return engine


PAGE_BYTES = 2 * 2 * 2 * PAGE_POSITIONS * 16 * 4
"""Keys and values of two layers with two kv heads of 16 numbers in float32."""

Fresh = Callable[..., TorchEngine]


@pytest.fixture
def fresh(published: TorchEngine, twin: Twin) -> Fresh:
    """Makes an engine with the same published weights that has nothing in its cache."""
    return lambda **settings: twin(published, {"w": ("m", LORA)}, **settings)


def _bits(result: SampleResult) -> list[bytes]:
    assert result.error is None
    found = [part.tobytes() for sample in result.samples for part in (sample.tokens, sample.logprobs)]
    return found + [
        part.tobytes() for part in (result.prompt_logprobs, result.target_prompt_logprobs) if part is not None
    ]


def _prefilled(engine: TorchEngine, jobs: list[SampleJob]) -> tuple[int, list[SampleResult]]:
    before = engine.sampling_counters().get("prefilled", 0)
    results = engine.sample(jobs)
    return engine.sampling_counters()["prefilled"] - before, results


def _tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 97, count).tolist()


@pytest.mark.parametrize("first", [5, 31, 32, 33, 64, 100])
def test_the_next_turn_computes_only_what_is_new(published: TorchEngine, fresh: Fresh, first: int) -> None:
    opening = job(_tokens(first), weights_id="w", num_samples=4, max_tokens=30)
    count, (answer,) = _prefilled(published, [opening])
    assert count == first
    said = _tokens(7, seed=1)
    turns = [
        job([*opening.prompt.tolist(), *sample.tokens.tolist(), *said], weights_id="w", num_samples=2, max_tokens=9)
        for sample in answer.samples
    ]
    count, warm = _prefilled(published, turns)
    assert count == 4 * (1 + len(said))  # the last token of an answer was drawn, but never read
    cold_engine = fresh()
    count, cold = _prefilled(cold_engine, turns[:1])
    assert count == first + 30 + len(said)
    assert _bits(warm[0]) == _bits(cold[0])
    assert [_bits(result) for result in cold_engine.sample(turns)] == [_bits(result) for result in warm]


@pytest.mark.parametrize("known", [1, 20, 32, 50, 63, 64, 65, 90, 128, 140])
def test_bits_are_the_same_however_much_is_known(published: TorchEngine, fresh: Fresh, known: int) -> None:
    prompt = _tokens(141)
    own = job(prompt, weights_id="w", num_samples=3, max_tokens=6)
    cold = _bits(published.sample([own])[0])
    engine = fresh()
    engine.sample([job([*prompt[:known], 1], weights_id="w", max_tokens=0)])
    count, (warm,) = _prefilled(engine, [own])
    assert count == 141 - known and _bits(warm) == cold


def test_requests_with_one_prompt_that_come_together_compute_it_once(published: TorchEngine, fresh: Fresh) -> None:
    prompt = _tokens(80)
    jobs = [job(prompt, weights_id="w", seed=n) for n in range(6)]
    count, together = _prefilled(published, jobs)
    assert count == 80 + 5  # the last token of a prompt is always computed: its logits are wanted
    engine = fresh()
    assert [_bits(engine.sample([own])[0]) for own in jobs] == [_bits(result) for result in together]


def test_what_is_asked_about_known_tokens_is_computed(fresh: Fresh) -> None:
    prompt = _tokens(100)
    asked = [
        job(prompt, weights_id="w", prompt_logprobs=True),
        job(prompt, weights_id="w", prompt_logprobs=True, prompt_logprobs_last_n=10),
        job(prompt, weights_id="w", target_prompt_logprobs=np.array([[90, 4], [70, 5]])),
    ]
    cold = [_bits(fresh().sample([own])[0]) for own in asked]
    counts, engine = [], fresh()
    engine.sample(asked[2:])
    for own, expected in zip(asked, cold, strict=True):
        count, (warm,) = _prefilled(engine, [own])
        counts.append(count)
        assert _bits(warm) == expected
    assert counts == [100, 11, 31]


def test_nothing_is_shared_between_weights_and_dropped_weights_take_theirs_along(published: TorchEngine) -> None:
    own = job(_tokens(70), weights_id="w")
    published.sample([own])
    published.publish("m", "v")
    assert _prefilled(published, [job(_tokens(70), weights_id="v"), job(_tokens(70))])[0] == 140
    kept = published.kv_pages()["cached"]
    published.drop_weights("w")
    assert 0 < published.kv_pages()["cached"] < kept
    published.drop_weights("v")
    published.load_weights("w", "base", LORA, published.read_state("m").weights)
    assert _prefilled(published, [own])[0] == 70


def test_nothing_is_shared_between_scopes_neither_in_one_step_nor_later(published: TorchEngine) -> None:
    prompt = _tokens(100)
    count, results = _prefilled(published, [job(prompt, weights_id="w", cache_scope=name) for name in ("ann", "bob")])
    assert count == 200
    assert _prefilled(published, [job(prompt, weights_id="w", cache_scope="eve")])[0] == 100
    assert _prefilled(published, [job(prompt, weights_id="w", cache_scope="ann")])[0] == 1
    assert _bits(results[0]) == _bits(results[1])
    for scope in ("ann", "bob"):  # nor where only the base model is asked
        assert _prefilled(published, [job(prompt, cache_scope=scope)])[0] == 100


def test_a_scope_with_few_prompts_keeps_them_however_much_another_caches(fresh: Fresh) -> None:
    engine = fresh(prefix_cache_bytes=6 * PAGE_BYTES)
    own = job([*_tokens(64), 5], weights_id="w", max_tokens=0, cache_scope="ann")
    engine.sample([own])
    for seed in range(1, 9):
        engine.sample([job([*_tokens(64, seed=seed), 5], weights_id="w", max_tokens=0, cache_scope="bob")])
    assert engine.kv_pages()["cached"] == 6
    assert _prefilled(engine, [own])[0] == 1


def test_weights_that_are_dropped_during_a_job_leave_nothing_in_the_cache(published: TorchEngine) -> None:
    batch = published.open_batch()
    batch.add("own", job(_tokens(70), weights_id="w", num_samples=2))
    batch.step()
    published.drop_weights("w")
    while batch.keys:
        batch.step()
    assert published.kv_pages()["cached"] == published.kv_pages()["in_use"] == 0


def test_what_dropped_weights_had_needs_no_garbage_collection(published: TorchEngine) -> None:
    gc.collect()
    gc.disable()  # a server collects so seldom that memory would pile up
    try:
        before = _nodes()
        published.sample([job(_tokens(5 * PAGE_POSITIONS), weights_id="w", max_tokens=40)])
        assert _nodes() >= before + 6
        published.drop_weights("w")
        assert _nodes() == before
    finally:
        gc.enable()


def _nodes() -> int:
    return sum(type(found) is _Node for found in gc.get_objects())


def test_the_least_recently_used_go_first(fresh: Fresh) -> None:
    engine = fresh(prefix_cache_bytes=4 * PAGE_BYTES)
    prompts = [[*_tokens(64, seed=n), 5] for n in range(5)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        engine.sample([job(prompt, weights_id="w", max_tokens=0)])
    assert engine.kv_pages()["cached"] == 4
    assert _prefilled(engine, [job(prompts[0], weights_id="w", max_tokens=0)])[0] == 1
    assert _prefilled(engine, [job(prompts[1], weights_id="w", max_tokens=0)])[0] == 65


def test_among_many_prompts_the_one_that_begins_alike_for_longest_is_found(published: TorchEngine) -> None:
    rng = np.random.default_rng(0)
    known: list[list[int]] = []
    for _ in range(60):
        prompt = [3] * int(rng.integers(0, 40)) + rng.integers(2, 4, int(rng.integers(2, 40))).tolist()
        alike = max((_common(other, prompt[:-1]) for other in known), default=0)
        count, _ = _prefilled(published, [job(prompt, weights_id="w", max_tokens=1)])
        assert count == len(prompt) - alike
        known.append(prompt)


def _common(one: list[int], other: list[int]) -> int:
    differs = [a != b for a, b in zip(one, other, strict=False)]
    return differs.index(True) if True in differs else len(differs)
