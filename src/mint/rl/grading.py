"""Runs the user's reward function, sync or async, so that a failing or hanging one costs one sample and no more.

Knows nothing of policies or tokens. Threads are daemons: a reward function that never returns cannot keep the process
alive; its thread is given up and replaced.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

RewardFunction = Callable[[], "float | Awaitable[float]"]


@dataclass(frozen=True)
class Grade:
    """A reward, or None and the reason."""

    reward: float | None
    error: str | None = None


class Grader:
    """A few threads that grade; `grade` may be called again and again. Not for concurrent use by several callers."""

    def __init__(self, *, timeout_s: float, threads: int = 4) -> None:
        """`timeout_s` is counted per call, from the moment that it starts to run."""
        self._timeout_s = timeout_s
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            self._start_thread()

    def grade(self, calls: Sequence[RewardFunction]) -> list[Grade]:
        """One grade per call, in order."""
        pending = [_Call(function) for function in calls]
        for call in pending:
            self._inbox.put(call)
        return [self._collect(call) for call in pending]

    def close(self) -> None:
        """Ends the idle threads; one that hangs in a reward function dies with the process."""
        for _ in range(self._threads):
            self._inbox.put(None)

    def _collect(self, call: _Call) -> Grade:
        while True:
            try:
                return call.grade.result(timeout=call.remaining_s(self._timeout_s))
            except FutureTimeoutError:
                if call.remaining_s(self._timeout_s) > 0:
                    continue
                call.given_up = True
                self._start_thread()
                return Grade(None, f"no reward within {self._timeout_s:g} s")

    def _start_thread(self) -> None:
        threading.Thread(target=_serve, args=(self._inbox, self._timeout_s), name="mint-grader", daemon=True).start()


class _Call:
    """One reward to compute, and when it began."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self.started_s: float | None = None
        self.given_up = False
        self.grade: Future[Grade] = Future()

    def remaining_s(self, timeout_s: float) -> float:
        if self.started_s is None:
            return timeout_s
        return self.started_s + timeout_s - time.monotonic()


def _serve(inbox: queue.SimpleQueue[_Call | None], timeout_s: float) -> None:
    while (call := inbox.get()) is not None:
        call.started_s = time.monotonic()
        call.grade.set_result(_compute(call.function, timeout_s))
        if call.given_up:
            return  # `_collect` has started a replacement


def _compute(function: RewardFunction, timeout_s: float) -> Grade:
    try:
        reward = function()
        if inspect.isawaitable(reward):
            reward = asyncio.run(_within(reward, timeout_s))
    except TimeoutError:
        return Grade(None, f"no reward within {timeout_s:g} s")
    except Exception as error:  # noqa: BLE001 - the boundary to the user's code: whatever it raises is this sample's data
        return Grade(None, f"{type(error).__name__}: {error}")
    if not (isinstance(reward, int | float) and math.isfinite(reward)):
        return Grade(None, f"the reward {reward!r} is not a finite number")
    return Grade(float(reward))


async def _within(reward: Awaitable[float], timeout_s: float) -> float:
    return await asyncio.wait_for(reward, timeout_s)
