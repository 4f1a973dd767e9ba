"""The most tokens per second that a machine could sample and train, computed from its measured rates.

A step has P prompts of p tokens with G samples of n tokens each, so B = P·G sequences. N is the number of parameters of
the blocks' linear layers, U of the unembedding, L of the lora; w is the bytes of one weight. A rate is the fastest that
any product with the model's own matrices ran, by any of the libraries at hand, in FLOP/s: r(M) with M rows, and r*, the
fastest with many rows (512 or 2048; on a GPU 8192). β is the read bandwidth of memory in bytes/s.

Sampling: each prompt is prefilled once for its group; its last position gives the first token, and n - 1 decode steps
of B rows give the others. A decode step can be no faster than its arithmetic, nor than reading all weights once. A lora
costs nothing, for it can be merged into the weights:

    prefill = (P·p·2N + P·2U) / r*
    step    = max( B·2(N + U) / r(D),  w(N + U) / β )          D = max(B, 64)
    limit   = B·n / (prefill + (n - 1)·step)

Training: forward and backward through frozen weights cost 4 FLOP a parameter and row. A lora costs 4 as well, where it
is merged for the forward; its gradient is four products of rank r. The prompt of a group is computed once, and the
unembedding at target positions only. Of the last block, rows without a target need the keys and values alone (N' and L'
are the other parameters); the input of the first block (N" its query, key and value) needs no gradient:

    rows    = P·p + B(n - 1),  of which P(p - 1) have no target
    FLOP    = rows·(4N + 4L - 2N") - P(p - 1)·4(N' + L') + B·n·4U
    limit   = B(p + n) / (FLOP / r*)

Attention, norms, the choice of tokens, the loss and the optimizer are left out. So nothing reaches the limit. What a
CPU takes for them was measured to grow with the numbers that the linear layers make, O for a row of the blocks and V
for a target, where o(S) and o(T) are seconds of one thread for each of them:

    expected = limit + o·(rows·O + B·n·V) / threads

Pure arithmetic; `machine_rates` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from mint.models.random_base import DType, ModelShape

Device = Literal["cpu", "cuda"]

WIDE_ROWS: dict[Device, tuple[int, ...]] = {"cpu": (512, 2048), "cuda": (8192,)}
"""Rows of the products in prefill and training; the fastest counts."""

DECODE_ROWS = 64
"""The fewest rows for which decode rates are measured: with fewer, reading the weights is the limit."""

WEIGHT_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


SAMPLING_REST_S, TRAINING_REST_S = 4e-9, 5.5e-9
"""o(S) and o(T), of one thread of an AMD EPYC, so that runs of two shapes are met: benchmarks/RESULTS.md has them."""

KEY_VALUE = frozenset({"self_attn.k_proj", "self_attn.v_proj"})
PROJECTIONS = KEY_VALUE | {"self_attn.q_proj"}


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

    @property
    def computed_rows(self) -> int:
        """Rows of a training step in which each prompt is computed once; nothing follows the last token of a sample."""
        return self.prompts * self.prompt_tokens + self.sequences * (self.max_tokens - 1)


def decode_rows(shape: StepShape) -> int:
    """Rows for which the decode rates are measured."""
    return max(shape.sequences, DECODE_ROWS)


def measured_rows(shape: StepShape, device: Device) -> list[int]:
    """All numbers of rows for which `Rates` must have values."""
    return sorted({decode_rows(shape), *WIDE_ROWS[device]})


def widest_rate(rates: Rates, device: Device = "cpu") -> float:
    """The fastest of all products with many rows, in FLOP/s."""
    return max(rates[kind][str(rows)] for kind in ("block", "unembedding") for rows in WIDE_ROWS[device])


def sampling_seconds(shape: StepShape, rates: Rates, dtype: DType, device: Device = "cpu") -> float:
    """The least time for all samples of one step."""
    model = shape.model
    rows = str(decode_rows(shape))
    block, unembedding = 2 * model.block_parameters, 2 * model.unembedding_parameters
    prefill_s = shape.prompts * (shape.prompt_tokens * block + unembedding) / widest_rate(rates, device)
    arithmetic_s = shape.sequences * (block / rates["block"][rows] + unembedding / rates["unembedding"][rows])
    weights = model.block_parameters + model.unembedding_parameters
    reading_s = WEIGHT_BYTES[dtype] * weights / rates["read"]
    return prefill_s + (shape.max_tokens - 1) * max(arithmetic_s, reading_s)


def training_seconds(shape: StepShape, rates: Rates, device: Device = "cpu") -> float:
    """The least time for the gradient of one step's sequences."""
    return least_training_flops(shape) / widest_rate(rates, device)


def expected_sampling_seconds(shape: StepShape, rates: Rates, dtype: DType, threads: int) -> float:
    """The predicted time of all samples of one step on a CPU; the prompt of a group is computed once."""
    rows = shape.prompts * shape.prompt_tokens + shape.sequences * (shape.max_tokens - 1)
    return sampling_seconds(shape, rates, dtype) + SAMPLING_REST_S * _numbers(shape, rows) / threads


def expected_training_seconds(shape: StepShape, rates: Rates, threads: int) -> float:
    """The predicted time of the gradient of one step's sequences on a CPU."""
    return training_seconds(shape, rates) + TRAINING_REST_S * _numbers(shape, shape.computed_rows) / threads


def _numbers(shape: StepShape, rows: int) -> int:
    """The numbers that the linear layers make of `rows`, and the unembedding of the sampled tokens."""
    model = shape.model
    of_row = model.layers * sum(outputs for outputs, _ in model.linears.values())
    return rows * of_row + shape.sampled_tokens * model.vocabulary


def least_training_flops(shape: StepShape) -> float:
    """The multiplications and additions that the gradient of one step's sequences takes at least, without attention."""
    model = shape.model
    outputs_only = {name: size for name, size in model.linears.items() if name not in KEY_VALUE}
    weights = sum(outputs * inputs for outputs, inputs in outputs_only.values())
    lora = shape.rank * sum(outputs + inputs for outputs, inputs in outputs_only.values())
    first_inputs = sum(outputs * inputs for name, (outputs, inputs) in model.linears.items() if name in PROJECTIONS)
    of_row = 4 * (model.block_parameters + shape.rank * model.lora_parameters_per_rank) - 2 * first_inputs
    without_target = shape.prompts * (shape.prompt_tokens - 1)
    unembedding = shape.sampled_tokens * 4 * model.unembedding_parameters
    return shape.computed_rows * of_row - without_target * 4 * (weights + lora) + unembedding
