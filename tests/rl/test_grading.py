"""The user's reward function may fail, hang or be async: it costs one sample."""

from __future__ import annotations

import asyncio
import math
import threading
import time

from mint.rl.grading import Grader


def test_rewards_come_back_in_order_from_sync_and_async_functions() -> None:
    grader = Grader(timeout_s=5)

    def make(i: int):
        async def later() -> float:
            await asyncio.sleep(0.001 * (10 - i))
            return float(i)

        return later if i % 2 else (lambda: float(i))

    assert [grade.reward for grade in grader.grade([make(i) for i in range(10)])] == [float(i) for i in range(10)]
    grader.close()


def test_a_failing_reward_costs_its_own_sample_and_says_why() -> None:
    grader = Grader(timeout_s=5)
    bad, nan, text, good = grader.grade([lambda: 1 / 0, lambda: math.nan, lambda: "1.0", lambda: True])
    assert (bad.reward, nan.reward, text.reward, good.reward) == (None, None, None, 1.0)
    assert "ZeroDivisionError" in (bad.error or "")
    assert "nan" in (nan.error or "")
    assert "'1.0'" in (text.error or "")
    grader.close()


def test_hanging_rewards_time_out_and_the_grader_keeps_its_threads() -> None:
    grader = Grader(timeout_s=0.2, threads=2)
    release = threading.Event()

    async def sleeps() -> float:
        await asyncio.sleep(60)
        return 1.0

    for _ in range(3):  # more hangs than threads
        began = time.monotonic()
        grades = grader.grade([release.wait, sleeps, lambda: 1.0])
        assert time.monotonic() - began < 3
        assert grades[0].reward is None
        assert "0.2 s" in (grades[0].error or "")
        assert grades[1].reward is None
        assert grades[2].reward == 1.0
    release.set()
    grader.close()
