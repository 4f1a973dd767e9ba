"""How sessions are suspended, resumed and ended: no downtime and no clock ends one, and clients notice no pause."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from service_harness import BASE, GOOD_PASS, STEP, Harness, datum, failure, make_sampler, open_service, pass_body
from waiting import HANG_S, wait_until

from mint.engine.fake_engine import FakeEngine
from mint.errors import NotFoundError, OverloadedError, SessionEndedError
from mint.server.callers import LOCAL, Caller, Quotas
from mint.server.queue.queue import QueueLimits, RequestQueue
from mint.server.service.service import Service
from mint.server.service.sessions import SILENCE_S, SUSPENDED_S
from mint.server.store.journal import JOURNAL_FILE

FORK = multiprocessing.get_context("fork")
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class Clock:
    """Seconds that pass when a test says so. The service keeps house once after each step of at most a minute."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, service: Service, seconds: float, *, step_s: float = 600.0) -> None:
        left = seconds
        while left > 0:
            self.now += min(step_s, left)
            left -= step_s
            for _ in range(2):  # the worker keeps house before it looks for work, then runs this
                settled: list[None] = []
                service.call_soon(lambda settled=settled: settled.append(None))
                wait_until(lambda settled=settled: settled)


def train(harness: Harness, model_id: str, steps: int, *, first_seq: int = 1) -> list[str]:
    """The digest after each step."""
    digests = []
    for step in range(steps):
        seq_id = first_seq + 2 * step
        harness.run("forward_backward", model_id, seq_id, pass_body(datum(1, 2, 3 + seq_id)))
        digests.append(harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"])
    return digests


def calm_digests(folder: Path, steps: int) -> list[str]:
    """Those of the same steps without any pause."""
    harness = Harness(open_service(folder))
    digests = train(harness, harness.create_model(), steps)
    harness.service.stop()
    return digests


def is_suspended(harness: Harness) -> bool:
    return harness.session_id not in harness.service.session_owners


# --- suspended and resumed ---------------------------------------------------------------------------------------


def test_a_client_that_was_silent_for_two_days_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path / "silent", clock=clock))
    model_id = harness.create_model()
    digests = train(harness, model_id, 2)
    harness.run("forward_backward", model_id, 5, pass_body(datum(1, 2, 8)))  # the gradient is open
    clock.wait(harness.service, SILENCE_S - 60)
    assert not is_suspended(harness)
    clock.wait(harness.service, 120)
    assert is_suspended(harness)
    assert not harness.engine.has_model(model_id), "it takes no memory"
    clock.wait(harness.service, 2 * DAY_S)
    digests.append(harness.run("optim_step", model_id, 6, STEP)["state_digest"])
    assert not is_suspended(harness)
    digests += train(harness, model_id, 2, first_seq=7)
    assert digests == calm_digests(tmp_path / "calm", 5)
    harness.service.stop()


@pytest.mark.parametrize("come_back", ["heartbeat", "retrieve", "get_info", "sample"])
def test_any_request_of_its_client_resumes_a_session(tmp_path: Path, come_back: str) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    model_id = harness.create_model()
    sampler = make_sampler(harness)
    name = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    result = harness.wait(name)
    sampled = harness.sample(sampler, 0)
    clock.wait(harness.service, SILENCE_S + HOUR_S)
    assert is_suspended(harness)
    service, session = harness.service, json.dumps({"session_id": harness.session_id}).encode()
    if come_back == "heartbeat":
        service.sessions.heartbeat(LOCAL, session)
    elif come_back == "retrieve":
        assert harness.wait(name) == result
    elif come_back == "get_info":
        assert service.training.get_info(LOCAL, json.dumps({"model_id": model_id}).encode()).model_name == BASE
    else:
        assert harness.sample(sampler, 0) == sampled  # lost with the session's memory, or drawn again: the same
    assert not is_suspended(harness)
    harness.service.stop()


def test_accepted_requests_wait_in_the_journal_and_run_when_the_client_is_back(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock, gap_timeout_s=1e12))
    model_id = harness.create_model()
    waiting = harness.send("optim_step", model_id, 2, STEP)  # request 1 comes later
    assert len(harness.service.pending.training) == 1
    clock.wait(harness.service, SILENCE_S + 60)
    assert is_suspended(harness) and not harness.service.pending.training
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    assert harness.wait(waiting)["state_digest"]
    harness.service.stop()


