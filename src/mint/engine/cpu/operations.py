"""The operations of a decoder on a CPU: by torch's own libraries, or by the kernels in C.

The two differ in the last bits. Letters as in `model.operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.attention import NativePackedAttention
from mint.engine.cpu.delta_net import NativeDeltaRule
from mint.engine.cpu.kernels import HEAD_DIMS, LANES, NativeKernels, RowLayout
from mint.engine.cpu.layer_parts import NativeHeads, NativeMlp, TrainedProduct
from mint.engine.cpu.loras import NativeLoras
from mint.engine.cpu.mixture_of_experts import NativeMixtureOfExperts
from mint.engine.cpu.onednn import cpu_matrix, cpu_unembedding, cpu_unembedding_copy_bytes
from mint.engine.cpu.panels import NativeProducts, PanelMatrix, panel_matrix, panel_unembedding
from mint.engine.lora import LoraWeights, SiteLora, SiteWeights
from mint.engine.memory.machine_memory import hand_back_freed_memory
from mint.engine.model.config import Activation, DecoderConfig, Windows
from mint.engine.model.delta_net import StatesOfLayers
from mint.engine.model.linear import Linear, LoraLinears, Matrix
from mint.engine.model.lora_linear import MergedLoras
from mint.engine.model.operations import Attention, DeltaRule, FeedForward, HeadSettings, TrainedHeads, TrainedMlp
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.model.weights import MixtureWeights
from mint.engine.packing import AttentionBlock, StateSpans
from mint.engine.quantized.number_formats import QuantizedWeight
from mint.engine.quantized.quantized_matrix import QuantizedMatrix
from mint.engine.quantized.quantized_panels import QuantizedPanels

SERIAL_ENTRIES = 1 << 14
"""Torch computes an elementwise operation of fewer entries than twice this on one thread (its grain is 1 << 15)."""

MLP_ENTRIES, MIN_MLP_ROWS = 1 << 18, 768
"""An MLP is trained in parts whose wide product has about so many entries (1 MB), but of at least so many rows, because
each part reads the weights again."""

CACHED_LOGITS = 1 << 19
"""Logits that stay in the processor's cache until they are used up: 2 MB."""


