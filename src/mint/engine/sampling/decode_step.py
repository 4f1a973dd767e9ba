"""One token further in every row of a batch: the step that is run again and again while the rows stay the same.

Knows which way of running a step fits a decoder and its device; knows nothing of jobs, drawing or who holds cells.

Letters: R rows · C cells of a row · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.attention import NativeDecodeAttention
from mint.engine.cpu.recorded_step import RECORDED_BYTES, RecordedStep
from mint.engine.cuda.step import StepGraphs
from mint.engine.lora import LoraRows
from mint.engine.model.decoder import Decoder
from mint.engine.sampling.decode_attention import DecodeAttention
from mint.engine.sampling.kv_cache import KvCells


class DecodeStep(Protocol):
    """A step over rows that stay the same, each within cells that it has already."""

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions, int64 [R], can still be run."""
        ...

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Float32 logits [R, V] after `tokens` at `positions`, both int64 [R]; valid until the next run."""
        ...


class EagerStep:
    """Calls the decoder's forward anew for each step."""

    def __init__(
        self,
        decoder: Decoder,
        cells: KvCells,
        table: np.ndarray,
        fronts: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
    ) -> None:
        """As `open_step`."""
        self._decoder, self._loras = decoder, loras
        self._attention: DecodeAttention | NativeDecodeAttention
        if decoder.kernels is None:
            self._attention = DecodeAttention(cells, table, fronts, positions)
        else:
            self._attention = NativeDecodeAttention(decoder.kernels, cells, table, positions)

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within what their attention was planned for."""
        return self._attention.fits(positions)

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits [R, V]."""
        device = self._decoder.device
        self._attention.begin_step(positions)
        own, places = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        hidden = self._decoder.forward(own, places, self._attention, self._loras)
        return self._decoder.logits(hidden, self._loras)


def open_step(
    decoder: Decoder,
    cells: KvCells,
    table: np.ndarray,
    fronts: np.ndarray,
    positions: np.ndarray,
    loras: Sequence[LoraRows],
    earlier: DecodeStep | None = None,
    graphs: StepGraphs | None = None,
) -> DecodeStep:
    """The step for rows whose next tokens are at `positions` [R]; row r lies in the cells `table[r]`, in order, of
    `table` [R, C], and reads its first block in the cell `fronts[r]`. `loras` cover all rows. What `earlier`, a step of
    the same rows that no longer fits, has prepared may be used again; it must not be run any more. `graphs` are those
    of this decoder over these cells, where there are any."""
    if graphs is not None:
        return graphs.open(table, positions, loras)
    if isinstance(earlier, RecordedStep) and earlier.renew(table, positions):
        return earlier
    if decoder.bytes_between(len(positions)) <= RECORDED_BYTES and decoder.runs_natively(loras):
        return RecordedStep(decoder, cells, table, positions, loras)
    return EagerStep(decoder, cells, table, fronts, positions, loras)