def test_samples_of_a_silent_client_leave_the_engine_and_are_drawn_again_when_it_asks(tmp_path: Path) -> None:
    clock = Clock()
    engine = SlowEngine()
    harness = Harness(open_service(tmp_path, clock=clock, engine=engine))
    sampler = make_sampler(harness)
    expected = harness.sample(sampler, 7, params={"max_tokens": 400, "stop": [], "seed": 3})
    body = {"sampling_session_id": sampler, "seq_id": 8, "prompt": {"chunks": [{"tokens": [5, 6]}]}}
    body["sampling_params"] = {"max_tokens": 400, "stop": [], "seed": 3}
    engine.on_step = lambda: setattr(clock, "now", clock.now + 60)  # time passes while it is sampled
    name = harness.service.sampling.accept(LOCAL, json.dumps(body).encode()).request_id
    wait_until(lambda: is_suspended(harness))
    wait_until(lambda: harness.service.sampled_sequences == 0)
    engine.on_step = lambda: None
    assert isinstance(failure(lambda: asyncio.run(harness.service.results.retrieve(LOCAL, name))), NotFoundError)
    again = harness.service.sampling.accept(LOCAL, json.dumps(body).encode()).request_id
    assert again == name
    assert harness.wait(again)["sequences"] == expected["sequences"]
    harness.service.stop()


class SlowEngine(FakeEngine):
    """Tells when a step of sampling begins."""

    def __init__(self) -> None:
        super().__init__()
        self.on_step = lambda: None

    def open_batch(self) -> Any:
        batch = super().open_batch()
        step = batch.step

        def told_step() -> Any:
            self.on_step()
            return step()

        batch.step = told_step
        return batch


def test_a_suspended_session_does_not_count_in_quotas_and_may_always_come_back(tmp_path: Path) -> None:
    clock = Clock()
    service = open_service(tmp_path, clock=clock)
    caller = Caller("ann", quotas=Quotas(max_sessions=1, max_models=1))
    bodies = []
    for _ in range(2):
        session_id = service.sessions.create(caller, b"{}").session_id
        bodies.append(json.dumps({"session_id": session_id}).encode())
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
        service.training.submit(caller, "create_model", json.dumps(create).encode())
        clock.wait(service, SILENCE_S + 60)
    for body in bodies:
        service.sessions.heartbeat(caller, body)
    assert len(service.session_owners) == 2
    service.stop()


def test_a_session_that_comes_back_waits_for_room_in_the_queue_and_loses_nothing(tmp_path: Path) -> None:
    large = pass_body(*[datum(*[3] * 100)] * 4)
    clock = Clock()
    queue = RequestQueue(QueueLimits(total_bytes=15_000))
    service = open_service(tmp_path, clock=clock, queue=queue, gap_timeout_s=1e12)
    owners = [Harness(service, caller=Caller(name)) for name in ("ann", "bob", "cat")]
    models, waiting = [], []
    for harness in owners:  # each one after the one before is suspended, as the queue has no room for all
        models.append(harness.create_model())
        waiting.append([harness.send("forward_backward", models[-1], seq_id, large) for seq_id in (2, 3)])
        assert sum(job.size_bytes for job in service.pending.training) > 15_000 / 3
        clock.wait(service, SILENCE_S + 60)
    *back, cat = owners
    beats = {harness: json.dumps({"session_id": harness.session_id}).encode() for harness in owners}
    for _ in range(int(1.1 * SUSPENDED_S / 600)):  # in which cat's session does not end: its client is there
        for harness in back:
            service.sessions.heartbeat(harness.caller, beats[harness])
        error = failure(lambda: service.sessions.heartbeat(cat.caller, beats[cat]))
        assert isinstance(error, OverloadedError) and error.field == "max_waiting_bytes of this server"
        clock.wait(service, 600)
    for harness, model_id, names in zip(owners, models, waiting, strict=True):
        harness.run("forward_backward", model_id, 1, GOOD_PASS)
        assert all(harness.wait(name)["loss_fn_outputs"] for name in names)
    service.stop()


