"""The sample requests that are under way: they join and leave between two steps of the engine.

An error of the engine ends its batch. Each request that was in it is run again, alone and once, so that the one at
fault fails and no other; what a listener has heard it does not hear again. Used on the worker's thread. Knows no
queue and no HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence

import mint.wire as wire
from mint.engine.protocol import Engine, SampleBatch
from mint.errors import MintError, RequestFailedError
from mint.server.ids import session_of
from mint.server.queue.futures import Answer
from mint.server.queue.scheduler import Running
from mint.server.worker.samplers import Samplers, SampleWork, answer_of

log = logging.getLogger("mint.sampling")


class RunningSamples:
    """One batch of the engine, and the requests in it."""

    def __init__(self, engine: Engine, samplers: Samplers) -> None:
        self._engine = engine
        self._samplers = samplers
        self._batch: SampleBatch | None = None
        self._works: dict[str, SampleWork] = {}
        self._suspects: deque[SampleWork] = deque()
        self._sequences: Counter[str] = Counter()
        self._is_alone = False
        self.rows = 0
        """Sequences that are under way; any thread may look."""

    @property
    def state(self) -> Running:
        """What the scheduler decides by; requests that run again count, whether or not it is their turn yet."""
        is_closed = bool(self._suspects) or (self._is_alone and bool(self._works))
        return Running(self._sequences, is_closed=is_closed)

    def join(self, works: Sequence[SampleWork]) -> dict[str, Answer]:
        """Takes requests in; the answers of those that cannot be run."""
        refused = {}
        for work in works:
            answer = self._add(work)
            if answer is None:
                self._count(work, 1)
            else:
                refused[work.request_id] = answer
        return refused

    def step(self) -> dict[str, Answer]:
        """Gets everything one step further; the answers of those that ended by it."""
        answers = self._next_suspect()
        if self._batch is None or not self._works:
            return answers
        for name, work in self._works.items():
            if work.cancelled is not None and work.cancelled.is_set():
                self._batch.cancel(name)
        try:
            results = self._batch.step()
        except Exception as error:  # the boundary: an engine may raise anything, and the requests must hear of it
            log.exception("sampling %d requests failed", len(self._works))
            return {**answers, **self._broken(error)}
        for name, result in results.items():
            work = self._works.pop(name)
            self._count(work, -1)
            answers[name] = answer_of(work.request, result)
        return answers

    def cancel_session(self, session_id: str) -> None:
        """Lets go of what a session has under way: nobody waits for it any more."""
        gone = [work for work in self._suspects if session_of(work.request_id) == session_id]
        for work in gone:
            self._suspects.remove(work)
            self._count(work, -1)
        for name in self._works:
            if session_of(name) == session_id and self._batch is not None:
                self._batch.cancel(name)

    def _add(self, work: SampleWork) -> Answer | None:
        """Puts a request into the batch; or the answer that says why it cannot be run."""
        if self._batch is None:
            self._batch = self._engine.open_batch()
        try:
            job = self._samplers.job(work)
            self._batch.add(work.request_id, job, None if work.on_token is None else _Listener(work))
        except Exception as error:  # the boundary: as in `step`
            if not isinstance(error, MintError):
                log.exception("request %s cannot be sampled", work.request_id)
            return _failed(error)
        self._works[work.request_id] = work
        return None

    def _broken(self, error: Exception) -> dict[str, Answer]:
        works, self._works, self._batch = list(self._works.values()), {}, None
        if len(works) > 1:
            self._suspects.extend(works)
            return {}
        self._count(works[0], -1)
        return {works[0].request_id: _failed(error)}

    def _next_suspect(self) -> dict[str, Answer]:
        """Begins with the next of those that run alone, once the one before has ended; answers as `join`."""
        answers: dict[str, Answer] = {}
        while not self._works:
            self._is_alone = bool(self._suspects)
            if not self._suspects:
                break
            work = self._suspects.popleft()
            answer = self._add(work)
            if answer is not None:
                self._count(work, -1)
                answers[work.request_id] = answer
        return answers

    def _count(self, work: SampleWork, sign: int) -> None:
        change = sign * max(1, work.request.num_samples)
        self.rows += change
        self._sequences[work.owner] += change
        if not self._sequences[work.owner]:
            del self._sequences[work.owner]


class _Listener:
    """Hands the tokens of a request over; where it fails it hears no more, and disturbs nobody else."""

    def __init__(self, work: SampleWork) -> None:
        self._work = work
        self._come: Counter[int] = Counter()
        self._is_deaf = False

    def __call__(self, sample: int, token: int, logprob: float) -> None:
        work = self._work
        assert work.on_token is not None  # whoever has none gets no listener
        self._come[sample] += 1
        if self._is_deaf or self._come[sample] <= work.told[sample]:
            return
        work.told[sample] += 1
        try:
            work.on_token(sample, token, logprob)
        except Exception:  # the boundary: whoever listens must not fail the requests beside his
            self._is_deaf = True
            log.exception("request %s: its listener failed; it hears no more tokens", work.request_id)


def as_failure(error: Exception) -> MintError:
    """The error as whoever waits is told of it: an engine may raise anything."""
    if isinstance(error, MintError):
        return error
    return RequestFailedError(f"the engine failed: {type(error).__name__}: {error}", remedy="See the server's log")


def _failed(error: Exception) -> Answer:
    return Answer(wire.encode_error(as_failure(error)), failed=True)
