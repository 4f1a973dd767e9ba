"""Which requests the engine works on, and how long such requests have taken lately: estimates, never promises.

The worker reports; any thread may ask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WEIGHT_OF_NEWEST = 0.3
SAMPLE = "sample"
"""The kind of sample requests; other kinds are those of training requests."""


@dataclass(frozen=True)
class RunningRequest:
    """A request that the engine works on; `started_at` is in monotonic seconds."""

    kind: str
    started_at: float


class Eta:
    """An exponential moving average of the duration of each kind of request."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._typical_s: dict[str, float] = {}
        self._concurrent_samples = 1.0
        self._started: dict[str, RunningRequest] = {}

    def start(self, request_ids: Iterable[str], kind: str) -> None:
        """The engine works on these from now on, besides those that it has started already."""
        started = RunningRequest(kind, self._clock())
        with self._lock:
            self._started.update(dict.fromkeys(request_ids, started))

    def end(self, request_ids: Iterable[str]) -> None:
        """These are done."""
        now = self._clock()
        with self._lock:
            # Counted before any of them is removed: they ran together.
            samples = 0
            for started in self._started.values():
                samples += started.kind == SAMPLE
            for request_id in request_ids:
                done = self._started.pop(request_id, None)
                if done is None:
                    continue
                self._typical_s[done.kind] = _moving_average(self._typical_s.get(done.kind), now - done.started_at)
                if done.kind == SAMPLE:
                    self._concurrent_samples = _moving_average(self._concurrent_samples, float(samples))

    def forget(self, request_ids: Iterable[str]) -> None:
        """The engine does not work on these after all."""
        with self._lock:
            for request_id in request_ids:
                self._started.pop(request_id, None)

    def started(self, request_id: str) -> RunningRequest | None:
        """The request, if the engine works on it."""
        with self._lock:
            return self._started.get(request_id)

    def started_training(self) -> RunningRequest | None:
        """The training request that the engine works on, which all others wait for."""
        with self._lock:
            return next((started for started in self._started.values() if started.kind != SAMPLE), None)

    def typical_s(self, kind: str) -> float:
        """How long a request of a kind takes from its start to its end; 0 while nothing is known."""
        with self._lock:
            known = self._typical_s.get(kind)
            return max(self._typical_s.values(), default=0.0) if known is None else known

    def delay_s(self, kind: str) -> float:
        """What one request of a kind adds to the wait of those behind it; sample requests run together."""
        return self.typical_s(kind) / (max(1.0, self._concurrent_samples) if kind == SAMPLE else 1.0)


def _moving_average(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - WEIGHT_OF_NEWEST) * mean + WEIGHT_OF_NEWEST * newest
