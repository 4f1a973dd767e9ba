"""Runs the user's functions, sync or async, many at once; one that fails or hangs does not stop the others.

A coroutine function runs in one event loop for all (`await_loop`), any other function in a few threads
(`worker_threads`); what such a function returns is awaited in the loop, if it must be.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from mint.rl.calls.await_loop import AwaitLoop
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.calls.user_call import CallResult, UserCall, timed_out
from mint.rl.calls.worker_threads import WorkerThreads

IN_FLIGHT = 1024
"""Async calls in flight at once, unless a setting says otherwise."""

LEAST_THREADS = 4
"""Threads of a machine with fewer cores: plain functions often wait for others."""

GRACE_S = 1.0
"""How much later than its time-out an async call is given up: before that, the event loop itself cancels it."""


def default_threads() -> int:
    """One thread for each core, at least `LEAST_THREADS`."""
    return max(LEAST_THREADS, os.cpu_count() or 1)


class CallPool:
    """Runs calls from any thread or event loop."""

    def __init__(
        self,
        *,
        timeout_s: float,
        threads: int | None = None,
        in_flight: int = IN_FLIGHT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` is counted per call, from the moment that it starts to run.

        `threads` run plain functions (None: `default_threads`), `in_flight` bounds the async ones. `clock` gives
        seconds.
        """
        self._timeout_s = timeout_s
        self._clock = clock
        self._awaited = AwaitLoop(in_flight, timeout_s=timeout_s, clock=clock)
        self._threads = WorkerThreads(threads or default_threads(), clock=clock, on_awaitable=self._awaited.submit)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> CallResult:
        """What the function returned or raised; never raises itself."""
        call = UserCall(function, arguments)
        is_async = inspect.iscoroutinefunction(function)
        if is_async:
            self._awaited.submit(call)
        else:
            self._threads.submit(call)
        result = asyncio.wrap_future(call.result)
        while True:
            done, _ = await asyncio.wait({result}, timeout=self._remaining_s(call, is_async=is_async))
            if done:
                return result.result()
            if self._remaining_s(call, is_async=is_async) > 0:
                continue  # it waited for its turn first: its own time-out counts from its start
            if is_async or call.awaitable is not None:
                await self._awaited.abandon(call)
            else:
                self._threads.abandon(call)
                call.resolve(timed_out(self._timeout_s))

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        """One result per call, in order. Waits for all of them. A call may return an awaitable."""
        return run_in_own_thread(self._gather(calls))

    def close(self) -> None:
        """Ends the threads that are idle, and the event loop."""
        self._threads.close()
        self._awaited.close()

    async def _gather(self, calls: Sequence[Callable[[], Any]]) -> list[CallResult]:
        return await asyncio.gather(*(self.call(function) for function in calls))

    def _remaining_s(self, call: UserCall, *, is_async: bool) -> float:
        limit_s = self._timeout_s + (GRACE_S if is_async or call.awaitable is not None else 0.0)
        return limit_s if call.began is None else call.began + limit_s - self._clock()
