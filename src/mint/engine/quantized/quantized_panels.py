"""Quantized matrices in panels of 16 outputs, multiplied by `quantized.c`: a row's bits depend on that row alone.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.kernels import LANES, Kernel, NativeKernels, RowLayout
from mint.engine.cpu.onednn import dense_gradient
from mint.engine.cpu.panels import NativeProducts, is_compiled
from mint.engine.cpu.threads import Int64
from mint.engine.quantized.number_formats import TABLES, Quantization, QuantizedWeight

KERNELS: dict[Quantization, str] = {"nf4": "codes4", "mxfp4": "codes4", "int8": "int8", "fp8": "fp8"}
"""By format, how the names of its kernels in quantized.c begin."""

OFFSET = -0x7F7F7F80
"""The words of int8 and of its codes plus 128 differ by these bits: 0x80808080."""


PAIRED = frozenset({"avx512", "avx512-bf16", "avx512-amx"})
"""Sets of instructions whose kernels read codes of fp8 in pairs of inputs."""


class _QuantizedStruct(ctypes.Structure):
    """`Quantized` in quantized.c."""

    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("table", ctypes.c_void_p), ("block", Int64))
    arrays: Sequence[np.ndarray]
    """What it points to."""


class QuantizedPanels:
    """A `Matrix` whose numbers are widened in registers. In bfloat16, rows are rounded to it, but those for int8 are
    rounded to 16 bits, or not at all without the instructions of AVX512-BF16. A gradient widens pieces of the matrix,
    with their scales, to `dtype`."""

    min_rows = 1
    gradient_bytes = 0

    def __init__(self, kernels: NativeKernels, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        """`weight` fits: see `fit`."""
        self.outputs, self.inputs, self.dtype = weight.outputs, weight.inputs, dtype
        self.size_bytes = weight.size_bytes
        self._kernels = kernels
        self._kind = weight.kind
        codes = _arranged(weight, paired=kernels.instructions in PAIRED)
        self._codes = kernels.empty_matrix(codes.shape, codes.dtype).copy_(codes)
        self._scales = _in_panels(weight.scales)
        self._table = torch.tensor(TABLES.get(weight.kind, ()))
        self.product_kernel = _product(kernels, weight.kind, dtype)
        self.turn_kernel = self._turn(dtype)
        arrays = [own.numpy() for own in (self._codes, self._scales, self._table)]
        self._panels = _QuantizedStruct(*(own.ctypes.data for own in arrays), weight.block)
        self._panels.arrays = arrays

    @staticmethod
    def fit(kernels: NativeKernels, weight: QuantizedWeight, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for this processor and these widths."""
        is_even = not (weight.outputs % LANES or weight.inputs % (2 * LANES) or weight.block % weight.codes_per_word)
        return is_even and is_compiled(_product(kernels, weight.kind, dtype))

    @property
    def address(self) -> int:
        """The address of the struct that the kernels take: codes, scales and their table."""
        return ctypes.addressof(self._panels)

    def dense(self) -> Tensor:
        transposed = torch.empty(self.inputs, self.outputs)
        self._turn(torch.float32)(
            self.inputs // LANES,
            transposed.numel(),
            source=self._panels,
            inputs=self.inputs,
            outputs=self.outputs,
            target=transposed,
        )
        return NativeProducts(self._kernels).unpack(transposed).t().to(self.dtype).contiguous()

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = torch.empty(len(x), self.outputs)
        self.product_kernel(
            self.outputs // LANES,
            len(x) * self.outputs * self.inputs,
            x=x.float().contiguous(),
            packed=self._panels,
            rows=len(x),
            inputs=self.inputs,
            outputs=self.outputs,
            residual=None if residual is None else residual.contiguous(),
            out=out,
            layout=RowLayout.FLOATS,
            next=None,
        )
        return out

    def gradient(self, grad: Tensor) -> Tensor:
        if self.dtype == torch.bfloat16 and self.outputs % (2 * LANES):
            return dense_gradient(self.dense(), grad)
        products = self._kernels.libraries["products"]
        product = products.product_halves if self.dtype == torch.bfloat16 else products.product_floats
        out = torch.empty(len(grad), self.inputs)
        self._kernels.libraries["experts"].multiply_transposes(
            self.inputs // LANES,
            len(grad) * self.outputs * self.inputs,
            product=product.address,
            turn=self.turn_kernel.address,
            panels=(ctypes.c_void_p * 1)(self.address),
            borders=(Int64 * 2)(0, len(grad)),
            experts=1,
            bytes=self.dtype.itemsize,
            x=grad.float().contiguous(),
            inputs=self.inputs,
            outputs=self.outputs,
            out=out,
        )
        return out

    def _turn(self, dtype: torch.dtype) -> Kernel:
        library = self._kernels.libraries["quantized"]
        return getattr(library, f"turn_{KERNELS[self._kind]}_{_suffix(dtype)}")


def _product(kernels: NativeKernels, kind: Quantization, dtype: torch.dtype) -> Kernel:
    return getattr(kernels.libraries["quantized"], f"{KERNELS[kind]}_{_suffix(dtype)}")


def _suffix(dtype: torch.dtype) -> str:
    return "halves" if dtype == torch.bfloat16 else "floats"


def _arranged(weight: QuantizedWeight, *, paired: bool) -> Tensor:
    """The codes as `numbers` of quantized.c reads them, int32 [O / 16, words, 16]."""
    codes = weight.codes
    if weight.kind == "int8":
        return _in_panels(codes ^ OFFSET)
    if weight.kind in TABLES:
        places = [4 * (code // 2) + 16 * (code % 2) for code in range(8)]
        words = torch.zeros_like(codes)
        for code, place in enumerate(places):
            words |= ((codes >> 4 * code) & 15) << place
        return _in_panels(words)
    if not paired:
        return _in_panels(codes)
    outputs, words = codes.shape
    # [panels, fours of outputs, 4 outputs, words, pairs, 2 inputs]
    pairs = codes.view(torch.uint8).view(outputs // LANES, 4, 4, words, 2, 2)
    return pairs.permute(0, 3, 1, 4, 2, 5).reshape(outputs // LANES, words, 4 * LANES).view(torch.int32)


def _in_panels(rows: Tensor) -> Tensor:
    """[O, columns] as [O / 16, columns, 16]."""
    return rows.view(len(rows) // LANES, LANES, -1).transpose(1, 2).contiguous()
