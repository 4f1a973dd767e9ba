"""The operations of a decoder on a GPU with the same bits for a row in any batch: the batch-invariant mode.

Products of the base, loras, attention without a gradient and norms are kernels of which no one reads the number of
rows (`cuda/invariant_kernels.py`, `cuda/fused_passes.py`). What is left of torch treats each number alone. With a
gradient, the forward products are the same, and attention is that of other GPU operations: a gradient is a sum over the
batch anyway.

Letters: T rows · I inputs · O outputs · H all heads · D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cuda.attention import FlexPackedAttention, list_seen
from mint.engine.cuda.operations import CudaOperations, TrainingPasses
from mint.engine.lora import SiteWeights
from mint.engine.model.config import NO_WINDOWS, Activation, Windows
from mint.engine.model.functions import head_inverse_rms
from mint.engine.model.linear import DenseMatrix, Matrix, add_residual
from mint.engine.model.operations import Attention
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.packing import AttentionBlock
from mint.engine.transfers import upload


class RowKernels(Protocol):
    """Products and attention of fixed tiles; `InvariantKernels` says the shapes."""

    def product(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`x @ weight.T` in `dtype`."""
        ...

    def attend_packed(self, heads: Tensor, seen: Tensor, results: slice, query_heads: int) -> Tensor:
        """Attended values of packed rows."""
        ...


class InvariantOperations(CudaOperations):
    """`CudaOperations` for models without experts, sinks, windows and quantized matrices."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        activation: Activation,
        kernels: RowKernels,
        fused: TrainingPasses,
        *,
        trained_attention: type[FlexPackedAttention] | type[PackedAttention],
        memory_bytes: int | None = None,
    ) -> None:
        """`trained_attention` computes where a gradient is needed; `memory_bytes` as in `CudaOperations`."""
        super().__init__(dtype, device, activation, memory_bytes=memory_bytes, fused=fused)
        self._kernels = kernels
        self._norms = fused
        self._trained_attention = trained_attention
        self.attention_name = "batch-invariant"

    @override
    def matrix(self, weight: Tensor) -> Matrix:
        return InvariantMatrix(weight, self._kernels, weight.dtype)

    @override
    def unembedding(self, weight: Tensor) -> Matrix:
        return InvariantMatrix(weight, self._kernels, torch.float32)

    @override
    def add_lora(self, out: Tensor, x: Tensor, lora: SiteWeights, scale: float) -> None:
        down = self._kernels.product(x.float(), lora.a, torch.float32)
        for columns, own, b in lora.parts():
            out[:, own].add_(self._kernels.product(down[:, columns], b, torch.float32), alpha=scale)

    @override
    def head_inverse_rms(self, heads: Tensor, eps: float, joint: int) -> Tensor:
        return head_inverse_rms(heads, eps, joint, self._inverse_rms)

    def _inverse_rms(self, x: Tensor, eps: float) -> Tensor:
        """1 / rms(x) over the last dimension, which stays with size 1."""
        width = x.shape[-1]
        rows = x.reshape(-1, width).float()
        return self._norms.rms_norm(rows, rows.new_ones(width), eps)[1].view(*x.shape[:-1], 1)

    @override
    def packed_attention(
        self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, windows: Windows
    ) -> Attention:
        if any(windows.values()):
            raise ValueError("batch-invariant attention is not for layers with windows")
        return InvariantPackedAttention(
            blocks, query_heads, kv_heads, self.device, self._kernels, self._trained_attention
        )


class InvariantMatrix(DenseMatrix):
    """A matrix whose products with a row do not depend on other rows; they are rounded to `rounded`."""

    def __init__(self, weight: Tensor, kernels: RowKernels, rounded: torch.dtype) -> None:
        super().__init__(weight)
        self._kernels = kernels
        self._rounded = rounded

    @property
    @override
    def min_rows(self) -> int:
        return 1

    @override
    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        found = self._kernels.product(x.to(self.weight.dtype), self.weight, self._rounded)
        return add_residual(found.float(), residual)


class InvariantPackedAttention:
    """Causal attention of packed rows; callable as the decoder's `Attention`."""

    def __init__(
        self,
        blocks: Sequence[AttentionBlock],
        query_heads: int,
        kv_heads: int,
        device: torch.device,
        kernels: RowKernels,
        trained: type[FlexPackedAttention] | type[PackedAttention],
    ) -> None:
        """The rows that have results are consecutive."""
        self._blocks = blocks
        self._heads = query_heads, kv_heads
        self._device = device
        self._kernels = kernels
        self._trained = trained
        first = min(int(block.rows.min()) for block in blocks)
        self._results = slice(first, max(int(block.rows.max()) for block in blocks) + 1)

    @cached_property
    def _with_gradient(self) -> Attention:
        return self._trained(self._blocks, *self._heads, self._device, NO_WINDOWS)

    @cached_property
    def _seen(self) -> Tensor:
        seen = list_seen(self._blocks, self._results.stop)
        return torch.stack([part.int() for part in upload(self._device, seen.own, seen.first, seen.stop)])

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attended values [T, query heads · D] of `heads` [T, H, D].

        Raises:
            ValueError: there are sinks.
        """
        if sinks is not None:
            raise ValueError("batch-invariant attention is not for heads with sinks")
        if torch.is_grad_enabled() and heads.requires_grad:
            return self._with_gradient(layer, heads, sinks)
        return self._kernels.attend_packed(heads, self._seen, self._results, self._heads[0])
