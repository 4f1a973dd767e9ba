"""The operations of a decoder on a GPU: torch's, with limits of a GPU's memory, and FlexAttention where it fits.

Letters as in `model.operations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cuda.attention import FlexPackedAttention
from mint.engine.cuda.graph_step import StepKernels
from mint.engine.cuda.grouped_experts import GroupedMixtureOfExperts
from mint.engine.model.config import Activation, DecoderConfig, Windows
from mint.engine.model.linear import Float32Product, LoraLinears, Matrix, add_residual
from mint.engine.model.operations import Attention, FeedForward
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.model.weights import MixtureWeights
from mint.engine.packing import AttentionBlock
from mint.engine.quantized.quantized_matrix import Widen, widen_by_torch


class TrainingPasses(Protocol):
    """Fused operations between the products; `FusedPasses` says the shapes."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm, and 1 / rms(x)."""
        ...

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """Its gradient for x."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) · up`."""
        ...

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Its gradient for gate_up."""
        ...

    def finish_heads(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        eps: float,
        rotated_heads: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Heads that attend, and 1 / rms of those that are normed."""
        ...

    def finish_heads_backward(
        self,
        grad: Tensor,
        qkv: Tensor | None,
        inverse: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        rotated_heads: int,
    ) -> Tensor:
        """Its gradient for qkv, which may be missing without `norms`."""
        ...


CUBLAS_ROWS = 2
"""A single row would be summed in another order."""

MAX_ROWS = 16384
"""Rows of a micro-batch where memory sets no bound: more rows share the time that it takes to start a layer's many
small operations."""

MAX_SAMPLING_ROWS, MAX_PREFILL_TOKENS = 1024, 8192
"""The defaults of vLLM on cards with 80 GB: more does not make a step cheaper for each token."""


LOGITS_SHARE = 16
"""The logits that exist at once may take one part in so many of the GPU's memory, but no more than
`TorchOperations.logits_at_once`, 1 GiB: products of more rows are no faster."""


class CudaOperations(TorchOperations):
    """By torch's own libraries."""

    max_rows = MAX_ROWS
    activation_share = 4
    max_sampling_rows = MAX_SAMPLING_ROWS
    max_prefill_tokens = MAX_PREFILL_TOKENS

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        activation: Activation = "silu",
        *,
        memory_bytes: int | None = None,
        expert_kernels: StepKernels | None = None,
        fused: TrainingPasses | None = None,
        wide_products: bool = True,
        widen: Widen = widen_by_torch,
    ) -> None:
        """`memory_bytes` are those of a GPU that is not here, to plan for it. With `expert_kernels`, the experts of a
        mixture are computed together. `fused` passes are taken where they compute the activation. `wide_products`:
        whether products of bfloat16 may have float32 as results, for logits. `widen` as in
        `TorchOperations`."""
        super().__init__(dtype, device, activation, widen=widen)
        self._expert_kernels = expert_kernels
        self._wide_products = wide_products
        self._fused = fused
        self._fused_swiglu = fused if activation == "silu" else None
        total = memory_bytes or torch.cuda.get_device_properties(device).total_memory
        self.logits_at_once = min(TorchOperations.logits_at_once, total // LOGITS_SHARE // 4)

    @override
    def mixture(
        self, weights: MixtureWeights, norm: Tensor, layer: int, config: DecoderConfig, loras: LoraLinears
    ) -> FeedForward:
        mixture, kernels = config.experts_of(layer), self._expert_kernels
        if mixture is None or kernels is None or not GroupedMixtureOfExperts.fits(config, weights):
            return super().mixture(weights, norm, layer, config, loras)
        return GroupedMixtureOfExperts(self, kernels, weights, norm, layer, config, mixture, loras)

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (self._fused or super()).rms_norm(x, weight, eps, residual)

    @override
    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        return (self._fused or super()).rms_norm_backward(grad, x, inverse, weight, residual)

    @override
    def swiglu(self, gate_up: Tensor) -> Tensor:
        return (self._fused_swiglu or super()).swiglu(gate_up)

    @override
    def swiglu_again(self, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
        return (
            super().swiglu_again(gate_up) if self._fused_swiglu is None else (self._fused_swiglu.swiglu(gate_up), None)
        )

    @override
    def swiglu_backward(self, grad: Tensor, gate_up: Tensor, active_gate: Tensor | None = None) -> Tensor:
        if self._fused_swiglu is None:
            return super().swiglu_backward(grad, gate_up, active_gate)
        return self._fused_swiglu.swiglu_backward(grad, gate_up)

    @override
    def finish_heads(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        eps: float,
        rotated_heads: int,
        joint_heads: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        if self._fused is None or not _rotates_whole_heads(qkv, cos, joint_heads):
            return super().finish_heads(
                qkv, bias, norms, cos, sin, eps=eps, rotated_heads=rotated_heads, joint_heads=joint_heads
            )
        return self._fused.finish_heads(
            qkv, bias, norms, cos, sin, eps=eps, rotated_heads=rotated_heads, dtype=self.dtype
        )

    @override
    def finish_heads_backward(
        self,
        grad: Tensor,
        qkv: Tensor | None,
        inverse: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        rotated_heads: int,
        joint_heads: int = 0,
    ) -> Tensor:
        if self._fused is None or not _rotates_whole_heads(grad, cos, joint_heads):
            return super().finish_heads_backward(
                grad, qkv, inverse, norms, cos, sin, rotated_heads=rotated_heads, joint_heads=joint_heads
            )
        return self._fused.finish_heads_backward(grad, qkv, inverse, norms, cos, sin, rotated_heads=rotated_heads)

    @override
    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    @override
    def unembedding(self, weight: Tensor) -> Matrix:
        if weight.dtype == torch.float32 or not self._wide_products:
            return super().unembedding(weight)
        return WideUnembedding(weight)


def _rotates_whole_heads(qkv: Tensor, cos: Tensor, joint_heads: int) -> bool:
    """Whether the fused pass is for these heads: all numbers of a head are rotated, and each head is normed alone."""
    return not joint_heads and 2 * cos.shape[-1] == qkv.shape[-1]


class FlexOperations(CudaOperations):
    """Packed rows attend by FlexAttention."""

    attention_name = "flex"

    @override
    def packed_attention(
        self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, windows: Windows
    ) -> Attention:
        return FlexPackedAttention(blocks, query_heads, kv_heads, self.device, windows)


class WideUnembedding(Float32Product):
    """A bfloat16 matrix whose products are summed and returned in float32; rows are rounded to bfloat16."""

    @property
    @override
    def min_rows(self) -> int:
        return CUBLAS_ROWS

    @override
    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return add_residual(torch.mm(x.to(self.weight.dtype), self.weight.t(), out_dtype=torch.float32), residual)
