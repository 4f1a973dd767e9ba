"""Quantized matrices in panels of 16 outputs, multiplied by `quantized.c` with the bits of the widened matrix.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mint.engine.cpu.kernels import LANES, Field, NativeKernels
from mint.engine.cpu.panels import NativeProducts, PanelMatrix
from mint.engine.quantized.number_formats import NF4_VALUES, QuantizedWeight

KINDS = {"nf4": 0, "int8": 1, "fp8": 2}
"""The numbers of the kinds in quantized.c."""


class QuantizedPanels:
    """A `Matrix` whose products widen it in the processor's cache, to float32 or bfloat16. A gradient widens all of it
    for the moment."""

    min_rows = 1
    gradient_bytes = 0

    def __init__(
        self, kernels: NativeKernels, products: NativeProducts, weight: QuantizedWeight, dtype: torch.dtype
    ) -> None:
        """`weight` fits: see `fit`."""
        library = kernels.libraries["quantized"]
        self._product = library.quantized_halves if dtype == torch.bfloat16 else library.quantized_floats
        self._widen = library.widen_panels
        self._products = products
        self._dtype = dtype
        self.outputs, self.inputs = weight.outputs, weight.inputs
        self.size_bytes = weight.size_bytes
        # In the order of the structs in C, which all have these fields next to one another.
        self._fields: dict[str, Field] = {
            "codes": _in_panels(weight.codes),
            "scales": _in_panels(weight.scales),
            "table": torch.tensor(NF4_VALUES),
            "kind": KINDS[weight.kind],
            "block": weight.block,
        }

    @staticmethod
    def fit(products: NativeProducts, weight: QuantizedWeight, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for this processor and these widths."""
        return dtype in products.kernels and not (weight.outputs % LANES or weight.inputs % (2 * LANES))

    def dense(self) -> Tensor:
        return self._widened().dense()

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = torch.empty(len(x), self.outputs)
        self._product(
            self.outputs // LANES,
            len(x) * self.outputs * self.inputs,
            x=x.float().contiguous(),
            **self._fields,
            rows=len(x),
            inputs=self.inputs,
            outputs=self.outputs,
            residual=None if residual is None else residual.contiguous(),
            out=out,
        )
        return out

    def gradient(self, grad: Tensor) -> Tensor:
        return self._widened().gradient(grad)

    def _widened(self) -> PanelMatrix:
        panels = torch.empty(self.outputs, self.inputs, dtype=self._dtype)
        self._widen(
            self.outputs // LANES,
            panels.numel(),
            **self._fields,
            inputs=self.inputs,
            halves=int(self._dtype == torch.bfloat16),
            target=panels,
        )
        return PanelMatrix(self._products, panels)


def _in_panels(rows: Tensor) -> Tensor:
    """[O, columns] as [O / 16, columns, 16]."""
    return rows.view(len(rows) // LANES, LANES, -1).transpose(1, 2).contiguous()
