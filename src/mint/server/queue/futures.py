"""The answers that clients wait for: kept for a while, and handed over the moment the worker has them.

Any thread may finish an answer; waiting happens on the event loop of whoever waits. Nobody polls. Training answers
also lie in the journal, so forgetting them here costs a read; sample answers exist only here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEEP_S = 900.0
KEEP_BYTES = 64 * 1024 * 1024
RELEASED_WAIT_S = 1.0


@dataclass(frozen=True)
class Answer:
    """The body of a result, or of an error."""

    body: bytes
    failed: bool = False


@dataclass(frozen=True)
class _Known:
    stored_at: float
    answer: Answer
    fingerprint: str
    place: int  # counts upwards over all answers


@dataclass(eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Answer | None]


class FutureBook:
    """Who waits for what, and what is known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, str] = {}
        self._waiters: defaultdict[str, list[_Waiter]] = defaultdict(list)
        self._answers: OrderedDict[str, _Known] = OrderedDict()
        self._size_bytes = 0
        self._count = 0
        self._released = False

    def open(self, request_id: str, fingerprint: str = "") -> None:
        """Notes that an answer will come, to the request with this fingerprint."""
        with self._lock:
            self._open[request_id] = fingerprint

    def fingerprint(self, request_id: str) -> str | None:
        """That of the request whose answer is here or will come; None if there is none."""
        with self._lock:
            known = self._answers.get(request_id)
            return known.fingerprint if known is not None else self._open.get(request_id)

    @property
    def open_count(self) -> int:
        """How many answers are still to come."""
        with self._lock:
            return len(self._open)

    @property
    def waiter_count(self) -> int:
        """How many requests are held open because somebody waits."""
        with self._lock:
            return sum(map(len, self._waiters.values()))

    def abandon(self, request_id: str) -> None:
        """No answer will come after all."""
        with self._lock:
            self._open.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Nobody will ask for the answer (again)."""
        with self._lock:
            self._open.pop(request_id, None)
            self._drop(request_id)

    def open_of(self, session_id: str) -> list[str]:
        """The requests of a session that still wait for their answer."""
        with self._lock:
            return [name for name in self._open if name.startswith(f"{session_id}:")]

    def finish(self, answers: Mapping[str, Answer]) -> None:
        """Stores answers and wakes their waiters at once. What nobody waits for (any more) is let go."""
        woken: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Answer]]] = defaultdict(list)
        with self._lock:
            for request_id, answer in answers.items():
                fingerprint = self._open.pop(request_id, None)
                if fingerprint is None:
                    continue
                self._store(request_id, answer, fingerprint)
                owner = request_id.rpartition(":")[0]
                for waiter in [*self._waiters.pop(request_id, []), *self._waiters.pop(_any_of(owner), [])]:
                    woken[waiter.loop].append((waiter, answer))
        for loop, resolved in woken.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, resolved)

    def release(self) -> None:
        """Lets go of everybody who waits, now and from now on: they may ask again, elsewhere or later."""
        woken: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiter, None]]] = defaultdict(list)
        with self._lock:
            self._released = True
            for waiter in (waiter for waiters in self._waiters.values() for waiter in waiters):
                woken[waiter.loop].append((waiter, None))
            self._waiters.clear()
        for loop, released in woken.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, released)

    async def wait(self, request_id: str, timeout_s: float | None) -> Answer | None:
        """The answer; None if it has not come in time, or none is expected, or everybody was let go."""
        with self._lock:
            if request_id in self._answers:
                return self._answers[request_id].answer
            if request_id not in self._open:
                return None
            waiter = self._enter(request_id)
        return await self._wait(request_id, waiter, timeout_s)

    async def wait_for_any(self, owner: str, after: int, timeout_s: float) -> list[tuple[int, str, bool]]:
        """The answers of an owner's requests beyond place `after`: their places, ids, and whether they failed.

        Waits for one if there is none yet; empty if none has come in time.
        """
        with self._lock:
            found = self._beyond(owner, after)
            if found or timeout_s <= 0:
                return found
            waiter = self._enter(_any_of(owner))
        await self._wait(_any_of(owner), waiter, timeout_s)
        with self._lock:
            return self._beyond(owner, after)

    def _enter(self, key: str) -> _Waiter:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future())
        self._waiters[key].append(waiter)
        return waiter

    async def _wait(self, key: str, waiter: _Waiter, timeout_s: float | None) -> Answer | None:
        if self._released:  # whoever asks again must not do so in a tight loop
            timeout_s = RELEASED_WAIT_S
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.future
        except TimeoutError:
            return None
        finally:
            with self._lock:
                waiters = self._waiters.get(key, [])
                if waiter in waiters:
                    waiters.remove(waiter)
                if not waiters:
                    self._waiters.pop(key, None)

    def _beyond(self, owner: str, after: int) -> list[tuple[int, str, bool]]:
        prefix = f"{owner}:"
        return [
            (known.place, name, known.answer.failed)
            for name, known in self._answers.items()
            if known.place > after and name.startswith(prefix)
        ]

    def _store(self, request_id: str, answer: Answer, fingerprint: str) -> None:
        now = time.monotonic()
        self._drop(request_id)
        self._count += 1
        self._answers[request_id] = _Known(now, answer, fingerprint, self._count)
        self._size_bytes += len(answer.body)
        while len(self._answers) > 1:
            oldest, known = next(iter(self._answers.items()))
            if self._size_bytes <= KEEP_BYTES and now - known.stored_at <= KEEP_S:
                break
            self._drop(oldest)

    def _drop(self, request_id: str) -> None:
        known = self._answers.pop(request_id, None)
        if known is not None:
            self._size_bytes -= len(known.answer.body)


def _any_of(owner: str) -> str:
    """The key of those who wait for whatever of an owner comes next; no request has such an id."""
    return f"{owner}:*"


def _resolve(resolved: Sequence[tuple[_Waiter, Answer | None]]) -> None:
    for waiter, answer in resolved:
        if not waiter.future.done():
            waiter.future.set_result(answer)
