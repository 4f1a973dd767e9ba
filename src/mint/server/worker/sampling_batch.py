"""The sample requests that are under way: they join and leave between two steps of the engine's batch.

An error of the engine ends its batch. Each request that was in it is then run again alone, once, so that only the one
at fault fails; tokens that were streamed already are not streamed again. A request whose weights cannot be read now (no
descriptor is left, the journal is locked) fails neither: it is handed back, to be run later. So is one for which memory
is short, for a while. Used on the thread that samples.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

from mint.engine.protocol import Engine, SampleBatch, is_out_of_memory
from mint.errors import JournalError, MintError
from mint.server.ids import session_of
from mint.server.queue.futures import FutureResult
from mint.server.queue.jobs import MEMORY_PATIENCE_S, QueuedSample
from mint.server.queue.scheduler import SamplingLoad
from mint.server.storage_state import reason_of
from mint.server.worker.sample_requests import sample_result
from mint.server.worker.samplers import Samplers

log = logging.getLogger("mint.sampling")

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class SamplingBatch:
    """One batch of the engine, and the requests in it."""

    def __init__(self, engine: Engine, samplers: Samplers) -> None:
        self._engine = engine
        self._samplers = samplers
        self._short_since: dict[str, float] = {}  # requests for which memory was short → when that was first so
        self._batch: SampleBatch | None = None
        self._running: dict[str, QueuedSample] = {}
        self._retry_alone: deque[QueuedSample] = deque()  # of a batch that failed: they run again, one by one
        self._sequences: Counter[str] = Counter()  # by owner
        self._is_alone = False
        self._postponed: list[QueuedSample] = []
        self.sequences = 0
        """Sequences that are being sampled; any thread may read it."""

    @property
    def load(self) -> SamplingLoad:
        """What the scheduler decides by; requests to retry alone count, whether or not it is their turn yet."""
        is_closed = bool(self._retry_alone) or (self._is_alone and bool(self._running))
        return SamplingLoad(self._sequences, is_closed=is_closed)

    @property
    def running(self) -> list[str]:
        """The requests that are being sampled."""
        return list(self._running)

    @property
    def samplers(self) -> set[str]:
        """The samplers that requests use."""
        return {sample.request.sampling_session_id for sample in (*self._running.values(), *self._retry_alone)}

    def join(self, samples: Iterable[QueuedSample]) -> dict[str, FutureResult]:
        """Adds requests to the batch; returns the results of those that cannot be run."""
        refused = {}
        for sample in samples:
            self._count(sample, 1)
            if sample.runs_alone:
                self._retry_alone.append(sample)
                continue
            result = self._add(sample)
            if result is not None:
                refused[sample.request_id] = result
        return refused

    def take_postponed(self) -> list[QueuedSample]:
        """Returns, once, the requests that left the batch because storage or memory do not let them run now."""
        postponed, self._postponed = self._postponed, []
        return postponed

    def step(self) -> dict[str, FutureResult]:
        """Decodes one token for each sequence; returns the results of the requests that finished."""
        results = self._start_next_alone() if self._retry_alone or self._is_alone else {}
        if self._batch is None or not self._running:
            return results
        for name, sample in self._running.items():
            if sample.cancelled is not None and sample.cancelled.is_set():
                self._batch.cancel(name)
        try:
            finished = self._batch.step()
        except Exception as error:  # the boundary: an engine may raise anything, and the clients must be told
            log.exception("sampling %d requests failed", len(self._running))
            return {**results, **self._broken(error)}
        for name, result in finished.items():
            sample = self._running.pop(name)
            self._short_since.pop(name, None)
            self._count(sample, -1)
            results[name] = sample_result(sample.request, result)
        return results

    def cancel_session(self, session_id: str) -> set[str]:
        """Cancels the requests of a session; returns those that leave the batch at its next step."""
        for name in [name for name in self._short_since if session_of(name) == session_id]:
            del self._short_since[name]  # also of one that waits in the queue, and will never come back
        for sample in [sample for sample in self._retry_alone if session_of(sample.request_id) == session_id]:
            self._retry_alone.remove(sample)
            self._count(sample, -1)
        running = {name for name in self._running if session_of(name) == session_id}
        for name in running:
            if self._batch is not None:
                self._batch.cancel(name)
        return running

    def _add(self, sample: QueuedSample) -> FutureResult | None:
        """Puts a request that is counted into the batch, or postpones it; or returns the result that says why it
        cannot be run."""
        try:
            if self._batch is None:
                self._batch = self._engine.open_batch()
            job = self._samplers.job(sample)
            self._batch.add(sample.request_id, job, None if sample.on_token is None else _TokenListener(sample))
        except Exception as error:  # the boundary: as in `step`
            self._count(sample, -1)
            if self._may_pass(sample, error):
                self._postpone(sample, error)
                return None
            if not isinstance(error, MintError):
                log.exception("request %s cannot be sampled", sample.request_id)
            self._short_since.pop(sample.request_id, None)
            return FutureResult.of_error(error)
        self._running[sample.request_id] = sample
        return None

    def _broken(self, error: Exception) -> dict[str, FutureResult]:
        samples = list(self._running.values())
        self._running = {}
        self._batch = None
        if len(samples) > 1:  # the engine does not say which of them it failed on
            self._retry_alone.extend(samples)
            return {}
        self._count(samples[0], -1)
        if self._may_pass(samples[0], error):
            self._postpone(samples[0], error)
            return {}
        self._short_since.pop(samples[0].request_id, None)
        return {samples[0].request_id: FutureResult.of_error(error)}

    def _may_pass(self, sample: QueuedSample, error: Exception) -> bool:
        """Whether an error is one of the storage, its descriptors or, not for too long yet, the memory; not one of the
        request."""
        if is_out_of_memory(error):
            now = time.monotonic()
            return now - self._short_since.setdefault(sample.request_id, now) < MEMORY_PATIENCE_S
        return isinstance(error, JournalError) or (isinstance(error, OSError) and error.errno in NO_DESCRIPTOR)

    def _postpone(self, sample: QueuedSample, error: Exception) -> None:
        if is_out_of_memory(error):
            reason = "the server is short of memory"
        else:
            reason = error.message if isinstance(error, MintError) else reason_of(error)
        self._postponed.append(replace(sample, waits_for=f"it cannot be run now: {reason}"))

    def _start_next_alone(self) -> dict[str, FutureResult]:
        """Starts the next of them once the one before has ended; returns the results of those that cannot be run."""
        results: dict[str, FutureResult] = {}
        while not self._running:
            self._is_alone = bool(self._retry_alone)
            if not self._retry_alone:
                break
            sample = self._retry_alone.popleft()
            result = self._add(sample)
            if result is not None:
                results[sample.request_id] = result
        return results

    def _count(self, sample: QueuedSample, sign: int) -> None:
        change = sign * sample.sequences
        self.sequences += change
        self._sequences[sample.owner] += change
        if not self._sequences[sample.owner]:
            del self._sequences[sample.owner]


class _TokenListener:
    """Passes the tokens of a request on to its `on_token`; after an error there, it passes on no more."""

    def __init__(self, sample: QueuedSample) -> None:
        self._request = sample
        self._sampled: Counter[int] = Counter()
        self._has_failed = False

    def __call__(self, sample: int, token: int, logprob: float) -> None:
        request = self._request
        assert request.on_token is not None  # a request without one gets no listener
        self._sampled[sample] += 1
        if self._has_failed or self._sampled[sample] <= request.told[sample]:
            return
        request.told[sample] += 1
        try:
            request.on_token(sample, token, logprob)
        except Exception:  # the boundary: one listener's error must not fail the other requests
            self._has_failed = True
            log.exception("request %s: its listener failed; it gets no more tokens", request.request_id)
