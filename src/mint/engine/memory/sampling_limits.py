"""How many sequences decode together, and how many prompt tokens a step of sampling computes.

Both follow from the memory that is free once a base is loaded. Neither decides a bit of a result on a CPU. On a GPU the
last bits of a row may depend on the rows beside it in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mint.engine.model.config import DecoderConfig
from mint.engine.model.operations import Operations

LOGITS_SHARE, PROMPT_SHARE = 8, 16
"""Logits of a step may take one part in so many of the memory that is free, and the intermediate results of its prompts
one part in so many. With the KV cache (a quarter) and models in training (a half) that leaves a sixteenth."""

BYTES_OF_LOGIT = 20
"""A logit in float32, and what sorting a row takes for top-p: its value, its place (int64) and its probability."""

MIN_ROWS = 16
"""Sequences of two groups of eight. Fewer would leave a device idle: a step reads all weights, whatever the rows."""

MIN_PREFILL_TOKENS = 256
"""Fewer prompt tokens at once would waste the device in the same way."""

BESIDE = 4
"""A step with sequences to decode, which wait for it, computes one part in so many prompt tokens."""

SPARE = 4
"""Rows beyond the limit, one part in so many of it, for scopes that have less than their share. They are filled only as
long as others hold more than theirs."""


@dataclass(frozen=True)
class SamplingLimits:
    """`rows`: sequences that decode together. `prefill_tokens`: prompt tokens of a step without sequences to decode."""

    rows: int
    prefill_tokens: int

    @property
    def prefill_tokens_beside(self) -> int:
        """Prompt tokens of a step with sequences to decode."""
        return max(1, self.prefill_tokens // BESIDE)

    @property
    def spare_rows(self) -> int:
        """Rows beyond the limit for scopes with less than their share."""
        return self.rows // SPARE


def fit_limits(
    vocabulary: int, prompt_token_bytes: int, operations: Operations, *, free_bytes: int | None
) -> SamplingLimits:
    """The limits for a model with so many logits a row. `prompt_token_bytes`: intermediate results of a prompt token.

    Where it is unknown what is free, memory sets no bound.
    """
    if free_bytes is None:
        return SamplingLimits(operations.max_sampling_rows, operations.max_prefill_tokens)
    rows = free_bytes // LOGITS_SHARE // (BYTES_OF_LOGIT * vocabulary) * SPARE // (SPARE + 1)
    tokens = free_bytes // PROMPT_SHARE // prompt_token_bytes
    tokens = 1 << max(0, tokens.bit_length() - 1)
    return SamplingLimits(
        max(MIN_ROWS, min(operations.max_sampling_rows, rows // 8 * 8)),
        max(MIN_PREFILL_TOKENS, min(operations.max_prefill_tokens, tokens)),
    )


def prompt_token_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of the intermediate results of one prompt token in the widest layer, and of its last hidden state."""
    hidden = config.hidden_size
    widest = 0
    for layer in range(config.num_hidden_layers):
        net, experts = config.delta_net_of(layer), config.experts_of(layer)
        if net is not None:  # the product with the input, twice: as it is and after the convolution
            mixer = 2 * 4 * (sum(net.parts) + net.value_size)
        else:  # the product in float32, the heads, the attended values
            heads = config.query_size + 2 * config.key_value_size
            mixer = (4 + dtype.itemsize) * heads + dtype.itemsize * config.query_size
        if experts is None:  # gate and up in float32, and their product
            mlp = 3 * 4 * config.intermediate_size
        else:
            mlp = 4 * experts.per_token * (2 * hidden + 3 * experts.intermediate_size)
            mlp += 3 * 4 * (experts.shared_intermediate_size or 0)
        widest = max(widest, mixer, mlp)
    return widest + 5 * 4 * hidden  # the rows before and after attention, normed, and the result twice
