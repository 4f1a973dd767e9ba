"""A layer's mixture of experts by the native kernels: one step of autograd with a backward written by hand.

Rows are sorted by expert once, so each expert runs one product over its own rows. For the backward only the input, the
routing and the wide product are kept.

Letters: T rows · E hidden size · N experts · K experts per row · P pairs of a row and an expert (T·K) · I inner width
of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.experts import ExpertLora, ExpertMatrices, NativeExperts, Routing
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.loras import NativeLoras
from mint.engine.cpu.panels import PanelMatrix
from mint.engine.lora import LoraRows, LoraWeights, SiteWeights
from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.config import DecoderConfig, ExpertsConfig
from mint.engine.model.operations import Operations
from mint.engine.model.weights import ExpertExchange, MixtureWeights, expert_site
from mint.engine.quantized.quantized_panels import QuantizedPanels


class NativeMixtureOfExperts:
    """One layer's router and experts, and the norm before them."""

    def __init__(
        self,
        operations: Operations,
        kernels: NativeKernels,
        loras: NativeLoras,
        weights: MixtureWeights,
        gate_up: Sequence[PanelMatrix] | Sequence[QuantizedPanels],
        down: Sequence[PanelMatrix] | Sequence[QuantizedPanels],
        norm: Tensor,
        layer: int,
        config: DecoderConfig,
        mixture: ExpertsConfig,
    ) -> None:
        """`norm` [E]; `gate_up` and `down` are the matrices of the experts in `weights`."""
        self._operations = operations
        self._native = NativeExperts(kernels, loras)
        self._norm = norm
        self._eps = config.rms_norm_eps
        self._router = weights.router
        self._router_bias = weights.router_bias
        self._gate_up = ExpertMatrices(kernels, gate_up, [own.gate_up_bias for own in weights.experts])
        self._down = ExpertMatrices(kernels, down, [own.down_bias for own in weights.experts])
        self._mixture = mixture
        self._layer = layer
        self._exchange: ExpertExchange | None = None

    def divide(self, exchange: ExpertExchange) -> None:
        """See `DivisibleExperts`."""
        self._exchange = exchange
        exchange.serve(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the experts' matrices."""
        return self._gate_up.dtype

    @property
    def routes_natively(self) -> bool:
        """Whether kernels compute the router's scores, too."""
        return isinstance(self._router, PanelMatrix)

    def __call__(self, x: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """x + experts(norm(x)) [T, E]; `loras` cover all rows, with a gradient one does."""
        trained = None if loras[0].weights is None else self._site(loras[0].weights, 0, "gate_up")
        return _Mixture.run(x, None if trained is None else trained.a, self, loras)

    def forward(
        self, x: Tensor, loras: Sequence[LoraRows], *, keeps: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Routing]:
        """The rows; and 1 / rms of x, the scores, the wide product [P, 2·I] and the routing. Where the experts are
        divided, each process has the wide products of its own, and keeps them with `keeps`."""
        native = self._native
        normed, inverse = self._operations.rms_norm(x, self._norm, self._eps)
        scores = self._scores(normed)
        routing = native.route(scores, self._mixture)
        rows = native.gather(normed, routing)
        if self._exchange is None:
            pairs, wide = self._run(rows, routing, loras)
        else:
            pairs, wide = self._exchange.run_rows(rows, _counts(routing), keeps=keeps), rows.new_empty(0)
        combined = native.combine(pairs, routing, weights=routing.weights, residual=x)
        return combined, inverse, scores, wide, routing

    def _run(self, rows: Tensor, routing: Routing, loras: Sequence[LoraRows]) -> tuple[Tensor, Tensor]:
        """The results [P, E] of `rows` [P, E], which are overwritten, and the wide product [P, 2·I]."""
        native = self._native
        wide = native.multiply(rows, self._gate_up, routing)
        native.add_loras(wide, rows, routing, self._loras(loras, "gate_up"))
        inner = self._operations.swiglu(wide)
        pairs = native.multiply(inner, self._down, routing, out=rows)
        native.add_loras(pairs, inner, routing, self._loras(loras, "down"))
        return pairs, wide

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        inverse: Tensor,
        scores: Tensor,
        wide: Tensor,
        routing: Routing,
        lora: LoraWeights | None,
        *,
        for_input: bool,
    ) -> Tensor | None:
        """The gradient for x, if asked for; those of the loras are added to their `.grad`."""
        native, operations = self._native, self._operations
        grads = native.gather(grad, routing)
        if self._exchange is None:
            own = LoraRows(0, len(x), lora)

            def rows() -> Tensor:  # as late as possible, for they take memory
                return native.gather(operations.rms_norm_again(x, inverse, self._norm), routing)

            grad_rows, grad_weights = self._gradient(grads, rows, wide, routing, own, for_input=for_input)
        else:
            weights = routing.weights.view(-1)[routing.order]
            grad_rows, found = self._exchange.gradient_of(grads, weights, _counts(routing))
            grad_weights = found[routing.places]
        if self._down.biases is not None:
            grad_weights.add_((grad @ self._down.biases.t()).gather(1, routing.chosen))
        if grad_rows is None or not for_input:
            return None
        routed = self._router.gradient(_grad_scores(grad_weights, scores, routing, self._mixture))
        grad_normed = native.combine(grad_rows, routing, residual=routed)
        return operations.rms_norm_backward(grad_normed, x, inverse, self._norm, grad)

    def _gradient(
        self,
        grads: Tensor,
        rows: Callable[[], Tensor],
        wide: Tensor,
        routing: Routing,
        own: LoraRows,
        *,
        for_input: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """The gradients for `rows` [P, E], if asked for, and for the routing weights [T, K], from `grads` [P, E] of the
        weighted results."""
        native, operations = self._native, self._operations
        inner = operations.swiglu(wide)
        # Without the routing weights: they are applied on the narrow side below, which gives their gradient, too.
        grad_inner = native.multiply_transposes(grads, self._down, routing)
        weighted = inner * routing.weights.view(-1)[routing.order].unsqueeze(1)
        native.add_lora_gradients(grads, weighted, routing, self._lora(own, "down"), grad_inner)
        grad_weights, grad_inner = native.weigh(inner, grad_inner, routing)
        grad_wide = operations.swiglu_backward(grad_inner, wide)
        grad_rows = native.multiply_transposes(grad_wide, self._gate_up, routing) if for_input else None
        native.add_lora_gradients(grad_wide, rows(), routing, self._lora(own, "gate_up"), grad_rows)
        return grad_rows, grad_weights

    def run_rows(self, rows: Tensor, counts: Sequence[int], lora: LoraWeights | None, *, keeps: bool) -> Any:
        """See `ExpertServer`."""
        kept = rows.clone() if keeps else None
        pairs, wide = self._run(rows, _routing_of(counts), [LoraRows(0, len(rows), lora)])
        return pairs, (kept, wide.to(self.dtype)) if keeps else None

    def gradient_of(
        self, grads: Tensor, weights: Tensor, counts: Sequence[int], lora: LoraWeights | None, kept: Any
    ) -> tuple[Tensor, Tensor]:
        """See `ExpertServer`."""
        rows, wide = kept
        own = LoraRows(0, len(rows), lora)
        grad_rows, grad_weights = self._gradient(
            grads, lambda: rows, wide.float(), _routing_of(counts, weights), own, for_input=True
        )
        assert grad_rows is not None, "it was asked for"
        return grad_rows, grad_weights.view(-1)

    def _scores(self, normed: Tensor) -> Tensor:
        missing = max(0, self._router.min_rows - len(normed))
        rows = F.pad(normed, (0, 0, 0, missing)) if missing else normed
        scores = self._router.product(rows)
        if missing:
            scores = scores[: len(normed)].contiguous()
        return scores if self._router_bias is None else self._operations.add_bias(scores, self._router_bias)

    def _loras(self, loras: Sequence[LoraRows], part: str) -> list[ExpertLora]:
        return [self._lora(own, part) for own in loras]

    def _lora(self, own: LoraRows, part: str) -> ExpertLora:
        first = None if own.weights is None else self._site(own.weights, 0, part)
        second = None if own.weights is None else self._site(own.weights, min(1, self._mixture.count - 1), part)
        if own.weights is None or first is None or second is None:
            return ExpertLora(own.stop)
        return ExpertLora(own.stop, (first, second), own.weights.scale)

    def _site(self, lora: LoraWeights, expert: int, part: str) -> SiteWeights | None:
        return lora.sites.get(f"{expert_site(self._layer, expert)}.{part}")


class _Mixture(AutogradFunction):
    """`NativeMixtureOfExperts` of rows that share one lora."""

    @classmethod
    @override
    def infer(
        cls, x: Tensor, trained: Tensor | None, experts: NativeMixtureOfExperts, loras: Sequence[LoraRows]
    ) -> Tensor:
        return experts.forward(x, loras)[0]

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, trained: Tensor | None, experts: NativeMixtureOfExperts, loras: Sequence[LoraRows]
    ) -> Tensor:
        """[T, E] from x [T, E]; `trained` forces a backward when only the loras need gradients."""
        out, inverse, scores, wide, routing = experts.forward(x, loras, keeps=True)
        ctx.save_for_backward(x, inverse, scores, wide.to(experts.dtype))
        ctx.experts, ctx.lora, ctx.routing = experts, loras[0].weights, routing
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        x, inverse, scores, wide = ctx.saved_tensors
        grad_x = ctx.experts.backward(
            grad.contiguous(),
            x,
            inverse,
            scores,
            wide.float(),
            ctx.routing,
            ctx.lora,
            for_input=ctx.needs_input_grad[0],
        )
        return grad_x, None, None, None


def _counts(routing: Routing) -> list[int]:
    """The pairs of each expert."""
    return routing.borders.diff().tolist()


def _routing_of(counts: Sequence[int], weights: Tensor | None = None) -> Routing:
    """The routing of rows that are sorted by expert, each to one expert."""
    borders = torch.tensor([0, *accumulate(counts)])
    order = torch.arange(int(borders[-1]))
    places = order.unsqueeze(1)
    weights = torch.ones(len(order)) if weights is None else weights
    return Routing(weights.unsqueeze(1).contiguous(), places, order, places, borders)


def _grad_scores(grad_weights: Tensor, scores: Tensor, routing: Routing, mixture: ExpertsConfig) -> Tensor:
    """The gradient for the scores [T, N] from that for the routing weights [T, K]."""
    weighted = grad_weights * routing.weights
    total = weighted.sum(1, keepdim=True)
    if mixture.norm_topk_prob:  # the weights are the softmax over the chosen alone
        chosen_grads = weighted.addcmul_(routing.weights, total, value=-1)
        return torch.zeros_like(scores).scatter_(1, routing.chosen, chosen_grads)
    return scores.softmax(-1).mul_(-total).scatter_add_(1, routing.chosen, weighted)
