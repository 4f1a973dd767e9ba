"""Products with the frozen matrices of a base model: which library computes them, and in which precision.

Rows go in and come out in float32. The choice is a function of dtype, shape and processor, never of a timing, for the
libraries differ in the last bit. Knows nothing of layers, loras or gradients' use.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.cpu.linear import NativeProducts, PackedMatrix

PACKED_ENTRIES = 1 << 18
"""Without native kernels, matrices from this size on are multiplied by oneDNN, from its own layout. Smaller ones stay
in a core's cache, where MKL is faster: GFLOP/s at 64 rows, MKL and oneDNN: 93 and 84 for 128 x 768, 66 and 103 for
1024 x 4096; with the kernels 105 and 109. Of smaller ones the transpose is kept too, once a gradient has needed it."""

MANY_ROWS = 128
"""From here on oneDNN is the faster one for small matrices too. Only gradients may choose by it: a product's bits must
not depend on the number of rows."""

_MKL_ROWS, _MKL_ROWS_PER_THREAD, _ONEDNN_ROWS = 16, 4, 2
"""Below 4 rows, and below about 2 for each thread, MKL sums in another order (measured with 1 to 16 threads); oneDNN
treats only a single row otherwise (1 and 2 threads)."""

_ONEDNN_MULTIPLICATIONS = 16**3
"""Torch gives a bfloat16 product to oneDNN only above so many; its own sums in another order."""


def min_rows() -> int:
    """How many rows a float32 product by torch's own library needs so that each of them is treated alike."""
    return max(_MKL_ROWS, _MKL_ROWS_PER_THREAD * torch.get_num_threads())


class FrozenMatrix:
    """A matrix [O, I] of the base model, in the dtype that its products run in; it has no gradient of its own."""

    def __init__(self, weight: Tensor, kernels: NativeProducts | None = None, *, kept: bool = False) -> None:
        """`weight` [O, I] in float32 or bfloat16. On a CPU it is stored in the layout of `kernels`, and without them a
        large one in oneDNN's, beside the tensor itself only if that is `kept` anyway: gradients bring it back for a
        moment, at 1 to 3 % of the cost of 1,000 rows."""
        self.outputs, self.inputs = weight.shape
        self._dtype, self._onednn = weight.dtype, _has_onednn(weight)
        self._small = weight.numel() < PACKED_ENTRIES
        self._large = self._onednn and not self._small
        self.kernels = kernels if weight.device.type == "cpu" else None
        self._panels = None if self.kernels is None else self.kernels.pack(weight)
        self._turned: PackedMatrix | None = None
        self._packed = self._large and not kept and self._panels is None
        if self._packed:
            # The number of rows is a hint; one layout was the fastest from 1 to 4,096.
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self._weight = None if self._panels is not None and not kept else weight

    @property
    def panels(self) -> Tensor | None:
        """What the kernels multiply with, if they do: [O, I] by its shape alone."""
        return None if self._panels is None else self._panels.panels

    @property
    def min_rows(self) -> int:
        """How many rows a product needs so that each of them is treated alike."""
        if self._panels is not None:
            return 1
        by_onednn = self._large or (self._onednn and self._dtype == torch.bfloat16)
        if not by_onednn:
            return min_rows()
        return max(_ONEDNN_ROWS, _ONEDNN_MULTIPLICATIONS // (self.inputs * self.outputs) + 1)

    def dense(self) -> Tensor:
        """The matrix [O, I] itself; of one in another layout, a copy."""
        if self._weight is not None:
            return self._weight.to_dense() if self._packed else self._weight
        if self._panels is None:
            raise AssertionError("a matrix has a tensor or panels")
        return self._panels.dense()

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T` (+ residual), float32 [T, O] from x [T, I]."""
        if self._panels is not None:
            return self._panels.product(x, residual)
        weight = self._weight
        if weight is None:
            raise AssertionError("a matrix has a tensor or panels")
        if self._dtype == torch.float32:
            if self._large:
                return _onednn_product(x, weight, residual)
            return F.linear(x, weight) if residual is None else torch.addmm(residual, x, weight.t())
        rows = x.to(self._dtype)
        product = (_onednn_product(rows, weight) if self._packed else F.linear(rows, weight)).float()
        return product if residual is None else product.add_(residual)

    def gradient(self, grad: Tensor) -> Tensor:
        """`grad @ weight`, float32 [T, I] from grad [T, O]: what a product's gradient gives its input."""
        turned = self._transpose()
        if turned is not None:
            return turned.product(grad)
        weight = self.dense()
        grad = grad.to(self._dtype)
        # oneDNN takes the transposed view as it is.
        by_onednn = self._onednn and (self._large or len(grad) >= MANY_ROWS)
        return (_onednn_product(grad, weight.t()) if by_onednn else grad.mm(weight)).float()

    def _transpose(self) -> PackedMatrix | None:
        """The transpose in panels, where it is worth its memory: of large matrices for a moment only."""
        if self._panels is None or (self._weight is not None and not self._small):
            return None
        found = self._turned or self._panels.turned()
        if self._small:
            self._turned = found
        return found


class Unembedding(FrozenMatrix):
    """A matrix [V, E] whose products, the logits, are not rounded to bfloat16; its tensor stays, as it may be the
    embedding too."""

    def __init__(self, weight: Tensor, kernels: NativeProducts | None = None) -> None:
        """`weight` [O, I] in float32 or bfloat16. On a CPU it is held a second time: in the layout of the `kernels`,
        which round rows to bfloat16 if the weights are; without them a bfloat16 one in half precision, scaled to hold
        the same numbers, whose products run in float32."""
        super().__init__(weight, kernels, kept=True)
        self._halves, self._scale = None, 1.0
        halved = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and self._panels is None
        if halved and "fbgemm" in torch.backends.quantized.supported_engines:
            # A power of two below half precision's largest number, 65504: what it cannot hold is then 2^-30 of the
            # largest weight.
            self._scale = 2.0 ** math.floor(math.log2(32768.0 / max(float(weight.abs().max()), 1e-30)))
            self._halves = torch.ops.quantized.linear_prepack_fp16(weight.float().mul_(self._scale), None)

    @property
    def min_rows(self) -> int:
        """As of other matrices."""
        exact = self._dtype == torch.float32 or self._panels is not None
        return super().min_rows if exact else _ONEDNN_ROWS

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Float32 [T, O] from x [T, I], never rounded to less."""
        if self._dtype == torch.float32 or self._panels is not None:
            return super().product(x, residual)
        weight = self.dense()
        if self._halves is not None:
            product = torch.ops.quantized.linear_dynamic_fp16(x * (1 / self._scale), self._halves)
        elif weight.is_cuda:
            product = torch.mm(x.to(self._dtype), weight.t(), out_dtype=torch.float32)
        else:
            product = F.linear(x, weight.float())
        return product if residual is None else product.add_(residual)


def _has_onednn(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn_product(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """`x @ weight.T` (+ residual) in their dtype."""
    if residual is None:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    else:
        product = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, None, "add")
    return product
