"""The products in `products.c` and `loras.c`, called through ctypes.

Knows layouts and how work is split over threads; knows nothing of layers, loras' names or autograd.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mint.engine.cpu.kernels import LANES, NativeKernels
from mint.engine.cpu.threads import Int64

_INPUTS_PER_WORD = {torch.float32: 1, torch.bfloat16: 2}

_GROUP_ROWS, _MOST_GROUPS = 192, 8
"""Threads share out a lora's gradient in groups of at least so many rows; each has partial sums of its own."""


class NativeProducts:
    """The compiled products. Their results do not depend on the number of rows or threads."""

    def __init__(self, kernels: NativeKernels) -> None:
        """Compiles them beside `kernels`, whose threads they share.

        Raises:
            MissingExtraError: the compiler refuses.
        """
        self.threads = kernels.threads
        self.library, self._loras = kernels.load("products"), kernels.load("loras")
        of_no_rows = (*(None,) * 4, *(0,) * 4, 0.0, None)
        self._adds_loras = self.threads.try_run(self._loras.add_lora, 0, *of_no_rows, work=0) == 0
        products = {torch.float32: self.library.product_floats, torch.bfloat16: self.library.product_halves}
        self._products = {
            dtype: product
            for dtype, product in products.items()
            if self.threads.try_run(product, 0, None, None, 0, LANES, LANES, None, None, work=0) == 0
        }

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """A matrix [O, I] of float32 or bfloat16 in panels; None where its widths or the processor do not fit."""
        (outputs, inputs), dtype = weight.shape, weight.dtype
        if dtype not in self._products or outputs % LANES or inputs % (LANES * _INPUTS_PER_WORD[dtype]):
            return None
        weight, panels = weight.contiguous(), torch.empty(weight.shape, dtype=dtype)
        self._rearrange(self.library.pack_words, weight, panels)
        return PackedMatrix(self, panels)

    def unpack(self, panels: Tensor) -> Tensor:
        """The matrix itself."""
        weight = torch.empty_like(panels)
        self._rearrange(self.library.unpack_words, panels, weight)
        return weight

    def turn(self, panels: Tensor) -> Tensor | None:
        """The panels of the transpose; None where its widths do not fit."""
        (outputs, inputs), dtype = panels.shape, panels.dtype
        if outputs % (LANES * _INPUTS_PER_WORD[dtype]):
            return None
        turned = torch.empty(inputs, outputs, dtype=dtype)
        kernel = self.library.turn_floats if dtype == torch.float32 else self.library.turn_halves
        self.threads.run(kernel, inputs // LANES, panels, inputs, outputs, turned, work=panels.numel())
        return turned

    def product(self, x: Tensor, panels: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T` (+ residual), float32 [T, O] from float32 [T, I], which is rounded if the panels are."""
        x, residual = x.float().contiguous(), None if residual is None else residual.contiguous()
        (outputs, inputs), out = panels.shape, torch.empty(len(x), len(panels))
        self.threads.run(
            self._products[panels.dtype], outputs // LANES,
            *(x, panels, len(x), inputs, outputs, residual, out), work=len(x) * outputs * inputs,
        )  # fmt: skip
        return out

    def adds_lora(self, a: Tensor, bs: Sequence[Tensor]) -> bool:
        """Whether `add_lora` and `lora_gradient` are compiled for such widths and this processor."""
        return self._adds_loras and not a.shape[1] % LANES and not any(len(b) % LANES for b in bs)

    def add_lora(self, out: Tensor, x: Tensor, a: Tensor, bs: Sequence[Tensor], scale: float) -> None:
        """Adds `scale · x @ a.T @ b.T` to `out` [T, O] in place, from x [T, I], a [S·r, I] and S b's, whose outputs lie
        side by side; all float32."""
        (count, inputs), outputs = x.shape, out.shape[1]
        self.threads.run(
            self._loras.add_lora, count, x, a, *_places(bs), len(bs), bs[0].shape[1], inputs, outputs, scale, out,
            work=count * (inputs * len(a) + outputs * bs[0].shape[1]),
        )  # fmt: skip

    def lora_gradient(
        self, grad: Tensor, x: Tensor, a: Tensor, bs: Sequence[Tensor], scale: float, grad_x: Tensor | None = None
    ) -> list[Tensor]:
        """From grad [T, O] and x [T, I] what `a` and the bs get, as `add_lora` knows them; what x gets is added to
        `grad_x` [T, I]."""
        (count, inputs), outputs, rank = x.shape, grad.shape[1], bs[0].shape[1]
        grad, x = grad.float().contiguous(), x.float().contiguous()
        # A function of the rows alone: partial sums are added in the same order on any number of threads.
        groups = min(max(count // _GROUP_ROWS, 1), _MOST_GROUPS)
        found = torch.empty(groups, rank * (len(bs) * inputs + outputs))
        self.threads.run(
            self._loras.lora_gradient, groups, grad, x, a, *_places(bs), count, len(bs), rank, inputs, outputs, groups,
            scale, grad_x, found, work=count * found.shape[1],
        )  # fmt: skip
        total = found[0]
        for own in found[1:]:
            total += own
        parts = total.split([part.numel() for part in (a, *bs)])
        return [part.view(like.shape) for part, like in zip(parts, (a, *bs), strict=True)]

    def _rearrange(self, kernel: ctypes._NamedFuncPointer, source: Tensor, target: Tensor) -> None:
        outputs, inputs = source.shape
        words = inputs // _INPUTS_PER_WORD[source.dtype]
        self.threads.run(kernel, outputs // LANES, source, words, target, work=source.numel())


def _places(bs: Sequence[Tensor]) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[Int64]]:
    """Where the bs are, and their outputs."""
    if not all(b.is_contiguous() for b in bs):
        raise AssertionError("kernels read contiguous tensors")
    places = (ctypes.c_void_p * len(bs))(*(b.data_ptr() for b in bs))
    return places, (Int64 * len(bs))(*(b.shape[0] for b in bs))


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [O, I] in `panels`, whose shape is kept for its numbers alone."""

    products: NativeProducts
    panels: Tensor

    def dense(self) -> Tensor:
        """The matrix itself, in its dtype; a copy."""
        return self.products.unpack(self.panels)

    def turned(self) -> PackedMatrix | None:
        """The transpose [I, O]; None where its widths do not fit."""
        panels = self.products.turn(self.panels)
        return None if panels is None else PackedMatrix(self.products, panels)

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x @ weight.T` (+ residual), float32 [T, O] from float32 [T, I], which is rounded if the matrix is."""
        return self.products.product(x, self.panels, residual)
