"""What a job may ask besides tokens: each answer against transformers, and without effect on anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import LORA, job, train
from transformers import Qwen3ForCausalLM

from mint.engine import target_logprobs
from mint.engine.cpu.operations import CpuOperations
from mint.engine.drawing.draw import choose, draw_many
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import SampleResult
from mint.engine.torch_engine import TorchEngine

Model = tuple[Path, Qwen3ForCausalLM]
PROMPT = np.random.default_rng(1).integers(0, 97, 40)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_logprobs, "MIN_CHUNK_ROWS", 16)
    monkeypatch.setattr(CpuOperations, "logits_at_once", 97 * 17)


def _table(model: Qwen3ForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Log-softmax [P, V] in float64 of transformers."""
    with torch.no_grad():
        return model.double()(torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1).numpy()


@pytest.fixture
def table(tied: Model) -> np.ndarray:
    reference = Qwen3ForCausalLM.from_pretrained(tied[0], dtype=torch.float64).eval()
    return _table(reference, PROMPT)


def _ask(engine: TorchEngine, prompt: np.ndarray = PROMPT, **asked: Any) -> SampleResult:
    return engine.sample([job(prompt, **{"max_tokens": 0, **asked})])[0]


def test_logprobs_of_named_tokens_equal_those_of_transformers(engine: TorchEngine, table: np.ndarray) -> None:
    rng = np.random.default_rng(2)
    pairs = np.stack([rng.integers(1, 40, 60), rng.integers(0, 97, 60)], axis=1)
    pairs = np.concatenate([pairs, pairs[:7], [[1, 0], [39, 96]]])  # any order, and twice
    found = _ask(engine, target_prompt_logprobs=pairs).target_prompt_logprobs
    assert found is not None and found.dtype == np.float32
    assert np.abs(found - table[pairs[:, 0] - 1, pairs[:, 1]]).max() <= 1e-4


def test_named_tokens_that_are_the_prompts_own_have_its_logprobs_to_the_last_bit(engine: TorchEngine) -> None:
    pairs = np.stack([np.arange(1, 40), PROMPT[1:]], axis=1)
    result = _ask(engine, target_prompt_logprobs=pairs, prompt_logprobs=True)
    assert result.prompt_logprobs is not None and result.target_prompt_logprobs is not None
    assert result.target_prompt_logprobs.tobytes() == result.prompt_logprobs[1:].tobytes()


@pytest.mark.parametrize("last_n", [1, 7, 38, 39])
def test_the_last_n_are_those_of_the_whole_prompt_and_the_rest_is_left_out(engine: TorchEngine, last_n: int) -> None:
    whole = _ask(engine, prompt_logprobs=True, topk_prompt_logprobs=3)
    part = _ask(engine, prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=last_n)
    assert whole.prompt_logprobs is not None and part.prompt_logprobs is not None
    assert part.prompt_logprobs[-last_n:].tobytes() == whole.prompt_logprobs[-last_n:].tobytes()
    assert np.isnan(part.prompt_logprobs[:-last_n]).all() and len(part.prompt_logprobs) == 40
    assert whole.topk_prompt_logprobs is not None and part.topk_prompt_logprobs is not None
    assert part.topk_prompt_logprobs == [None] * (40 - last_n) + whole.topk_prompt_logprobs[-last_n:]


