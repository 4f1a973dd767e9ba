"""A fake engine with two lanes: it trains and samples at the same time, and published weights arrive later.

Each call of the contract waits a moment first, and fails if another thread is in a call of the same lane. A gate holds
up passes, another one the arrival of published weights, for as long as a test likes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.engine.protocol import CANCELLED, SampleJob, SampleResult, TokenListener

TRAINING = (
    "create_model", "drop_model", "forward", "forward_backward", "clear_gradient", "optim_step", "read_state",
    "write_state", "state_digest", "publish",
)  # fmt: skip
SAMPLING = ("load_weights", "drop_weights", "open_batch", "sample")
LONGEST_DELAY_S = 0.002
NEWS_S = 0.01


class TwoLanes(FakeEngine):
    """`FakeEngine` with two lanes; `delays` is the seed of the pauses before calls, None: there are none."""

    def __init__(self, *, delays: int | None = 0, **options: Any) -> None:
        super().__init__(lanes=2, **options)
        self._delays = None if delays is None else random.Random(delays)
        self._arriving: set[str] = set()
        self.pass_began = threading.Event()
        self.passes = threading.Event()
        self.passes.set()
        self.arrivals = threading.Event()
        self.arrivals.set()
        self.sampling_lock = threading.RLock()
        for lock, names in ((threading.RLock(), TRAINING), (self.sampling_lock, SAMPLING)):
            for name in names:
                setattr(self, name, self.alone(lock, getattr(self, name)))

    def alone(self, lock: threading.RLock, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, after a delay; it fails while another thread is in one with the same lock."""

        @wraps(call)
        def checked(*arguments: Any, **named: Any) -> Any:
            if not lock.acquire(blocking=False):
                raise AssertionError(f"{call.__name__} is called while another thread is in a call of the same lane")
            try:
                self.pause()
                return call(*arguments, **named)
            finally:
                lock.release()

        return checked

    def pause(self) -> None:
        if self._delays is not None:
            time.sleep(self._delays.uniform(0, LONGEST_DELAY_S))

    def forward_backward(self, *arguments: Any, **named: Any) -> Any:
        """Waits for the gate `passes`."""
        self.pass_began.set()
        self.passes.wait()
        return super().forward_backward(*arguments, **named)

    def publish(self, model_id: str, weights_id: str) -> None:
        """Returns at once; the weights arrive when a batch looks for them, and the gate `arrivals` is open."""
        super().publish(model_id, weights_id)
        self._arriving.add(weights_id)

    def has_arrived(self, weights_id: str | None) -> bool:
        """Whether jobs of these weights may run; the first question after the gate was opened brings them."""
        if weights_id not in self._arriving:
            return True
        if self.arrivals.is_set():
            self._arriving.discard(weights_id)
        return False

    def open_batch(self) -> FakeBatch:
        return TwoLanesBatch(self)


class TwoLanesBatch(FakeBatch):
    """A batch whose jobs wait for their weights, beside those that run."""

    def __init__(self, engine: TwoLanes) -> None:
        super().__init__(engine)
        self._two_lanes = engine
        self._waiting: dict[str, Any] = {}
        for name in ("add", "cancel", "step"):
            setattr(self, name, engine.alone(engine.sampling_lock, getattr(self, name)))

    @property
    def keys(self) -> Collection[str]:
        return {**self._running, **self._waiting}

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        super().add(key, job, listener)
        self._waiting[key] = self._running.pop(key)

    def cancel(self, key: str) -> None:
        if key in self._waiting:
            self._cancelled.add(key)
        super().cancel(key)

    def step(self) -> dict[str, SampleResult]:
        results: dict[str, SampleResult] = {}
        for key, own in list(self._waiting.items()):
            if key in self._cancelled:
                self._cancelled.discard(key)
                results[key] = SampleResult([], error=CANCELLED)
            elif self._two_lanes.has_arrived(own.job.weights_id):
                self._running[key] = own
            else:
                continue
            del self._waiting[key]
        if self._waiting and not self._running and not results:
            self._two_lanes.arrivals.wait(NEWS_S)
        return results | super().step()
