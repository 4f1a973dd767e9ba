"""Ranks that divide the moments of large LoRAs: each keeps, advances and hashes some of the blocks.

A rank advances its part of the weights with its part of the moments, and the weights are gathered. So a step has the
bits of one process. Weights and gradients are whole on every rank, because every pass reads and adds to all of them.
The same idea for whole models is ZeRO (arXiv 1910.02054), stage 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.nn.functional import pad

from mint.cluster.collectives.parallelism import divides_moments
from mint.cluster.collectives.progress import Progress
from mint.cluster.ranges import divide
from mint.engine.reductions.state_division import Bounds, StateDivision

_DIGEST_BYTES = 32


class StateRanks:
    """`StateDivision` over all ranks, whose tensors are in the memory of the CPU."""

    def __init__(self, bounds: Bounds, rank: int, world: int, progress: Progress) -> None:
        """Gives each rank a run of neighbouring blocks."""
        blocks = divide([stop - start for start, stop in bounds], world)
        self._counts = [len(own) for own in blocks]
        edges = [*(bounds[own.start][0] if len(own) else bounds[-1][1] for own in blocks), bounds[-1][1]]
        self._lengths = [stop - start for start, stop in pairwise(edges)]
        self._progress = progress
        self.own = slice(edges[rank], edges[rank + 1])

    def gather(self, part: Tensor) -> Tensor:
        """See `StateDivision`."""
        return self._gather(part, self._lengths)

    def gather_digests(self, digests: bytes) -> bytes:
        """See `StateDivision`."""
        own = torch.frombuffer(bytearray(digests), dtype=torch.uint8) if digests else torch.empty(0, dtype=torch.uint8)
        gathered = self._gather(own, [_DIGEST_BYTES * count for count in self._counts])
        return gathered.numpy().tobytes()

    def all_agree(self, is_true: Tensor) -> Tensor:
        """See `StateDivision`."""
        found = is_true.to(torch.int64)
        with self._progress.waiting():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return found.bool()

    def _gather(self, part: Tensor, lengths: Sequence[int]) -> Tensor:
        longest = max(lengths)
        gathered = part.new_empty(longest * len(lengths))
        with self._progress.waiting():
            dist.all_gather_into_tensor(gathered, pad(part, (0, longest - len(part))).contiguous())
        return torch.cat([own[:length] for own, length in zip(gathered.split(longest), lengths, strict=True)])


def divide_state(bounds: Bounds, progress: Progress) -> StateDivision | None:
    """The division of moments with these blocks; None: every rank keeps all of them."""
    world = dist.get_world_size()
    if world == 1 or not bounds or not divides_moments(bounds[-1][1]):
        return None
    return StateRanks(bounds, dist.get_rank(), world, progress)
