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
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.get_submodule("in_proj").register_forward_hook(_RaiseTimeSteps(module))


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


class _RaiseTimeSteps:
    """A hook on the input layer of a Mamba layer of Nemotron-H, whose last outputs are its time steps.

    transformers raises softplus(output + bias) to `time_step_limit[0]` over whole sequences, and not in single steps.
    Raising the outputs themselves does the same in both.
    """

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer
        least = float(mixer.time_step_limit[0])
        self._floor = math.log(math.expm1(least)) if least > 0 else -math.inf  # softplus of it is `least`

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias: Tensor = self._mixer.dt_bias
        others, steps = output.split([output.shape[-1] - len(bias), len(bias)], dim=-1)
        return torch.cat([others, torch.maximum(steps, (self._floor - bias).to(steps.dtype))], dim=-1)
