"""The parts of a layer in training, forward and backward by one call each: what leads to the heads that attend
(`attention_inputs.c`), and a dense MLP with silu (`mlp.c`).

Bits are those of the same kernels called one after the other, as `HeadsInTurn` and `MlpInParts` do. In bfloat16, one
gradient differs: that of b of a lora beside the second product of an MLP. It comes from the values of the forward here,
and in parts from the wide product, which is kept rounded.

Letters: T rows · E hidden size · H heads · D head dimension · I inner width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.kernels import LANES, NativeKernels, RowLayout
from mint.engine.cpu.loras import NativeLoras, groups_of, places_of
from mint.engine.cpu.panels import MOST_BLOCK_ROWS, PanelMatrix, even_block_rows
from mint.engine.cpu.threads import Int64, Split
from mint.engine.lora import SiteWeights
from mint.engine.model.linear import Linear
from mint.engine.model.lora_linear import MergedLinear, SeparateLinear
from mint.engine.model.operations import HeadSettings

_BLOCK_ROWS = 108
"""The most `block_rows` in layers.h without AMX. Rows of a block stay in the second cache between two steps. AMX
multiplies so fast that the matrices, which each block reads again, would come too slowly for so few rows."""


class _Lora(ctypes.Structure):
    """`Lora` in layers.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("bs", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("parts", Int64),
        ("rank", Int64),
        ("size", Int64),
        ("beside", Int64),
        ("scale", ctypes.c_double),
        ("down", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
    )


class _Inputs(ctypes.Structure):
    """`Inputs` in attention_inputs.c."""

    _fields_ = (
        ("norm", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("head_norms", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("lora", ctypes.c_void_p),
        ("hidden", Int64),
        ("total_heads", Int64),
        ("rotated_heads", Int64),
        ("joint_heads", Int64),
        ("dim", Int64),
        ("pairs", Int64),
        ("half", Int64),
        ("rounds", Int64),
        ("layout", Int64),
        ("block_rows", Int64),
    )


@dataclass(frozen=True)
class TrainedProduct:
    """A product: a matrix, and the trained lora, if there is one."""

    matrix: PanelMatrix
    lora: SiteWeights | None = None
    scale: float = 0.0
    beside: bool = False
    """Whether the lora's part is added to the product; else it is merged into the matrix."""

    @classmethod
    def of(cls, linear: Linear, loras: NativeLoras) -> TrainedProduct | None:
        """None where the kernel does not know such a matrix or lora."""
        matrix = linear.matrix if isinstance(linear, MergedLinear | SeparateLinear) else None
        if not isinstance(matrix, PanelMatrix) or not matrix.has_transpose:
            return None
        if isinstance(linear, MergedLinear):
            found = cls(matrix, linear.lora, linear.scale)
        elif isinstance(linear, SeparateLinear) and linear.loras:
            (_, lora, scale), *others = linear.loras  # in training, one lora has all rows
            if others:
                return None
            found = cls(matrix, lora, scale, beside=True)
        else:
            found = cls(matrix)
        return found if found.lora is None or loras.fits(found.lora) else None

    def takes_rounded_rows(self, loras: NativeLoras) -> bool:
        """Whether its kernels read rows in bfloat16: they would round them anyway."""
        return loras.rounds and self.matrix.dtype == torch.bfloat16

    def row_layout(self, loras: NativeLoras, kernels: NativeKernels) -> RowLayout:
        """How rows lie that kernels write for it in a forward."""
        if not self.takes_rounded_rows(loras):
            return RowLayout.FLOATS
        return RowLayout.TILES if kernels.has_amx else RowLayout.HALVES

    def empty_down(self, rows: int) -> Tensor | None:
        """For what the first matrix of a lora beside the product makes of so many rows, [T, ranks]: a backward needs
        it again."""
        return torch.empty(rows, len(self.lora.a)) if self.lora is not None and self.beside else None

    def transposed(self) -> PanelMatrix:
        """The transpose, which `of` has made sure of."""
        found = self.matrix.transposed()
        if found is None:
            raise AssertionError("a matrix in panels could not be transposed")
        return found


class _LoraSums:
    """A product's lora as the kernel takes it, and its gradients in groups of rows; a forward has none."""

    def __init__(self, loras: NativeLoras, product: TrainedProduct, down: Tensor | None, groups: int = 0) -> None:
        """`down` as `TrainedProduct.empty_down` makes it; a forward writes it, and a backward reads it."""
        self._loras, self._lora = loras, product.lora
        self.struct: _Lora | None = None
        if product.lora is not None:
            self._found = loras.room(groups, product.lora)
            self._places, self._widths = places_of(product.lora.bs)
            self.struct = _Lora(
                a=_address(product.lora.a),
                bs=ctypes.addressof(self._places),
                widths=ctypes.addressof(self._widths),
                parts=len(product.lora.bs),
                rank=product.lora.bs[0].shape[1],
                size=self._found.shape[1],
                beside=product.beside,
                scale=product.scale,
                down=_address(down),
                found=self._found.data_ptr(),
            )

    def total(self, borders: np.ndarray) -> list[Tensor]:
        """The gradients of the lora's matrices; the groups of each part lie between two `borders`."""
        return [] if self._lora is None else self._loras.sum(self._found, borders, self._lora)


class NativeHeads:
    """From the rows of a layer to the heads that attend, as `TrainedHeads`."""

    def __init__(
        self,
        kernels: NativeKernels,
        loras: NativeLoras,
        product: TrainedProduct,
        norm: Tensor | None,
        settings: HeadSettings,
        dtype: torch.dtype,
    ) -> None:
        """`product` [H·D, E]; `norm` [E]; heads, and what is kept for the backward, are of `dtype`."""
        self._kernels = kernels
        self._loras = loras
        self._product = product
        self._norm = norm
        self._settings = settings
        self._head_count = product.matrix.outputs // settings.head_dim
        self._dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """[T, H, D] of x [T, E]; and 1 / rms(x) [T, 1], where heads are normed the product [T, H, D] and 1 / rms of its
        heads [T, R, 1], and the rows of the lora's first matrix."""
        rows, settings = len(x), self._settings
        outputs = self._product.matrix.outputs
        heads = x.new_empty(rows, self._head_count, settings.head_dim, dtype=self._dtype)
        kept = None if settings.norms is None else torch.empty_like(heads)
        inverse = None if self._norm is None else x.new_empty(rows, 1)
        head_inverse = None if settings.norms is None else x.new_empty(rows, settings.rotated_heads, 1)
        row_kernels = self._kernels.libraries["rows"]
        block_rows = even_block_rows(rows, _most_block_rows(self._kernels))
        down = self._product.empty_down(rows)
        lora = _LoraSums(self._loras, self._product, down)
        self._kernels.libraries["attention_inputs"].attention_inputs(
            -(-rows // block_rows),
            x.numel() * outputs,
            Split.ONE_BY_ONE,
            rms_norm=row_kernels.rms_norm.address,
            product=self._product.matrix.product_kernel.address,
            add_lora=self._loras.add_kernel.address,
            finish_heads=row_kernels.finish_heads.address,
            inputs=self._inputs(lora, x.shape[1], block_rows),
            x=x,
            packed=self._product.matrix.panels,
            rows=rows,
            heads=heads,
            kept=kept,
            inverse=inverse,
            head_inverse=head_inverse,
        )
        return heads, [inverse, kept, head_inverse, down]

    def backward(
        self, grad: Tensor, x: Tensor, saved: Sequence[Tensor | None], *, for_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """From grad [T, H, D] the gradient for x, if asked for, and those of the lora's matrices."""
        inverse, kept, head_inverse, down = saved
        borders, parts = _groups(len(x), 1)
        groups = len(borders) - 1
        lora = _LoraSums(self._loras, self._product, down, groups)
        grad_x = torch.empty_like(x) if for_input else None
        row_kernels = self._kernels.libraries["rows"]
        transposed = self._product.transposed()
        self._kernels.libraries["attention_inputs"].attention_inputs_backward(
            groups,
            x.numel() * self._product.matrix.outputs,
            Split.ONE_BY_ONE,
            finish_heads_backward=row_kernels.finish_heads_backward.address,
            rms_norm_again=row_kernels.rms_norm_again.address,
            product=transposed.product_kernel.address,
            rms_norm_backward=row_kernels.rms_norm_backward.address,
            lora_gradient=self._loras.gradient_kernel.address,
            inputs=self._inputs(lora, x.shape[1], _most_block_rows(self._kernels)),
            borders=borders,
            grad=grad.contiguous(),
            x=x,
            packed=transposed.panels,
            kept=kept,
            inverse=inverse,
            head_inverse=head_inverse,
            grad_x=grad_x,
        )
        return grad_x, lora.total(parts)

    def _inputs(self, lora: _LoraSums, hidden: int, block_rows: int) -> _Inputs:
        settings = self._settings
        return _Inputs(
            norm=_address(self._norm),
            bias=_address(settings.bias),
            head_norms=_address(settings.norms),
            cos=_address(settings.cos),
            sin=_address(settings.sin),
            eps=settings.eps,
            lora=None if lora.struct is None else ctypes.addressof(lora.struct),
            hidden=hidden,
            total_heads=self._head_count,
            rotated_heads=settings.rotated_heads,
            joint_heads=settings.joint_heads,
            dim=settings.head_dim,
            pairs=settings.cos.shape[-1],
            half=self._dtype == torch.bfloat16,
            rounds=self._product.takes_rounded_rows(self._loras),
            layout=self._product.row_layout(self._loras, self._kernels),
            block_rows=block_rows,
        )


class NativeMlp:
    """The MLP of one layer, as `TrainedMlp`."""

    def __init__(
        self,
        kernels: NativeKernels,
        loras: NativeLoras,
        products: tuple[TrainedProduct, TrainedProduct],
        norm: Tensor,
        *,
        eps: float,
        adds: bool,
        parts: int,
        dtype: torch.dtype,
    ) -> None:
        """`products` [2·I, E] and [E, I]; `norm` [E]; `adds`: whether x is added. Gradients are summed over so many
        `parts` of the rows, one after the other. The wide product is kept in `dtype`."""
        self._kernels = kernels
        self._loras = loras
        self._gate_up, self._down = products
        self._norm = norm
        self._eps, self._adds = eps, adds
        self._parts = parts
        self._dtype = dtype
        self._inner = self._down.matrix.inputs
        self._rounds = all(own.takes_rounded_rows(loras) for own in products)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """[T, E] of x [T, E]; and 1 / rms(x) [T, 1], the wide product [T, 2·I], and the rows of the loras' first
        matrices."""
        rows, hidden = x.shape
        out, inverse = torch.empty_like(x), x.new_empty(rows, 1)
        wide = x.new_empty(rows, 2 * self._inner, dtype=self._dtype)
        downs = [own.empty_down(rows) for own in (self._gate_up, self._down)]
        gate_up_lora, down_lora = self._lora_sums(downs)
        row_kernels = self._kernels.libraries["rows"]
        block_rows = even_block_rows(rows, _most_block_rows(self._kernels))
        self._kernels.libraries["mlp"].mlp_forward(
            -(-rows // block_rows),
            x.numel() * self._inner,
            Split.ONE_BY_ONE,
            norm=row_kernels.rms_norm.address,
            product=self._gate_up.matrix.product_kernel.address,
            add_lora=self._loras.add_kernel.address,
            swiglu=row_kernels.swiglu.address,
            x=x,
            weight=self._norm,
            eps=self._eps,
            gate_up=self._gate_up.matrix.panels,
            down=self._down.matrix.panels,
            panel_words=LANES * self._gate_up.matrix.row_words,
            gate_up_lora=gate_up_lora.struct,
            down_lora=down_lora.struct,
            rows=rows,
            hidden=hidden,
            inner=self._inner,
            adds=self._adds,
            half=self._dtype == torch.bfloat16,
            layout=min(own.row_layout(self._loras, self._kernels) for own in (self._gate_up, self._down)),
            block_rows=block_rows,
            out=out,
            inverse=inverse,
            wide=wide,
        )
        return out, [inverse, wide, *downs]

    def backward(
        self, grad: Tensor, x: Tensor, saved: Sequence[Tensor | None], *, for_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """From grad [T, E] the gradient for x, if asked for, and those of the loras' matrices."""
        inverse, wide, *downs = saved
        rows, hidden = x.shape
        borders, parts = _groups(rows, self._parts)
        groups = len(borders) - 1
        gate_up_lora, down_lora = self._lora_sums(downs, groups)
        grad_x = torch.empty_like(x) if for_input else None
        row_kernels = self._kernels.libraries["rows"]
        gate_up, down = self._gate_up.transposed(), self._down.transposed()
        self._kernels.libraries["mlp"].mlp_backward(
            groups,
            x.numel() * self._inner,
            Split.ONE_BY_ONE,
            product=gate_up.product_kernel.address,
            swiglu=row_kernels.swiglu_gradient.address,
            norm=row_kernels.rms_norm_again.address,
            norm_backward=row_kernels.rms_norm_backward.address,
            lora_gradient=self._loras.gradient_kernel.address,
            borders=borders,
            grad=grad.contiguous(),
            x=x,
            weight=self._norm,
            inverse=inverse,
            wide=wide,
            gate_up=gate_up.panels,
            down=down.panels,
            gate_up_lora=gate_up_lora.struct,
            down_lora=down_lora.struct,
            hidden=hidden,
            inner=self._inner,
            adds=self._adds,
            half=self._dtype == torch.bfloat16,
            rounds=self._rounds,
            block_rows=_most_block_rows(self._kernels),
            grad_x=grad_x,
        )
        return grad_x, [*gate_up_lora.total(parts), *down_lora.total(parts)]

    def _lora_sums(self, downs: Sequence[Tensor | None], groups: int = 0) -> list[_LoraSums]:
        products = self._gate_up, self._down
        return [_LoraSums(self._loras, own, down, groups) for own, down in zip(products, downs, strict=True)]


def _most_block_rows(kernels: NativeKernels) -> int:
    return MOST_BLOCK_ROWS if kernels.has_amx else _BLOCK_ROWS


def _address(x: Tensor | None) -> int | None:
    if x is None:
        return None
    if not x.is_contiguous():
        raise AssertionError("kernels read contiguous tensors")
    return x.data_ptr()


def _groups(rows: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows at which groups begin, and the end; and the groups at which the parts begin, and the end. Each of the
    `parts`, which are as alike as they can be, is cut as `groups_of` says."""
    borders, starts = [0], [0]
    for part in range(parts):
        count = rows // parts + (part < rows % parts)
        groups = groups_of(count)
        begin = borders[-1]
        borders += [begin + count * (group + 1) // groups for group in range(groups)]
        starts.append(len(borders) - 1)
    return np.array(borders), np.array(starts)
