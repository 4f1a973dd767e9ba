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
"""The kind of a batch of sample requests; other kinds are those of training requests."""


@dataclass(frozen=True)
class Running:
    """Requests that run together; `since` is in monotonic seconds."""

    request_ids: frozenset[str] = frozenset()
    kind: str = ""
    since: float = 0.0


class Pace:
    """A running mean per kind of request, that forgets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._typical_s: dict[str, float] = {}
        self._batch = 1.0
        self.running = Running()

    def began(self, request_ids: Iterable[str], kind: str) -> None:
        """The engine works on these from now on."""
        self.running = Running(frozenset(request_ids), kind, time.monotonic())

    def ended(self) -> None:
        """It does so no longer."""
        done, self.running = self.running, Running()
        with self._lock:
            self._typical_s[done.kind] = _moved(self._typical_s.get(done.kind), time.monotonic() - done.since)
            if done.kind == SAMPLE:
                self._batch = _moved(self._batch, float(len(done.request_ids)))

    def typical_s(self, kind: str) -> float:
        """How long a request of a kind takes, or a batch of sample requests; 0 while nothing is known."""
        with self._lock:
            known = self._typical_s.get(kind)
            return max(self._typical_s.values(), default=0.0) if known is None else known

    def each_s(self, kind: str) -> float:
        """What one request of a kind adds to the wait of those behind it; sample requests run together."""
        return self.typical_s(kind) / (max(1.0, self._batch) if kind == SAMPLE else 1.0)


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - WEIGHT_OF_NEWEST) * mean + WEIGHT_OF_NEWEST * newest
