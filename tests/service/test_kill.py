"""kill -9 at any moment loses no acknowledged operation and applies none twice; the client only resubmits.

The children are forked, so that a restart costs milliseconds; every one of them is killed by SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service_harness import Harness, Op, clean_results, open_service, run_script, script, send_op

from mint.server.callers import LOCAL
from mint.server.store.durability import Durability
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import snapshots, worker
from mint.server.worker.trainer import Trainer

pytestmark = pytest.mark.restarts

FORK = multiprocessing.get_context("fork")
STEPS = 8

KILL_POINTS: list[tuple[Any, str]] = [
    (Journal, "add_job"),
    (Durability, "wait_durable"),
    (Journal, "finish_job"),
    (Journal, "adopt_sessions"),
    (snapshots, "write_snapshot"),
    (Trainer, "run"),
    (worker, "discard_files"),
    (Trainer, "_publish"),
    (Trainer, "_save"),
    (Trainer, "_load_weights"),
]


def kill_at(owner: Any, name: str, call: int, *, after: bool) -> None:
    """This process dies before or after the given call of a function."""
    original, count = getattr(owner, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if count[0] == call and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def client_run(data_dir: Path, ops: list[Op], seed: int, prepare: Callable[[], None] | None) -> None:
    """One life: opens the service, and sends everything from the beginning, as if nothing had been sent before."""
    if prepare is not None:
        prepare()
    service = open_service(data_dir)
    known = data_dir / "session"
    if not known.exists():
        written = data_dir / "session.tmp"
        written.write_text(service.sessions.create(LOCAL, b"{}").session_id)
        written.rename(known)
    harness = Harness(service, known.read_text())
    model_id = harness.create_model()
    with (data_dir / "seen").open("ab", buffering=0) as seen:

        def on_result(i: int, body: bytes) -> None:
            # a kill may cut a line short, so it begins on a new one and says how long it is
            seen.write(b"\n%d %d " % (i, len(body)) + body)

        run_script(harness, model_id, ops, seed=seed, on_result=on_result)
    harness.restore(model_id)  # all may have been done in the lives before
    (data_dir / "digest").write_text(harness.digest(model_id))
    service.stop()


def live(
    data_dir: Path, ops: list[Op], seed: int, *, prepare: Callable[[], None] | None, kill_after_s: float | None
) -> bool:
    """Whether this life came to its end; it is killed from outside, by `prepare`, or not at all."""
    child = FORK.Process(target=client_run, args=(data_dir, ops, seed, prepare))
    child.start()
    child.join(kill_after_s)
    if child.is_alive():
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode == 0


def check(data_dir: Path, ops: list[Op], clean: dict[int, bytes], digest: str) -> None:
    """All results ever seen, in all lives, are the clean run's; so is the state; each operation was applied once."""
    lines = [line.split(b" ", 2) for line in (data_dir / "seen").read_bytes().split(b"\n")]
    whole = [line for line in lines if len(line) == 3 and len(line[2]) == int(line[1])]
    seen = [(int(number), body) for number, _, body in whole]
    assert {i for i, _ in seen} == set(range(len(ops)))
    assert [(i, body) for i, body in seen if body != clean[i]] == []
    assert (data_dir / "digest").read_text() == digest
    journal = Journal(data_dir / JOURNAL_FILE)
    session_id = (data_dir / "session").read_text()
    jobs = journal.jobs(f"{session_id}:train:0", after=-1)
    assert [job.seq_id for job in jobs] == list(range(len(jobs))) and len(jobs) > len(ops)
    assert {job.kind for job in jobs[len(ops) + 1 :]} <= {"forward"}  # those of `restore`
    assert {job.status for job in jobs} == {"done", "failed"}
    journal.close()


def survive(data_dir: Path, rng: random.Random, *, kills: int) -> int:
    """Random kills until enough have happened; the number of them."""
    data_dir.mkdir()
    ops = script(STEPS)
    clean, digest = clean_results(data_dir / "clean", ops)
    began = time.monotonic()
    assert live(data_dir / "timing", ops, 0, prepare=lambda: (data_dir / "timing").mkdir(), kill_after_s=None)
    life_s = time.monotonic() - began
    total, run = 0, 0
    while total < kills:
        run += 1
        folder = data_dir / f"run{run}"
        folder.mkdir()
        for _ in range(4):
            if live(folder, ops, rng.randrange(100), prepare=None, kill_after_s=rng.uniform(0.02, 1.1 * life_s)):
                break
            total += 1
        while not live(folder, ops, rng.randrange(100), prepare=None, kill_after_s=None):
            pass
        check(folder, ops, clean, digest)
    return total


def test_random_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    assert survive(tmp_path / "random", random.Random(1), kills=6) >= 6


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_random_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    assert survive(tmp_path / "random", random.Random(2), kills=1000) >= 1000


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, bytes], str]:
    return clean_results(tmp_path_factory.mktemp("clean"), script(STEPS))


@pytest.mark.parametrize(
    "after", [pytest.param(False, id="before"), pytest.param(True, id="after", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("owner", "name"), KILL_POINTS, ids=[name for _, name in KILL_POINTS])
def test_a_kill_at_each_point_loses_nothing_and_doubles_nothing(
    tmp_path: Path, clean: tuple[dict[int, bytes], str], owner: Any, name: str, after: bool
) -> None:
    ops = script(STEPS)
    assert not live(tmp_path, ops, 0, prepare=lambda: kill_at(Journal, "finish_job", 5, after=True), kill_after_s=None)
    died = 0
    for life, call in enumerate((1, 2, 4)):

        def prepare(call: int = call) -> None:
            kill_at(owner, name, call, after=after)

        died += not live(tmp_path, ops, life, prepare=prepare, kill_after_s=None)
    assert died >= 1
    while not live(tmp_path, ops, 5, prepare=None, kill_after_s=None):
        pass
    check(tmp_path, ops, *clean)


def test_promises_got_before_a_kill_are_kept_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests that were accepted and never asked for are run by the next process, which says so, without a word from
    the client."""
    ops = script(6)
    clean, digest = clean_results(tmp_path / "clean", ops)
    data_dir = tmp_path / "data"

    def accept_and_die() -> None:
        service = open_service(data_dir)
        harness = Harness(service)
        model_id = harness.create_model()
        (data_dir / "session").write_text(harness.session_id)
        service.call_soon(lambda: time.sleep(3600))  # nothing runs any more
        for i in [*range(1, len(ops)), 0]:
            send_op(harness, model_id, ops, i)
        os.kill(os.getpid(), signal.SIGKILL)

    child = FORK.Process(target=accept_and_die)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    service = open_service(data_dir)
    harness = Harness(service, (data_dir / "session").read_text())
    assert f"left unfinished requests ({len(ops)}), which run from now on" in caplog.text
    assert f"`mint sessions end {harness.session_id}` drops them" in caplog.text
    model_id = f"{harness.session_id}:train:0"
    for i in range(len(ops)):
        body = harness.answer(f"{model_id}:{i + 1}")
        assert body.replace(harness.session_id.encode(), b"SESSION") == clean[i]
        assert harness.answer(f"{model_id}:{i + 1}") == body
    assert harness.digest(model_id) == digest
    service.stop()
