"""The parts of a layer around what mixes its rows, each one step of autograd with a hand-written backward.

A part keeps its input and one wide product for the backward and computes the rest again. What is kept is in the dtype
of the base's matrices, as the products of the backward are.

Letters: T rows · E hidden size · H all heads (query, key, value) · D head dimension · I the MLP's inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.linear import Linear
from mint.engine.model.operations import HeadSettings, Operations
from mint.engine.model.weights import AttentionWeights, LayerWeights


@dataclass(frozen=True)
class GatedOrder:
    """Where, among the heads of a product with output gates, those that attend are, and the gates; int64."""

    heads: Tensor  # [H]
    gates: Tensor  # [query heads]


@dataclass(frozen=True)
class ColumnOrder:
    """Another order of a product's outputs: the column of each place, and the place of each column; int64 [N]."""

    columns: Tensor
    places: Tensor


@dataclass(frozen=True)
class ForwardContext:
    """The settings of one forward that every layer reads.

    cos and sin [T, 1, pairs] rotate the first `rotated_heads` heads. If there are `joint_heads`, the first so many of
    these are normed together, and the other rotated ones together. `gated` is read where there are output gates.
    """

    operations: Operations
    eps: float
    rotated_heads: int
    joint_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    gated: GatedOrder


class Norm(AutogradFunction):
    """`x / rms(x) · weight` of rows [T, E], plus `residual` [T, E], if given."""

    @classmethod
    @override
    def infer(
        cls, x: Tensor, weight: Tensor, eps: float, operations: Operations, residual: Tensor | None = None
    ) -> Tensor:
        return operations.rms_norm(x, weight, eps, residual)[0]

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, operations: Operations, residual: Tensor | None = None
    ) -> Tensor:
        """[T, E] from x [T, E]."""
        normed, inverse = operations.rms_norm(x, weight, eps, residual)
        ctx.save_for_backward(x, inverse, weight)
        ctx.operations, ctx.adds = operations, residual is not None
        return normed

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients for x and the residual."""
        grad_x = ctx.operations.rms_norm_backward(grad.clone(), *ctx.saved_tensors)
        return grad_x, None, None, None, grad if ctx.adds else None


class AddBias(AutogradFunction):
    """x + bias, of rows x [T, E] and a frozen bias [E]."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, bias: Tensor, operations: Operations) -> Tensor:
        return operations.add_bias(x, bias)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        return grad, None, None


def with_bias(x: Tensor, bias: Tensor | None, operations: Operations) -> Tensor:
    """x [T, E] plus a bias [E]; without one, x itself."""
    return x if bias is None else AddBias.run(x, bias, operations)


