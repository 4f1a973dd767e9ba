"""A mixture of experts in place of a layer's MLP: the router sends every row to the few experts that it scores highest.

Rows are sorted by expert, so each expert runs one product over its own rows. The results of a row are summed in the
order of the router's choice. So no row's bits depend on which other rows go to the same expert. Some families have one
more expert, which computes all rows.

Letters: T rows · E hidden size · K experts per row · P pairs of a row and an expert (T·K).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.model.autograd import AutogradFunction, backward
from mint.engine.model.config import DecoderConfig, ExpertsConfig
from mint.engine.model.layer_parts import Norm, norm_rows, norm_rows_again, with_bias
from mint.engine.model.linear import Linear, LoraLinears
from mint.engine.model.operations import Operations
from mint.engine.model.weights import ExpertExchange, MixtureWeights, expert_site


class MixtureOfExperts:
    """One layer's router and experts, and the norm before them."""

    def __init__(
        self,
        operations: Operations,
        weights: MixtureWeights,
        norm: Tensor,
        layer: int,
        config: DecoderConfig,
        loras: LoraLinears,
    ) -> None:
        """`norm` [E]."""
        mixture = config.experts_of(layer)
        if mixture is None:
            raise ValueError(f"layer {layer} has no experts")
        self._operations = operations
        self._weights = weights
        self._norm = norm
        self._eps = config.rms_norm_eps
        self._layer = layer
        self._mixture = mixture
        self._loras = loras
        self._exchange: ExpertExchange | None = None

    def divide(self, exchange: ExpertExchange) -> None:
        """See `DivisibleExperts`."""
        self._exchange = exchange
        exchange.serve(self)

    def __call__(self, x: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """x + the weighted sum of the chosen experts of norm(x), both [T, E]."""
        normed = Norm.run(x, self._norm, self._eps, self._operations)
        scores = self._loras.multiply(normed, self._weights.router, f"{self._layer}.router", loras)
        scores = with_bias(scores, self._weights.router_bias, self._operations)
        routing_weights, chosen = route(scores, self._mixture)
        return self.run_experts(normed, routing_weights, chosen, x, loras)

    def run_experts(
        self, normed: Tensor, routing_weights: Tensor, chosen: Tensor, residual: Tensor, loras: Sequence[LoraRows]
    ) -> Tensor:
        """`residual` [T, E] plus the sum of the experts `chosen` [T, K] of `normed` [T, E], with `routing_weights`
        [T, K]."""
        order = torch.argsort(chosen.reshape(-1), stable=True)  # pairs by expert, the rows of each in their own order
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        places = places.view(chosen.shape)
        rows = _Gather.run(normed, order // self._mixture.per_token, places)
        if self._exchange is None:
            segments = _segments(chosen, order, loras, self._mixture)
            pairs = torch.cat([self._run_expert(expert, rows[a:b], own) for expert, a, b, own in segments])
        else:
            counts = torch.bincount(chosen.reshape(-1), minlength=self._mixture.count).tolist()
            tracked = torch.empty(0, requires_grad=True)  # rows may need no gradient where the loras do
            pairs = _Exchanged.run(rows, tracked, self._exchange, counts)
        return _Combine.run(pairs, routing_weights, residual, order, places)

    def _run_expert(self, expert: int, rows: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """An expert's results of its own rows."""
        weights, site = self._weights.experts[expert], expert_site(self._layer, expert)
        wide = self._loras.multiply(rows, weights.gate_up, f"{site}.gate_up", loras)
        inner = SwiGlu.run(with_bias(wide, weights.gate_up_bias, self._operations), self._operations)
        narrow = self._loras.multiply(inner, weights.down, f"{site}.down", loras)
        return with_bias(narrow, weights.down_bias, self._operations)

    def run_rows(self, rows: Tensor, counts: Sequence[int], lora: LoraWeights | None, *, keeps: bool) -> Any:
        """See `ExpertServer`."""
        parts, start = [], 0
        with torch.set_grad_enabled(keeps):
            own = rows.detach().requires_grad_(keeps)
            for expert, count in enumerate(counts):
                if count:
                    loras = [LoraRows(0, count, lora)]
                    parts.append(self._run_expert(expert, own[start : start + count], loras))
                    start += count
            results = torch.cat(parts) if parts else torch.empty_like(rows)
        return results.detach(), (own, results)

    def gradient_of(
        self, grads: Tensor, weights: Tensor, counts: Sequence[int], lora: LoraWeights | None, kept: Any
    ) -> tuple[Tensor, Tensor]:
        """See `ExpertServer`. The routing weights are applied to the results, where the rows are from."""
        rows, results = kept
        if not len(rows):
            return torch.empty_like(grads), torch.empty_like(weights)
        with torch.enable_grad():
            backward(results, grads)
        return rows.grad, torch.zeros_like(weights)


def route(scores: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """For each row its routing weights [T, K], differentiable for the scores, and its experts [T, K], best first."""
    routing_weights, chosen = scores.softmax(-1).topk(config.per_token, dim=-1)
    return (
        routing_weights / routing_weights.sum(-1, keepdim=True) if config.norm_topk_prob else routing_weights
    ), chosen


def _segments(
    chosen: Tensor, order: Tensor, loras: Sequence[LoraRows], config: ExpertsConfig
) -> list[tuple[int, int, int, list[LoraRows]]]:
    """For each expert with rows: the expert, its pairs `start:stop`, and their loras."""
    experts = chosen.reshape(-1)[order].contiguous()
    count = chosen.shape[0]
    # An expert's pairs are in the order of their rows, so rows of one lora are neighbours: one search finds all
    # borders.
    keys = experts * count + order // config.per_token
    firsts = torch.tensor([run.start for run in loras])
    wanted = (torch.arange(config.count).unsqueeze(1) * count + firsts).reshape(-1)
    borders = [*torch.searchsorted(keys, wanted.to(keys.device)).tolist(), order.numel()]
    segments = []
    for expert in range(config.count):
        own = borders[expert * len(loras) : (expert + 1) * len(loras) + 1]
        start, stop = own[0], own[-1]
        if start < stop:
            runs = zip(own, own[1:], loras, strict=False)
            covers = [LoraRows(a - start, b - start, lora.weights) for a, b, lora in runs if a < b]
            segments.append((expert, start, stop, covers))
    return segments


class SharedExpert(AutogradFunction):
    """`routed` + sigmoid(norm(x) · gate) · MLP(norm(x)): the expert that computes all rows. Without a norm, x is
    normed; without `routed`, nothing is added.

    The gate of a row multiplies the inner values, which gives the same as multiplying the result.
    """

    @classmethod
    @override
    def infer(
        cls,
        x: Tensor,
        routed: Tensor | None,
        norm: Tensor | None,
        gate: Tensor,
        gate_up: Linear,
        down: Linear,
        eps: float,
        operations: Operations,
        *parameters: Tensor,
    ) -> Tensor:
        normed, _ = norm_rows(operations, x, norm, eps)
        weighted, _ = operations.gate_rows(operations.swiglu(gate_up.product(normed)), normed, gate)
        return down.product(weighted, routed)

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        routed: Tensor | None,
        norm: Tensor | None,
        gate: Tensor,
        gate_up: Linear,
        down: Linear,
        eps: float,
        operations: Operations,
        *parameters: Tensor,
    ) -> Tensor:
        """[T, E] from x and routed [T, E], norm and gate [E]; `parameters` are those of `gate_up`, then of `down`."""
        normed, inverse = norm_rows(operations, x, norm, eps)
        wide = gate_up.product(normed)
        weighted, shares = operations.gate_rows(operations.swiglu(wide), normed, gate)
        ctx.save_for_backward(x, inverse, wide.to(operations.dtype), shares, norm, gate)
        ctx.gate_up, ctx.down, ctx.operations, ctx.adds = gate_up, down, operations, routed is not None
        return down.product(weighted, routed)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, routed and the parameters."""
        x, inverse, narrow, shares, norm, gate = ctx.saved_tensors
        operations: Operations = ctx.operations
        wide = narrow.float()
        inner, active_gate = operations.swiglu_again(wide)
        grad_weighted, down_grads = ctx.down.gradient(grad, inner * shares)
        grad_gate = (grad_weighted * inner).sum(-1, keepdim=True) * shares * (1 - shares)
        grad_wide = operations.swiglu_backward(grad_weighted * shares, wide, active_gate)
        normed = norm_rows_again(operations, x, inverse, norm)
        grad_normed, wide_grads = ctx.gate_up.gradient(grad_wide, normed, for_input=ctx.needs_input_grad[0])
        grad_x = None
        if grad_normed is not None:
            grad_x = grad_normed.addcmul_(grad_gate, gate)
            if inverse is not None:
                grad_x = operations.rms_norm_backward(grad_x, x, inverse, norm)
        return grad_x, grad if ctx.adds else None, None, None, None, None, None, None, *wide_grads, *down_grads


class SwiGlu(AutogradFunction):
    """`silu(gate) · up` [T, I] of [T, 2·I]."""

    @staticmethod
    @override
    def forward(ctx: Any, gate_up: Tensor, operations: Operations) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.operations = operations
        return operations.swiglu(gate_up)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        return ctx.operations.swiglu_backward(grad.clone(), gate_up), None


class _Gather(AutogradFunction):
    """Copies rows to their pairs; the gradients of a row's pairs are added in one order, on every device."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """[P, E] from x [T, E], the row of each pair [P] and the pairs of each row [T, K]."""
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        (places,) = ctx.saved_tensors
        total = grad.index_select(0, places[:, 0])
        for choice in range(1, places.shape[1]):
            total.add_(grad.index_select(0, places[:, choice]))
        return total, None, None


class _Exchanged(AutogradFunction):
    """The results of rows whose experts other processes have, too."""

    @classmethod
    @override
    def infer(cls, rows: Tensor, tracked: Tensor, exchange: ExpertExchange, counts: Sequence[int]) -> Tensor:
        return exchange.run_rows(rows, counts, keeps=False)

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, tracked: Tensor, exchange: ExpertExchange, counts: Sequence[int]) -> Tensor:
        """[P, E] from `rows` [P, E] by expert, of which each expert has `counts`."""
        ctx.exchange, ctx.counts = exchange, counts
        return exchange.run_rows(rows, counts, keeps=True)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for the rows."""
        grad_rows, _ = ctx.exchange.gradient_of(grad, grad.new_zeros(len(grad)), ctx.counts)
        return grad_rows if ctx.needs_input_grad[0] else None, None, None, None


class _Combine(AutogradFunction):
    """`residual` plus each row's pairs times their routing weights."""

    @staticmethod
    @override
    def forward(
        ctx: Any, pairs: Tensor, routing_weights: Tensor, residual: Tensor, order: Tensor, places: Tensor
    ) -> Tensor:
        """[T, E] from pairs [P, E], weights [T, K], residual [T, E], the pairs by expert [P] and by row [T, K]."""
        ctx.save_for_backward(pairs, routing_weights, order, places)
        out = residual.clone()
        for choice in range(places.shape[1]):
            # Two steps: a fused multiply-add rounds once or twice depending on a row's place.
            out.add_(pairs.index_select(0, places[:, choice]).mul_(routing_weights[:, choice : choice + 1]))
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for pairs, routing weights and residual."""
        pairs, routing_weights, order, places = ctx.saved_tensors
        chosen = grad.index_select(0, order // routing_weights.shape[1])
        grad_weights = (chosen * pairs).sum(-1)[places]
        return chosen.mul_(routing_weights.reshape(-1)[order].unsqueeze(1)), grad_weights, grad, None, None
