"""How many rows a training pass may run at once.

The rows are a function of the base's shape, dtype and the device alone, because the way in which a request is cut into
micro-batches decides the bits of its result. Neither free memory nor the number of processes enters. Where memory runs
out, the next size to try is a function of the request: whoever decides it finds the same.
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


def rows_at_once(config: DecoderConfig, operations: Operations) -> int:
    """Rows of a micro-batch."""
    fitting = operations.activation_bytes // bytes_per_row(config, operations.dtype)
    return max(MIN_ROWS, min(operations.max_rows, fitting))


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
    hidden = config.hidden_size
    total = 0
    for layer in range(config.num_hidden_layers):
        total += 8 * hidden + _mixer_bytes(config, layer, dtype)  # with the inputs of both blocks in float32
        # The results of attention and MLP, where they are normed.
        norms = config.family.norms
        total += 4 * hidden * ((norms.attention_output is not None) + (norms.mlp_output is not None))
        experts = config.experts_of(layer)
        if experts is None:
            total += dtype.itemsize * 2 * config.intermediate_size
        else:
            # For each chosen expert a copy of the input, the wide product, the inner values and the result, all in
            # float32.
            total += 4 * hidden + 4 * experts.per_token * (2 * hidden + 3 * experts.intermediate_size)
            if experts.shared_intermediate_size is not None:
                total += 4 * hidden + dtype.itemsize * 2 * experts.shared_intermediate_size
    return total


def _mixer_bytes(config: DecoderConfig, layer: int, dtype: torch.dtype) -> int:
    """The bytes of a row's activations in the attention, or the delta net, of a layer."""
    net = config.delta_net_of(layer)
    query, key_value = config.query_size, 2 * config.key_value_size
    if net is not None:  # the products with its input, what its heads read, and the input of its output
        return 4 * (sum(net.parts) + net.value_size) + dtype.itemsize * net.value_size
    # The query/key/value product and the heads; the attended values.
    total = dtype.itemsize * (2 * (query + key_value) + query)
    if config.family.output_gates:  # the product with the gates in float32, and the gated values
        total += 4 * (2 * query + key_value) + 4 * query
    return total
