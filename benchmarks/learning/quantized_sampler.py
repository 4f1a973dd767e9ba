"""A sampler whose numbers differ from the trainer's: the same weights on a base that is quantized for sampling alone.

Weights travel as between two machines: the trainer's service writes a checkpoint, and a second service, whose base is
quantized, loads it. The logprobs of the samples are the second service's own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mint

BASE = "quantized"
"""The name of the base model at the second service."""


class QuantizedSampling:
    """A service whose training clients sample with another service; everything else is its own."""

    def __init__(self, trainer: mint.ServiceClient, sampler: mint.ServiceClient, folder: Path) -> None:
        self.trainer = trainer
        self.sampler = sampler
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def create_lora_training_client(self, **arguments: Any) -> _Training:
        """A training client of the first service."""
        return _Training(self.trainer.create_lora_training_client(**arguments), self)


class _Training:
    """Trains with one service, samples with the other."""

    def __init__(self, inner: mint.TrainingClient, services: QuantizedSampling) -> None:
        self.inner = inner
        self.services = services

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def save_weights_and_get_sampling_client(self, name: str) -> mint.SamplingClient:
        """A sampler of the second service with the weights of now."""
        services = self.services
        saved = self.inner.save_weights_for_sampler(name=name).result().path or ""
        archive = services.trainer.create_rest_client().download_checkpoint(saved, services.folder).result()
        there = services.sampler.create_rest_client()
        path = there.upload_checkpoint(archive, base_model=BASE).result().path
        archive.unlink()
        return services.sampler.create_sampling_client(model_path=path)


@contextmanager
def quantized_sampling(base: Path, quantization: str) -> Generator[Any]:
    """A service that samples on the base model of a folder in `nf4`, `int8` or `fp8`, and trains on it as it is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with mint.ServiceClient(data_dir=folder / "trainer") as trainer:
            trainer.get_server_capabilities()
            with patch.dict(os.environ, {"MINT_QUANTIZE": quantization, "MINT_MODELS": f"{BASE}={base}"}):
                sampler = mint.ServiceClient(data_dir=folder / "sampler")
                sampler.get_server_capabilities()
            with sampler:
                yield QuantizedSampling(trainer, sampler, folder)
