"""Drawing by the kernel: the distribution, the draws of torch, and a row's own result whatever other rows are in the
batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.draw import NativeDraw
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.operations import CpuOperations
from mint.engine.drawing.draw import TorchDraw, take
from mint.engine.drawing.draw import draw as torch_draw
from mint.engine.drawing.random_stream import streams, uniform_of
from mint.engine.drawing.token_masks import TokenMasks, packed

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

TABLE = np.dtype(
    [("emitted", np.int64), ("temperature", np.float64), ("odd", np.bool_), ("top_k", np.int64), ("top_p", np.float64),
     ("stream", np.uint64)], align=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def draw(native_folder: Path) -> NativeDraw:
    return NativeDraw(NativeKernels(native_folder))


def _table(count: int, **columns: float | np.ndarray) -> np.ndarray:
    table: np.ndarray = np.zeros(count, TABLE)
    table["stream"] = streams(np.full(count, 11, np.uint64), np.arange(count))
    table["emitted"], table["temperature"], table["top_k"], table["top_p"] = 3, 1.0, -1, 1.0
    for name, column in columns.items():
        table[name] = column
    return table


def _logits(rows: int, vocab: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))


def _all(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(rows), np.arange(rows)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 63, 64, 65, 97, 512, 5003])
def test_tokens_and_logprobs_are_those_of_float64(draw: NativeDraw, vocab: int, temperature: float) -> None:
    logits, table = _logits(60, vocab), _table(60, temperature=temperature)
    tokens, logprobs, _ = draw(logits, np.arange(60), table, np.arange(60))
    exact = logits.double().numpy()
    cumulated = np.exp((exact - exact.max(1, keepdims=True)) / temperature).cumsum(1)
    goals = uniform_of(table["stream"], table["emitted"]) * cumulated[:, -1]
    for row, token in enumerate(tokens.tolist()):  # the float32 weights move the edges between tokens a little
        near = 1e-5 * cumulated[row, -1]
        assert (cumulated[row, token - 1] if token else 0.0) - near <= goals[row] <= cumulated[row, token] + near
    expected = torch.log_softmax(logits.double(), 1).numpy()[np.arange(60), tokens]
    np.testing.assert_allclose(logprobs, expected, atol=4e-6)


def test_every_rule_draws_what_torch_draws(draw: NativeDraw) -> None:
    count = 400
    columns = {
        "temperature": np.resize([1.0, 0.6, 0.0, 1.7], count),
        "top_k": np.resize([-1, -1, 4, -1, 500, 0], count),
        "top_p": np.resize([1.0, 1.0, 1.0, 0.8, 1.0], count),
    }
    logits, table, (rows, slots) = _logits(count, 331), _table(count, **columns), _all(count)
    tokens, logprobs, _ = draw(logits, rows, table, slots)
    expected, of_torch, _ = TorchDraw(CpuOperations(torch.float32))(logits, rows, table, slots)
    assert np.array_equal(tokens, expected)
    np.testing.assert_allclose(logprobs, of_torch, atol=2e-6)


@pytest.mark.parametrize("vocab", [331, 70_000])
def test_a_row_gets_the_same_in_any_company_and_with_any_threads(draw: NativeDraw, vocab: int) -> None:
    logits, table, (rows, slots) = _logits(9, vocab), _table(9), _all(9)
    tokens, logprobs, _ = draw(logits, rows, table, slots)
    torch.set_num_threads(2)
    for order in ([8, 0, 4], [4], [*range(9)]):
        found = draw(logits, np.array(order), table, np.array(order))
        assert np.array_equal(found[0], tokens[order]) and np.array_equal(found[1], logprobs[order])
        found = draw(logits[order], np.arange(len(order)), table[order], np.arange(len(order)))
        assert np.array_equal(found[0], tokens[order]) and np.array_equal(found[1], logprobs[order])


def test_greedy_takes_the_first_of_the_best(draw: NativeDraw) -> None:
    logits = torch.zeros(3, 40)
    logits[0, [7, 20, 39]], logits[1] = 2.0, -torch.inf
    logits[1, 39] = -5.0
    tokens, _, _ = draw(logits, np.arange(3), _table(3, temperature=0.0), np.arange(3))
    assert tokens.tolist() == [7, 39, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 96])
def test_what_is_not_finite_shows_in_its_own_row_only(
    draw: NativeDraw, place: int, worst: float, temperature: float
) -> None:
    logits, table, (rows, slots) = _logits(3, 97), _table(3, temperature=temperature), _all(3)
    tokens, logprobs, _ = draw(logits, rows, table, slots)
    logits[1, place] = worst
    broken, of_broken, _ = draw(logits, rows, table, slots)
    assert np.isfinite(of_broken).tolist() == [True, False, True] and 0 <= broken[1] < 97
    assert np.array_equal(broken[[0, 2]], tokens[[0, 2]]) and np.array_equal(of_broken[[0, 2]], logprobs[[0, 2]])


def test_no_draw_picks_an_impossible_token(draw: NativeDraw) -> None:
    possible = np.arange(0, 300, 7)
    logits = torch.full((2000, 300), -torch.inf)
    logits[:, possible] = _logits(2000, len(possible))
    tokens, logprobs, _ = draw(logits, np.arange(2000), _table(2000), np.arange(2000))
    assert np.isin(tokens, possible).all() and np.isfinite(logprobs).all()


def test_frequencies_follow_the_distribution(draw: NativeDraw) -> None:
    count, logits = 50_000, _logits(1, 97, 1.5)
    tokens, _, _ = draw(logits.expand(count, -1), np.arange(count), _table(count), np.arange(count))
    shares = torch.softmax(logits.double(), 1)[0].numpy()
    found = np.bincount(tokens, minlength=97) / count
    assert (np.abs(found - shares) < 5 * np.sqrt(shares * (1 - shares) / count) + 1e-12).all()


def _masks(at: np.ndarray, vocab: int) -> tuple[TokenMasks, np.ndarray]:
    """Random masks for `at`, none of them empty, and the same as flags, bool [M, V]."""
    rng = np.random.default_rng(vocab)
    flags = rng.random((len(at), vocab)) < rng.choice([0.02, 0.5, 0.98], (len(at), 1))
    flags[np.arange(len(at)), rng.integers(0, vocab, len(at))] = True
    return TokenMasks(at, np.stack([packed(np.flatnonzero(own), vocab) for own in flags])), flags


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97, 331, 5003])
def test_a_mask_changes_the_draw_as_excluded_logits_do_and_no_logprob(draw: NativeDraw, vocab: int) -> None:
    count = 120
    columns = {
        "temperature": np.resize([1.0, 0.6, 0.0, 1.7], count),
        "top_k": np.resize([-1, -1, 4, -1, 500, 0], count),
        "top_p": np.resize([1.0, 1.0, 1.0, 0.8, 1.0], count),
    }
    logits, table, (rows, slots) = _logits(count, vocab), _table(count, **columns), _all(count)
    at = np.flatnonzero(np.arange(count) % 3)
    masks, flags = _masks(at, vocab)
    excluded = logits.clone()
    excluded[at] = excluded[at].masked_fill(torch.from_numpy(~flags), -torch.inf)
    normalisers = torch.logsumexp(logits.double(), 1).numpy()
    for chosen in (draw, TorchDraw(CpuOperations(torch.float32))):
        tokens, logprobs, _ = chosen(logits, rows, table, slots, masks)
        expected, _, _ = chosen(excluded, rows, table, slots)
        assert np.array_equal(tokens, expected) and flags[np.arange(len(at)), tokens[at]].all()
        assert masks.allow(tokens[at]).all()
        np.testing.assert_allclose(logprobs, logits.numpy()[rows, tokens] - normalisers, atol=4e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0])
def test_a_mask_that_excludes_all_shows_in_its_token(draw: NativeDraw, temperature: float) -> None:
    logits, table, (rows, slots) = _logits(3, 97), _table(3, temperature=temperature), _all(3)
    masks = TokenMasks(np.array([1]), packed(np.array([], np.int64), 97)[None])
    plain, _, _ = draw(logits, rows, table, slots)
    tokens, _, _ = draw(logits, rows, table, slots, masks)
    assert not masks.allow(tokens[[1]]).any() and np.array_equal(tokens[[0, 2]], plain[[0, 2]])


def test_on_a_device_a_draw_by_any_rules_reads_nothing_back() -> None:
    """The caller reads tokens and logprobs, in one copy. Tensors of `meta` have no data, so reading them raises."""
    logits = take(torch.empty(9, 1000, device="meta"), np.arange(6))
    rules = np.array([0.0, 1.0, 0.7, 1.0, 1.3, 1.0]), np.array([-1, -1, -1, 5, 0, -1]), np.array([1, 1, 1, 1, 0.9, 0.5])
    for chosen in ([0], [1], [2, 3], [1, 1], [0, 1, 2, 3, 4, 5]):
        tokens, logprobs, normalisers = torch_draw(
            logits[: len(chosen)], np.full(len(chosen), 0.5), *(rule[chosen] for rule in rules)
        )
        assert tokens.shape == logprobs.shape == normalisers.shape == (len(chosen),)
        assert tokens.is_meta and logprobs.is_meta and normalisers.is_meta
