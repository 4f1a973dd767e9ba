"""Routing of rows to experts, and each expert's products with its own rows, by `experts.c`.

Letters: T rows · N experts · K experts per row · P pairs of a row and an expert (T·K) · I inputs · O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mint.engine.cpu.kernels import LANES, NativeKernels
from mint.engine.cpu.loras import NativeLoras
from mint.engine.cpu.panels import PanelMatrix
from mint.engine.cpu.threads import Int64
from mint.engine.lora import SiteWeights
from mint.engine.model.config import ExpertsConfig
from mint.engine.quantized.quantized_panels import QuantizedPanels


@dataclass(frozen=True)
class Routing:
    """The pairs of a row and an expert, sorted by expert; those of one expert in the order of their rows."""

    weights: Tensor  # float32 [T, K], what the results of a row's experts are multiplied with
    chosen: Tensor  # int64 [T, K], its experts, best first
    order: Tensor  # int64 [P], the pairs by expert, numbered by row
    places: Tensor  # int64 [T, K], the place of each pair in `order`
    borders: Tensor  # int64 [N + 1], where the pairs of each expert begin

    @property
    def per_token(self) -> int:
        return self.places.shape[1]


class ExpertMatrices:
    """One matrix [O, I] of each expert, all of one shape, dtype and class, and of one format if they are quantized; and
    their biases."""

    def __init__(
        self,
        kernels: NativeKernels,
        matrices: Sequence[PanelMatrix] | Sequence[QuantizedPanels],
        biases: Sequence[Tensor | None],
    ) -> None:
        first = matrices[0]
        self._matrices = matrices  # their memory lives as long as `places` do
        self.outputs, self.inputs, self.dtype = first.outputs, first.inputs, first.dtype
        self.product = first.product_kernel.address
        products, turn = kernels.libraries["products"], kernels.libraries["experts"].turn_halves
        is_half = self.dtype == torch.bfloat16
        if isinstance(first, QuantizedPanels):
            turn = first.turn_kernel
        elif not is_half:
            turn = products.turn_floats
        self.turn = turn.address
        self.transposed_product = (products.product_halves if is_half else products.product_floats).address
        self._places = self._find_places()
        own = [bias for bias in biases if bias is not None]
        self.biases = torch.stack(own) if own else None  # [N, O]

    @property
    def places(self) -> ctypes.Array[ctypes.c_void_p]:
        """The addresses of the experts' weights, in the order of the experts."""
        if self._matrices[0].address != self._places[0]:  # the weights of a layer move together
            self._places = self._find_places()
        return self._places

    def _find_places(self) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(self._matrices))(*(matrix.address for matrix in self._matrices))


@dataclass(frozen=True)
class ExpertLora:
    """The lora of the rows from the previous lora's `stop` up to this `stop`. `sites` are those of the first two
    experts; the sites of all experts are equally far apart. None: no lora."""

    stop: int
    sites: tuple[SiteWeights, SiteWeights] | None = None
    scale: float = 0.0


class _LoraStruct(ctypes.Structure):
    """`Lora` in experts.c."""

    _fields_ = (
        ("stop", Int64),
        ("a", ctypes.c_void_p),
        ("bs", ctypes.c_void_p * 2),
        ("stride", Int64),
        ("rank", Int64),
        ("scale", ctypes.c_double),
    )


