"""One event loop, in a thread of its own, that awaits what the user's functions return.

Hundreds of awaitables are in flight at once. A function that blocks its event loop (`time.sleep` where
`await asyncio.sleep` is meant) holds up all of them: then the loop is abandoned, what it ran counts as timed out, and
what still waited goes on in a new loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mint.rl.calls.paused_timeout import RUNNING, RunningCall
from mint.rl.calls.user_call import CallResult, UserCall, timed_out

CLOSING_S = 1.0
"""How long a loop that is closed waits for its tasks to take note of their cancellation."""


class AwaitLoop:
    """Awaits calls, at most `limit` at a time, in the order in which they were submitted."""

    def __init__(self, limit: int, *, timeout_s: float, clock: Callable[[], float]) -> None:
        """`timeout_s` is counted per call, from the moment that it starts to run."""
        self._limit = limit
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[UserCall] = deque()
        self._running: set[UserCall] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, call: UserCall) -> None:
        """Awaits `call.awaitable`, or the coroutine that its function returns, as soon as there is a place."""
        with self._lock:
            self._waiting.append(call)
            self._start_waiting()

    async def abandon(self, call: UserCall) -> None:
        """Gives up a call that has not noticed its time-out; a loop that does not answer is replaced."""
        with self._lock:
            loop = self._loop
        if loop is not None and not await _answers(loop):
            self._replace(loop)
        call.resolve(timed_out(self._timeout_s))

    def close(self) -> None:
        """Cancels what runs and ends the thread."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _start_waiting(self) -> None:
        """Starts as many calls as there are places. The caller holds the lock."""
        while self._waiting and len(self._running) < self._limit:
            call = self._waiting.popleft()
            self._running.add(call)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="mint-await", daemon=True).start()
            self._loop.call_soon_threadsafe(self._start, self._loop, call)

    def _start(self, loop: asyncio.AbstractEventLoop, call: UserCall) -> None:
        if loop is self._loop:  # else another loop has taken the call over
            call.began = self._clock()
            call.started = True
            loop.create_task(self._run(call))

    async def _run(self, call: UserCall) -> None:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                RUNNING.set(RunningCall(call, limit, self._clock))
                value = await (call.function(*call.arguments) if call.awaitable is None else call.awaitable)
            result = CallResult(value, seconds=self._seconds(call))
        except BaseException as error:  # noqa: BLE001 - the boundary to the user's code: its errors are this call's result
            ours = isinstance(error, TimeoutError) and limit.expired()
            result = timed_out(self._timeout_s) if ours else CallResult(error=error, seconds=self._seconds(call))
        call.resolve(result)
        with self._lock:
            self._running.discard(call)
            self._start_waiting()

    def _seconds(self, call: UserCall) -> float:
        return 0.0 if call.began is None else self._clock() - call.began

    def _replace(self, blocked: asyncio.AbstractEventLoop) -> None:
        """Abandons a blocked loop: its calls that have begun time out, the others start in a new one."""
        with self._lock:
            if self._loop is not blocked:
                return
            self._loop = None
            begun = [call for call in self._running if call.started]
            self._waiting.extendleft(call for call in self._running if not call.started)
            self._running.clear()
            self._start_waiting()
        for call in begun:
            call.resolve(timed_out(self._timeout_s))
        blocked.call_soon_threadsafe(blocked.stop)


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop runs what is scheduled on it, soon."""
    probe: Any = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
    done, _ = await asyncio.wait({asyncio.wrap_future(probe)}, timeout=0.5)
    return bool(done)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSING_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
