"""Batches whose jobs come, go and are listened to: tokens in order, and nothing that happens beside a job matters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Twin, limit_sampling
from engine_data import LORA, job, train
from failing_decoder import fail_logits

from mint.engine.bases.multi_base_batch import MultiBaseBatch
from mint.engine.memory.sampling_limits import BESIDE
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import CANCELLED, LoraSpec, SampleBatch, SampleJob, SampleResult, StopRule
from mint.engine.torch_engine import TorchEngine

WEIGHTS = (None, "w", "v")


LORAS = {"w": LORA, "v": LoraSpec(5, 3, True, True, False)}
PAGE_BYTES = 2 * 2 * 2 * PAGE_POSITIONS * 16 * 4
"""Keys and values of two layers with two kv heads of 16 numbers in float32."""

Fresh = Callable[..., TorchEngine]


@pytest.fixture
def published(engine: TorchEngine) -> TorchEngine:
    for name, lora in LORAS.items():
        engine.create_model(name, "base", lora)
        train(engine, name)
        engine.publish(name, name)
    engine.create_model("m", "base", LORA)
    return engine


@pytest.fixture
def fresh(published: TorchEngine, twin: Twin) -> Fresh:
    """Makes an engine with the same published weights that has nothing in its cache."""
    return lambda **settings: twin(published, {name: (name, lora) for name, lora in LORAS.items()}, **settings)


def _jobs() -> list[SampleJob]:
    return [
        job([3, 4, 5], weights_id="w", num_samples=4, max_tokens=20, seed=1),
        job([9] * 33, num_samples=3, max_tokens=30, seed=2, logprobs_mode="processed", temperature=0.7),
        job([7, 8], weights_id="w", num_samples=2, max_tokens=12, seed=3, topk_sample_logprobs=2),
    ]


def _random_job(rng: np.random.Generator) -> SampleJob:
    size = int(rng.choice([1, 5, 31, 32, 40, 63, 64, 65, 100, 130]))
    # few beginnings, so that jobs share tokens with others
    start = np.random.default_rng(int(rng.integers(3))).integers(2, 97, size)
    return job(
        start.tolist(),
        weights_id=WEIGHTS[int(rng.integers(3))],
        num_samples=int(rng.integers(1, 6)),
        max_tokens=int(rng.choice([0, 1, 2, 9, 40])),
        seed=int(rng.integers(1 << 40)),
        stop=StopRule(frozenset(rng.integers(0, 97, 2).tolist())),
        prompt_logprobs=bool(rng.random() < 0.3),
    )


def _bits(result: SampleResult) -> list[bytes]:
    assert result.error is None
    prompt = [] if result.prompt_logprobs is None else [result.prompt_logprobs.tobytes()]
    return prompt + [part.tobytes() for sample in result.samples for part in (sample.tokens, sample.logprobs)]


def _finish(batch: SampleBatch) -> dict[str, SampleResult]:
    results: dict[str, SampleResult] = {}
    while batch.keys:
        results |= batch.step()
    return results


def _alone(engine: TorchEngine, own: SampleJob) -> list[bytes]:
    """What the job gets alone."""
    return _bits(engine.sample([own])[0])


def _held(engine: TorchEngine) -> int:
    """Pages that are neither free nor in the prefix cache."""
    pages = engine.kv_pages()
    return pages["in_use"] - pages["cached"]


@pytest.mark.parametrize("seed", range(3))
def test_whenever_a_job_joins_and_whoever_leaves_its_bits_are_its_own(fresh: Fresh, seed: int) -> None:
    rng = np.random.default_rng(seed)
    jobs = [_random_job(rng) for _ in range(14)]
    alone = [_alone(fresh(), own) for own in jobs]
    engine = fresh()
    batch, results, waiting, gone = engine.open_batch(), {}, list(range(len(jobs))), set[int]()
    heard: dict[tuple[int, int], list[int]] = {}
    while batch.keys or waiting:
        while waiting and rng.random() < 0.5:
            place = waiting.pop(0)

            def listen(sample: int, token: int, logprob: float, place: int = place) -> None:
                heard.setdefault((place, sample), []).append(token)

            batch.add(str(place), jobs[place], listen)
            if rng.random() < 0.2:
                gone.add(place)
        for place in gone:
            if rng.random() < 0.2:
                batch.cancel(str(place))
        results |= batch.step()
    for place, expected in enumerate(alone):
        result = results[str(place)]
        if result.error is None:
            assert _bits(result) == expected
            for sample, own in enumerate(result.samples):
                assert heard[place, sample] == own.tokens.tolist()
        else:
            assert place in gone and result.error == CANCELLED
    assert _held(engine) == 0


def test_samples_that_stop_are_heard_to_their_last_token(published: TorchEngine) -> None:
    free = published.sample(_jobs()[:1])[0].samples[0].tokens
    stop = StopRule(frozenset([int(free[4])]))
    batch, heard = published.open_batch(), list[tuple[int, int, float]]()
    own = job([3, 4, 5], weights_id="w", num_samples=4, max_tokens=20, seed=1, stop=stop)
    batch.add("own", own, lambda *told: heard.append(told))
    result = _finish(batch)["own"]
    assert any(sample.stopped for sample in result.samples)
    for index, sample in enumerate(result.samples):
        assert [token for which, token, _ in heard if which == index] == sample.tokens.tolist()


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_the_others_keep_their_bits_when_a_job_is_cancelled(published: TorchEngine, gone: int, after: int) -> None:
    expected = published.sample(_jobs())
    batch, results = published.open_batch(), {}
    for place, own in enumerate(_jobs()):
        batch.add(str(place), own)
    for _ in range(after):
        results |= batch.step()
    batch.cancel(str(gone))
    results |= batch.step()
    assert results[str(gone)].error == CANCELLED and results[str(gone)].samples == []
    results |= _finish(batch)
    for place in {0, 1, 2} - {gone}:
        assert _bits(results[str(place)]) == _bits(expected[place])
        for one, other in zip(expected[place].samples, results[str(place)].samples, strict=True):
            assert (one.topk is None) == (other.topk is None)
            if one.topk is not None and other.topk is not None:
                assert one.topk.logprobs.tobytes() == other.topk.logprobs.tobytes()
    assert _held(published) == 0


def test_a_cancelled_job_frees_its_rows_at_once(published: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    plain = Decoder.forward

    def counted(self: Decoder, tokens: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        rows.append(len(tokens))
        return plain(self, tokens, *rest, **named)  # ty: ignore[invalid-argument-type]

    monkeypatch.setattr(Decoder, "forward", counted)
    batch = published.open_batch()
    batch.add("few", job([3], num_samples=2, max_tokens=10))
    batch.add("many", job([4, 5], num_samples=7, max_tokens=10))
    for _ in range(3):
        batch.step()
    assert rows[-1] == 9
    rows.clear()
    batch.cancel("few")
    _finish(batch)
    assert rows and set(rows) == {7}


def test_a_long_prompt_is_computed_beside_the_tokens_of_others(fresh: Fresh) -> None:
    long = job((np.arange(150) % 90 + 2).tolist(), weights_id="w", max_tokens=5, prompt_logprobs=True, num_samples=2)
    alone = _alone(fresh(), long)
    engine = fresh()
    limit_sampling(engine, prefill_tokens=BESIDE * 24)
    batch, heard = engine.open_batch(), list[int]()
    batch.add("talks", job([3, 4], weights_id="w", max_tokens=40), lambda sample, token, logprob: heard.append(token))
    batch.step()
    batch.add("long", long)
    for step in range(7):
        before = len(heard)
        assert not batch.step()
        assert len(heard) == before + 1, step
    assert _bits(_finish(batch)["long"]) == alone


def test_jobs_that_do_not_fit_together_are_preempted_and_are_told_no_token_twice(fresh: Fresh) -> None:
    jobs = [job([3 + n] * 40, weights_id="w", num_samples=3, max_tokens=100, seed=n) for n in range(4)]
    alone = [_alone(fresh(), own) for own in jobs]
    for pages in (9, 11, 20):
        engine = fresh(kv_cache_bytes=pages * PAGE_BYTES)
        batch, heard = engine.open_batch(), dict[tuple[int, int], list[int]]()
        for place, own in enumerate(jobs):
            batch.add(
                str(place),
                own,
                lambda s, t, p, place=place, heard=heard: heard.setdefault((place, s), []).append(t),
            )
        results = _finish(batch)
        for place, expected in enumerate(alone):
            assert _bits(results[str(place)]) == expected
            assert [heard[place, s] for s in range(3)] == [s.tokens.tolist() for s in results[str(place)].samples]
        assert engine.kv_pages()["total"] == pages and _held(engine) == 0
        if pages == 9:
            assert engine.sampling_counters()["preemptions"] > 0


@pytest.mark.parametrize("calls", [(3,), (4, 9), (2, 3)])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, lambda: RuntimeError("[enforce] can't allocate memory")])
def test_a_device_out_of_memory_only_delays(
    published: TorchEngine, monkeypatch: pytest.MonkeyPatch, calls: tuple[int, ...], error: Callable[[], Exception]
) -> None:
    jobs = _jobs()
    expected = [_bits(result) for result in published.sample(jobs)]
    fail_logits(monkeypatch, calls, error)
    assert [_bits(result) for result in published.sample(jobs)] == expected
    assert _held(published) == 0


def test_another_error_ends_the_batch_and_leaves_nothing_behind(published: TorchEngine) -> None:
    def refuse(sample: int, token: int, logprob: float) -> None:
        raise ValueError("enough")

    batch = published.open_batch()
    batch.add("own", job([3, 4], num_samples=3, max_tokens=9), refuse)
    with pytest.raises(ValueError, match="enough") as caught:
        batch.step()
    del batch, caught
    assert _held(published) == 0


def test_jobs_of_two_bases_share_a_batch(published: TorchEngine, tied: tuple[Path, object]) -> None:
    published.load_base("other", str(tied[0]))
    jobs = [job([3, 4], base=base, max_tokens=5, seed=seed) for seed, base in enumerate(["base", "other"] * 2)]
    expected = [_bits(published.sample([own])[0]) for own in jobs]
    batch = published.open_batch()
    assert isinstance(batch, MultiBaseBatch)
    for place, own in enumerate(jobs):
        batch.add(str(place), own)
    batch.cancel("3")
    results = _finish(batch)
    assert results["3"].error == CANCELLED
    assert [_bits(results[str(place)]) for place in range(3)] == expected[:3]


def test_diverged_weights_are_never_heard_and_leave_no_trace(published: TorchEngine, fresh: Fresh) -> None:
    broken = {name: np.full_like(array, 1e30) for name, array in published.read_state("m").weights.items()}
    own = job([3] * 70, weights_id="w", num_samples=2)
    alone, engine = _alone(fresh(), own), fresh()
    engine.load_weights("broken", "base", LORA, broken)
    batch, heard = engine.open_batch(), list[int]()
    batch.add("broken", job([3] * 70, weights_id="broken"), lambda *told: heard.append(told[1]))
    batch.add("own", own)
    results = _finish(batch)
    assert results["broken"].error not in (None, CANCELLED) and not heard
    assert _bits(results["own"]) == alone
    assert _alone(engine, own) == alone  # in the pages that held what was not finite
