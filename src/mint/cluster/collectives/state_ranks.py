"""Ranks that divide large LoRAs: each keeps, advances and hashes some of the blocks of weights, gradient and moments.

A step needs a rank's own part alone, except for the norms. A pass reads all weights, so they are gathered for it
(`engine/bases/trained_model.py`). The same idea for whole models is ZeRO (arXiv 1910.02054), stage 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.nn.functional import pad

from mint.cluster.collectives.progress import Progress
from mint.cluster.ranges import divide
from mint.engine.reductions.gradient_norm import square_sums
from mint.engine.reductions.state_division import Bounds, StateDivision, divides_lora
from mint.engine.state_digest import BLOCK

_DIGEST_BYTES = 32


class StateRanks:
    """`StateDivision` over all ranks, whose tensors are in the memory of the CPU."""

    def __init__(self, bounds: Bounds, rank: int, world: int, progress: Progress) -> None:
        """Gives each rank a run of neighbouring blocks."""
        blocks = divide([stop - start for start, stop in bounds], world)
        self._counts = [len(own) for own in blocks]
        edges = [*(bounds[own.start][0] if len(own) else bounds[-1][1] for own in blocks), bounds[-1][1]]
        self._lengths = [stop - start for start, stop in pairwise(edges)]
        self._starts = [-(-edge // BLOCK) for edge in edges]
        """The first block of norms that starts in the part of each rank, or behind it; and the number of all blocks."""
        self._rank = rank
        self._progress = progress
        self.parts = [slice(start, stop) for start, stop in pairwise(edges)]
        self.own = self.parts[rank]

    def gather(self, part: Tensor) -> Tensor:
        """See `StateDivision`."""
        return self._gather(part, self._lengths)

    def square_sums(self, part: Tensor) -> Tensor:
        """See `StateDivision`. Each rank adds up the blocks that start in its part. The last of them may go on in the
        parts of the ranks behind, so each rank sends the beginning of its part to all."""
        heads = [min(BLOCK, length) for length in self._lengths]
        gathered = self._gather(part[:BLOCK], heads).split(heads)
        tail = torch.cat([part[:0], *gathered[self._rank + 1 :]])[: -self.own.stop % BLOCK]
        own = torch.cat([part, tail])[self._starts[self._rank] * BLOCK - self.own.start :]
        counts = [stop - start for start, stop in pairwise(self._starts)]
        return self._gather(square_sums(own) if len(own) else own.double(), counts)

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
    """The division of a LoRA with these blocks; None: every rank keeps all of them."""
    world = dist.get_world_size()
    if world == 1 or not bounds or not divides_lora(bounds[-1][1]):
        return None
    return StateRanks(bounds, dist.get_rank(), world, progress)
