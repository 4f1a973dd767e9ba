"""Every accepted request is applied once, in its place, whatever the order, the copies and the errors around it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from service_harness import (
    GOOD_PASS,
    STEP,
    Harness,
    clean_results,
    datum,
    failure,
    open_service,
    pass_body,
    run_script,
    script,
)
from waiting import wait_until

from mint.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RequestFailedError,
    SessionEndedError,
    StepRefusedError,
)
from mint.server.callers import LOCAL
from mint.server.service.training_requests import MAX_AHEAD
from mint.server.store.journal import Journal


@pytest.mark.parametrize("seed", range(6))
def test_shuffled_and_doubled_submits_end_in_the_clean_runs_state(tmp_path: Path, seed: int) -> None:
    ops = script(14)
    clean, digest = clean_results(tmp_path / "clean", ops)
    service = open_service(tmp_path / "shuffled")
    harness = Harness(service)
    model_id = harness.create_model()
    results: dict[int, bytes] = {}
    run_script(harness, model_id, ops, seed=seed, on_result=results.__setitem__)
    assert results == clean
    assert harness.digest(model_id) == digest
    service.stop()


def test_a_copy_of_a_request_gets_the_same_promise_and_the_same_bytes(harness: Harness) -> None:
    model_id = harness.create_model()
    first = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    body = harness.answer(first)
    again = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    assert again == first
    assert [harness.answer(again) for _ in range(5)] == [body] * 5


def test_another_body_at_a_taken_place_is_refused_and_changes_nothing(harness: Harness) -> None:
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    digest = harness.run("optim_step", model_id, 2, STEP)["state_digest"]
    other = pass_body(datum(4, 3, 2, 1))
    error = failure(lambda: harness.send("forward_backward", model_id, 1, other))
    assert isinstance(error, ConflictError)
    assert error.field == "seq_id" and error.remedy
    assert harness.digest(model_id) == digest
    harness.run("forward_backward", model_id, 3, GOOD_PASS)


def test_requests_wait_for_the_one_before_them(harness: Harness) -> None:
    model_id = harness.create_model()
    step = harness.send("optim_step", model_id, 2, STEP)
    for _ in range(2):  # the worker looks at the queue between two calls
        looked = threading.Event()
        harness.service.call_soon(looked.set)
        assert looked.wait(60)
    position = harness.service.results.queue_position(LOCAL, step)
    assert position.status == "held" and harness.service.futures.open_count == 1
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    assert harness.wait(step)["metrics"]["step"] == 1.0


def test_what_never_arrives_is_given_up_with_all_that_waited_behind_it(tmp_path: Path) -> None:
    service = open_service(tmp_path, gap_timeout_s=0.1)
    harness = Harness(service)
    model_id = harness.create_model()
    before = harness.digest(model_id)
    waiting = [harness.send("forward_backward", model_id, 2, GOOD_PASS), harness.send("optim_step", model_id, 4, STEP)]
    for request_id in waiting:
        error = failure(lambda request_id=request_id: harness.wait(request_id))
        assert isinstance(error, RequestFailedError)
        assert "never arrived" in str(error)
    late = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    assert "never arrived" in str(failure(lambda: harness.wait(late)))
    assert harness.digest(model_id) == before
    harness.run("forward_backward", model_id, 5, GOOD_PASS)
    assert harness.run("optim_step", model_id, 6, STEP)["metrics"]["step"] == 1.0
    service.stop()


def test_what_arrives_just_before_it_is_given_up_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = open_service(tmp_path, gap_timeout_s=0.1)
    harness = Harness(service)
    model_id = harness.create_model()
    late: list[str] = []
    give_up = Journal.give_up

    def arrive_first(self: Journal, *args: Any) -> bool:
        if not late:
            late.append(harness.send("forward_backward", model_id, 1, GOOD_PASS))
        return give_up(self, *args)

    monkeypatch.setattr(Journal, "give_up", arrive_first)
    step = harness.send("optim_step", model_id, 2, STEP)
    assert harness.wait(step)["metrics"]["step"] == 1.0
    assert "loss_fn_outputs" in harness.wait(late[0])
    service.stop()


@pytest.mark.parametrize("bad", [pass_body(datum(1, 2, -3)), pass_body(datum(1, 13, 3)), pass_body(), {"wrong": 1}])
def test_a_step_after_a_failed_pass_is_refused_and_the_next_one_works(harness: Harness, bad: dict[str, object]) -> None:
    model_id = harness.create_model()
    before = harness.digest(model_id)
    requests = [
        harness.send("forward_backward", model_id, 1, GOOD_PASS),
        harness.send("forward_backward", model_id, 2, bad),
        harness.send("forward_backward", model_id, 3, GOOD_PASS),
        harness.send("optim_step", model_id, 4, STEP),
    ]
    harness.wait(requests[0])
    failure(lambda: harness.wait(requests[1]))
    harness.wait(requests[2])  # runs, but its gradient is part of what is refused
    assert isinstance(failure(lambda: harness.wait(requests[3])), StepRefusedError)
    assert harness.digest(model_id) == before
    harness.run("forward_backward", model_id, 5, GOOD_PASS)
    after = harness.run("optim_step", model_id, 6, STEP)
    assert after["metrics"]["step"] == 1.0

    other = harness.create_model(1)
    harness.run("forward_backward", other, 1, GOOD_PASS)
    assert harness.run("optim_step", other, 2, STEP)["state_digest"] == after["state_digest"]


def test_a_refused_learning_rate_leaves_the_gradient_for_the_next_step(harness: Harness) -> None:
    model_id, other = harness.create_model(), harness.create_model(1)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    error = failure(lambda: harness.run("optim_step", model_id, 2, {"adam_params": {"learning_rate": float("nan")}}))
    assert isinstance(error, InvalidRequestError) and error.field == "learning_rate"
    harness.run("forward_backward", other, 1, GOOD_PASS)
    digests = {
        harness.run("optim_step", name, seq_id, STEP)["state_digest"] for name, seq_id in [(model_id, 3), (other, 2)]
    }
    assert len(digests) == 1


def test_an_unreadable_place_is_refused_at_the_door(harness: Harness) -> None:
    model_id = harness.create_model()
    for seq_id in (0, -1, 2**31, 1.5, "1", None, True):
        error = failure(lambda seq_id=seq_id: harness.submit("optim_step", {"model_id": model_id, "seq_id": seq_id}))
        assert isinstance(error, InvalidRequestError), seq_id
        assert error.field is not None and "seq_id" in error.field
    for body in (b"", b"[]", b"{", b"\xff"):
        with pytest.raises(InvalidRequestError):
            harness.service.training.submit(LOCAL, "optim_step", body)


def test_a_place_that_no_client_can_have_reached_is_refused_instead_of_waited_for(harness: Harness) -> None:
    model_id = harness.create_model()
    error = failure(lambda: harness.send("optim_step", model_id, 2**31 - 1, STEP))
    assert isinstance(error, InvalidRequestError) and "which is 1" in str(error)
    harness.send("optim_step", model_id, 1 + MAX_AHEAD, STEP)


def test_an_unknown_model_is_not_found(harness: Harness) -> None:
    with pytest.raises(NotFoundError, match="model_id"):
        harness.send("optim_step", f"{harness.session_id}:train:9", 1, STEP)


def test_a_future_asked_for_after_its_session_has_ended_says_so(harness: Harness) -> None:
    model_id = harness.create_model()
    done = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    harness.wait(done)
    waiting = harness.send("optim_step", model_id, 3, STEP)
    harness.service.sessions.finish(LOCAL, harness.session_id)
    for call in (
        lambda: harness.wait(done),
        lambda: harness.wait(waiting),
        lambda: harness.send("optim_step", model_id, 4, STEP),
        lambda: harness.create_model(1),
    ):
        error = failure(call)
        assert isinstance(error, SessionEndedError)
        assert error.field == "session_id" and error.remedy


def test_the_end_of_a_session_leaves_named_checkpoints_only(harness: Harness) -> None:
    model_id = harness.create_model()
    harness.run("save_weights_for_sampler", model_id, 1, {"sampling_session_seq_id": 0})
    harness.run("forward_backward", model_id, 2, GOOD_PASS)
    harness.run("optim_step", model_id, 3, STEP)
    path = harness.run("save_weights", model_id, 4, {"path": "kept"})["path"]
    harness.run("save_weights_for_sampler", model_id, 5, {"sampling_session_seq_id": 1})
    data_dir = harness.service.data_dir
    assert list((data_dir / "snapshots").iterdir()) and list((data_dir / "published").iterdir())
    harness.service.sessions.finish(LOCAL, harness.session_id)
    wait_until(lambda: not any((*(data_dir / "snapshots").iterdir(), *(data_dir / "published").iterdir())))
    again = Harness(harness.service)
    body = {"session_id": again.session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    assert again.wait(again.submit("load_weights", body))["model_id"] == f"{again.session_id}:train:0"
