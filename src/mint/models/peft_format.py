"""A lora as a PEFT adapter folder, which PEFT, transformers and vLLM load unchanged; and back.

Arrays are named as mint names them everywhere: `{module}.lora_A.weight` [r, inputs], `{module}.lora_B.weight`
[outputs, r]. Knows nothing of engines or checkpoints' places.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mint.errors import CheckpointError
from mint.models.tensor_files import read_tensors, write_file, write_tensors

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapter:
    """A lora read from a folder: the product of its parts is scaled by `alpha / rank`."""

    weights: dict[str, np.ndarray]
    rank: int
    alpha: float
    base_model: str


def module_names(weights: Mapping[str, np.ndarray]) -> list[str]:
    """The layers that have a lora, such as `model.layers.0.self_attn.q_proj`."""
    return sorted({name.rsplit(".lora_", 1)[0] for name in weights})


def write_peft(folder: Path, weights: Mapping[str, np.ndarray], *, rank: int, alpha: float, base_model: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors; `base_model` is what PEFT is told to load first."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in module_names(weights)}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_tensors(folder / _WEIGHTS, {_PREFIX + name: array for name, array in weights.items()}, {"format": "pt"})
    write_file(folder / _CONFIG, [json.dumps(config, indent=2).encode()])


def read_peft(folder: Path) -> Adapter:
    """The lora in a PEFT folder, in float32.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or the adapter is of a kind that mint does not compute.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / _CONFIG} cannot be read: {error}") from error
    rank, alpha = _check_config(folder, config)
    arrays, _ = read_tensors(folder / _WEIGHTS)
    weights = {name.removeprefix(_PREFIX): array.astype(np.float32) for name, array in arrays.items()}
    odd = [name for name in weights if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if odd:
        raise CheckpointError(f"{folder / _WEIGHTS} holds {odd[0]}, which is no lora matrix")
    return Adapter(weights, rank, alpha, str(config.get("base_model_name_or_path", "")))


def _check_config(folder: Path, config: dict[str, Any]) -> tuple[int, float]:
    """Rank and alpha; the scale of rank-stabilised loras is folded into alpha."""
    unsupported = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias")
    found = [key for key in unsupported if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or found:
        raise CheckpointError(f"{folder}: mint reads plain PEFT loras, without {', '.join(found) or 'bias'}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder / _CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}")
    return rank, float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)
