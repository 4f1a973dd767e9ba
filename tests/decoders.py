"""Decoders for tests, opened as the engine opens them."""

from __future__ import annotations

from pathlib import Path

import torch

from mint.engine.devices import Device
from mint.engine.lora import LoraLayout, LoraWeights
from mint.engine.model.config import read_decoder_config
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import LoraSpec
from mint.engine.quantized.number_formats import Quantization
from mint.models.folder import ModelFolder


def open_decoder(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    native: Path | None = None,
    device: str = "cpu",
    quantization: Quantization | None = None,
) -> Decoder:
    """The model in `folder`; with the kernels in C, if `native` is the folder where they are compiled."""
    opened = ModelFolder(folder)
    config = read_decoder_config(opened.config)
    operations = Device(device, native, gpu_kernels=True).operations(config, dtype)
    return Decoder(config, opened.tensors(), operations, quantization)


def new_lora(decoder: Decoder, spec: LoraSpec) -> LoraWeights:
    """A lora on the decoder, all zeros."""
    return LoraWeights.zeros(LoraLayout(decoder.sites(spec), spec), decoder.device)
