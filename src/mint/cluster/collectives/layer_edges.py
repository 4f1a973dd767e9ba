"""What a rank does before and after each layer, in a forward and in its backward: it counts the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.cluster.collectives.progress import Progress
from mint.engine.model.weights import LayerRun, LayerWeights


class _Edge(torch.autograd.Function):
    """The rows themselves; calls one function as they pass, and another as their gradient passes back."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None], passed_back: Callable[[], None]) -> Tensor:
        ctx.passed_back = passed_back
        passed()
        return x.view_as(x)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.passed_back()
        return grad, None, None


def edge(x: Tensor, passed: Callable[[], None], passed_back: Callable[[], None]) -> Tensor:
    """x; calls `passed` now, and `passed_back` when a backward has the gradient for x, if it computes one."""
    return cast(Tensor, _Edge.apply(x, passed, passed_back))


@dataclass(frozen=True)
class CountedLayers:
    """`LayerSource` whose matrices stay where they are; the rank's `progress` counts each layer."""

    progress: Progress

    def keep(self, layer: LayerWeights) -> None:
        """See `LayerSource`."""

    def around(self, index: int, run: LayerRun) -> LayerRun:
        """See `LayerSource`."""

        def counted(x: Tensor) -> Tensor:
            return edge(run(x), self.progress.advance, self.progress.advance)

        return counted

    def experts_of(self, index: int) -> None:
        """All are here."""
