"""The frozen base divided among the ranks: each holds one part of the matrices of every layer.

All ranks gather a layer's matrices before it runs, and begin to gather the next layer's meanwhile. They drop them when
the next layer runs. So a rank has the matrices of two layers at most, beside its own part. FSDP2 has the parts, and
gathers them.

A gather needs all ranks, so all make the same ones in the same order, whatever each computes. For each micro-batch, a
round, these are all layers, and for a backward all again from behind. A rank without a micro-batch in a round makes the
gathers alone, and so does one that has failed.

Embedding, unembedding, norms and loras are whole on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mint.cluster.collectives.layer_edges import edge
from mint.cluster.collectives.progress import Progress
from mint.engine.model.linear import MovableMatrix
from mint.engine.model.weights import LayerRun, LayerWeights, layer_matrices
from mint.errors import InvalidRequestError

ALIGNED_BYTES = 64
"""The memory of each matrix begins at a multiple of this, as kernels read it."""


class ShardedLayers:
    """`LayerSource` whose matrices are divided among the ranks of the default process group."""

    def __init__(self, world: int, progress: Progress) -> None:
        """`world` ranks; `progress` counts layers and gathers."""
        # deferred, as FSDP in `_ShardedLayer`; ty thinks of builds of torch without it
        from torch.distributed.device_mesh import init_device_mesh  # ty: ignore[possibly-missing-import]

        self._mesh = init_device_mesh("cpu", (world,))
        self._progress = progress
        self._layers: list[_ShardedLayer] = []
        self._order: deque[int] = deque()  # the gathers that are left in this round
        self._present: int | None = None

    @property
    def own_bytes(self) -> int:
        """The memory of this rank's part."""
        return sum(layer.own_bytes for layer in self._layers)

    def keep(self, layer: LayerWeights) -> None:
        """Divides the matrices of the next layer, which are whole and the same on every rank.

        Raises:
            InvalidRequestError: one has a layout that cannot be moved.
        """
        matrices = []
        for matrix in layer_matrices(layer):
            if not isinstance(matrix, MovableMatrix):
                raise InvalidRequestError(
                    f"cannot divide a base whose matrices are a {type(matrix).__name__}",
                    field="shard_base",
                    value=True,
                    remedy="Leave it out; or do not set MINT_QUANTIZE, and install a C compiler for the kernels",
                )
            matrices.append(matrix)
        self._layers.append(_ShardedLayer(matrices, self._mesh))

    def around(self, index: int, run: LayerRun) -> LayerRun:
        """See `LayerSource`. Only within a round."""

        def gathered(x: Tensor) -> Tensor:
            entered = edge(x, lambda: self._take(index), self._progress.advance)
            return edge(run(entered), self._progress.advance, lambda: self._take(index))

        return gathered

    def experts_of(self, index: int) -> None:
        """All are here, when the layer is."""

    @contextmanager
    def round(self, *, with_gradient: bool) -> Generator[None]:
        """Around one micro-batch. All ranks make as many rounds; on return all have made the same gathers."""
        count = len(self._layers)
        self._order = deque([*range(count), *(reversed(range(count - 1)) if with_gradient else ())])
        self._begin_next()
        try:
            yield
        finally:
            self._take(None)

    def _take(self, index: int | None) -> None:
        """Drops the layer that is there, and makes the next gathers, up to that of layer `index`; None: all."""
        if index is not None and self._present == index:
            return
        while True:
            if self._present is not None:
                self._layers[self._present].drop()
                self._present = None
            if not self._order:
                break
            self._present = self._order.popleft()
            with self._progress.waiting():
                self._layers[self._present].arrive()
            self._begin_next()
            if self._present == index:
                return
        if index is not None:
            raise AssertionError(f"layer {index} is not in the order of this round")

    def _begin_next(self) -> None:
        if self._order:
            self._layers[self._order[0]].begin_gather()


class _ShardedLayer:
    """The matrices of one layer in one vector, of which each rank holds a part."""

    def __init__(self, matrices: Sequence[MovableMatrix], mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard  # deferred: it takes seconds to import

        self._places: list[tuple[MovableMatrix, int, torch.Size, torch.dtype]] = []
        size = 0
        for matrix in matrices:
            memory = matrix.memory
            self._places.append((matrix, size, memory.shape, memory.dtype))
            size += -(-memory.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        whole = torch.zeros(size, dtype=torch.uint8)
        for matrix, start, _, _ in self._places:
            own = matrix.memory.contiguous().view(-1).view(torch.uint8)
            whole[start : start + len(own)] = own
        # A type that FSDP divides; nothing computes with these numbers.
        self._holder: Any = nn.Module()
        self._holder.register_parameter("whole", nn.Parameter(whole.view(torch.float32), requires_grad=False))
        fully_shard(self._holder, mesh=mesh)
        self._gather: Any = None
        self._take_away()

    @property
    def own_bytes(self) -> int:
        return sum(parameter.to_local().nbytes for parameter in self._holder.parameters())

    def begin_gather(self) -> None:
        self._gather = self._holder.unshard(async_op=True)

    def arrive(self) -> None:
        """Waits for the gather, and gives the matrices their memory."""
        self._gather.wait()
        whole = self._holder.whole.detach().view(torch.uint8)
        for matrix, start, shape, dtype in self._places:
            stop = start + shape.numel() * dtype.itemsize
            matrix.move(whole[start:stop].view(dtype).view(shape))

    def drop(self) -> None:
        self._take_away()
        self._holder.reshard()

    def _take_away(self) -> None:
        for matrix, _, _, dtype in self._places:
            matrix.move(torch.empty(0, dtype=dtype))
