"""Layouts of frozen matrices for torch's own libraries on a CPU: MKL for small ones, oneDNN for large ones.

The choice is a function of dtype, shape and processor, never of a timing, because the libraries differ in the last
bits.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.instruction_sets import instruction_set, multiplies_by_amx
from mint.engine.model.linear import DenseMatrix, Float32Product, add_residual, min_rows

PACKED_ENTRIES = 1 << 18
"""Matrices from this size on are multiplied by oneDNN, from its own layout. Smaller ones stay in a core's cache, where
MKL is faster: GFLOP/s at 64 rows, MKL and oneDNN: 93 and 84 for 128 x 768, 66 and 103 for 1024 x 4096."""

MANY_ROWS = 128
"""From so many rows on oneDNN is faster for small matrices, too. Only gradients may choose by the number of rows: the
bits of a product must not depend on it."""

ONEDNN_ROWS = 2
"""OneDNN sums only a single row in another order than many (measured with 1 and 2 threads)."""

FBGEMM_ROWS = 2
"""The same of FBGEMM, where it has AVX-512."""

ONEDNN_MULTIPLICATIONS = 16**3
"""Torch gives a bfloat16 product to oneDNN only above so many multiplications; its own loop sums in another order."""

_AMX_INPUTS = 32
"""By AMX, oneDNN sums over so many bfloat16 at once. Behind a row that is no multiple of it, it reads on (measured with
torch 2.13): what lies there times zero is NaN if it is not finite."""

_HAS_AVX512 = instruction_set().name.startswith("avx512")


class SmallMatrix(DenseMatrix):
    """Row-major: torch chooses the library of a product."""

    @property
    @override
    def min_rows(self) -> int:
        return min_rows() if self.weight.dtype == torch.float32 else _onednn_rows(self)

    @override
    def gradient(self, grad: Tensor) -> Tensor:
        return dense_gradient(self.weight, grad)


class OnednnMatrix(DenseMatrix):
    """Row-major, in float32, and multiplied by oneDNN: a large matrix whose tensor must stay as it is."""

    @property
    @override
    def min_rows(self) -> int:
        return _onednn_rows(self)

    @override
    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return onednn_product(x, self.weight, residual)

    @override
    def gradient(self, grad: Tensor) -> Tensor:
        return dense_gradient(self.weight, grad)


class PackedMatrix:
    """In oneDNN's own layout. A gradient unpacks it for a moment, at 1 to 3 % of the cost of 1,000 rows."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self._dtype = weight.dtype
        # The number of rows is a hint; one layout was the fastest from 1 to 4,096.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)

    @property
    def min_rows(self) -> int:
        return _onednn_rows(self)

    @property
    def size_bytes(self) -> int:
        return self.outputs * self.inputs * self._dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return 0

    def dense(self) -> Tensor:
        return self.packed.to_dense()

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._dtype == torch.float32:
            return onednn_product(x, self.packed, residual)
        return add_residual(onednn_product(x.to(self._dtype), self.packed).float(), residual)

    def gradient(self, grad: Tensor) -> Tensor:
        return dense_gradient(self.dense(), grad)


class WidenedMatrix(Float32Product):
    """A bfloat16 matrix that is widened for each product: an unembedding where nothing faster is built into torch, and
    any matrix that is not in panels where oneDNN multiplies by AMX."""

    @override
    def gradient(self, grad: Tensor) -> Tensor:
        return dense_gradient(self.weight, grad)


