"""Where keys and values lie: cells of `CHUNK` positions, shared by reference and given out from one piece of memory.

Knows nothing of tokens, jobs or attention.

Letters: L layers · N cells · K kv heads · D head dimension · J kv heads side by side · X tokens.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import torch
from torch import Tensor

from mint.engine.model.attention import CHUNK, MIN_QUERIES
from mint.engine.model.config import DecoderConfig

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, in `mmap` from Python 3.13 on: a process that forks is not asked for all of this memory again."""

NARROWEST = 16
"""Head dimension from which products may have several heads side by side without other bits (measured: 8 has them)."""


class KVCache:
    """The cells of one base model, with a count of holders for each; all of them are taken through a `Lease`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, limit_bytes: int) -> None:
        """Room for `limit_bytes`; on a CPU, memory is used only as cells are filled for the first time."""
        self.query_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.side_by_side = _side_by_side(config)
        self.dtype, self.device = dtype, device
        self._width = self.side_by_side * config.head_dim
        shape = (config.num_hidden_layers, 2, self.kv_heads // self.side_by_side, CHUNK, self._width)
        self.cell_bytes = int(np.prod(shape)) * dtype.itemsize
        layers, both, parts, chunk, width = shape
        count = max(1, limit_bytes // self.cell_bytes)
        self._cells = _zeros((layers, both, count, parts, chunk, width), dtype, device)
        self._parts, self._count = parts, count
        self._holders = np.zeros(count, np.int32)
        self._touched = 0  # cells from here on were never taken

    @property
    def count(self) -> int:
        """N."""
        return self._count

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """Positions of a cell, query heads, K and J."""
        return CHUNK, self.query_heads, self.kv_heads, self.side_by_side

    @property
    def free(self) -> int:
        """Cells that nobody holds."""
        return self._count - int(np.count_nonzero(self._holders[: self._touched]))

    def take(self, count: int) -> np.ndarray | None:
        """`count` cells that nobody held, neighbours if possible; None where there are not so many."""
        free = np.flatnonzero(self._holders[: self._touched + count] == 0)
        if len(free) < count:
            return None
        runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1) if count else free[:0]
        start = int(runs[0]) if len(runs) else 0
        cells = free[start : start + count]
        self._holders[cells] = 1
        if count:
            self._touched = max(self._touched, int(cells[-1]) + 1)
        return cells

    def hold(self, cells: np.ndarray) -> None:
        """One holder more for each of `cells`, in which a cell may occur several times."""
        np.add.at(self._holders, cells, 1)

    def release(self, cells: np.ndarray) -> None:
        """One holder less for each of `cells`."""
        np.subtract.at(self._holders, cells, 1)

    def holders(self, cells: np.ndarray) -> np.ndarray:
        """How many hold each of `cells`."""
        return self._holders[cells]

    def clear(self, cells: np.ndarray) -> None:
        """Zeros: a masked key is multiplied by 0, so what the next holder finds must not be NaN."""
        self._cells[:, :, torch.from_numpy(np.unique(cells)).to(self.device)] = 0

    def copy(self, source: int, targets: np.ndarray, length: int) -> None:
        """The first `length` positions of a cell, into others."""
        if length and len(targets):
            places = torch.from_numpy(targets).to(self.device)
            self._cells[:, :, places, :, :length] = self._cells[:, :, source : source + 1, :, :length]

    def places(self, cells: np.ndarray, positions: np.ndarray) -> Tensor:
        """Where tokens at `positions` of their sequences lie, in cells [X]; for `write` and `read`."""
        return torch.from_numpy(self.list_places(cells, positions)).to(self.device)

    def list_places(self, cells: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """`places` that are still to be moved to the device."""
        planes = np.arange(2)[None, :, None] * self._count + cells[:, None, None]
        parts = planes * self._parts + np.arange(self._parts)
        return (parts * CHUNK + positions[:, None, None] % CHUNK).reshape(-1)

    def write(self, layer: int, heads: Tensor, places: Tensor) -> None:
        """Stores the key and value heads of `heads` [X, all heads, D]."""
        rows = heads[:, self.query_heads :].reshape(-1, self._width)
        self._cells[layer].view(-1, self._width).index_copy_(0, places, rows)

    def read(self, layer: int, places: Tensor) -> Tensor:
        """Key and value heads [X, 2·K, D]."""
        rows = self._cells[layer].view(-1, self._width).index_select(0, places)
        return rows.view(-1, 2 * self.kv_heads, self._width // self.side_by_side)

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [N, K/J, CHUNK, J·D]."""
        keys, values = self._cells[layer]
        return keys, values


class Lease:
    """What one holder has taken of the cells; goes back when the holder is gone, however it ended."""

    def __init__(self, cache: KVCache) -> None:
        """Nothing."""
        self._cache = cache
        self._held = np.zeros(cache.count, np.int32)

    def take(self, count: int) -> np.ndarray | None:
        """As `KVCache.take`."""
        cells = self._cache.take(count)
        if cells is not None:
            self._held[cells] += 1
        return cells

    def hold(self, cells: np.ndarray) -> None:
        """As `KVCache.hold`."""
        self._cache.hold(cells)
        np.add.at(self._held, cells, 1)

    def release(self, cells: np.ndarray, *, sound: bool = True) -> None:
        """As `KVCache.release`; with `sound` False, what is in them may be NaN."""
        self._cache.release(cells)
        np.subtract.at(self._held, cells, 1)
        if not sound:
            self._cache.clear(cells[self._cache.holders(cells) == 0])

    def __del__(self) -> None:
        left = np.flatnonzero(self._held)
        if len(left):
            self.release(np.repeat(left, self._held[left]), sound=False)


def _side_by_side(config: DecoderConfig) -> int:
    """So many kv heads that the query heads of one token make a product of `MIN_QUERIES` rows, where that works out.

    A query's product with the keys of another head is with zeros, which changes no bit of the sum.
    """
    groups = config.num_attention_heads // config.num_key_value_heads
    heads = 1
    while (
        heads * groups < MIN_QUERIES and config.head_dim >= NARROWEST and config.num_key_value_heads % (2 * heads) == 0
    ):
        heads *= 2
    return heads


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # given by the operating system page by page as they are written; torch would write them all, and numpy asks for
    # pages of 2 MiB, one for every layer at once, which take milliseconds each where memory is fragmented
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
