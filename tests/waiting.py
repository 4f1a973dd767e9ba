"""Waits for what a test has brought about, however slow the machine is. Its deadline only ends a test that hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

HANG_S = 120.0


def wait_until(reached: Callable[[], Any]) -> None:
    """Returns once `reached()` is true; fails where it never is."""
    give_up_at = time.monotonic() + HANG_S
    while not reached():
        assert time.monotonic() < give_up_at, "it never came"
        time.sleep(0.002)


def run_without_clock(wait: Coroutine[Any, Any, T]) -> T:
    """Runs on an event loop on which no time passes: whoever sleeps, polls or counts on a time-out hangs, and fails."""
    loop = asyncio.new_event_loop()
    now = loop.time()
    loop.time = lambda: now  # ty: ignore
    task = loop.create_task(wait)
    guard = threading.Timer(HANG_S, lambda: loop.call_soon_threadsafe(task.cancel))
    guard.start()
    try:
        return loop.run_until_complete(task)
    finally:
        guard.cancel()
        loop.close()
