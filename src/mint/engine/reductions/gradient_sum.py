"""The gradient of a request: the sum over its micro-batches, in a fixed binary tree.

A sum of floats depends on the order of its additions. Here the order follows from the number of micro-batches alone: a
node of n of them has two parts, and the first part has the largest power of two that is less than n. Whoever computes a
contiguous range of the micro-batches adds up the largest nodes within it (`partial_sums`). `whole_sum` joins the nodes
of all ranges. Every division into ranges gives the same bits; one process computes the only range.

Knows vectors, not models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor


def partial_sums(count: int, own: range, leaf: Callable[[int], Tensor]) -> dict[range, Tensor]:
    """The sums of the largest nodes within `own`, a range of the `count` micro-batches.

    `leaf` gives the gradient of a micro-batch, and may give the same vector each time with other numbers. It is called
    once for each of `own`, in order. Beside the results, about log2(len(own)) vectors exist at once.
    """
    return {node: _sum_of(node, leaf) for node in nodes_within(range(count), own)}


def whole_sum(count: int, sums: Mapping[range, Tensor]) -> Tensor:
    """The sum over all `count` micro-batches (at least one), from the `partial_sums` of ranges that cover them.

    Overwrites the vectors in `sums`.
    """
    return _join(range(count), sums)


def nodes_within(node: range, own: range) -> list[range]:
    """The largest nodes at or below `node` that lie in `own`, in order."""
    if own.start <= node.start and node.stop <= own.stop:
        return [node]
    if node.stop <= own.start or own.stop <= node.start:
        return []
    return [inner for part in _parts(node) for inner in nodes_within(part, own)]


def _join(node: range, sums: Mapping[range, Tensor]) -> Tensor:
    if node in sums:
        return sums[node]
    first, second = _parts(node)
    return _join(first, sums).add_(_join(second, sums))


def _sum_of(node: range, leaf: Callable[[int], Tensor]) -> Tensor:
    if len(node) == 1:
        return leaf(node.start).clone()
    first, second = _parts(node)
    total = _sum_of(first, leaf)
    # Not a copy of a micro-batch that is added at once.
    return total.add_(leaf(second.start) if len(second) == 1 else _sum_of(second, leaf))


def _parts(node: range) -> tuple[range, range]:
    """The two parts of a node of at least two micro-batches."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)
