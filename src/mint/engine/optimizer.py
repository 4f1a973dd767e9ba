"""AdamW over one flat vector, step for step as `torch.optim.AdamW`, with clipping by the global norm.

Torch's fused kernel does the same step in one pass, rounded in other places; it is meant for a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mint.engine.protocol import AdamSpec
from mint.engine.reductions.gradient_norm import norm_of, older_gradient_norm, square_sums
from mint.engine.reductions.state_division import StateDivision
from mint.engine.transfers import for_float64


@dataclass
class AdamState:
    """The moments, as long as the weights or as the part of them that this process advances, and the number of steps.

    Nothing writes into the moments: a step puts others in their place, so that readers need no copy.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int = 0

    @classmethod
    def fresh(cls, weights: Tensor) -> AdamState:
        """No step taken."""
        return cls(torch.zeros_like(weights), torch.zeros_like(weights))


@torch.no_grad()
def step_adam(
    weights: Tensor,
    gradient: Tensor,
    state: AdamState,
    adam: AdamSpec,
    *,
    fused: bool = False,
    older_norm: bool = False,
    division: StateDivision | None = None,
) -> dict[str, float]:
    """Updates `weights` and `state` in place and clears `gradient`; returns what happened.

    A step whose gradient, moments or weights would not be finite changes nothing but clears the gradient, and is
    reported as `skipped_nonfinite`. `grad_norm` is always that before clipping. `fused` runs torch's fused kernel, as a
    GPU should. `older_norm` is for the replay of older journals. With a `division`, all vectors are the parts that this
    process keeps, all processes call this, and the bits are those of one process. The host waits for a GPU twice: for
    the norm, and for the outcome of the step.
    """
    sums_of = square_sums if division is None else division.square_sums
    if older_norm:
        norm = older_gradient_norm(gradient if division is None else division.gather(gradient))
    else:
        norm = norm_of(sums_of(gradient).tolist())
    update_norm, skipped = 0.0, True
    if math.isfinite(norm):
        if 0 < adam.grad_clip_norm < norm:
            gradient.mul_(adam.grad_clip_norm / (norm + 1e-6))  # the 1e-6 is torch's
        # On copies: whether the step is finite is known only afterwards.
        advance = _advance_fused if fused else _advance
        updated, moved = advance(weights, gradient, state, adam)
        finite = _all_finite(updated, moved.exp_avg_sq, moved.exp_avg)
        if division is not None:
            finite = division.all_agree(finite)
        sums = sums_of(updated - weights)
        is_finite, *sums = torch.cat([for_float64(finite).double().view(1), sums]).tolist()
        skipped = not is_finite
        if not skipped:
            update_norm = norm_of(sums)
            weights.copy_(updated)
            state.exp_avg, state.exp_avg_sq, state.step = moved.exp_avg, moved.exp_avg_sq, moved.step
    gradient.zero_()
    return {
        "grad_norm": norm,
        "update_norm": update_norm,
        "step": float(state.step),
        "learning_rate": adam.learning_rate,
        "skipped_nonfinite": float(skipped),
    }


def _all_finite(*vectors: Tensor) -> Tensor:
    """Whether all numbers are finite, as a tensor. A vector is finite if its least and its largest number are; both are
    NaN where it has one. This reads each vector once, where `isfinite` reads it four times."""
    ends = [end for vector in vectors if len(vector) for end in torch.aminmax(vector)]
    return torch.stack(ends).isfinite().all() if ends else torch.ones((), dtype=torch.bool, device=vectors[0].device)


def _advance(weights: Tensor, gradient: Tensor, state: AdamState, adam: AdamSpec) -> tuple[Tensor, AdamState]:
    """The weights and the state after one step; the operations are those of torch's single-tensor AdamW, in order."""
    step = state.step + 1
    exp_avg = state.exp_avg.lerp(gradient, 1 - adam.beta1)
    exp_avg_sq = (state.exp_avg_sq * adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
    # Torch raises on a factor beyond float32; as the largest one it overflows the weights, and the step is skipped.
    step_size = min(adam.learning_rate / (1 - adam.beta1**step), torch.finfo(torch.float32).max)
    decay = max(1 - adam.learning_rate * adam.weight_decay, -torch.finfo(torch.float32).max)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - adam.beta2**step)).add_(adam.eps)
    updated = (weights * decay).addcdiv_(exp_avg, denominator, value=-step_size)
    return updated, AdamState(exp_avg, exp_avg_sq, step)


def _advance_fused(weights: Tensor, gradient: Tensor, state: AdamState, adam: AdamSpec) -> tuple[Tensor, AdamState]:
    """Same as `_advance`, with one kernel over copies."""
    step = state.step + 1
    updated, exp_avg, exp_avg_sq = (tensor.clone() for tensor in (weights, state.exp_avg, state.exp_avg_sq))
    torch._fused_adamw_(
        [updated],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],  # the largest exp_avg_sq, with amsgrad alone
        [torch.full((), step, dtype=torch.float32, device=weights.device)],
        lr=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        amsgrad=False,
        maximize=False,
    )
    return updated, AdamState(exp_avg, exp_avg_sq, step)
