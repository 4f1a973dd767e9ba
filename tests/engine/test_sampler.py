"""Sampling: the right distribution, the policy's own logprobs, and an end where it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from conftest import limit_sampling
from engine_data import CROSS_ENTROPY, LORA, datum, job, train
from small_models import write_model

from mint.engine.drawing.draw import choose, processed_logprobs
from mint.engine.drawing.random_stream import uniform
from mint.engine.protocol import SampleJob, StopRule, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.errors import NotFoundError


@pytest.fixture
def published(engine: TorchEngine) -> TorchEngine:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    return engine


def _p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-square test; cells that expect fewer than 5 are put together."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    kept = expected > 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return float(torch.special.gammaincc(torch.tensor((kept.sum() - 1) / 2), torch.tensor(statistic / 2)))


def _temperature(logits: np.ndarray) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / 0.7)
    return weights / weights.sum()


def _top_k(logits: np.ndarray) -> np.ndarray:
    weights = np.where(logits >= np.sort(logits)[-5], np.exp(logits), 0)
    return weights / weights.sum()


def _top_p(logits: np.ndarray) -> np.ndarray:
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-probabilities)
    kept = order[: int(np.searchsorted(np.cumsum(probabilities[order]), 0.6)) + 1]
    weights = np.zeros_like(probabilities)
    weights[kept] = probabilities[kept]
    return weights / weights.sum()


def _all(logits: np.ndarray) -> np.ndarray:
    """Temperature 0.7, then the 10 best, then the nucleus of 0.8."""
    cold = _temperature(logits)
    order = np.argsort(-cold)[:10]
    share = cold[order] / cold[order].sum()
    kept = order[: int(np.searchsorted(np.cumsum(share), 0.8)) + 1]
    weights = np.zeros_like(cold)
    weights[kept] = cold[kept]
    return weights / weights.sum()


SETTINGS = [
    ({}, lambda logits: np.exp(logits) / np.exp(logits).sum()),
    ({"temperature": 0.7}, _temperature),
    ({"top_k": 5}, _top_k),
    ({"top_p": 0.6}, _top_p),
    ({"temperature": 0.7, "top_k": 10, "top_p": 0.8}, _all),
]


@pytest.mark.parametrize(("settings", "distribution"), SETTINGS)
def test_sampled_frequencies_follow_the_distribution(
    published: TorchEngine, settings: dict[str, float], distribution: Callable[[np.ndarray], np.ndarray]
) -> None:
    prompt = [3, 4, 5, 6]
    top = published.sample([job([*prompt, 0], weights_id="w", max_tokens=0, topk_prompt_logprobs=97)])[0]
    assert top.topk_prompt_logprobs is not None
    logits = np.full(97, -np.inf)
    for token, logprob in top.topk_prompt_logprobs[-1] or []:
        logits[token] = logprob
    logits /= 2.0  # the model is sure of itself; its logits, halved, spread over more tokens
    count = 100_000
    columns = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, **settings}
    draws = uniform(np.full(count, 5, np.uint64), np.arange(count), np.zeros(count, np.int64))
    tokens = choose(
        torch.from_numpy(logits).float().expand(count, -1),
        draws,
        np.full(count, columns["temperature"]),
        np.full(count, int(columns["top_k"])),
        np.full(count, columns["top_p"]),
    )
    counts = np.bincount(tokens.numpy(), minlength=97)
    expected = distribution(logits) * count
    assert not counts[expected == 0].any()
    assert _p_value(counts, expected) > 0.001


def test_frequencies_of_whole_calls_follow_the_model(published: TorchEngine) -> None:
    prompt = [3, 4, 5, 6]
    result = published.sample([job(prompt, weights_id="w", max_tokens=1, num_samples=4000, seed=3)])[0]
    counts = np.bincount([int(sample.tokens[0]) for sample in result.samples], minlength=97)
    top = published.sample([job([*prompt, 0], weights_id="w", max_tokens=0, topk_prompt_logprobs=97)])[0]
    expected = np.zeros(97)
    for token, logprob in (top.topk_prompt_logprobs or [])[-1] or []:
        expected[token] = 4000 * np.exp(logprob)
    assert _p_value(counts, expected) > 0.001


def test_a_large_vocabulary_is_sampled_right() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, 5000).astype(np.float32)
    count, ones = 20_000, np.ones(20_000)
    draws = uniform(np.zeros(count, np.uint64), np.arange(count), np.zeros(count, np.int64))
    tokens = choose(torch.from_numpy(logits).expand(count, -1), draws, ones, -ones.astype(np.int64), ones).numpy()
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum()
    cumulated = np.cumsum(probabilities)
    expected = np.searchsorted(cumulated, draws, side="right")
    assert (tokens != expected).mean() < 1e-3  # but for draws within rounding of an edge
    assert _p_value(np.bincount(tokens, minlength=5000), probabilities * count) > 0.001


def test_no_draw_picks_an_impossible_token() -> None:
    logits = torch.full((4, 200), -torch.inf)
    logits[:, 70] = 0.0
    logits[:, 190] = -1.0
    draws = np.array([0.0, 1 - 2.0**-53, 0.5, 0.99])
    tokens = choose(logits, draws, np.ones(4), np.full(4, -1), np.ones(4))
    assert set(tokens.tolist()) <= {70, 190} and tokens[0] == 70 and tokens[1] == 190


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0.0}, {"temperature": 1e-4}])
def test_every_way_to_be_greedy_is_the_same(published: TorchEngine, settings: dict[str, float]) -> None:
    greedy = published.sample([job([3, 4, 5], weights_id="w", temperature=0.0)])[0].samples[0]
    other = published.sample([job([3, 4, 5], weights_id="w", seed=9, **settings)])[0].samples[0]
    assert other.tokens.tolist() == greedy.tokens.tolist()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 7, "top_p": 0.9}])
def test_logprobs_are_the_policys_own_as_forward_computes_them(
    published: TorchEngine, settings: dict[str, float]
) -> None:
    rng = np.random.default_rng(0)
    jobs = [
        job(rng.integers(2, 97, length), weights_id="w", num_samples=3, max_tokens=40, seed=length, **settings)
        for length in (1, 7, 16, 31, 64)
    ]
    for own, result in zip(jobs, published.sample(jobs), strict=True):
        for sample in result.samples:
            whole = datum(np.concatenate([own.prompt, sample.tokens]))
            expected = published.forward("m", [whole], CROSS_ENTROPY).logprobs[0][len(own.prompt) - 1 :]
            assert sample.logprobs.dtype == np.float32
            assert np.abs(sample.logprobs - expected).max() <= 1e-5


@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.8, 1.0, 2.0])
def test_processed_logprobs_are_those_of_a_pass_at_the_same_temperature(
    published: TorchEngine, temperature: float
) -> None:
    own = job(
        [3, 4, 5], weights_id="w", num_samples=8, max_tokens=40, temperature=temperature, logprobs_mode="processed"
    )
    for sample in published.sample([own])[0].samples:
        size = 2 + len(sample.tokens)
        inputs = {"logprobs": np.zeros(size), "advantages": np.ones(size)}
        whole = datum(np.concatenate([own.prompt, sample.tokens]), prompt=3, **inputs)
        loss = resolve_loss("importance_sampling", {"temperature": temperature})
        expected = published.forward("m", [whole], loss).logprobs[0][2:]
        assert np.abs(sample.logprobs - expected).max() <= 1e-5


@pytest.mark.parametrize(("settings", "distribution"), SETTINGS)
def test_processed_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    settings: dict[str, float], distribution: Callable[[np.ndarray], np.ndarray]
) -> None:
    logits = np.random.default_rng(4).normal(0, 2, 97)
    expected = distribution(logits)
    tokens = np.flatnonzero(expected)
    columns = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, **settings}
    count = len(tokens)
    found = processed_logprobs(
        torch.from_numpy(logits).float().expand(count, -1),
        torch.from_numpy(tokens),
        np.full(count, columns["temperature"]),
        np.full(count, int(columns["top_k"])),
        np.full(count, columns["top_p"]),
    )
    np.testing.assert_allclose(found.numpy(), np.log(expected[tokens]), atol=1e-5)


def test_processed_logprobs_of_greedy_sampling_are_zero_and_raw_neighbours_keep_their_bits(
    published: TorchEngine,
) -> None:
    raw = job([3, 4, 5], weights_id="w", num_samples=3, temperature=0.7, top_k=20)
    greedy = job([3, 4, 5], weights_id="w", temperature=0.0, logprobs_mode="processed")
    alone = published.sample([raw])[0].samples
    mixed, other = published.sample([raw, greedy])
    assert [s.logprobs.tobytes() for s in alone] == [s.logprobs.tobytes() for s in mixed.samples]
    assert not other.samples[0].logprobs.any()


def test_prompt_logprobs_equal_forward(published: TorchEngine) -> None:
    prompt = np.random.default_rng(0).integers(2, 97, 50)
    result = published.sample([job(prompt, weights_id="w", max_tokens=0, prompt_logprobs=True, num_samples=2)])[0]
    assert result.prompt_logprobs is not None and result.samples == []
    assert np.isnan(result.prompt_logprobs[0]) and result.prompt_logprobs.shape == (50,)
    expected = published.forward("m", [datum(prompt)], CROSS_ENTROPY).logprobs[0]
    assert np.abs(result.prompt_logprobs[1:] - expected).max() <= 1e-5


def test_bfloat16_sampler_and_trainer_agree_within_a_measured_bound(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    engine = TorchEngine(dtype="bfloat16", threads=1, device="cpu")
    engine.load_base("base", str(tmp_path))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    prompt = np.random.default_rng(0).integers(2, 97, 20)
    result = engine.sample([job(prompt, weights_id="w", num_samples=16, max_tokens=20)])[0]
    wholes = [datum(np.concatenate([prompt, sample.tokens])) for sample in result.samples]
    forward = engine.forward("m", wholes, CROSS_ENTROPY).logprobs
    differences = [np.abs(own[19:] - sample.logprobs) for own, sample in zip(forward, result.samples, strict=True)]
    # Measured: equal to the last bit. The bound leaves room for a BLAS that treats rows less alike.
    assert np.concatenate(differences).max() <= 0.01


def test_a_stop_token_ends_the_sequence_and_is_kept(published: TorchEngine) -> None:
    free = published.sample([job([3, 4, 5], weights_id="w", num_samples=8, max_tokens=20)])[0].samples
    stop = int(free[0].tokens[4])
    stopped = published.sample(
        [job([3, 4, 5], weights_id="w", num_samples=8, max_tokens=20, stop=StopRule(frozenset([stop])))]
    )[0].samples
    assert any(sample.stopped for sample in stopped)
    for before, after in zip(free, stopped, strict=True):
        hits = np.flatnonzero(before.tokens == stop)
        length = int(hits[0]) + 1 if len(hits) else 20
        assert after.tokens.tolist() == before.tokens[:length].tolist()
        assert after.logprobs.tobytes() == before.logprobs[:length].tobytes()
        assert after.stopped == bool(len(hits))


def test_a_stop_string_is_found_across_token_boundaries(published: TorchEngine) -> None:
    vocabulary = [bytes([97 + token % 3]) * (1 + token % 2) for token in range(97)]  # a, bb, c, aa, b, …
    strings = (b"cab", b"bbbbb")
    arguments = {"weights_id": "w", "num_samples": 30, "max_tokens": 30, "temperature": 1.5}
    free = published.sample([job([3, 4, 5], **arguments)])[0].samples
    rule = StopRule(strings=strings, vocabulary=vocabulary)
    ended = published.sample([job([3, 4, 5], stop=rule, **arguments)])[0].samples
    assert any(sample.stopped for sample in ended)
    for before, after in zip(free, ended, strict=True):
        texts = [b"".join(vocabulary[token] for token in before.tokens[: n + 1]) for n in range(30)]
        lengths = [n + 1 for n, text in enumerate(texts) if any(string in text for string in strings)]
        assert len(after.tokens) == (lengths[0] if lengths else 30)
        assert after.stopped == bool(lengths)


def test_a_token_beyond_the_vocabulary_has_no_text(published: TorchEngine) -> None:
    short = [
        bytes([97 + token]) for token in range(3)
    ]  # as where a matrix is padded to more rows than there are tokens
    rule = StopRule(strings=(b"abc",), vocabulary=short)
    free, ended = published.sample([job([3, 4, 5], max_tokens=30), job([3, 4, 5], max_tokens=30, stop=rule)])
    assert free.samples[0].tokens.tolist() == ended.samples[0].tokens.tolist() and not ended.samples[0].stopped


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_the_trainers_to_the_last_bit_wherever_prompts_and_samples_end(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"], threads: int
) -> None:
    write_model(tmp_path, "tied")
    engine = TorchEngine(dtype=dtype, threads=threads, device="cpu")
    engine.load_base("base", str(tmp_path))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    rng = np.random.default_rng(0)
    jobs = [
        job(rng.integers(2, 97, length).tolist(), weights_id="w", num_samples=3, max_tokens=45, seed=length)
        for length in (1, 20, 31, 32, 33, 48, 64, 65, 100, 128, 150)
    ]
    for own, result in zip(jobs, engine.sample(jobs), strict=True):
        wholes = [datum(np.concatenate([own.prompt, sample.tokens])) for sample in result.samples]
        for sample, expected in zip(result.samples, engine.forward("m", wholes, CROSS_ENTROPY).logprobs, strict=True):
            assert sample.logprobs.tobytes() == expected[len(own.prompt) - 1 :].tobytes()


def test_max_tokens_is_kept_and_not_called_a_stop(published: TorchEngine) -> None:
    jobs = [job([3, 4], weights_id="w", max_tokens=n, num_samples=2) for n in (1, 5, 33)]
    for own, result in zip(jobs, published.sample(jobs), strict=True):
        assert [len(sample.tokens) for sample in result.samples] == [own.max_tokens] * 2
        assert not any(sample.stopped for sample in result.samples)


def test_samples_differ_and_seeds_differ_but_the_same_seed_is_the_same(published: TorchEngine) -> None:
    first, second, other = published.sample([job([3, 4], weights_id="w", num_samples=4, seed=s) for s in (1, 1, 2)])
    assert [s.tokens.tolist() for s in first.samples] == [s.tokens.tolist() for s in second.samples]
    assert [s.tokens.tolist() for s in first.samples] != [s.tokens.tolist() for s in other.samples]
    assert len({tuple(s.tokens.tolist()) for s in first.samples}) > 1


def test_published_weights_do_not_follow_the_model(published: TorchEngine) -> None:
    before = published.sample([job([3, 4], weights_id="w")])[0].samples[0]
    train(published, "m")
    after = published.sample([job([3, 4], weights_id="w")])[0].samples[0]
    assert before.logprobs.tobytes() == after.logprobs.tobytes()
    published.publish("m", "w2")
    newer = published.sample([job([3, 4], weights_id="w2")])[0].samples[0]
    assert newer.logprobs.tobytes() != after.logprobs.tobytes()


def test_loaded_weights_sample_as_the_published_ones(published: TorchEngine) -> None:
    published.load_weights("copy", "base", LORA, published.read_state("m").weights)
    own, copy = published.sample([job([3, 4], weights_id=name) for name in ("w", "copy")])
    assert own.samples[0].logprobs.tobytes() == copy.samples[0].logprobs.tobytes()
    published.drop_weights("copy")
    with pytest.raises(NotFoundError, match="copy"):
        published.sample([job([3, 4], weights_id="copy")])


def test_diverged_weights_fail_their_own_job_only(published: TorchEngine) -> None:
    broken = {name: np.full_like(array, 1e30) for name, array in published.read_state("m").weights.items()}
    published.load_weights("broken", "base", LORA, broken)
    prompt = [3, 4, 5]
    alone = published.sample([job(prompt, weights_id="w", num_samples=3)])[0]
    result = published.sample(
        [job(prompt, weights_id="broken"), job(prompt, weights_id="w", num_samples=3), job(prompt, weights_id="broken")]
    )
    assert result[0].error and result[2].error and not result[0].samples
    assert result[1].error is None
    for own, other in zip(alone.samples, result[1].samples, strict=True):
        assert own.logprobs.tobytes() == other.logprobs.tobytes()


def test_more_jobs_than_rows_wait_for_their_turn(published: TorchEngine) -> None:
    jobs = [
        job([3 + n, 4], weights_id="w" if n % 2 else None, num_samples=3, max_tokens=5 + n, seed=n) for n in range(9)
    ]
    together = published.sample(jobs)
    limit_sampling(published, rows=7)
    in_turn = published.sample(jobs)
    limit_sampling(published, rows=1)
    one_by_one = published.sample(jobs)
    for results in zip(together, in_turn, one_by_one, strict=True):
        assert len({tuple(sample.logprobs.tobytes() for sample in result.samples) for result in results}) == 1


def test_no_jobs_give_no_results(published: TorchEngine) -> None:
    assert published.sample([]) == []


def _with_seed(seed: int) -> SampleJob:
    return job([3, 4], seed=seed)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_64_bit_seed_works(published: TorchEngine, seed: int) -> None:
    assert len(published.sample([_with_seed(seed)])[0].samples[0].tokens) == 8
