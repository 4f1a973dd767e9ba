"""The kernels in C that move rows: from tables into a batch, into cells, side by side, and from bfloat16 to float32.

Knows nothing of what the rows mean. Letters: T rows · E width · H heads · D head dimension · C cells of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.sampling.kv_cache import KvCells


class NativeMoves:
    """The compiled functions."""

    def __init__(self, kernels: NativeKernels) -> None:
        """Beside `kernels`, whose threads they share."""
        self._threads, self._library = kernels.threads, kernels.load("moves")

    def take(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows of `table` [any, E] in float32 [T, E], by their numbers int64 [T], contiguous; E is a multiple
        of 16.

        Raises:
            IndexError: there is no such row.
        """
        (height, width), half = table.shape, table.dtype == torch.bfloat16
        out = torch.empty(len(rows), width)
        self._threads.run(
            self._library.take_rows, len(rows), *(table, rows, height, width, half, out), work=out.numel()
        )
        return out

    def widen(self, x: Tensor) -> Tensor:
        """x [T, E] in float32; E is a multiple of 16."""
        if x.dtype == torch.float32:
            return x
        out = torch.empty(x.shape)
        self._threads.run(self._library.widen_rows, len(x), x, x.shape[1], out, work=x.numel())
        return out

    def join(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """`out` [T, E], filled with `parts` [·, E] one below the other, all float32."""
        start = 0
        for part in parts:
            own = out[start : start + len(part)]
            self._threads.run(self._library.copy_rows, len(part), part, 4 * part.shape[1], own, work=part.numel())
            start += len(part)
        return out

    def store(self, cells: KvCells, layer: int, heads: Tensor, table: np.ndarray, positions: np.ndarray) -> None:
        """Stores the key and value heads of heads [T, H, D] at `positions` int64 [T] of the rows' cells, int64 [T, C];
        both contiguous."""
        width = heads.shape[2] * heads.element_size()
        self._threads.run(
            self._library.write_cells, len(heads), *map(torch.from_numpy, (table, positions)), table.shape[1],
            *cells.layout, width, heads, *cells.planes(layer), work=heads.numel(),
        )  # fmt: skip
