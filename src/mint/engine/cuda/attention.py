"""Causal attention of packed rows on a GPU: what `packed_attention` computes, by torch's FlexAttention.

A row sees two runs of rows: its own span up to itself, and the span's prefix. The mask is a function of these four
numbers, so it serves any layout, and FlexAttention compiles one kernel each for forward and backward from it. Nothing
is gathered, no matrix of scores exists, the gradient of a shared prefix is summed in float32 and in one order, and the
same code runs on a CPU (slowly) for comparison. The alternatives cost more: flash attention for ragged sequences has no
shared prefixes, so keys would be copied for each sample and their gradients added up again, and it runs neither in
float32 nor on a CPU; `scaled_dot_product_attention` needs the mask as a matrix.

The price is a compilation of some seconds for each padded number of rows (powers of two, so few), which torch caches on
disk. A row's last bits depend on its place among the tiles: unlike on a CPU, other rows in the batch may change them.
The same batch gives the same bits.

Letters: T rows · P rows with padding · N tiles of rows · K kv heads · G query heads per kv head · H = K·G + 2·K heads ·
D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mint.engine.model.config import NO_WINDOWS, Windows
from mint.engine.packing import AttentionBlock
from mint.engine.transfers import upload

TILE = 128
"""Rows of queries and of keys in a tile. Work is skipped tile by tile."""

MIN_HEAD_DIM = 16
"""FlexAttention's kernels have no narrower heads."""

MAX_COMPILED = 1024
"""Kernels that torch may compile in one process: padded sizes times base models, with and without a backward. Its own
limits would refuse the ninth of a thread, and the 257th."""


