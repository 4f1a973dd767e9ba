"""Who keeps which part of a model's moments: one process all of them, or several processes a range each.

Ranges begin and end where blocks of the digest do, so that each block is hashed by the process that keeps it. Knows
vectors, not models. `mint.cluster` has the division among several (`state_ranks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Bounds = Sequence[tuple[int, int]]
"""Where the blocks of a vector start and stop, one behind the other."""


class StateDivision(Protocol):
    """The division of the moments of one model. All processes call the same methods in the same order."""

    @property
    def own(self) -> slice:
        """The numbers of the vector that this process keeps."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """The whole vector [size], from the `part` of `own`."""
        ...

    def gather_digests(self, digests: bytes) -> bytes:
        """The digests of all blocks in order, 32 bytes each, from those of this process's blocks."""
        ...

    def all_agree(self, is_true: Tensor) -> Tensor:
        """Whether it is true in every process, a boolean like the argument."""
        ...
