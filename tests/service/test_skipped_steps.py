"""Steps that would not be finite are skipped and change nothing; from the third in a row on they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from default_engine import torch_engine
from service_harness import Harness, datum, failure, open_service, pass_body

from mint.errors import StepRefusedError
from mint.server.worker import snapshots

STEP: dict[str, Any] = {"adam_params": {"learning_rate": 0.003}}
GOOD = pass_body(datum(1, 20, 30, 40))
ADVANTAGES = [1.0, 1.0]
OVERFLOW = pass_body(  # the ratio to the sampler's probability of the second datum is beyond float32
    datum(1, 20, 30, logprobs=[-1.0, -1.0], advantages=ADVANTAGES),
    datum(7, 8, 9, logprobs=[-1.0, -200.0], advantages=ADVANTAGES),
    loss="importance_sampling",
)


def started(folder: Path, session_id: str | None = None) -> Harness:
    return Harness(open_service(folder, engine=torch_engine(dtype="float32", threads=1)), session_id)


def step(harness: Harness, model_id: str, seq_id: int, body: dict[str, Any]) -> dict[str, Any]:
    harness.run("forward_backward", model_id, seq_id, body)
    return harness.run("optim_step", model_id, seq_id + 1, STEP)


@pytest.mark.parametrize("small_state_bytes", [snapshots.SMALL_STATE_BYTES, 0], ids=["snapshot", "replay"])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_third_skipped_step_in_a_row_fails_and_names_the_datum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_state_bytes: int, restarts: bool
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", small_state_bytes)

    def again(harness: Harness) -> Harness:
        if not restarts:
            return harness
        harness.service.stop()
        return started(tmp_path, harness.session_id)

    harness = started(tmp_path)
    model_id = harness.create_model()
    before = step(harness, model_id, 1, GOOD)["state_digest"]
    for seq_id in (3, 5):
        skipped = step(harness, model_id, seq_id, OVERFLOW)
        assert skipped["metrics"]["skipped_nonfinite"] == 1 and skipped["state_digest"] == before
        harness = again(harness)
    for seq_id in (7, 9):  # and so does the next
        error = failure(lambda: step(harness, model_id, seq_id, OVERFLOW))  # noqa: B023
        assert isinstance(error, StepRefusedError)
        assert str(error).startswith(f"skipped_nonfinite = {3 if seq_id == 7 else 4}: ")
        assert f"data[1] of request {seq_id}" in str(error) and "grad_norm" in str(error)
        harness = again(harness)
    assert step(harness, model_id, 11, GOOD)["metrics"]["step"] == 2.0  # nothing of the gradients is left
    harness = again(harness)
    assert step(harness, model_id, 13, OVERFLOW)["metrics"]["skipped_nonfinite"] == 1  # counted from the start
    last = harness.digest(model_id)
    harness.service.stop()

    other = started(tmp_path / "other")
    name = other.create_model()
    for seq_id in (1, 3):
        step(other, name, seq_id, GOOD)
    assert other.digest(name) == last
    other.service.stop()


@pytest.mark.parametrize("small_state_bytes", [snapshots.SMALL_STATE_BYTES, 0], ids=["snapshot", "replay"])
@pytest.mark.parametrize("restarts", [False, True])
def test_skipped_steps_before_a_load_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_state_bytes: int, restarts: bool
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", small_state_bytes)
    harness = started(tmp_path)
    model_id = harness.create_model()
    path = harness.run("save_weights", model_id, 1, {"path": "kept"})["path"]
    before = step(harness, model_id, 2, GOOD)["state_digest"]
    for seq_id in (4, 6):
        assert step(harness, model_id, seq_id, OVERFLOW)["state_digest"] == before
    harness.run("forward_backward", model_id, 8, OVERFLOW)
    harness.run("load_weights", model_id, 9, {"path": path, "optimizer": True})
    loaded = harness.digest(model_id)
    for seq_id in (10, 12):
        if restarts:
            harness.service.stop()
            harness = started(tmp_path, harness.session_id)
        assert step(harness, model_id, seq_id, OVERFLOW)["state_digest"] == loaded != before
    error = failure(lambda: step(harness, model_id, 14, OVERFLOW))
    assert str(error).startswith("skipped_nonfinite = 3: ") and "data[1] of request 14" in str(error)
    harness.service.stop()


def test_an_update_that_is_not_finite_says_that_the_losses_were(tmp_path: Path) -> None:
    harness = started(tmp_path)
    model_id = harness.create_model()
    before = step(harness, model_id, 1, GOOD)["state_digest"]
    huge = {"adam_params": {"learning_rate": 1e39}}
    for seq_id in (3, 5):
        harness.run("forward_backward", model_id, seq_id, GOOD)
        harness.run("optim_step", model_id, seq_id + 1, huge)
    harness.run("forward_backward", model_id, 7, GOOD)
    error = failure(lambda: harness.run("optim_step", model_id, 8, huge))
    assert isinstance(error, StepRefusedError) and "all losses were finite" in str(error)
    assert harness.digest(model_id) == before
    harness.service.stop()
