"""One step of autograd that adds up what the chunks of a layer make of the same inputs.

Forward and backward of the chunks run within this step, one chunk after the other: so processes that share the chunks
make the same exchanges in the same order, whatever autograd does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.model.autograd import backward_of_all
from mint.engine.reductions.chunk_sums import Chunks

RunChunks = Callable[[Sequence[Sequence[Tensor]]], list[Tensor]]
"""The results of the own chunks, float32 of one shape, from the inputs of each."""


@dataclass(frozen=True)
class ChunkedStep:
    """What the own chunks compute, and what happens before and after they add to the gradients of their loras."""

    chunks: Chunks
    run: RunChunks
    clear_gradient: Callable[[], None]
    collect_gradient: Callable[[], None]

    def sum(self, *inputs: Tensor) -> Tensor:
        """The sum over all chunks of their results of `inputs`."""
        if not torch.is_grad_enabled():
            return self.chunks.total(self.run([inputs] * len(self.chunks.own)))
        tracked = torch.empty(0, requires_grad=True)  # the first layer's input needs no gradient, but its loras do
        return cast(Tensor, _SumOfChunks.apply(self, tracked, *inputs))


class _SumOfChunks(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, step: ChunkedStep, tracked: Tensor, *inputs: Tensor) -> Tensor:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            own = [
                [x.detach().requires_grad_(is_needed) for x, is_needed in zip(inputs, needed, strict=True)]
                for _ in step.chunks.own
            ]
            results = step.run(own)
        ctx.step, ctx.inputs, ctx.results = step, own, results
        return step.chunks.total([result.detach() for result in results])

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for the inputs."""
        step: ChunkedStep = ctx.step
        needed = ctx.needs_input_grad[2:]
        step.clear_gradient()
        with torch.enable_grad():
            backward_of_all([result for result in ctx.results if result.requires_grad], grad)
        grads: list[Tensor | None] = [None] * len(needed)
        wanted = [place for place, is_needed in enumerate(needed) if is_needed]
        if wanted:
            parts = [_flat([_gradient(own[place]) for place in wanted]) for own in ctx.inputs]
            shapes = [ctx.inputs[0][place].shape for place in wanted]
            total = step.chunks.total(parts).split([shape.numel() for shape in shapes])
            for place, shape, own in zip(wanted, shapes, total, strict=True):
                grads[place] = own.view(shape)
        step.collect_gradient()
        return None, None, *grads


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers, one tensor behind the other."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
