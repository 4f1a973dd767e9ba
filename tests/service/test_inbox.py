"""An engine that has nothing to do waits a moment for the rest of a burst, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from mint.server.queue.queue import MOMENT_S, MOST_MOMENTS, Inbox
from mint.server.worker.samplers import SampleWork
from mint.server.worker.trainer import TrainingJob
from mint.types import ModelInput, SamplingParams
from mint.wire.requests import OptimStepRequest, SampleRequest


class Moments:
    """Stands in for the condition that the worker sleeps on: something happens whenever it does."""

    def __init__(self, *happens: Callable[[], None] | None) -> None:
        self._happens = list(happens)
        self._notified = False
        self.slept: list[float | None] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        self._notified = True

    def wait(self, timeout_s: float | None) -> bool:
        self.slept.append(timeout_s)
        self._notified = False
        happens = self._happens.pop(0)
        if happens is not None:
            happens()
        return self._notified


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def sampler_of(inbox: Inbox) -> Callable[[], None]:
    numbers = count()

    def add() -> None:
        name = f"s:sample:0:{next(numbers)}"
        request = SampleRequest(
            sampling_session_id="s:sample:0",
            seq_id=0,
            prompt=ModelInput.from_ints([1]),
            sampling_params=SamplingParams(),
        )
        inbox.add_sample(SampleWork(name, request, 0.0))

    return add


def sleep(inbox: Inbox, monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], None] | None) -> list[float | None]:
    moments = Moments(*happens)
    monkeypatch.setattr(inbox, "_changed", moments)
    inbox.wait(None)
    return moments.slept


def test_the_samples_of_a_burst_are_waited_for_until_no_more_come(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = sampler_of(inbox)
    assert sleep(inbox, monkeypatch, add, add, add, None) == [None, MOMENT_S, MOMENT_S, MOMENT_S]
    assert len(inbox.pending().samples) == 3


def test_a_stream_without_end_is_not_waited_for(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    add = sampler_of(inbox)
    assert sleep(inbox, monkeypatch, *[add] * 100) == [None, *[MOMENT_S] * MOST_MOMENTS]


def test_training_begins_at_once_and_ends_the_wait_for_samples(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    add = sampler_of(inbox)

    def train() -> None:
        request = OptimStepRequest(model_id="s:train:0", seq_id=1)
        inbox.add_training(TrainingJob("s:train:0", 1, "optim_step", request), next_seq=1)

    assert sleep(inbox, monkeypatch, add, train) == [None, MOMENT_S]
    assert sleep(inbox, monkeypatch) == []  # it has been woken already
