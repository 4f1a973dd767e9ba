"""Keys and values of the sequences being sampled, and the attention of one new token per sequence.

Rows are sequences. Memory grows in blocks; a row attends to its own length rounded up to a block and masked inside, so
its bits do not depend on how long the others are. Knows nothing of tokens, loras or jobs.

Letters: R rows · L layers · H kv heads · G query heads per kv head · C capacity · D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.attention import BLOCK, attend
from mint.engine.decoder_config import DecoderConfig

GROWTH = 256
"""The capacity grows in steps of this, or by half: growing copies the cache."""


@dataclass(frozen=True)
class _Run:
    """Rows `start:stop` attend to the first `keys` keys; `mask` [rows, 1, 1, keys] hides those not written yet."""

    start: int
    stop: int
    keys: int
    mask: Tensor


class KvCache:
    """Grows with `add`, shrinks and reorders with `keep`; `begin_step` before each decoding forward."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Empty."""
        self._query_heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        # Zeros, not empty: a masked key is multiplied by 0, and what lay in memory could be NaN.
        shape = (config.num_hidden_layers, 2, 0, config.num_key_value_heads, 0, config.head_dim)
        self._cells = torch.zeros(shape, dtype=dtype, device=device)  # [L, key or value, R, H, C, D]
        self.lengths = np.zeros(0, np.int64)
        self._longest = 0
        self._runs: list[_Run] = []
        self._rows = self._positions = torch.zeros(0, dtype=torch.int64, device=device)

    def add(self, lengths: np.ndarray, longest: int) -> None:
        """New rows at the end for prompts of these lengths, which `write` fills; none will grow beyond `longest`."""
        self._longest = max(self._longest, longest)
        self._reserve(int(lengths.max()))
        added = list(self._cells.shape)
        added[2] = len(lengths)
        self._cells = torch.cat([self._cells, self._cells.new_zeros(added)], dim=2)
        self.lengths = np.concatenate([self.lengths, lengths])

    def write(self, layer: int, heads: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Stores the key and value heads of `heads` [X, all heads, D] at (rows, positions), both [X]."""
        self._cells[layer][:, rows, :, positions] = heads[:, self._query_heads :].unflatten(1, (2, self._kv_heads))

    def keep(self, rows: np.ndarray) -> None:
        """Only these rows stay, in this order."""
        self._cells = self._cells.index_select(2, torch.from_numpy(rows).to(self._cells.device))
        self.lengths = self.lengths[rows]

    def begin_step(self) -> Tensor:
        """Makes room for one more token per row and returns its position, int64 [R]; `attend` writes and reads it.

        Rows of equal block count should be neighbours: each run of them is one attention call.
        """
        positions = self.lengths.copy()
        self.lengths = self.lengths + 1
        self._reserve(int(self.lengths.max()))
        blocks = -(-self.lengths // BLOCK)
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        stops = np.append(starts[1:], len(blocks))
        self._runs = [
            self._plan_run(int(a), int(b), int(blocks[a]) * BLOCK) for a, b in zip(starts, stops, strict=True)
        ]
        device = self._cells.device
        self._rows = torch.arange(len(positions), device=device)
        self._positions = torch.from_numpy(positions).to(device)
        return self._positions

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """The decoder's `Attention` for one token per row: [R, query heads · D] from [R, all heads, D]."""
        self.write(layer, heads, self._rows, self._positions)
        # The query heads of one kv head are its G "queries": no copy of keys or values per query head.
        query = heads[:, : self._query_heads].unflatten(1, (self._kv_heads, -1))
        keys, values = self._cells[layer]
        mixed = [
            attend(
                query[run.start : run.stop],
                keys[run.start : run.stop, :, : run.keys],
                values[run.start : run.stop, :, : run.keys],
                run.mask,
            )
            for run in self._runs
        ]
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1)

    def _plan_run(self, start: int, stop: int, keys: int) -> _Run:
        hidden = np.arange(keys) >= self.lengths[start:stop, None]
        mask = np.where(hidden, -np.inf, 0.0)[:, None, None, :]
        placed = torch.from_numpy(mask).to(device=self._cells.device, dtype=torch.float32)
        return _Run(start, stop, keys, placed)

    def _reserve(self, length: int) -> None:
        capacity = self._cells.shape[4]
        if length <= capacity:
            return
        wanted = max(length, min(self._longest, max(length + GROWTH, length * 3 // 2)))
        blocks = -(-wanted // BLOCK)
        self._cells = F.pad(self._cells, (0, 0, 0, blocks * BLOCK - capacity))
