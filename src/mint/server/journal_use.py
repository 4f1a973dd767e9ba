"""How much of the journal each owner takes, and whether there is room for more: payloads, results, metadata, rows.

Without a bound, passes that no step follows, and the rows of ended sessions, would fill the disk for everybody. Counts
what it has read from the journal and what was accepted since; reads again when that is old, or reaches the quota.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mint.errors import QuotaExceededError
from mint.server.limits import ROW_BYTES

FRESH_S = 10.0
TIMES_APART = 200
"""The requests are read again after so many seconds, and no sooner than after so many times what that took."""

FULL_TIMES_APART = 20
"""The same while the quota is used up: the owner may have made room."""

SLACK = 8
"""Beyond the quota, requests without much data take up to the quota's eighth: with steps an owner makes room again.
Saves take an eighth more, so that a model can be saved when nothing else is accepted."""

LITTLE_BYTES = 4096
"""The largest payload of a request without much data."""


@dataclass
class _Use:
    """The bytes of an owner in the journal: those that were read, and those accepted since, of requests and of records.

    `has_forgotten`: when it was read, records of ended sessions were removed, and that has made much room.
    """

    requests: int
    records: int
    read_at: float
    took_s: float
    has_forgotten: bool = False

    @property
    def total(self) -> int:
        return self.requests + self.records


class JournalUse:
    """The use of one journal. Any thread may call."""

    def __init__(
        self,
        request_bytes: Callable[[str], int],
        record_bytes: Callable[[str], int],
        forget_ended: Callable[[str], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The first two read what an owner's requests and other records take. `forget_ended` removes some of the oldest
        records of an owner that nothing needs, and returns how many."""
        self._request_bytes = request_bytes
        self._record_bytes = record_bytes
        self._forget_ended = forget_ended
        self._clock = clock
        self._lock = threading.Lock()
        self._of: dict[str, _Use] = {}
        self._quotas: dict[str, int] = {}  # of the owners in `_of`, as the last request had it

    def add_record(self, owner: str, size_bytes: int, quota: int | None) -> None:
        """Counts a new session, model or sampler of an owner, with so much metadata.

        Raises:
            QuotaExceededError: the owner would take more than `quota`.
        """
        if quota is None:
            return
        with self._lock:
            use = self._use_with_room(owner, ROW_BYTES + size_bytes, quota)
            if use is None:
                raise self._error(owner, quota)
            use.records += ROW_BYTES + size_bytes

    def add_request(
        self, owner: str, payload_bytes: int, quota: int | None, *, is_save: bool = False
    ) -> QuotaExceededError | None:
        """Counts a training request with such a payload; or returns the error with which it fails in its turn, and
        counts that.

        Raises:
            QuotaExceededError: there is no room for the error, either.
        """
        if quota is None:
            return None
        most = quota + (2 if is_save else 1) * (quota // SLACK)
        error = None
        size = ROW_BYTES + payload_bytes
        with self._lock:
            self._quotas[owner] = quota
            use = self._use_with_room(owner, size, most if payload_bytes <= LITTLE_BYTES else quota)
            if use is None:
                error, size = self._error(owner, quota), 2 * ROW_BYTES
                use = self._use_with_room(owner, size, most)
            if use is None:
                raise self._error(owner, quota)
            use.requests += size
        return error

    def room(self, owner: str) -> int | None:
        """The bytes that an owner has left; None if that is half of the quota or more, or if there is no quota."""
        with self._lock:
            use, quota = self._of.get(owner), self._quotas.get(owner)
        if use is None or quota is None or 2 * use.total < quota:
            return None
        return max(0, quota - use.total)

    def add_result(self, owner: str, size_bytes: int) -> None:
        """Counts the result of a training request. No quota refuses it: the request was accepted."""
        with self._lock:
            use = self._of.get(owner)
            if use is not None:
                use.requests += size_bytes

    def _use_with_room(self, owner: str, size_bytes: int, limit: int) -> _Use | None:
        """The use of an owner if so much more is within the limit, else None."""
        use = self._of.get(owner)
        if use is None or self._is_old(use, FRESH_S, TIMES_APART):
            use = self._read(owner, None if use is None else use.records)
        if use.total + size_bytes > limit and (use.has_forgotten or self._is_old(use, 0.0, FULL_TIMES_APART)):
            began = self._clock()
            use = self._read(owner, None)
            if use.total + size_bytes > limit and self._forget_ended(owner):
                use = self._read(owner, None)
                # that much was worth the reading, and may be done again at once
                use.has_forgotten = use.total < limit - limit // SLACK
            use.took_s = self._clock() - began
        return use if use.total + size_bytes <= limit else None

    def _is_old(self, use: _Use, fresh_s: float, times: int) -> bool:
        return self._clock() - use.read_at >= max(fresh_s, times * use.took_s)

    def _read(self, owner: str, records: int | None) -> _Use:
        """Reads what an owner takes; records only if `records` is None."""
        began = self._clock()
        requests = self._request_bytes(owner)
        if records is None:
            records = self._record_bytes(owner)
        now = self._clock()
        self._of[owner] = _Use(requests, records, now, now - began)
        return self._of[owner]

    def _error(self, owner: str, quota: int) -> QuotaExceededError:
        return QuotaExceededError(
            f"bytes of the journal are yours, and {self._of[owner].total} are in use: by passes that no step has "
            "followed, by results and by metadata",
            field="max_journal_bytes",
            value=quota,
            remedy="Call optim_step after your passes, and close sessions that you no longer need; the operator can "
            "raise the quota (mint keys update)",
        )
