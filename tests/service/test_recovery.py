"""A model comes back with the bits that were acknowledged, or it stops and says why; it never goes on silently."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from service_harness import GOOD_PASS, STEP, Harness, datum, failure, open_service, pass_body
from waiting import wait_until

from mint.engine.fake_engine import POISON_TOKEN, FakeEngine
from mint.engine.protocol import AdamSpec, LossSpec, MicroBatching, PassResult, TrainDatum
from mint.errors import CheckpointError, JournalError, NotFoundError, RecoveryDivergedError, RequestFailedError
from mint.server.store.journal import JOURNAL_FILE, Finish, Journal
from mint.server.store.rows import JobRow, passes_without_effect
from mint.server.worker import snapshots

FORK = multiprocessing.get_context("fork")


def train(harness: Harness, model_id: str, steps: int, *, first_seq: int = 1) -> list[str]:
    """The digest after each step."""
    digests = []
    for step in range(steps):
        seq_id = first_seq + 2 * step
        harness.run("forward_backward", model_id, seq_id, pass_body(datum(1, 2, 3 + step)))
        digests.append(harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"])
    return digests


def reopen(harness: Harness, **options: object) -> Harness:
    """The same session in a new service over the same folder, as after a crash."""
    harness.service.stop()
    return Harness(open_service(harness.service.data_dir, **options), harness.session_id)


def test_an_open_gradient_survives_a_restart(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path / "one"))
    model_id = harness.create_model()
    train(harness, model_id, 3)
    harness.run("forward_backward", model_id, 7, GOOD_PASS)
    harness = reopen(harness)
    interrupted = harness.run("optim_step", model_id, 8, STEP)["state_digest"]
    harness.service.stop()

    other = Harness(open_service(tmp_path / "two"))
    name = other.create_model()
    train(other, name, 3)
    other.run("forward_backward", name, 7, GOOD_PASS)
    assert other.run("optim_step", name, 8, STEP)["state_digest"] == interrupted
    other.service.stop()


def test_a_failed_pass_still_counts_after_a_restart(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    (digest,) = train(harness, model_id, 1)
    failure(lambda: harness.run("forward_backward", model_id, 3, pass_body(datum(1, 2, -3))))
    harness = reopen(harness)
    assert "refused" in str(failure(lambda: harness.run("optim_step", model_id, 4, STEP)))
    assert harness.digest(model_id) == digest
    train(harness, model_id, 1, first_seq=5)
    harness.service.stop()


@pytest.mark.parametrize("damaged", [1, 2], ids=["newest", "two newest"])
@pytest.mark.parametrize("how", ["bit", "cut", "gone"])
def test_a_damaged_snapshot_is_found_and_an_older_one_replayed(tmp_path: Path, damaged: int, how: str) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    digests = train(harness, model_id, 6)
    harness.service.stop()
    newest = sorted((tmp_path / "snapshots").iterdir(), key=lambda path: int(path.stem.split("-")[1]))[-damaged:]
    for path in newest:
        content = path.read_bytes()
        if how == "bit":
            path.write_bytes(content[:-2] + bytes([content[-2] ^ 0x60]) + content[-1:])
        elif how == "cut":
            path.write_bytes(content[:-8])
        else:
            path.unlink()
    harness = Harness(open_service(tmp_path), harness.session_id)
    harness.run("forward_backward", model_id, 13, GOOD_PASS)
    assert harness.digest(model_id) == digests[-1]
    harness.service.stop()


def test_a_model_without_any_good_snapshot_stops_and_the_others_go_on(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    lost, kept = harness.create_model(0), harness.create_model(1, seed=8)
    train(harness, lost, 6)
    digest = train(harness, kept, 6)[-1]
    harness.service.stop()
    journal = Journal(tmp_path / JOURNAL_FILE)
    for row in journal.snapshots(lost):
        (tmp_path / row.file).write_bytes(b"nothing of use")
    journal.close()
    harness = Harness(open_service(tmp_path), harness.session_id)
    first = failure(lambda: harness.run("forward_backward", lost, 13, GOOD_PASS))
    assert isinstance(first, CheckpointError) and first.remedy
    again = failure(lambda: harness.run("forward_backward", lost, 14, GOOD_PASS))
    assert isinstance(again, RecoveryDivergedError)
    harness.run("forward_backward", kept, 13, GOOD_PASS)
    assert harness.digest(kept) == digest
    harness.service.stop()


class OtherSteps(FakeEngine):
    """As if torch had been updated: the same step gives other bits."""

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        return super().optim_step(model_id, AdamSpec(2 * adam.learning_rate, 0.9, 0.9, 1.0, 0.0, 0.0))


class OtherPasses(FakeEngine):
    """The same pass gives other bits."""

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        result = super().forward(model_id, data, loss)
        return PassResult([row * 1.001 for row in result.logprobs], result.metrics)


@pytest.mark.parametrize(("engine", "open_gradient"), [(OtherSteps, False), (OtherSteps, True), (OtherPasses, True)])
def test_a_replay_with_other_bits_stops_the_model_and_names_the_request(
    tmp_path: Path, engine: type[FakeEngine], open_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 0)
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    train(harness, model_id, 2)
    if open_gradient:
        harness.run("forward_backward", model_id, 5, GOOD_PASS)
    harness = reopen(harness, engine=engine())
    error = failure(lambda: harness.run("optim_step", model_id, 6 if open_gradient else 5, STEP))
    assert isinstance(error, RecoveryDivergedError)
    assert "replaying request" in str(error) and error.remedy
    harness.service.stop()


def test_large_states_are_saved_at_intervals_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 1000)
    harness = Harness(open_service(tmp_path, engine=FakeEngine(state_bytes=4000)))
    model_id = harness.create_model()
    digests = train(harness, model_id, 5)
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    harness = reopen(harness, engine=FakeEngine(state_bytes=4000))
    harness.run("forward_backward", model_id, 11, GOOD_PASS)
    assert harness.digest(model_id) == digests[-1]
    harness.service.stop()


def test_three_snapshots_are_kept_and_older_payloads_given_up(harness: Harness) -> None:
    model_id = harness.create_model()
    train(harness, model_id, 6)
    snapshots = harness.service.data_dir / "snapshots"
    wait_until(lambda: len(list(snapshots.iterdir())) == 3)  # files go after the answer is out
    rows = harness.stored(lambda journal: journal.snapshots(model_id))
    assert [row.seq_id for row in rows] == [12, 10, 8]
    names = {str(path.relative_to(harness.service.data_dir)) for path in snapshots.iterdir()}
    assert names == {row.file for row in rows}
    jobs = harness.stored(lambda journal: journal.jobs(model_id, after=-1))
    assert [job.seq_id for job in jobs if job.payload is not None] == [9, 10, 11, 12]
    assert all(job.result is not None for job in jobs)


def test_what_has_failed_leaves_no_payload_and_is_replayed_and_repeated_without_it(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    digest = train(harness, model_id, 1)[-1]
    poisoned = pass_body(datum(1, POISON_TOKEN, 3))
    for seq_id in range(3, 20):  # they make no snapshot
        failure(lambda seq_id=seq_id: harness.run("forward_backward", model_id, seq_id, poisoned))
    error = failure(lambda: harness.run("forward_backward", model_id, 3, poisoned))
    failed = harness.stored(lambda journal: journal.jobs(model_id, after=2))
    assert len(failed) == 17 and {job.payload for job in failed} == {None}
    harness = reopen(harness)
    assert str(failure(lambda: harness.run("forward_backward", model_id, 3, poisoned))) == str(error)
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    harness.service.stop()


def test_results_of_passes_are_kept_until_many_later_requests_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.server.worker.snapshots.RETAINED_RESULTS", 100)
    harness = Harness(open_service(tmp_path))
    model_id, scored = harness.create_model(0), harness.create_model(1)
    train(harness, model_id, 150)
    for seq_id in range(1, 301):
        harness.run("forward", scored, seq_id, {"forward_input": GOOD_PASS["forward_backward_input"]})
    harness.service.stop()
    harness = Harness(open_service(tmp_path), harness.session_id)
    for name, kind in ((model_id, "forward_backward"), (scored, "forward")):
        jobs = harness.stored(lambda journal, name=name: journal.jobs(name, after=0))
        passes = [job for job in jobs if job.kind == kind]
        kept = [job.seq_id for job in passes if job.result is not None]
        assert kept == list(range(kept[0], 301, 2 if name == model_id else 1)) and 137 <= kept[0] <= 201
        assert harness.wait(f"{name}:{kept[0]}")["loss_fn_outputs"]
        error = failure(lambda: harness.wait(f"{name}:1"))  # noqa: B023
        assert isinstance(error, NotFoundError) and "no longer kept" in str(error)
    harness.send("forward_backward", model_id, 1, pass_body(datum(1, 2, 3)))  # known: it does not run again
    assert harness.run("optim_step", model_id, 301, STEP)["metrics"]["step"] == 151.0
    harness.service.stop()


def test_the_results_of_passes_take_a_bounded_space_and_the_newest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.server.worker.snapshots.RETAINED_BYTES", 20_000)
    harness = Harness(open_service(tmp_path))
    trained, scored = harness.create_model(0), harness.create_model(1)
    large = pass_body(datum(*[3] * 100))
    digest = ""
    for step in range(50):
        harness.run("forward_backward", trained, 2 * step + 1, large)
        digest = harness.run("optim_step", trained, 2 * step + 2, STEP)["state_digest"]
        harness.run("forward", scored, step + 1, {"forward_input": large["forward_backward_input"]})
    for name in (trained, scored):
        jobs = harness.stored(lambda journal, name=name: journal.jobs(name, after=0))
        passes = [job for job in jobs if "forward" in job.kind]
        kept = [job for job in passes if job.result is not None]
        assert kept == passes[-len(kept) :] and 3 < len(kept) < 40
        assert sum(len(job.result or b"") for job in kept) <= 20_000
    harness = reopen(harness)
    assert harness.wait(f"{scored}:50")["loss_fn_outputs"]
    assert "no longer kept" in str(failure(lambda: harness.wait(f"{scored}:1")))
    harness.restore(trained)
    assert harness.digest(trained) == digest
    harness.service.stop()


def test_two_processes_share_a_folder_and_only_the_dead_are_taken_over(tmp_path: Path) -> None:
    one, two = Harness(open_service(tmp_path)), Harness(open_service(tmp_path))
    mine, theirs = one.create_model(), two.create_model()
    train(one, mine, 1)
    train(two, theirs, 1)
    error = failure(lambda: Harness(two.service, one.session_id).run("forward_backward", mine, 3, GOOD_PASS))
    assert isinstance(error, NotFoundError) and "another process" in str(error)
    one.service.stop()
    three = open_service(tmp_path)
    Harness(three, one.session_id).run("forward_backward", mine, 3, GOOD_PASS)
    stranger = Harness(three, two.session_id)
    assert isinstance(failure(lambda: stranger.run("forward_backward", theirs, 3, GOOD_PASS)), NotFoundError)
    two.run("forward_backward", theirs, 3, GOOD_PASS)
    two.service.stop()
    three.stop()


class Fragile(Journal):
    """A journal on a disk that is full now and then."""

    broken = threading.Event()
    tried = 0

    def finish_job(self, finish: Finish) -> bool:
        if self.broken.is_set():
            Fragile.tried += 1
            raise JournalError("no space left on device")
        return super().finish_job(finish)


def test_a_server_finds_its_sessions_again_though_a_script_used_the_folder_meanwhile(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path, is_server=True))
    model_id = harness.create_model()
    digest = train(harness, model_id, 2)[-1]
    harness.service.stop()
    script = open_service(tmp_path)
    assert isinstance(failure(lambda: Harness(script, harness.session_id).create_model(1)), NotFoundError)
    script.stop()
    harness = Harness(open_service(tmp_path, is_server=True), harness.session_id)
    harness.run("forward_backward", model_id, 5, GOOD_PASS)
    assert harness.digest(model_id) == digest
    harness.service.stop()


def test_a_full_disk_delays_a_result_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.server.worker.worker.JOURNAL_RETRY_S", 0.05)
    monkeypatch.setattr("mint.server.lost_journal.Journal", Fragile)
    harness = Harness(open_service(tmp_path / "one"))
    model_id = harness.create_model()
    train(harness, model_id, 2)
    monkeypatch.setattr(Fragile, "tried", 0)
    Fragile.broken.set()
    pending = [harness.send("forward_backward", model_id, 5, GOOD_PASS), harness.send("optim_step", model_id, 6, STEP)]
    wait_until(lambda: Fragile.tried >= 3)
    Fragile.broken.clear()
    digest = [harness.wait(request_id) for request_id in pending][1]["state_digest"]
    harness.service.stop()

    other = Harness(open_service(tmp_path / "two"))
    name = other.create_model()
    train(other, name, 2)
    other.run("forward_backward", name, 5, GOOD_PASS)
    assert other.run("optim_step", name, 6, STEP)["state_digest"] == digest
    other.service.stop()


class Breaks(FakeEngine):
    """An engine that fails in the middle of a step."""

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        metrics = super().optim_step(model_id, adam)
        if adam.learning_rate == 0.5:
            raise ZeroDivisionError("in the middle")
        return metrics


def test_an_engine_that_breaks_in_a_step_leaves_the_state_before_it(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path, engine=Breaks()))
    model_id = harness.create_model()
    train(harness, model_id, 1)
    harness.run("forward_backward", model_id, 3, GOOD_PASS)
    error = failure(lambda: harness.run("optim_step", model_id, 4, {"adam_params": {"learning_rate": 0.5}}))
    assert isinstance(error, RequestFailedError) and "ZeroDivisionError" in str(error)
    broken = harness.run("optim_step", model_id, 5, STEP)["state_digest"]
    other = harness.create_model(1)
    train(harness, other, 1)
    harness.run("forward_backward", other, 3, GOOD_PASS)
    assert harness.run("optim_step", other, 4, STEP)["state_digest"] == broken
    harness.service.stop()


class Deadly(FakeEngine):
    """An engine that kills its process."""

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> PassResult:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().forward_backward(model_id, data, loss)


def test_a_request_that_keeps_killing_processes_is_failed_alone(tmp_path: Path) -> None:
    session_id = tmp_path / "session"

    def live_and_die() -> None:
        service = open_service(tmp_path / "data", engine=Deadly())
        if not session_id.exists():
            harness = Harness(service)
            session_id.write_text(harness.session_id)
            harness.send("forward_backward", harness.create_model(), 1, GOOD_PASS)
        threading.Event().wait()  # until the engine's thread has run it

    for _ in range(5):
        child = FORK.Process(target=live_and_die)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    harness = Harness(open_service(tmp_path / "data"), session_id.read_text())
    model_id = f"{harness.session_id}:train:0"
    error = failure(lambda: harness.wait(f"{model_id}:1"))
    assert isinstance(error, RequestFailedError) and "died 5 times" in str(error)
    failure(lambda: harness.run("optim_step", model_id, 2, STEP))
    train(harness, model_id, 1, first_seq=3)
    harness.service.stop()


def test_passes_whose_gradient_a_failed_one_has_cleared_leave_no_payload_and_are_not_replayed(tmp_path: Path) -> None:
    """A client that never steps could fill the disk with them, and a replay has no use for them."""
    harness = Harness(open_service(tmp_path / "one"))
    model_id = harness.create_model()
    train(harness, model_id, 1)
    for seq_id in (3, 4):
        harness.run("forward_backward", model_id, seq_id, GOOD_PASS)
    failure(lambda: harness.run("optim_step", model_id, 5, {"adam_params": {"learning_rate": -1.0}}))
    harness.run("forward_backward", model_id, 6, GOOD_PASS)
    failure(lambda: harness.run("forward_backward", model_id, 7, pass_body(datum(1, 2, -3))))
    harness.run("forward_backward", model_id, 8, GOOD_PASS)
    jobs = harness.stored(lambda journal: journal.jobs(model_id, after=2))
    assert [job.seq_id for job in jobs if job.payload is not None] == [8]
    harness = reopen(harness)
    assert "refused" in str(failure(lambda: harness.run("optim_step", model_id, 9, STEP)))
    after = train(harness, model_id, 1, first_seq=10)
    harness.service.stop()

    other = Harness(open_service(tmp_path / "two"))
    assert train(other, other.create_model(), 1) != after
    assert train(other, other.create_model(1), 2)[0] != after
    other.service.stop()


def test_a_pass_without_a_gradient_leaves_no_payload(harness: Harness) -> None:
    model_id = harness.create_model()
    body = {"forward_input": GOOD_PASS["forward_backward_input"]}
    first = harness.answer(harness.send("forward", model_id, 1, body))
    harness.run("forward_backward", model_id, 2, {**GOOD_PASS, "forward_only": True})
    jobs = harness.stored(lambda journal: journal.jobs(model_id, after=0))
    assert [job.payload for job in jobs] == [None, None]
    assert harness.answer(harness.send("forward", model_id, 1, body)) == first


def test_which_passes_are_without_effect() -> None:
    def jobs(script: str) -> list[JobRow]:
        kinds = {"p": "forward_backward", "s": "optim_step", "l": "load_weights", "m": "missing", "f": "forward"}
        return [
            JobRow("m", seq_id, kinds[letter.lower()], None, "", "failed" if letter.isupper() else "done")
            for seq_id, letter in enumerate(script, 1)
        ]

    for script, cleared in {
        "pps": [],
        "ppP": [1, 2],
        "psP": [],
        "psppPSps": [3, 4],
        "pSpP": [1, 3],  # a step that failed has used nothing
        "plP": [],
        "pLP": [1],
        "pfM": [1],
        "pFs": [],
        "pPp": [1],
    }.items():
        assert sorted(passes_without_effect(jobs(script))) == cleared, script
