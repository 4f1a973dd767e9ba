"""One pass over examples: pack, run, weigh, and (if asked) add the gradient to the lora's.

Knows nothing of models' names, optimizers or requests.
"""

from __future__ import annotations

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
    trained = [row[datum.weights != 0] for row, datum in zip(entropy, data, strict=True)]
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
    rows, targets = (torch.from_numpy(array).to(device) for array in (batch.pair_rows, batch.pair_targets))
    with torch.set_grad_enabled(gradient):
        hidden = decoder.forward(tokens, positions, attention, [LoraRows(0, len(tokens), lora)])
    pair_hidden = hidden.detach().index_select(0, rows)
    loras = [LoraRows(0, len(rows), lora)]
    temperature = loss.config.get("temperature", 1.0)
    pairs = TargetLogprobs(decoder, pair_hidden, targets, loras, temperature=temperature, gradient=gradient)
    ends = np.cumsum([len(data[index].targets) for index in batch.datum_ids])[:-1]
    logprobs = np.split(pairs.logprobs.cpu().numpy()[batch.pair_of_position], ends)
    entropies = np.split(pairs.entropies.cpu().numpy()[batch.pair_of_position], ends)
    if gradient:
        slopes = [loss_and_slope(loss, data[i], own)[1] for i, own in zip(batch.datum_ids, logprobs, strict=True)]
        # Positions that share a pair (a common prefix) add up.
        weights = np.concatenate(slopes)
        pair_slopes = np.bincount(batch.pair_of_position, weights=weights, minlength=len(batch.pair_rows))
        _backward(hidden, rows, pairs, torch.from_numpy(pair_slopes.astype(np.float32)).to(device))
    return list(zip(batch.datum_ids, logprobs, entropies, strict=True))


def _backward(hidden: Tensor, rows: Tensor, pairs: TargetLogprobs, slopes: Tensor) -> None:
    """From d loss / d logprob per pair to the lora's gradient; pair u was predicted from row `rows[u]` of `hidden`."""
    if not slopes.any():
        return
    part = pairs.hidden_gradient(slopes)
    if hidden.requires_grad:  # not so where the unembedding alone is trained
        hidden.backward(torch.zeros_like(hidden).index_add_(0, rows, part))
