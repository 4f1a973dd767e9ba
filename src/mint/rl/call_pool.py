"""Runs the user's functions, sync or async, so that a failing or hanging one costs one answer and no more.

Knows nothing of policies, tokens or rewards. Threads are daemons: a function that never returns cannot keep the process
alive; its thread is given up and replaced.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]
"""No arguments; may return an awaitable."""


@dataclass(frozen=True)
class Answer:
    """What a call returned, or the exception that it raised; `timed_out` where it did neither in time."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def failure(self) -> str | None:
        """The failure in words, None for a success."""
        if self.error is None:
            return None
        return str(self.error) if self.timed_out else f"{type(self.error).__name__}: {self.error}"


class CallPool:
    """A few threads that run calls; `run` may be used again and again, by several threads at once."""

    def __init__(self, *, timeout_s: float, threads: int = 4) -> None:
        """`timeout_s` is counted per call, from the moment that it starts to run."""
        self._timeout_s = timeout_s
        self._inbox: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            self._start_thread()

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """One answer per call, in order."""
        pending = [_Pending(function) for function in calls]
        for call in pending:
            self._inbox.put(call)
        return [self._collect(call) for call in pending]

    def close(self) -> None:
        """Ends the idle threads; one that hangs in a call dies with the process."""
        for _ in range(self._threads):
            self._inbox.put(None)

    def _collect(self, call: _Pending) -> Answer:
        while True:
            try:
                return call.answer.result(timeout=call.remaining_s(self._timeout_s))
            except FutureTimeoutError:
                if call.remaining_s(self._timeout_s) > 0:
                    continue
                call.given_up = True
                self._start_thread()
                return _too_late(self._timeout_s)

    def _start_thread(self) -> None:
        threading.Thread(target=_serve, args=(self._inbox, self._timeout_s), name="mint-calls", daemon=True).start()


class _Pending:
    """One call to make, and when it began."""

    def __init__(self, function: Call) -> None:
        self.function = function
        self.started_s: float | None = None
        self.given_up = False
        self.answer: Future[Answer] = Future()

    def remaining_s(self, timeout_s: float) -> float:
        if self.started_s is None:
            return timeout_s
        return self.started_s + timeout_s - time.monotonic()


def _serve(inbox: queue.SimpleQueue[_Pending | None], timeout_s: float) -> None:
    while (call := inbox.get()) is not None:
        call.started_s = time.monotonic()
        call.answer.set_result(_compute(call.function, timeout_s))
        if call.given_up:
            return  # `_collect` has started a replacement


def _compute(function: Call, timeout_s: float) -> Answer:
    began = time.monotonic()
    try:
        value = function()
        if inspect.isawaitable(value):
            value = asyncio.run(_within(value, timeout_s))
    except TimeoutError:
        return _too_late(timeout_s)
    except Exception as error:  # noqa: BLE001 - the boundary to the user's code: whatever it raises is this call's data
        return Answer(error=error, seconds=time.monotonic() - began)
    return Answer(value, seconds=time.monotonic() - began)


async def _within(value: Awaitable[Any], timeout_s: float) -> Any:
    return await asyncio.wait_for(value, timeout_s)


def _too_late(timeout_s: float) -> Answer:
    return Answer(error=TimeoutError(f"no answer within {timeout_s:g} s"), timed_out=True, seconds=timeout_s)
