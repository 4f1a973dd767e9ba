"""What goes next, as a table: who has had less goes first, each model in its own order, samples together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mint.server.queue.fairness import Fairness, FairQueue
from mint.server.queue.jobs import QueuedSample, TrainingJob
from mint.server.queue.scheduler import (
    MAX_OWNER_SEQUENCES,
    SLICE_S,
    GiveUp,
    Pending,
    Plan,
    RunTraining,
    SamplingLoad,
    StepSamples,
    Wait,
    plan,
)
from mint.types import ModelInput, SamplingParams
from mint.wire.requests import OptimStepRequest, SampleRequest


def train(model: str, seq_id: int, at: float, owner: str = "") -> TrainingJob:
    return TrainingJob(
        model, seq_id, "forward_backward", OptimStepRequest(model_id=model, seq_id=seq_id), at, owner=owner
    )


def sample(name: str, at: float, sequences: int = 1, owner: str = "") -> QueuedSample:
    prompt, params = ModelInput.from_ints([1]), SamplingParams()
    request = SampleRequest(
        sampling_session_id="s", seq_id=0, prompt=prompt, sampling_params=params, num_samples=sequences
    )
    return QueuedSample(name, request, at, owner)


def outline(chosen: Plan) -> object:
    """A plan with the names of its jobs instead of the jobs."""
    match chosen:
        case RunTraining(job):
            return job.model_id, job.seq_id
        case GiveUp(model_id, missing, waiting):
            return model_id, missing, tuple(job.seq_id for job in waiting)
        case other:
            return other


A, B = train("a", 1, 4.0), train("b", 1, 3.0)
BUSY = SamplingLoad({"": 3})
BEHIND = Fairness(training_lead_s=SLICE_S + 0.01)

CASES: dict[str, tuple[Pending, object]] = {
    "nothing waits": (Pending(), Wait(None)),
    "the only one": (Pending({"a": 1}, [train("a", 1, 0.0)]), ("a", 1)),
    "the number decides within a model": (
        Pending({"a": 1}, [train("a", 2, 0.0), train("a", 1, 1.0)]), ("a", 1),
    ),
    "the longest wait decides between models that have had as much": (
        Pending({"a": 1, "b": 4}, [train("a", 1, 2.0), train("b", 4, 1.0)]), ("b", 4),
    ),
    "a gap is waited for": (Pending({"a": 1}, [train("a", 2, 3.0)]), Wait(13.0)),
    "a gap of one model does not stop another": (
        Pending({"a": 1, "b": 1}, [train("a", 2, 0.0), train("b", 1, 3.0)]), ("b", 1),
    ),
    "samples that wait begin together": (
        Pending({}, [], [sample("x", 4.999), sample("y", 5.0)]), StepSamples(("x", "y")),
    ),
    "training goes before samples that have not waited their share": (
        Pending({"a": 1}, [A], [sample("x", 3.0)]), ("a", 1),
    ),
    "an owner's part of the batch has a limit": (
        Pending({}, [], [sample("x", 1.0, 1000), sample("y", 1.0, 24), sample("z", 1.0)]), StepSamples(("x", "y")),
    ),
    "one request is always taken": (
        Pending({}, [], [sample("x", 1.0, 2 * MAX_OWNER_SEQUENCES), sample("y", 1.0)]), StepSamples(("x",)),
    ),
    "no smaller request overtakes one that has no room": (
        Pending({}, [], [sample("x", 1.0, 600), sample("y", 2.0, 600), sample("z", 3.0)]), StepSamples(("x",)),
    ),
    "who comes behind another's flood joins with its first": (
        Pending({}, [], [*(sample(f"x{n}", 1.0, 600, "one") for n in range(9)), sample("y", 3.0, 500, "two")]),
        StepSamples(("x0", "y")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_runs_next_is_fair_to_models_owners_and_those_who_wait(name: str) -> None:
    pending, expected = CASES[name]
    result = plan(pending, 5.0, gap_timeout_s=10.0)
    if isinstance(expected, Wait) and expected.until is not None:
        assert isinstance(result, Wait) and result.until == pytest.approx(expected.until)
    else:
        assert outline(result) == expected


BESIDE: dict[str, tuple[Pending, SamplingLoad, Fairness, object]] = {
    "what runs goes on": (Pending(), BUSY, Fairness(), StepSamples()),
    "who comes late joins at once": (
        Pending({}, [], [sample("x", 5.0)]), BUSY, Fairness(), StepSamples(("x",)),
    ),
    "nobody joins those that run again alone": (
        Pending({}, [], [sample("x", 5.0)]), SamplingLoad({"": 1}, is_closed=True), Fairness(), StepSamples(),
    ),
    "training goes before a step of samples": (Pending({"a": 1}, [A]), BUSY, Fairness(), ("a", 1)),
    "until it is ahead by a slice": (Pending({"a": 1}, [A]), BUSY, BEHIND, StepSamples()),
    "samples that wait are stepped over no longer either": (
        Pending({"a": 1}, [A], [sample("x", 1.0)]), SamplingLoad(), BEHIND, StepSamples(("x",)),
    ),
    "training that is ahead goes on where nothing is sampled": (
        Pending({"a": 1}, [A]), SamplingLoad(), BEHIND, ("a", 1),
    ),
    "a full batch goes on while more of its owner wait": (
        Pending({}, [], [sample("x", 1.0)]), SamplingLoad({"": MAX_OWNER_SEQUENCES}), Fairness(), StepSamples(),
    ),
    "who was put back waits for the time": (
        Pending({}, [], [replace(sample("x", 1.0), not_before=7.0), sample("y", 2.0)]),
        BUSY, Fairness(), StepSamples(("y",)),
    ),
    "and joins then": (
        Pending({}, [], [replace(sample("x", 1.0), not_before=5.0)]), BUSY, Fairness(), StepSamples(("x",)),
    ),
    "where nothing else is to be done until the time, the worker waits": (
        Pending({}, [], [replace(sample("x", 1.0), not_before=7.0)]), SamplingLoad(), Fairness(), Wait(7.0),
    ),
    "or for a gap to end, if that is sooner": (
        Pending({"a": 1}, [train("a", 2, -4.0)], [replace(sample("x", 1.0), not_before=7.0)]),
        SamplingLoad(), Fairness(), Wait(6.0),
    ),
    "who has nothing in the batch joins at once, however full it is": (
        Pending({}, [], [sample("x", 1.0, 1, "one"), sample("y", 2.0, MAX_OWNER_SEQUENCES, "two")]),
        SamplingLoad({"one": MAX_OWNER_SEQUENCES}), Fairness(), StepSamples(("y",)),
    ),
    "the owner who has had less goes first": (
        Pending({"a": 1, "b": 1}, [train("a", 1, 4.0, "one"), train("b", 1, 1.0, "two")]),
        SamplingLoad(), Fairness(owners=FairQueue({"two": 1.0})), ("a", 1),
    ),
    "and among one owner's models the one that has had less": (
        Pending({"a": 1, "b": 1}, [A, B]),
        SamplingLoad(), Fairness(models={"": FairQueue({"b": 1.0})}), ("a", 1),
    ),
    "who has had nothing for long begins level with the others": (
        Pending({"a": 1, "b": 1}, [train("a", 1, 4.0, "one"), train("b", 1, 1.0, "two")]),
        SamplingLoad(), Fairness(owners=FairQueue({"two": 7.0}, virtual_time_s=7.0)), ("b", 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_beside_what_runs_the_plan_is(name: str) -> None:
    pending, running, fairness, expected = BESIDE[name]
    assert outline(plan(pending, 5.0, sampling=running, fairness=fairness, gap_timeout_s=10.0)) == expected


LANES: dict[str, tuple[Pending, SamplingLoad, object, object]] = {
    "both have work": (Pending({"a": 1}, [A], [sample("x", 1.0)]), BUSY, ("a", 1), StepSamples(("x",))),
    "samples alone": (Pending({}, [], [sample("x", 1.0)]), SamplingLoad(), Wait(None), StepSamples(("x",))),
    "samples that run": (Pending(), BUSY, Wait(None), StepSamples()),
    "training alone": (Pending({"a": 1}, [A]), SamplingLoad(), ("a", 1), Wait(None)),
    "samples do not wait for a gap": (
        Pending({"a": 1}, [train("a", 2, 3.0)], [sample("x", 1.0)]), SamplingLoad(), Wait(13.0), StepSamples(("x",)),
    ),
    "a gap is given up where training is": (
        Pending({"a": 1}, [train("a", 2, -9.0)]), BUSY, ("a", (1,), (2,)), StepSamples(),
    ),
    "who was put back holds up samples alone": (
        Pending({"a": 1}, [A], [replace(sample("x", 1.0), not_before=7.0)]), SamplingLoad(), ("a", 1), Wait(7.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LANES)
def test_each_of_two_lanes_plans_for_itself(name: str) -> None:
    pending, running, trains, samples = LANES[name]
    # training that is ahead holds up nobody here
    found = plan(pending, 5.0, lane="training", sampling=running, fairness=BEHIND, gap_timeout_s=10.0)
    assert outline(found) == trains
    found = plan(pending, 5.0, lane="sampling", sampling=running, fairness=BEHIND, gap_timeout_s=10.0)
    assert outline(found) == samples


@pytest.mark.parametrize("running", [SamplingLoad(), BUSY], ids=["nothing", "samples"])
def test_a_gap_is_given_up_in_the_end_whatever_else_is_done(running: SamplingLoad) -> None:
    waiting = Pending({"a": 2, "b": 1}, [train("a", 6, 4.0), train("a", 4, 0.0), train("b", 1, 0.0)])
    assert outline(plan(waiting, 10.0, sampling=running, gap_timeout_s=10.0)) == ("a", (2, 3, 5), (4, 6))


# --- over time ---------------------------------------------------------------------------------------------------


def simulate(pending: Pending, seconds: float, *, pass_s: float, step_s: float, rows: int) -> dict[str, float]:
    """Seconds that samples, and each model with requests without end, get of an engine that is always busy."""
    owner_of = {item.model_id: item.owner for item in pending.training}
    fairness, now, had = Fairness(), 0.0, {"samples": 0.0}
    while now < seconds:
        match plan(pending, now, sampling=SamplingLoad({"": rows} if rows else {}), fairness=fairness):
            case RunTraining(job):
                model_id = job.model_id
                fairness = fairness.after_training(owner_of[model_id], model_id, pass_s, beside_samples=rows > 0)
                had[model_id] = had.get(model_id, 0.0) + pass_s
                now += pass_s
            case StepSamples():
                fairness = fairness.after_sampling(step_s)
                had["samples"] += step_s
                now += step_s
            case other:
                raise AssertionError(other)
    return had


@pytest.mark.parametrize(("pass_s", "step_s"), [(0.2, 0.006), (0.005, 0.006), (20.0, 0.3)])
def test_training_and_samples_get_half_each_where_both_could_take_all(pass_s: float, step_s: float) -> None:
    pending = Pending({"a": 1}, [train("a", 1, 0.0)])
    had = simulate(pending, 100 * pass_s, pass_s=pass_s, step_s=step_s, rows=5)
    assert had["samples"] == pytest.approx(had["a"], rel=0.1, abs=2 * SLICE_S)


def test_owners_get_as_much_as_each_other_however_many_models_each_has() -> None:
    models = {"a": "one", "b": "one", "c": "one", "d": "two"}
    pending = Pending(dict.fromkeys(models, 1), [train(name, 1, 0.0, owner) for name, owner in models.items()])
    had = simulate(pending, 60.0, pass_s=0.1, step_s=0.01, rows=0)
    assert had["d"] == pytest.approx(30.0, abs=0.3)
    assert had["a"] == pytest.approx(10.0, abs=0.3) and had["b"] == pytest.approx(had["c"], abs=0.3)


def test_a_newcomer_waits_for_no_queue_and_is_owed_nothing() -> None:
    fairness = Fairness()
    for _ in range(50):
        fairness = fairness.after_training("busy", "a", 0.5, beside_samples=False)
    both = Pending({"a": 1, "b": 1}, [train("a", 1, 0.0, "busy"), train("b", 1, 9.0, "new")])
    order = []
    for _ in range(6):
        step = plan(both, 10.0, fairness=fairness)
        assert isinstance(step, RunTraining)
        order.append(step.job.model_id)
        fairness = fairness.after_training(
            {"a": "busy", "b": "new"}[step.job.model_id], step.job.model_id, 0.5, beside_samples=False
        )
    assert order[0] == "b" and sorted(order) == ["a", "a", "a", "b", "b", "b"]
    assert len(fairness.owners.used_s) <= 2 and len(fairness.models) <= 2


def test_time_that_nobody_else_wanted_is_not_held_against_training() -> None:
    fairness = Fairness().after_training("", "a", 50.0, beside_samples=False)
    assert fairness.training_lead_s == 0.0
    assert fairness.after_training("", "a", 2.0, beside_samples=True).after_sampling(0.5).training_lead_s == 1.5
    assert fairness.after_sampling(10.0).training_lead_s == 0.0
