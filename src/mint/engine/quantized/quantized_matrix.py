"""Products with a quantized matrix in plain torch.

A product widens the matrix to the dtype in which it multiplies. So sampler and trainer see the same numbers, and they
are those of a model that holds the widened matrices. Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mint.engine.model.linear import DenseMatrix, min_rows
from mint.engine.quantized.number_formats import QuantizedWeight


class QuantizedMatrix:
    """A `Matrix` that is widened for each product, which runs in `dtype`."""

    gradient_bytes = 0

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self.outputs, self.inputs = weight.outputs, weight.inputs
        self.weight = weight
        self._dtype = dtype

    @property
    def min_rows(self) -> int:
        return min_rows()

    @property
    def size_bytes(self) -> int:
        return self.weight.size_bytes

    def dense(self) -> Tensor:
        return self.weight.widen().to(self._dtype)

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return DenseMatrix(self.dense()).product(x.to(self._dtype), residual)

    def gradient(self, grad: Tensor) -> Tensor:
        return DenseMatrix(self.dense()).gradient(grad.to(self._dtype))
