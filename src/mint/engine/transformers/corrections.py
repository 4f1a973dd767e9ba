"""Corrections of models of transformers that compute something else step by step than over a whole sequence.

What a sampler draws from must be what the trainer computes. Where a model's cache cannot be used as it is, every step
would run whole sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def correct_steps(model: PreTrainedModel) -> None:
    """Makes single steps compute what whole sequences do. To be called when the loras of its layers are in place."""
    for module in model.modules():
        if _limits_time_steps(module):
            module.get_submodule("in_proj").register_forward_hook(_LimitTimeSteps(module))


def rotation_switch(model: PreTrainedModel) -> int | None:
    """The tokens beyond which a sequence has other rotations, in all its positions; None: there is no such length.

    That is so with LongRoPE (arXiv 2402.13753), as in Phi-4-mini. `dynamic` scaling changes beyond the context alone.
    """
    switches = [
        int(settings["original_max_position_embeddings"])
        for module in model.modules()
        for settings in _rope_settings(module)
        if settings.get("rope_type") == "longrope" and settings.get("original_max_position_embeddings")
    ]
    return min(switches, default=None)


def _rope_settings(module: Any) -> list[dict[str, Any]]:
    """The `rope_parameters` of a module that rotates heads, and those of each kind of layer."""
    settings = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not hasattr(module, "rope_type") or not isinstance(settings, dict):
        return []
    return [settings, *(own for own in settings.values() if isinstance(own, dict))]


def _limits_time_steps(module: nn.Module) -> bool:
    """Whether a module is a Mamba 2 layer with limits of its time steps that can be corrected. Falcon-H1 multiplies the
    outputs of its input layer: with limits, it samples without a cache."""
    names = ("time_step_limit", "dt_bias", "in_proj")
    if not all(hasattr(module, name) for name in names) or hasattr(module, "mup_vector"):
        return False
    return tuple(map(float, vars(module)["time_step_limit"])) != (0.0, math.inf)


class _LimitTimeSteps:
    """A hook on the input layer of a Mamba 2 layer, whose last outputs are its time steps.

    transformers keeps softplus(output + bias) within `time_step_limit` over whole sequences, and not in single steps.
    Limiting the outputs themselves does the same in both.
    """

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer
        self._least, self._most = map(_inverse_softplus, mixer.time_step_limit)

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias: Tensor = self._mixer.dt_bias
        others, steps = output.split([output.shape[-1] - len(bias), len(bias)], dim=-1)
        least, most = ((limit - bias).to(steps.dtype) for limit in (self._least, self._most))
        return torch.cat([others, torch.minimum(torch.maximum(steps, least), most)], dim=-1)


def _inverse_softplus(step: float) -> float:
    if step <= 0:
        return -math.inf
    return step if step > 30 else math.log(math.expm1(step))  # beyond, softplus changes nothing in float32
