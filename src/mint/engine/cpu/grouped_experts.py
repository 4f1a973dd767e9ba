"""A layer's mixture of experts by the native kernels: one step of autograd with a backward written by hand.

Rows are sorted by expert once, so each expert runs one product over its own rows. For the backward only the input, the
routing and the wide product are kept. Knows nothing of attention, sequences or losses.

Letters: T rows · E hidden size · N experts · K experts per row · P pairs of a row and an expert (T·K) · I inner width
of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.experts import ExpertLora, ExpertMatrices, NativeExperts, Routing, in_panels
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.lora import LoraRows, LoraWeights, SiteWeights, expert_site
from mint.engine.model.config import DecoderConfig, ExpertsConfig
from mint.engine.model.functions import run
from mint.engine.model.weights import Experts, LayerWeights


class GroupedExperts:
    """One layer's experts, the router among them, and the norm before both."""

    def __init__(
        self, kernels: NativeKernels, weights: Experts, norm: Tensor, config: DecoderConfig, mixture: ExpertsConfig,
        layer: int,
    ) -> None:  # fmt: skip
        """`norm` [E]; the matrices of `weights` are in panels."""
        self._kernels, self._native = kernels, NativeExperts(kernels)
        self._norm, self._eps, self._router = norm, config.rms_norm_eps, weights.router
        self._gate_up, self._down = ExpertMatrices(weights.gate_up), ExpertMatrices(weights.down)
        self._mixture, self._layer = mixture, layer

    @property
    def routes_natively(self) -> bool:
        """Whether kernels compute the scores, too."""
        return self._router.min_rows == 1

    def mix(self, x: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """x + experts(norm(x)) [T, E]; `loras` cover all rows, with a gradient one does."""
        if not torch.is_grad_enabled():
            return self._forward(x, loras)[0]
        trained = None if loras[0].weights is None else self._site(loras[0].weights, 0, "gate_up")
        return run(_Mixture, x, None if trained is None else trained.a, self, loras)

    def _forward(self, x: Tensor, loras: Sequence[LoraRows]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Routing]]:
        """The rows; and 1 / rms of x, the scores, the wide product [P, 2·I] and the routing."""
        native = self._native
        normed, inverse = self._kernels.rms_norm(x, self._norm, self._eps)
        scores = self._scores(normed)
        routing = native.route(scores, self._mixture)
        rows = native.gather(normed, routing)
        wide = native.multiply(rows, self._gate_up, routing)
        native.add_loras(wide, rows, routing, self._loras(loras, "gate_up"))
        inner = self._kernels.swiglu(wide)
        pairs = native.multiply(inner, self._down, routing, out=rows)
        native.add_loras(pairs, inner, routing, self._loras(loras, "down"))
        out = native.combine(pairs, routing, shares=routing.shares, residual=x)
        return out, (inverse, scores, wide, routing)

    def _backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, scores: Tensor, wide: Tensor, routing: Routing,
        lora: LoraWeights | None, *, for_input: bool,
    ) -> Tensor | None:  # fmt: skip
        """The gradient for x, if asked for; those of the loras are added to their `.grad`."""
        native = self._native
        own = LoraRows(0, len(x), lora)
        grads = native.gather(grad, routing)
        inner = self._kernels.swiglu(wide)
        # Without the shares, which come to the narrow side: it gives their gradient, too.
        grad_inner = native.multiply_transposes(grads, self._down, routing)
        weighted = inner * routing.shares.view(-1)[routing.order].unsqueeze(1)
        native.add_lora_gradients(grads, weighted, routing, self._lora(own, "down"), grad_inner)
        grad_shares, grad_inner = native.weigh(inner, grad_inner, routing)
        grad_wide = self._kernels.swiglu_backward(grad_inner, wide)
        rows = native.gather(self._kernels.rms_norm_again(x, inverse, self._norm), routing)
        grad_rows = native.multiply_transposes(grad_wide, self._gate_up, routing) if for_input else None
        native.add_lora_gradients(grad_wide, rows, routing, self._lora(own, "gate_up"), grad_rows)
        if grad_rows is None:
            return None
        routed = self._router.gradient(_grad_scores(grad_shares, scores, routing, self._mixture))
        grad_normed = native.combine(grad_rows, routing, residual=routed)
        return self._kernels.rms_norm_backward(grad_normed, x, inverse, self._norm, grad)

    def _scores(self, normed: Tensor) -> Tensor:
        missing = max(0, self._router.min_rows - len(normed))
        if not missing:
            return self._router.product(normed)
        return self._router.product(F.pad(normed, (0, 0, 0, missing)))[: len(normed)].contiguous()

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


def group_experts(
    kernels: NativeKernels | None, layers: Sequence[LayerWeights], config: DecoderConfig
) -> Mapping[int, GroupedExperts]:
    """By layer, the mixtures that kernels can compute."""
    found = {}
    for index, layer in enumerate(layers):
        mixture, experts = config.experts_of(index), layer.experts
        if kernels is None or mixture is None or experts is None or not in_panels(experts.gate_up + experts.down):
            continue
        found[index] = GroupedExperts(kernels, experts, layer.post_norm, config, mixture, index)
    return found


class _Mixture(torch.autograd.Function):
    """`GroupedExperts.mix` of rows that share one lora."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, trained: Tensor | None, experts: GroupedExperts, loras: Sequence[LoraRows]
    ) -> Tensor:
        """[T, E] from x [T, E]; `trained` has autograd go through here where x needs no gradient, but the loras do."""
        out, (inverse, scores, wide, routing) = experts._forward(x, loras)
        ctx.save_for_backward(x, inverse, scores, wide.to(experts._gate_up.dtype))
        ctx.experts, ctx.lora, ctx.routing = experts, loras[0].weights, routing
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        x, inverse, scores, wide = ctx.saved_tensors
        found = (grad.contiguous(), x, inverse, scores, wide.float(), ctx.routing, ctx.lora)
        return ctx.experts._backward(*found, for_input=ctx.needs_input_grad[0]), None, None, None


def _grad_scores(grad_shares: Tensor, scores: Tensor, routing: Routing, mixture: ExpertsConfig) -> Tensor:
    """The gradient for the scores [T, N] from that for the shares [T, K]."""
    weighted = grad_shares * routing.shares
    total = weighted.sum(1, keepdim=True)
    if mixture.norm_topk_prob:  # shares are the softmax over the chosen alone
        return torch.zeros_like(scores).scatter_(1, routing.chosen, weighted.addcmul_(routing.shares, total, value=-1))
    return scores.softmax(-1).mul_(-total).scatter_add_(1, routing.chosen, weighted)
