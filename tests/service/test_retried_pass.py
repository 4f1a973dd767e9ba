"""After a refused forward_backward: the same data, sent again, heal the next step, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import STEP, Harness, datum, failure, open_service, pass_body

from mint.errors import InvalidRequestError, StepRefusedError

A, B, C = datum(1, 2, 3), datum(4, 5, 6), datum(7, 8, 9)

Reopen = Callable[[Harness], Harness]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(open_service(tmp_path / "one"))
    yield harness
    harness.service.stop()


def good(*data: dict[str, Any]) -> dict[str, Any]:
    return pass_body(*data)


def bad(*data: dict[str, Any]) -> dict[str, Any]:
    """The same data with the name of a loss that does not exist."""
    return pass_body(*data, loss="ppo2")


def send(harness: Harness, model_id: str, bodies: list[dict[str, Any]], first_seq: int = 1) -> int:
    """Sends passes one after another; the next number."""
    for number, body in enumerate(bodies, first_seq):
        if body["forward_backward_input"]["loss_fn"] == "ppo2":
            error = failure(lambda number=number, body=body: harness.run("forward_backward", model_id, number, body))
            assert isinstance(error, InvalidRequestError)
        else:
            harness.run("forward_backward", model_id, number, body)
    return first_seq + len(bodies)


def clean_digest(harness: Harness, *bodies: dict[str, Any]) -> str:
    """That of another model which has had these passes alone, and a step."""
    model_id = harness.create_model(99)
    number = send(harness, model_id, list(bodies))
    return harness.run("optim_step", model_id, number, STEP)["state_digest"]


HEALED = {
    "the pass alone": ([bad(A), good(A)], [good(A)]),
    "the repetition is refused, too": ([bad(A), bad(A), good(A)], [good(A)]),
    "a call of equal parts": ([bad(A), bad(A), good(A), good(A)], [good(A), good(A)]),
    "a call of three, of which the first was refused": (
        [bad(A), good(B), good(C), good(A), good(B), good(C)],
        [good(A), good(B), good(C)],
    ),
    "a call that was refused whole": ([bad(A), bad(B), good(A), good(B)], [good(A), good(B)]),
    "repeated in another order": ([bad(A), good(B), good(B), good(A)], [good(B), good(A)]),
    "further data behind the repetition": ([bad(A), good(A), good(B)], [good(A), good(B)]),
    "refused again within the repetition": (
        [bad(A), good(B), good(A), bad(B), good(A), good(B)],
        [good(A), good(B)],
    ),
}


@pytest.mark.parametrize("name", HEALED)
@pytest.mark.parametrize("restarts", [False, True])
def test_the_same_data_sent_again_heal_the_step(tmp_path: Path, harness: Harness, name: str, restarts: bool) -> None:
    bodies, counted = HEALED[name]
    expected = clean_digest(harness, *counted)
    model_id = harness.create_model()
    for cut in range(1, len(bodies)) if restarts else [len(bodies)]:
        if restarts:
            model_id = harness.create_model(cut)
        number = send(harness, model_id, bodies[:cut])
        if restarts:
            harness.service.stop()
            harness.service = open_service(tmp_path / "one")
        number = send(harness, model_id, bodies[cut:], number)
        assert harness.run("optim_step", model_id, number, STEP)["state_digest"] == expected
    if restarts:  # what a replay of all of it gives
        digest = harness.digest(model_id)
        harness.service.stop()
        harness.service = open_service(tmp_path / "one")
        harness.restore(model_id)
        assert harness.digest(model_id) == digest


REFUSED = {
    "no repetition": [bad(A)],
    "other data": [bad(A), good(B)],
    "some of the data": [bad(A, B), good(A)],
    "more than the data": [bad(A), good(A, B)],
    "one of two": [bad(A), bad(B), good(A)],
    "the rest of the call is missing": [bad(A), good(B), good(A)],
    "a pass before it, whose gradient was cleared": [good(B), bad(A), good(A)],
    "a number that no pass can have": [bad(datum(1, 2**70, 3)), good(A)],
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("restarts", [False, True])
def test_without_the_same_data_the_step_is_refused_once(
    tmp_path: Path, harness: Harness, name: str, restarts: bool
) -> None:
    model_id = harness.create_model()
    number = send(harness, model_id, REFUSED[name])
    if restarts:
        harness.service.stop()
        harness.service = open_service(tmp_path / "one")
    error = failure(lambda: harness.run("optim_step", model_id, number, STEP))
    assert isinstance(error, StepRefusedError) and "sent again" in str(error.remedy)
    number = send(harness, model_id, [good(C)], number + 1)
    assert harness.run("optim_step", model_id, number, STEP)["state_digest"] == clean_digest(harness, good(C))
