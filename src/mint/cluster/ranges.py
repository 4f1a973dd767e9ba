"""Which rank computes which micro-batches: contiguous ranges of about equal cost. Pure.

Any division gives the same bits (`engine/reductions/gradient_sum.py`), so only speed depends on this one.
"""

from __future__ import annotations

from collections.abc import Sequence


def divide(costs: Sequence[int], count: int) -> list[range]:
    """`count` contiguous ranges that cover all micro-batches in order; the last ones may be empty.

    The largest cost of a range is as small as it can be. `costs` are whole numbers of at least 0.
    """
    low, high = max(costs, default=0), sum(costs)
    while low < high:  # the smallest limit with which `count` ranges suffice
        middle = (low + high) // 2
        if len(_fill(costs, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    ranges = _fill(costs, low)
    return ranges + [range(len(costs), len(costs))] * (count - len(ranges))


def _fill(costs: Sequence[int], limit: int) -> list[range]:
    """The fewest ranges that each cost at most `limit`, which no single micro-batch exceeds."""
    ranges, start, total = [], 0, 0
    for index, cost in enumerate(costs):
        if total + cost > limit and index > start:
            ranges.append(range(start, index))
            start, total = index, 0
        total += cost
    return [*ranges, range(start, len(costs))]
