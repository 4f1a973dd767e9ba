"""Sums over the chunks of a layer, in a fixed tree: who computes which chunks does not change a bit.

A layer that is cut into chunks adds up what each of them makes of the same rows. Their number is a power of two, and
neighbours are added in pairs, then neighbouring pairs, and so on. One process computes all chunks, or each of several
processes a run of neighbours, which is a node of that tree. `mint.cluster` has the division among several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Chunks(Protocol):
    """Who computes which chunks. All processes call the same methods in the same order."""

    @property
    def count(self) -> int:
        """How many chunks a layer has: a power of two, which decides bits."""
        ...

    @property
    def own(self) -> range:
        """The chunks that this process computes."""
        ...

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all chunks, from float32 `parts` of one shape, those of `own` in order."""
        ...

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The vectors of all chunks, in order, from float32 `parts` of one length, those of `own`."""
        ...


@dataclass(frozen=True)
class LocalChunks:
    """All chunks in one process."""

    count: int

    @property
    def own(self) -> range:
        return range(self.count)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return tree_sum(parts)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of `parts`, whose number is a power of two; they stay as they are."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
