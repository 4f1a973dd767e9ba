"""One thread for an engine that samples: jobs and other work come from any thread, and are done between two steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from mint.engine.protocol import Engine, SampleBatch, SampleJob, SampleResult, TokenListener
from mint.errors import MintError

log = logging.getLogger(__name__)


class SamplingThread:
    """Samples jobs together. If a step fails, all jobs of that step fail."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[Callable[[SampleBatch], None]] = queue.SimpleQueue()
        self._running: dict[str, Future[SampleResult]] = {}
        self._numbers = count()
        threading.Thread(target=self._work, name="mint-sampling", daemon=True).start()

    @property
    def jobs(self) -> int:
        """How many have no result yet."""
        return len(self._running)

    def call(self, work: Callable[[Engine], Any]) -> Future[Any]:
        """Has the thread do something with the engine; what it returns or raises is in the future."""
        future: Future[Any] = Future()

        def do(_batch: SampleBatch) -> None:
            try:
                future.set_result(work(self._engine))
            except Exception as error:  # the boundary: it is raised where the work came from
                if not isinstance(error, MintError):
                    log.exception("the engine failed")
                future.set_exception(error)

        self._orders.put(do)
        return future

    def add(self, job: SampleJob, listener: TokenListener | None = None) -> tuple[str, Future[SampleResult]]:
        """Samples a job; returns its key for `cancel`, and the future of its result. The thread calls the listener."""
        key = str(next(self._numbers))
        future: Future[SampleResult] = Future()

        def do(batch: SampleBatch) -> None:
            try:
                batch.add(key, job, listener)
            except Exception as error:  # the boundary: the job alone fails
                if not isinstance(error, MintError):
                    log.exception("a job cannot be sampled")
                self._end(key, error=error)

        self._running[key] = future
        self._orders.put(do)
        return key, future

    def cancel(self, key: str) -> None:
        """Gives a job up; its result is not wanted. Unknown keys are fine."""
        self._orders.put(lambda batch: batch.cancel(key))

    def _work(self) -> None:
        batch = self._engine.open_batch()
        while True:
            while not batch.keys or not self._orders.empty():
                self._orders.get()(batch)
            try:
                results = batch.step()
            except Exception as error:  # the boundary: these jobs fail, the next ones do not
                log.exception("a step failed")
                for key in list(batch.keys):
                    self._end(key, error=error)
                batch = self._engine.open_batch()
                continue
            for key, result in results.items():
                self._end(key, result=result)

    def _end(self, key: str, *, result: SampleResult | None = None, error: Exception | None = None) -> None:
        future = self._running.pop(key, None)
        if future is None:
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)
