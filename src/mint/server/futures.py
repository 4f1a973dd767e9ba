"""The answers that clients wait for: kept for a while, and handed over the moment the worker has them.

Any thread may finish an answer; waiting happens on the event loop of whoever waits. Nobody polls. Training answers
also lie in the journal, so forgetting them here costs a read; sample answers exist only here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

KEEP_S = 900.0
KEEP_BYTES = 64 * 1024 * 1024


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


@dataclass(eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Answer]


class FutureBook:
    """Who waits for what, and what is known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, str] = {}
        self._waiters: defaultdict[str, list[_Waiter]] = defaultdict(list)
        self._answers: OrderedDict[str, _Known] = OrderedDict()
        self._size_bytes = 0

    def open(self, request_id: str, fingerprint: str = "") -> None:
        """Notes that an answer will come, to the request with this fingerprint."""
        with self._lock:
            self._open[request_id] = fingerprint

    def fingerprint(self, request_id: str) -> str | None:
        """That of the request whose answer is here or will come; None if there is none."""
        with self._lock:
            known = self._answers.get(request_id)
            return known.fingerprint if known is not None else self._open.get(request_id)

    def abandon(self, request_id: str) -> None:
        """No answer will come after all."""
        with self._lock:
            self._open.pop(request_id, None)

    def open_of(self, session_id: str) -> list[str]:
        """The requests of a session that still wait for their answer."""
        with self._lock:
            return [name for name in self._open if name.startswith(f"{session_id}:")]

    def finish(self, answers: Mapping[str, Answer]) -> None:
        """Stores answers and wakes their waiters at once."""
        woken: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Answer]]] = defaultdict(list)
        with self._lock:
            for request_id, answer in answers.items():
                self._store(request_id, answer, self._open.pop(request_id, ""))
                for waiter in self._waiters.pop(request_id, []):
                    woken[waiter.loop].append((waiter, answer))
        for loop, resolved in woken.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, resolved)

    async def wait(self, request_id: str, timeout_s: float) -> Answer | None:
        """The answer; None if it has not come in time, or none is expected."""
        waiter = _Waiter(asyncio.get_running_loop(), asyncio.get_running_loop().create_future())
        with self._lock:
            if request_id in self._answers:
                return self._answers[request_id].answer
            if request_id not in self._open:
                return None
            self._waiters[request_id].append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.future
        except TimeoutError:
            return None
        finally:
            with self._lock:
                if waiter in self._waiters.get(request_id, ()):
                    self._waiters[request_id].remove(waiter)

    def _store(self, request_id: str, answer: Answer, fingerprint: str) -> None:
        now = time.monotonic()
        self._drop(request_id)
        self._answers[request_id] = _Known(now, answer, fingerprint)
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


def _resolve(resolved: list[tuple[_Waiter, Answer]]) -> None:
    for waiter, answer in resolved:
        if not waiter.future.done():
            waiter.future.set_result(answer)
