"""The operations of a decoder in plain torch: the reference for every device, and what a device without its own runs.

Letters as in `operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import LoraWeights, SiteLora, SiteWeights
from mint.engine.model.config import Activation, DecoderConfig, Windows
from mint.engine.model.delta_net import PackedDeltaRule, StatesOfLayers
from mint.engine.model.functions import (
    activate,
    exponentials,
    gated,
    head_inverse_rms,
    head_norm_gradient,
    inverse_rms,
    norm_gradient,
    pad_rows,
    rotate,
    row_blocks,
    split_halves,
    swiglu_gradient,
)
from mint.engine.model.linear import DenseMatrix, Float32Product, Linear, LoraLinears, Matrix, min_rows
from mint.engine.model.lora_linear import SeparateLoras
from mint.engine.model.mixture_of_experts import MixtureOfExperts
from mint.engine.model.operations import Attention, DeltaRule, FeedForward, HeadSettings, TrainedHeads, TrainedMlp
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.model.weights import MixtureWeights
from mint.engine.packing import AttentionBlock, StateSpans
from mint.engine.quantized.number_formats import QuantizedWeight
from mint.engine.quantized.quantized_matrix import QuantizedMatrix, Widen, widen_by_torch
from mint.engine.transfers import upload


class TorchOperations:
    """`Operations` on any device."""

    attention_name = "torch"
    instructions: str | None = None
    kernels_digest: str | None = None
    max_rows = 4096
    activation_share = 8  # the system and other programs use this memory, too
    max_sampling_rows = 512
    max_prefill_tokens = 2048
    merged_bytes = 0
    logits_at_once = 1 << 28

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        activation: Activation = "silu",
        *,
        widen: Widen = widen_by_torch,
    ) -> None:
        """`widen` makes the matrices of quantized weights for their products."""
        self.dtype = dtype
        self.device = device
        self.activation = activation
        self._widen = widen

    # --- memory ---

    def release_memory(self) -> None:
        pass

    # --- matrices and loras ---

    def matrix(self, weight: Tensor) -> Matrix:
        return DenseMatrix(weight)

    def quantized_matrix(self, weight: QuantizedWeight) -> Matrix:
        return QuantizedMatrix(weight, self.dtype, self._widen)

    def unembedding(self, weight: Tensor) -> Matrix:
        return DenseMatrix(weight) if weight.dtype == torch.float32 else Float32Product(weight)

    def unembedding_copy_bytes(self, vocabulary: int, hidden: int) -> int:
        return 0

    def turned_copy_bytes(self, outputs: int, inputs: int) -> int:
        return 0

    def quantized_unembedding(self, weight: QuantizedWeight) -> Matrix:
        return QuantizedMatrix(weight, torch.float32, self._widen)

    def loras(self, matrices: Mapping[str, Matrix]) -> LoraLinears:
        return SeparateLoras(self)

    def published_lora(self, lora: LoraWeights) -> LoraWeights:
        return lora

    def add_loras(self, out: Tensor, x: Tensor, loras: Sequence[SiteLora]) -> None:
        for rows, lora, scale in loras:
            self.add_lora(out[rows], x[rows], lora, scale)

    def add_lora(self, out: Tensor, x: Tensor, lora: SiteWeights, scale: float) -> None:
        """`add_loras` for one lora that all rows have."""
        least = min_rows()
        target, x = pad_rows(out, least), pad_rows(x.float(), least)
        down = _down(x, lora.a)
        for columns, own, b in lora.parts():
            target[:, own].addmm_(down[:, columns], b.t(), alpha=scale)
        if len(target) > len(out):
            out.copy_(target[: len(out)])

    def lora_gradient(
        self, grad: Tensor, x: Tensor, lora: SiteWeights, scale: float, grad_x: Tensor | None
    ) -> list[Tensor]:
        x = x.float()
        down = _down(x, lora.a)  # computed again: keeping it would cost memory in every layer
        grad_down = torch.empty_like(down)
        grad_bs: list[Tensor] = []
        for columns, own, b in lora.parts():
            grad_part = grad[:, own]
            torch.mm(grad_part, b, out=grad_down[:, columns])
            # Scaling the rank-wide matrices costs less than scaling [T, O]; [r, O] is the faster way round.
            grad_bs.append(down[:, columns].t().mm(grad_part).mul_(scale).t())
        grad_down.mul_(scale)
        if grad_x is not None:
            grad_x.addmm_(grad_down, lora.a)
        return [grad_down.t().mm(x), *grad_bs]

    # --- rows ---

    def take_rows(self, table: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
        found = table.index_select(0, rows).float()
        return found if scale == 1 else found.mul_(scale)

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    # --- between the products ---

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inverse = inverse_rms(x, eps)
        normed = (x * inverse).mul_(weight)
        return normed if residual is None else normed.add_(residual), inverse

    def rms_norm_again(self, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        return (x * inverse).mul_(weight)

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        out = norm_gradient(grad.mul_(weight), x, inverse)
        return out if residual is None else out.add_(residual)

    def head_inverse_rms(self, heads: Tensor, eps: float, joint: int) -> Tensor:
        """1 / rms of heads [T, H, D], [T, H, 1]; `joint` as in `functions`."""
        return head_inverse_rms(heads, eps, joint)

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
        if bias is not None:
            qkv.add_(bias.view(qkv.shape[1:]))
        turned = qkv[:, :rotated_heads]
        inverse = None
        heads = torch.empty(qkv.shape, dtype=torch.float32, device=qkv.device)
        heads[:, rotated_heads:] = qkv[:, rotated_heads:]
        if norms is not None:
            inverse = self.head_inverse_rms(turned, eps, joint_heads)
            turned = (turned * inverse).mul_(norms)
        rotate(turned, cos, sin, heads[:, :rotated_heads])
        return heads.to(self.dtype), inverse

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
        out = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
        out[:, rotated_heads:] = grad[:, rotated_heads:]
        turned = out[:, :rotated_heads]
        rotate(grad[:, :rotated_heads].float(), cos, -sin, turned)  # the transpose rotates back
        if inverse is not None and norms is not None and qkv is not None:
            head_norm_gradient(turned.mul_(norms), qkv[:, :rotated_heads], inverse, joint_heads)
        return out

    def take_heads(self, x: Tensor, order: Tensor) -> Tensor:
        return x.index_select(1, order)

    def take_columns(self, x: Tensor, order: Tensor) -> Tensor:
        return x.index_select(1, order)

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        return self.by_rows(torch.sigmoid, gates).mul_(x)

    def gate_rows(self, x: Tensor, inputs: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        # Not side by side: torch then computes one by one, so that a row gets the same bits in each batch.
        logits = torch.empty_strided((len(x), 1), (2, 1), dtype=inputs.dtype, device=inputs.device)
        shares = torch.sigmoid(torch.sum(inputs * gate, -1, keepdim=True, out=logits))
        return x * shares, shares

    def gate_backward(self, grad: Tensor, x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.sigmoid(gates)
        grad_x = grad * shares
        return grad_x, (grad_x * x).mul_(1 - shares)

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """An elementwise `function` of x [T, I]."""
        return function(x)

    def activate(self, gate: Tensor) -> Tensor:
        return self.by_rows(partial(activate, activation=self.activation), gate)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = split_halves(gate_up, self.activation)
        return self.activate(gate).mul_(gated(up, self.activation))

    def swiglu_again(self, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
        gate, up = split_halves(gate_up, self.activation)
        active_gate = self.activate(gate)
        return active_gate * gated(up, self.activation), active_gate

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor, active_gate: Tensor | None = None) -> Tensor:
        if active_gate is None:
            active_gate = self.activate(split_halves(gate_up, self.activation)[0])
        return swiglu_gradient(grad, gate_up, active_gate, self.activation)

    def mlp_parts(self, rows: int, width: int) -> int:
        return 1

    def heads(self, qkv: Linear, norm: Tensor | None, settings: HeadSettings) -> TrainedHeads | None:
        return None

    def mlp(
        self, gate_up: Linear, down: Linear, norm: Tensor | None, *, eps: float, adds: bool, rows: int
    ) -> TrainedMlp | None:
        return None

    def packed_attention(
        self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, windows: Windows
    ) -> Attention:
        return PackedAttention(blocks, query_heads, kv_heads, self.device, windows)

    def delta_rule(self, spans: StateSpans, config: DecoderConfig, states: StatesOfLayers | None) -> DeltaRule:
        return PackedDeltaRule(spans, config, self, self.device, states)

    def mixture(
        self, weights: MixtureWeights, norm: Tensor, layer: int, config: DecoderConfig, loras: LoraLinears
    ) -> FeedForward:
        return MixtureOfExperts(self, weights, norm, layer, config, loras)

    # --- logits ---

    def rows_in_cache(self, width: int) -> int | None:
        return None

    def softmax_statistics(self, logits: Tensor, needs_gradient: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        negatives = logits.view(self.dtype)[:, : logits.shape[1]]
        normaliser, entropies = (torch.empty(len(logits), device=logits.device) for _ in range(2))
        filled = 0
        size = self.rows_in_cache(logits.shape[1]) or max(1, len(logits))
        scratch = torch.empty_like(logits[: 2 * size])
        for rows in row_blocks(len(logits), size):
            own, mask = logits[rows], needs_gradient[rows]
            weights, normaliser[rows] = exponentials(own, scratch[: len(own)])
            total = weights.sum(1)
            # H = log Z - Σ p·z
            spread = torch.linalg.vecdot(weights, own).div_(total)
            entropies[rows] = normaliser[rows] - spread
            if mask.any():
                weights.div_(-total[:, None])
                trained = weights if mask.all() else weights[upload(logits.device, np.flatnonzero(mask))[0]]
                negatives[filled : filled + len(trained)] = trained
                filled += len(trained)
        return normaliser, entropies, negatives[:filled]


def _down(x: Tensor, a: Tensor) -> Tensor:
    """`x @ a.T`, [T, r]. A lone row of `a` is multiplied twice: torch multiplies matrix and vector in another order for
    other numbers of rows (measured)."""
    return x @ a.t() if len(a) > 1 else (x @ a.expand(2, -1).t())[:, :1]
