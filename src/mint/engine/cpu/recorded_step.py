"""A decoding step that is recorded once as a list of kernels and then repeated by one call, without Python and torch.

The decoder's own forward is recorded, so there is one definition of a step. A recorded step reads tokens, positions and
pages from arrays at fixed addresses; everything else in it is fixed. With several threads and a small base, the rows
are split among the threads, and each runs its own recording from the tokens to the logits. That changes no bit, because
a row's bits do not depend on other rows.

Letters: R rows · C pages of a row · V vocabulary · H heads · D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.attention import NativeDecodeAttention
from mint.engine.cpu.delta_net import NativeDeltaRule
from mint.engine.cpu.mixture_of_experts import NativeMixtureOfExperts
from mint.engine.cpu.operations import NativeOperations
from mint.engine.cpu.panels import PanelMatrix
from mint.engine.cpu.recording import Recording, Replay, record
from mint.engine.lora import LoraRows
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.model.linear import Matrix
from mint.engine.model.weights import MixtureWeights
from mint.engine.quantized.quantized_panels import QuantizedPanels
from mint.engine.sampling.decode_step import DecodeStep, EagerStep, RowStates, row_states
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.state_cache import StateCache

SPARE_PAGES = 8
"""Pages that can be added to each row before the step must be recorded again."""

RECORDED_BYTES = 512 << 20
"""A recording keeps all intermediate results of a step: 305 MB for 64 rows of a model of 0.6 B weights, where it saves
10 % of the time. Steps that need more than this are not recorded."""

SPLIT_ENTRIES = 1 << 22
"""A base with more weights is read once for all rows, by all threads together."""

SPLIT_ROWS = 8
"""Rows for each thread at least: fewer are not worth reading the base once more."""


class NativeSteps:
    """`DecodeSteps` by the native kernels: recorded where kernels compute all of a step, and a recording is
    affordable."""

    def __init__(
        self, decoder: Decoder, operations: NativeOperations, cache: KVCache, states: StateCache | None = None
    ) -> None:
        """`operations` are the decoder's; `states` are those of its delta nets."""
        self._decoder = decoder
        self._states = states
        self._operations = operations
        self._cache = cache
        sites = [*decoder.weights.matrices.values(), decoder.weights.unembedding]
        net = decoder.config.delta_net
        self._all_native = (
            decoder.runs_kernels_alone
            and (net is None or NativeDeltaRule.fit(net))
            and all(isinstance(matrix, PanelMatrix | QuantizedPanels) for matrix in sites)
            and all(
                isinstance(mixture, NativeMixtureOfExperts) and mixture.routes_natively
                for mixture in decoder.mixtures.values()
            )
        )
        # The inputs and outputs of all products, and what the operations in between make of the outputs.
        self._bytes_per_row = 4 * sum(matrix.inputs + 2 * matrix.outputs for matrix in sites)
        self._splits = _entries(decoder, sites) <= SPLIT_ENTRIES

    def open(
        self,
        table: np.ndarray,
        fronts: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
        earlier: DecodeStep | None = None,
        states: np.ndarray | None = None,
    ) -> DecodeStep:
        """See `DecodeSteps`."""
        if isinstance(earlier, RecordedStep) and earlier.renew(table, positions, states):
            return earlier
        if self._all_native and self._loras_fit(loras) and self._bytes_per_row * len(positions) <= RECORDED_BYTES:
            parts = min(torch.get_num_threads(), len(positions) // SPLIT_ROWS) if self._splits else 1
            edges = [len(positions) * part // max(1, parts) for part in range(max(1, parts) + 1)]
            caches = _StepCaches(self._cache, self._states)
            return RecordedStep(self._decoder, self._operations, caches, table, positions, loras, edges, states)
        pages_of_rows = np.ascontiguousarray(table, np.int64)
        attention = NativeDecodeAttention(self._operations.kernels, self._cache, pages_of_rows, positions.copy())
        return EagerStep(self._decoder, attention, loras, row_states(self._decoder, self._states, states))

    def _loras_fit(self, loras: Sequence[LoraRows]) -> bool:
        """Whether kernels compute all products of the loras."""
        used = {id(rows.weights): rows.weights for rows in loras if rows.weights is not None}
        return all(self._operations.fits_lora(site) for weights in used.values() for site in weights.sites.values())


@dataclass(frozen=True)
class _StepCaches:
    pages: KVCache
    states: StateCache | None


class RecordedStep:
    """A `DecodeStep` of a decoder whose forward runs nothing but native kernels."""

    def __init__(
        self,
        decoder: Decoder,
        operations: NativeOperations,
        caches: _StepCaches,
        table: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
        edges: Sequence[int],
        states: np.ndarray | None = None,
    ) -> None:
        """See `DecodeSteps.open`; the first run records. Rows are split at `edges`."""
        self._decoder = decoder
        self._operations = operations
        self._loras = loras
        rows, columns = table.shape
        self._tokens = np.zeros(rows, np.int64)
        self._positions = np.zeros(rows, np.int64)
        self._table = np.zeros((rows, columns + SPARE_PAGES), np.int64)
        self._slots = np.full(rows, -1)
        self._versions = decoder.loras.versions(loras)
        self._replay: Replay | None = None
        self._logits = torch.empty(0)
        self._parts = [self._part(caches, slice(*edge)) for edge in pairwise(edges)]
        self._place(table, positions, states)

    def renew(self, table: np.ndarray, positions: np.ndarray, states: np.ndarray | None = None) -> bool:
        """Takes over another `table` of pages for the same rows; False where the step must be recorded again."""
        fits = table.shape[1] <= self._table.shape[1] and self._decoder.loras.versions(self._loras) == self._versions
        if fits:
            self._place(table, positions, states)
        return fits

    def freeze(self, rows: np.ndarray) -> None:
        self._slots[rows] = -1

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within their pages, and no merged lora has changed."""
        within = bool((positions < self._limits).all())
        return within and self._decoder.loras.versions(self._loras) == self._versions

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits [R, V]."""
        self._tokens[:] = tokens
        self._positions[:] = positions
        if self._replay is None:
            self._replay = self._record()
        else:
            self._replay.run()
        return self._logits

    def _part(self, caches: _StepCaches, rows: slice) -> _RecordedRows:
        places = self._table[rows], self._positions[rows]
        loras = [
            LoraRows(max(own.start, rows.start) - rows.start, min(own.stop, rows.stop) - rows.start, own.weights)
            for own in self._loras
            if own.start < rows.stop and own.stop > rows.start
        ]
        attention = NativeDecodeAttention(self._operations.kernels, caches.pages, *places)
        own = None if caches.states is None else RowStates(self._decoder, caches.states, self._slots[rows])
        return _RecordedRows(rows, loras, attention, own)

    def _place(self, table: np.ndarray, positions: np.ndarray, states: np.ndarray | None) -> None:
        if states is not None:
            self._slots[:] = states
        self._table[:, : table.shape[1]] = table
        self._limits = (positions // PAGE_POSITIONS + 1) * PAGE_POSITIONS
        for part in self._parts:
            part.attention.reserve(int(self._limits[part.rows].max()))

    def _record(self) -> Replay:
        """Runs the step for the first time, and records it."""
        threads = self._operations.kernels.threads
        recordings = list[Recording]()
        if len(self._parts) > 1:
            self._logits = torch.empty(len(self._tokens), self._decoder.config.vocab_size)
        tokens, positions = torch.from_numpy(self._tokens), torch.from_numpy(self._positions)
        for part in self._parts:
            with record() as recording:
                rule = None if part.states is None else part.states.rule
                hidden = self._decoder.forward(
                    tokens[part.rows], positions[part.rows], part.attention, part.loras, delta_rule=rule
                )
                logits = self._decoder.logits(hidden, part.loras)
                if len(self._parts) > 1:
                    self._operations.copy_rows(logits, self._logits[part.rows])
                else:
                    self._logits = logits
            recordings.append(recording)
        return Replay(threads, recordings)


@dataclass(frozen=True)
class _RecordedRows:
    """Rows that one recording computes."""

    rows: slice
    loras: list[LoraRows]
    attention: NativeDecodeAttention
    states: RowStates | None


def _entries(decoder: Decoder, sites: Sequence[Matrix]) -> int:
    """Weights that a step reads."""
    experts = [
        matrix
        for layer in decoder.weights.layers
        if isinstance(layer.mlp, MixtureWeights)
        for expert in layer.mlp.experts
        for matrix in (expert.gate_up, expert.down)
    ]
    return sum(matrix.outputs * matrix.inputs for matrix in (*sites, *experts))
