"""Which layers have their matrices in a tensor of a base model.

A tensor mostly holds the matrix of one layer, `{layer}.weight` [outputs, inputs]. In two families gate and up of an
expert are one layer, `mlp.experts.{number}.gate_up_proj`, as PEFT has one lora for both. Their checkpoints have the
experts of a layer in one tensor; transformers writes those of Qwen3.5-MoE one by one, gate and up apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_INPUTS_FIRST = {"gpt_oss": True, "qwen3_5_moe_text": False}
"""The `model_type` of families that have gate and up in one layer → whether an expert's matrix is [inputs, outputs]."""

_STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<layer>gate_up_proj|down_proj)")
_APART = re.compile(r"(?P<expert>.+\.experts\.\d+)\.(?P<part>gate|up)_proj\.weight")


@dataclass(frozen=True)
class LayersOfTensor:
    """The layers in a tensor: of one, or of the experts that are stacked in it, in order."""

    names: tuple[str, ...]
    is_stacked: bool = False
    inputs_first: bool = False
    part: tuple[int, int] = (0, 1)
    """The index of the part of the layer's outputs that it holds, and the number of such parts, which have one size."""


def layers_of(name: str, shape: Sequence[int], config: dict[str, Any]) -> LayersOfTensor:
    """The layers of the tensor `name`; `config` is the content of config.json."""
    inputs_first = _INPUTS_FIRST.get(config.get("model_type", ""))
    if inputs_first is None:
        return LayersOfTensor((name.removesuffix(".weight"),))
    stacked = _STACKED.fullmatch(name)
    if stacked is not None and len(shape) == 3:
        names = tuple(f"{stacked['experts']}.{expert}.{stacked['layer']}" for expert in range(shape[0]))
        return LayersOfTensor(names, is_stacked=True, inputs_first=inputs_first)
    apart = _APART.fullmatch(name)
    if apart is not None:
        return LayersOfTensor((f"{apart['expert']}.gate_up_proj",), part=(("gate", "up").index(apart["part"]), 2))
    return LayersOfTensor((name.removesuffix(".weight"),))
