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

On a GPU rates are measured with 8192 rows instead of 512.

Attention, norms, sampling, the loss and the optimizer are not in it: so it is never reached, but it cannot be wrong in
the other direction. All sides are compared with the same limit, also those that compute each prompt G times.

Two figures of a side say how well a device is used, whatever the side leaves out or does twice: the model's FLOPs of a
training step (with attention, every token of every sequence counted) over its time; and the bytes that decoding has to
read (weights, keys and values, at every step) over the whole time of sampling.

Pure: knows the arithmetic, not how rates are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mint.bench.shapes import Device, DType, GrpoShape

WIDE_ROWS: dict[Device, int] = {"cpu": 512, "cuda": 8192}
"""Rows of the products in prefill and training."""

DATASHEET_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 products per second of some GPUs, by a part of their name: what utilisation is usually quoted of."""

DECODE_ROWS = 64
"""At least so many rows are assumed in a decoding step: below, only reading the weights counts."""

WEIGHT_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


def decode_rows(shape: GrpoShape) -> int:
    """Rows at which the rates for decoding are measured."""
    return max(shape.sequences, DECODE_ROWS)


def sampling_seconds(shape: GrpoShape, rates: Mapping[str, Any], dtype: DType, device: Device = "cpu") -> float:
    """The least time for all samples of one step.

    `rates` has `block` and `unembedding`, each rows -> FLOP/s, and `read`, bytes/s.
    """
    model, rows = shape.model, str(decode_rows(shape))
    lora = shape.rank * model.lora_parameters_per_rank
    block, unembedding = 2 * (model.block_parameters + lora), 2 * model.unembedding_parameters
    prefill_s = shape.prompts * shape.prompt_tokens * block / rates["block"][str(WIDE_ROWS[device])]
    prefill_s += shape.prompts * unembedding / rates["unembedding"][rows]
    arithmetic_s = shape.sequences * (block / rates["block"][rows] + unembedding / rates["unembedding"][rows])
    weights = model.block_parameters + model.unembedding_parameters
    reading_s = WEIGHT_BYTES[dtype] * weights / rates["read"]
    return prefill_s + (shape.max_tokens - 1) * max(arithmetic_s, reading_s)


def training_seconds(shape: GrpoShape, rates: Mapping[str, Any], device: Device = "cpu") -> float:
    """The least time for the gradient of one step's sequences; `rates` as for `sampling_seconds`."""
    model = shape.model
    lora = shape.rank * model.lora_parameters_per_rank
    computed = shape.prompts * shape.prompt_tokens + shape.sequences * (shape.max_tokens - 1)
    blocks_s = computed * (4 * model.block_parameters + 6 * lora) / rates["block"][str(WIDE_ROWS[device])]
    targets = shape.sequences * shape.max_tokens
    return blocks_s + targets * 4 * model.unembedding_parameters / rates["unembedding"][str(WIDE_ROWS[device])]


def training_flops(shape: GrpoShape) -> float:
    """Of forward and backward: 4 a frozen parameter and token, 6 a lora's, and causal attention."""
    model = shape.model
    length = shape.prompt_tokens + shape.max_tokens
    dense = 4 * model.block_parameters + 6 * shape.rank * model.lora_parameters_per_rank
    # Scores and mixed values of each pair of tokens, two FLOPs each, and twice as many in the backward.
    attention = 12 * model.layers * model.heads * model.head_size * (length + 1) / 2
    unembedding = 4 * model.unembedding_parameters * shape.max_tokens
    return shape.sequences * (length * (dense + attention) + unembedding)


def decode_bytes(shape: GrpoShape, dtype: DType) -> float:
    """What the steps after the prefill read at least, each sequence its own keys and values."""
    model, steps = shape.model, shape.max_tokens - 1
    weights = model.block_parameters + model.unembedding_parameters + shape.rank * model.lora_parameters_per_rank
    kept = 2 * model.layers * model.kv_heads * model.head_size
    positions = steps * shape.prompt_tokens + steps * (steps + 1) // 2
    return float(WEIGHT_BYTES[dtype] * (steps * weights + shape.sequences * positions * kept))


def datasheet_flops(device_name: str) -> float | None:
    """What the maker says of a GPU, if it is known here."""
    return next((flops for part, flops in DATASHEET_FLOPS.items() if part in device_name), None)
