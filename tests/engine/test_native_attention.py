"""Native attention: each query's bits are its own, however its keys are stored, and whoever is computed beside it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mint.engine.cpu.attention import DecodedRows, PackedRows, attend_packed, attend_packed_backward, attend_pages
from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.operations import NativeOperations
from mint.engine.model.attention import PAGE_POSITIONS

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

KINDS = [
    # head dimension, kv heads, query heads for each, kv heads side by side, window, dtype
    (32, 2, 2, 2, 0, torch.float32), (32, 1, 40, 1, 0, torch.bfloat16), (64, 3, 1, 1, 0, torch.float32),
    (64, 4, 3, 2, 0, torch.bfloat16), (128, 2, 2, 1, 0, torch.bfloat16), (128, 1, 5, 1, 0, torch.float32),
    (96, 2, 2, 2, 0, torch.float32), (96, 2, 1, 1, 50, torch.bfloat16),
    (256, 1, 4, 1, 0, torch.float32), (256, 2, 1, 1, 20, torch.bfloat16), (64, 3, 1, 1, 5, torch.float32),
    (64, 4, 3, 2, 64, torch.bfloat16), (32, 1, 40, 1, 33, torch.float32), (128, 2, 2, 1, 100, torch.bfloat16),
]  # fmt: skip
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 90)


@pytest.fixture(scope="module")
def kernels(native_folder: Path) -> NativeKernels:
    return NativeKernels(native_folder)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Layout:
    """Prompts with samples: of each row itself, its prefix, how long that is, where its own rows begin; [4, T]. And of
    each sample, the rows that its last token sees."""

    rows: np.ndarray
    seen: list[list[int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)


def _lay_out(rng: np.random.Generator) -> Layout:
    columns: list[tuple[int, int, int, int]] = []
    layout = Layout(np.zeros((4, 0), np.int64))
    for _ in range(3):
        start, length = len(columns), int(rng.choice((0, *LENGTHS, 130)))
        columns += [(row, 0, 0, start) for row in range(start, start + length)]
        for _ in range(int(rng.integers(1, 10))):
            own, size = len(columns), int(rng.choice(LENGTHS))
            columns += [(row, start if length else 0, length, own) for row in range(own, own + size)]
            layout.seen.append([*range(start, start + length), *range(own, own + size)])
            layout.prompts.append(length)
    layout.rows = np.array(columns, np.int64).T
    return layout


def _packed(kernels: NativeKernels, heads: Tensor, kv_heads: int, rows: np.ndarray, window: int) -> Tensor:
    query_heads = heads.shape[1] - 2 * kv_heads
    return attend_packed(kernels, PackedRows(query_heads, kv_heads, *rows), heads, window)


def _in_pages(heads: Tensor, kv_heads: int, side: int, layout: Layout) -> tuple[Tensor, np.ndarray]:
    """Keys and values of what each sample's last token sees; the full pages of a prompt are shared. The rest is NaN."""
    query_heads, pages, table, shared = heads.shape[1] - 2 * kv_heads, [], [], {}
    for seen, prompt in zip(layout.seen, layout.prompts, strict=True):
        own = []
        for start in range(0, len(seen), PAGE_POSITIONS):
            key = (seen[0], start) if start + PAGE_POSITIONS <= prompt else (len(table), start, -1)
            if key not in shared:
                shared[key] = len(pages)
                places = seen[start : start + PAGE_POSITIONS]
                page = heads.new_full((2, kv_heads // side, PAGE_POSITIONS, side * heads.shape[2]), math.nan)
                stored = heads[places, query_heads:].view(len(places), 2, kv_heads // side, -1)
                page[:, :, : len(places)] = stored.permute(1, 2, 0, 3)
                pages.append(page)
            own.append(shared[key])
        table.append(own)
    columns = max(map(len, table))
    return torch.stack(pages, dim=1), np.array([[*own, *[0] * (columns - len(own))] for own in table])


def _decoded(
    kernels: NativeKernels,
    heads: Tensor,
    kv_heads: int,
    side: int,
    pages: Tensor,
    table: np.ndarray,
    seen: list[list[int]],
    window: int,
) -> Tensor:
    query_heads = heads.shape[1] - 2 * kv_heads
    positions = np.array([len(own) - 1 for own in seen])
    rows = DecodedRows(query_heads, kv_heads, side, PAGE_POSITIONS, table, positions)
    own = heads[[places[-1] for places in seen]].contiguous()
    return attend_pages(kernels, rows, own, pages[0].contiguous(), pages[1].contiguous(), window)


@pytest.mark.parametrize(("dim", "kv_heads", "groups", "side", "window", "dtype"), KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_training_decoding_and_a_row_alone_have_the_same_bits(
    kernels: NativeKernels, dim: int, kv_heads: int, groups: int, side: int, window: int, dtype: torch.dtype, seed: int
) -> None:
    """With 1 thread and with 2, from packed rows and from pages, which neighbours share or do not."""
    rng = np.random.default_rng(seed)
    layout = _lay_out(rng)
    count = layout.rows.shape[1]
    shape = (count, (groups + 2) * kv_heads, dim)
    heads = torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)).to(dtype)
    torch.set_num_threads(1)
    whole = _packed(kernels, heads, kv_heads, layout.rows, window)
    pages, table = _in_pages(heads, kv_heads, side, layout)
    last = [own[-1] for own in layout.seen]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(_packed(kernels, heads, kv_heads, layout.rows, window), whole)
        some = np.sort(rng.choice(count, count // 3, replace=False))
        assert torch.equal(_packed(kernels, heads, kv_heads, layout.rows[:, some], window), whole[some])
        assert torch.equal(_decoded(kernels, heads, kv_heads, side, pages, table, layout.seen, window), whole[last])
        order = rng.permutation(len(last))
        seen = [layout.seen[index] for index in order]
        mixed = _decoded(kernels, heads, kv_heads, side, pages, table[order], seen, window)
        assert torch.equal(mixed, whole[np.array(last)[order]])
    for index in range(0, len(last), 5):
        alone = _decoded(
            kernels, heads, kv_heads, side, pages, table[index : index + 1], layout.seen[index : index + 1], window
        )
        assert torch.equal(alone[0], whole[last[index]])


@pytest.mark.parametrize(("dim", "kv_heads", "groups", "side", "window", "dtype"), KINDS)
def test_the_gradient_of_some_rows_is_that_of_all_rows_of_which_the_others_have_none(
    kernels: NativeKernels, dim: int, kv_heads: int, groups: int, side: int, window: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(3)
    rows = _lay_out(rng).rows
    count, query_heads = rows.shape[1], groups * kv_heads
    heads, slope = (
        torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)).to(dtype)
        for shape in ((count, (groups + 2) * kv_heads, dim), (count, query_heads * dim))
    )
    some = np.sort(rng.choice(count, count // 3, replace=False))
    others = np.setdiff1d(np.arange(count), some)
    slope[others] = 0
    whole = attend_packed_backward(kernels, PackedRows(query_heads, kv_heads, *rows), heads, slope, window)
    found = attend_packed_backward(
        kernels, PackedRows(query_heads, kv_heads, *rows[:, some]), heads, slope[some], window
    )
    assert found.dtype == dtype and torch.equal(found, whole)
    assert found[some, :query_heads].ne(0).any() and not found[others, :query_heads].any()


@pytest.mark.parametrize(("dim", "kv_heads", "groups", "side", "window", "dtype"), KINDS)
def test_decoding_over_pages_is_that_of_float64(
    kernels: NativeKernels, dim: int, kv_heads: int, groups: int, side: int, window: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(2)
    layout = _lay_out(rng)
    shape = (layout.rows.shape[1], (groups + 2) * kv_heads, dim)
    heads = torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)).to(dtype)
    found = _decoded(kernels, heads, kv_heads, side, *_in_pages(heads, kv_heads, side, layout), layout.seen, window)
    near: float = 1e-5 if dtype == torch.float32 else 1e-2
    for own, seen in zip(found.view(len(found), kv_heads, groups, dim).double(), layout.seen, strict=True):
        query, key, value = heads[seen[-window:]].double().split([groups * kv_heads, kv_heads, kv_heads], dim=1)
        scores = torch.einsum("kgd,jkd->kgj", query[-1].view(kv_heads, groups, dim), key) / math.sqrt(dim)
        expected = torch.einsum("kgj,jkd->kgd", scores.softmax(-1), value)
        torch.testing.assert_close(own, expected, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 63, 97, 512, 3001])
def test_normalisers_entropies_and_shares_of_logits_are_those_of_float64(
    kernels: NativeKernels, width: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.normal(0, 1, (9, width)) * np.logspace(-2, 1.5, 9)[:, None]).float()
    exact, before = torch.log_softmax(logits.double(), dim=1), logits.clone()
    needs_gradient = rng.integers(0, 2, 9).astype(bool)
    normalisers, entropies, negatives = NativeOperations(dtype, kernels).softmax_statistics(logits, needs_gradient)
    torch.testing.assert_close(normalisers.double(), torch.logsumexp(before.double(), 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies.double(), -(exact.exp() * exact).sum(1), rtol=1e-5, atol=2e-5)
    near: float = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(negatives.double(), -exact.exp()[needs_gradient], rtol=near, atol=1e-7)
    assert torch.equal(logits[~needs_gradient], before[~needs_gradient])