class AttentionInputs(AutogradFunction):
    """From rows to the heads that attend: norm, query/key/value product, head norms, rotation."""

    @classmethod
    @override
    def infer(
        cls,
        x: Tensor,
        norm: Tensor | None,
        weights: AttentionWeights,
        linear: Linear,
        context: ForwardContext,
        *parameters: Tensor,
    ) -> Tensor:
        return _project_heads(x, norm, weights, linear, context)[0]

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor | None,
        weights: AttentionWeights,
        linear: Linear,
        context: ForwardContext,
        *parameters: Tensor,
    ) -> Tensor:
        """[T, H, D] in the base's dtype from x [T, E]; `parameters` are those of `linear`, named for autograd."""
        settings = HeadSettings(
            weights.qkv_bias,
            weights.head_norms,
            context.cos,
            context.sin,
            context.eps,
            context.head_dim,
            context.rotated_heads,
            context.joint_heads,
        )
        kernel = context.operations.heads(linear, norm, settings)
        ctx.heads = HeadsInTurn(norm, weights, linear, context) if kernel is None else kernel
        heads, saved = ctx.heads.forward(x)
        ctx.save_for_backward(x, *saved)
        return heads

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and the parameters."""
        x, *saved = ctx.saved_tensors
        grad_x, grads = ctx.heads.backward(grad, x, saved, for_input=ctx.needs_input_grad[0])
        return grad_x, None, None, None, None, *grads


@dataclass(frozen=True)
class HeadsInTurn:
    """`TrainedHeads` by the device's operations, one after the other."""

    norm: Tensor | None
    weights: AttentionWeights
    linear: Linear
    context: ForwardContext

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """See `TrainedHeads`. 1 / rms(x) is kept, and, where heads are normed, the product and 1 / rms of its heads."""
        heads, inverse, qkv, head_inverse = _project_heads(x, self.norm, self.weights, self.linear, self.context)
        kept = None if head_inverse is None else qkv.to(self.context.operations.dtype)
        return heads, [inverse, kept, head_inverse]

    def backward(
        self, grad: Tensor, x: Tensor, saved: Sequence[Tensor | None], *, for_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """See `TrainedHeads`."""
        inverse, kept, head_inverse = saved
        qkv = None if kept is None else kept.float()
        grad_qkv = _heads_gradient(grad, qkv, head_inverse, self.weights, self.context).flatten(1)
        operations = self.context.operations
        return _normed_gradient(self.linear, self.norm, grad_qkv, x, inverse, operations, for_input=for_input)


class NormedProduct(AutogradFunction):
    """The product of norm(x) at a site."""

    @classmethod
    @override
    def infer(
        cls, x: Tensor, norm: Tensor | None, linear: Linear, context: ForwardContext, *parameters: Tensor
    ) -> Tensor:
        return linear.product(norm_rows(context.operations, x, norm, context.eps)[0])

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, norm: Tensor | None, linear: Linear, context: ForwardContext, *parameters: Tensor
    ) -> Tensor:
        """[T, O] from x [T, E]; `parameters` are those of `linear`, named for autograd."""
        normed, inverse = norm_rows(context.operations, x, norm, context.eps)
        ctx.save_for_backward(x, inverse)
        ctx.norm, ctx.linear, ctx.context = norm, linear, context
        return linear.product(normed)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and the parameters."""
        x, inverse = ctx.saved_tensors
        operations, for_input = ctx.context.operations, ctx.needs_input_grad[0]
        grad_x, grads = _normed_gradient(
            ctx.linear, ctx.norm, grad.contiguous(), x, inverse, operations, for_input=for_input
        )
        return grad_x, None, None, None, *grads


class Reordered(AutogradFunction):
    """The columns of rows in another order."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, order: ColumnOrder, operations: Operations) -> Tensor:
        """[T, N] from x [T, N]."""
        ctx.order, ctx.operations = order, operations
        return operations.take_columns(x, order.columns)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        return ctx.operations.take_columns(grad, ctx.order.places), None, None


class GatedHeads(AutogradFunction):
    """The heads that attend, of a product in which each query is followed by its gate."""

    @classmethod
    @override
    def infer(cls, wide: Tensor, weights: AttentionWeights, context: ForwardContext) -> Tensor:
        return _pick_heads(wide, weights, context)[0]

    @staticmethod
    @override
    def forward(ctx: Any, wide: Tensor, weights: AttentionWeights, context: ForwardContext) -> Tensor:
        """[T, H, D] in the base's dtype from wide [T, (H + query heads)·D]."""
        heads, inverse = _pick_heads(wide, weights, context)
        ctx.save_for_backward(wide, inverse)
        ctx.weights, ctx.context = weights, context
        return heads

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for wide."""
        wide, inverse = ctx.saved_tensors
        context: ForwardContext = ctx.context
        order = context.gated.heads
        qkv = context.operations.take_heads(_as_heads(wide, context), order)
        grad_wide = torch.zeros_like(wide)
        _as_heads(grad_wide, context)[:, order] = _heads_gradient(grad, qkv, inverse, ctx.weights, context)
        return grad_wide, None, None


class OutputGate(AutogradFunction):
    """Attended values times the sigmoid of their gates."""

    @staticmethod
    @override
    def forward(ctx: Any, attended: Tensor, wide: Tensor, context: ForwardContext) -> Tensor:
        """[T, U] from attended [T, U] and wide [T, (H + query heads)·D]."""
        ctx.save_for_backward(attended, wide)
        ctx.context = context
        return context.operations.gate(attended.float(), _gates(wide, context))

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients for attended and wide."""
        attended, wide = ctx.saved_tensors
        context: ForwardContext = ctx.context
        grad = grad.float()
        grad_attended, grad_gates = context.operations.gate_backward(grad, attended.float(), _gates(wide, context))
        grad_wide = torch.zeros_like(wide)
        own = _as_heads(grad_wide, context)
        own[:, context.gated.gates] = grad_gates.view(len(wide), -1, context.head_dim)
        return grad_attended.to(attended.dtype), grad_wide, None


