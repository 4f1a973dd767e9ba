"""Runs one coroutine in a thread and an event loop of its own, and waits for it.

It works where this thread runs an event loop already, as in a notebook.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_own_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of the coroutine. If this thread is interrupted while it waits, the coroutine is cancelled."""
    result: Future[T] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def main() -> T:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    def serve() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            result.set_exception(error)

    threading.Thread(target=serve, name="mint-coroutine", daemon=True).start()
    try:
        return result.result()
    except BaseException:
        if not result.done():
            loop, task = started.result()
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)
        raise
