"""Products with the frozen matrices of a base model: the interfaces, and the row-major layout in plain torch.

Rows go in and come out in float32; the product itself runs in the dtype of the matrix. Other layouts belong to a device
(`engine/cpu/onednn.py`, `engine/cpu/panels.py`).

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.lora import LoraRows, LoraWeights, Site

MKL_ROWS, MKL_ROWS_PER_THREAD = 16, 4
"""Below 4 rows, and below about 2 for each thread, MKL sums in another order (measured with 1 to 16 threads). With
twice as many every row gets the same bits, whatever the other rows are."""


def min_rows() -> int:
    """Rows that a float32 product by torch's own library needs so that it treats each of them alike."""
    return max(MKL_ROWS, MKL_ROWS_PER_THREAD * torch.get_num_threads())


class Matrix(Protocol):
    """A frozen matrix [O, I] in one layout; there is no gradient for the matrix itself."""

    outputs: int
    inputs: int

    @property
    def min_rows(self) -> int:
        """Rows that a product needs so that each of them gets the same bits whatever other rows are in the batch."""
        ...

    @property
    def size_bytes(self) -> int:
        """The memory of the weights."""
        ...

    @property
    def gradient_bytes(self) -> int:
        """The memory of what `gradient` keeps for the next time."""
        ...

    def dense(self) -> Tensor:
        """The matrix [O, I] row-major, in its dtype; a copy where the layout is another one."""
        ...

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ matrix.T` (+ residual), float32 [T, O] from x [T, I]."""
        ...

    def gradient(self, grad: Tensor) -> Tensor:
        """`grad @ matrix`, float32 [T, I] from grad [T, O]: the gradient for the product's input."""
        ...


@runtime_checkable
class MovableMatrix(Protocol):
    """A matrix whose memory can be taken away and brought back. Without it nothing may be multiplied."""

    @property
    def memory(self) -> Tensor:
        """All numbers of the layout."""
        ...

    def move(self, memory: Tensor) -> None:
        """Reads the same numbers from other memory, or gives the memory up if that is empty."""
        ...


class Linear(Protocol):
    """One site of the decoder for the rows of a batch: a frozen matrix and the loras of the rows."""

    @property
    def outputs(self) -> int:
        """O."""
        ...

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The trained matrices, in the order of the gradients that `gradient` returns."""
        ...

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Float32 [T, O] from x [T, I]; `residual` [T, O] is added."""
        ...

    def gradient(self, grad: Tensor, x: Tensor, *, for_input: bool = True) -> tuple[Tensor | None, list[Tensor]]:
        """From grad [T, O] the gradient for x [T, I], if asked for, and those of `parameters`. With a gradient, one
        lora covers all rows."""
        ...


class LoraLinears(Protocol):
    """Makes the linears of one base model."""

    def linear(self, site: str, matrix: Matrix, loras: Sequence[LoraRows]) -> Linear:
        """The `Linear` of a site for rows with these `loras`, which cover all of them."""
        ...

    def multiply(self, x: Tensor, matrix: Matrix, site: str, loras: Sequence[LoraRows]) -> Tensor:
        """The product [T, O] of any number of rows x [T, I]; `loras` may cover more rows than there are."""
        ...

    def versions(self, loras: Sequence[LoraRows]) -> list[int]:
        """Numbers that change when the matrices of the same `loras` have changed."""
        ...

    def kept_bytes(self, sites: Sequence[Site], *, with_gradient: bool) -> int:
        """The memory of what is kept for a lora that trains `sites`, beside its own weights."""
        ...

    def forget(self, lora: LoraWeights) -> None:
        """Frees what is kept for a lora, which is not expected again."""
        ...


class DenseMatrix:
    """A matrix in torch's own row-major layout, float32 or bfloat16."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight = weight

    @property
    def min_rows(self) -> int:
        return min_rows()

    @property
    def size_bytes(self) -> int:
        return self.outputs * self.inputs * self.weight.itemsize

    @property
    def memory(self) -> Tensor:
        return self.weight

    def move(self, memory: Tensor) -> None:
        """See `MovableMatrix`."""
        self.weight = memory

    @property
    def gradient_bytes(self) -> int:
        return 0

    def dense(self) -> Tensor:
        return self.weight

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.weight.dtype == torch.float32:
            return F.linear(x, self.weight) if residual is None else torch.addmm(residual, x, self.weight.t())
        return add_residual(F.linear(x.to(self.weight.dtype), self.weight).float(), residual)

    def gradient(self, grad: Tensor) -> Tensor:
        return grad.to(self.weight.dtype).mm(self.weight).float()


class Float32Product(DenseMatrix):
    """A bfloat16 matrix whose products are computed in float32: an unembedding's, for logits must not be rounded."""

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return add_residual(F.linear(x.float(), self.weight.float()), residual)


def add_residual(product: Tensor, residual: Tensor | None) -> Tensor:
    """`product + residual`, in place."""
    return product if residual is None else product.add_(residual)
