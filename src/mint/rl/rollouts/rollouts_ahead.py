"""Collects batches in the background while earlier ones are trained on, at most `max_staleness` steps ahead.

A batch is begun only when the weights are new enough that they are at most `max_staleness` steps old when it is trained
on. So no batch is ever too old, and none is thrown away.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from mint.rl.config import RLConfig
from mint.rl.rollout import RolloutBatch
from mint.rl.rollouts.batch_collector import BatchCollector
from mint.rl.rollouts.swapping_sampler import PublishedPolicy, SwappingSampler


class RolloutsAhead:
    """The batches of the steps from `first` on, in order. When the context ends, what is in progress
    is awaited, and nothing more is begun.

    `at_most`: a batch is begun as soon as its predecessor has no request in flight, with the newest weights; so the
    sampler has work while others are graded. How old they are depends on time. `exactly`: a batch is sampled with the
    weights `max_staleness` steps before its own, one batch after the other; so a run repeats bit for bit.
    """

    def __init__(self, collector: BatchCollector, config: RLConfig, first: int) -> None:
        self._collector = collector
        self._config = config
        self._exactly = config.staleness == "exactly"
        self._published: dict[int, PublishedPolicy] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._idle = {step: threading.Event() for step in range(first - 1, config.steps + 1)}
        self._idle[first - 1].set()
        self._first = first
        self._batches: deque[Future[RolloutBatch]] = deque()
        # With one thread, batches are collected in order, and the items of a refill do not depend on time.
        threads = 1 if self._exactly else config.max_staleness + 1
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="mint-rollouts")

    def __enter__(self) -> Self:
        for step in range(self._first, self._config.steps + 1):
            self._batches.append(self._executor.submit(self._collect, step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._executor.shutdown(cancel_futures=True)

    def publish(self, policy: PublishedPolicy) -> None:
        """Makes newer weights known, from which batches that are begun later are sampled."""
        with self._changed:
            self._published[policy.step] = policy
            for old in [step for step in self._published if step < policy.step - self._config.max_staleness]:
                del self._published[old]
            self._changed.notify_all()

    def next(self) -> RolloutBatch:
        """The batch of the next step, when it is complete."""
        return self._batches.popleft().result()

    def _collect(self, step: int) -> RolloutBatch:
        oldest = max(self._first - 1, step - 1 - self._config.max_staleness)
        idle = self._idle[step]
        try:
            if not self._exactly:
                self._idle[step - 1].wait()
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or max(self._published, default=-1) >= oldest)
                if self._stopped:
                    raise RuntimeError("the run has ended")
                pinned = self._published[oldest]
            sampler = SwappingSampler(
                (lambda: pinned) if self._exactly else self._newest, self._config.swap_every, idle
            )
            return self._collector.collect(step, sampler, sampler.policy.optim_steps)
        finally:
            idle.set()

    def _newest(self) -> PublishedPolicy:
        with self._changed:
            return self._published[max(self._published)]
