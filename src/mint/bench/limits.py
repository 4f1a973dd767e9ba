"""What this machine could reach at most: tokens per second of sampling and of training, from measured rates.

Let P prompts of p tokens have G samples of n tokens each, and B = P·G. N is the number of parameters of the blocks'
linear layers, U of the unembedding, L of the lora, w the bytes of a weight. A rate is what a plain product with the
shape's own matrices reached, in FLOP/s: r(M) in the blocks with M rows, u(M) in the unembedding. β is the read
bandwidth in bytes/s.

Sampling: every prompt is prefilled once for its group; its last row gives the first token, and n − 1 steps of B rows
the others. A step can be no faster than its arithmetic, nor than reading all weights once:

    prefill = P·p·2(N + L) / r(512) + P·2U / u(D)
    step    = max( B·2(N + L) / r(D) + B·2U / u(D),  w(N + U) / β )          D = max(B, 64)
    limit   = B·n / (prefill + (n − 1)·step)

Training: forward and backward through frozen weights are 4 FLOP a parameter and token, through the lora's 6. A group's
prompt is computed once, and the unembedding at target positions only:

    seconds = (P·p + B(n − 1))·(4N + 6L) / r(512) + B·n·4U / u(512)
    limit   = B(p + n) / seconds

Attention, norms, sampling, the loss and the optimizer are not in it: so it is never reached, but it cannot be wrong in
the other direction. All sides are compared with the same limit, also those that compute each prompt G times.

Pure: knows the arithmetic, not how rates are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mint.bench.shapes import DType, GrpoShape

WIDE_ROWS = 512
"""Rows of the products in prefill and training."""

DECODE_ROWS = 64
"""At least so many rows are assumed in a decoding step: below, only reading the weights counts."""

WEIGHT_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


def decode_rows(shape: GrpoShape) -> int:
    """Rows at which the rates for decoding are measured."""
    return max(shape.sequences, DECODE_ROWS)


def sampling_seconds(shape: GrpoShape, rates: Mapping[str, Any], dtype: DType) -> float:
    """The least time for all samples of one step.

    `rates` has `block` and `unembedding`, each rows -> FLOP/s, and `read`, bytes/s.
    """
    model, rows = shape.model, str(decode_rows(shape))
    lora = shape.rank * model.lora_parameters_per_rank
    block, unembedding = 2 * (model.block_parameters + lora), 2 * model.unembedding_parameters
    prefill_s = shape.prompts * shape.prompt_tokens * block / rates["block"][str(WIDE_ROWS)]
    prefill_s += shape.prompts * unembedding / rates["unembedding"][rows]
    arithmetic_s = shape.sequences * (block / rates["block"][rows] + unembedding / rates["unembedding"][rows])
    weights = model.block_parameters + model.unembedding_parameters
    reading_s = WEIGHT_BYTES[dtype] * weights / rates["read"]
    return prefill_s + (shape.max_tokens - 1) * max(arithmetic_s, reading_s)


def training_seconds(shape: GrpoShape, rates: Mapping[str, Any]) -> float:
    """The least time for the gradient of one step's sequences; `rates` as for `sampling_seconds`."""
    model = shape.model
    lora = shape.rank * model.lora_parameters_per_rank
    computed = shape.prompts * shape.prompt_tokens + shape.sequences * (shape.max_tokens - 1)
    blocks_s = computed * (4 * model.block_parameters + 6 * lora) / rates["block"][str(WIDE_ROWS)]
    targets = shape.sequences * shape.max_tokens
    return blocks_s + targets * 4 * model.unembedding_parameters / rates["unembedding"][str(WIDE_ROWS)]
