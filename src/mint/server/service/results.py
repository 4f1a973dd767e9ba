"""How clients come to their results: the long poll for one, the question for all of a sampler, and the news meanwhile.

Knows no HTTP.
"""

from __future__ import annotations

import time

import mint.wire as wire
from mint.errors import NotFoundError
from mint.server.callers import Caller
from mint.server.ids import RequestName, session_of
from mint.server.queue.eta import Pace
from mint.server.queue.futures import Answer, FutureBook
from mint.server.queue.queue import Inbox
from mint.server.queue.queue_position import QueueFacts, QueueView
from mint.server.service.sessions import Sessions
from mint.server.store.journal import Journal
from mint.wire.requests import RetrieveFutureRequest, RetrieveFuturesRequest
from mint.wire.responses import FutureCompletion, RetrieveFuturesResponse

LONG_POLL_S = 25.0
VIEW_AGE_S = 0.1
"""How old the picture of the queue may be from which waiters are told: thousands of them may ask at once."""

CLONE_NUMBERS = 10**9
"""A clone of a sampling client numbers its requests from its own number times this."""


class Retrieval:
    """The results of one service."""

    def __init__(self, journal: Journal, sessions: Sessions, futures: FutureBook, inbox: Inbox, pace: Pace) -> None:
        self._journal = journal
        self._sessions = sessions
        self._futures = futures
        self._inbox = inbox
        self._pace = pace
        self._view, self._seen_at = QueueView(inbox.pending(), pace), 0.0

    async def retrieve(self, caller: Caller, body: bytes) -> Answer | None:
        """The answer of an accepted request, as soon as it is there; None if it takes longer than a long poll.

        Raises:
            NotFoundError: no such request; a lost sample request may be sent again.
            SessionEndedError: its session has ended.
        """
        # `allow_metadata_only` may be passed over: clients take the result itself where they asked for its size
        name = wire.decode(RetrieveFutureRequest, body).request_id
        parsed = self._parse(caller, name)
        answer = await self._futures.wait(name, LONG_POLL_S)
        if answer is not None or self._futures.fingerprint(name) is not None:
            return answer
        row = None if parsed.is_sample else self._journal.job(parsed.owner, parsed.number)
        if row is None or row.result is None:
            raise NotFoundError("is not a request here (any more)", field="request_id", value=name)
        return Answer(row.result, failed=row.status == "failed")

    def facts(self, caller: Caller, body: bytes) -> tuple[str, QueueFacts]:
        """The id of a request that has no answer yet, and what is known of its wait."""
        name = wire.decode(RetrieveFutureRequest, body).request_id
        at_bound = self._inbox.is_full(caller.owner, max_requests=caller.quotas.max_waiting_requests)
        parsed = self._parse(caller, name)
        now = time.monotonic()
        if now - self._seen_at > VIEW_AGE_S:
            self._view, self._seen_at = QueueView(self._inbox.pending(), self._pace), now
        return name, self._view.facts(parsed, now, at_bound=at_bound)

    async def retrieve_many(self, caller: Caller, body: bytes) -> RetrieveFuturesResponse:
        """Which of a sampler's results have come since the last time; waits for one as `retrieve` does."""
        request = wire.decode(RetrieveFuturesRequest, body)
        target, cursor = request.target, request.prev_cursor
        self._sessions.require(session_of(target.sampling_session_id), caller.owner)
        for name in request.retrieved_request_ids:
            if name.startswith(f"{target.sampling_session_id}:"):
                self._futures.forget(name)
        wanted_s = LONG_POLL_S if request.timeout is None else request.timeout
        deadline = time.monotonic() + (min(wanted_s, LONG_POLL_S) if wanted_s > 0 else 0.0)
        while True:
            left_s = deadline - time.monotonic()
            found = await self._futures.wait_for_any(target.sampling_session_id, cursor, left_s)
            cursor = max([cursor, *(place for place, _, _ in found)])
            mine = [
                FutureCompletion(state="failed" if failed else "finished", request_id=name)
                for _, name, failed in found
                if _clone_of(name) == target.cloned_sampler_id
            ]
            if mine or not found:
                return RetrieveFuturesResponse(completions=mine, cursor=cursor)

    def _parse(self, caller: Caller, name: str) -> RequestName:
        parsed = RequestName.parse(name)
        if parsed is None:
            raise NotFoundError("is not a request here", field="request_id", value=name)
        self._sessions.require(session_of(parsed.owner), caller.owner)
        return parsed


def _clone_of(name: str) -> int:
    parsed = RequestName.parse(name)
    return 0 if parsed is None else parsed.number // CLONE_NUMBERS
