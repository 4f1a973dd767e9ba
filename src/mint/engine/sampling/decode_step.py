"""One token further in every row of a batch: the step that is run again and again while the rows stay the same.

Here is the interface, and the step that calls the decoder's forward each time. A device may have a faster one
(`engine/cpu/recorded_step.py`, `engine/cuda/graph_step.py`), chosen when a base is loaded.

Letters: R rows · C pages of a row · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mint.engine.drawing.device_draw import DrawRules
from mint.engine.lora import LoraRows
from mint.engine.model.decoder import Decoder
from mint.engine.packing import StateSpans
from mint.engine.sampling.decode_attention import DecodeAttention
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.state_cache import StateCache


class DecodeStep(Protocol):
    """A step over rows that stay the same, each within pages that it has already."""

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions, int64 [R], can still be run."""
        ...

    def freeze(self, rows: np.ndarray) -> None:
        """From now on, the states of these rows stay as they are."""
        ...

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Float32 logits [R, V] after `tokens` at `positions`, both int64 [R]; valid until the next run."""
        ...


class PendingDraw(Protocol):
    """Tokens that a device is drawing."""

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, logprobs and normalisers [R] as `Draw` returns them, once they are there."""
        ...


@runtime_checkable
class DrawingStep(DecodeStep, Protocol):
    """A step that draws on the device, and goes on from its own tokens before the host has read them."""

    def draw(self, tokens: np.ndarray | None, positions: np.ndarray, rules: DrawRules) -> PendingDraw:
        """Draws the tokens after `tokens` at `positions`, both int64 [R], without a wait. None: after those that this
        step, or the step that it took over from, has drawn last."""
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
        states: np.ndarray | None = None,
    ) -> DecodeStep:
        """The step for rows whose next tokens are at `positions` [R].

        Row r has its keys and values in the pages `table[r]`, in order, of `table` [R, C], and reads its first `BLOCK`
        positions in the page `fronts[r]`. `loras` cover all rows. `earlier` is a step of the same rows that no longer
        fits: the new step may take over what it has prepared, so it must not be run again. Where the model has delta
        nets, row r goes on from its state in the slot `states[r]` (-1: from no state, and keeps none).
        """
        ...


class StepAttention(Protocol):
    """The decoder's `Attention` of a step."""

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None) -> Tensor:
        """Attended values [R, query heads · D] of `heads` [R, H, D], whose keys and values are stored; `sinks` [query
        heads], if there are any."""
        ...

    def fits(self, positions: np.ndarray) -> bool:
        """Whether it is planned for rows at these positions [R]."""
        ...

    def begin_step(self, positions: np.ndarray) -> None:
        """The next token of each row is at `positions` [R]."""
        ...


class RowStates:
    """The delta nets of a step, in which each row goes on from its own state."""

    def __init__(self, decoder: Decoder, cache: StateCache, slots: np.ndarray) -> None:
        """Row r has the slot `slots[r]`, int64 [R], which is read at each step."""
        self._slots = slots
        edges = np.arange(len(slots) + 1)
        self.rule = decoder.delta_rule(StateSpans(edges[:-1], edges[1:], slots, slots, edges), cache.of_layer)

    def freeze(self, rows: np.ndarray) -> None:
        """The rows go on from no state, and keep none."""
        self._slots[rows] = -1


class EagerStep:
    """Calls the decoder's forward anew for each step."""

    def __init__(
        self,
        decoder: Decoder,
        attention: StepAttention,
        loras: Sequence[LoraRows],
        states: RowStates | None = None,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._loras = loras
        self._states = states

    def freeze(self, rows: np.ndarray) -> None:
        if self._states is not None:
            self._states.freeze(rows)

    def fits(self, positions: np.ndarray) -> bool:
        return self._attention.fits(positions)

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        device = self._decoder.device
        self._attention.begin_step(positions)
        own, places = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        rule = None if self._states is None else self._states.rule
        hidden = self._decoder.forward(own, places, self._attention, self._loras, delta_rule=rule)
        return self._decoder.logits(hidden, self._loras)


class EagerSteps:
    """`DecodeSteps` in plain torch."""

    def __init__(self, decoder: Decoder, cache: KVCache, states: StateCache | None = None) -> None:
        self._decoder = decoder
        self._cache = cache
        self._states = states

    def open(
        self,
        table: np.ndarray,
        fronts: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
        earlier: DecodeStep | None = None,
        states: np.ndarray | None = None,
    ) -> DecodeStep:
        attention = DecodeAttention(self._cache, table, fronts, positions)
        return EagerStep(self._decoder, attention, loras, row_states(self._decoder, self._states, states))


def row_states(decoder: Decoder, cache: StateCache | None, slots: np.ndarray | None) -> RowStates | None:
    """The states of rows in `slots`; None where the model has none."""
    return None if cache is None or slots is None else RowStates(decoder, cache, slots.copy())
