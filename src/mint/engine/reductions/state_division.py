"""Who keeps which part of a model's vectors: one process all of them, or several processes a range each.

Ranges begin and end where blocks of the digest do, so that each block is hashed by the process that keeps it. Knows
vectors, not models. `mint.cluster` has the division among several (`state_ranks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Bounds = Sequence[tuple[int, int]]
"""Where the blocks of a vector start and stop, one behind the other."""


DIVIDED_FROM: int = 1 << 22
"""Processes divide a lora with so many numbers or more (64 MiB of weights, gradient and moments)."""


def divides_lora(numbers: int) -> bool:
    """Whether processes divide a lora with so many numbers. Each has the whole of a smaller one: it takes little
    memory, and needs no exchange before a pass."""
    return numbers >= DIVIDED_FROM


class StateDivision(Protocol):
    """The division of one model: of its weights, their gradient, and its moments.

    All processes call the same methods in the same order.
    """

    @property
    def parts(self) -> Sequence[slice]:
        """The numbers of each vector that the processes keep, in their order."""
        ...

    @property
    def own(self) -> slice:
        """The numbers of each vector that this process keeps."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """The whole vector [size], from the `part` of `own`."""
        ...

    def square_sums(self, part: Tensor) -> Tensor:
        """The `square_sums` of the whole vector, from the `part` of `own`."""
        ...

    def gather_digests(self, digests: bytes) -> bytes:
        """The digests of all blocks in order, 32 bytes each, from those of this process's blocks."""
        ...

    def all_agree(self, is_true: Tensor) -> Tensor:
        """Whether it is true in every process, a boolean like the argument."""
        ...
