"""The most tokens per second that a machine could sample and train, computed from its measured rates.

A step has P prompts of p tokens with G samples of n tokens each, so B = P·G sequences. N is the number of parameters of
the blocks' linear layers, U of the unembedding, L of the lora; w is the bytes of one weight. A rate is what a plain
matrix product with the model's own matrices reached, in FLOP/s: r(M) for the blocks with M rows, u(M) for the
unembedding. β is the read bandwidth of memory in bytes/s.

Sampling: each prompt is prefilled once for its group; its last position gives the first token, and n − 1 decode steps
of B rows give the others. A decode step can be no faster than its arithmetic, nor than reading all weights once:

    prefill = P·p·2(N + L) / r(512) + P·2U / u(D)
    step    = max( B·2(N + L) / r(D) + B·2U / u(D),  w(N + U) / β )          D = max(B, 64)
    limit   = B·n / (prefill + (n − 1)·step)

Training: forward and backward through frozen weights cost 4 FLOP a parameter and token, through the lora's 6. The
prompt of a group is computed once, and the unembedding at target positions only:

    seconds = (P·p + B(n − 1))·(4N + 6L) / r(512) + B·n·4U / u(512)
    limit   = B(p + n) / seconds

On a GPU, rates are measured with 8192 rows instead of 512. Attention, norms, the choice of tokens, the loss and the
optimizer are left out. So the limit is never reached, but it is never too low.

Pure arithmetic; `machine_rates` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from mint.models.random_base import DType, ModelShape

Device = Literal["cpu", "cuda"]

WIDE_ROWS: dict[Device, int] = {"cpu": 512, "cuda": 8192}
"""Rows of the products in prefill and training."""

DECODE_ROWS = 64
"""The fewest rows for which decode rates are measured: with fewer, reading the weights is the limit."""

WEIGHT_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


class Rates(TypedDict):
    """Measured rates. `block` and `unembedding`: rows, as a string → FLOP/s. `read`: bytes/s."""

    block: dict[str, float]
    unembedding: dict[str, float]
    read: float


@dataclass(frozen=True)
class StepShape:
    """One step of sampling or training: `prompts` x `group` sequences of `prompt_tokens` + `max_tokens` tokens."""

    model: ModelShape
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 48
    max_tokens: int = 32
    rank: int = 16

    @property
    def sequences(self) -> int:
        """Sequences sampled and trained per step."""
        return self.prompts * self.group

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled per step; no sequence stops early."""
        return self.sequences * self.max_tokens

    @property
    def trained_tokens(self) -> int:
        """Tokens of all sequences, each prompt counted once for every sample of its group."""
        return self.sequences * (self.prompt_tokens + self.max_tokens)


def decode_rows(shape: StepShape) -> int:
    """Rows for which the decode rates are measured."""
    return max(shape.sequences, DECODE_ROWS)


def measured_rows(shape: StepShape, device: Device) -> list[int]:
    """All numbers of rows for which `Rates` must have values."""
    return sorted({decode_rows(shape), WIDE_ROWS[device]})


def sampling_seconds(shape: StepShape, rates: Rates, dtype: DType, device: Device = "cpu") -> float:
    """The least time for all samples of one step."""
    model = shape.model
    rows = str(decode_rows(shape))
    lora = shape.rank * model.lora_parameters_per_rank
    block, unembedding = 2 * (model.block_parameters + lora), 2 * model.unembedding_parameters
    prefill_s = shape.prompts * shape.prompt_tokens * block / rates["block"][str(WIDE_ROWS[device])]
    prefill_s += shape.prompts * unembedding / rates["unembedding"][rows]
    arithmetic_s = shape.sequences * (block / rates["block"][rows] + unembedding / rates["unembedding"][rows])
    weights = model.block_parameters + model.unembedding_parameters
    reading_s = WEIGHT_BYTES[dtype] * weights / rates["read"]
    return prefill_s + (shape.max_tokens - 1) * max(arithmetic_s, reading_s)


def training_seconds(shape: StepShape, rates: Rates, device: Device = "cpu") -> float:
    """The least time for the gradient of one step's sequences."""
    model = shape.model
    rows = str(WIDE_ROWS[device])
    lora = shape.rank * model.lora_parameters_per_rank
    computed = shape.prompts * shape.prompt_tokens + shape.sequences * (shape.max_tokens - 1)
    blocks_s = computed * (4 * model.block_parameters + 6 * lora) / rates["block"][rows]
    return blocks_s + shape.sampled_tokens * 4 * model.unembedding_parameters / rates["unembedding"][rows]
