"""Products and gradients of loras, by `loras.c` and `lora_halves.c`.

Letters: T rows · I inputs · O outputs · r rank · S parts of a fused product.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.kernels import LANES, Kernel, NativeKernels, RowLayout
from mint.engine.cpu.threads import Int64, NotCompiledError, Split
from mint.engine.lora import SiteLora, SiteWeights

_GROUP_ROWS, _MOST_GROUPS = 192, 8
"""A lora's gradient is computed by threads in groups of at least so many rows, each with its own partial sums."""


class _LoraOfRows(ctypes.Structure):
    """`LoraOfRows` in loras.c: a lora, and the rows that it is for."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("start", Int64),
        ("stop", Int64),
        ("rank", Int64),
        ("scale", ctypes.c_double),
        ("rounded", Int64),
    )


class NativeLoras:
    """The compiled functions. A row's results do not depend on the number of rows or threads."""

    def __init__(self, kernels: NativeKernels, dtype: torch.dtype) -> None:
        """For a base whose products are computed in `dtype`. In bfloat16 the factors of products are rounded to it if
        the processor multiplies pairs of bfloat16, which takes half the time."""
        floats, halves = kernels.libraries["loras"], kernels.libraries["lora_halves"]
        self.rounds = dtype == torch.bfloat16 and _is_compiled(halves.add_lora_halves)
        """Whether factors are rounded to bfloat16."""
        self.add_kernel = halves.add_lora_halves if self.rounds else floats.add_lora
        self.gradient_kernel = halves.lora_gradient_halves if self.rounds else floats.lora_gradient
        self._add_loras = floats.add_loras
        self._sum_groups = floats.sum_groups
        self._compiled = _is_compiled(self.add_kernel)

    def fits(self, lora: SiteWeights) -> bool:
        """Whether the functions are compiled for such widths and this processor."""
        return self._compiled and math.gcd(LANES, lora.a.shape[1], *map(len, lora.bs)) == LANES

    def add(self, out: Tensor, x: Tensor, loras: Sequence[SiteLora]) -> None:
        """Adds `scale · x @ a.T @ b.T` of each lora to its own rows of `out` [T, O] in place, from x [T, I] of float32
        or bfloat16. The matrices are float32, or, if factors are rounded, bfloat16 with the same result."""
        (count, inputs) = x.shape
        outputs = out.shape[1]
        described = (_LoraOfRows * len(loras))()
        places: list[int] = []
        work = 0
        for own, (rows, lora, scale) in zip(described, loras, strict=True):
            rank = lora.bs[0].shape[1]
            own.a, own.start, own.stop, own.rank = _place(lora.a), rows.start, rows.stop, rank
            own.scale, own.rounded = scale, lora.a.dtype == torch.bfloat16
            places += [_place(b) for b in lora.bs]
            work += (rows.stop - rows.start) * (inputs * len(lora.a) + outputs * rank)
        _, first, _ = loras[0]
        self._add_loras(
            count,
            work,
            add_lora=self.add_kernel.address,
            loras=described,
            bs=(ctypes.c_void_p * len(places))(*places),
            widths=(Int64 * len(first.bs))(*map(len, first.bs)),
            count=len(loras),
            parts=len(first.bs),
            x=x,
            inputs=inputs,
            outputs=outputs,
            layout=RowLayout.HALVES if x.dtype == torch.bfloat16 else RowLayout.FLOATS,
            out=out,
        )

    def gradient(
        self, grad: Tensor, x: Tensor, lora: SiteWeights, scale: float, grad_x: Tensor | None = None
    ) -> list[Tensor]:
        """The gradients of `a` and the bs from grad [T, O] and x [T, I] of float32 or bfloat16; that of x is added to
        `grad_x` [T, I]."""
        (count, inputs) = x.shape
        outputs = grad.shape[1]
        rank = lora.bs[0].shape[1]
        grad, x = grad.float().contiguous(), x.contiguous()
        groups = groups_of(count)
        found = self.room(groups, lora)
        places, widths = places_of(lora.bs)
        self.gradient_kernel(
            groups,
            count * found.shape[1],
            Split.ONE_BY_ONE,
            grad=grad,
            x=x,
            a=lora.a,
            bs=places,
            widths=widths,
            rows=count,
            parts=len(lora.bs),
            rank=rank,
            inputs=inputs,
            outputs=outputs,
            groups=groups,
            adds=False,
            scale=scale,
            grad_x=grad_x,
            found=found,
            down=None,
            half=x.dtype == torch.bfloat16,
            grad_half=False,
        )
        return self.sum(found, np.array([0, groups]), lora)

    @staticmethod
    def room(groups: int, lora: SiteWeights) -> Tensor:
        """For the gradients of a lora's matrices from each group of rows: [groups, their elements]."""
        return torch.empty(groups, lora.a.numel() + sum(b.numel() for b in lora.bs))

    def sum(self, found: Tensor, borders: np.ndarray, lora: SiteWeights) -> list[Tensor]:
        """The gradients of `a` and the bs from `found`, as `room` makes it: the groups of each part are added in order,
        then the parts, which begin at the groups `borders` int64 [parts + 1]."""
        size = found.shape[1]
        total = torch.empty(size)
        self._sum_groups(
            -(-size // LANES), found.numel(), found=found, borders=borders, parts=len(borders) - 1, size=size, out=total
        )
        gradients, first = [], 0
        for weight in (lora.a, *lora.bs):
            gradients.append(total.as_strided(weight.shape, (weight.shape[1], 1), first))
            first += weight.numel()
        return gradients


def groups_of(rows: int) -> int:
    """In how many groups a gradient adds up so many rows: a function of the rows alone, so that partial sums are added
    in the same order on any number of threads. Several groups are an even number of them, which two threads can share.
    Group g begins at row `rows · g // groups`."""
    groups = min(max(rows // _GROUP_ROWS, 1), _MOST_GROUPS)
    return groups if groups == 1 else groups // 2 * 2


def places_of(bs: Sequence[Tensor]) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[Int64]]:
    """The addresses of the bs, and their outputs."""
    places = (ctypes.c_void_p * len(bs))()
    widths = (Int64 * len(bs))()
    for index, b in enumerate(bs):
        places[index] = _place(b)
        widths[index] = b.shape[0]
    return places, widths


def _place(matrix: Tensor) -> int:
    if not matrix.is_contiguous():
        raise AssertionError("kernels read contiguous tensors")
    return matrix.data_ptr()


def _is_compiled(kernel: Kernel) -> bool:
    """Whether a kernel that adds a lora is compiled for this processor, found by a call without rows."""
    try:
        kernel(
            0,
            0,
            x=None,
            a=None,
            bs=None,
            widths=None,
            parts=0,
            rank=0,
            inputs=0,
            outputs=0,
            scale=0.0,
            out=None,
            down=None,
            layout=RowLayout.FLOATS,
            rounded=False,
            given=False,
            next=None,
        )
    except NotCompiledError:
        return False
    return True
