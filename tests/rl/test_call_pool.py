"""A user's function may fail, hang or be async: it costs one answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mint.rl.calls.call_pool import CallPool


def test_answers_come_back_in_order_from_sync_and_async_functions() -> None:
    calls = CallPool(timeout_s=60)

    def make(i: int):
        async def later() -> float:
            await asyncio.sleep(0.001 * (10 - i))
            return float(i)

        return later if i % 2 else (lambda: float(i))

    assert [answer.value for answer in calls.run([make(i) for i in range(10)])] == [float(i) for i in range(10)]
    calls.close()


def test_a_failure_is_an_answer_that_says_why() -> None:
    calls = CallPool(timeout_s=60)
    bad, good = calls.run([lambda: 1 / 0, lambda: 7])
    assert "ZeroDivisionError" in (bad.failure or "")
    assert (good.value, good.failure, good.timed_out) == (7, None, False)
    calls.close()


def test_hanging_functions_time_out_and_the_pool_keeps_its_threads() -> None:
    calls = CallPool(timeout_s=0.2, threads=2)
    release = threading.Event()

    async def sleeps() -> float:
        await asyncio.Event().wait()
        return 1.0

    for _ in range(3):  # more hangs than threads
        hung, slept, good = calls.run([release.wait, sleeps, lambda: 1.0])
        assert hung.timed_out
        assert "0.2 s" in (hung.failure or "")
        assert slept.timed_out
        assert good.value == 1.0
    release.set()
    calls.close()


@pytest.mark.parametrize(
    ("error", "failure"),
    [(asyncio.CancelledError(), "CancelledError"), (TimeoutError("of my client"), "TimeoutError: of my client")],
)
def test_an_error_that_an_async_function_raises_itself_is_no_time_out_of_the_pool(
    error: BaseException, failure: str
) -> None:
    now = 0.0
    calls = CallPool(timeout_s=30, clock=lambda: now)

    async def fails() -> float:
        nonlocal now
        now += 0.25
        raise error

    (answer,) = calls.run([fails])
    calls.close()
    assert (answer.failure, answer.timed_out, answer.seconds) == (failure, False, 0.25)


def test_several_threads_share_a_pool() -> None:
    calls = CallPool(timeout_s=60)
    answers: dict[int, list[int]] = {}

    def use(number: int) -> None:
        answers[number] = [answer.value for answer in calls.run([lambda i=i: number * 100 + i for i in range(20)])]

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [number * 100 + i for i in range(20)] for number in range(4)}
    calls.close()
