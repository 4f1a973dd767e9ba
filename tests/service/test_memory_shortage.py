"""A lack of memory outside of a pass delays what was accepted, and fails none of it: all results keep their bits."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine
from service_harness import (
    GOOD_PASS,
    STEP,
    Harness,
    clean_results,
    failure,
    make_sampler,
    open_service,
    run_script,
    script,
    send_sample,
)
from waiting import wait_until

from mint.engine.fake_engine import FakeEngine
from mint.errors import RequestFailedError
from mint.server.worker import sampling_batch, trainer, worker

OPERATIONS = (
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "read_state",
    "write_state",
    "state_digest",
    "publish",
    "load_weights",
    "open_batch",
)
ERRORS: tuple[Callable[[], Exception], ...] = (
    MemoryError,
    lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
)
ERROR_NAMES = ("MemoryError", "ENOMEM", "torch")


class ShortOfMemory(FakeEngine):
    """An engine in which the calls from the `first` on, `count` in a row, find no memory."""

    def __init__(self, first: int, count: int, error: Callable[[], Exception] = MemoryError) -> None:
        super().__init__()
        self.calls = 0
        for name in OPERATIONS:
            setattr(self, name, self._counted(getattr(self, name), first, count, error))

    def _counted(
        self, call: Callable[..., Any], first: int, count: int, error: Callable[[], Exception]
    ) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if first <= self.calls < first + count:
                raise error()
            return call(*arguments, **named)

        return counted


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MEMORY_RETRY_S", 0.01)
    monkeypatch.setattr(worker, "JOURNAL_RETRY_S", 0.01)


@pytest.mark.parametrize(
    ("error", "count", "stride"), [(ERRORS[0], 1, 1), (ERRORS[1], 3, 7), (ERRORS[2], 2, 7)], ids=ERROR_NAMES
)
def test_any_call_of_the_engine_may_lack_memory_and_nothing_accepted_fails(
    tmp_path: Path, error: Callable[[], Exception], count: int, stride: int
) -> None:
    ops = script(4)
    clean = clean_results(tmp_path / "clean", ops)
    first, calls = 1, 1
    while first <= calls:
        engine = ShortOfMemory(first, count, error)
        service = open_service(tmp_path / f"short{first}", engine=engine)
        harness = Harness(service)
        model_id = harness.create_model()
        results: dict[int, bytes] = {}
        run_script(harness, model_id, ops, seed=None, on_result=results.__setitem__)
        assert (results, FakeEngine.state_digest(engine, model_id)) == clean, f"call {first}"
        service.stop()
        calls = engine.calls
        first += stride
    assert calls > 20


@pytest.mark.parametrize("first", range(1, 5))
def test_a_sample_waits_for_memory_and_is_drawn_as_without_the_wait(tmp_path: Path, first: int) -> None:
    drawn = []
    for name, engine in (("clean", fake_engine()), ("short", ShortOfMemory(first, 2))):
        service = open_service(tmp_path / name, engine=engine)
        harness = Harness(service)
        sampler = make_sampler(harness)
        drawn.append([harness.sample(sampler, seq_id, params={"seed": 3})["sequences"] for seq_id in range(3)])
        service.stop()
    assert drawn[0] == drawn[1]


def test_a_request_for_which_memory_never_suffices_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "MEMORY_PATIENCE_S", 0.1)
    monkeypatch.setattr(sampling_batch, "MEMORY_PATIENCE_S", 0.1)
    engine = ShortOfMemory(1 << 60, 0)
    harness = Harness(open_service(tmp_path, engine=engine))
    model_id, sampler = harness.create_model(), make_sampler(harness)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    real_step, real_batch = engine.optim_step, engine.open_batch

    def no_memory(*_arguments: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as shortage:
        shortage.setattr(engine, "optim_step", no_memory)
        shortage.setattr(engine, "open_batch", no_memory)
        for call in (
            lambda: harness.run("optim_step", model_id, 2, STEP),
            lambda: harness.sample(sampler, 0),
        ):
            error = failure(call)
            assert isinstance(error, RequestFailedError) and "MemoryError" in str(error)
    assert (engine.optim_step, engine.open_batch) == (real_step, real_batch)
    harness.run("forward_backward", model_id, 3, GOOD_PASS)
    assert harness.run("optim_step", model_id, 4, STEP)["state_digest"]
    assert harness.sample(sampler, 1)["sequences"]
    harness.service.stop()


def test_nothing_is_remembered_of_requests_that_waited_for_memory_when_their_session_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ShortOfMemory(1 << 60, 0)
    harness = Harness(open_service(tmp_path, engine=engine))
    model_id, sampler = harness.create_model(), make_sampler(harness)

    def no_memory(*_arguments: Any) -> Any:
        raise MemoryError

    def waiting() -> tuple[int, int]:
        service = harness.service
        return len(service._trainer._short_since), len(service._worker._batch._short_since)

    with monkeypatch.context() as shortage:
        shortage.setattr(engine, "optim_step", no_memory)
        shortage.setattr(engine, "open_batch", no_memory)
        send_sample(harness, sampler, 0)
        wait_until(lambda: waiting() == (0, 1))
        harness.send("optim_step", model_id, 1, STEP)
        wait_until(lambda: waiting() == (1, 1))
        harness.service.sessions.finish(harness.caller, harness.session_id)
        wait_until(lambda: waiting() == (0, 0))
    harness.service.stop()
