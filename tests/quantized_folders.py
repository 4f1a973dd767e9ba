"""Writes random models as quantized ones are published, by arithmetic in numpy that shares nothing with mint's.

Formats: FP8 (E4M3) as in OCP 8-bit Floating Point Specification 1.0; MXFP4 as in OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

Quantized = tuple[dict[str, torch.Tensor], np.ndarray]
"""The tensors that stand for one of float32, by the ends of their names; and the numbers that they stand for."""


def e4m3_values() -> np.ndarray:
    """The value of each byte: a sign, 4 bits of exponent with a bias of 7, 3 of fraction; no infinities, two NaN."""
    codes = np.arange(256)
    exponents, fractions = (codes >> 3) & 15, codes & 7
    magnitudes = np.where(exponents == 0, fractions * 2.0**-9, (1 + fractions / 8) * 2.0 ** (exponents - 7.0))
    magnitudes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)


def to_fp8(weight: np.ndarray, block: tuple[int, int], suffix: str) -> Quantized:
    """A matrix with a scale for each block, smaller ones at its edges."""
    values = e4m3_values()
    order = np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")[:254]
    borders = (values[order][1:] + values[order][:-1]) / 2
    grid = tuple(-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scales = np.zeros(grid, np.float32)
    codes = np.zeros(weight.shape, np.uint8)
    for row, column in np.ndindex(*grid):
        part = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
        scales[row, column] = np.abs(weight[part]).max() / 448
        codes[part] = order[np.searchsorted(borders, weight[part] / scales[row, column])]
    spread = np.kron(scales, np.ones(block, np.float32))[: weight.shape[0], : weight.shape[1]]
    stored = {
        "": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        suffix: torch.from_numpy(scales if max(grid) > 1 else scales.reshape(1)),
    }
    return stored, values[codes] * spread


def to_mxfp4(weight: np.ndarray) -> Quantized:
    """Matrices [experts, inputs, outputs] in blocks of 32 inputs."""
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    experts, inputs, outputs = weight.shape
    blocks = weight.transpose(0, 2, 1).reshape(experts, outputs, inputs // 32, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    exponents = np.floor(np.log2(np.where(largest == 0, 1, largest))) - 2  # 4 is the largest power of two of E2M1
    scaled = blocks / 2.0**exponents
    codes = np.abs(np.abs(scaled)[..., None] - values).argmin(-1).astype(np.uint8)
    numbers = np.copysign(values[codes], scaled) * (2.0**exponents).astype(np.float32)
    codes |= (scaled < 0).astype(np.uint8) << 3
    stored = {
        "_blocks": torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4),
        "_scales": torch.from_numpy((exponents[..., 0] + 127).astype(np.uint8)),
    }
    return stored, numbers.reshape(experts, outputs, inputs).transpose(0, 2, 1).astype(np.float32)


def quantize_folder(
    folder: Path, target: Path, quantization: Mapping[str, Any], convert: Callable[[str, np.ndarray], Quantized | None]
) -> PreTrainedModel:
    """Writes the model of `folder` to `target` with every tensor quantized that `convert` gives another form, and
    returns transformers' model of the numbers that these stand for, which it writes to `target` / plain."""
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        found = convert(name, tensor.numpy())
        if found is None:
            stored[name] = plain[name] = tensor
            continue
        parts, numbers = found
        stem = name.removesuffix("weight") if "" in parts else name
        stored |= {name if not end else f"{stem}{end}": part.contiguous() for end, part in parts.items()}
        plain[name] = torch.from_numpy(np.ascontiguousarray(numbers))
    config = json.loads((folder / "config.json").read_text())
    for place, tensors, content in (
        (target, stored, {**config, "quantization_config": dict(quantization)}),
        (target / "plain", plain, config),
    ):
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps(content))
        (place / "tokenizer.json").write_text("{}")
    return AutoModelForCausalLM.from_pretrained(target / "plain", dtype=torch.float32).eval()
