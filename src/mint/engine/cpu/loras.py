"""Products and gradients of loras, by `loras.c`.

Letters: T rows · I inputs · O outputs · r rank · S parts of a fused product.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from mint.engine.cpu.kernels import LANES, Kernel, NativeKernels
from mint.engine.cpu.threads import Int64, NotCompiledError
from mint.engine.lora import SiteWeights
from mint.engine.model.operations import LoraPart

_GROUP_ROWS, _MOST_GROUPS = 192, 8
"""A lora's gradient is computed by threads in groups of at least so many rows, each with its own partial sums."""


@dataclass(frozen=True)
class _Panels:
    """The matrices of a lora as `add_loras` reads them, and the version of which they are a copy."""

    a: Tensor
    b: Tensor
    rank: int
    version: int


class NativeLoras:
    """The compiled functions. A row's results do not depend on the number of rows or threads."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._library = kernels.libraries["loras"]
        self._compiled = _is_compiled(self._library.add_lora)
        self._panels: WeakKeyDictionary[SiteWeights, _Panels] = WeakKeyDictionary()

    def fits(self, lora: SiteWeights) -> bool:
        """Whether the functions are compiled for such widths and this processor."""
        return self._compiled and math.gcd(LANES, lora.a.shape[1], *map(len, lora.bs)) == LANES

    def add(self, out: Tensor, x: Tensor, loras: Sequence[LoraPart]) -> None:
        """Adds `scale · x @ a.T @ b.T` of each lora to its rows of `out` [T, O] in place, from x [T, I]; in float32."""
        (count, inputs) = x.shape
        outputs = out.shape[1]
        widths = _integers([len(b) for b in loras[0][1].bs])
        panels = [self._packed(lora) for _, lora, _ in loras]
        ranks = [own.rank for own in panels]
        self._library.add_loras(
            count,
            count * max(ranks) * (inputs * len(widths) + outputs),
            x=x,
            loras=len(loras),
            starts=_integers([rows.start for rows, _, _ in loras]),
            stops=_integers([rows.stop for rows, _, _ in loras]),
            ranks=_integers(ranks),
            scales=(ctypes.c_double * len(loras))(*(scale for _, _, scale in loras)),
            a=_addresses([own.a for own in panels]),
            b=_addresses([own.b for own in panels]),
            widths=widths,
            parts=len(widths),
            inputs=inputs,
            outputs=outputs,
            out=out,
        )

    def _packed(self, lora: SiteWeights) -> _Panels:
        """The panels of a lora as it is now."""
        found = self._panels.get(lora)
        if found is None or found.version != lora.version:
            found = self._panels[lora] = _pack(lora)
        return found

    def gradient(
        self, grad: Tensor, x: Tensor, lora: SiteWeights, scale: float, grad_x: Tensor | None = None
    ) -> list[Tensor]:
        """The gradients of `a` and the bs from grad [T, O] and x [T, I]; that of x is added to `grad_x` [T, I]."""
        (count, inputs) = x.shape
        outputs = grad.shape[1]
        rank = lora.bs[0].shape[1]
        grad, x = grad.float().contiguous(), x.float().contiguous()
        # A function of the rows alone: partial sums are added in the same order on any number of threads.
        groups = min(max(count // _GROUP_ROWS, 1), _MOST_GROUPS)
        found = torch.empty(groups, rank * (len(lora.bs) * inputs + outputs))
        places, widths = _places(lora.bs)
        self._library.lora_gradient(
            groups,
            count * found.shape[1],
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
            scale=scale,
            grad_x=grad_x,
            found=found,
        )
        total = found[0]
        for own in found[1:]:
            total += own
        grads = []
        start = 0
        for weight in (lora.a, *lora.bs):
            grads.append(total[start : start + weight.numel()].view(weight.shape))
            start += weight.numel()
        return grads


def _pack(lora: SiteWeights) -> _Panels:
    """a [S, r / 16, I, 16], each part with zeros up to a multiple of 16, and b [O / 16, r, 16]."""
    parts, inputs = len(lora.bs), lora.a.shape[1]
    rank = lora.bs[0].shape[1]
    with torch.no_grad():
        padded = functional.pad(lora.a.detach().view(parts, rank, inputs), (0, 0, 0, -rank % LANES))
        a = padded.view(-1, LANES, inputs).transpose(1, 2).contiguous()
        b = torch.cat([part.detach().view(-1, LANES, rank).transpose(1, 2).reshape(-1) for part in lora.bs])
    return _Panels(a, b, rank, lora.version)


def _integers(values: Sequence[int]) -> ctypes.Array[Int64]:
    return (Int64 * len(values))(*values)


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _places(bs: Sequence[Tensor]) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[Int64]]:
    """The addresses of the bs, and their outputs."""
    places = (ctypes.c_void_p * len(bs))()
    widths = (Int64 * len(bs))()
    for index, b in enumerate(bs):
        if not b.is_contiguous():
            raise AssertionError("kernels read contiguous tensors")
        places[index] = b.data_ptr()
        widths[index] = b.shape[0]
    return places, widths


def _is_compiled(kernel: Kernel) -> bool:
    """Whether `add_lora` is compiled for this processor, found by a call without rows."""
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
        )
    except NotCompiledError:
        return False
    return True
