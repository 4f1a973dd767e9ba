"""Runs the user's functions, sync or async, with a time-out for each; one that fails or hangs does not stop the others.

Threads are daemons, so a function that never returns cannot keep the process alive; its thread is abandoned and
replaced.
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

UserCall = Callable[[], Any]
"""No arguments; may return an awaitable."""


@dataclass(frozen=True)
class CallResult:
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

    def __init__(self, *, timeout_s: float, threads: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout_s` is counted per call, from the moment that it starts to run; `clock` gives seconds."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            self._start_thread()

    def run(self, calls: Sequence[UserCall]) -> list[CallResult]:
        """One result per call, in order."""
        pending = [_QueuedCall(function) for function in calls]
        for call in pending:
            self._queue.put(call)
        return [self._wait_for(call) for call in pending]

    def close(self) -> None:
        """Ends the idle threads; one that hangs in a call dies with the process."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _wait_for(self, call: _QueuedCall) -> CallResult:
        while True:
            try:
                return call.result.result(timeout=self._remaining_s(call))
            except FutureTimeoutError:
                if self._remaining_s(call) > 0:
                    continue  # it waited for a thread first: its own time-out counts from its start
                # A call that ends at this very moment may not see this: then one thread too many is idle.
                call.abandoned = True
                self._start_thread()
                return self._timed_out()

    def _remaining_s(self, call: _QueuedCall) -> float:
        return self._timeout_s if call.began is None else call.began + self._timeout_s - self._clock()

    def _start_thread(self) -> None:
        threading.Thread(target=self._serve, name="mint-calls", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            call.began = self._clock()
            call.result.set_result(self._call(call.function, call.began))
            if call.abandoned:
                return  # `_wait_for` has started a replacement

    def _call(self, function: UserCall, began: float) -> CallResult:
        try:
            value = function()
            if inspect.isawaitable(value):
                value = asyncio.run(_within(value, self._timeout_s))
        except TimeoutError:  # of `_within`, or of the user's own client
            return self._timed_out()
        except Exception as error:  # noqa: BLE001 - the boundary to the user's code: its errors are this call's result
            return CallResult(error=error, seconds=self._clock() - began)
        return CallResult(value, seconds=self._clock() - began)

    def _timed_out(self) -> CallResult:
        message = f"no answer within {self._timeout_s:g} s"
        return CallResult(error=TimeoutError(message), timed_out=True, seconds=self._timeout_s)


class _QueuedCall:
    """A call that waits for a thread or runs; `began` is the clock's time when it started to run."""

    def __init__(self, function: UserCall) -> None:
        self.function = function
        self.began: float | None = None
        self.abandoned = False
        self.result: Future[CallResult] = Future()


async def _within(value: Awaitable[Any], timeout_s: float) -> Any:
    return await asyncio.wait_for(value, timeout_s)
