"""Requests may be accepted on many threads at once: quotas, conflicts and repeated requests come out as one by one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from service_harness import BASE, GOOD_PASS, STEP, Harness, make_sampler, open_service

from mint.errors import ConflictError, MintError, QuotaExceededError
from mint.server.callers import LOCAL, Caller, Quotas

THREADS = 8


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, or the errors that they raised; each call has a thread of its own."""
    barrier = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return call()
        except MintError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def test_copies_of_a_request_are_one_job(harness: Harness) -> None:
    model_id = harness.create_model()
    for seq_id in range(1, 11):
        body = GOOD_PASS if seq_id % 2 else STEP
        kind = "forward_backward" if seq_id % 2 else "optim_step"
        names = at_once([lambda b=body, k=kind, s=seq_id: harness.send(k, model_id, s, b)] * THREADS)
        assert set(names) == {f"{model_id}:{seq_id}"}
    assert harness.wait(f"{model_id}:10")["metrics"]["step"] == 5.0
    jobs = harness.stored(lambda journal: journal.jobs(model_id, after=0))
    assert [job.seq_id for job in jobs] == list(range(1, 11))


def test_of_different_requests_for_one_place_one_is_accepted(harness: Harness) -> None:
    model_id = harness.create_model()
    bodies = [{"adam_params": {"learning_rate": 0.001 * (number + 1)}} for number in range(THREADS)]
    found = at_once([lambda body=body: harness.send("optim_step", model_id, 1, body) for body in bodies])
    assert sorted(type(each).__name__ for each in found) == ["ConflictError"] * (THREADS - 1) + ["str"]


@pytest.mark.parametrize("quotas", [Quotas(max_models=1), Quotas(max_sessions=1)], ids=["models", "sessions"])
def test_a_quota_holds_for_requests_that_come_at_once(tmp_path: Path, quotas: Quotas) -> None:
    caller = Caller("ada", None, quotas)
    service = open_service(tmp_path)
    session_id = service.sessions.create(Caller("ada"), b"{}").session_id

    def create(number: int) -> Any:
        if quotas.max_sessions is not None:
            return service.sessions.create(caller, b"{}")
        body = {"session_id": session_id, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 8}}
        return service.training.submit(caller, "create_model", json.dumps(body).encode())

    if quotas.max_sessions is not None:
        service.sessions.finish(caller, session_id)
    found = at_once([lambda number=number: create(number) for number in range(THREADS)])
    assert sum(isinstance(each, QuotaExceededError) for each in found) == THREADS - 1
    service.stop()


@pytest.mark.parametrize("kind", ["sessions", "samplers"])
def test_sessions_and_samplers_that_are_made_at_once_share_syncs(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    syncs, sync = [], os.fsync

    def slow_sync(handle: int) -> None:
        syncs.append(handle)
        time.sleep(0.1)
        sync(handle)

    monkeypatch.setattr(os, "fsync", slow_sync)

    def create(number: int) -> Any:
        if kind == "sessions":
            return harness.service.sessions.create(LOCAL, b"{}").session_id
        return make_sampler(harness, number)

    made = at_once([lambda number=number: create(number) for number in range(2 * THREADS)])
    assert len(set(made)) == 2 * THREADS
    assert 1 <= len(syncs) <= THREADS


def test_copies_of_a_sample_request_are_sampled_once(harness: Harness) -> None:
    sampler = make_sampler(harness)
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6]}]}}
    copies = [json.dumps({**body, "sampling_params": {"max_tokens": 2}}).encode()] * (THREADS - 1)
    other = json.dumps({**body, "sampling_params": {"max_tokens": 3}}).encode()
    caller = Caller("local")
    found = at_once([lambda b=b: harness.service.sampling.accept(caller, b).request_id for b in [*copies, other]])
    accepted = [each for each in found if each == f"{sampler}:0"]
    assert len(accepted) in (1, THREADS - 1) and all(
        isinstance(each, ConflictError) for each in found if each not in accepted
    )
    harness.answer(f"{sampler}:0")
    assert harness.service.futures.finished_count == 1


def test_a_model_that_is_unloaded_meanwhile_takes_no_request_that_nobody_would_run(harness: Harness) -> None:
    for number in range(5):
        model_id = harness.create_model(number)
        calls = [lambda m=model_id: harness.service.sessions.unload_model(Caller("local"), m)]
        calls += [lambda m=model_id, s=seq: harness.send("forward_backward", m, s, GOOD_PASS) for seq in range(1, 8)]
        accepted = [each for each in at_once(calls)[1:] if isinstance(each, str)]
        assert harness.stored(lambda journal, name=model_id: journal.jobs(name, after=-1)) == []
        for name in accepted:
            harness.answer(name)  # the error that it was unloaded, or its result
    assert harness.service.pending.training == []