def test_a_suspended_session_is_closed_though_the_queue_is_full(tmp_path: Path) -> None:
    clock = Clock()
    queue = RequestQueue(QueueLimits(owner_bytes=2_000, total_bytes=2_000))
    service = open_service(tmp_path, clock=clock, queue=queue, gap_timeout_s=1e12)
    silent = Harness(service)
    silent.send("forward_backward", silent.create_model(), 2, GOOD_PASS)
    clock.wait(service, SILENCE_S + 60)
    busy = Harness(service)
    busy.send("forward_backward", busy.create_model(), 2, pass_body(*[datum(*[3] * 100)]))
    service.sessions.finish(silent.caller, silent.session_id)
    ended = failure(lambda: service.sessions.finish(silent.caller, silent.session_id))
    assert isinstance(ended, SessionEndedError)
    service.stop()


def test_another_owner_does_not_resume_a_session(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    clock.wait(harness.service, SILENCE_S + 60)
    body = json.dumps({"session_id": harness.session_id}).encode()
    assert isinstance(failure(lambda: harness.service.sessions.heartbeat(Caller("eve"), body)), NotFoundError)
    assert is_suspended(harness)
    harness.service.stop()


# --- ended -------------------------------------------------------------------------------------------------------


def test_a_suspended_session_ends_after_the_stated_running_time_and_says_so(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    model_id = harness.create_model()
    train(harness, model_id, 1)
    clock.wait(harness.service, SILENCE_S + 60)
    clock.wait(harness.service, SUSPENDED_S - HOUR_S)
    assert harness.stored(lambda journal: journal.snapshots(model_id)) and list((tmp_path / "snapshots").iterdir())
    clock.wait(harness.service, 2 * HOUR_S)
    error = failure(lambda: harness.run("forward_backward", model_id, 3, GOOD_PASS))
    assert isinstance(error, SessionEndedError)
    assert "15 minutes" in str(error) and "72 hours" in str(error)
    wait_until(lambda: not list((tmp_path / "snapshots").iterdir()))
    harness.service.stop()


def test_the_time_for_which_a_session_was_suspended_counts_on_after_a_restart_and_only_while_a_service_runs(
    tmp_path: Path,
) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    model_id = harness.create_model()
    (digest,) = train(harness, model_id, 1)
    clock.wait(harness.service, SILENCE_S + 60)
    for _ in range(3):
        clock.wait(harness.service, SUSPENDED_S / 4)
        harness.service.stop()
        clock.now += 100 * DAY_S  # nobody serves
        harness = Harness(open_service(tmp_path, clock=clock), harness.session_id)
        assert is_suspended(harness), "its client has not come back yet"
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    clock.wait(harness.service, SILENCE_S + 60)
    clock.wait(harness.service, SUSPENDED_S - HOUR_S)  # counted from the beginning again
    harness.restore(model_id)
    clock.wait(harness.service, SILENCE_S + 60)
    clock.wait(harness.service, SUSPENDED_S + HOUR_S)
    body = json.dumps({"session_id": harness.session_id}).encode()
    assert isinstance(failure(lambda: harness.service.sessions.heartbeat(LOCAL, body)), SessionEndedError)
    harness.service.stop()


def test_a_process_that_was_stopped_for_a_week_has_not_been_running(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    model_id = harness.create_model()
    clock.wait(harness.service, SILENCE_S + 60)
    clock.wait(harness.service, 7 * DAY_S, step_s=7 * DAY_S)
    clock.wait(harness.service, HOUR_S)
    harness.restore(model_id)
    harness.service.stop()


def test_a_client_that_closes_its_session_ends_it_at_once_also_a_suspended_one(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    model_id = harness.create_model()
    train(harness, model_id, 1)
    clock.wait(harness.service, SILENCE_S + 60)
    harness.service.sessions.finish(LOCAL, harness.session_id)
    body = json.dumps({"session_id": harness.session_id}).encode()
    assert isinstance(failure(lambda: harness.service.sessions.heartbeat(LOCAL, body)), SessionEndedError)
    wait_until(lambda: not list((tmp_path / "snapshots").iterdir()))
    harness.service.stop()


# --- downtime, and clocks that jump ------------------------------------------------------------------------------


def test_downtime_of_any_length_ends_no_session(tmp_path: Path) -> None:
    def life() -> None:
        harness = Harness(open_service(tmp_path))
        model_id = harness.create_model()
        digests = train(harness, model_id, 2)
        (tmp_path / "known").write_text(json.dumps([harness.session_id, model_id, digests]))
        os.kill(os.getpid(), signal.SIGKILL)

    child = FORK.Process(target=life)
    child.start()
    child.join(HANG_S)
    session_id, model_id, digests = json.loads((tmp_path / "known").read_text())
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as database:
        database.execute("UPDATE sessions SET last_seen = last_seen - 400 * 86400")
        database.commit()
    harness = Harness(open_service(tmp_path), session_id)
    harness.restore(model_id)
    assert harness.digest(model_id) == digests[-1]
    harness.service.stop()


JUMPS = """
import json, sys, time
from pathlib import Path
folder, jumps = Path(sys.argv[1]), json.loads(sys.argv[2])
of_day, jumped = time.time, [0.0]
time.time = lambda: of_day() + jumped[0]  # before mint is imported: all of it reads this clock
sys.path[:0] = json.loads(sys.argv[3])
from service_harness import Harness, STEP, datum, open_service, pass_body
from mint.server.callers import LOCAL
from mint.server.worker import worker
worker.HOUSEKEEPING_S = 0.02
known = folder / "known"
digests, saved = [], None
for life, jump in enumerate(jumps):
    jumped[0] = jump[0]  # the clock is wrong when the process starts
    service = open_service(folder)
    harness = Harness(service, known.read_text() if known.exists() else None)
    known.write_text(harness.session_id)
    if life == 0:
        model_id = harness.create_model()
        saved = harness.run("save_weights", model_id, 1, {"path": "kept", "ttl_seconds": 3600})["path"]
    for step, seconds in enumerate(jump):
        jumped[0] = seconds
        seq_id = 2 + 2 * (len(digests))
        harness.run("forward_backward", model_id, seq_id, pass_body(datum(1, 2, 3 + seq_id)))
        digests.append(harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"])
        time.sleep(0.2)  # several rounds of housekeeping
    service.stop()
jumped[0] = 0.0
service = open_service(folder)
body = json.dumps({"tinker_path": saved}).encode()
print(json.dumps([digests, service.weights_info(LOCAL, body).base_model]))
service.stop()
"""


def test_a_time_of_day_that_jumps_by_days_loses_neither_training_nor_checkpoints(tmp_path: Path) -> None:
    """Under a running service, and at its start, forward and back."""

    def run(folder: str, jumps: list[list[float]]) -> Any:
        paths = json.dumps([str(Path(__file__).parent), str(Path(__file__).parents[1])])
        command = [sys.executable, "-c", JUMPS, str(tmp_path / folder), json.dumps(jumps), paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    (tmp_path / "calm").mkdir(), (tmp_path / "jumping").mkdir()
    jumps = [[0.0, DAY_S, -DAY_S], [30 * DAY_S, 0.0], [-DAY_S, 400 * DAY_S]]
    calm = run("calm", [[0.0] * len(life) for life in jumps])
    assert run("jumping", jumps) == calm
    assert calm[1] == BASE and len(set(calm[0])) == 7


def test_the_space_of_unloaded_models_goes_back_to_the_file_system(tmp_path: Path) -> None:
    clock = Clock()
    harness = Harness(open_service(tmp_path, clock=clock))
    large = {"forward_backward_input": {**GOOD_PASS["forward_backward_input"]}, "comment": "x" * 200_000}
    for number in range(60):
        model_id = harness.create_model(number)
        harness.run("forward_backward", model_id, 1, large)
        harness.service.sessions.unload_model(LOCAL, model_id)
    clock.wait(harness.service, 120)
    assert harness.stored(lambda journal: journal.database.value("PRAGMA freelist_count")) == 0
    size = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    assert harness.stored(lambda journal: journal.database.value(size)) < 2_000_000
    harness.service.stop()