class HalfPrecisionUnembedding(WidenedMatrix):
    """A bfloat16 unembedding that is held a second time in half precision, scaled to hold the same numbers; its
    products run in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        # A power of two below half precision's largest number, 65504: what it cannot hold is then 2^-30 of the largest
        # weight.
        self._scale = 2.0 ** math.floor(math.log2(32768.0 / max(float(weight.abs().max()), 1e-30)))
        self._halves = torch.ops.quantized.linear_prepack_fp16(weight.float().mul_(self._scale), None)

    @property
    @override
    def min_rows(self) -> int:
        return FBGEMM_ROWS

    @override
    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = len(x)
        x = x * (1 / self._scale)
        if not _HAS_AVX512:
            x = functional.pad(x, (0, 0, 0, _rows_summed_alike(rows) - rows))
        product = torch.ops.quantized.linear_dynamic_fp16(x, self._halves)
        return add_residual(product[:rows], residual)


def _rows_summed_alike(rows: int) -> int:
    """At least `rows`, and as many as FBGEMM computes without a tile of one or two rows.

    With AVX2 it cuts rows into tiles of up to 6, and sums the products of one or two rows in another order.
    """
    return 3 if rows <= 3 else -(-rows // 6) * 6


def cpu_matrix(weight: Tensor) -> DenseMatrix | PackedMatrix:
    """The layout for products with `weight` [O, I]."""
    if not has_onednn(weight):
        return DenseMatrix(weight)
    if weight.dtype == torch.bfloat16 and multiplies_by_amx():
        return WidenedMatrix(weight)
    return SmallMatrix(weight) if weight.numel() < PACKED_ENTRIES else PackedMatrix(weight)


def cpu_unembedding(weight: Tensor) -> DenseMatrix:
    """The layout for logits with `weight` [V, E], which stays as it is."""
    if weight.dtype == torch.bfloat16:
        return HalfPrecisionUnembedding(weight) if _has_half_precision() else WidenedMatrix(weight)
    if not has_onednn(weight):
        return DenseMatrix(weight)
    return SmallMatrix(weight) if weight.numel() < PACKED_ENTRIES else OnednnMatrix(weight)


def cpu_unembedding_copy_bytes(vocabulary: int, hidden: int, dtype: torch.dtype) -> int:
    """The memory that `cpu_unembedding` takes beside the tensor."""
    return 2 * vocabulary * hidden if dtype == torch.bfloat16 and _has_half_precision() else 0


def _has_half_precision() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def dense_gradient(weight: Tensor, grad: Tensor) -> Tensor:
    """`grad @ weight`, float32 [T, I] from grad [T, O], with a row-major weight [O, I]."""
    grad = grad.to(weight.dtype)
    if weight.dtype == torch.bfloat16 and grad.shape[1] % _AMX_INPUTS and multiplies_by_amx():
        grad = functional.pad(grad, (0, -grad.shape[1] % _AMX_INPUTS))[:, : grad.shape[1]]  # zeros lie behind each row
    if has_onednn(weight) and (weight.numel() >= PACKED_ENTRIES or len(grad) >= MANY_ROWS):
        return onednn_product(grad, weight.t()).float()  # oneDNN takes the transposed view as it is
    return grad.mm(weight).float()


def sums_in_one_order() -> bool:
    """Whether a row of torch's products of float32 has the same bits whatever other rows there are: measured.

    On Intel's processors it has not, if the process multiplied before it called `sum_in_one_order`.
    """
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in ((64, 208), (208, 64), (96, 96)):
        matrix = Float32Product(torch.randn(outputs, inputs, generator=generator))
        x = torch.randn(40, inputs, generator=generator)
        whole = matrix.product(x)
        for rows in range(matrix.min_rows, len(x)):
            if not torch.equal(matrix.product(x[:rows]), whole[:rows]):
                return False
    return True


def has_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies in this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn_rows(matrix: DenseMatrix | PackedMatrix) -> int:
    return max(ONEDNN_ROWS, ONEDNN_MULTIPLICATIONS // (matrix.inputs * matrix.outputs) + 1)


def onednn_product(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """`x @ weight.T` (+ residual) in their dtype. These operations are torch's own, without a public name: its compiler
    puts them in place of `linear`, which gives float32 to MKL."""
    if residual is None:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    else:
        product = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, None, "add")
    return product
