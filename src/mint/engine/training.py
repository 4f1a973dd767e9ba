"""One pass over examples: pack, run, weigh, and (if asked) add the gradient to the lora's.

Knows nothing of models' names, optimizers or requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mint.engine.attention import PackedAttention
from mint.engine.decoder import Decoder
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.losses import loss_and_slope, measure
from mint.engine.packing import MicroBatch, pack
from mint.engine.protocol import LossSpec, PassResult, TrainDatum
from mint.engine.unembedding import TargetLogprobs

TOKEN_BUDGET = 4096
"""Rows of a micro-batch. A constant, for the split decides the bits of the result."""


def run_pass(
    decoder: Decoder, lora: LoraWeights, data: Sequence[TrainDatum], loss: LossSpec, *, gradient: bool
) -> PassResult:
    """Logprobs and metrics of `data`; with `gradient`, that of the summed loss is added to the lora's `.grad`."""
    logprobs: dict[int, np.ndarray] = {}
    entropies: dict[int, np.ndarray] = {}
    for batch in pack(data, TOKEN_BUDGET):
        for index, own, entropy in _run(decoder, lora, data, batch, loss, gradient=gradient):
            logprobs[index] = own
            entropies[index] = entropy
    own, entropy = ([found[index] for index in range(len(data))] for found in (logprobs, entropies))
    trained = [row[datum.trained] for row, datum in zip(entropy, data, strict=True)]
    return PassResult(own, measure(loss, list(data), own, trained), entropy)


def _run(
    decoder: Decoder,
    lora: LoraWeights,
    data: Sequence[TrainDatum],
    batch: MicroBatch,
    loss: LossSpec,
    *,
    gradient: bool,
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(datum, logprobs, entropies) of one micro-batch."""
    config, device = decoder.config, decoder.device
    attention = PackedAttention(batch.blocks, config.num_attention_heads, config.num_key_value_heads, device)
    tokens, positions = (torch.from_numpy(array).to(device) for array in (batch.tokens, batch.positions))
    with torch.set_grad_enabled(gradient):
        hidden = decoder.forward(tokens, positions, attention, [LoraRows(0, len(tokens), lora)])
    pairs = TargetLogprobs(
        decoder,
        hidden.detach(),
        batch.pair_rows,
        batch.pair_targets,
        [LoraRows(0, len(hidden), lora)],
        temperature=loss.config.get("temperature", 1.0),
        gradient=gradient,
    )
    own = [data[index] for index in batch.datum_ids]
    logprobs = _split(pairs.logprobs.cpu().numpy()[batch.pair_of_cell], [datum.targets.shape for datum in own])
    entropies = _split(pairs.entropies.cpu().numpy()[batch.row_of_position], [datum.tokens.shape for datum in own])
    if gradient:
        slopes = [loss_and_slope(loss, datum, found)[1] for datum, found in zip(own, logprobs, strict=True)]
        # Cells that share a pair (a common prefix) add up.
        weights = np.concatenate([slope.reshape(-1) for slope in slopes])
        pair_slopes = np.bincount(batch.pair_of_cell, weights=weights, minlength=len(batch.pair_rows))
        _backward(hidden, pairs, pair_slopes.astype(np.float32))
    return list(zip(batch.datum_ids, logprobs, entropies, strict=True))


def _split(values: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Consecutive runs of `values`, one per shape."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    return [run.reshape(shape) for run, shape in zip(np.split(values, ends), shapes, strict=True)]


def _backward(hidden: Tensor, pairs: TargetLogprobs, slopes: np.ndarray) -> None:
    """From d loss / d logprob per pair to the lora's gradient."""
    if not slopes.any():
        return
    part = pairs.hidden_gradient(slopes)
    if hidden.requires_grad:  # not so where the unembedding alone is trained
        hidden.backward(part)