class CpuOperations(TorchOperations):
    """By torch's own libraries, MKL and oneDNN."""

    logits_at_once = 1 << 20
    """4 MB in float32."""

    merged_bytes = 16 << 20
    """A base whose matrices (those of its layers) are larger is not copied for every lora."""

    def __init__(self, dtype: torch.dtype, activation: Activation = "silu") -> None:
        super().__init__(dtype, torch.device("cpu"), activation)

    @override
    def release_memory(self) -> None:
        hand_back_freed_memory()

    @override
    def matrix(self, weight: Tensor) -> Matrix:
        return cpu_matrix(weight)

    @override
    def quantized_matrix(self, weight: QuantizedWeight) -> Matrix:
        return QuantizedMatrix(weight, torch.float32)  # a row's bits do not depend on the number of rows

    @override
    def unembedding(self, weight: Tensor) -> Matrix:
        return cpu_unembedding(weight)

    @override
    def unembedding_copy_bytes(self, vocabulary: int, hidden: int) -> int:
        return cpu_unembedding_copy_bytes(vocabulary, hidden, self.dtype)

    @override
    def loras(self, matrices: Mapping[str, Matrix]) -> LoraLinears:
        # Separate loras share one product of the base. Merged, each has its own products, which pays for small bases.
        # A matrix that takes less than float32 is not merged: its copies would be rounded, or take more than it does.
        sizes = [4 * matrix.outputs * matrix.inputs for matrix in matrices.values()]
        is_float32 = all(matrix.size_bytes >= size for matrix, size in zip(matrices.values(), sizes, strict=True))
        return (
            MergedLoras(self, matrices) if is_float32 and sum(sizes) <= self.merged_bytes else super().loras(matrices)
        )

    @override
    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """In parts that are too small for several threads: otherwise a row's last bits depend on the number of rows.

        The vector and the scalar code of a function such as `F.silu` differ in the last bit. On columns of a wider
        matrix, torch goes row by row. A column then always gets the same of the two codes, unless threads split a row.
        """
        if torch.get_num_threads() == 1 or x.numel() <= SERIAL_ENTRIES:
            return function(x)
        step = max(1, SERIAL_ENTRIES // x.shape[1])
        return torch.cat([function(part) for part in x.split(step)])

    @override
    def mlp_parts(self, rows: int, width: int) -> int:
        return max(1, round(rows / max(MIN_MLP_ROWS, MLP_ENTRIES // width)))

    @override
    def rows_in_cache(self, width: int) -> int:
        return max(2, CACHED_LOGITS // width)


class NativeOperations(CpuOperations):
    """By the kernels in C; by torch where a matrix does not fit them."""

    attention_name = "native"

    def __init__(self, dtype: torch.dtype, kernels: NativeKernels, activation: Activation = "silu") -> None:
        super().__init__(dtype, activation)
        self.kernels = kernels
        self.instructions, self.kernels_digest = kernels.instructions, kernels.digest
        self._rows, self._row_copies = kernels.libraries["rows"], kernels.libraries["row_copies"]
        self._draw = kernels.libraries["draw"]
        self._products = NativeProducts(kernels)
        self._loras = NativeLoras(kernels, dtype)
        self._gelu = int(activation == "gelu_tanh")
        is_clamped = activation == "clamped_swiglu"
        self._swiglu = self._rows.clamped_swiglu if is_clamped else self._rows.swiglu
        self._swiglu_backward = self._rows.clamped_swiglu_backward if is_clamped else self._rows.swiglu_backward

    @staticmethod
    def fit(config: DecoderConfig) -> bool:
        """Whether the kernels have loops for such widths."""
        widths = [config.hidden_size, config.intermediate_size, config.rotary_dim // 2]
        if config.experts is not None:
            widths.append(config.experts.shared_intermediate_size or 0)
        return config.head_dim in HEAD_DIMS and not any(width % LANES for width in widths)

    @override
    def matrix(self, weight: Tensor) -> Matrix:
        return panel_matrix(self._products, weight) or super().matrix(weight)

    @override
    def quantized_matrix(self, weight: QuantizedWeight) -> Matrix:
        if QuantizedPanels.fit(self.kernels, weight, self.dtype):
            return QuantizedPanels(self.kernels, weight, self.dtype)
        return super().quantized_matrix(weight)

    @override
    def unembedding(self, weight: Tensor) -> Matrix:
        return panel_unembedding(self._products, weight) or super().unembedding(weight)

    @override
    def unembedding_copy_bytes(self, vocabulary: int, hidden: int) -> int:
        if self._products.fit(vocabulary, hidden, self.dtype):
            return vocabulary * hidden * self.dtype.itemsize
        return super().unembedding_copy_bytes(vocabulary, hidden)

    @override
    def turned_copy_bytes(self, outputs: int, inputs: int) -> int:
        return self._products.turned_copy_bytes(outputs, inputs, self.dtype)

    def fits_lora(self, lora: SiteWeights) -> bool:
        """Whether a kernel computes the products of a lora at a site."""
        return self._loras.fits(lora)

    @override
    def published_lora(self, lora: LoraWeights) -> LoraWeights:
        """In bfloat16 if its factors are rounded to it anyway: half the memory to hold, and to read for each token."""
        if self._loras.rounds and all(map(self.fits_lora, lora.sites.values())):
            flat = self.kernels.empty_lora(lora.layout.size, torch.bfloat16)
            return LoraWeights(lora.layout, flat.copy_(lora.flat))
        return lora

    @override
    def quantized_unembedding(self, weight: QuantizedWeight) -> Matrix:
        return self.quantized_matrix(weight)

    @override
    def add_loras(self, out: Tensor, x: Tensor, loras: Sequence[SiteLora]) -> None:
        if all(self._loras.fits(own.weights) for own in loras):
            self._loras.add(out, x.contiguous(), loras)
        else:
            super().add_loras(out, x, loras)

    @override
    def lora_gradient(
        self, grad: Tensor, x: Tensor, lora: SiteWeights, scale: float, grad_x: Tensor | None
    ) -> list[Tensor]:
        if self._loras.fits(lora):
            return self._loras.gradient(grad, x, lora, scale, grad_x)
        return super().lora_gradient(grad, x, lora, scale, grad_x)

    @override
    def take_rows(self, table: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
        """E is a multiple of 16.

        Raises:
            IndexError: there is no such row.
        """
        out = torch.empty(len(rows), table.shape[1])
        self._row_copies.take_rows(
            len(rows),
            out.numel(),
            table=table,
            rows=rows,
            height=table.shape[0],
            width=table.shape[1],
            half=table.dtype == torch.bfloat16,
            scale=float(scale),
            out=out,
        )
        return out

    @override
    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        out = torch.empty(sum(map(len, parts)), parts[0].shape[1])
        start = 0
        for part in parts:
            self.copy_rows(part, out[start : start + len(part)])
            start += len(part)
        return out

    def copy_rows(self, x: Tensor, out: Tensor) -> None:
        """Copies x [T, E] to `out`, both float32."""
        self._row_copies.copy_rows(len(x), x.numel(), x=x, bytes=4 * x.shape[1], out=out)

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        inverse = x.new_empty(len(x), 1)
        self._rows.rms_norm(
            len(x),
            x.numel(),
            x=x,
            weight=weight,
            residual=residual,
            eps=eps,
            width=x.shape[1],
            out=out,
            inverse=inverse,
            layout=RowLayout.FLOATS,
        )
        return out, inverse

    @override
    def rms_norm_again(self, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._rows.rms_norm_again(
            len(x),
            x.numel(),
            x=x,
            inverse=inverse,
            weight=weight,
            width=x.shape[1],
            out=out,
            half=False,
        )
        return out

    @override
    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(x)
        self._rows.rms_norm_backward(
            len(x),
            x.numel(),
            grad=grad.contiguous(),
            x=x,
            inverse=inverse,
            weight=weight,
            residual=residual,
            width=x.shape[1],
            out=out,
        )
        return out

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
        count, total, dim = qkv.shape
        heads = torch.empty(qkv.shape, dtype=self.dtype)
        inverse = None if norms is None else qkv.new_empty(count, rotated_heads, 1)
        self._rows.finish_heads(
            count,
            qkv.numel(),
            qkv=qkv,
            bias=bias,
            norms=norms,
            cos=cos,
            sin=sin,
            eps=eps,
            total_heads=total,
            rotated_heads=rotated_heads,
            joint_heads=joint_heads,
            dim=dim,
            pairs=cos.shape[-1],
            half=self.dtype == torch.bfloat16,
            heads=heads,
            inverse=inverse,
            kept=None,
        )
        return heads, inverse

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
        count, total, dim = grad.shape
        out = torch.empty(grad.shape)
        self._rows.finish_heads_backward(
            count,
            grad.numel(),
            grad=grad.contiguous(),
            qkv=qkv,
            inverse=inverse,
            norms=norms,
            cos=cos,
            sin=sin,
            total_heads=total,
            rotated_heads=rotated_heads,
            joint_heads=joint_heads,
            dim=dim,
            pairs=cos.shape[-1],
            half=grad.dtype == torch.bfloat16,
            out=out,
            rounds=False,
            kept_half=False,
        )
        return out

    @override
    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._rows.add_bias(len(x), x.numel(), x=x, bias=bias, width=x.shape[1], out=out)
        return out

    @override
    def swiglu(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._swiglu(
            len(gate_up),
            gate_up.numel(),
            wide=gate_up,
            inner=out.shape[1],
            gelu=self._gelu,
            out=out,
            kept=None,
            layout=RowLayout.FLOATS,
            whole=out.shape[1],
        )
        return out

    @override
    def swiglu_again(self, gate_up: Tensor) -> tuple[Tensor, None]:
        return self.swiglu(gate_up), None

    @override
    def swiglu_backward(self, grad: Tensor, gate_up: Tensor, active_gate: Tensor | None = None) -> Tensor:
        out = torch.empty_like(gate_up)
        self._swiglu_backward(
            len(gate_up),
            gate_up.numel(),
            grad=grad,
            wide=gate_up,
            inner=grad.shape[1],
            gelu=self._gelu,
            out=out,
        )
        return out

    @override
    def heads(self, qkv: Linear, norm: Tensor | None, settings: HeadSettings) -> TrainedHeads | None:
        product = TrainedProduct.of(qkv, self._loras)
        return None if product is None else NativeHeads(self.kernels, self._loras, product, norm, settings, self.dtype)

    @override
    def mlp(
        self, gate_up: Linear, down: Linear, norm: Tensor | None, *, eps: float, adds: bool, rows: int
    ) -> TrainedMlp | None:
        products = TrainedProduct.of(gate_up, self._loras), TrainedProduct.of(down, self._loras)
        if norm is None or self.activation != "silu" or products[0] is None or products[1] is None:
            return None
        parts = self.mlp_parts(rows, gate_up.outputs)
        return NativeMlp(
            self.kernels,
            self._loras,
            (products[0], products[1]),
            norm,
            eps=eps,
            adds=adds,
            parts=parts,
            dtype=self.dtype,
        )

    @override
    def packed_attention(
        self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, windows: Windows
    ) -> Attention:
        return NativePackedAttention(self.kernels, blocks, query_heads, kv_heads, windows)

    @override
    def take_heads(self, x: Tensor, order: Tensor) -> Tensor:
        count, total, dim = x.shape
        rows = (torch.arange(count)[:, None] * total + order).flatten()
        return self.take_rows(x.view(-1, dim), rows).view(count, -1, dim)

    @override
    def take_columns(self, x: Tensor, order: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(order))
        self._row_copies.take_columns(
            len(x), out.numel(), x=x.contiguous(), order=order, height=x.shape[1], width=len(order), out=out
        )
        return out

    @override
    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._rows.gate(len(x), x.numel(), x=x, gates=gates, width=x.shape[1], out=out)
        return out

    @override
    def gate_rows(self, x: Tensor, inputs: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        out, shares = torch.empty_like(x), x.new_empty(len(x), 1)
        self._rows.gate_rows(
            len(x),
            x.numel() + inputs.numel(),
            x=x,
            inputs=inputs,
            gate=gate,
            width=x.shape[1],
            hidden=inputs.shape[1],
            out=out,
            shares=shares,
        )
        return out, shares

    @override
    def gate_backward(self, grad: Tensor, x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        grad_x, grad_gates = torch.empty_like(x), torch.empty_like(x)
        self._rows.gate_backward(
            len(x),
            x.numel(),
            grad=grad.contiguous(),
            x=x,
            gates=gates,
            width=x.shape[1],
            out=grad_x,
            gates_out=grad_gates,
        )
        return grad_x, grad_gates

    @override
    def delta_rule(self, spans: StateSpans, config: DecoderConfig, states: StatesOfLayers | None) -> DeltaRule:
        net = config.delta_net
        if net is None or not NativeDeltaRule.fit(net):
            return super().delta_rule(spans, config, states)
        return NativeDeltaRule(self.kernels, spans, net, config.rms_norm_eps, states)

    @override
    def mixture(
        self, weights: MixtureWeights, norm: Tensor, layer: int, config: DecoderConfig, loras: LoraLinears
    ) -> FeedForward:
        gate_up = _native_alike([own.gate_up for own in weights.experts])
        down = _native_alike([own.down for own in weights.experts])
        mixture = config.experts_of(layer)
        if mixture is None or gate_up is None or down is None:
            # by torch alone, although kernels could compute norm and SwiGLU
            return CpuOperations(self.dtype, self.activation).mixture(weights, norm, layer, config, loras)
        return NativeMixtureOfExperts(
            self, self.kernels, self._loras, weights, gate_up, down, norm, layer, config, mixture
        )

    @override
    def softmax_statistics(self, logits: Tensor, needs_gradient: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.from_numpy(needs_gradient.astype(np.int64))
        normalisers = logits.new_empty(len(logits))
        entropies = torch.empty_like(normalisers)
        self._draw.weigh_rows(
            len(logits),
            logits.numel(),
            logits=logits,
            width=logits.shape[1],
            half=self.dtype == torch.bfloat16,
            needs_gradient=chosen,
            normalisers=normalisers,
            entropies=entropies,
        )
        # Over the logits themselves. In bfloat16, they fill the first half of each row's memory.
        negatives = logits.view(self.dtype)[:, : logits.shape[1]]
        if not needs_gradient.all():
            negatives = negatives.index_select(0, torch.from_numpy(np.flatnonzero(needs_gradient)))
        return normalisers, entropies, negatives


def _native_alike(matrices: Sequence[Matrix]) -> list[PanelMatrix] | list[QuantizedPanels] | None:
    """The matrices of a layer's experts, if one kernel multiplies with all of them."""
    dense = [matrix for matrix in matrices if isinstance(matrix, PanelMatrix)]
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedPanels)]
    if len(dense) == len(matrices):
        return dense
    return quantized if len(quantized) == len(matrices) else None
