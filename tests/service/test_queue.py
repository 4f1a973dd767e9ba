"""An idle engine waits a moment for the rest of a burst of samples, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from mint.server.queue.jobs import QueuedSample, TrainingJob
from mint.server.queue.queue import BURST_PAUSE_S, MAX_BURST_PAUSES, RequestQueue
from mint.types import ModelInput, SamplingParams
from mint.wire.requests import OptimStepRequest, SampleRequest


class ScriptedCondition(threading.Condition):
    """The condition that the worker sleeps on: whenever it does, the next thing of a script happens."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self.script: list[Callable[[], None] | None] = []
        self.slept: list[float | None] = []
        self._notified = False

    def notify_all(self) -> None:
        self._notified = True

    def wait(self, timeout: float | None = None) -> bool:
        self.slept.append(timeout)
        self._notified = False
        happens = self.script.pop(0)
        if happens is not None:
            happens()
        return self._notified


def add_sample(queue: RequestQueue, numbers: count[int]) -> None:
    name = f"s:sample:0:{next(numbers)}"
    request = SampleRequest(
        sampling_session_id="s:sample:0", seq_id=0, prompt=ModelInput.from_ints([1]), sampling_params=SamplingParams()
    )
    queue.add_sample(QueuedSample(name, request, 0.0))


def sleeping_queue() -> tuple[RequestQueue, ScriptedCondition, Callable[[], None]]:
    condition, numbers = ScriptedCondition(), count()
    queue = RequestQueue(condition=condition)
    return queue, condition, lambda: add_sample(queue, numbers)


def test_the_worker_waits_until_a_burst_of_samples_is_over() -> None:
    queue, condition, add = sleeping_queue()
    condition.script = [add, add, add, None]
    queue.wait(None)
    assert condition.slept == [None, BURST_PAUSE_S, BURST_PAUSE_S, BURST_PAUSE_S]
    assert len(queue.pending().samples) == 3


def test_the_worker_does_not_wait_for_the_end_of_an_endless_stream() -> None:
    queue, condition, add = sleeping_queue()
    condition.script = [add] * 100
    queue.wait(None)
    assert condition.slept == [None, *[BURST_PAUSE_S] * MAX_BURST_PAUSES]


def test_training_begins_at_once_and_ends_the_wait_for_samples() -> None:
    queue, condition, add = sleeping_queue()

    def train() -> None:
        request = OptimStepRequest(model_id="s:train:0", seq_id=1)
        queue.add_training(TrainingJob("s:train:0", 1, "optim_step", request), next_seq=1)

    condition.script = [add, train]
    queue.wait(None)
    assert condition.slept == [None, BURST_PAUSE_S]
    queue.wait(None)  # it has been woken already
    assert condition.slept == [None, BURST_PAUSE_S]


def test_news_reach_every_lane() -> None:
    queue, condition, add = sleeping_queue()
    add()
    queue.wait(None, lane="training")
    assert condition.slept == []  # and no pause for a burst of samples
    condition.script = [None]
    queue.wait(None, lane="sampling")
    assert condition.slept == [BURST_PAUSE_S]
    condition.script = [queue.wake]
    queue.wait(None, lane="training")  # its news are known
    assert condition.slept == [BURST_PAUSE_S, None]
