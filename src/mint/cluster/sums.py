"""The part of a training pass that ranks do together: they divide its micro-batches, and add up their gradients.

The sum keeps the order of one process. Each rank has summed the largest nodes of the tree within its range
(`engine/reductions/gradient_sum.py`). Every rank gets one slice of all nodes (all-to-all) and joins them in the order
of the tree. Then the joined slices are gathered. A rank sends about twice the gradient, as a ring all-reduce would. An
ordinary all-reduce adds in an order that depends on the number of ranks, and so gives other bits.

Runs on `torch.distributed`; knows neither Ray nor engines.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.nn.functional import pad

from mint.cluster.collectives.layer_edges import CountedLayers
from mint.cluster.collectives.progress import Progress
from mint.cluster.ranges import divide
from mint.engine.reductions.division import ALONE, Division, PassOutcome
from mint.engine.reductions.gradient_sum import nodes_within, whole_sum


class Ranks:
    """`Peers` over the default process group, which is a gloo group; tensors are in the memory of the CPU."""

    def __init__(self, progress: Progress | None = None) -> None:
        """`progress` counts what this rank does."""
        self._progress = Progress() if progress is None else progress

    def divide(self, costs: Sequence[int]) -> Division:
        """Divides micro-batches of these costs in contiguous ranges."""
        if dist.get_world_size() == 1:
            return ALONE.divide(costs)
        return _DividedPass(divide(costs, dist.get_world_size()), dist.get_rank(), self._progress)

    def worst(self, own: PassOutcome) -> PassOutcome:
        """The worst outcome of all ranks."""
        worst = torch.tensor(int(own))
        with self._progress.waiting():
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return PassOutcome(int(worst))

    @contextmanager
    def micro_batch(self) -> Generator[None]:
        """Counts a micro-batch."""
        yield
        self._progress.advance()

    def layer_source(self) -> CountedLayers:
        """Counts layers."""
        return CountedLayers(self._progress)


@dataclass(frozen=True)
class _DividedPass:
    ranges: Sequence[range]
    rank: int
    progress: Progress
    is_shared: bool = True

    @property
    def own(self) -> range:
        return self.ranges[self.rank]

    def total(self, sums: Mapping[range, Tensor], size: int) -> Tensor:
        world, count = len(self.ranges), self.ranges[-1].stop
        nodes = [nodes_within(range(count), own) for own in self.ranges]
        length = -(-size // world)  # of a slice; the last ones may be shorter, and are padded
        mine = [pad(sums[node], (0, length * world - size)).split(length) for node in nodes[self.rank]]
        sent = torch.cat([own[to] for to in range(world) for own in mine] or [torch.empty(0)])
        received = torch.empty(length * sum(map(len, nodes)))
        with self.progress.waiting():
            dist.all_to_all_single(
                received,
                sent,
                [length * len(of_rank) for of_rank in nodes],
                [length * len(mine)] * world,
            )
        slices = dict(zip((node for of_rank in nodes for node in of_rank), received.split(length), strict=True))
        whole = torch.empty(length * world)
        joined = whole_sum(count, slices).contiguous()
        with self.progress.waiting():
            dist.all_gather_into_tensor(whole, joined)
        return whole[:size]

    def join(self, values: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        counts = [sum(lengths[own.start : own.stop]) for own in self.ranges]
        longest = max(counts)
        own = pad(torch.from_numpy(values), (0, longest - len(values)))
        gathered = torch.empty(longest * len(counts), dtype=torch.float64)
        with self.progress.waiting():
            dist.all_gather_into_tensor(gathered, own)
        parts = gathered.split(longest) if longest else [gathered] * len(counts)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).numpy()
