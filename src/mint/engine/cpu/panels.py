"""Frozen matrices in panels of 16 outputs, multiplied by `products.c`: each row gets the same bits whatever other rows
are in the batch.

Letters: T rows · I inputs · O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.kernels import LANES, Kernel, NativeKernels, RowLayout
from mint.engine.cpu.onednn import PACKED_ENTRIES, dense_gradient
from mint.engine.cpu.threads import NotCompiledError, Split

_INPUTS_PER_WORD = {torch.float32: 1, torch.bfloat16: 2}

MOST_BLOCK_ROWS = 288
"""Where there are many rows, threads take blocks of so many of them at most, and all panels."""

_FEWEST_BLOCK_ROWS = 32
"""With fewer, a product takes as long as reading the matrix."""


class NativeProducts:
    """The compiled products, and the layout that they read. A row's results do not depend on the number of rows or
    threads."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._library = kernels.libraries["products"]
        self._empty_matrix = kernels.empty_matrix
        self.empty_rows = kernels.empty_rows
        self.product_by_rows = self._library.product_by_rows
        self._has_amx = kernels.has_amx
        products = {torch.float32: self._library.product_floats, torch.bfloat16: self._library.product_halves}
        self.kernels = {dtype: product for dtype, product in products.items() if is_compiled(product)}
        """The kernel for panels of each dtype."""

    def fit(self, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
        """Whether there are panels of such a matrix."""
        return dtype in self.kernels and not (outputs % LANES or inputs % (LANES * _INPUTS_PER_WORD[dtype]))

    def turned_copy_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """The memory that a `SmallPanelMatrix` of such a shape takes for its transpose; 0 where there is none."""
        is_kept = outputs * inputs < PACKED_ENTRIES and self.fit(outputs, inputs, dtype)
        return outputs * inputs * dtype.itemsize if is_kept else 0

    def pack(self, weight: Tensor) -> Tensor | None:
        """The panels of a matrix [O, I] of float32 or bfloat16, of its shape; None where its widths or the processor do
        not fit."""
        (outputs, inputs), dtype = weight.shape, weight.dtype
        if not self.fit(outputs, inputs, dtype):
            return None
        weight, panels = weight.contiguous(), self._empty_matrix(weight.shape, dtype)
        self._rearrange(self._library.pack_words, weight, panels)
        return panels

    def unpack(self, panels: Tensor) -> Tensor:
        """The matrix itself."""
        weight = torch.empty_like(panels)
        self._rearrange(self._library.unpack_words, panels, weight)
        return weight

    def transpose(self, panels: Tensor) -> Tensor | None:
        """The panels of the transpose; None where its widths do not fit."""
        (outputs, inputs), dtype = panels.shape, panels.dtype
        if outputs % (LANES * _INPUTS_PER_WORD[dtype]):
            return None
        transposed = torch.empty(inputs, outputs, dtype=dtype)
        kernel = self._library.turn_floats if dtype == torch.float32 else self._library.turn_halves
        kernel(
            inputs // LANES,
            panels.numel(),
            source=panels,
            inputs=inputs,
            outputs=outputs,
            target=transposed,
        )
        return transposed

    def gradient(self, panels: Tensor, grad: Tensor) -> Tensor | None:
        """`grad @ matrix`, float32 [T, I] from grad [T, O]. The transpose is made piece by piece, and takes 1 MB
        for each thread. None where the widths do not fit, or the processor has no AMX."""
        outputs, inputs = panels.shape
        if not self._has_amx or panels.dtype != torch.bfloat16 or outputs % (2 * LANES):
            return None
        grad = grad if grad.dtype == torch.bfloat16 else grad.float()
        grad = grad if grad.stride(1) == 1 else grad.contiguous()  # rows may be apart, as those of logits are
        out = torch.empty(len(grad), inputs)
        self._library.gradient_halves(
            inputs // LANES,
            len(grad) * panels.numel(),
            grad=grad.data_ptr(),
            layout=RowLayout.HALVES if grad.dtype == torch.bfloat16 else RowLayout.FLOATS,
            stride=grad.stride(0),
            packed=panels,
            rows=len(grad),
            inputs=inputs,
            outputs=outputs,
            out=out,
        )
        return out

    def _rearrange(self, kernel: Kernel, source: Tensor, target: Tensor) -> None:
        outputs, inputs = source.shape
        words = inputs // _INPUTS_PER_WORD[source.dtype]
        kernel(outputs // LANES, source.numel(), source=source, words=words, target=target)


class PanelMatrix:
    """A matrix in panels. A gradient transposes it for the moment."""

    min_rows = 1

    def __init__(self, products: NativeProducts, panels: Tensor) -> None:
        self.outputs, self.inputs = panels.shape
        self.products = products
        self.panels = panels
        self.product_kernel = products.kernels[panels.dtype]

    @property
    def dtype(self) -> torch.dtype:
        """That of the products."""
        return self.panels.dtype

    @property
    def address(self) -> int:
        """The address of the panels, as the kernels take it."""
        return self.panels.data_ptr()

    @property
    def row_words(self) -> int:
        """The words of 32 bits of a row of the matrix; a panel has 16 rows."""
        return self.inputs // _INPUTS_PER_WORD[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.outputs * self.inputs * self.panels.itemsize

    @property
    def memory(self) -> Tensor:
        return self.panels

    def move(self, memory: Tensor) -> None:
        """See `MovableMatrix`."""
        self.panels = memory

    @property
    def gradient_bytes(self) -> int:
        return 0

    def dense(self) -> Tensor:
        return self.products.unpack(self.panels)

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Matrix`. The rows are rounded if the panels are; then they may be rounded already."""
        rows = len(x)
        out = self.products.empty_rows(rows, self.outputs)
        is_half = x.dtype == self.dtype == torch.bfloat16
        layout = RowLayout.HALVES if is_half else RowLayout.FLOATS
        x = (x if is_half else x.float()).contiguous()
        residual = None if residual is None else residual.contiguous()
        work = rows * self.outputs * self.inputs
        if 2 * rows < self.outputs or rows < 2 * MOST_BLOCK_ROWS:
            self.product_kernel(
                self.outputs // LANES,
                work,
                x=x,
                packed=self.panels,
                rows=rows,
                inputs=self.inputs,
                outputs=self.outputs,
                residual=residual,
                out=out,
                layout=layout,
                next=None,
            )
            return out
        block_rows = even_block_rows(rows, MOST_BLOCK_ROWS)
        self.products.product_by_rows(
            -(-rows // block_rows),
            work,
            Split.ONE_BY_ONE,
            product=self.product_kernel.address,
            x=x,
            packed=self.panels,
            rows=rows,
            inputs=self.inputs,
            outputs=self.outputs,
            residual=residual,
            out=out,
            layout=layout,
            block_rows=block_rows,
        )
        return out

    def gradient(self, grad: Tensor) -> Tensor:
        transposed = self.transposed()
        return dense_gradient(self.dense(), grad) if transposed is None else transposed.product(grad)

    @property
    def has_transpose(self) -> bool:
        """Whether the widths of the transpose fit."""
        return self.products.fit(self.inputs, self.outputs, self.dtype)

    def transposed(self) -> PanelMatrix | None:
        """The transpose [I, O]; None where its widths do not fit."""
        panels = self.products.transpose(self.panels)
        return None if panels is None else PanelMatrix(self.products, panels)


class SmallPanelMatrix(PanelMatrix):
    """A matrix whose transpose is kept once a gradient has needed it: it costs little memory."""

    def __init__(self, products: NativeProducts, panels: Tensor) -> None:
        super().__init__(products, panels)
        self._transposed: PanelMatrix | None = None

    @property
    @override
    def gradient_bytes(self) -> int:
        return self.size_bytes

    @override
    def move(self, memory: Tensor) -> None:
        super().move(memory)
        self._transposed = None

    @override
    def transposed(self) -> PanelMatrix | None:
        self._transposed = self._transposed or super().transposed()
        return self._transposed


class PanelUnembedding(PanelMatrix):
    """A large matrix whose tensor stays beside the panels, because it may be the embedding too. Gradients use the
    tensor where `NativeProducts.gradient` gives none."""

    def __init__(self, products: NativeProducts, panels: Tensor, weight: Tensor) -> None:
        super().__init__(products, panels)
        self._weight = weight

    @override
    def dense(self) -> Tensor:
        return self._weight

    @override
    def gradient(self, grad: Tensor) -> Tensor:
        found = self.products.gradient(self.panels, grad)
        return dense_gradient(self._weight, grad) if found is None else found


def even_block_rows(rows: int, most: int) -> int:
    """The rows of blocks, at most `most`: as even as they can be, and as many blocks for each of torch's threads,
    unless they were very small."""
    threads = torch.get_num_threads()
    blocks = max(-(-rows // (most * threads)), 1) * threads
    return max(-(-rows // blocks), _FEWEST_BLOCK_ROWS)


def panel_matrix(products: NativeProducts, weight: Tensor) -> PanelMatrix | None:
    """`weight` [O, I] in panels, if it fits."""
    panels = products.pack(weight)
    if panels is None:
        return None
    return SmallPanelMatrix(products, panels) if weight.numel() < PACKED_ENTRIES else PanelMatrix(products, panels)


def panel_unembedding(products: NativeProducts, weight: Tensor) -> PanelMatrix | None:
    """Same as `panel_matrix`, for an unembedding."""
    panels = products.pack(weight)
    if panels is None:
        return None
    if weight.numel() < PACKED_ENTRIES:
        return SmallPanelMatrix(products, panels)
    return PanelUnembedding(products, panels, weight)


def is_compiled(product: Kernel) -> bool:
    """Whether a product is compiled for this processor, found by a call without rows."""
    try:
        product(
            0,
            0,
            x=None,
            packed=None,
            rows=0,
            inputs=LANES,
            outputs=LANES,
            residual=None,
            out=None,
            layout=RowLayout.FLOATS,
            next=None,
        )
    except NotCompiledError:
        return False
    return True
