"""What goes next, as a table: the longest wait first, each model in its own order, samples together."""

from __future__ import annotations

import pytest

from mint.server.scheduler import (
    BURST_LIMIT_S,
    BURST_PAUSE_S,
    LONGEST_BURST_PAUSE_S,
    MAX_BATCH_SEQUENCES,
    GiveUp,
    Pending,
    Plan,
    RunSamples,
    RunTraining,
    SampleItem,
    TrainingItem,
    Wait,
    plan,
)


def train(model: str, seq_id: int, at: float) -> TrainingItem:
    return TrainingItem(model, seq_id, at)


def sample(name: str, at: float, sequences: int = 1) -> SampleItem:
    return SampleItem(name, sequences, at)


CASES: dict[str, tuple[Pending, float, Plan]] = {
    "nothing waits": (Pending(), 5.0, Wait(None)),
    "the only one": (Pending({"a": 1}, [train("a", 1, 0.0)]), 5.0, RunTraining("a", 1)),
    "the number decides within a model": (
        Pending({"a": 1}, [train("a", 2, 0.0), train("a", 1, 1.0)]), 5.0, RunTraining("a", 1),
    ),
    "the longest wait decides between models": (
        Pending({"a": 1, "b": 4}, [train("a", 1, 2.0), train("b", 4, 1.0)]), 5.0, RunTraining("b", 4),
    ),
    "a gap is waited for": (Pending({"a": 1}, [train("a", 2, 3.0)]), 5.0, Wait(13.0)),
    "a gap of one model does not stop another": (
        Pending({"a": 1, "b": 1}, [train("a", 2, 0.0), train("b", 1, 3.0)]), 5.0, RunTraining("b", 1),
    ),
    "a gap is given up in the end": (
        Pending({"a": 2}, [train("a", 6, 4.0), train("a", 4, 0.0)]), 10.0, GiveUp("a", (2, 3, 5), (4, 6)),
    ),
    "samples of a burst are waited for": (
        Pending({}, [], [sample("x", 4.999), sample("y", 4.9995)]), 5.0, Wait(4.9995 + BURST_PAUSE_S),
    ),
    "a burst ends with a pause": (
        Pending({}, [], [sample("x", 4.9), sample("y", 4.99)]), 5.0, RunSamples(("x", "y")),
    ),
    "an endless burst is cut": (
        Pending({}, [], [sample("x", 5.0 - BURST_LIMIT_S), sample("y", 5.0)]), 5.0, RunSamples(("x", "y")),
    ),
    "training goes on while a burst arrives": (
        Pending({"a": 1}, [train("a", 1, 5.0)], [sample("x", 4.9999)]), 5.0, RunTraining("a", 1),
    ),
    "samples that waited longer than training go first": (
        Pending({"a": 1}, [train("a", 1, 4.0)], [sample("x", 3.0)]), 5.0, RunSamples(("x",)),
    ),
    "training that waited longer than samples goes first": (
        Pending({"a": 1}, [train("a", 1, 2.0)], [sample("x", 3.0)]), 5.0, RunTraining("a", 1),
    ),
    "a batch has a limit": (
        Pending({}, [], [sample("x", 1.0, 1000), sample("y", 1.0, 24), sample("z", 1.0)]), 5.0, RunSamples(("x", "y")),
    ),
    "one request is always taken": (
        Pending({}, [], [sample("x", 1.0, 2 * MAX_BATCH_SEQUENCES), sample("y", 1.0)]), 5.0, RunSamples(("x",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is(name: str) -> None:
    pending, now, expected = CASES[name]
    result = plan(pending, now, gap_timeout_s=10.0)
    if isinstance(expected, Wait) and expected.until is not None:
        assert isinstance(result, Wait) and result.until == pytest.approx(expected.until)
    else:
        assert result == expected


@pytest.mark.parametrize(("batch_s", "pause_s"), [(0.0, BURST_PAUSE_S), (0.2, 0.004), (60.0, LONGEST_BURST_PAUSE_S)])
def test_the_longer_a_batch_takes_the_longer_its_stragglers_are_waited_for(batch_s: float, pause_s: float) -> None:
    burst = Pending({}, [], [sample("x", 4.999), sample("y", 4.9995)])
    assert plan(burst, 4.9996, batch_s=batch_s) == Wait(pytest.approx(4.9995 + pause_s))
    assert plan(burst, 4.9995 + pause_s + 1e-6, batch_s=batch_s) == RunSamples(("x", "y"))
