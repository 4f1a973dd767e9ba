"""The operations of a decoder on a GPU: torch's, with limits of a GPU's memory, and FlexAttention where it fits.

Letters as in `model.operations`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cuda.attention import FlexPackedAttention
from mint.engine.model.config import Activation, Windows
from mint.engine.model.linear import DenseMatrix, Float32Product, Matrix, add_residual
from mint.engine.model.operations import Attention
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.packing import AttentionBlock

MAX_ROWS = 16384
"""Rows of a micro-batch where memory sets no bound: more rows share the time that it takes to start a layer's many
small operations."""

ACTIVATION_SHARE = 4
"""Activations may take one part in so many of the GPU's memory."""


class CudaOperations(TorchOperations):
    """By torch's own libraries."""

    max_rows = MAX_ROWS

    def __init__(self, dtype: torch.dtype, device: torch.device, activation: Activation = "silu") -> None:
        super().__init__(dtype, device, activation)
        self.activation_bytes = torch.cuda.get_device_properties(device).total_memory // ACTIVATION_SHARE

    @override
    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    @override
    def unembedding(self, weight: Tensor) -> Matrix:
        return DenseMatrix(weight) if weight.dtype == torch.float32 else _Unembedding(weight)


class FlexOperations(CudaOperations):
    """Packed rows attend by FlexAttention."""

    attention_name = "flex"

    @override
    def packed_attention(
        self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, windows: Windows
    ) -> Attention:
        return FlexPackedAttention(blocks, query_heads, kv_heads, self.device, windows)


class _Unembedding(Float32Product):
    """A bfloat16 matrix whose products are summed and returned in float32; rows are rounded to bfloat16."""

    @override
    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return add_residual(torch.mm(x.to(self.weight.dtype), self.weight.t(), out_dtype=torch.float32), residual)
