"""One token further in every row of a batch: the step that is run again and again while the rows stay the same.

Here is the interface, and the step that calls the decoder's forward each time. A device may have a faster one
(`engine/cpu/recorded_step.py`, `engine/cuda/graph_step.py`), chosen when a base is loaded.

Letters: R rows · C pages of a row · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import LoraRows
from mint.engine.model.decoder import Decoder
from mint.engine.sampling.decode_attention import DecodeAttention
from mint.engine.sampling.kv_cache import KVCache


class DecodeStep(Protocol):
    """A step over rows that stay the same, each within pages that it has already."""

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions, int64 [R], can still be run."""
        ...

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Float32 logits [R, V] after `tokens` at `positions`, both int64 [R]; valid until the next run."""
        ...


class DecodeSteps(Protocol):
    """Opens the steps of one base model over its pages."""

    def open(
        self,
        table: np.ndarray,
        fronts: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
        earlier: DecodeStep | None = None,
    ) -> DecodeStep:
        """The step for rows whose next tokens are at `positions` [R].

        Row r has its keys and values in the pages `table[r]`, in order, of `table` [R, C], and reads its first `BLOCK`
        positions in the page `fronts[r]`. `loras` cover all rows. `earlier` is a step of the same rows that no longer
        fits: the new step may take over what it has prepared, so it must not be run again.
        """
        ...


class StepAttention(Protocol):
    """The decoder's `Attention` of a step."""

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Attended values [R, query heads · D] of `heads` [R, H, D], whose keys and values are stored."""
        ...

    def fits(self, positions: np.ndarray) -> bool:
        """Whether it is planned for rows at these positions [R]."""
        ...

    def begin_step(self, positions: np.ndarray) -> None:
        """The next token of each row is at `positions` [R]."""
        ...


class EagerStep:
    """Calls the decoder's forward anew for each step."""

    def __init__(self, decoder: Decoder, attention: StepAttention, loras: Sequence[LoraRows]) -> None:
        self._decoder = decoder
        self._attention = attention
        self._loras = loras

    def fits(self, positions: np.ndarray) -> bool:
        return self._attention.fits(positions)

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        device = self._decoder.device
        self._attention.begin_step(positions)
        own, places = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        hidden = self._decoder.forward(own, places, self._attention, self._loras)
        return self._decoder.logits(hidden, self._loras)


class EagerSteps:
    """`DecodeSteps` in plain torch."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache

    def open(
        self,
        table: np.ndarray,
        fronts: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
        earlier: DecodeStep | None = None,
    ) -> DecodeStep:
        return EagerStep(self._decoder, DecodeAttention(self._cache, table, fronts, positions), loras)
