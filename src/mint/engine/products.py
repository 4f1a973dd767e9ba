"""Products with the frozen matrices of a base model: which library computes them, and in which precision.

Rows go in and come out in float32. Knows nothing of layers, loras or gradients' use.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class FrozenMatrix:
    """A matrix [O, I] of the base model, in the dtype that its products run in; it has no gradient of its own."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` [O, I] in float32 or bfloat16."""
        self.weight = weight

    @property
    def outputs(self) -> int:
        """O."""
        return self.weight.shape[0]

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T` (+ residual), float32 [T, O] from x [T, I]."""
        if self.weight.dtype == torch.float32:
            return F.linear(x, self.weight) if residual is None else torch.addmm(residual, x, self.weight.t())
        product = F.linear(x.to(self.weight.dtype), self.weight).float()
        return product if residual is None else product.add_(residual)

    def gradient(self, grad: Tensor) -> Tensor:
        """`grad @ weight`, float32 [T, I] from grad [T, O]: what a product's gradient gives its input."""
        if self.weight.dtype == torch.float32:
            return grad.mm(self.weight)
        return grad.to(self.weight.dtype).mm(self.weight).float()
