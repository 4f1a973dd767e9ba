"""What the engine is busy with, and how long such work has taken lately.

The worker tells; whoever asks gets an estimate, never a promise. Any thread may ask. Knows no queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

WEIGHT_OF_NEWEST = 0.3
SAMPLE = "sample"
"""The kind of sample requests; other kinds are those of training requests."""


@dataclass(frozen=True)
class Running:
    """A request that is being worked on; `since` is in monotonic seconds."""

    kind: str
    since: float


class Pace:
    """A running mean per kind of request, that forgets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._typical_s: dict[str, float] = {}
        self._together = 1.0
        self._running: dict[str, Running] = {}

    def began(self, names: Iterable[str], kind: str) -> None:
        """The engine works on these from now on, besides those that it has begun already."""
        running = Running(kind, time.monotonic())
        with self._lock:
            self._running.update(dict.fromkeys(names, running))

    def ended(self, names: Iterable[str]) -> None:
        """It does so no longer."""
        now = time.monotonic()
        with self._lock:
            samples = sum(running.kind == SAMPLE for running in self._running.values())
            for name in names:
                done = self._running.pop(name, None)
                if done is None:
                    continue
                self._typical_s[done.kind] = _moved(self._typical_s.get(done.kind), now - done.since)
                if done.kind == SAMPLE:
                    self._together = _moved(self._together, float(samples))

    def running(self, name: str) -> Running | None:
        """The request, if it is being worked on."""
        with self._lock:
            return self._running.get(name)

    def training(self) -> Running | None:
        """The training request that is being worked on, which everything else waits for."""
        with self._lock:
            return next((running for running in self._running.values() if running.kind != SAMPLE), None)

    def typical_s(self, kind: str) -> float:
        """How long a request of a kind takes from its start to its end; 0 while nothing is known."""
        with self._lock:
            known = self._typical_s.get(kind)
            return max(self._typical_s.values(), default=0.0) if known is None else known

    def each_s(self, kind: str) -> float:
        """What one request of a kind adds to the wait of those behind it; sample requests run together."""
        return self.typical_s(kind) / (max(1.0, self._together) if kind == SAMPLE else 1.0)


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - WEIGHT_OF_NEWEST) * mean + WEIGHT_OF_NEWEST * newest
