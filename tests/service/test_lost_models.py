"""An engine loses its models, as a cluster does whose processes die: nothing accepted fails, and no bit differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
)

from mint.engine.fake_engine import FakeEngine
from mint.engine.protocol import ModelsLostError
from mint.errors import RequestFailedError
from mint.server.worker import trainer

OPERATIONS = ("create_model", "forward", "forward_backward", "optim_step", "read_state", "write_state", "state_digest",
              "clear_gradient", "publish")  # fmt: skip


class Loses(FakeEngine):
    """An engine that loses its models in the calls from the `first` on, `count` in a row."""

    def __init__(self, first: int, count: int = 1) -> None:
        super().__init__()
        self.calls = 0
        for name in OPERATIONS:
            setattr(self, name, self._counted(getattr(self, name), first, count))

    def _counted(self, call: Callable[..., Any], first: int, count: int) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if first <= self.calls < first + count:
                self._models.clear()
                raise ModelsLostError("a process has died")
            return call(*arguments, **named)

        return counted


def test_models_may_be_lost_in_any_call_and_nothing_accepted_fails(tmp_path: Path) -> None:
    ops = script(4)
    clean = clean_results(tmp_path / "clean", ops)
    first, calls = 1, 1
    while first <= calls:
        engine = Loses(first)
        service = open_service(tmp_path / f"lost{first}", engine=engine)
        harness = Harness(service)
        model_id = harness.create_model()
        results: dict[int, bytes] = {}
        run_script(harness, model_id, ops, seed=None, on_result=results.__setitem__)
        assert (results, FakeEngine.state_digest(engine, model_id)) == clean, f"call {first}"
        service.stop()
        calls = engine.calls
        first += 1
    assert calls > 20


def test_another_model_that_was_lost_with_it_goes_on_too(tmp_path: Path) -> None:
    digests = []
    for name, engine in (("clean", fake_engine()), ("lost", Loses(8))):
        harness = Harness(open_service(tmp_path / name, engine=engine))
        models = [harness.create_model(number, seed=number) for number in range(2)]
        for seq_id in (1, 3):
            for model_id in models:
                harness.run("forward_backward", model_id, seq_id, GOOD_PASS)
                digests.append(harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"])
        harness.service.stop()
    assert digests[:4] == digests[4:]


def test_a_request_in_which_models_are_lost_each_time_fails_alone(tmp_path: Path) -> None:
    engine = Loses(1 << 60)
    harness = Harness(open_service(tmp_path, engine=engine))
    model_id, sampler = harness.create_model(), make_sampler(harness)
    plain, tries = engine.forward_backward, 0

    def kills(*_arguments: Any, **_named: Any) -> Any:
        nonlocal tries
        tries += 1
        engine._models.clear()
        raise ModelsLostError("this request ends the processes")

    engine.forward_backward = kills  # ty: ignore[invalid-assignment]
    error = failure(lambda: harness.run("forward_backward", model_id, 1, GOOD_PASS))
    assert isinstance(error, RequestFailedError) and "ends the processes" in str(error)
    assert tries == trainer.MAX_LOSSES
    engine.forward_backward = plain  # ty: ignore[invalid-assignment]
    assert harness.sample(sampler, 1)["sequences"]
    assert failure(lambda: harness.run("optim_step", model_id, 2, STEP))
    harness.run("forward_backward", model_id, 3, GOOD_PASS)
    assert harness.run("optim_step", model_id, 4, STEP)["state_digest"]
    harness.service.stop()
