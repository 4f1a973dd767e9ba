"""The few operations of a decoder, each with a backward of its own that costs fewer passes over memory than autograd's.

Base weights are frozen: no operation here makes a gradient for them. Activations between operations are float32;
products with base weights run in the dtype of the weights. Knows nothing of layers, loras' names or sequences.

Letters: T rows (tokens) · I inputs · O outputs · H heads · D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.model.lora_linear import SiteProduct

SERIAL_ENTRIES = 1 << 14
"""Torch computes an elementwise operation of fewer entries than twice this on one thread (its grain is 1 << 15)."""


def run(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply`, or its forward alone where no gradient is recorded: `apply` costs more than a small product."""
    if torch.is_grad_enabled():
        return cast(Tensor, function.apply(*arguments))
    return cast(Tensor, function.forward(_Untracked(), *arguments))


class _Untracked:
    """Stands for the context of a forward that will have no backward."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps nothing."""


def backward(x: Tensor, gradient: Tensor) -> None:
    """`x.backward(gradient)`, for which torch would import sympy to check the shapes: 0.4 s of the first step."""
    cast(Tensor, _GivenGradient.apply(x, gradient)).backward()


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, of which nothing but x is kept for the backward, which computes it again: the same bits.

    What `torch.utils.checkpoint` does, without its import of torch's compiler: seconds, and memory that is short when
    activations are first computed again.
    """
    tracked = torch.empty(0, requires_grad=True)  # the first layer's input needs no gradient, but its loras do
    return cast(Tensor, _Recomputed.apply(function, x, tracked))


class _GivenGradient(torch.autograd.Function):
    """A loss of which only the gradient with respect to x is known; its value, which nobody reads, is 0."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class _Recomputed(torch.autograd.Function):
    """A function whose gradients are made from a second run of it, inside the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, tracked: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            backward(ctx.function(x), grad)
        return None, x.grad, None


class LoraProduct(torch.autograd.Function):
    """A `SiteProduct` (+ residual), with gradients for x, residual and the lora's parts."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, product: SiteProduct, *parameters: Tensor) -> Tensor:
        """Float32 [T, O] from x [T, I]; `parameters` are those of `product`, named for autograd."""
        ctx.save_for_backward(x)
        ctx.product = product
        return product.product(x, residual)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        (x,) = ctx.saved_tensors
        grad_x, grads = ctx.product.gradient(grad, x, for_input=ctx.needs_input_grad[0])
        return (
            None if grad_x is None else grad_x.to(x.dtype),
            grad if ctx.needs_input_grad[1] else None,
            None,
            *grads,
        )


class RmsNorm(torch.autograd.Function):
    """`x / rms(x) · weight` over the last dimension, in float32."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The same shape as x [T, I]."""
        inverse = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        x, weight, inverse = ctx.saved_tensors
        return norm_gradient(grad * weight, x, inverse), None, None


class SwiGlu(torch.autograd.Function):
    """`silu(gate) · up` from one matrix that holds both side by side."""

    @staticmethod
    @override
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """[T, I] from [T, 2·I]."""
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient for gate_up."""
        (gate_up,) = ctx.saved_tensors
        return swiglu_gradient(grad.clone(), gate_up, silu(gate_up.chunk(2, dim=-1)[0]))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / √(mean of x² + eps) over the last dimension, which stays with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass; squares first would write them out
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def norm_gradient(scaled: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """The gradient through `x · inverse`, `scaled` being that for the normalised x; overwrites `scaled`."""
    mean = (scaled * x).mean(-1, keepdim=True)
    return scaled.mul_(inverse).addcmul_(x, mean.mul_(inverse.pow(3)), value=-1)


def silu(gate: Tensor) -> Tensor:
    """`gate · sigmoid(gate)` of columns [T, I] of a wider matrix, contiguous.

    The vector and the scalar code of `F.silu` differ in the last bit. Over columns of a wider matrix it goes row by
    row, so that a column always meets the same of the two, unless threads share a row: they get none to share.
    """
    if gate.is_cuda or torch.get_num_threads() == 1 or gate.numel() <= SERIAL_ENTRIES:
        return F.silu(gate)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    step = max(1, SERIAL_ENTRIES // gate.shape[1])
    for start in range(0, gate.shape[0], step):
        out[start : start + step] = F.silu(gate[start : start + step])
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) · up` [T, I] of [T, 2·I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def swiglu_gradient(grad: Tensor, gate_up: Tensor, silu_gate: Tensor) -> Tensor:
    """The gradient for gate_up [T, 2·I] from grad [T, I] and `silu(gate)`; overwrites `grad`."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.mul(grad, silu_gate, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotates the pairs (x[i], x[i + D / 2]) of [T, H, D], as Hugging Face lays them out, into `out`."""
    first, second = x.chunk(2, dim=-1)
    torch.mul(x, torch.cat([cos, cos], dim=-1), out=out)  # in one go, for passes over half heads are slow
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
