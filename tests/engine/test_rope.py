"""Rotary tables are those of transformers, at every position that published models have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mint.engine.model.config import read_decoder_config
from mint.engine.model.functions import rope_tables

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
}  # fmt: skip
SCALED: dict[str, Any] = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "Llama-3.1-8B": {"head_dim": 128, "rope_parameters": {**SCALED, "factor": 8.0}},
    "Llama-3.2-1B": {"head_dim": 64, "rope_parameters": {**SCALED, "factor": 32.0}},
    "long context by interpolation": {
        "head_dim": 128, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}},
    "Qwen3 with YaRN": {
        "head_dim": 128, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                             "original_max_position_embeddings": 32768}},
    "Ministral 3": {
        "head_dim": 128, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
                                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                             "original_max_position_embeddings": 16384}},
    "YaRN without whole pairs": {
        "head_dim": 64, "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0,
                                            "truncate": False, "attention_factor": 1.3,
                                            "original_max_position_embeddings": 4096}},
    "YaRN with the length at the top level": {
        "head_dim": 128, "original_max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                            "original_max_position_embeddings": 32768}},
    "Llama 3 with the length at the top level": {
        "head_dim": 128, "original_max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}},
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_tables_equal_those_of_transformers(model: str) -> None:
    config = {**LLAMA, **PUBLISHED[model]}
    read = read_decoder_config(config)
    cos, sin = rope_tables(read, read.ropes[0], torch.device("cpu"))
    positions = torch.tensor([0, 1, 2, 100, 2048, 8191, 8192, 50_000, 131_071])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    assert theirs.inv_freq.shape == (cos.shape[1],)
    expected = [table[0, :, : cos.shape[1]] for table in theirs(torch.zeros(1), positions[None])]
    for ours, reference in zip((cos, sin), expected, strict=True):
        # An angle of 50,000 has a step of 1/256 in float32: the last positions agree only where the frequencies do.
        assert (ours[positions] - reference).abs().max() <= 2e-3
        assert (ours[positions[:5]] - reference[:5]).abs().max() <= 1e-4


def test_scaled_frequencies_follow_the_definition() -> None:
    """In float64: wavelengths beyond 8192 are stretched by the factor, those below 2048 stay, a ramp between."""
    config = read_decoder_config({**LLAMA, **PUBLISHED["Llama-3.1-8B"]})
    cos, sin = rope_tables(config, config.ropes[0], torch.device("cpu"))
    found = np.arctan2(sin[1].double().numpy(), cos[1].double().numpy())
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    wavelength = 2 * np.pi / plain
    kept = (8192 / wavelength - 1) / (4 - 1)
    expected = np.where(wavelength > 8192, plain / 8, np.where(wavelength < 2048, plain, 0))
    ramp = (wavelength >= 2048) & (wavelength <= 8192)
    assert ramp.any()
    expected[ramp] = ((1 - kept) * plain / 8 + kept * plain)[ramp]
    assert np.abs(found / expected - 1).max() <= 1e-5
