"""The part of a training pass that ranks do together: they divide its micro-batches, and add up their gradients.

The sum keeps the order of one process. Each rank has summed the largest nodes of the tree within its range
(`engine/reductions/gradient_sum.py`). Every rank gets one slice of all nodes (all-to-all) and joins them in the order
of the tree. Then the joined slices are gathered, unless each rank keeps its own part of a large LoRA alone. A rank
sends about twice the gradient, as a ring all-reduce would, or once. An
ordinary all-reduce adds in an order that depends on the number of ranks, and so gives other bits: a setting.

Runs on `torch.distributed`; knows neither Ray nor engines.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.cluster.collectives.chunk_ranks import ChunkGroup, RankChunks
from mint.cluster.collectives.expert_ranks import ExpertRanks
from mint.cluster.collectives.layer_edges import CountedLayers
from mint.cluster.collectives.parallelism import Parallelism
from mint.cluster.collectives.progress import Progress
from mint.cluster.collectives.sharding import ShardedLayers
from mint.cluster.collectives.state_ranks import divide_state
from mint.cluster.ranges import divide
from mint.engine.lora import LoraWeights
from mint.engine.model.weights import LayerSource
from mint.engine.reductions.chunk_sums import Chunks, LocalChunks
from mint.engine.reductions.division import ALONE, Division, PassOutcome
from mint.engine.reductions.gradient_sum import nodes_within, whole_sum
from mint.engine.reductions.state_division import Bounds, StateDivision
from mint.errors import InvalidRequestError


class Ranks:
    """`Peers` over the default process group, which is a gloo group; tensors are in the memory of the CPU."""

    def __init__(self, parallelism: Parallelism, progress: Progress | None = None) -> None:
        """`parallelism` says how the ranks divide the work: with `tensor_parallel`, that many neighbours divide the
        chunks of layers, and run the same micro-batches. `progress` counts what this rank does."""
        self._parallelism = parallelism
        self._progress = Progress() if progress is None else progress
        self._copies = _Copies.alone()
        self._chunk_group: ChunkGroup | None = None
        if parallelism.tensor_parallel is not None and parallelism.tensor_parallel > 1:
            self._copies, neighbours = _new_groups(parallelism.tensor_parallel)
            self._chunk_group = ChunkGroup(neighbours, self._progress, is_exact=parallelism.is_exact)
        self._rounds = 0  # of this pass that are left
        self._gathered: ShardedLayers | None = None
        self._experts: ExpertRanks | None = None
        self._with_gradient = False

    def divide(self, costs: Sequence[int]) -> Division:
        """Divides micro-batches of these costs in contiguous ranges."""
        copies = self._copies
        if copies.count == 1:
            return ALONE.divide(costs)
        kind = _DividedPass if self._parallelism.is_exact else _OrdinaryPass
        return kind(divide(costs, copies.count), copies.own, self._progress, copies.group)

    def worst(self, own: PassOutcome) -> PassOutcome:
        """The worst outcome of all ranks."""
        while self._rounds > 0:  # others compute more micro-batches, or this rank has failed
            with self.micro_batch():
                pass
        if self._chunk_group is not None:
            own = self._chunk_group.worst(own)
        if self._experts is not None:
            own = self._experts.worst(own)
        worst = torch.tensor(int(own))
        with self._progress.waiting():
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return PassOutcome(int(worst))

    def begin(self, most: int, source: LayerSource | None, lora: LoraWeights, *, with_gradient: bool) -> None:
        """See `Peers`."""
        self._experts = source if isinstance(source, ExpertRanks) else None
        if self._experts is not None:
            self._experts.begin(lora)
        self._gathered = source if isinstance(source, ShardedLayers) else None
        self._rounds = 0 if self._gathered is None else most
        self._with_gradient = with_gradient

    @contextmanager
    def micro_batch(self) -> Generator[None]:
        """Counts a micro-batch; with layers that are divided, the ranks gather them within it."""
        self._rounds -= 1
        layers = self._gathered
        with nullcontext() if layers is None else layers.round(with_gradient=self._with_gradient):
            yield
        self._progress.advance()

    def layer_source(self) -> LayerSource:
        """Divides the layers of a base or their experts, or counts them only."""
        world = dist.get_world_size()
        if self._parallelism.experts and world > 1:
            return ExpertRanks(self._progress)
        if not self._parallelism.shards or world == 1:
            return CountedLayers(self._progress)
        return ShardedLayers(world, self._progress)

    def chunks(self, count: int) -> Chunks:
        """Divides chunks among the neighbours.

        Raises:
            InvalidRequestError: there are fewer chunks than ranks that divide them.
        """
        if self._chunk_group is None:
            return LocalChunks(count)
        if self._chunk_group.world > count:
            raise InvalidRequestError(
                f"cannot divide this base model, whose layers are cut into {count} chunks",
                field="tensor_parallel",
                value=self._chunk_group.world,
                remedy=f"Give {count} or less, or let the ranks divide the base with --shard-base",
            )
        return RankChunks(self._chunk_group, count)

    def divide_state(self, bounds: Bounds) -> StateDivision | None:
        """See `Peers`."""
        return divide_state(bounds, self._progress)


@dataclass(frozen=True)
class _Copies:
    """The copies of the base among the ranks, which divide the micro-batches of a pass: this rank is of the copy `own`.
    In `group` is one rank of each; None: all ranks."""

    own: int
    count: int
    group: Any = None

    @classmethod
    def alone(cls) -> _Copies:
        """Each rank has a copy, or what stands for one."""
        return cls(dist.get_rank(), dist.get_world_size())


def _new_groups(size: int) -> tuple[_Copies, Any]:
    """The copies if `size` neighbours have one together, and the group of the neighbours of this rank. All ranks call
    it, because all take part in making each group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % size:
        raise InvalidRequestError(
            f"does not divide the {world} ranks", field="tensor_parallel", value=size, remedy="Give a divisor of them"
        )
    if size == world:
        return _Copies(0, 1), None
    neighbours = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    peers = [dist.new_group(list(range(place, world, size))) for place in range(size)]
    return _Copies(rank // size, world // size, peers[rank % size]), neighbours[rank // size]


@dataclass(frozen=True)
class _DividedPass:
    ranges: Sequence[range]
    rank: int
    progress: Progress
    group: Any = None
    is_shared: bool = True

    @property
    def most(self) -> int:
        return max(map(len, self.ranges))

    @property
    def own(self) -> range:
        return self.ranges[self.rank]

    def total(self, sums: Mapping[range, Tensor], size: int, state: StateDivision | None) -> Tensor:
        world, count = len(self.ranges), self.ranges[-1].stop
        nodes = [nodes_within(range(count), own) for own in self.ranges]
        longest = -(-size // world)
        if state is None:
            parts = [slice(min(size, longest * to), min(size, longest * (to + 1))) for to in range(world)]
        else:
            members = range(world) if self.group is None else dist.get_process_group_ranks(self.group)
            parts = [state.parts[member] for member in members]
        lengths = [part.stop - part.start for part in parts]
        mine = [sums[node] for node in nodes[self.rank]]
        received = torch.empty(sum(map(len, nodes)), lengths[self.rank])
        with self.progress.waiting():
            dist.all_to_all_single(
                received.view(-1),
                torch.cat([own[part] for part in parts for own in mine] or [torch.empty(0)]),
                [lengths[self.rank] * len(of_rank) for of_rank in nodes],
                [length * len(mine) for length in lengths],
                group=self.group,
            )
        slices = dict(zip((node for of_rank in nodes for node in of_rank), received, strict=True))
        joined = whole_sum(count, slices)
        if state is not None:
            return joined
        whole = torch.empty(longest * world)
        joined = pad(joined, (0, longest - len(joined))).contiguous()
        with self.progress.waiting():
            dist.all_gather_into_tensor(whole, joined, group=self.group)
        return whole[:size]

    def join(self, values: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        counts = [sum(lengths[own.start : own.stop]) for own in self.ranges]
        longest = max(counts)
        own = pad(torch.from_numpy(values), (0, longest - len(values)))
        gathered = torch.empty(longest * len(counts), dtype=torch.float64)
        with self.progress.waiting():
            dist.all_gather_into_tensor(gathered, own, group=self.group)
        parts = gathered.split(longest) if longest else [gathered] * len(counts)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).numpy()


class _OrdinaryPass(_DividedPass):
    """Adds up in the order of the library, which depends on the number of ranks."""

    @override
    def total(self, sums: Mapping[range, Tensor], size: int, state: StateDivision | None) -> Tensor:
        own = torch.zeros(size)
        for node in sums.values():
            own += node
        with self.progress.waiting():
            dist.all_reduce(own, group=self.group)
        return own if state is None else own[state.own]
