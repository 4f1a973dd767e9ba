"""How many rows a training pass may run at once.

The rows are a function of the base's shape, its dtype and the memory of the device, because the way in which a request
is cut into micro-batches decides the bits of its result. What is free of that memory, and the number of processes, do
not enter. The rows are powers of two, so that devices of about one size cut a request alike. Where memory runs out, the
next size to try is a function of the request: whoever decides it finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mint.engine.model.config import DecoderConfig
from mint.engine.model.operations import Operations
from mint.engine.protocol import MicroBatching

MIN_ROWS = 256
"""Fewer would waste the processor: each micro-batch reads all of the base's weights twice."""

UNKNOWN_ACTIVATION_BYTES = 768 << 20
"""The budget of activations where the system does not tell how much memory it has."""


def activation_budget(operations: Operations, *, memory_bytes: int | None, base_bytes: int) -> int:
    """Bytes that a training forward may keep for its backward, on a device with `memory_bytes` beside a base of
    `base_bytes`."""
    if memory_bytes is None:
        return UNKNOWN_ACTIVATION_BYTES
    return max(0, memory_bytes - base_bytes) // operations.activation_share


def fit_rows(row_bytes: int, budget: int, *, least: int, most: int) -> int:
    """The rows of the largest micro-batches that fit into a `budget` of bytes: a power of two from `least` to `most`,
    which are powers of two."""
    fitting = min(most, budget // row_bytes)
    return max(least, 1 << max(0, fitting.bit_length() - 1))


def fit_recompute(rows: int, row_bytes: int, budget: int) -> bool | None:
    """`MicroBatching.recompute`, which changes no bit: True where a `budget` of bytes does not hold so many rows."""
    return True if rows * row_bytes > budget else None


def smaller(attempt: MicroBatching, lengths: Sequence[int], *, with_gradient: bool) -> MicroBatching | None:
    """Returns the next attempt after memory did not suffice for `attempt`; None if no attempt needs less memory.

    `lengths` are those of the sequences, in tokens.
    """
    if with_gradient and attempt.recompute is not True:
        return replace(attempt, recompute=True)
    if len(lengths) == 1 or attempt.rows < max(lengths):  # the longest was alone
        return None
    return replace(attempt, rows=min(attempt.rows, sum(lengths)) // 2)


def bytes_per_row(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that all layers together keep of one row for the backward."""
    return sum(layer_row_bytes(config, layer, dtype) for layer in range(config.num_hidden_layers))


def layer_row_bytes(config: DecoderConfig, layer: int, dtype: torch.dtype) -> int:
    """Bytes that one layer keeps of one row for the backward."""
    hidden = config.hidden_size
    total = 8 * hidden + _mixer_bytes(config, layer, dtype)  # with the inputs of both blocks in float32
    # The results of attention and MLP, where they are normed.
    norms = config.family.norms
    total += 4 * hidden * ((norms.attention_output is not None) + (norms.mlp_output is not None))
    experts = config.experts_of(layer)
    if experts is None:
        return total + dtype.itemsize * 2 * config.intermediate_size
    # For each chosen expert a copy of the input, the wide product, the inner values and the result, all in float32.
    total += 4 * hidden + 4 * experts.per_token * (2 * hidden + 3 * experts.intermediate_size)
    if experts.shared_intermediate_size is not None:
        total += 4 * hidden + dtype.itemsize * 2 * experts.shared_intermediate_size
    return total


def input_bytes(config: DecoderConfig) -> int:
    """Bytes that all layers together keep of one row where activations are computed again: their inputs."""
    return 4 * config.hidden_size * config.num_hidden_layers


def _mixer_bytes(config: DecoderConfig, layer: int, dtype: torch.dtype) -> int:
    """The bytes of a row's activations in the attention, or the delta net, of a layer."""
    net = config.delta_net_of(layer)
    query, key_value = config.query_size, 2 * config.key_value_size
    if net is not None:  # the products with its input, what its heads read, and the input of its output
        return 4 * (sum(net.parts) + net.value_size) + dtype.itemsize * net.value_size
    total = dtype.itemsize * (query + key_value + query)  # the heads; the attended values
    if config.family.head_norms:  # the query/key/value product
        total += dtype.itemsize * (query + key_value)
    if config.family.output_gates:  # the product with the gates in float32, and the gated values
        total += 4 * (2 * query + key_value) + 4 * query
    return total
