"""The versions of weights that jobs may sample from. They meet here: training adds them, and replicas get them.

A version never changes. Its weights are put into the object store once, and each replica that needs them reads them
from there. A job keeps the version that it began with, so a version may be dropped while jobs use it. Knows no
processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from mint.engine.protocol import LoraSpec
from mint.errors import NotFoundError

Layout = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of arrays that lie one behind the other in a vector."""


@dataclass(frozen=True)
class Version:
    """Weights under a name that no other version has. `stored` stands for the vector of all weights."""

    name: str
    base: str
    lora: LoraSpec
    layout: Layout
    size_bytes: int
    stored: Any


class Versions:
    """The versions by the ids under which the service knows them. Any thread may call."""

    def __init__(self, store: Callable[[np.ndarray], Any], *, prefix: str = "") -> None:
        """`store` puts a vector where all replicas can read it, and returns what stands for it. Names begin with
        `prefix`, where replicas may know those of another server."""
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._current: dict[str, Version] = {}
        self._gone: list[str] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._current)

    def add(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Stores weights; jobs of `weights_id` use them from now on."""
        layout, vector = packed(weights)
        version = Version(
            f"{self._prefix}{next(self._numbers)}", base, lora, layout, vector.nbytes, self._store(vector)
        )
        with self._lock:
            self._remove(weights_id)
            self._current[weights_id] = version

    def drop(self, weights_id: str) -> None:
        """Forgets weights; unknown ids are fine."""
        with self._lock:
            self._remove(weights_id)

    def of(self, weights_id: str, base: str) -> Version:
        """The version that jobs of these weights use now.

        Raises:
            NotFoundError: there is none, or it is one of another base.
        """
        version = self._current.get(weights_id)
        if version is None or version.base != base:
            raise NotFoundError(f"are no published weights of {base}", field="weights_id", value=weights_id)
        return version

    def is_current(self, version: Version) -> bool:
        """Whether jobs that come now may use it."""
        with self._lock:
            return version in self._current.values()

    def take_gone(self) -> list[str]:
        """The names of versions that were dropped since the last call."""
        with self._lock:
            gone, self._gone = self._gone, []
        return gone

    def _remove(self, weights_id: str) -> None:
        version = self._current.pop(weights_id, None)
        if version is not None:
            self._gone.append(version.name)


def packed(weights: Mapping[str, np.ndarray]) -> tuple[Layout, np.ndarray]:
    """All weights in one float32 vector, and where they lie in it."""
    layout = [(name, array.shape) for name, array in weights.items()]
    return layout, np.concatenate([np.empty(0, np.float32), *(array.reshape(-1) for array in weights.values())])


def unpacked(layout: Layout, vector: np.ndarray) -> dict[str, np.ndarray]:
    """The weights by name, as views of the vector."""
    weights = {}
    start = 0
    for name, shape in layout:
        size = int(np.prod(shape))
        weights[name] = vector[start : start + size].reshape(shape)
        start += size
    return weights
