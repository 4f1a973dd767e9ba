"""The products in `native_products.c`, called through ctypes.

Knows layouts and how work is split over threads; knows nothing of layers, loras' names or autograd.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mint.engine.native import LANES, NativeKernels
from mint.engine.native_threads import Int64


class NativeProducts:
    """The compiled products. Their results do not depend on the number of rows or threads."""

    def __init__(self, kernels: NativeKernels) -> None:
        """Compiles them beside `kernels`, whose threads they share.

        Raises:
            MissingExtraError: the compiler refuses.
        """
        self.threads, self.library = kernels.threads, kernels.load("native_products")
        of_no_rows = (*(None,) * 4, *(0,) * 4, 0.0, None)
        self._adds_loras = self.threads.try_run(self.library.add_lora, 0, *of_no_rows, work=0) == 0

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """A bfloat16 matrix [O, I] in panels; None where its widths or the processor do not fit."""
        outputs, inputs = weight.shape
        if weight.dtype != torch.bfloat16 or outputs % LANES or inputs % (2 * LANES):
            return None
        weight, panels = weight.contiguous(), torch.empty(weight.shape, dtype=weight.dtype)
        code = self.threads.try_run(
            self.library.pack_halves, outputs // LANES, weight, inputs, panels, work=weight.numel()
        )
        return PackedMatrix(self, panels) if code == 0 else None

    def adds_lora(self, a: Tensor, bs: Sequence[Tensor]) -> bool:
        """Whether `add_lora` is compiled for such widths and this processor."""
        return self._adds_loras and not a.shape[1] % LANES and not any(len(b) % LANES for b in bs)

    def add_lora(self, out: Tensor, x: Tensor, a: Tensor, bs: Sequence[Tensor], scale: float) -> None:
        """Adds `scale · x @ a.T @ b.T` to `out` [T, O] in place, from x [T, I], a [S·r, I] and S b's, whose outputs lie
        side by side; all float32."""
        (count, inputs), outputs = x.shape, out.shape[1]
        places = (ctypes.c_void_p * len(bs))(*(b.data_ptr() for b in bs))
        widths = (Int64 * len(bs))(*(b.shape[0] for b in bs))
        self.threads.run(
            self.library.add_lora, count, x, a, places, widths, len(bs), bs[0].shape[1], inputs, outputs, scale, out,
            work=count * (inputs * len(a) + outputs * bs[0].shape[1]),
        )  # fmt: skip


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [O, I] in `panels`, whose shape is kept for its numbers alone."""

    products: NativeProducts
    panels: Tensor

    def dense(self) -> Tensor:
        """The matrix itself, bfloat16."""
        (outputs, inputs), weight = self.panels.shape, torch.empty_like(self.panels)
        unpack = self.products.library.unpack_halves
        self.products.threads.run(unpack, outputs // LANES, self.panels, inputs, weight, work=weight.numel())
        return weight

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T` (+ residual), float32 [T, O] from float32 [T, I], which is rounded to bfloat16."""
        x, residual = x.float().contiguous(), None if residual is None else residual.contiguous()
        (outputs, inputs), out = self.panels.shape, torch.empty(len(x), len(self.panels))
        self.products.threads.run(
            self.products.library.product_halves, outputs // LANES,
            *(x, self.panels, len(x), inputs, outputs, residual, out), work=len(x) * outputs * inputs,
        )  # fmt: skip
        return out
