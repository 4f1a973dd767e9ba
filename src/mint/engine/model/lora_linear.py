"""What a forward multiplies its rows with at one site: a frozen matrix and a lora's part, apart or merged.

A small base's matrices are merged with the lora's after every change, `W + scale · B · A`, so that one product is left
of three; sampling and training use the same merged matrix, so their bits agree. Knows nothing of the layers' order,
sequences or autograd.

Letters: T rows · I inputs · O outputs · r rank · S lora parts of one product.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.lora import LoraWeights, SiteWeights
from mint.engine.model.linear import FrozenMatrix, min_rows

MERGED_BYTES = 16 << 20
"""A base whose matrices (those of its layers) are larger is not copied for every lora."""

MERGED_SETS = 32
"""Loras whose merged matrices are kept; for one more, those used longest ago are made again when needed."""


@dataclass(frozen=True)
class SiteProduct:
    """One fused product; `weight` holds the lora's part already where `merged`."""

    weight: FrozenMatrix
    lora: SiteWeights | None = None
    scale: float = 0.0
    merged: bool = False

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The trained matrices, in the order of the gradients that `gradient` returns."""
        return () if self.lora is None else (self.lora.a, *self.lora.bs)

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Float32 [T, O] from x [T, I]; `residual` [T, O] is added."""
        out = self.weight.product(x, residual)
        if not self.merged:
            self.add_lora(out, x)
        return out

    def add_lora(self, out: Tensor, x: Tensor) -> None:
        """Adds the lora's part, if there is one, to `out` [T, O] in place: the same bits for a row in any company."""
        lora, kernels = self.lora, self.weight.kernels
        if lora is None:
            return
        x = x.float()
        if kernels is not None and kernels.adds_lora(lora.a, lora.bs):
            kernels.add_lora(out, x, lora.a, lora.bs, self.scale)
            return
        missing = max(0, min_rows() - len(x))
        target = F.pad(out, (0, 0, 0, missing)) if missing else out
        _add_lora(target, F.pad(x, (0, 0, 0, missing)) if missing else x, lora, self.scale)
        if missing:
            out.copy_(target[: len(out)])

    def gradient(self, grad: Tensor, x: Tensor, *, for_input: bool = True) -> tuple[Tensor | None, list[Tensor]]:
        """From grad [T, O] the gradient for x [T, I], if asked for, and those of `parameters`."""
        grad_x = self.weight.gradient(grad) if for_input else None
        if self.lora is None:
            return grad_x, []
        a, bs, kernels = self.lora.a, self.lora.bs, self.weight.kernels
        if kernels is not None and kernels.adds_lora(a, bs):
            return grad_x, kernels.lora_gradient(grad, x, a, bs, self.scale, None if self.merged else grad_x)
        x = x.float()
        down = x @ a.t()  # computed again: keeping it would cost memory in every layer
        grad_down = torch.empty_like(down)
        grad_bs: list[Tensor] = []
        for columns, own, b in _parts(bs, a.shape[0]):
            grad_part = grad[:, own]
            torch.mm(grad_part, b, out=grad_down[:, columns])
            # Scaling the rank-wide matrices costs less than scaling [T, O]; [r, O] is the faster way round.
            grad_bs.append(down[:, columns].t().mm(grad_part).mul_(self.scale).t())
        grad_down.mul_(self.scale)
        if grad_x is not None and not self.merged:
            grad_x.addmm_(grad_down, a)
        return grad_x, [grad_down.t().mm(x), *grad_bs]


def _add_lora(out: Tensor, x: Tensor, lora: SiteWeights, scale: float) -> None:
    """Adds `scale · x @ a.T @ b.T` to `out` [T, O] in place; T is at least `min_rows`.

    The S parts of a fused product (query, key, value) share one `a` [S·r, I] and write side by side into `out`.
    """
    down = x @ lora.a.t()
    for columns, own, b in _parts(lora.bs, lora.a.shape[0]):
        out[:, own].addmm_(down[:, columns], b.t(), alpha=scale)


def fit_for_merging(matrices: Mapping[str, FrozenMatrix]) -> bool:
    """Whether merged copies of `matrices` (float32) cost little enough."""
    return sum(4 * matrix.outputs * matrix.inputs for matrix in matrices.values()) <= MERGED_BYTES


class MergedMatrices:
    """Base matrices with loras merged into them: made when first asked for, and again when the lora has changed."""

    def __init__(self, matrices: Mapping[str, FrozenMatrix]) -> None:
        """The base's `matrices` by site."""
        self._matrices = matrices
        self._sets: OrderedDict[LoraWeights, tuple[int, dict[str, SiteProduct]]] = OrderedDict()

    @property
    def sites(self) -> Collection[str]:
        """The sites at which loras are merged."""
        return self._matrices.keys()

    def of(self, lora: LoraWeights) -> dict[str, SiteProduct]:
        """The merged products of those sites that `lora` trains."""
        version = lora.flat._version  # every in-place change counts it up, also through a view
        found = self._sets.get(lora)
        if found is None or found[0] != version:
            # In inference mode they would be of no use to a later training pass.
            with torch.inference_mode(mode=False), torch.no_grad():
                found = (version, {name: self._merge(name, lora) for name in self._matrices if name in lora.sites})
            self._sets[lora] = found
            while len(self._sets) > MERGED_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(lora)
        return found[1]

    def _merge(self, name: str, lora: LoraWeights) -> SiteProduct:
        site, base = lora.sites[name], self._matrices[name]
        merged = base.dense().clone()
        for columns, own, b in _parts(site.bs, site.a.shape[0]):
            merged[own].addmm_(b, site.a[columns], alpha=lora.scale)
        return SiteProduct(FrozenMatrix(merged, base.kernels), site, lora.scale, merged=True)


def _parts(bs: tuple[Tensor, ...], ranks: int) -> list[tuple[slice, slice, Tensor]]:
    """For each part: where it lies among the S·r ranks, where among the outputs, and its b."""
    rank, start, parts = ranks // len(bs), 0, []
    for index, b in enumerate(bs):
        parts.append((slice(index * rank, (index + 1) * rank), slice(start, start + b.shape[0]), b))
        start += b.shape[0]
    return parts
