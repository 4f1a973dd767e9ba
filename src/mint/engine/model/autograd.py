"""Autograd functions with hand-written backwards: how to call one, start a backward, and compute a layer twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on


class AutogradFunction(torch.autograd.Function):
    """An autograd function that is called by `run`."""

    @classmethod
    def run(cls, *arguments: Any) -> Tensor:
        """`apply` where gradients are recorded, and `infer` where they are not: `apply` costs more than a small
        product."""
        return cast(Tensor, cls.apply(*arguments)) if torch.is_grad_enabled() else cls.infer(*arguments)

    @classmethod
    def infer(cls, *arguments: Any, **named: Any) -> Tensor:
        """The result alone; overridden where `forward` does more for the backward than keep what it has."""
        return cast(Tensor, cls.forward(_NoContext(), *arguments, **named))


class _NoContext:
    """Stands for autograd's context in a forward that has no backward."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


def backward(x: Tensor, gradient: Tensor) -> None:
    """`x.backward(gradient)`. Torch would import sympy to check the shapes: 0.4 s of the first step."""
    cast(Tensor, _GivenGradient.apply(x, gradient)).backward()


def backward_of_all(results: Sequence[Tensor], gradient: Tensor) -> None:
    """`backward` of some results that have one shape and one gradient."""
    losses = [cast(Tensor, _GivenGradient.apply(result, gradient)) for result in results]
    if losses:
        torch.stack(losses).sum().backward()


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, which keeps nothing but x for the backward and is run again there: the same bits.

    The same as `torch.utils.checkpoint` without its import of torch's compiler, which takes seconds, and memory that is
    short when activations are first recomputed.
    """
    if not torch.is_grad_enabled():
        return function(x)
    tracked = torch.empty(0, requires_grad=True)  # the first layer's input needs no gradient, but its loras do
    return cast(Tensor, _Recomputed.apply(function, x, tracked))


class _GivenGradient(torch.autograd.Function):
    """A loss whose gradient for x is given. Its value is 0; nobody reads it."""

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
