"""Sampling in the process that serves, beside ranks that train."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.engine.protocol import LoraSpec, SampleBatch, SampleJob, SampleResult, TokenListener
from mint.engine.torch_engine import TorchEngine


@dataclass(frozen=True)
class _Published:
    base: str
    lora: LoraSpec
    weights: Mapping[str, np.ndarray]


class LocalSampling:
    """The sampler of one engine; weights that another thread adds come to it with their first job."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._arriving: dict[str, _Published] = {}

    def load_base(self, name: str, path: str) -> None:
        """Loads a base into the engine."""
        self._engine.load_base(name, path)

    def add_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes weights available for sampling. Any thread may call."""
        with self._lock:
            self._arriving[weights_id] = _Published(base, lora, weights)

    def drop_weights(self, weights_id: str) -> None:
        """Forgets weights; unknown ids are fine."""
        with self._lock:
            self._arriving.pop(weights_id, None)
        self._engine.drop_weights(weights_id)

    def open_batch(self) -> SampleBatch:
        """An empty batch; training beside it changes nothing in it."""
        return _Batch(self, self._engine.open_batch())

    def bring(self, weights_id: str | None) -> None:
        """Puts weights that were added into the engine, if they are not there."""
        with self._lock:
            published = None if weights_id is None else self._arriving.pop(weights_id, None)
        if weights_id is not None and published is not None:
            self._engine.load_weights(weights_id, published.base, published.lora, published.weights)

    def sampling_counters(self) -> dict[str, int]:
        """Those of the engine (`TorchEngine.sampling_counters`)."""
        return self._engine.sampling_counters()

    def kv_pages(self) -> dict[str, int]:
        """Those of the engine (`TorchEngine.kv_pages`)."""
        return self._engine.kv_pages()

    @property
    def state(self) -> dict[str, Any]:
        """Nothing: there are no further processes."""
        return {}

    @property
    def processes(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Does nothing."""


class _Batch:
    """A batch of the engine, to which weights come when a job needs them."""

    def __init__(self, sampling: LocalSampling, batch: SampleBatch) -> None:
        self._sampling = sampling
        self._batch = batch

    @property
    def keys(self) -> Collection[str]:
        return self._batch.keys

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        self._sampling.bring(job.weights_id)
        self._batch.add(key, job, listener)

    def cancel(self, key: str) -> None:
        self._batch.cancel(key)

    def step(self) -> dict[str, SampleResult]:
        return self._batch.step()
