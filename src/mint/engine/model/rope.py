"""Rotary position embeddings: tables of cos and sin for each position and pair of a head, with Llama 3's scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mint.engine.model.config import DecoderConfig, RopeScaling


def rope_tables(config: DecoderConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D / 2] in float32, computed as Hugging Face does."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies [D / 2] for a context that is `factor` times as long as the original one."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0 for fewer than `low` turns in the original context
    return frequencies * (kept + (1 - kept) / scaling.factor)
