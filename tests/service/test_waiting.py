"""What somebody who waits is told, and when a result reaches him."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from service_harness import GOOD_PASS, STEP, Harness, make_sampler, send_sample
from waiting import HANG_S, run_without_clock, wait_until

from mint.errors import OverloadedError
from mint.server.callers import LOCAL
from mint.server.ids import RequestName
from mint.server.queue.eta import SAMPLE, Pace
from mint.server.queue.futures import Answer, FutureBook
from mint.server.queue.queue import Bounds, Inbox
from mint.server.queue.queue_position import QueueFacts, QueueView
from mint.server.queue.scheduler import Pending, SampleItem, TrainingItem
from mint.server.worker.trainer import TrainingJob
from mint.wire.requests import OptimStepRequest


def pace(**seconds: float) -> Pace:
    """One that has seen work of these kinds take so long."""
    known = Pace()
    known._typical_s.update(seconds)
    return known


def facts_of(name: RequestName, pending: Pending, seen: Pace, now: float, *, at_bound: bool = False) -> QueueFacts:
    return QueueView(pending, seen).facts(name, now, at_bound=at_bound)


def test_a_request_is_told_how_many_go_before_it_and_how_long_they_take() -> None:
    training = [
        TrainingItem("a", 1, 10.0, "forward_backward"),
        TrainingItem("a", 2, 12.0, "optim_step"),
        TrainingItem("b", 1, 11.0, "forward_backward"),
    ]
    pending = Pending({"a": 1, "b": 1}, training, [SampleItem("s:0", 4, 10.5)])
    seen = pace(forward_backward=2.0, optim_step=0.5, sample=3.0)
    facts = facts_of(RequestName("a", 2), pending, seen, 13.0)
    assert (facts.status, facts.depth, facts.position) == ("queued", 4, 3)
    assert facts.wait_s == 2.0 + 2.0 + 3.0 + 0.5
    first = facts_of(RequestName("a", 1), pending, seen, 13.0)
    assert (first.position, first.wait_s, first.state) == (0, 2.0, "active")


def test_a_missing_number_is_the_reason_of_those_behind_it() -> None:
    pending = Pending({"a": 3}, [TrainingItem("a", 5, 10.0, "optim_step"), TrainingItem("a", 6, 10.0, "optim_step")])
    facts = facts_of(RequestName("a", 6), pending, pace(), 11.0)
    assert facts.status == "held" and facts.wait_s is None
    assert facts.reason == "waits for request 3, 4 of a, which has not arrived"
    far = Pending({"a": 0}, [TrainingItem("a", 2**31 - 1, 10.0)])
    assert "request 0" in facts_of(RequestName("a", 2**31 - 1), far, pace(), 11.0).reason


def test_what_runs_says_how_far_it_is() -> None:
    seen = pace(sample=10.0, optim_step=1.0)
    seen.began(["s:0", "s:1"], SAMPLE)
    beside = seen.running("s:1")
    assert beside is not None
    facts = facts_of(RequestName("s", 1), Pending(), seen, beside.since + 4.0)
    assert (facts.status, facts.position, facts.progress) == ("running", 0, pytest.approx(0.4))
    assert facts.wait_s == pytest.approx(6.0)


def test_a_training_request_that_runs_goes_before_the_others_and_samples_that_run_hold_nobody_up() -> None:
    seen = pace(sample=10.0, optim_step=1.0)
    seen.began(["s:0", "s:1"], SAMPLE)
    waiting = Pending({"a": 1}, [TrainingItem("a", 1, 0.0, "optim_step")])
    behind = facts_of(RequestName("a", 1), waiting, seen, 0.0)
    assert behind.position == 0 and behind.wait_s == pytest.approx(1.0)
    seen.began(["b:1"], "optim_step")
    before = seen.running("b:1")
    assert before is not None
    behind = facts_of(RequestName("a", 1), waiting, seen, before.since + 0.25)
    assert behind.position == 1 and behind.wait_s == pytest.approx(1.75)


def test_the_body_and_the_headers_say_the_same() -> None:
    pending = Pending({"a": 1}, [TrainingItem("a", 1, 10.0, "optim_step")])
    facts = facts_of(RequestName("a", 1), pending, pace(optim_step=90.0), 10.0, at_bound=False)
    body, headers = facts.body("a:1"), facts.headers()
    assert body["type"] == "try_again" and body["request_id"] == "a:1" and body["queue_state"] == "active"
    assert headers["Retry-After"] == str(body["retry_after_s"]) and headers["Retry-After"].isdigit()
    assert headers["X-Queue-Depth"] == str(body["queue_depth"]) == "1"
    assert headers["X-Queue-ETA-S"] == "90.0" and body["estimated_wait_s"] == 90.0
    full = facts_of(RequestName("a", 1), pending, pace(), 10.0, at_bound=True)
    assert full.state == "paused_rate_limit"


def test_the_pace_follows_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mint.server.queue.eta.time", SimpleNamespace(monotonic=lambda: now[0]))
    seen = Pace()
    assert seen.typical_s("optim_step") == 0.0
    seen.began(["a:1"], "optim_step")
    now[0] += 0.25
    seen.ended(["a:1"])
    assert seen.running("a:1") is None
    assert seen.typical_s("optim_step") == 0.25
    assert seen.typical_s("forward_backward") == seen.typical_s("optim_step")


# --- bounds ------------------------------------------------------------------------------------------------------


def job(model_id: str, seq_id: int) -> TrainingJob:
    return TrainingJob(model_id, seq_id, "optim_step", OptimStepRequest(model_id=model_id, seq_id=seq_id))


def test_what_waits_is_bounded_for_each_owner_and_freed_when_it_leaves() -> None:
    inbox = Inbox(Bounds(owner_requests=2, owner_bytes=100, total_bytes=150))
    inbox.add_training(job("a", 1), next_seq=1, owner="one", size_bytes=60)
    inbox.require_room("one", 40)
    for owner, size, named in (("one", 41, "max_waiting_bytes"), ("two", 91, "max_waiting_bytes of this server")):
        with pytest.raises(OverloadedError) as caught:
            inbox.require_room(owner, size)
        assert caught.value.field == named
    inbox.add_training(job("a", 2), next_seq=1, owner="one", size_bytes=1)
    assert inbox.is_full("one") and not inbox.is_full("two")
    assert inbox.is_full("two", max_requests=0)
    inbox.advance("a", 1)
    inbox.require_room("one", 99)
    inbox.drop_models(["a"])
    inbox.require_room("one", 100)


# --- results -----------------------------------------------------------------------------------------------------


def test_everybody_who_waits_is_let_go_at_once_when_the_service_is_told_to(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.server.service.results.LONG_POLL_S", 3600.0)
    model_id = harness.create_model()
    name = harness.send("optim_step", model_id, 2, STEP)  # number 1 never comes

    async def wait() -> object:
        return await harness.service.retrieve(LOCAL, json.dumps({"request_id": name}).encode())

    def let_go() -> None:
        wait_until(lambda: harness.service.futures.waiter_count == 1)
        harness.service.release_waiters()

    thread = threading.Thread(target=let_go)
    thread.start()
    assert run_without_clock(wait()) is None
    thread.join()
    assert asyncio.run(asyncio.wait_for(wait(), HANG_S)) is None
    request_id, facts = harness.service.queue_facts(LOCAL, json.dumps({"request_id": name}).encode())
    assert request_id == name and facts.status == "held" and "request 1" in facts.reason


def test_an_answer_that_nobody_expects_is_not_kept() -> None:
    book = FutureBook()
    book.open("s:0")
    book.forget("s:0")
    book.finish({"s:0": Answer(b"{}")})
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
    return asyncio.run(harness.service.retrieve_many(LOCAL, json.dumps(body).encode())).model_dump()


def test_a_result_wakes_who_waits_for_it_and_nobody_polls(harness: Harness) -> None:
    model_id = harness.create_model()
    futures, finish = harness.service.futures, harness.service.futures.finish

    def finish_late(answers: dict[str, Answer]) -> None:
        wait_until(lambda: futures.waiter_count == 1)
        finish(answers)

    futures.finish = finish_late  # the moment at which the worker has the result
    for seq_id in range(1, 4):
        name = harness.send("forward_backward", model_id, seq_id, GOOD_PASS)
        body = json.dumps({"request_id": name}).encode()
        answer = run_without_clock(harness.service.retrieve(LOCAL, body))
        assert answer is not None and not answer.failed
