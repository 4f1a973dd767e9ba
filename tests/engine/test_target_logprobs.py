"""Logprobs, entropies and their gradient against float64, however rows are cut and whoever has targets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from decoders import open_decoder
from transformers import PreTrainedModel

from mint.engine import target_logprobs
from mint.engine.cpu import operations
from mint.engine.cpu.onednn import cpu_unembedding
from mint.engine.cpu.operations import CpuOperations
from mint.engine.lora import LoraRows
from mint.engine.model.functions import exponentials
from mint.engine.target_logprobs import TargetLogprobs, row_slices

DType = Literal["float32", "bfloat16"]
BOUNDS: dict[DType, float] = {"float32": 2e-5, "bfloat16": 1e-2}


def _pairs(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Row, target, slope and whether trained, of rows with one pair or two of which none, one or both are trained."""
    rows, targets, trained = [], [], []
    for row in range(count):
        own = int(rng.integers(1, 3))
        rows += [row] * own
        targets += rng.choice(97, own, replace=False).tolist()
        trained += (rng.random(own) < 0.6).tolist()
    slopes = np.where(trained, rng.normal(0, 1, len(rows)), 0).astype(np.float32)
    return np.array(rows), np.array(targets), slopes, np.array(trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [0.3, 30.0], ids=["uncertain", "certain"])
@pytest.mark.parametrize(("chunk", "cached"), [(1 << 20, 1 << 19), (97 * 20, 97 * 3)], ids=["at once", "in pieces"])
def test_logprobs_entropies_and_gradients_equal_those_in_float64(
    tied: tuple[Path, PreTrainedModel],
    dtype: DType,
    size: float,
    chunk: int,
    cached: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_logprobs, "MIN_CHUNK_ROWS", 16)
    monkeypatch.setattr(CpuOperations, "logits_at_once", chunk)
    monkeypatch.setattr(operations, "CACHED_LOGITS", cached)
    decoder = open_decoder(tied[0], getattr(torch, dtype))
    rng = np.random.default_rng(3)
    rows, targets, slopes, trained = _pairs(rng, 75)
    matrix = decoder.weights.unembedding.dense().double()
    hidden = torch.from_numpy(rng.normal(0, size, (75, matrix.shape[1]))).bfloat16().float()
    pairs = TargetLogprobs(decoder, hidden, rows, targets, [LoraRows(0, 75, None)], trained=trained)
    exact = hidden.double().requires_grad_()
    logprobs = torch.log_softmax(exact @ matrix.t(), 1)
    chosen = logprobs[torch.from_numpy(rows), torch.from_numpy(targets)]
    (chosen * torch.from_numpy(slopes)).sum().backward()
    scale = float(chosen.detach().abs().max())
    np.testing.assert_allclose(pairs.logprobs.numpy(), chosen.detach().numpy(), atol=1e-5 * scale)
    entropies = -(logprobs.exp() * logprobs).sum(1).detach().numpy()
    np.testing.assert_allclose(pairs.entropies.numpy(), entropies, atol=1e-5 * scale)
    gradient = exact.grad
    assert gradient is not None
    deviation = (pairs.hidden_gradient(slopes).double() - gradient).norm(dim=1)
    assert float((deviation / matrix.norm(dim=1).mean()).max()) < BOUNDS[dtype]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1 << 20, 97 * 20], ids=["at once", "in pieces"])
def test_the_gradient_of_entropies_equals_that_in_float64(
    tied: tuple[Path, PreTrainedModel], temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together with that of logprobs; some rows have only one of the two."""
    monkeypatch.setattr(target_logprobs, "MIN_CHUNK_ROWS", 16)
    monkeypatch.setattr(CpuOperations, "logits_at_once", chunk)
    decoder = open_decoder(tied[0], torch.float32)
    rng = np.random.default_rng(5)
    rows, targets, slopes, _ = _pairs(rng, 75)
    entropy_slopes = (rng.normal(0, 1, 75) * (rng.random(75) < 0.5)).astype(np.float32)
    matrix = decoder.weights.unembedding.dense().double()
    hidden = torch.from_numpy(rng.normal(0, 5, (75, matrix.shape[1]))).float()
    pairs = TargetLogprobs(decoder, hidden, rows, targets, [LoraRows(0, 75, None)], temperature=temperature)
    exact = hidden.double().requires_grad_()
    logprobs = torch.log_softmax(exact @ matrix.t() / temperature, 1)
    chosen = logprobs[torch.from_numpy(rows), torch.from_numpy(targets)]
    entropies = -(logprobs.exp() * logprobs).sum(1)
    ((chosen * torch.from_numpy(slopes)).sum() + (entropies * torch.from_numpy(entropy_slopes)).sum()).backward()
    assert exact.grad is not None
    deviation = (pairs.hidden_gradient(slopes, entropy_slopes).double() - exact.grad).norm(dim=1)
    assert float((deviation / matrix.norm(dim=1).mean()).max()) < BOUNDS["float32"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [97, 70_000])
def test_a_lone_rows_normaliser_has_the_bits_it_has_among_others(threads: int, width: int) -> None:
    torch.set_num_threads(threads)
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 5, (6, width)).astype(np.float32))
    weights, normalisers = exponentials(logits)
    for row in range(6):
        alone = exponentials(logits[row : row + 1])
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1], normalisers[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_through_many_outputs_equals_that_in_float64(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.normal(0, 1, (2 * 4096 + 60, 24)).astype(np.float32)).to(dtype)
    grad = torch.from_numpy(rng.normal(0, 1, (30, weight.shape[0])).astype(np.float32)).to(dtype)
    exact = grad.double() @ weight.double()
    found = cpu_unembedding(weight).gradient(grad)
    assert found.dtype == torch.float32
    assert float((found.double() - exact).abs().max() / exact.abs().max()) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 632, 5000])
@pytest.mark.parametrize("vocab_size", [97, 151_936])
def test_slices_cover_all_rows_once_and_are_of_about_one_size(count: int, vocab_size: int) -> None:
    slices = list(row_slices(count, vocab_size, 1 << 20))
    assert [row for own in slices for row in range(own.start, own.stop)] == list(range(count))
    sizes = [own.stop - own.start for own in slices]
    assert not sizes or max(sizes) - min(sizes) <= len(sizes)
