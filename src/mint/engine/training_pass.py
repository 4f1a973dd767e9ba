"""One training pass: packs examples, runs the decoder, computes the loss, and adds the gradient to the lora's.

The gradients of the micro-batches are added in the tree of `gradient_sum`. Several processes may run a pass together,
each a part of its micro-batches (`reductions/division.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.losses import entropy_bonus, loss_and_slope, measure
from mint.engine.memory.micro_batches import smaller
from mint.engine.model.autograd import backward
from mint.engine.model.weights import LayerSource
from mint.engine.packing import MicroBatch
from mint.engine.protocol import LossSpec, MicroBatching, PassResult, TrainDatum, is_out_of_memory
from mint.engine.reductions.division import ALONE, Division, PassOutcome, PeerFailedError, Peers
from mint.engine.reductions.gradient_sum import partial_sums
from mint.engine.reductions.state_division import StateDivision
from mint.engine.target_logprobs import TargetLogprobs, Unembedding
from mint.errors import OutOfMemoryError

log = logging.getLogger(__name__)

_MISSING = np.empty(0, np.float32)


class TrainedDecoder(Unembedding, Protocol):
    """The methods of a decoder that a pass calls."""

    layer_source: LayerSource | None
    """Where the matrices of its layers come from, if not from the decoder itself."""

    def pack(self, data: Sequence[TrainDatum], rows: int) -> list[MicroBatch]:
        """Cuts examples into micro-batches of about `rows` rows, as `forward_packed` takes them; a pure function."""
        ...

    def forward_packed(
        self, batch: MicroBatch, lora: LoraWeights, *, recompute: bool, rows: np.ndarray | None = None
    ) -> Tensor:
        """Final hidden states [T, E] of the rows of `batch`, all with `lora`; if given, of `rows` alone, ascending.

        With `recompute`, the backward runs the forward of a layer again instead of keeping its activations.
        """
        ...


class _Results:
    """The results of each example, in the order of the request."""

    def __init__(self, data: Sequence[TrainDatum]) -> None:
        self.logprobs: list[np.ndarray] = [_MISSING] * len(data)
        self.entropies: list[np.ndarray] = [_MISSING] * len(data)
        self.losses: list[np.ndarray] = [_MISSING] * len(data)

    def join(self, division: Division, batches: Sequence[MicroBatch], data: Sequence[TrainDatum]) -> None:
        """Adds the results of the micro-batches that other processes have computed."""
        if not division.is_shared:
            return
        own = [self._values(batches[index].datum_ids) for index in division.own]
        lengths = [sum(_count(data[index]) for index in batch.datum_ids) for batch in batches]
        values = division.join(np.concatenate([np.empty(0), *own]), lengths)
        for batch, part in zip(batches, np.split(values, np.cumsum(lengths)[:-1]), strict=True):
            self._fill(batch.datum_ids, data, part)

    def _values(self, datum_ids: Sequence[int]) -> np.ndarray:
        """All results of some examples, float64, which holds them exactly."""
        kinds = (self.logprobs, self.entropies, self.losses)
        return np.concatenate([kind[index].reshape(-1) for index in datum_ids for kind in kinds], dtype=np.float64)

    def _fill(self, datum_ids: Sequence[int], data: Sequence[TrainDatum], values: np.ndarray) -> None:
        """The inverse of `_values`."""
        start = 0
        for index in datum_ids:
            cells, positions = data[index].targets.size, len(data[index].tokens)
            own = values[start : start + _count(data[index])]
            logprobs, entropies, losses = np.split(own, [cells, cells + positions])
            shape = data[index].targets.shape
            self.logprobs[index] = logprobs.astype(np.float32).reshape(shape)
            self.entropies[index] = entropies.astype(np.float32)
            self.losses[index] = losses.reshape(shape)
            start += _count(data[index])


def _count(datum: TrainDatum) -> int:
    """The number of results of an example: a logprob and a loss of each target, an entropy of each position."""
    return 2 * datum.targets.size + len(datum.tokens)


def run_pass(
    decoder: TrainedDecoder,
    lora: LoraWeights,
    data: Sequence[TrainDatum],
    loss: LossSpec,
    *,
    gradient: Tensor | None,
    micro_batching: MicroBatching,
    may_shrink: bool = True,
    peers: Peers = ALONE,
    state: StateDivision | None = None,
) -> PassResult:
    """Logprobs and metrics of `data`; the gradient of the summed loss is added to `gradient`, the lora's own, if given.

    `peers` run the pass together: each calls this with the same arguments, and each gets the whole result. If they
    divide the model by `state`, which needs the order `tree`, only this process's own part of `gradient` counts, before
    and after the pass.

    A pass for which memory does not suffice is run again with what `smaller` says: recomputed, which changes no bit,
    then, if it `may_shrink`, in micro-batches of half as many rows, and so on. Which of them fits is part of the
    result. The runs that failed are counted as `memory_retries:sum`.

    Raises:
        OutOfMemoryError: memory does not suffice for one sequence alone, or without shrinking; nothing is added to
            `gradient`.
    """
    # Kept because a micro-batch that fails has added a part of its gradient already.
    kept = None if gradient is None else gradient[slice(None) if state is None else state.own]
    before = None if kept is None else kept.clone()
    attempt = micro_batching
    retries = 0

    def run() -> PassResult | None:
        return _try(decoder, lora, data, loss, attempt, gradient=gradient, before=before, peers=peers, state=state)

    while (result := run()) is None:
        # Not in the except clause: its error would keep the activations alive.
        if kept is not None and before is not None:
            kept.copy_(before)
        decoder.operations.release_memory()
        retries += 1
        lengths = [len(datum.tokens) for datum in data]
        next_attempt = smaller(attempt, lengths, with_gradient=gradient is not None)
        if next_attempt is not None and next_attempt.rows != attempt.rows and not may_shrink:
            raise OutOfMemoryError(
                "memory does not suffice to run a training pass again as it was run before",
                field="rows of a micro-batch",
                value=attempt.rows,
                remedy="Give the server as much memory as it had then",
            )
        if next_attempt is None:
            raise OutOfMemoryError(
                "memory does not suffice for a training pass over one sequence",
                field="tokens of the longest sequence",
                value=max(lengths),
                remedy="Shorten the sequences, or give the server more memory",
            )
        log.warning("memory ran out with %d rows at once; trying %s", attempt.rows, next_attempt)
        attempt = next_attempt
    if retries:
        result.metrics["memory_retries:sum"] = float(retries)
    return replace(result, micro_batching=attempt)


def _try(
    decoder: TrainedDecoder,
    lora: LoraWeights,
    data: Sequence[TrainDatum],
    loss: LossSpec,
    attempt: MicroBatching,
    *,
    gradient: Tensor | None,
    before: Tensor | None,
    peers: Peers,
    state: StateDivision | None,
) -> PassResult | None:
    """The pass; None if memory ran out here or at a peer, with any numbers in `gradient`, which was `before`."""
    results = _Results(data)

    def run(batch: MicroBatch) -> None:
        recompute = len(batch.tokens) > attempt.rows if attempt.recompute is None else attempt.recompute
        with peers.micro_batch():
            _run(decoder, lora, data, batch, loss, results, gradient=gradient is not None, recompute=recompute)

    try:
        batches = decoder.pack(data, attempt.rows)
        in_tree = attempt.order == "tree"
        # Added one after the other, no part of the gradient is computed apart from what comes before it.
        division = (peers if in_tree else ALONE).divide([len(batch.tokens) for batch in batches])
        peers.begin(division.most, decoder.layer_source, lora, with_gradient=gradient is not None)
        sums: dict[range, Tensor] = {}
        if gradient is not None and in_tree:
            sums = _partial_sums(batches, division.own, run, gradient)
        else:
            for index in division.own:
                run(batches[index])  # autograd adds to the gradient
    except Exception as error:  # also what is raised again: the peers must know, or they would wait for this process
        own = PassOutcome.OUT_OF_MEMORY if is_out_of_memory(error) else PassOutcome.FAILED
        if peers.worst(own) is PassOutcome.FAILED:
            raise
        return None
    worst = peers.worst(PassOutcome.DONE)
    if worst is PassOutcome.OUT_OF_MEMORY:
        return None
    if worst is PassOutcome.FAILED:
        raise PeerFailedError("another process of the group could not run its part of the pass")
    if gradient is not None and before is not None and in_tree:
        kept = gradient if state is None else gradient[state.own]
        torch.add(before, division.total(sums, len(gradient), state), out=kept)
    results.join(division, batches, data)
    metrics = measure(loss, data, results.logprobs, results.entropies, results.losses)
    return PassResult(results.logprobs, metrics, results.entropies)


def _partial_sums(
    batches: Sequence[MicroBatch], own: range, run: Callable[[MicroBatch], None], gradient: Tensor
) -> dict[range, Tensor]:
    """The summed gradients of `own` of the batches. `run` adds that of one to `gradient`, whose numbers are
    overwritten."""

    def gradient_of(index: int) -> Tensor:
        gradient.zero_()
        run(batches[index])
        return gradient

    return partial_sums(len(batches), own, gradient_of)


def _run(
    decoder: TrainedDecoder,
    lora: LoraWeights,
    data: Sequence[TrainDatum],
    batch: MicroBatch,
    loss: LossSpec,
    results: _Results,
    *,
    gradient: bool,
    recompute: bool,
) -> None:
    """Runs one micro-batch, and adds the results of its examples."""
    trained = _trained_pairs(data, batch)
    trained_only = bool(loss.config.get("trained_only"))
    has_bonus = loss.config.get("entropy_coef", 0.0) > 0
    computed = trained if trained_only else np.ones_like(trained)
    rows, pair_rows = np.unique(batch.pair_rows[computed], return_inverse=True)
    logprobs, entropies = np.zeros(len(trained), np.float32), np.zeros(len(batch.tokens), np.float32)
    hidden = pairs = None
    if len(rows):
        with torch.set_grad_enabled(gradient):
            wanted = None if len(rows) == len(batch.tokens) else rows
            hidden = decoder.forward_packed(batch, lora, recompute=recompute, rows=wanted)
        pairs = TargetLogprobs(
            decoder,
            hidden.detach(),
            pair_rows,
            batch.pair_targets[computed],
            [LoraRows(0, len(hidden), lora)],
            temperature=loss.config.get("temperature", 1.0),
            trained=trained[computed] if gradient and not has_bonus else None,
        )
        # The host waits for a GPU here, once in a micro-batch.
        found = torch.cat([pairs.logprobs, pairs.entropies]).cpu().numpy()
        logprobs[computed], entropies[rows] = np.split(found, [len(pair_rows)])
    slopes = np.empty(len(batch.pair_of_cell))
    entropy_slopes = np.zeros(len(batch.tokens))
    cell = position = 0
    for index in batch.datum_ids:
        datum = data[index]
        cells = slice(cell, cell + datum.targets.size)
        positions = slice(position, position + len(datum.tokens))
        own = logprobs[batch.pair_of_cell[cells]].reshape(datum.targets.shape)
        results.entropies[index] = entropies[batch.row_of_position[positions]]
        if trained_only:  # another example may have trained a row of a common prefix
            own[datum.weights == 0] = 0
            results.entropies[index][~datum.trained] = 0
        results.logprobs[index] = own
        results.losses[index], slope = loss_and_slope(loss, datum, own)
        slopes[cells] = slope.reshape(-1)
        if has_bonus:
            bonus, bonus_slope = entropy_bonus(loss, datum, results.entropies[index])
            results.losses[index] = results.losses[index] - bonus
            # Positions that share a row (a common prefix) add up.
            np.add.at(entropy_slopes, batch.row_of_position[positions], -bonus_slope)
        cell, position = cells.stop, positions.stop
    if gradient and hidden is not None and pairs is not None:
        # Cells that share a pair (a common prefix) add up.
        pair_slopes = np.bincount(batch.pair_of_cell, weights=slopes, minlength=len(trained))
        of_rows = entropy_slopes[rows].astype(np.float32) if has_bonus else None
        _backward(hidden, pairs, pair_slopes[computed].astype(np.float32), of_rows)


def _trained_pairs(data: Sequence[TrainDatum], batch: MicroBatch) -> np.ndarray:
    """Bool [U]: the pairs that have a weight in any example."""
    weights = np.concatenate([data[index].weights.reshape(-1) for index in batch.datum_ids])
    return np.bincount(batch.pair_of_cell, weights=weights != 0, minlength=len(batch.pair_rows)) > 0


def _backward(hidden: Tensor, pairs: TargetLogprobs, slopes: np.ndarray, entropy_slopes: np.ndarray | None) -> None:
    """From d loss / d logprob per pair, and d loss / d entropy per row, to the lora's gradient."""
    if not slopes.any() and (entropy_slopes is None or not entropy_slopes.any()):
        return
    part = pairs.hidden_gradient(slopes, entropy_slopes)
    if hidden.requires_grad:  # False where the unembedding alone is trained
        backward(hidden, part)
