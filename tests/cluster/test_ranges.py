"""Ranges of micro-batches: contiguous, complete, and as equal as they can be."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

from mint.cluster.ranges import divide


def _largest(costs: list[int], ranges: list[range]) -> int:
    return max(sum(costs[index] for index in own) for own in ranges)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_ranges_cover_all_in_order_and_none_could_be_cheaper(count: int) -> None:
    rng = np.random.default_rng(count)
    for size in range(10):
        costs = rng.integers(0, 20, size).tolist()
        ranges = divide(costs, count)
        assert len(ranges) == count and [index for own in ranges for index in own] == list(range(size))
        assert all(first.stop == second.start for first, second in pairwise(ranges))
        if size <= 7:
            cuts = combinations_with_replacement(range(size + 1), count - 1)
            best = min(_largest(costs, [range(*pair) for pair in pairwise([0, *own, size])]) for own in cuts)
            assert _largest(costs, ranges) == best


def test_equal_costs_give_ranges_that_differ_by_one_at_most() -> None:
    assert [len(own) for own in divide([5] * 16, 8)] == [2] * 8
    assert max(map(len, divide([5] * 20, 8))) == 3


def test_fewer_micro_batches_than_ranks_leave_the_last_ones_idle() -> None:
    assert divide([7, 7], 4) == [range(1), range(1, 2), range(2, 2), range(2, 2)]
    assert divide([], 2) == [range(0), range(0)]
