"""Ranks that divide the layers of a base: each keeps some chunks of every layer, and all run the same micro-batches.

The results of the chunks are added up over the ranks as gradients are: every rank gets one slice of all parts
(all-to-all), adds them in the tree of `chunk_sums`, and the summed slices are gathered.

A rank that fails comes no more to the exchanges of its pass, in which the others wait. So ranks vote before each
exchange, and at the end of a pass: one that has ended its part votes again and again until all others have. Those in an
exchange learn by the vote that another has failed, and end theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.nn.functional import pad

from mint.cluster.collectives.progress import Progress
from mint.engine.reductions.chunk_sums import tree_sum
from mint.engine.reductions.division import PassOutcome, PeerFailedError


class PeerMemoryError(MemoryError):
    """Memory has run out at another rank of the group, which computes a part of the same rows."""


class ChunkGroup:
    """The ranks that divide every layer, and the exchanges of the pass that they run."""

    def __init__(self, group: Any, progress: Progress, *, is_exact: bool = True) -> None:
        """`group` is a process group; None: the default one. `progress` counts exchanges. Without `is_exact`, sums are
        those of an ordinary all-reduce, whose bits depend on the number of ranks."""
        self._is_exact = is_exact
        self._group = group
        self._progress = progress
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def worst(self, own: PassOutcome) -> PassOutcome:
        """The worst outcome of a pass on these ranks, once all have ended their part."""
        while True:
            worst, all_ended = self._vote(own, has_ended=True)
            if all_ended:
                return worst

    def exchange(self, call: Callable[[], None]) -> None:
        """`call`, in which all ranks take part.

        Raises:
            PeerMemoryError: memory has run out at another rank, which does not take part.
            PeerFailedError: another rank has failed.
        """
        worst, _ = self._vote(PassOutcome.DONE, has_ended=False)
        if worst is PassOutcome.OUT_OF_MEMORY:
            raise PeerMemoryError("memory has run out at another rank")
        if worst is PassOutcome.FAILED:
            raise PeerFailedError("another process of the group could not run its part of the pass")
        with self._progress.waiting():
            call()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of one tensor of each rank."""
        if not self._is_exact:
            total = part.contiguous().clone()
            self.exchange(lambda: dist.all_reduce(total, group=self._group))
            return total
        size, world = part.numel(), self.world
        length = -(-size // world)  # of a slice; the last ones may be shorter, and are padded
        sent = pad(part.reshape(-1), (0, length * world - size))
        received, whole = torch.empty_like(sent), torch.empty_like(sent)

        def add() -> None:
            dist.all_to_all_single(received, sent, group=self._group)
            own = tree_sum(received.view(world, length).unbind()).contiguous()
            dist.all_gather_into_tensor(whole, own, group=self._group)

        self.exchange(add)
        return whole[:size].view(part.shape)

    def gather(self, part: Tensor) -> Tensor:
        """The vectors of all ranks, one behind the other."""
        whole = torch.empty(self.world * len(part))
        self.exchange(lambda: dist.all_gather_into_tensor(whole, part.contiguous(), group=self._group))
        return whole

    def _vote(self, own: PassOutcome, *, has_ended: bool) -> tuple[PassOutcome, bool]:
        """The worst outcome so far, and whether all have ended their part of the pass."""
        vote = torch.tensor([int(own), int(not has_ended)])
        with self._progress.waiting():
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
        worst, any_goes_on = vote.tolist()
        return PassOutcome(worst), not any_goes_on


class RankChunks:
    """`Chunks` of one base: each rank of a group has as many, which are neighbours."""

    def __init__(self, group: ChunkGroup, count: int) -> None:
        self._group = group
        self._each = count // group.world
        self.count = count

    @property
    def own(self) -> range:
        first = self._group.rank * self._each
        return range(first, first + self._each)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return self._group.sum(tree_sum(parts))

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(self._group.gather(torch.cat(list(parts))).split(len(parts[0])))
