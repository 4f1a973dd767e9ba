"""A decoding step recorded once as a list of kernels and then run by one call, so that Python and torch are paid once.

The decoder's own forward is recorded, so there is one definition of a step. A recorded step reads tokens, positions and
cells in arrays that stay where they are; everything else in it is fixed. With several threads and a small base, rows
are split among them, each thread running a recording of its own from the tokens to the logits: rows are computed alike
in any company. Knows nothing of jobs, drawing or who holds cells.

Letters: R rows · C cells of a row · V vocabulary · H heads · D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.kernels import DecodedRows, NativeKernels
from mint.engine.cpu.moves import NativeMoves
from mint.engine.cpu.threads import Recording, Replay
from mint.engine.lora import LoraRows
from mint.engine.model.attention import CHUNK
from mint.engine.model.decoder import Decoder
from mint.engine.sampling.kv_cache import KvCells

SPARE_CELLS = 8
"""So many cells can be added to each row before the step is recorded again."""

RECORDED_BYTES = 512 << 20
"""A recording keeps all that is computed in a step: 305 MB for 64 rows of a model of 0.6 B weights, and it saves 10 %.
Steps that need more than this are not recorded."""

SPLIT_ENTRIES = 1 << 22
"""A base with more weights is read once for all rows, by all threads together."""

SPLIT_ROWS = 8
"""Fewer rows for each thread are not worth reading the base once more."""


class RecordedStep:
    """A `DecodeStep` of a decoder that `runs_natively`."""

    def __init__(
        self, decoder: Decoder, cells: KvCells, table: np.ndarray, positions: np.ndarray, loras: Sequence[LoraRows]
    ) -> None:
        """As `open_step`; the first run records."""
        if decoder.kernels is None or decoder.moves is None:
            raise AssertionError("a recorded step needs kernels")
        self._decoder, self._kernels, self._moves, self._loras = decoder, decoder.kernels, decoder.moves, loras
        rows, columns = table.shape
        self._tokens, self._positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._table = np.zeros((rows, columns + SPARE_CELLS), np.int64)
        self._versions = decoder.versions(loras)
        self._replay: Replay | None = None
        self._logits = torch.empty(0)
        self._parts = [self._part(cells, slice(*edges)) for edges in pairwise(_edges(decoder, rows))]
        self._place(table, positions)

    def renew(self, table: np.ndarray, positions: np.ndarray) -> bool:
        """The same rows in another `table` of cells; False where the step must be recorded again for that."""
        fits = table.shape[1] <= self._table.shape[1] and self._decoder.versions(self._loras) == self._versions
        if fits:
            self._place(table, positions)
        return fits

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within their cells, and their loras as they were."""
        within = bool((positions < self._limits).all())
        return within and self._decoder.versions(self._loras) == self._versions

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits [R, V]."""
        self._tokens[:], self._positions[:] = tokens, positions
        if self._replay is None:
            self._replay = self._record()
        else:
            self._replay.run()
        return self._logits

    def _part(self, cells: KvCells, rows: slice) -> _Part:
        places = self._table[rows], self._positions[rows]
        loras = [
            LoraRows(max(own.start, rows.start) - rows.start, min(own.stop, rows.stop) - rows.start, own.weights)
            for own in self._loras
            if own.start < rows.stop and own.stop > rows.start
        ]
        return _Part(rows, loras, _CellAttention(self._kernels, self._moves, cells, *places))

    def _place(self, table: np.ndarray, positions: np.ndarray) -> None:
        self._table[:, : table.shape[1]] = table
        self._limits = (positions // CHUNK + 1) * CHUNK
        for part in self._parts:
            part.attention.rows.longest = int(self._limits[part.rows].max())

    def _record(self) -> Replay:
        """Runs the step for the first time."""
        threads, recordings = self._kernels.threads, list[Recording]()
        if len(self._parts) > 1:
            self._logits = torch.empty(len(self._tokens), self._decoder.config.vocab_size)
        tokens, positions = torch.from_numpy(self._tokens), torch.from_numpy(self._positions)
        for part in self._parts:
            with threads.recording() as recording:
                hidden = self._decoder.forward(tokens[part.rows], positions[part.rows], part.attention, part.loras)
                logits = self._decoder.logits(hidden, part.loras)
                if len(self._parts) > 1:
                    self._moves.join([logits], self._logits[part.rows])
                else:
                    self._logits = logits
            recordings.append(recording)
        return Replay(threads, recordings)


@dataclass(frozen=True)
class _Part:
    """Rows that one recording computes."""

    rows: slice
    loras: list[LoraRows]
    attention: _CellAttention


class _CellAttention:
    """The decoder's `Attention` over cells, whose numbers it reads in arrays that stay where they are."""

    def __init__(
        self, kernels: NativeKernels, moves: NativeMoves, cells: KvCells, table: np.ndarray, positions: np.ndarray
    ) -> None:
        """`table` int64 [R, C] and `positions` int64 [R], contiguous."""
        self._kernels, self._moves, self._cells = kernels, moves, cells
        self._places = table, positions
        self.rows = DecodedRows(cells.query_heads, cells.kv_heads, cells.side_by_side, CHUNK, table, positions)

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Attended values [R, query heads · D] of `heads` [R, H, D], whose keys and values are stored."""
        self._moves.store(self._cells, layer, heads, *self._places)
        out = heads.new_empty(len(heads), self._cells.query_heads * heads.shape[2])
        self._kernels.attend_cells(self.rows, heads, *self._cells.planes(layer), out)
        return out


def _edges(decoder: Decoder, rows: int) -> list[int]:
    """Where the parts of so many rows begin and end."""
    parts = min(torch.get_num_threads(), rows // SPLIT_ROWS) if decoder.entries <= SPLIT_ENTRIES else 1
    parts = max(1, parts)
    return [rows * part // parts for part in range(parts + 1)]
