"""The two parts of a layer around its attention, each one step of autograd with a hand-written backward.

A part keeps its input and one wide product for the backward and computes the rest again. What is kept is in the dtype
of the base's matrices, as the products of the backward are.

Letters: T rows · E hidden size · H all heads (query, key, value) · D head dimension · I the MLP's inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.linear import Linear
from mint.engine.model.operations import Operations
from mint.engine.model.weights import LayerWeights


@dataclass(frozen=True)
class ForwardContext:
    """The settings of one forward that every layer reads.

    cos and sin [T, 1, pairs] rotate the first `rotated_heads` heads. If there are `joint_heads`, the first so many of
    these are normed together, and the other rotated ones together.
    """

    operations: Operations
    eps: float
    rotated_heads: int
    joint_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor


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


class AttentionInputs(AutogradFunction):
    """From rows to the heads that attend: norm, query/key/value product, head norms, rotation."""

    @classmethod
    @override
    def infer(
        cls, x: Tensor, layer: LayerWeights, linear: Linear, context: ForwardContext, *parameters: Tensor
    ) -> Tensor:
        return _project_heads(x, layer, linear, context)[0]

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, layer: LayerWeights, linear: Linear, context: ForwardContext, *parameters: Tensor
    ) -> Tensor:
        """[T, H, D] in the base's dtype from x [T, E]; `parameters` are those of `linear`, named for autograd."""
        heads, inverse, qkv, head_inverse = _project_heads(x, layer, linear, context)
        ctx.save_for_backward(x, inverse, qkv.to(context.operations.dtype), head_inverse)
        ctx.layer, ctx.linear, ctx.context = layer, linear, context
        return heads

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and the parameters."""
        x, inverse, qkv, head_inverse = ctx.saved_tensors
        layer = ctx.layer
        context = ctx.context
        operations = ctx.context.operations
        grad_qkv = operations.finish_heads_backward(
            grad,
            qkv.float(),
            head_inverse,
            layer.head_norms,
            context.cos,
            context.sin,
            rotated_heads=context.rotated_heads,
            joint_heads=context.joint_heads,
        )
        normed = _norm_again(operations, x, inverse, layer.attention_norm)
        grad_normed, grads = ctx.linear.gradient(grad_qkv.flatten(1), normed, for_input=ctx.needs_input_grad[0])
        grad_x = grad_normed
        if grad_normed is not None and layer.attention_norm is not None:
            grad_x = operations.rms_norm_backward(grad_normed, x, inverse, layer.attention_norm)
        return grad_x, None, None, None, *grads


def _project_heads(
    x: Tensor, layer: LayerWeights, linear: Linear, context: ForwardContext
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The heads, 1 / rms of x, the product [T, H, D], and 1 / rms of its heads, where they are normed."""
    normed, inverse = _norm(context, x, layer.attention_norm)
    qkv = linear.product(normed).view(len(x), -1, context.head_dim)
    heads, head_inverse = context.operations.finish_heads(
        qkv,
        layer.qkv_bias,
        layer.head_norms,
        context.cos,
        context.sin,
        eps=context.eps,
        rotated_heads=context.rotated_heads,
        joint_heads=context.joint_heads,
    )
    return heads, inverse, qkv, head_inverse


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
        outs, saved = [], []
        for rows in x.tensor_split(context.operations.mlp_parts(len(x), gate_up.outputs)):
            out, inverse, wide = _apply_mlp(rows, layer, gate_up, down, context)
            outs.append(out)
            saved += [inverse, wide.to(context.operations.dtype)]
        ctx.save_for_backward(x, *saved)
        ctx.layer, ctx.gate_up, ctx.down, ctx.context = layer, gate_up, down, context
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and the parameters."""
        x, *saved = ctx.saved_tensors
        count = len(saved) // 2
        parts = zip(x.tensor_split(count), grad.tensor_split(count), saved[::2], saved[1::2], strict=True)
        grad_xs, sums = [], []
        for rows, own, inverse, wide in parts:
            grad_x, grads = _mlp_gradient(ctx, own, rows, inverse, wide.float())
            grad_xs.append(grad_x)
            sums = grads if not sums else [total.add_(part) for total, part in zip(sums, grads, strict=True)]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_xs[0] if count == 1 else torch.cat(grad_xs)
        return grad_x, None, None, None, None, *sums


def _apply_mlp(
    x: Tensor, layer: LayerWeights, gate_up: Linear, down: Linear, context: ForwardContext
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The rows [T, E], 1 / rms of x where it is normed, and the wide product [T, 2·I]."""
    normed, inverse = _norm(context, x, layer.mlp_norm)
    wide = gate_up.product(normed)
    added = x if layer.mlp_output_norm is None else None
    return down.product(context.operations.swiglu(wide), added), inverse, wide


def _mlp_gradient(
    ctx: Any, grad: Tensor, x: Tensor, inverse: Tensor | None, wide: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients for some rows of x, and their part of the parameters'."""
    operations: Operations = ctx.context.operations
    layer: LayerWeights = ctx.layer
    inner, active_gate = operations.swiglu_again(wide)
    grad_inner, down_grads = ctx.down.gradient(grad, inner)
    grad_wide = operations.swiglu_backward(grad_inner, wide, active_gate)
    normed = _norm_again(operations, x, inverse, layer.mlp_norm)
    grad_x, wide_grads = ctx.gate_up.gradient(grad_wide, normed, for_input=ctx.needs_input_grad[0])
    residual = grad if layer.mlp_output_norm is None else None
    if grad_x is not None and inverse is not None and layer.mlp_norm is not None:
        grad_x = operations.rms_norm_backward(grad_x, x, inverse, layer.mlp_norm, residual=residual)
    elif grad_x is not None and residual is not None:
        grad_x.add_(residual)
    return grad_x, [*wide_grads, *down_grads]


def _norm(context: ForwardContext, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows and 1 / rms of them; without a norm, the rows themselves."""
    return (x, None) if weight is None else context.operations.rms_norm(x, weight, context.eps)


def _norm_again(operations: Operations, x: Tensor, inverse: Tensor | None, weight: Tensor | None) -> Tensor:
    return x if inverse is None or weight is None else operations.rms_norm_again(x, inverse, weight)