class NativeExperts:
    """The compiled functions. Their results do not depend on the number of rows or threads."""

    def __init__(self, kernels: NativeKernels, loras: NativeLoras) -> None:
        self._library = kernels.libraries["experts"]
        self._add_lora = loras.add_kernel.address
        self._lora_gradient = loras.gradient_kernel.address

    def route(self, scores: Tensor, config: ExpertsConfig) -> Routing:
        """Routes rows by their scores [T, N]."""
        (count, experts) = scores.shape
        per_token = config.per_token
        pairs = count * per_token
        weights = scores.new_empty(count, per_token)
        chosen = torch.empty(count, per_token, dtype=torch.int64)
        self._library.route_rows(
            count,
            pairs * experts,
            scores=scores,
            experts=experts,
            per_token=per_token,
            normed=config.norm_topk_prob,
            weights=weights,
            chosen=chosen,
        )
        order = torch.empty(pairs, dtype=torch.int64)
        places = torch.empty_like(chosen)
        borders = torch.empty(experts + 1, dtype=torch.int64)
        self._library.sort_pairs(
            1,
            0,
            chosen=chosen,
            pairs=pairs,
            experts=experts,
            order=order,
            places=places,
            borders=borders,
        )
        return Routing(weights, chosen, order, places, borders)

    def gather(self, x: Tensor, routing: Routing) -> Tensor:
        """[P, E]: for each pair its row of x [T, E]."""
        out = x.new_empty(len(routing.order), x.shape[1])
        self._library.gather_rows(
            len(out),
            out.numel(),
            x=x.contiguous(),
            order=routing.order,
            per_token=routing.per_token,
            width=x.shape[1],
            out=out,
        )
        return out

    def combine(
        self, pairs: Tensor, routing: Routing, *, weights: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """[T, E]: for each row the sum of its pairs [P, E], times `weights` [T, K], plus `residual` [T, E]."""
        out = pairs.new_empty(len(routing.places), pairs.shape[1])
        self._library.combine_pairs(
            len(out),
            pairs.numel(),
            pairs=pairs,
            weights=weights,
            residual=None if residual is None else residual.contiguous(),
            places=routing.places,
            per_token=routing.per_token,
            width=pairs.shape[1],
            out=out,
        )
        return out

    def weigh(self, inner: Tensor, grad: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """The gradients for the routing weights [T, K] and for `inner` [P, I].

        A weight multiplies what a linear map makes of inner. `grad` [P, I], which is overwritten, is the gradient
        through the map without the weight."""
        grad_weights = torch.empty_like(routing.weights)
        self._library.weigh_pairs(
            len(inner),
            inner.numel(),
            order=routing.order,
            weights=routing.weights,
            inner=inner,
            width=inner.shape[1],
            grad=grad,
            grad_weights=grad_weights,
        )
        return grad_weights, grad

    def multiply(self, rows: Tensor, matrices: ExpertMatrices, routing: Routing, out: Tensor | None = None) -> Tensor:
        """`row @ matrix.T + bias` of each row's expert, float32 [P, O] from [P, I]; into `out`, if given."""
        out = rows.new_empty(len(rows), matrices.outputs) if out is None else out
        self._library.multiply_experts(
            matrices.outputs // LANES,
            rows.numel() * matrices.outputs,
            product=matrices.product,
            panels=matrices.places,
            borders=routing.borders,
            experts=len(matrices.places),
            x=rows,
            inputs=matrices.inputs,
            outputs=matrices.outputs,
            out=out,
        )
        if matrices.biases is not None:
            self._library.add_biases(
                len(out),
                out.numel(),
                biases=matrices.biases,
                borders=routing.borders,
                experts=len(matrices.biases),
                outputs=matrices.outputs,
                out=out,
            )
        return out

    def multiply_transposes(self, rows: Tensor, matrices: ExpertMatrices, routing: Routing) -> Tensor:
        """`row @ matrix` of each row's expert, float32 [P, I] from [P, O]."""
        out = rows.new_empty(len(rows), matrices.inputs)
        self._library.multiply_transposes(
            matrices.inputs // LANES,
            rows.numel() * matrices.inputs,
            product=matrices.transposed_product,
            turn=matrices.turn,
            panels=matrices.places,
            borders=routing.borders,
            experts=len(matrices.places),
            bytes=matrices.dtype.itemsize,
            x=rows,
            inputs=matrices.inputs,
            outputs=matrices.outputs,
            out=out,
        )
        return out

    def add_loras(self, out: Tensor, rows: Tensor, routing: Routing, loras: Sequence[ExpertLora]) -> None:
        """Adds to `out` [P, O] what `loras`, which cover all rows, give for `rows` [P, I]."""
        sites = [lora.sites[0] for lora in loras if lora.sites is not None]
        if not sites:
            return
        widths = [len(b) for b in sites[0].bs]
        ranks = max(len(site.a) for site in sites)
        self._library.add_expert_loras(
            len(rows),
            len(rows) * ranks * (rows.shape[1] + out.shape[1]),
            add=self._add_lora,
            loras=(_LoraStruct * len(loras))(*map(_describe, loras)),
            borders=routing.borders,
            order=routing.order,
            widths=(Int64 * len(widths))(*widths),
            experts=len(routing.borders) - 1,
            per_token=routing.per_token,
            parts=len(widths),
            x=rows,
            inputs=rows.shape[1],
            outputs=out.shape[1],
            out=out,
        )

    def add_lora_gradients(
        self, grad: Tensor, rows: Tensor, routing: Routing, lora: ExpertLora, grad_rows: Tensor | None
    ) -> None:
        """From grad [P, O] for the products of `rows` [P, I]: adds the gradients of the lora's matrices to their
        `.grad`, which has the same layout, and that of the rows to `grad_rows` [P, I], if given. Without a lora it does
        nothing."""
        first = None if lora.sites is None else lora.sites[0]
        if first is None or first.a.grad is None:
            return
        widths = [len(b) for b in first.bs]
        experts = len(routing.borders) - 1
        self._library.add_lora_gradients(
            experts,
            len(rows) * len(first.a) * (rows.shape[1] + grad.shape[1]),
            gradient=self._lora_gradient,
            lora=_describe(lora),
            borders=routing.borders,
            widths=(Int64 * len(widths))(*widths),
            experts=experts,
            parts=len(widths),
            grad=grad,
            x=rows,
            inputs=rows.shape[1],
            outputs=grad.shape[1],
            grad_x=grad_rows,
            totals=first.a.grad,
        )


def _describe(lora: ExpertLora) -> _LoraStruct:
    if lora.sites is None:
        return _LoraStruct(stop=lora.stop)
    first, second = lora.sites
    return _LoraStruct(
        stop=lora.stop,
        a=first.a.data_ptr(),
        bs=tuple(b.data_ptr() for b in first.bs),
        stride=(second.a.data_ptr() - first.a.data_ptr()) // first.a.element_size(),
        rank=first.bs[0].shape[1],
        scale=lora.scale,
    )
