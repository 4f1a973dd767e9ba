"""The few operations of a decoder, each with a backward of its own that costs fewer passes over memory than autograd's.

Base weights are frozen: no operation here makes a gradient for them. Activations between operations are float32;
products with base weights run in the dtype of the weights. Knows nothing of layers, loras' names or sequences.

Letters: T rows (tokens) · I inputs · O outputs · H heads · D head dimension · r rank · S lora parts of one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.products import FrozenMatrix


def add_lora(out: Tensor, x: Tensor, a: Tensor, bs: Sequence[Tensor], scale: float) -> Tensor:
    """Adds `scale · x @ a.T @ b.T` to `out` [T, O] in place and returns `x @ a.T` [T, S·r].

    The S parts of a fused product (query, key, value) share one `a` [S·r, I] and write side by side into `out`.
    """
    down = x @ a.t()
    rank, start = a.shape[0] // len(bs), 0
    for part, b in enumerate(bs):
        target = out[:, start : start + b.shape[0]]
        target.addmm_(down[:, part * rank : (part + 1) * rank], b.t(), alpha=scale)
        start += b.shape[0]
    return down


def run(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply`, or its forward alone where no gradient is recorded: `apply` costs more than a small product."""
    if torch.is_grad_enabled():
        return cast(Tensor, function.apply(*arguments))
    return cast(Tensor, function.forward(_Untracked(), *arguments))


class _Untracked:
    """Stands for the context of a forward that will have no backward."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps nothing."""


class LoraProduct(torch.autograd.Function):
    """`residual + x @ weight.T + scale · x @ a.T @ b.T`, with gradients for x, residual, a and the bs."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: FrozenMatrix, scale: float, a: Tensor, *bs: Tensor
    ) -> Tensor:
        """Float32 [T, O] from x [T, I]."""
        out = weight.product(x, residual)
        down = add_lora(out, x, a, bs, scale)
        ctx.save_for_backward(x, down, a, *bs)
        ctx.weight, ctx.scale = weight, scale
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        x, down, a, *bs = ctx.saved_tensors
        rank, start = a.shape[0] // len(bs), 0
        grad_down = torch.empty_like(down)
        grad_bs: list[Tensor | None] = []
        for part, b in enumerate(bs):
            columns = slice(part * rank, (part + 1) * rank)
            # Scaling the rank-wide matrices costs less than scaling [T, O].
            grad_part = grad[:, start : start + b.shape[0]]
            torch.mm(grad_part, b, out=grad_down[:, columns])
            grad_bs.append(grad_part.t().mm(down[:, columns]).mul_(ctx.scale))
            start += b.shape[0]
        grad_down.mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.weight.gradient(grad).addmm_(grad_down, a)
        grad_residual = grad if ctx.needs_input_grad[1] else None
        return (grad_x, grad_residual, None, None, grad_down.t().mm(x), *grad_bs)


class BaseProduct(torch.autograd.Function):
    """`residual + x @ weight.T` with a frozen weight, in float32 around the weight's dtype."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: FrozenMatrix) -> Tensor:
        """Float32 [T, O] from x [T, I]."""
        ctx.weight = weight
        return weight.product(x, residual)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and residual."""
        grad_x = ctx.weight.gradient(grad) if ctx.needs_input_grad[0] else None
        return grad_x, (grad if ctx.needs_input_grad[1] else None), None


class RmsNorm(torch.autograd.Function):
    """`x / rms(x) · weight` over the last dimension, in float32."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The same shape as x [T, I]."""
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        x, weight, inverse = ctx.saved_tensors
        return _norm_gradient(grad * weight, x, inverse), None, None


class NormRope(torch.autograd.Function):
    """Normalises query and key heads one by one and rotates them by position; value heads pass through.

    The input is one row of heads per token, query heads first, then key, then value.
    """

    @staticmethod
    @override
    def forward(ctx: Any, qkv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """From qkv [T, H, D], norm weights [query + key heads, D] and cos, sin [T, 1, D / 2]; out [T, H, D]."""
        rotated = weight.shape[0]
        x = qkv[:, :rotated]
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(qkv, weight, inverse, cos, sin)
        out = torch.empty_like(qkv)
        out[:, rotated:] = qkv[:, rotated:]
        _rotate((x * inverse).mul_(weight), cos, sin, out[:, :rotated])
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for qkv."""
        qkv, weight, inverse, cos, sin = ctx.saved_tensors
        rotated = weight.shape[0]
        out = torch.empty_like(qkv)
        out[:, rotated:] = grad[:, rotated:]
        normed = torch.empty_like(qkv[:, :rotated])
        _rotate(grad[:, :rotated], cos, -sin, normed)  # a rotation's transpose is the rotation back
        out[:, :rotated] = _norm_gradient(normed.mul_(weight), qkv[:, :rotated], inverse)
        return out, None, None, None, None


class SwiGlu(torch.autograd.Function):
    """`silu(gate) · up` from one matrix that holds both side by side."""

    @staticmethod
    @override
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """[T, I] from [T, 2·I]."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        # Not F.silu: its vector and scalar code differ in the last bit, and a row's place decides which one it meets.
        return torch.div(gate, gate.neg().exp_().add_(1)).mul_(up)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient for gate_up."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def _norm_gradient(scaled: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """The gradient through `x · inverse`, `scaled` being that for the normalised x; overwrites `scaled`."""
    mean = (scaled * x).mean(-1, keepdim=True)
    return scaled.mul_(inverse).addcmul_(x, mean.mul_(inverse.pow(3)), value=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotates the pairs (x[i], x[i + D / 2]), as Hugging Face lays them out, into `out`."""
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
