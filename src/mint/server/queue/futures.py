"""The results that clients wait for: kept in memory for a while, and handed to waiters without polling.

Any thread may finish a future; waiting happens on the waiter's own event loop. The results of training requests are
also in the journal, so one that is forgotten here is read from there; the results of sample requests exist only here.
Each owner has limits of their own: many or large results of one owner never drop those of another.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import mint.wire as wire
from mint.errors import MintError, RequestFailedError

KEEP_S = 900.0
KEEP_BYTES = 64 * 1024 * 1024
"""Results of one owner that are kept, at most; beyond that the oldest are forgotten, but never the newest."""

RELEASED_WAIT_S = 1.0
RESOLVED_AT_ONCE = 16
"""How many waiters an event loop resumes before it looks for other work: each of them sends a response."""


@dataclass(frozen=True)
class FutureResult:
    """The body of a result, or of an error."""

    body: bytes
    failed: bool = False

    @classmethod
    def of_error(cls, error: Exception) -> FutureResult:
        """The result of a request that failed; an engine may raise anything, and the client must be told."""
        if not isinstance(error, MintError):
            text = f"the engine failed: {type(error).__name__}: {error}"
            error = RequestFailedError(text, remedy="See the server's log")
        return cls(wire.encode_error(error), failed=True)


@dataclass(frozen=True)
class _Open:
    fingerprint: str
    owner: str


@dataclass(frozen=True)
class _Finished:
    at: float
    result: FutureResult
    fingerprint: str
    owner: str
    number: int  # counts upwards over all results


@dataclass
class _FinishedOfOwner:
    """The finished requests of one owner, oldest first, and the size of their results."""

    names: dict[str, None] = field(default_factory=dict)
    size_bytes: int = 0


_Waiter = asyncio.Future[FutureResult | None]


class Futures:
    """The requests whose results are expected, the results that are known, and who waits for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._finished: OrderedDict[str, _Finished] = OrderedDict()  # of all owners, oldest first
        self._finished_of: defaultdict[str, _FinishedOfOwner] = defaultdict(_FinishedOfOwner)  # by owner
        self._finished_from: defaultdict[str, dict[str, None]] = defaultdict(dict)  # by source, oldest first
        self._waiters: defaultdict[str, list[_Waiter]] = defaultdict(list)
        self._count = 0
        self._released = False

    def open(self, request_id: str, fingerprint: str = "", *, owner: str) -> None:
        """Notes that a result will come, for the request of this owner with this fingerprint."""
        with self._lock:
            self._open[request_id] = _Open(fingerprint, owner)

    def fingerprint(self, request_id: str) -> str | None:
        """The fingerprint of a pending or finished request; None if there is none."""
        with self._lock:
            known = self._finished.get(request_id) or self._open.get(request_id)
            return None if known is None else known.fingerprint

    @property
    def open_count(self) -> int:
        """How many results are still to come."""
        with self._lock:
            return len(self._open)

    @property
    def finished_count(self) -> int:
        """How many results are in memory."""
        with self._lock:
            return len(self._finished)

    @property
    def waiter_count(self) -> int:
        """How many requests are held open until a result comes."""
        with self._lock:
            return sum(map(len, self._waiters.values()))

    def abandon(self, request_id: str) -> None:
        """No result will come after all."""
        with self._lock:
            self._open.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Drops a result, known or expected, that nobody will ask for again."""
        with self._lock:
            self._open.pop(request_id, None)
            self._drop(request_id)

    def open_of(self, prefix: str) -> list[str]:
        """The requests of a session or model whose results are still to come."""
        with self._lock:
            return [name for name in self._open if name.startswith(f"{prefix}:")]

    def finish(self, results: Mapping[str, FutureResult]) -> None:
        """Stores results and wakes their waiters. Results of requests that are not open (any more) are dropped."""
        resolved: list[tuple[FutureResult, list[_Waiter]]] = []
        with self._lock:
            for request_id, result in results.items():
                expected = self._open.pop(request_id, None)
                if expected is None:
                    continue
                self._store(request_id, result, expected)
                waiters = self._waiters.pop(request_id, []) + self._waiters.pop(f"{_source(request_id)}:*", [])
                if waiters:
                    resolved.append((result, waiters))
        if resolved:  # outside of the lock: event loops are woken
            _resolve(resolved)

    def release(self) -> None:
        """Lets all waiters go without a result, now and from now on; they may ask again, elsewhere or later."""
        with self._lock:
            self._released = True
            waiters = [waiter for waiters in self._waiters.values() for waiter in waiters]
            self._waiters.clear()
        _resolve([(None, waiters)])

    async def wait(self, request_id: str, timeout_s: float | None) -> FutureResult | None:
        """The result; None if it has not come in time, or none is expected, or the waiters were released."""
        with self._lock:
            known = self._finished.get(request_id)
            if known is not None:
                return known.result
            if request_id not in self._open:
                return None
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[request_id].append(waiter)
        return await self._wait(request_id, waiter, timeout_s)

    async def wait_for_any(self, sampler_id: str, after: int, timeout_s: float) -> list[tuple[int, str, bool]]:
        """The results of a sampler's requests with numbers beyond `after`: number, request id, and whether it failed.

        Waits for one if there is none yet; empty if none has come in time.
        """
        any_of_sampler = f"{sampler_id}:*"  # no request has such an id
        with self._lock:
            found = self._beyond(sampler_id, after)
            if found or timeout_s <= 0:
                return found
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[any_of_sampler].append(waiter)
        await self._wait(any_of_sampler, waiter, timeout_s)
        with self._lock:
            return self._beyond(sampler_id, after)

    async def _wait(self, key: str, waiter: _Waiter, timeout_s: float | None) -> FutureResult | None:
        if self._released:  # a client that asks again must not do so in a tight loop
            timeout_s = RELEASED_WAIT_S
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            return None
        finally:
            with self._lock:
                waiters = self._waiters.get(key, [])
                if waiter in waiters:
                    waiters.remove(waiter)
                if not waiters:
                    self._waiters.pop(key, None)

    def _beyond(self, sampler_id: str, after: int) -> list[tuple[int, str, bool]]:
        found = []
        for name in reversed(self._finished_from.get(sampler_id, {})):  # most are known to the client already
            known = self._finished[name]
            if known.number <= after:
                break
            found.append((known.number, name, known.result.failed))
        return found[::-1]

    def _store(self, request_id: str, result: FutureResult, expected: _Open) -> None:
        now = time.monotonic()
        self._drop(request_id)
        self._count += 1
        self._finished[request_id] = _Finished(now, result, expected.fingerprint, expected.owner, self._count)
        own = self._finished_of[expected.owner]
        own.names[request_id] = None
        self._finished_from[_source(request_id)][request_id] = None
        own.size_bytes += len(result.body)
        # The newest stays, however large: its client is about to ask for it.
        while own.size_bytes > KEEP_BYTES and len(own.names) > 1:
            self._drop(next(iter(own.names)))
        while now - next(iter(self._finished.values())).at > KEEP_S:
            self._drop(next(iter(self._finished)))

    def _drop(self, request_id: str) -> None:
        known = self._finished.pop(request_id, None)
        if known is None:
            return
        own = self._finished_of[known.owner]
        del own.names[request_id]
        own.size_bytes -= len(known.result.body)
        if not own.names:
            del self._finished_of[known.owner]
        source = _source(request_id)
        del self._finished_from[source][request_id]
        if not self._finished_from[source]:
            del self._finished_from[source]


def _source(request_id: str) -> str:
    """The sampler or model of a request."""
    return request_id.rpartition(":")[0]


def _resolve(resolved: Iterable[tuple[FutureResult | None, list[_Waiter]]]) -> None:
    """Gives waiters their results, each on its own event loop; one wake-up for each loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiter, FutureResult | None]]] = defaultdict(list)
    for result, waiters in resolved:
        for waiter in waiters:
            by_loop[waiter.get_loop()].append((waiter, result))
    for loop, pairs in by_loop.items():
        if not loop.is_closed():  # an embedded client may have ended while it waited
            loop.call_soon_threadsafe(_set_results, loop, pairs)


def _set_results(loop: asyncio.AbstractEventLoop, pairs: list[tuple[_Waiter, FutureResult | None]]) -> None:
    for waiter, result in pairs[:RESOLVED_AT_ONCE]:
        if not waiter.done():
            waiter.set_result(result)
    if len(pairs) > RESOLVED_AT_ONCE:
        loop.call_soon(_set_results, loop, pairs[RESOLVED_AT_ONCE:])
