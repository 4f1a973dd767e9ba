"""Ranks that train together: the bits of one process, for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_work import engine_with, join_of, total_of, train_on_ranks, train_steps, train_while

from mint.engine.reductions.division import ALONE
from mint.engine.reductions.gradient_sum import partial_sums, whole_sum

OnRanks = Callable[..., list[Any]]
WORLDS = [pytest.param(1, marks=pytest.mark.slow), 2, 3]


@pytest.mark.parametrize("world", WORLDS)
def test_the_sum_of_all_ranks_has_the_bits_of_one_process(on_ranks: OnRanks, world: int) -> None:
    rng = np.random.default_rng(world)
    for count, size in ((1, 7), (2, 1), (5, 10), (8, 3), (13, 1000)):
        leaves = (rng.normal(size=(count, size)) * 10.0 ** rng.uniform(-6, 3, (count, size))).astype(np.float32)
        sums = partial_sums(count, range(count), lambda index, own=leaves: torch.from_numpy(own[index]))
        expected = whole_sum(count, sums).numpy()
        parts = on_ranks(world, total_of, leaves, rng.integers(1, 9, count).tolist())
        assert [index for own, _ in parts for index in own] == list(range(count))
        assert all(found.tobytes() == expected.tobytes() for _, found in parts)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_gets_the_values_of_all(on_ranks: OnRanks, world: int) -> None:
    rng = np.random.default_rng(world)
    values = [rng.normal(size=size) for size in (3, 0, 5, 1)]
    for parts in (values, values[:1], values[1:2]):
        found = on_ranks(world, join_of, parts, [len(part) + 1 for part in parts])
        assert all(np.array_equal(own, np.concatenate(parts)) for own in found)


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        pytest.param(1, "float32", marks=pytest.mark.slow),
        (2, "bfloat16"),
        pytest.param(3, "float32", marks=pytest.mark.slow),
    ],
)
def test_steps_on_any_number_of_ranks_end_with_the_state_of_one_process(
    on_ranks: OnRanks, folder: Path, world: int, dtype: str
) -> None:
    digests, results, _ = train_steps(engine_with(ALONE, folder, dtype=dtype))
    for own_digests, own_results, _ in on_ranks(world, _train, folder, dtype):
        assert own_digests == digests
        for own, expected in zip(own_results, results, strict=True):
            assert own.metrics == expected.metrics and own.micro_batching == expected.micro_batching
            for name in ("logprobs", "entropies"):
                pairs = zip(getattr(own, name), getattr(expected, name), strict=True)
                assert all(mine.dtype == its.dtype and mine.tobytes() == its.tobytes() for mine, its in pairs)


def _train(folder: Path, dtype: str) -> Any:
    return train_on_ranks(folder, dtype=dtype)


def test_the_number_of_ranks_may_change_between_two_steps(on_ranks: OnRanks, folder: Path) -> None:
    engine = engine_with(ALONE, folder)
    first, *_ = train_steps(engine)
    second, *_ = train_steps(engine, 3)
    (own, _, state), *_ = on_ranks(3, train_on_ranks, folder)
    (then, *_), *_ = on_ranks(2, train_on_ranks, folder, 3, state)
    assert own == first and then == second


def test_memory_that_runs_out_on_one_rank_shrinks_the_micro_batches_of_all(on_ranks: OnRanks, folder: Path) -> None:
    found = on_ranks(2, train_while, folder, 1, MemoryError("can't allocate memory"))
    assert len(set(found)) == 1
    used, digest, repeated = found[0]
    assert used is not None and (used.recompute or used.rows < 512) and digest == repeated


def test_an_error_of_one_rank_ends_the_pass_on_all(on_ranks: OnRanks, folder: Path) -> None:
    first, second = on_ranks(2, train_while, folder, 0, RuntimeError("broken"))
    assert first == (None, "RuntimeError", "broken")
    assert second[:2] == (None, "PeerFailedError")
