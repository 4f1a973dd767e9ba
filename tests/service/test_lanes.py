"""An engine with two lanes: training and sampling go on beside each other, and meet in published weights alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import GOOD_PASS, STEP, Harness, datum, make_sampler, open_service, pass_body, send_sample
from two_lanes import TwoLanes
from waiting import wait_until

from mint.engine.fake_engine import FakeEngine

WAIT_S = 60.0
SAMPLE: dict[str, Any] = {"prompt": [5, 6], "params": {"seed": 3, "max_tokens": 6}}


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[tuple[Harness, TwoLanes]]:
    engine = TwoLanes()
    service = open_service(tmp_path / "two", engine=engine)
    yield Harness(service), engine
    engine.passes.set()
    engine.arrivals.set()
    service.stop()


def _is_open(harness: Harness, request_id: str) -> bool:
    return request_id in harness.service.futures.open_of(harness.session_id)


def test_sampling_goes_on_during_a_pass(lanes: tuple[Harness, TwoLanes]) -> None:
    harness, engine = lanes
    model_id, sampler = harness.create_model(), make_sampler(harness)
    engine.passes.clear()
    running = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    assert engine.pass_began.wait(WAIT_S)
    for seq_id in range(5):
        assert harness.sample(sampler, seq_id, **SAMPLE)["sequences"]
    assert _is_open(harness, running)
    engine.passes.set()
    assert harness.wait(running)["loss_fn_outputs"]


def test_training_goes_on_while_a_job_waits_for_its_weights(lanes: tuple[Harness, TwoLanes]) -> None:
    harness, engine = lanes
    model_id, base = harness.create_model(), make_sampler(harness, 7)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    engine.arrivals.clear()
    body = {"sampling_session_seq_id": 0}
    sampler = harness.run("save_weights_for_sampler", model_id, 3, body)["sampling_session_id"]
    waiting = send_sample(harness, sampler, 0)
    harness.run("forward_backward", model_id, 4, GOOD_PASS)
    assert harness.run("optim_step", model_id, 5, STEP)["state_digest"]
    assert harness.sample(base, 0, **SAMPLE)["sequences"]  # other jobs of the batch go on, too
    assert _is_open(harness, waiting)
    engine.arrivals.set()
    assert harness.wait(waiting)["sequences"]


def test_a_version_is_that_of_its_publication_whatever_is_trained_meanwhile(
    lanes: tuple[Harness, TwoLanes], tmp_path: Path
) -> None:
    """The samples of an engine with one lane, which trains between none of them."""
    found = {}
    one = open_service(tmp_path / "one", engine=FakeEngine())
    for name, harness in (("one", Harness(one)), ("two", lanes[0])):
        model_id, samples, digests = harness.create_model(), [], []
        for step in range(6):
            first = 3 * step + 1
            harness.run("forward_backward", model_id, first, pass_body(datum(1, 2, 3 + step)))
            digests.append(harness.run("optim_step", model_id, first + 1, STEP)["state_digest"])
            body = {"sampling_session_seq_id": step}
            published = harness.run("save_weights_for_sampler", model_id, first + 2, body)
            samples.append(published["sampling_session_id"])
        # all versions, after the last step
        found[name] = (digests, [harness.sample(own, 0, **SAMPLE)["sequences"] for own in samples])
    one.stop()
    assert found["one"] == found["two"]


def test_a_session_that_ends_during_a_pass_takes_its_samples_with_it(lanes: tuple[Harness, TwoLanes]) -> None:
    harness, engine = lanes
    other = Harness(harness.service)
    model_id, sampler = harness.create_model(), make_sampler(other)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    engine.arrivals.clear()
    body = {"sampling_session_seq_id": 0}
    published = harness.run("save_weights_for_sampler", model_id, 3, body)["sampling_session_id"]
    send_sample(harness, published, 0)
    wait_until(lambda: harness.service.sampled_sequences == 1)
    engine.passes.clear()
    engine.pass_began.clear()
    harness.send("forward_backward", model_id, 4, GOOD_PASS)
    assert engine.pass_began.wait(WAIT_S)
    harness.service.sessions.finish(harness.caller, harness.session_id)
    wait_until(lambda: harness.service.sampled_sequences == 0)
    assert other.sample(sampler, 0, **SAMPLE)["sequences"]
    engine.passes.set()
    wait_until(lambda: not engine.has_model(model_id))


def test_a_service_with_two_lanes_stops_after_the_pass_that_runs_and_goes_on_later(tmp_path: Path) -> None:
    engine = TwoLanes()
    harness = Harness(open_service(tmp_path / "two", engine=engine))
    model_id, sampler = harness.create_model(), make_sampler(harness)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    harness.run("optim_step", model_id, 2, STEP)
    before = harness.sample(sampler, 0, **SAMPLE)
    harness.send("forward_backward", model_id, 3, GOOD_PASS)
    harness.service.stop()
    again = Harness(open_service(tmp_path / "two", engine=FakeEngine()), harness.session_id)
    assert again.sample(sampler, 0, **SAMPLE) == before
    assert again.wait(f"{model_id}:3")["loss_fn_outputs"]
    digest = again.run("optim_step", model_id, 4, STEP)["state_digest"]
    again.service.stop()

    one = Harness(open_service(tmp_path / "one", engine=FakeEngine()))
    model_id = one.create_model()
    for seq_id in (1, 3):
        one.run("forward_backward", model_id, seq_id, GOOD_PASS)
        expected = one.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"]
    one.service.stop()
    assert digest == expected


def test_a_request_whose_session_ends_while_it_runs_is_not_marked_as_running_for_ever(
    lanes: tuple[Harness, TwoLanes],
) -> None:
    harness, engine = lanes
    service = harness.service
    model_id = harness.create_model()
    engine.passes.clear()
    harness.send("forward_backward", model_id, 1, GOOD_PASS)
    assert engine.pass_began.wait(WAIT_S)
    (mark,) = (service.data_dir / "instances").glob(f"{service.instance.instance_id}*")
    assert mark.read_text().strip() != ""
    service.sessions.finish(harness.caller, harness.session_id)
    engine.passes.set()
    is_between_requests = threading.Event()
    service.call_soon(is_between_requests.set)
    assert is_between_requests.wait(WAIT_S)
    assert mark.read_text().strip() == ""
