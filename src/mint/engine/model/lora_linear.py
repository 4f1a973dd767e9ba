"""The product of a batch's rows at one site: with a frozen matrix plus the loras of the rows.

Two ways, chosen once for a base: a lora is computed beside the base (`SeparateLoras`), or merged into a copy of the
base's matrix after every change, `W + scale · B · A`, so that one product is left of three (`MergedLoras`, for small
bases). Sampling and training multiply with the same matrix, so their bits agree.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.lora import LoraRows, LoraWeights, Site, SiteLora, SiteWeights
from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.functions import pad_rows
from mint.engine.model.linear import Linear, Matrix, min_rows
from mint.engine.model.operations import Operations

MAX_MERGED_LORAS = 64
"""Loras whose merged matrices are cached; beyond that the least recently used are dropped.

A batch with more loras than this merges all of them again at every step."""


@dataclass(frozen=True)
class SeparateLinear:
    """One product with the base for all rows, and each lora's part added to its own rows."""

    operations: Operations
    matrix: Matrix
    loras: Sequence[SiteLora]
    """Those that train this site, in the order of their rows."""

    @property
    def outputs(self) -> int:
        return self.matrix.outputs

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for _, lora, _ in self.loras:
            found += (lora.a, *lora.bs)
        return tuple(found)

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.matrix.product(x, residual)
        if self.loras:
            self.operations.add_loras(out, x, self.loras)
        return out

    def gradient(self, grad: Tensor, x: Tensor, *, for_input: bool = True) -> tuple[Tensor | None, list[Tensor]]:
        grad_x = self.matrix.gradient(grad) if for_input else None
        grads: list[Tensor] = []
        for _, lora, scale in self.loras:
            grads += self.operations.lora_gradient(grad, x, lora, scale, grad_x)
        return grad_x, grads


@dataclass(frozen=True)
class MergedLinear:
    """One product with a matrix into which the lora is merged."""

    operations: Operations
    matrix: Matrix
    lora: SiteWeights
    scale: float

    @property
    def outputs(self) -> int:
        return self.matrix.outputs

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.lora.a, *self.lora.bs

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.matrix.product(x, residual)

    def gradient(self, grad: Tensor, x: Tensor, *, for_input: bool = True) -> tuple[Tensor | None, list[Tensor]]:
        grad_x = self.matrix.gradient(grad) if for_input else None
        return grad_x, self.operations.lora_gradient(grad, x, self.lora, self.scale, None)


@dataclass(frozen=True)
class MixedLinear:
    """The merged matrices of several loras, each for its own rows. Without a gradient: a trained batch has one lora."""

    operations: Operations
    runs: Sequence[tuple[slice, Matrix]]

    @property
    def outputs(self) -> int:
        return self.runs[0][1].outputs

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return ()

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        parts = []
        for rows, matrix in self.runs:
            own = pad_rows(x[rows], matrix.min_rows)
            added = None if residual is None else pad_rows(residual[rows], matrix.min_rows)
            parts.append(matrix.product(own, added)[: rows.stop - rows.start])
        return self.operations.join_rows(parts)

    def gradient(self, grad: Tensor, x: Tensor, *, for_input: bool = True) -> tuple[Tensor | None, list[Tensor]]:
        raise NotImplementedError("a batch with a gradient has one lora")