class FlexPackedAttention:
    """Causal attention of packed rows; callable as the decoder's `Attention`."""

    def __init__(
        self,
        blocks: Sequence[AttentionBlock],
        query_heads: int,
        kv_heads: int,
        device: torch.device,
        windows: Windows = NO_WINDOWS,
    ) -> None:
        """The rows that have results are consecutive."""
        self._heads = [query_heads, kv_heads, kv_heads]
        self._device = device
        self._windows = windows
        self._masks: dict[int, BlockMask] = {}
        rows = np.concatenate([block.rows for block in blocks])
        self._results = slice(int(rows.min()), int(rows.max()) + 1)
        if self._results.stop - self._results.start != len(rows):
            raise AssertionError("the rows that attend do not follow one another")
        self._padded = padded_rows(self._results.stop)
        self._seen = list_seen(blocks, self._padded)
        self.attend = compiled_attention() if device.type == "cuda" else flex_attention

    def _new_mask(self, window: int) -> BlockMask:
        """Moves what rows see to the device, in one copy."""
        seen = within_window(self._seen, window) if window else self._seen
        tiles = find_tiles(seen)
        arrays = (seen.own, seen.first, seen.stop, *_order(tiles.partial), *_order(tiles.full))
        own, first, stop, *ordered = (found.int() for found in upload(self._device, *arrays))

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ((key >= own[query]) & (key <= query)) | ((key >= first[query]) & (key < stop[query]))

        return BlockMask.from_kv_blocks(
            *(found[None, None] for found in ordered),
            BLOCK_SIZE=TILE,
            mask_mod=sees,
            seq_lengths=(self._padded, self._padded),
        )

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attended values [T, K·G·D] of `heads` [T, H, D].

        Raises:
            ValueError: there are sinks, which `engine/devices.py` gives to `PackedAttention`.
        """
        if sinks is not None:
            raise ValueError("FlexAttention is not for heads with sinks")
        window = self._windows.get(layer, 0)
        if window not in self._masks:
            self._masks[window] = self._new_mask(window)
        missing = self._padded - len(heads)
        padded = F.pad(heads, (0, 0, 0, 0, 0, missing)) if missing else heads
        query, key, value = (own.transpose(0, 1).unsqueeze(0) for own in padded.split(self._heads, dim=1))
        # A masked value is multiplied by 0, which would keep another sequence's NaN. A row that does see the value gets
        # its NaN from the key, which comes from the same hidden state.
        value = torch.nan_to_num(value, 0.0, 0.0, 0.0)
        out = cast(Tensor, self.attend(query, key, value, block_mask=self._masks[window], enable_gqa=True))
        return out.squeeze(0).transpose(0, 1)[self._results].flatten(1)


@dataclass(frozen=True)
class Seen:
    """Row q attends to `own[q]`..q and `first[q]`..`stop[q]` - 1; int64 [P]. Padding attends to nothing."""

    own: np.ndarray
    first: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True)
class Tiles:
    """Tiles of keys that the rows of a tile see in part, and those that all of the rows see completely; bool [N, N]."""

    partial: np.ndarray
    full: np.ndarray


def padded_rows(rows: int) -> int:
    """The next power of two, and at least a tile."""
    return max(TILE, 1 << (rows - 1).bit_length())


def list_seen(blocks: Sequence[AttentionBlock], padded: int) -> Seen:
    """What each row sees; rows that are only read, and padding, see nothing."""
    own, first, stop = (np.full(padded, filling) for filling in (padded, 0, 0))
    for block in blocks:
        spans = block.cells // block.queries.shape[1]
        own[block.rows] = block.queries[spans, 0]
        if block.offset:
            first[block.rows] = block.keys[spans, 0]
            stop[block.rows] = block.keys[spans, 0] + block.offset
    return Seen(own, first, stop)


def within_window(seen: Seen, window: int) -> Seen:
    """The last `window` rows of what each row sees."""
    rows = np.arange(len(seen.own))
    first = rows - seen.own + seen.stop - window + 1
    first = np.clip(first, seen.first, np.maximum(seen.first, seen.stop))
    return Seen(np.maximum(seen.own, rows - window + 1), first, seen.stop)


def find_tiles(seen: Seen) -> Tiles:
    """The tiles that rows see, counted from the ends of the runs that each row sees."""
    count = len(seen.own) // TILE
    rows = np.arange(len(seen.own))
    touched, covered = np.zeros((2, count * (count + 1)), np.int64)
    for start, stop in ((seen.own, rows + 1), (seen.first, seen.stop)):
        whole = (-(-start // TILE), stop // TILE)
        for total, first, last, there in (
            (touched, start // TILE, -(-stop // TILE), start < stop),
            (covered, *whole, (start < stop) & (whole[0] < whole[1])),
        ):
            line = rows[there] // TILE * (count + 1)
            total += np.bincount(line + first[there], minlength=len(total))
            total -= np.bincount(line + last[there], minlength=len(total))
    touched, covered = (total.reshape(count, -1).cumsum(axis=1)[:, :count] for total in (touched, covered))
    full = covered == TILE
    return Tiles((touched > 0) & ~full, full)


def _order(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each line the number of its tiles [N], and their numbers, which come first in [N, N]."""
    return tiles.sum(axis=1), np.argsort(~tiles, axis=1, kind="stable")


def compiled_attention() -> Callable[..., object]:
    """FlexAttention compiled for each size, in any thread. A hit limit is an error, because uncompiled it would write
    all scores to memory."""

    def attend(*args: Any, **named: Any) -> object:
        # At each call: a forward that is computed again in a backward runs in autograd's own thread.
        _raise_limits()
        return _compiled()(*args, **named)

    return attend


def _raise_limits() -> None:
    """Torch's settings belong to a context: each thread has its own, and begins with torch's values."""
    import torch._dynamo.config  # deferred: torch's compiler takes seconds to import

    config: Any = torch._dynamo.config  # its types say that settings keep their first values
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        if getattr(config, limit) < MAX_COMPILED:
            setattr(config, limit, MAX_COMPILED)


@cache
def _compiled() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
