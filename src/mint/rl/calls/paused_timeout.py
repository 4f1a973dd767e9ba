"""Stops the clock of an async call while it waits for its turn, so that its time-out counts its own work only.

A judge that serves all groups at once lets them in one after another. Without this, the last ones would time out before
they were looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from mint.rl.calls.user_call import UserCall


@dataclass(frozen=True)
class RunningCall:
    """The async call that this task runs, with its time-out and its clock."""

    call: UserCall
    limit: asyncio.Timeout
    clock: Callable[[], float]


RUNNING: ContextVar[RunningCall | None] = ContextVar("running_call", default=None)
"""Set by the event loop of the calls (`await_loop`); None anywhere else."""


@contextmanager
def paused_timeout() -> Generator[None]:
    """Within the block, the time-out of the running call is stopped. Does nothing outside of such a call."""
    running = RUNNING.get()
    deadline = None if running is None else running.limit.when()
    if running is None or deadline is None or running.call.began is None:
        yield
        return
    left_s = deadline - asyncio.get_running_loop().time()
    spent_s = running.clock() - running.call.began
    running.limit.reschedule(None)
    running.call.began = None
    try:
        yield
    finally:
        running.call.began = running.clock() - spent_s
        running.limit.reschedule(asyncio.get_running_loop().time() + left_s)
