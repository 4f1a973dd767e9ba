"""The threads of requests are shared: what one owner asks for leaves some to the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from waiting import HANG_S, wait_until

from mint.server.http.app import OwnerThreads

MOST = 2


class Work:
    """Functions that hold their threads until they are let go."""

    def __init__(self) -> None:
        self.count = 0
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        assert self.go_on.wait(HANG_S)


def run(body: Callable[[OwnerThreads, Work], Coroutine[Any, Any, None]]) -> None:
    work = Work()
    with ThreadPoolExecutor(MOST + 1) as executor:
        try:
            asyncio.run(body(OwnerThreads(executor, MOST), work))
        finally:
            work.go_on.set()


def test_an_owner_whose_calls_take_long_holds_so_many_threads_and_others_go_on() -> None:
    async def body(threads: OwnerThreads, work: Work) -> None:
        slow = [asyncio.create_task(threads.run_for("alice")(work)) for _ in range(10)]
        for _ in range(20):
            assert await threads.run_for("bob")(max, 1, 2) == 2
        assert work.count == MOST
        work.go_on.set()
        await asyncio.gather(*slow)
        assert work.count == len(slow)

    run(body)


def test_a_call_whose_client_has_left_counts_until_its_thread_is_free() -> None:
    async def body(threads: OwnerThreads, work: Work) -> None:
        for _ in range(10):
            task = asyncio.create_task(threads.run_for("alice")(work))
            await asyncio.sleep(0)
            await asyncio.to_thread(wait_until, lambda: work.count in (1, MOST))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert work.count <= MOST
        assert await threads.run_for("bob")(max, 1, 2) == 2
        work.go_on.set()
        await threads.run_for("alice")(work)

    run(body)


def test_an_error_of_a_call_is_its_caller_s_and_frees_the_thread() -> None:
    async def body(threads: OwnerThreads, work: Work) -> None:
        for _ in range(3 * MOST):
            try:
                await threads.run_for("alice")(int, "x")
            except ValueError as error:
                assert "invalid literal" in str(error)
            else:
                raise AssertionError

    run(body)
