"""Products with a quantized matrix by torch's own products.

A product widens the matrix to the dtype in which it multiplies. So sampler and trainer see the same numbers, and they
are those of a model that holds the widened matrices. Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mint.engine.model.linear import DenseMatrix, min_rows
from mint.engine.quantized.number_formats import QuantizedWeight

Widen = Callable[[QuantizedWeight, torch.dtype], Tensor]
"""Makes the matrix [O, I] of a dtype that the codes stand for."""


def widen_by_torch(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """`Widen` in plain torch, on any device."""
    return weight.widen().to(dtype)


class QuantizedMatrix:
    """A `Matrix` that is widened for each product, which runs in `dtype`."""

    gradient_bytes = 0

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, widen: Widen = widen_by_torch) -> None:
        self.outputs, self.inputs = weight.outputs, weight.inputs
        self.weight = weight
        self._dtype = dtype
        self._widen = widen

    @property
    def min_rows(self) -> int:
        return min_rows()

    @property
    def size_bytes(self) -> int:
        return self.weight.size_bytes

    def dense(self) -> Tensor:
        return self._widen(self.weight, self._dtype)

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return DenseMatrix(self.dense()).product(x.to(self._dtype), residual)

    def gradient(self, grad: Tensor) -> Tensor:
        return DenseMatrix(self.dense()).gradient(grad.to(self._dtype))
