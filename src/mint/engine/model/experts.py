"""A mixture of experts in place of a layer's MLP: every row goes to the few experts that the router finds best for it.

Rows are sorted by expert, so each expert runs one product over its own rows, and are summed per row in the order of the
router's choice: no row's bits depend on who else goes to the same expert. Knows nothing of attention or sequences.

Letters: T rows · E hidden size · K experts per row · P pairs of a row and an expert (T·K).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.lora import LoraRows, expert_site
from mint.engine.model.config import ExpertsConfig
from mint.engine.model.functions import SwiGlu, run
from mint.engine.model.linear import FrozenMatrix
from mint.engine.model.weights import Experts

Linear = Callable[[Tensor, FrozenMatrix, str, Sequence[LoraRows]], Tensor]
"""(rows [T, I], weight [O, I], site, loras that cover the rows) → [T, O], each row's bits its own, for any T from 1."""


def mix_experts(
    x: Tensor, residual: Tensor, weights: Experts, config: ExpertsConfig, layer: int,
    loras: Sequence[LoraRows], linear: Linear,
) -> Tensor:  # fmt: skip
    """`residual` plus what the chosen experts make of x, both [T, E]."""
    shares, chosen = _route(linear(x, weights.router, f"{layer}.router", loras), config)
    order = torch.argsort(chosen.reshape(-1), stable=True)  # pairs by expert, the rows of each in their own order
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    places = places.view(chosen.shape)
    rows = run(_Gather, x, order // config.per_token, places)
    parts = []
    for expert, start, stop, own in _segments(chosen, order, loras, config):
        site = expert_site(layer, expert)
        inner = run(SwiGlu, linear(rows[start:stop], weights.gate_up[expert], f"{site}.gate_up", own))
        parts.append(linear(inner, weights.down[expert], f"{site}.down", own))
    return run(_Combine, torch.cat(parts), shares, residual, order, places)


def _route(scores: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """For each row its experts [T, K], best first, and their shares [T, K], which have a gradient for the scores."""
    shares, chosen = scores.softmax(-1).topk(config.per_token, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if config.norm_topk_prob else shares), chosen


def _segments(
    chosen: Tensor, order: Tensor, loras: Sequence[LoraRows], config: ExpertsConfig
) -> list[tuple[int, int, int, list[LoraRows]]]:
    """Expert, its pairs `start:stop`, and whose loras they run with, for each expert that has rows."""
    experts = chosen.reshape(-1)[order].contiguous()
    count = chosen.shape[0]
    # Within an expert pairs stand by row, so the rows of one lora lie together: one search finds all borders.
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


class _Gather(torch.autograd.Function):
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


class _Combine(torch.autograd.Function):
    """`residual` plus each row's pairs times their shares."""

    @staticmethod
    @override
    def forward(ctx: Any, pairs: Tensor, shares: Tensor, residual: Tensor, order: Tensor, places: Tensor) -> Tensor:
        """[T, E] from pairs [P, E], shares [T, K], residual [T, E], the pairs by expert [P] and by row [T, K]."""
        ctx.save_for_backward(pairs, shares, order, places)
        out = residual.clone()
        for choice in range(places.shape[1]):
            # Two steps: whether a fused product and sum rounds once or twice is decided by a row's place.
            out.add_(pairs.index_select(0, places[:, choice]).mul_(shares[:, choice : choice + 1]))
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for pairs, shares and residual."""
        pairs, shares, order, places = ctx.saved_tensors
        chosen = grad.index_select(0, order // shares.shape[1])
        grad_shares = (chosen * pairs).sum(-1)[places]
        return chosen.mul_(shares.reshape(-1)[order].unsqueeze(1)), grad_shares, grad, None, None
