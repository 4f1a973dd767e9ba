"""What a waiting client is told, and when it gets its result."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from service_harness import GOOD_PASS, STEP, Harness, make_sampler, send_sample
from waiting import HANG_S, run_without_clock, wait_until

from mint.errors import OverloadedError
from mint.server.callers import LOCAL
from mint.server.ids import RequestId
from mint.server.queue.eta import SAMPLE, Eta
from mint.server.queue.futures import FutureResult, Futures
from mint.server.queue.jobs import QueuedSample, TrainingJob
from mint.server.queue.queue import QueueLimits, RequestQueue
from mint.server.queue.queue_position import QueueIndex, QueuePosition
from mint.server.queue.scheduler import Pending
from mint.types import ModelInput, SamplingParams
from mint.wire.requests import OptimStepRequest, SampleRequest


def eta(**seconds: float) -> Eta:
    """One that has seen work of these kinds take so long."""
    now = [0.0]
    known = Eta(clock=lambda: now[0])
    for kind, taken_s in seconds.items():
        now[0] = 0.0
        known.start([kind], kind)
        now[0] = taken_s
        known.end([kind])
    return known


def waiting_job(model_id: str, seq_id: int, arrived_at: float, kind: str) -> TrainingJob:
    return TrainingJob(model_id, seq_id, kind, OptimStepRequest(model_id=model_id, seq_id=1), arrived_at)


def waiting_sample(name: str, arrived_at: float) -> QueuedSample:
    prompt, params = ModelInput.from_ints([1]), SamplingParams()
    request = SampleRequest(sampling_session_id="s", seq_id=0, prompt=prompt, sampling_params=params, num_samples=4)
    return QueuedSample(name, request, arrived_at)


def position_of(name: RequestId, pending: Pending, seen: Eta, now: float, *, at_limit: bool = False) -> QueuePosition:
    return QueueIndex(pending, seen).position(name, now, at_limit=at_limit)


def test_a_request_is_told_how_many_go_before_it_and_how_long_they_take() -> None:
    training = [
        waiting_job("a", 1, 10.0, "forward_backward"),
        waiting_job("a", 2, 12.0, "optim_step"),
        waiting_job("b", 1, 11.0, "forward_backward"),
    ]
    pending = Pending({"a": 1, "b": 1}, training, [waiting_sample("s:0", 10.5)])
    seen = eta(forward_backward=2.0, optim_step=0.5, sample=3.0)
    found = position_of(RequestId("a", 2), pending, seen, 13.0)
    assert (found.status, found.depth, found.position) == ("queued", 4, 3)
    assert found.wait_s == 2.0 + 2.0 + 3.0 + 0.5
    first = position_of(RequestId("a", 1), pending, seen, 13.0)
    assert (first.position, first.wait_s, first.state) == (0, 2.0, "active")


def test_a_missing_number_is_the_reason_of_those_behind_it() -> None:
    pending = Pending({"a": 3}, [waiting_job("a", 5, 10.0, "optim_step"), waiting_job("a", 6, 10.0, "optim_step")])
    found = position_of(RequestId("a", 6), pending, eta(), 11.0)
    assert found.status == "held" and found.wait_s is None
    assert found.reason == "waits for request 3, 4 of a, which has not arrived"
    far = Pending({"a": 0}, [waiting_job("a", 2**31 - 1, 10.0, "optim_step")])
    assert "request 0" in position_of(RequestId("a", 2**31 - 1), far, eta(), 11.0).reason


def test_what_runs_says_how_far_it_is() -> None:
    seen = eta(sample=10.0, optim_step=1.0)
    seen.start(["s:0", "s:1"], SAMPLE)
    beside = seen.started("s:1")
    assert beside is not None
    found = position_of(RequestId("s", 1), Pending(), seen, beside.started_at + 4.0)
    assert (found.status, found.position, found.progress) == ("running", 0, pytest.approx(0.4))
    assert found.wait_s == pytest.approx(6.0)


def test_a_training_request_that_runs_goes_before_the_others_and_samples_that_run_hold_nobody_up() -> None:
    seen = eta(sample=10.0, optim_step=1.0)
    seen.start(["s:0", "s:1"], SAMPLE)
    waiting = Pending({"a": 1}, [waiting_job("a", 1, 0.0, "optim_step")])
    behind = position_of(RequestId("a", 1), waiting, seen, 0.0)
    assert behind.position == 0 and behind.wait_s == pytest.approx(1.0)
    seen.start(["b:1"], "optim_step")
    before = seen.started("b:1")
    assert before is not None
    behind = position_of(RequestId("a", 1), waiting, seen, before.started_at + 0.25)
    assert behind.position == 1 and behind.wait_s == pytest.approx(1.75)


def test_the_body_and_the_headers_say_the_same() -> None:
    pending = Pending({"a": 1}, [waiting_job("a", 1, 10.0, "optim_step")])
    found = position_of(RequestId("a", 1), pending, eta(optim_step=90.0), 10.0, at_limit=False)
    body, headers = found.body("a:1"), found.headers()
    assert body["type"] == "try_again" and body["request_id"] == "a:1" and body["queue_state"] == "active"
    assert headers["Retry-After"] == str(body["retry_after_s"]) and headers["Retry-After"].isdigit()
    assert headers["X-Queue-Depth"] == str(body["queue_depth"]) == "1"
    assert headers["X-Queue-ETA-S"] == "90.0" and body["estimated_wait_s"] == 90.0
    full = position_of(RequestId("a", 1), pending, eta(), 10.0, at_limit=True)
    assert full.state == "paused_rate_limit"


def test_the_estimate_follows_what_happens() -> None:
    now = [100.0]
    seen = Eta(clock=lambda: now[0])
    assert seen.typical_s("optim_step") == 0.0
    seen.start(["a:1"], "optim_step")
    now[0] += 0.25
    seen.end(["a:1"])
    assert seen.started("a:1") is None
    assert seen.typical_s("optim_step") == 0.25
    assert seen.typical_s("forward_backward") == seen.typical_s("optim_step")


# --- bounds ------------------------------------------------------------------------------------------------------


def job(model_id: str, seq_id: int, size_bytes: int) -> TrainingJob:
    request = OptimStepRequest(model_id=model_id, seq_id=seq_id)
    return TrainingJob(model_id, seq_id, "optim_step", request, owner="one", size_bytes=size_bytes)


def test_what_waits_is_bounded_for_each_owner_and_freed_when_it_leaves() -> None:
    queue = RequestQueue(QueueLimits(owner_requests=2, owner_bytes=100, total_bytes=300))
    queue.add_training(job("a", 1, 60), next_seq=1)
    queue.require_capacity("one", 40)
    for owner, size, named in (("one", 41, "max_waiting_bytes"), ("two", 91, "max_waiting_bytes of this server")):
        with pytest.raises(OverloadedError) as caught:
            queue.require_capacity(owner, size)
        assert caught.value.field == named
    queue.add_training(job("a", 2, 1), next_seq=1)
    assert queue.is_full("one") and not queue.is_full("two")
    assert queue.is_full("two", max_requests=0)
    queue.advance("a", 1)
    queue.require_capacity("one", 99)
    queue.drop_models(["a"])
    queue.require_capacity("one", 100)


def test_the_next_request_of_a_model_passes_a_full_queue_only_within_bounds() -> None:
    queue = RequestQueue(QueueLimits(owner_bytes=100, total_bytes=2000))
    queue.require_capacity_for_next("a", "one", 1000)  # nothing else of its owner can run
    queue.add_training(job("a", 2, 90), next_seq=1)
    queue.require_capacity_for_next("a", "one", 1000)
    queue.add_training(job("a", 1, 10), next_seq=1)
    for model_id, size in (("b", 1), ("a", 101)):  # nothing waits for the first; much waits for the second
        with pytest.raises(OverloadedError) as caught:
            queue.require_capacity_for_next(model_id, "one", size)
        assert caught.value.field == "max_waiting_bytes"
    queue.require_capacity_for_next("a", "one", 100)
    queue.require_capacity_for_next("c", "two", 1000)


def test_all_owners_together_never_have_more_bytes_than_the_total_and_what_waits_leaves_room_for_what_runs() -> None:
    queue = RequestQueue(QueueLimits(owner_bytes=100, total_bytes=400))
    for number in range(2):  # they wait for the requests before them
        queue.require_capacity(f"owner {number}", 100)
        queue.add_training(replace(job(f"m{number}", 2, 100), owner=f"owner {number}"), next_seq=1)
    for check in (queue.require_capacity, lambda owner, size: queue.require_capacity_for_next("m2", owner, size + 200)):
        with pytest.raises(OverloadedError) as caught:
            check("owner 2", 1)
        assert caught.value.field == "max_waiting_bytes of this server"
    for number in range(2):
        queue.require_capacity_for_next(f"m{number}", f"owner {number}", 100)
        queue.add_training(replace(job(f"m{number}", 1, 100), owner=f"owner {number}"), next_seq=1)
    with pytest.raises(OverloadedError):
        queue.require_capacity_for_next("m2", "owner 2", 1)
    queue.advance("m0", 1)
    queue.require_capacity_for_next("m2", "owner 2", 1)


def test_a_suspended_session_returns_with_its_requests_only_where_they_fit_or_nothing_else_waits() -> None:
    queue = RequestQueue(QueueLimits(owner_requests=4, owner_bytes=100, total_bytes=300))
    queue.require_capacity_for_return("one", 1000, 1000)  # nothing waits
    queue.add_training(job("a", 1, 60), next_seq=1)
    queue.require_capacity_for_return("one", 7, 140)
    queue.require_capacity_for_return("two", 1000, 240)
    for owner, requests, size, named in (
        ("one", 8, 1, "max_waiting_requests"),
        ("one", 1, 141, "max_waiting_bytes"),
        ("two", 1, 241, "max_waiting_bytes of this server"),
    ):
        with pytest.raises(OverloadedError) as caught:
            queue.require_capacity_for_return(owner, requests, size)
        assert caught.value.field == named


# --- results -----------------------------------------------------------------------------------------------------


def test_everybody_who_waits_is_let_go_at_once_when_the_service_is_told_to(
    harness: Harness,
) -> None:
    harness.service.results.long_poll_s = 3600.0
    model_id = harness.create_model()
    name = harness.send("optim_step", model_id, 2, STEP)  # number 1 never comes

    async def wait() -> object:
        return await harness.service.results.retrieve(LOCAL, name)

    def let_go() -> None:
        wait_until(lambda: harness.service.futures.waiter_count == 1)
        harness.service.release_waiters()

    thread = threading.Thread(target=let_go)
    thread.start()
    assert run_without_clock(wait()) is None
    thread.join()
    assert asyncio.run(asyncio.wait_for(wait(), HANG_S)) is None
    position = harness.service.results.queue_position(LOCAL, name)
    assert position.status == "held" and "request 1" in position.reason


def test_an_answer_that_nobody_expects_is_not_kept() -> None:
    book = Futures()
    book.open("s:0", owner="ann")
    book.forget("s:0")
    book.finish({"s:0": FutureResult(b"{}")})
    assert book.fingerprint("s:0") is None


def test_a_stream_of_results_is_heard_of_once_each_and_in_order(harness: Harness) -> None:
    sampler = make_sampler(harness)
    names = [send_sample(harness, sampler, seq_id) for seq_id in (0, 1, 10**9)]
    for name in names:
        harness.answer(name)
    first = ask(harness, sampler)
    assert [item["request_id"] for item in first["completions"]] == names[:2]
    assert {item["state"] for item in first["completions"]} == {"finished"}
    assert ask(harness, sampler, prev_cursor=first["cursor"])["completions"] == []
    clone = ask(harness, sampler, cloned_sampler_id=1)
    assert [item["request_id"] for item in clone["completions"]] == names[2:]
    late = threading.Timer(0.1, lambda: send_sample(harness, sampler, 2))
    late.start()
    waited = ask(harness, sampler, prev_cursor=clone["cursor"], timeout=25.0, retrieved=[names[0]])
    assert [item["request_id"] for item in waited["completions"]] == [f"{sampler}:2"]
    assert harness.service.futures.fingerprint(names[0]) is None


def ask(
    harness: Harness,
    sampler: str,
    *,
    cloned_sampler_id: int = 0,
    timeout: float = 0.0,
    retrieved: list[str] | None = None,
    **more: int,
) -> dict:
    target = {"sampling_session_id": sampler, "cloned_sampler_id": cloned_sampler_id}
    body = {"target": target, "timeout": timeout, "retrieved_request_ids": retrieved or [], **more}
    return asyncio.run(harness.service.results.retrieve_many(LOCAL, json.dumps(body).encode())).model_dump()


def test_a_result_wakes_who_waits_for_it_and_nobody_polls(harness: Harness) -> None:
    model_id = harness.create_model()
    futures, finish = harness.service.futures, harness.service.futures.finish

    def finish_late(answers: dict[str, FutureResult]) -> None:
        wait_until(lambda: futures.waiter_count == 1)
        finish(answers)

    futures.finish = finish_late  # the moment at which the worker has the result
    for seq_id in range(1, 4):
        name = harness.send("forward_backward", model_id, seq_id, GOOD_PASS)
        answer = run_without_clock(harness.service.results.retrieve(LOCAL, name))
        assert answer is not None and not answer.failed