def _project_heads(
    x: Tensor, norm: Tensor | None, weights: AttentionWeights, linear: Linear, context: ForwardContext
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The heads, 1 / rms of x, the product [T, H, D], and 1 / rms of its heads, where they are normed."""
    normed, inverse = norm_rows(context.operations, x, norm, context.eps)
    qkv = linear.product(normed).view(len(x), -1, context.head_dim)
    heads, head_inverse = _finish_heads(qkv, weights, context)
    return heads, inverse, qkv, head_inverse


def _as_heads(wide: Tensor, context: ForwardContext) -> Tensor:
    return wide.view(len(wide), -1, context.head_dim)


def _pick_heads(wide: Tensor, weights: AttentionWeights, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
    """The heads [T, H, D], and 1 / rms of those that are normed."""
    return _finish_heads(context.operations.take_heads(_as_heads(wide, context), context.gated.heads), weights, context)


def _gates(wide: Tensor, context: ForwardContext) -> Tensor:
    """[T, U]."""
    return context.operations.take_heads(_as_heads(wide, context), context.gated.gates).flatten(1)


def _finish_heads(qkv: Tensor, weights: AttentionWeights, context: ForwardContext) -> tuple[Tensor, Tensor | None]:
    return context.operations.finish_heads(
        qkv,
        weights.qkv_bias,
        weights.head_norms,
        context.cos,
        context.sin,
        eps=context.eps,
        rotated_heads=context.rotated_heads,
        joint_heads=context.joint_heads,
    )


def _heads_gradient(
    grad: Tensor, qkv: Tensor | None, inverse: Tensor | None, weights: AttentionWeights, context: ForwardContext
) -> Tensor:
    """The gradient for qkv [T, H, D] from that for its heads; see `Operations.finish_heads_backward`."""
    return context.operations.finish_heads_backward(
        grad,
        qkv,
        inverse,
        weights.head_norms,
        context.cos,
        context.sin,
        rotated_heads=context.rotated_heads,
        joint_heads=context.joint_heads,
    )


def _normed_gradient(
    linear: Linear,
    norm: Tensor | None,
    grad: Tensor,
    x: Tensor,
    inverse: Tensor | None,
    operations: Operations,
    *,
    for_input: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients for x [T, E] and the parameters of `linear` from grad [T, O] for its product of norm(x)."""
    normed = norm_rows_again(operations, x, inverse, norm)
    grad_x, grads = linear.gradient(grad, normed, for_input=for_input)
    if grad_x is not None and inverse is not None and norm is not None:
        grad_x = operations.rms_norm_backward(grad_x, x, inverse, norm)
    return grad_x, grads


class Mlp(AutogradFunction):
    """x + MLP(norm(x)): a layer's dense feed-forward block. Where the MLP's output is normed, x is not added here."""

    @classmethod
    @override
    def infer(
        cls,
        x: Tensor,
        layer: LayerWeights,
        gate_up: Linear,
        down: Linear,
        context: ForwardContext,
        *parameters: Tensor,
    ) -> Tensor:
        return _apply_mlp(x, layer, gate_up, down, context)[0]

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        layer: LayerWeights,
        gate_up: Linear,
        down: Linear,
        context: ForwardContext,
        *parameters: Tensor,
    ) -> Tensor:
        """[T, E] from x [T, E]; `parameters` are those of `gate_up`, then of `down`, named for autograd."""
        adds = layer.mlp_output_norm is None
        kernel = context.operations.mlp(gate_up, down, layer.mlp_norm, eps=context.eps, adds=adds, rows=len(x))
        mlp = MlpInParts(layer, gate_up, down, context) if kernel is None else kernel
        out, saved = mlp.forward(x)
        ctx.save_for_backward(x, *saved)
        ctx.mlp = mlp
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and the parameters."""
        x, *saved = ctx.saved_tensors
        grad_x, grads = ctx.mlp.backward(grad, x, saved, for_input=ctx.needs_input_grad[0])
        return grad_x, None, None, None, None, *grads


@dataclass(frozen=True)
class MlpInParts:
    """`TrainedMlp` by the device's operations, a part of the rows after the other."""

    layer: LayerWeights
    gate_up: Linear
    down: Linear
    context: ForwardContext

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """See `TrainedMlp`. Of each part 1 / rms(x), where it is normed, and the wide product are kept."""
        operations = self.context.operations
        outs: list[Tensor] = []
        saved: list[Tensor | None] = []
        for rows in x.tensor_split(operations.mlp_parts(len(x), self.gate_up.outputs)):
            out, inverse, wide = _apply_mlp(rows, self.layer, self.gate_up, self.down, self.context)
            outs.append(out)
            saved += [inverse, wide.to(operations.dtype)]
        return outs[0] if len(outs) == 1 else torch.cat(outs), saved

    def backward(
        self, grad: Tensor, x: Tensor, saved: Sequence[Tensor | None], *, for_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """See `TrainedMlp`."""
        count = len(saved) // 2
        parts = zip(x.tensor_split(count), grad.tensor_split(count), saved[::2], saved[1::2], strict=True)
        grad_xs: list[Tensor] = []
        sums: list[Tensor] = []
        for rows, own, inverse, wide in parts:
            assert wide is not None
            grad_x, grads = self._gradient(own, rows, inverse, wide.float(), for_input=for_input)
            if grad_x is not None:
                grad_xs.append(grad_x)
            sums = grads if not sums else [total.add_(part) for total, part in zip(sums, grads, strict=True)]
        if not for_input:
            return None, sums
        return grad_xs[0] if count == 1 else torch.cat(grad_xs), sums

    def _gradient(
        self, grad: Tensor, x: Tensor, inverse: Tensor | None, wide: Tensor, *, for_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Gradients for some rows of x, and their part of the parameters'."""
        operations, layer = self.context.operations, self.layer
        inner, active_gate = operations.swiglu_again(wide)
        grad_inner, down_grads = self.down.gradient(grad, inner)
        assert grad_inner is not None
        grad_wide = operations.swiglu_backward(grad_inner, wide, active_gate)
        normed = norm_rows_again(operations, x, inverse, layer.mlp_norm)
        grad_x, wide_grads = self.gate_up.gradient(grad_wide, normed, for_input=for_input)
        residual = grad if layer.mlp_output_norm is None else None
        if grad_x is not None and inverse is not None and layer.mlp_norm is not None:
            grad_x = operations.rms_norm_backward(grad_x, x, inverse, layer.mlp_norm, residual=residual)
        elif grad_x is not None and residual is not None:
            grad_x.add_(residual)
        return grad_x, [*wide_grads, *down_grads]


def _apply_mlp(
    x: Tensor, layer: LayerWeights, gate_up: Linear, down: Linear, context: ForwardContext
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The rows [T, E], 1 / rms of x where it is normed, and the wide product [T, 2·I]."""
    normed, inverse = norm_rows(context.operations, x, layer.mlp_norm, context.eps)
    wide = gate_up.product(normed)
    added = x if layer.mlp_output_norm is None else None
    return down.product(context.operations.swiglu(wide), added), inverse, wide


def norm_rows(operations: Operations, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """The rows and 1 / rms of them; without a norm, the rows themselves."""
    return (x, None) if weight is None else operations.rms_norm(x, weight, eps)


def norm_rows_again(operations: Operations, x: Tensor, inverse: Tensor | None, weight: Tensor | None) -> Tensor:
    """The rows that `norm_rows` returned for x. A backward computes them again from `inverse`, its 1 / rms of x."""
    return x if inverse is None or weight is None else operations.rms_norm_again(x, inverse, weight)
