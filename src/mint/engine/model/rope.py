"""Rotary position embeddings: tables of cos and sin for each position and pair of a head, with their scalings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mint.engine.model.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope, YarnScaling


def rope_tables(config: DecoderConfig, rope: Rope | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, rotary_dim / 2] in float32, computed as Hugging Face does, times `scales.query_key`; None
    rotates nothing."""
    magnitude = config.scales.query_key
    if rope is None:
        shape = config.max_position_embeddings, config.rotary_dim // 2
        return torch.full(shape, magnitude, device=device), torch.zeros(shape, device=device)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if isinstance(scaling, Llama3Scaling):
        frequencies = _scale_llama3(frequencies, scaling)
    elif isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, YarnScaling):
        frequencies = _scale_yarn(frequencies, scaling, rope.theta, config.rotary_dim)
        magnitude *= scaling.attention_factor
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies [rotary_dim / 2] for a context that is `factor` times as long as the original one."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0 for fewer than `low` turns in the original context
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _scale_yarn(frequencies: Tensor, scaling: YarnScaling, theta: float, dim: int) -> Tensor:
    """Frequencies [rotary_dim / 2] by YaRN: a ramp over the pairs from those that stay to those divided by `factor`."""
    low, high = (_pair_of(turns, scaling, theta, dim) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - divided) + frequencies / scaling.factor * divided


def _pair_of(turns: float, scaling: YarnScaling, theta: float, dim: int) -> float:
    """The pair, as a fraction, that turns so many times in the original context."""
    ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(ratio) / (2 * math.log(theta))
