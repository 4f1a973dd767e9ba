"""The functions in `experts.c`, called through ctypes: where rows go, and each expert's products with them.

Knows layouts and how work is split over threads; knows nothing of layers, loras' names or autograd.

Letters: T rows · N experts · K experts per row · P pairs of a row and an expert (T·K) · I inputs · O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mint.engine.cpu.kernels import LANES, NativeKernels
from mint.engine.cpu.threads import Int64, address
from mint.engine.lora import SiteWeights
from mint.engine.model.config import ExpertsConfig
from mint.engine.model.linear import FrozenMatrix


@dataclass(frozen=True)
class Routing:
    """Which pairs there are: sorted by expert, those of one expert in the order of their rows."""

    shares: Tensor  # float32 [T, K], what each of a row's pairs counts
    chosen: Tensor  # int64 [T, K], its experts, best first
    order: Tensor  # int64 [P], the pairs by expert, numbered by row
    places: Tensor  # int64 [T, K], where each pair is among them
    borders: Tensor  # int64 [N + 1], where the pairs of each expert begin

    @property
    def per_token(self) -> int:
        """K."""
        return self.places.shape[1]


class ExpertMatrices:
    """One matrix [O, I] of each expert, all in panels."""

    def __init__(self, matrices: Sequence[FrozenMatrix]) -> None:
        """Of one shape and dtype; see `in_panels`."""
        self.panels = [own for own in (matrix.panels for matrix in matrices) if own is not None]
        self.outputs, self.inputs = matrices[0].outputs, matrices[0].inputs
        self.places = (ctypes.c_void_p * len(self.panels))(*(own.data_ptr() for own in self.panels))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.panels[0].dtype


def in_panels(matrices: Sequence[FrozenMatrix]) -> bool:
    """Whether kernels multiply with all of them."""
    return all(matrix.panels is not None for matrix in matrices)


@dataclass(frozen=True)
class ExpertLora:
    """What rows before `stop`, behind those of the lora before, add in each expert: `sites` of the first two experts;
    those of all lie equally far apart. None: nothing."""

    stop: int
    sites: tuple[SiteWeights, SiteWeights] | None = None
    scale: float = 0.0


class _Lora(ctypes.Structure):
    """`Lora` in experts.c."""

    _fields_ = (
        *(("stop", Int64), ("a", ctypes.c_void_p), ("bs", ctypes.c_void_p * 2)),
        *(("stride", Int64), ("rank", Int64), ("scale", ctypes.c_double)),
    )


class NativeExperts:
    """The compiled functions. Their results do not depend on the number of rows or threads."""

    def __init__(self, kernels: NativeKernels) -> None:
        """Beside `kernels`, whose threads they share."""
        self._library, self._threads = kernels.load("experts"), kernels.threads
        products = kernels.load("products")
        loras = kernels.load("loras")
        self._add_lora, self._lora_gradient = address(loras.add_lora), address(loras.lora_gradient)
        self._products = {
            torch.float32: (address(products.product_floats), address(products.turn_floats)),
            torch.bfloat16: (address(products.product_halves), address(self._library.turn_halves)),
        }

    def route(self, scores: Tensor, config: ExpertsConfig) -> Routing:
        """Where rows with these scores [T, N] go."""
        (count, experts), per_token = scores.shape, config.per_token
        shares, pairs = scores.new_empty(count, per_token), count * per_token
        chosen, places = (torch.empty(count, per_token, dtype=torch.int64) for _ in range(2))
        order, borders = (torch.empty(size, dtype=torch.int64) for size in (pairs, experts + 1))
        self._threads.run(
            self._library.route_rows, count, *(scores, experts, per_token, config.norm_topk_prob, shares, chosen),
            work=pairs * experts,
        )  # fmt: skip
        self._threads.run(self._library.sort_pairs, 1, *(chosen, pairs, experts, order, places, borders), work=0)
        return Routing(shares, chosen, order, places, borders)

    def gather(self, x: Tensor, routing: Routing) -> Tensor:
        """[P, E]: for each pair its row of x [T, E]."""
        pairs, width = len(routing.order), x.shape[1]
        out = x.new_empty(pairs, width)
        fields = (x.contiguous(), routing.order, routing.per_token, width, out)
        self._threads.run(self._library.gather_rows, pairs, *fields, work=out.numel())
        return out

    def combine(
        self, pairs: Tensor, routing: Routing, *, shares: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """[T, E]: for each row the sum of its pairs [P, E], times `shares` [T, K], plus `residual` [T, E]."""
        count, width = len(routing.places), pairs.shape[1]
        out = pairs.new_empty(count, width)
        residual = None if residual is None else residual.contiguous()
        fields = (pairs, shares, residual, routing.places, routing.per_token, width, out)
        self._threads.run(self._library.combine_pairs, count, *fields, work=pairs.numel())
        return out

    def weigh(self, inner: Tensor, grad: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """The shares' gradients [T, K] and the one for `inner` [P, I], for a share that multiplies what a linear map
        makes of it; `grad` [P, I], which is overwritten, is what the map gives back without the share."""
        grad_shares, (pairs, width) = torch.empty_like(routing.shares), inner.shape
        fields = (routing.order, routing.shares, inner, width, grad, grad_shares)
        self._threads.run(self._library.weigh_pairs, pairs, *fields, work=inner.numel())
        return grad_shares, grad

    def multiply(self, rows: Tensor, matrices: ExpertMatrices, routing: Routing, out: Tensor | None = None) -> Tensor:
        """`row @ weight.T` of each row's expert, float32 [P, O] from [P, I]; into `out`, if given."""
        out = rows.new_empty(len(rows), matrices.outputs) if out is None else out
        product, _ = self._products[matrices.dtype]
        self._threads.run(
            self._library.multiply_experts, matrices.outputs // LANES,
            *(product, matrices.places, routing.borders, len(matrices.panels)),
            *(rows, matrices.inputs, matrices.outputs, out), work=rows.numel() * matrices.outputs,
        )  # fmt: skip
        return out

    def multiply_transposes(self, rows: Tensor, matrices: ExpertMatrices, routing: Routing) -> Tensor:
        """`row @ weight` of each row's expert, float32 [P, I] from [P, O]."""
        out = rows.new_empty(len(rows), matrices.inputs)
        self._threads.run(
            self._library.multiply_transposes, matrices.inputs // LANES,
            *(*self._products[matrices.dtype], matrices.places, routing.borders, len(matrices.panels)),
            *(matrices.dtype.itemsize, rows, matrices.inputs, matrices.outputs, out),
            work=rows.numel() * matrices.inputs,
        )  # fmt: skip
        return out

    def add_loras(self, out: Tensor, rows: Tensor, routing: Routing, loras: Sequence[ExpertLora]) -> None:
        """Adds to `out` [P, O] what `loras`, which cover all rows, give for `rows` [P, I]."""
        sites = [lora.sites[0] for lora in loras if lora.sites is not None]
        if not sites:
            return
        own, widths = (_Lora * len(loras))(*map(_describe, loras)), [len(b) for b in sites[0].bs]
        ranks = max(len(site.a) for site in sites)
        self._threads.run(
            self._library.add_expert_loras, len(rows),
            *(self._add_lora, own, routing.borders, routing.order, (Int64 * len(widths))(*widths)),
            *(len(routing.borders) - 1, routing.per_token, len(widths), rows, rows.shape[1], out.shape[1], out),
            work=len(rows) * ranks * (rows.shape[1] + out.shape[1]),
        )  # fmt: skip

    def add_lora_gradients(
        self, grad: Tensor, rows: Tensor, routing: Routing, lora: ExpertLora, grad_rows: Tensor | None
    ) -> None:
        """From grad [P, O] for the products of `rows` [P, I]: adds what the lora's matrices get to their `.grad`, which
        lies as they do, and what the rows get to `grad_rows` [P, I], if there is one. No loras: nothing."""
        first = None if lora.sites is None else lora.sites[0]
        if first is None or first.a.grad is None:
            return
        own, widths, experts = _describe(lora), [len(b) for b in first.bs], len(routing.borders) - 1
        self._threads.run(
            self._library.add_lora_gradients, experts,
            *(self._lora_gradient, own, routing.borders, (Int64 * len(widths))(*widths), experts, len(widths)),
            *(grad, rows, rows.shape[1], grad.shape[1], grad_rows, first.a.grad),
            work=len(rows) * len(first.a) * (rows.shape[1] + grad.shape[1]),
        )  # fmt: skip


def _describe(lora: ExpertLora) -> _Lora:
    if lora.sites is None:
        return _Lora(stop=lora.stop)
    first, second = lora.sites
    bs = (ctypes.c_void_p * 2)(*(b.data_ptr() for b in first.bs))
    stride = (second.a.data_ptr() - first.a.data_ptr()) // first.a.element_size()
    return _Lora(lora.stop, first.a.data_ptr(), bs, stride, first.bs[0].shape[1], lora.scale)