class SeparateLoras:
    """`LoraLinears` of a base whose loras are computed beside it."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations

    def linear(self, site: str, matrix: Matrix, loras: Sequence[LoraRows]) -> Linear:
        found = []
        for rows in loras:
            lora = rows.site(site)
            if rows.weights is not None and lora is not None:
                found.append(SiteLora(slice(rows.start, rows.stop), lora, rows.weights.scale))
        return SeparateLinear(self.operations, matrix, found)

    def multiply(self, x: Tensor, matrix: Matrix, site: str, loras: Sequence[LoraRows]) -> Tensor:
        count = len(x)
        x = pad_rows(x, rows_needed([matrix]))
        linear = self.linear(site, matrix, cover(loras, count, len(x)))
        return LoraProduct.run(x, None, linear, *linear.parameters)[:count]

    def versions(self, loras: Sequence[LoraRows]) -> list[int]:
        return []

    def kept_bytes(self, sites: Sequence[Site], *, with_gradient: bool) -> int:
        return 0

    def forget(self, lora: LoraWeights) -> None:
        """Nothing is kept for it."""


class MergedLoras(SeparateLoras):
    """Merges loras into copies of the matrices of the layers: when first asked for, and again after every change. At
    other sites (experts, the unembedding) loras stay separate."""

    def __init__(self, operations: Operations, matrices: Mapping[str, Matrix]) -> None:
        """The base's `matrices` by site."""
        super().__init__(operations)
        self._matrices = matrices
        self._sets: OrderedDict[LoraWeights, tuple[int, dict[str, MergedLinear]]] = OrderedDict()

    @override
    def linear(self, site: str, matrix: Matrix, loras: Sequence[LoraRows]) -> Linear:
        if site not in self._matrices:
            return super().linear(site, matrix, loras)
        if len(loras) == 1:
            return self._merged(site, loras[0].weights) or SeparateLinear(self.operations, matrix, ())
        found = [self._merged(site, own.weights) for own in loras]
        if not any(found):
            return SeparateLinear(self.operations, matrix, ())
        runs = [
            (slice(rows.start, rows.stop), matrix if own is None else own.matrix)
            for rows, own in zip(loras, found, strict=True)
        ]
        return MixedLinear(self.operations, runs)

    @override
    def versions(self, loras: Sequence[LoraRows]) -> list[int]:
        return [_version(own.weights) for own in loras if own.weights is not None]

    @override
    def kept_bytes(self, sites: Sequence[Site], *, with_gradient: bool) -> int:
        merged = [self._matrices[site.name] for site in sites if site.name in self._matrices]
        return sum(matrix.size_bytes + with_gradient * matrix.gradient_bytes for matrix in merged)

    @override
    def forget(self, lora: LoraWeights) -> None:
        self._sets.pop(lora, None)

    def _merged(self, site: str, lora: LoraWeights | None) -> MergedLinear | None:
        """The merged matrix of a site; None where `lora` does not train it."""
        if lora is None or site not in lora.sites:
            return None
        version = _version(lora)
        found = self._sets.get(lora)
        if found is None or found[0] != version:
            found = self._sets[lora] = (version, {})
            while len(self._sets) > MAX_MERGED_LORAS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(lora)
        merged = found[1].get(site)
        if merged is None:  # with its layer, because the matrices of others may not be here
            # Tensors made in inference mode could not be used in a training pass.
            with torch.inference_mode(mode=False), torch.no_grad():
                merged = found[1][site] = self._merge(site, lora)
        return merged

    def _merge(self, name: str, lora: LoraWeights) -> MergedLinear:
        site = lora.sites[name]
        merged = self._matrices[name].dense().clone()
        for columns, own, b in site.parts():
            merged[own].addmm_(b, site.a[columns], alpha=lora.scale)
        return MergedLinear(self.operations, self.operations.matrix(merged), site, lora.scale)


def _version(lora: LoraWeights) -> int:
    """A number that grows with every change of the weights.

    torch counts each in-place change of a tensor, also through a view, for autograd's check of saved tensors. It has no
    public name for that count. A count of our own would miss a change that does not announce itself.
    """
    return lora.flat._version


class LoraProduct(AutogradFunction):
    """`linear.product`, with gradients for x, residual and the loras."""

    @classmethod
    @override
    def infer(cls, x: Tensor, residual: Tensor | None, linear: Linear, *parameters: Tensor) -> Tensor:
        return linear.product(x, residual)

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, linear: Linear, *parameters: Tensor) -> Tensor:
        """Float32 [T, O] from x [T, I]; `parameters` are those of `linear`, named for autograd."""
        ctx.save_for_backward(x)
        ctx.linear = linear
        return linear.product(x, residual)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        (x,) = ctx.saved_tensors
        grad_x, grads = ctx.linear.gradient(grad, x, for_input=ctx.needs_input_grad[0])
        return (
            None if grad_x is None else grad_x.to(x.dtype),
            grad if ctx.needs_input_grad[1] else None,
            None,
            *grads,
        )


def rows_needed(matrices: Sequence[Matrix]) -> int:
    """Rows that products with all `matrices` need. A gradient's lora products need more; others pad themselves."""
    return min_rows() if torch.is_grad_enabled() else max(matrix.min_rows for matrix in matrices)


def cover(loras: Sequence[LoraRows], count: int, padded: int) -> Sequence[LoraRows]:
    """The runs of the first `count` rows, the last one extended over the padding, so that a lone small batch needs no
    second padding."""
    if loras[-1].stop == count == padded:
        return loras
    runs = list(loras)
    while runs[-1].start >= count:
        runs.pop()
    runs[-1] = LoraRows(runs[-1].start, padded, runs[-1].weights)
    return runs
