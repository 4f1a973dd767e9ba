"""What unnamed samplers cost on the disk, and which of them stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_harness import GOOD_PASS, STEP, Harness, failure, open_service
from waiting import wait_until

from mint.engine.fake_engine import FakeEngine
from mint.errors import NotFoundError
from mint.models.tensor_files import read_tensors
from mint.server.disk_space import folder_bytes
from mint.server.limits import MAX_UNNAMED_SAMPLERS, ServerLimits
from mint.server.worker.samplers import ALWAYS_RETAINED, MIN_RETAINED, USED_WITHIN_S, over_budget, superseded

STATE_BYTES = 1 << 16


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rl_step(harness: Harness, model_id: str, number: int, *, sampler: int | None = None) -> str:
    """One pass, one step, one sampler; its id."""
    first = 3 * number + 1
    harness.run("forward_backward", model_id, first, GOOD_PASS)
    harness.run("optim_step", model_id, first + 1, STEP)
    body = {"sampling_session_seq_id": number if sampler is None else sampler}
    return harness.run("save_weights_for_sampler", model_id, first + 2, body)["sampling_session_id"]


def paths(folder: Path) -> list[Path]:
    """The files of weights and snapshots in a data directory."""
    return [path for name in ("published", "snapshots") for path in (folder / name).glob("*")]


def test_a_sampler_keeps_weights_only_and_pins_no_snapshot(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path, engine=FakeEngine(state_bytes=STATE_BYTES)))
    model_id = harness.create_model()
    samplers = [rl_step(harness, model_id, number) for number in range(12)]
    rows = harness.stored(lambda journal: [journal.sampler(name) for name in samplers])
    harness.service.stop()
    assert len(list((tmp_path / "snapshots").glob("*"))) == 3
    for row in rows:
        assert row is not None and row.file is not None
        tensors, _ = read_tensors(tmp_path / row.file)
        assert not [name for name in tensors if name.startswith(("exp_avg", "weights/"))]


@pytest.mark.parametrize("steps", [240, pytest.param(9999, marks=pytest.mark.slow)])
def test_a_long_run_keeps_as_many_files_at_its_end_as_at_its_beginning(tmp_path: Path, steps: int) -> None:
    harness = Harness(open_service(tmp_path, engine=FakeEngine(state_bytes=STATE_BYTES)))
    model_id = harness.create_model()
    seen = []
    for number in range(1, steps + 1):
        harness.sample(rl_step(harness, model_id, number - 1), 0)
        if number % (steps // 3) == 0:
            wait_until(lambda: len(paths(tmp_path)) <= MAX_UNNAMED_SAMPLERS + 3)
            seen.append((len(paths(tmp_path)), sum(path.stat().st_size for path in paths(tmp_path))))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == MAX_UNNAMED_SAMPLERS + 3
    harness.service.stop()


def test_of_unnamed_samplers_those_used_last_stay_and_others_while_they_are_used() -> None:
    used_at = {f"s{number}": float(number) for number in range(MIN_RETAINED + 4)}
    assert superseded(used_at, 20.0) == []
    late = USED_WITHIN_S + 2.5
    assert set(superseded(used_at, late)) == {"s0", "s1", "s2"}
    del used_at["s0"]
    assert set(superseded({**used_at, "s0": late}, late)) == {"s1", "s2"}
    many = {f"s{number}": float(number) for number in range(MAX_UNNAMED_SAMPLERS + 5)}
    assert set(superseded(many, 100.0)) == {f"s{number}" for number in range(5)}


def test_a_sampler_that_is_sampled_from_regularly_never_goes(tmp_path: Path) -> None:
    clock = Clock()
    service = open_service(tmp_path, clock=clock)
    harness = Harness(service)
    model_id = harness.create_model()
    reference = rl_step(harness, model_id, 0)
    known = harness.sample(reference, 0, params={"seed": 1})
    unused = rl_step(harness, model_id, 1)
    for number in range(2, 2 * MAX_UNNAMED_SAMPLERS):
        clock.now += 120.0
        rl_step(harness, model_id, number)
        if number % 8 == 0:
            assert harness.sample(reference, number, params={"seed": 1}) == known
    error = failure(lambda: harness.sample(unused, 0))
    assert isinstance(error, NotFoundError)
    assert "save_weights_for_sampler(name)" in str(error) and f"{MIN_RETAINED}" in str(error)
    service.stop()


def test_samplers_of_an_earlier_process_go_too(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    for number in range(40):
        rl_step(harness, model_id, number)
    harness.service.stop()
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock), harness.session_id)
    rl_step(harness, model_id, 40)
    # Sampled from only after the worker has looked at what the weights before supersede, by the clock.
    harness.sample(rl_step(harness, model_id, 41), 0)
    assert len(paths(tmp_path)) == 42 + 3
    clock.now += USED_WITHIN_S + 1
    rl_step(harness, model_id, 42)
    wait_until(lambda: len(paths(tmp_path)) == MIN_RETAINED + 3)
    harness.service.stop()


def test_the_weights_of_all_unnamed_samplers_fit_their_share_of_the_disk(tmp_path: Path) -> None:
    budget = 30 * STATE_BYTES
    limits = ServerLimits(published_bytes=budget)
    harness = Harness(open_service(tmp_path, engine=FakeEngine(state_bytes=3 * STATE_BYTES), limits=limits))
    models = [harness.create_model(number) for number in range(2)]
    samplers: dict[str, list[str]] = {model_id: [] for model_id in models}

    def published() -> int:
        return folder_bytes(tmp_path / "published")

    for number in range(16):
        samplers[models[0]].append(rl_step(harness, models[0], number))
        wait_until(lambda: published() <= budget)
    one = published() // len(list((tmp_path / "published").iterdir()))
    assert published() > budget - 2 * one  # no more goes than must
    for number in range(12):  # the model that holds most makes room for the other
        samplers[models[1]].append(rl_step(harness, models[1], number, sampler=100 + number))
        wait_until(lambda: published() <= budget)
    for model_id in models:
        for name in samplers[model_id][-ALWAYS_RETAINED:]:
            assert harness.sample(name, 0)
        assert isinstance(failure(lambda model_id=model_id: harness.sample(samplers[model_id][0], 0)), NotFoundError)
    harness.service.stop()


def test_what_the_engine_samples_from_stays_however_small_the_share(tmp_path: Path) -> None:
    limits = ServerLimits(published_bytes=0)
    harness = Harness(open_service(tmp_path, engine=FakeEngine(state_bytes=STATE_BYTES), limits=limits))
    model_id = harness.create_model()
    names = [rl_step(harness, model_id, number) for number in range(8)]
    wait_until(lambda: len(list((tmp_path / "published").iterdir())) == ALWAYS_RETAINED)
    for name in names[-ALWAYS_RETAINED:]:
        assert harness.sample(name, 0)
    harness.service.stop()


def test_the_model_that_holds_most_gives_its_oldest_and_each_keeps_some() -> None:
    held = {"a": {f"a{number}": 10 for number in range(6)}, "b": {f"b{number}": 5 for number in range(6)}}
    assert over_budget(held, 90) == []
    assert over_budget(held, 75) == ["a0", "a1"]
    assert set(over_budget(held, 0)) == {"a0", "a1", "a2", "b0", "b1", "b2"}