def test_logits_are_computed_only_where_they_were_asked_about(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    plain = Decoder.logits
    monkeypatch.setattr(
        Decoder, "logits", lambda self, hidden, loras: rows.append(len(hidden)) or plain(self, hidden, loras)
    )
    _ask(engine, prompt_logprobs=True, prompt_logprobs_last_n=5)
    assert rows == [1, 5]  # the next token's, then those asked about
    rows.clear()
    _ask(engine, target_prompt_logprobs=np.array([[39, 3], [2, 4], [39, 5]]))
    assert rows == [1, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_alternatives_follow_the_distribution_at_every_place(
    engine: TorchEngine, table: np.ndarray, temperature: float
) -> None:
    count = 4000
    draws = _ask(engine, prompt_alt_tokens_k=count, temperature=temperature, top_k=3, top_p=0.5).prompt_alt_tokens
    assert draws is not None and draws.tokens.shape == draws.logprobs.shape == (39, count)
    tempered = np.exp(table[:-1] / temperature)
    tempered /= tempered.sum(1, keepdims=True)
    for row, probabilities in zip(draws.tokens, tempered, strict=True):
        counts, expected = np.bincount(row, minlength=97), probabilities * count
        kept = expected >= 5
        pooled, wanted = (np.append(values[kept], values[~kept].sum()) for values in (counts, expected))
        statistic = ((pooled - wanted) ** 2 / np.maximum(wanted, 1)).sum()
        shape = torch.tensor((len(pooled) - 1) / 2)
        assert torch.special.gammaincc(shape, torch.tensor(statistic / 2).float()) > 1e-5
    own = np.take_along_axis(table[:-1], draws.tokens, axis=1)  # at temperature 1, whatever was drawn at
    assert draws.logprobs.dtype == np.float32 and np.abs(draws.logprobs - own).max() <= 1e-4


def test_alternatives_come_from_the_seed_and_places_and_draws_are_independent(engine: TorchEngine) -> None:
    flat = np.full(300, 5)  # nearly the same distribution at every place
    first, again, other = (_ask(engine, flat, prompt_alt_tokens_k=8, seed=seed) for seed in (1, 1, 2))
    assert first.prompt_alt_tokens is not None and again.prompt_alt_tokens is not None
    assert other.prompt_alt_tokens is not None
    tokens = first.prompt_alt_tokens.tokens
    assert tokens.tobytes() == again.prompt_alt_tokens.tokens.tobytes()
    assert (tokens != other.prompt_alt_tokens.tokens).mean() > 0.5
    assert (tokens[1:] != tokens[:-1]).mean() > 0.5 and (tokens[:, 1:] != tokens[:, :-1]).mean() > 0.5
    fewer = _ask(engine, flat, prompt_alt_tokens_k=3, seed=1).prompt_alt_tokens
    assert fewer is not None and fewer.tokens.tobytes() == np.ascontiguousarray(tokens[:, :3]).tobytes()


def test_alternatives_at_temperature_zero_are_the_best_token(engine: TorchEngine, table: np.ndarray) -> None:
    draws = _ask(engine, prompt_alt_tokens_k=2, temperature=0.0).prompt_alt_tokens
    assert draws is not None and (draws.tokens == table[:-1].argmax(1)[:, None]).all()


def test_many_draws_are_the_draws_one_by_one() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (6, 500)).astype(np.float32))
    uniforms = np.concatenate([rng.random((6, 9)), np.zeros((6, 1)), np.full((6, 1), 1 - 2.0**-53)], axis=1)
    together = draw_many(logits, uniforms, 0.7)
    for column in range(uniforms.shape[1]):
        single = choose(logits, uniforms[:, column], np.full(6, 0.7), np.full(6, -1), np.ones(6))
        assert together[:, column].tolist() == single.tolist()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "logprobs_mode": "processed"}, {"temperature": 0.0}])
def test_the_best_tokens_of_each_step_equal_those_of_transformers(
    engine: TorchEngine, tied: Model, settings: dict[str, Any]
) -> None:
    reference = Qwen3ForCausalLM.from_pretrained(tied[0], dtype=torch.float64).eval()
    own = job(PROMPT[:9], num_samples=3, max_tokens=12, topk_sample_logprobs=5, **settings)
    plain = job(PROMPT[:9], num_samples=3, max_tokens=12, **settings)
    asked, without = engine.sample([own, plain])
    for sample, other in zip(asked.samples, without.samples, strict=True):
        assert sample.tokens.tobytes() == other.tokens.tobytes() and other.topk is None
        assert sample.logprobs.tobytes() == other.logprobs.tobytes()
        assert sample.topk is not None and sample.topk.tokens.shape == sample.topk.logprobs.shape == (12, 5)
        rows = _table(reference, np.concatenate([own.prompt, sample.tokens]))[8:-1]
        best = np.sort(rows, axis=1)[:, ::-1][:, :5]
        assert np.abs(sample.topk.logprobs - best).max() <= 1e-4
        assert np.abs(sample.topk.logprobs - np.take_along_axis(rows, sample.topk.tokens, axis=1)).max() <= 1e-4


def test_jobs_of_different_widths_keep_their_own_tables(engine: TorchEngine) -> None:
    jobs = [job([3, 4 + n % 9], max_tokens=4 + n, topk_sample_logprobs=n, seed=n, num_samples=2) for n in (0, 2, 97, 2)]
    for own, result in zip(jobs, engine.sample(jobs), strict=True):
        (alone,) = engine.sample([own])
        for sample, other in zip(result.samples, alone.samples, strict=True):
            assert sample.tokens.tobytes() == other.tokens.tobytes()
            if own.topk_sample_logprobs == 0:
                assert sample.topk is None
                continue
            assert sample.topk is not None and other.topk is not None
            assert sample.topk.tokens.shape == (len(sample.tokens), own.topk_sample_logprobs)
            assert sample.topk.logprobs.tobytes() == other.topk.logprobs.tobytes()


def test_a_prompt_of_one_token_has_nothing_to_score(engine: TorchEngine) -> None:
    one = np.array([5])
    result = _ask(engine, one, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=3)
    assert result.prompt_logprobs is not None and np.isnan(result.prompt_logprobs).tolist() == [True]
    assert result.topk_prompt_logprobs == [None]
    assert result.prompt_alt_tokens is not None and result.prompt_alt_tokens.tokens.shape == (0, 3)


def test_what_is_asked_about_the_prompt_changes_no_sample(engine: TorchEngine) -> None:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    asked = {"prompt_alt_tokens_k": 4, "prompt_logprobs": True, "target_prompt_logprobs": np.array([[1, 2]])}
    plain, curious = engine.sample([job(PROMPT, weights_id="w", num_samples=3, **extra) for extra in ({}, asked)])
    assert [s.logprobs.tobytes() for s in plain.samples] == [s.logprobs.tobytes() for s in curious.samples]
