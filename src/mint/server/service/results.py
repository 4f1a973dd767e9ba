"""The results of accepted requests, as long polls ask for them, and where a request waits that has none yet."""

from __future__ import annotations

import asyncio
import logging
import time

import mint.wire as wire
from mint.errors import DamagedDataError, NotFoundError
from mint.server.callers import Caller
from mint.server.ids import RequestId, session_of
from mint.server.queue.eta import Eta
from mint.server.queue.futures import FutureResult, Futures
from mint.server.queue.queue import RequestQueue
from mint.server.queue.queue_position import QueueIndex, QueuePosition
from mint.server.service.request_reader import RequestReader
from mint.server.service.sessions import Sessions
from mint.server.store.journal import Journal
from mint.server.store.rows import FINISHED, JobRow
from mint.server.worker.snapshots import RETAINED_BYTES, RETAINED_RESULTS
from mint.types import ForwardBackwardOutput, SampleResponse
from mint.wire.requests import RetrieveFuturesRequest
from mint.wire.responses import FutureCompletion, RetrieveFuturesResponse

log = logging.getLogger("mint.service")

CLONE_SEQ_IDS = 10**9
"""A clone of a sampling client numbers its requests from its own number times this."""

QUEUE_INDEX_AGE_S = 0.1
"""How old the index of the queue may be from which waiting clients are told: thousands of them may ask at once."""


class Results:
    """The results of one service. Coroutines run on any event loop, which they never block."""

    def __init__(
        self,
        reader: RequestReader,
        journal: Journal,
        queue: RequestQueue,
        futures: Futures,
        sessions: Sessions,
        eta: Eta,
        *,
        long_poll_s: float,
        loss: str = "",
    ) -> None:
        """`loss` says why a request may be unknown that was accepted here."""
        self._reader = reader
        self._journal = journal
        self._queue = queue
        self._futures = futures
        self._sessions = sessions
        self._eta = eta
        self._loss = loss
        self.long_poll_s = long_poll_s
        """How long a client waits for a result before it is told to ask again."""
        self._queue_index = QueueIndex(queue.pending(), eta)
        self._indexed_at = 0.0

    async def retrieve(self, caller: Caller, name: str) -> FutureResult | None:
        """The result of an accepted request, as soon as it is there; None if that takes longer than a long poll.

        Raises:
            NotFoundError: no such request; a lost sample request may be sent again.
            SessionEndedError: its session has ended.
        """
        parsed = _parse_request_id(name)
        session_id = session_of(parsed.target_id)
        # `touch` looks in memory only. `require` asks the journal, which this event loop must not wait for.
        if not self._sessions.touch(session_id, caller.owner):
            await asyncio.to_thread(self._sessions.require, session_id, caller.owner)
        result = await self._futures.wait(name, self.long_poll_s)
        if result is not None or self._futures.fingerprint(name) is not None:
            return result
        # no longer in memory
        row = None
        try:
            if not parsed.is_sample:
                row = await asyncio.to_thread(self._journal.job, parsed.target_id, parsed.number)
            if row is not None:
                await asyncio.to_thread(self._verify, row)
        except DamagedDataError as error:  # final: clients would ask again for ever if it was a server's error
            log.error("%s", error)
            return FutureResult.of_error(error)
        if row is not None and row.result is None and row.status != "pending":
            raise NotFoundError(
                "has run, but its result is no longer kept: "
                f"{RETAINED_RESULTS} later requests of its model have run since, or their results take "
                f"{RETAINED_BYTES >> 20} MiB, or more than a small part of what is left of max_journal_bytes",
                field="request_id",
                value=name,
                remedy="Read the results of passes before you send so many more requests",
            )
        if row is None or row.result is None:
            why = "does not exist or was deleted"
            raise NotFoundError(f"{why}: {self._loss}" if self._loss else why, field="request_id", value=name)
        return FutureResult(row.result, failed=row.status == "failed")

    def _verify(self, row: JobRow) -> None:
        row.verify()
        model = self._journal.model(row.model_id) if row.result is None else None
        if model is not None:
            model.verify()
            if row.status in FINISHED:
                model.verify_finished(row)

    async def retrieve_many(self, caller: Caller, body: bytes) -> RetrieveFuturesResponse:
        """Which of a sampler's requests have finished since the last time; waits for one as `retrieve` does."""
        request = wire.decode(RetrieveFuturesRequest, body)
        sampler = request.target.sampling_session_id
        cursor = request.prev_cursor
        if not self._sessions.touch(session_of(sampler), caller.owner):
            await asyncio.to_thread(self._sessions.require, session_of(sampler), caller.owner)
        for name in request.retrieved_request_ids:
            if name.startswith(f"{sampler}:"):
                self._futures.forget(name)
        wanted_s = self.long_poll_s if request.timeout is None else request.timeout
        deadline = time.monotonic() + (min(wanted_s, self.long_poll_s) if wanted_s > 0 else 0.0)
        while True:
            found = await self._futures.wait_for_any(sampler, cursor, deadline - time.monotonic())
            cursor = max([cursor, *(number for number, _, _ in found)])
            own = [
                FutureCompletion(state="failed" if failed else "finished", request_id=name)
                for _, name, failed in found
                if _clone_of(name) == request.target.cloned_sampler_id
            ]
            if own or not found:
                return RetrieveFuturesResponse(completions=own, cursor=cursor)

    def as_json(self, result: FutureResult, kind: type[ForwardBackwardOutput] | type[SampleResponse]) -> bytes:
        """A result of this kind for a client that reads only JSON."""
        return self._reader.result_as_json(result.body, kind)

    def queue_position(self, caller: Caller, name: str) -> QueuePosition:
        """Where a request is that has no result yet."""
        parsed = _parse_request_id(name)
        at_limit = self._queue.is_full(caller.owner, max_requests=caller.quotas.max_waiting_requests)
        now = time.monotonic()
        # Without a lock: two threads at once build the index twice, and either may be used.
        if now - self._indexed_at > QUEUE_INDEX_AGE_S:
            problem = str(self._journal.storage.problem or "")
            self._queue_index = QueueIndex(self._queue.pending(), self._eta, storage_problem=problem)
            self._indexed_at = now
        return self._queue_index.position(parsed, now, at_limit=at_limit)


def _parse_request_id(name: str) -> RequestId:
    parsed = RequestId.parse(name)
    if parsed is None:
        raise NotFoundError("is not a request here", field="request_id", value=name)
    return parsed


def _clone_of(name: str) -> int:
    parsed = RequestId.parse(name)
    return 0 if parsed is None else parsed.number // CLONE_SEQ_IDS
