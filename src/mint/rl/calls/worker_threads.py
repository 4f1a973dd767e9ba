"""A few threads that run plain functions. A thread that hangs in one is abandoned and replaced.

Threads are daemons, so a function that never returns cannot keep the process alive.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable

from mint.rl.calls.user_call import CallResult, UserCall


class WorkerThreads:
    """Runs calls in the order in which they were submitted, `count` at a time."""

    def __init__(self, count: int, *, clock: Callable[[], float], on_awaitable: Callable[[UserCall], None]) -> None:
        """`on_awaitable` gets a call whose function has returned an awaitable. `clock` gives seconds."""
        self._count = count
        self._clock = clock
        self._on_awaitable = on_awaitable
        self._queue: queue.SimpleQueue[UserCall | None] = queue.SimpleQueue()
        self._started = False
        self._lock = threading.Lock()

    def submit(self, call: UserCall) -> None:
        """Runs the call as soon as a thread is free."""
        self._queue.put(call)
        with self._lock:
            if self._started:
                return
            self._started = True
        for _ in range(self._count):
            self._start_thread()

    def abandon(self, call: UserCall) -> None:
        """Gives up a call that hangs. If it ends at this very moment, one thread too many is idle."""
        call.abandoned = True
        self._start_thread()

    def close(self) -> None:
        """Ends the idle threads; one that hangs in a call dies with the process."""
        for _ in range(self._count if self._started else 0):
            self._queue.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._serve, name="mint-calls", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            self._run(call)
            if call.abandoned:
                return  # `abandon` has started a replacement

    def _run(self, call: UserCall) -> None:
        began = call.began = self._clock()
        try:
            value = call.function(*call.arguments)
        except BaseException as error:  # noqa: BLE001 - the boundary to the user's code: its errors are this call's result
            call.resolve(CallResult(error=error, seconds=self._clock() - began))
            return
        if call.abandoned:
            if inspect.iscoroutine(value):
                value.close()
        elif inspect.isawaitable(value):
            call.awaitable = value
            call.began = None
            self._on_awaitable(call)
        else:
            call.resolve(CallResult(value, seconds=self._clock() - began))
