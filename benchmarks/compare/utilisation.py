"""How well a device is used: the FLOPs and bytes that a step needs, whatever a side leaves out or does twice.

Of a training step the model's FLOPs are counted (with attention, every token of every sequence); of sampling the bytes
that decoding has to read (weights, keys and values, at every step), over the whole time of sampling. What a machine
could reach is in `mint.engine.machine_limits`. Pure: knows the arithmetic, not how rates are measured.
"""

from __future__ import annotations

from mint.engine.machine_limits import WEIGHT_BYTES, StepShape
from mint.models.random_base import DType

DATASHEET_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 products per second of some GPUs, by a part of their name: what utilisation is usually quoted of."""


def training_flops(shape: StepShape) -> float:
    """FLOPs of forward and backward: 4 for each frozen parameter and token, 6 for a lora's, and causal attention."""
    model = shape.model
    length = shape.prompt_tokens + shape.max_tokens
    dense = 4 * model.block_parameters + 6 * shape.rank * model.lora_parameters_per_rank
    # Scores and mixed values of each pair of tokens, two FLOPs each, and twice as many in the backward.
    attention = 12 * model.layers * model.heads * model.head_size * (length + 1) / 2
    unembedding = 4 * model.unembedding_parameters * shape.max_tokens
    return shape.sequences * (length * (dense + attention) + unembedding)


def decode_bytes(shape: StepShape, dtype: DType) -> float:
    """Bytes that the decode steps read at least: the weights once a step, and each sequence's own keys and values."""
    model, steps = shape.model, shape.max_tokens - 1
    weights = model.block_parameters + model.unembedding_parameters + shape.rank * model.lora_parameters_per_rank
    kept = 2 * model.layers * model.kv_heads * model.head_size
    positions = steps * shape.prompt_tokens + steps * (steps + 1) // 2
    return float(WEIGHT_BYTES[dtype] * (steps * weights + shape.sequences * positions * kept))


def datasheet_flops(device_name: str) -> float | None:
    """The FLOP/s of a GPU's data sheet, or None."""
    return next((flops for part, flops in DATASHEET_FLOPS.items() if part in device_name), None)
