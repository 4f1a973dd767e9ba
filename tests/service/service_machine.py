"""A state machine of two owners and one service, for hypothesis: what each of them is told must be the reference's.

Its rules submit in any order, repeat, leave gaps, send other bodies, sample, cancel, save, load, end sessions, act as
the other owner, restart and crash. A crash leaves what `kill -9` or a loss of power would leave at some moment: the
next service opens a copy of the data directory, made at that moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from reference_model import CONTEXT_LENGTH, Expected, Operation, Reference, mismatch
from service_harness import BASE, stored

from mint import wire
from mint.chaos.power_loss import Disk
from mint.engine.fake_engine import POISON_TOKEN, FakeEngine
from mint.errors import ConflictError, MintError, NotFoundError, RequestCancelledError, SessionEndedError, from_wire
from mint.server.callers import Caller
from mint.server.ids import sample_seed, seed_root
from mint.server.queue.futures import FutureResult
from mint.server.queue.scheduler import GAP_TIMEOUT_S
from mint.server.service import takeover
from mint.server.service.service import Service
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import snapshot_policy, snapshots
from mint.server.worker.trainer import Trainer
from mint.types import ForwardBackwardOutput, SampleResponse

OWNERS = ("alice", "bob")
PATIENCE_S = 120.0
LARGE_STATE_BYTES = 4_000

CRASH_POINTS: list[tuple[Any, str, bool]] = [
    (Journal, "add_job", True),
    (Journal, "finish_job", False),
    (Journal, "finish_job", True),
    (Trainer, "run", False),
    (Trainer, "run", True),
    (snapshots, "write_snapshot", False),
    (snapshots, "write_snapshot", True),
    (Journal, "give_up", True),
]
"""Owner and name of a function, and whether the crash comes after it (else before)."""

REAL_FSYNC = os.fsync
TOKENS = st.integers(1, 40).map(lambda token: token + (token == POISON_TOKEN))
GOOD_PASS = st.lists(TOKENS, min_size=2, max_size=4).map(tuple)
NAMES = st.sampled_from(["a", "b", "c"])

PASSES = st.builds(Operation, st.just("forward_backward"), tokens=GOOD_PASS)
STEPS = st.builds(Operation, st.just("optim_step"), learning_rate=st.sampled_from([0.001, 0.1]))
FAILURES = st.sampled_from(
    [
        Operation("forward_backward", tokens=(1, POISON_TOKEN, 3)),
        Operation("forward_backward", tokens=(1, 2, -3)),
        Operation("forward", tokens=(1, POISON_TOKEN, 3)),
        Operation("optim_step", learning_rate=-1.0),
        Operation("load_weights", path="tinker://MODEL/weights/nothing"),
    ]
)
OTHERS = st.one_of(
    st.builds(Operation, st.just("forward"), tokens=GOOD_PASS),
    st.builds(Operation, st.just("save_weights"), name=NAMES),
    st.builds(Operation, st.just("save_weights"), name=st.just("latest"), flag=st.just(True)),
    st.builds(Operation, st.just("save_weights_for_sampler")),
    st.builds(
        Operation,
        st.just("load_weights"),
        path=st.sampled_from(["a", "b", "c", "latest"]).map("tinker://MODEL/weights/{}".format),
        flag=st.booleans(),
    ),
)
OPERATIONS = st.one_of(PASSES, PASSES, STEPS, STEPS, OTHERS, OTHERS, FAILURES)


@dataclass
class Training:
    """One model, as its client knows it. Lists are by the number of the request; 0 created the model."""

    owner: str
    session_id: str
    model_id: str
    operations: list[Operation] = field(default_factory=lambda: [Operation("create_model")])
    missing: set[int] = field(default_factory=set)
    """Numbers that later requests already wait for."""
    given_up: set[int] = field(default_factory=set)
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return len(self.operations) - 1

    def add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return self.last


class ServiceMachine(RuleBasedStateMachine):
    """Opens a service in a folder of its own, and checks all results at its end at the latest."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.runner = asyncio.Runner()
        self.reference = Reference()
        self.trainings: list[Training] = []
        self.ended: list[Training] = []
        self.sessions: dict[str, str] = {}  # owner → session
        self.samplers: dict[str, list[tuple[str, str]]] = {owner: [] for owner in OWNERS}  # session, sampler
        self.seeds: dict[str, int] = {}  # of the models that samplers were made from
        self.counter = 0
        self.lives = 0
        self.late_s = 0.0
        self.is_broken = False  # a wrong result was found already, so the reference is no longer in step
        self.acknowledged: set[str] = set()
        self.sending = threading.RLock()  # nothing is accepted while a crash's copy is made
        self.restore: list[tuple[Any, str, Any]] = []

    # --- the service and its ends ---------------------------------------------------------------------------------

    @initialize(power=st.sampled_from([False, False, True]), large=st.booleans(), often=st.booleans())
    def begin(self, power: bool, large: bool, often: bool) -> None:
        """`power`: crashes are losses of power. `large`: states are written on the disk's thread."""
        self.power = power
        self.state_bytes = LARGE_STATE_BYTES if large else 0
        self.replace(snapshots, "SMALL_STATE_BYTES", 100 if large else snapshots.SMALL_STATE_BYTES)
        self.replace(takeover, "MAX_ATTEMPTS", 10**6)  # crashes here are no fault of the request
        if often:
            self.replace(snapshot_policy, "LARGE_INTERVAL_S", 0.0)
            self.replace(snapshot_policy, "MAX_SHARE", float("inf"))
        self.open(self.folder / "data0")
        for owner in OWNERS:
            self.open_session(owner)
            self.create_model(owner)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.restore.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def open(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        os.fsync = REAL_FSYNC
        if self.power:
            self.disk = Disk(data_dir, lambda fsync: setattr(os, "fsync", fsync))
        engine = FakeEngine(context_length=CONTEXT_LENGTH, state_bytes=self.state_bytes)
        self.service = Service(engine, data_dir, aliases={}, clock=lambda: time.monotonic() + self.late_s)
        self.engine = engine
        self.service.start()

    def leave(self, folder: Path) -> None:
        """A copy of the data directory as a crash at this moment leaves it."""
        if self.power:
            self.disk.after_power_loss(folder)
            return
        while True:  # until files and journal are of one moment: nothing was committed during the copy
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            before = self.journal_stamp()
            with suppress(shutil.Error):  # a file went meanwhile, behind the commit that dropped it
                shutil.copytree(self.data_dir, folder, ignore=shutil.ignore_patterns("*-shm"), dirs_exist_ok=True)
                if self.journal_stamp() == before:
                    return

    def journal_stamp(self) -> dict[str, tuple[int, int]]:
        """Changes with every commit."""
        states = {path.name: path.stat() for path in self.data_dir.glob(f"{JOURNAL_FILE}*")}
        return {name: (state.st_size, state.st_mtime_ns) for name, state in states.items() if "-shm" not in name}

    def open_session(self, owner: str) -> None:
        self.sessions[owner] = self.service.sessions.create(Caller(owner), b"{}").session_id
        self.samplers[owner] = []

    # --- talking to it --------------------------------------------------------------------------------------------

    def submit(self, owner: str, kind: str, body: dict[str, Any]) -> str:
        with self.sending:
            name = self.service.training.submit(Caller(owner), kind, json.dumps(body).encode()).request_id
            self.acknowledged.add(name)
        return name

    def send(self, training: Training, seq_id: int) -> str:
        operation = training.operations[seq_id]
        if seq_id == 0:
            number = int(training.model_id.rpartition(":")[2])
            lora = {"rank": 4, "seed": number}
            place = {"session_id": training.session_id, "model_seq_id": number, "base_model": BASE}
            return self.submit(training.owner, "create_model", {**place, "lora_config": lora})
        body = {"model_id": training.model_id, "seq_id": seq_id, **operation.body()}
        if operation.kind == "load_weights":
            body["path"] = operation.path.replace("MODEL", training.model_id)
        name = self.submit(training.owner, operation.kind, body)
        assert name == f"{training.model_id}:{seq_id}"
        return name

    def answer(self, owner: str, name: str) -> FutureResult:
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            found = self.runner.run(self.service.results.retrieve(Caller(owner), name))
            if found is not None:
                return found
        raise AssertionError(f"{name} has no result")

    def refusal(self, call: Callable[[], object]) -> MintError:
        try:
            call()
        except MintError as error:
            return error
        raise AssertionError("nothing was raised")

    def draw_training(self, data: st.DataObject) -> Training:
        return data.draw(st.sampled_from(self.trainings), "training")

    # --- rules ----------------------------------------------------------------------------------------------------

    def create_model(self, owner: str) -> None:
        self.counter += 1
        session_id = self.sessions[owner]
        training = Training(owner, session_id, f"{session_id}:train:{self.counter}")
        self.trainings.append(training)
        self.reference.create(training.model_id, seed=self.counter, rank=4)
        self.send(training, 0)

    @rule(owner=st.sampled_from(OWNERS))
    def create_another_model(self, owner: str) -> None:
        if sum(each.owner == owner for each in self.trainings) < 3:
            self.create_model(owner)

    @rule(data=st.data(), operations=st.lists(OPERATIONS, min_size=1, max_size=5))
    def send_some(self, data: st.DataObject, operations: list[Operation]) -> None:
        """In any order, some of them twice."""
        training = self.draw_training(data)
        numbers = [training.add(self.numbered(operation)) for operation in operations]
        copies = data.draw(st.lists(st.sampled_from(numbers), max_size=2), "copies")
        for seq_id in data.draw(st.permutations([*numbers, *copies]), "order"):
            self.send(training, seq_id)

    def numbered(self, operation: Operation) -> Operation:
        if operation.kind != "save_weights_for_sampler":
            return operation
        self.counter += 1
        return Operation(operation.kind, number=self.counter)

    @rule(data=st.data(), operation=OPERATIONS, held_back=OPERATIONS)
    def leave_a_gap(self, data: st.DataObject, operation: Operation, held_back: Operation) -> None:
        training = self.draw_training(data)
        training.missing.add(training.add(self.numbered(held_back)))
        name = self.send(training, training.add(self.numbered(operation)))
        assert self.service.futures.fingerprint(name) is not None

    @rule(data=st.data())
    def fill_gaps(self, data: st.DataObject) -> None:
        self.fill(self.draw_training(data))

    def fill(self, training: Training) -> None:
        for seq_id in sorted(training.missing, reverse=True):
            self.send(training, seq_id)
        training.missing.clear()

    @rule()
    def let_gaps_expire(self) -> None:
        """What never arrives is given up, with all that waits behind it."""
        if not any(training.missing for training in self.trainings):
            return
        for training in self.trainings:
            self.collect(training)
        self.late_s = GAP_TIMEOUT_S + 1
        for training in self.trainings:
            if training.missing:
                waiting = range(min(training.missing), len(training.operations))
                training.given_up |= set(waiting)
                self.service.call_soon(lambda: None)
                self.answer(training.owner, f"{training.model_id}:{training.last}")
        self.late_s = 0.0
        for training in self.trainings:
            # the late arrival of a request that was given up changes nothing
            late, training.missing = sorted(training.missing), set()
            for seq_id in late:
                self.send(training, seq_id)
            self.collect(training)

    @rule(data=st.data())
    def collect_some(self, data: st.DataObject) -> None:
        self.collect(self.draw_training(data))

    def collect(self, training: Training) -> None:
        """Every result so far, in order, must be the reference's; those known from before have the same bytes."""
        end = min(training.missing, default=len(training.operations))
        for seq_id in range(end):
            body = self.answer(training.owner, f"{training.model_id}:{seq_id}").body
            if seq_id not in training.results:
                self.check(training, seq_id, body)
            assert training.results.setdefault(seq_id, body) == body

    def check(self, training: Training, seq_id: int, body: bytes) -> None:
        operation = training.operations[seq_id]
        if seq_id == 0:
            expected = Expected()
        elif seq_id in training.given_up:
            kind = "missing" if self.journal_kind(training, seq_id) == "missing" else operation.kind
            expected = self.reference.give_up(training.model_id, [kind])
        else:
            expected = self.reference.apply(training.owner, training.model_id, operation)
        error = wire.decode_error(body)
        result = {} if error is not None else json.loads(wire.result_as_json(body, ForwardBackwardOutput))
        failed = None if error is None else from_wire(error)
        difference = mismatch(expected, failed, result)
        self.is_broken = difference != ""
        assert difference == "", f"request {seq_id} of {training.model_id}, {operation}: {difference}"
        if expected.sampler_id is not None:
            self.samplers[training.owner].append((training.session_id, expected.sampler_id))
            self.seeds[expected.sampler_id] = int(training.model_id.rpartition(":")[2])

    def journal_kind(self, training: Training, seq_id: int) -> str:
        row = stored(self.service.data_dir, lambda journal: journal.job(training.model_id, seq_id))
        assert row is not None
        return row.kind

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        training = self.draw_training(data)
        seq_id = data.draw(st.integers(0, training.last), "seq_id")
        if seq_id not in training.missing:
            self.send(training, seq_id)

    @rule(data=st.data(), operation=OPERATIONS)
    def send_another_body(self, data: st.DataObject, operation: Operation) -> None:
        training = self.draw_training(data)
        taken = set(range(1, training.last + 1)) - training.missing - training.given_up
        if taken:
            seq_id = data.draw(st.sampled_from(sorted(taken)), "seq_id")
            body = {"model_id": training.model_id, "seq_id": seq_id, **operation.body(), "tags": ["other"]}
            body["adam_params"] = {"learning_rate": 0.7}
            error = self.refusal(lambda: self.submit(training.owner, "optim_step", body))
            assert isinstance(error, ConflictError), error

    @rule(data=st.data(), other_session=st.booleans(), optimizer=st.booleans())
    def load_of_another_model(self, data: st.DataObject, other_session: bool, optimizer: bool) -> None:
        """Own checkpoints of all models and sessions, ended ones too, and those of the other owner."""
        training = self.draw_training(data)
        for each in self.trainings:
            self.collect(each)
        paths = sorted(path for path in self.reference.checkpoints if "latest" not in path)
        if paths:
            path = data.draw(st.sampled_from(paths), "path")
            self.send(training, training.add(Operation("load_weights", path=path, flag=optimizer)))

    @rule(
        data=st.data(),
        owner=st.sampled_from(OWNERS),
        seed=st.none() | st.integers(0, 9),
        ended=st.sampled_from(["", "", "cancel", "crash"]),
    )
    def sample(self, data: st.DataObject, owner: str, seed: int | None, ended: str) -> None:
        for training in self.trainings:
            self.collect(training)
        if not self.samplers[owner]:
            return
        _, sampler = data.draw(st.sampled_from(self.samplers[owner]), "sampler")
        self.counter += 1
        prompt, body = [5, 6], {"sampling_session_id": sampler, "seq_id": self.counter, "num_samples": 1}
        body |= {"prompt": {"chunks": [{"tokens": prompt}]}, "sampling_params": {"max_tokens": 3, "seed": seed}}
        send = lambda: self.service.sampling.accept(Caller(owner), json.dumps(body).encode()).request_id  # noqa: E731
        go_on = threading.Event()
        if ended == "cancel":
            self.service.call_soon(lambda: go_on.wait(PATIENCE_S) and None)
        name = send()
        assert send() == name
        stranger = OWNERS[owner == OWNERS[0]]
        cancel = json.dumps({"request_id": name}).encode()
        error = self.refusal(lambda: self.service.sampling.cancel(Caller(stranger), cancel))
        assert isinstance(error, NotFoundError)
        if ended == "cancel":
            self.service.sampling.cancel(Caller(owner), cancel)
            go_on.set()
        if ended == "crash":
            self.crash_now()
            send()
        answer = self.answer(owner, name)
        error = wire.decode_error(answer.body)
        if ended == "cancel":
            assert error is not None and isinstance(from_wire(error), RequestCancelledError)
        else:
            assert error is None, error
            tokens = wire.decode_result(SampleResponse, answer.body).sequences[0].tokens
            drawn = self.seed_of(sampler, self.counter) if seed is None else seed
            assert list(tokens) == self.reference.sample(sampler, prompt, max_tokens=3, seed=drawn)

    def seed_of(self, sampler: str, seq_id: int) -> int:
        """That of a sample request without a seed: it follows from the seed of its model, and from the numbers."""
        return sample_seed(seed_root(self.seeds[sampler], int(sampler.rpartition(":")[2])), seq_id)

    @rule(data=st.data(), operation=OPERATIONS)
    def act_as_the_other_owner(self, data: st.DataObject, operation: Operation) -> None:
        training = self.draw_training(data)
        stranger = OWNERS[training.owner == OWNERS[0]]
        caller, model_id, session_id = Caller(stranger), training.model_id, training.session_id
        place = {"model_id": model_id, "seq_id": training.last + 1}
        model_named = json.dumps({"model_id": model_id}).encode()
        session_named = json.dumps({"session_id": session_id}).encode()
        calls: list[Callable[[], object]] = [
            lambda: self.submit(stranger, operation.kind, {**operation.body(), **place}),
            lambda: self.submit(
                stranger, "create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}
            ),
            lambda: self.answer(stranger, f"{model_id}:{data.draw(st.integers(0, training.last), 'number')}"),
            lambda: self.service.training.get_info(caller, model_named),
            lambda: self.service.sessions.heartbeat(caller, session_named),
            lambda: self.service.sessions.finish(caller, session_id),
            lambda: self.service.sessions.unload_model(caller, model_id),
        ]
        for _, sampler in self.samplers[training.owner]:
            calls.append(lambda sampler=sampler: self.service.sampling_sessions.info(caller, sampler))
        for path, (saved_by, _) in self.reference.checkpoints.items():
            if saved_by != stranger:
                body = json.dumps({"tinker_path": path}).encode()
                calls.append(lambda body=body: self.service.weights_info(caller, body))
        for call in calls:
            error = self.refusal(call)
            assert isinstance(error, NotFoundError), error
        own = {each.model_id for each in self.trainings if each.owner == stranger}
        assert {row.model_id for row in self.service.training.live_models(caller).models} == own

    @rule(owner=st.sampled_from(OWNERS))
    def end_the_session_and_open_another(self, owner: str) -> None:
        session_id = self.sessions[owner]
        ended = [training for training in self.trainings if training.owner == owner]
        for training in ended:
            self.collect(training)
        self.service.sessions.finish(Caller(owner), session_id)
        self.trainings = [training for training in self.trainings if training.owner != owner]
        self.ended += ended
        self.open_session(owner)
        self.create_model(owner)

    @rule(data=st.data())
    def ask_for_an_ended_model(self, data: st.DataObject) -> None:
        if self.ended:
            training = data.draw(st.sampled_from(self.ended), "ended")
            name = f"{training.model_id}:{training.last}"
            calls = [lambda: self.answer(training.owner, name), lambda: self.send(training, training.last)]
            assert all(isinstance(self.refusal(call), SessionEndedError) for call in calls)

    @rule()
    def restart(self) -> None:
        self.service.stop()
        self.open(self.data_dir)

    @rule()
    def crash_now(self) -> None:
        self.crash(lambda: None, None, 0)

    @rule(
        data=st.data(),
        operations=st.lists(OPERATIONS, min_size=2, max_size=6),
        point=st.sampled_from(CRASH_POINTS),
        hit=st.integers(1, 3),
    )
    def crash_at(
        self, data: st.DataObject, operations: list[Operation], point: tuple[Any, str, bool], hit: int
    ) -> None:
        """A crash while requests arrive and run; what was not acknowledged by then is sent again."""
        training = self.draw_training(data)
        numbers = [training.add(self.numbered(operation)) for operation in operations]
        order = data.draw(st.permutations(numbers), "order")
        end = min(training.missing, default=training.last + 1)

        def work() -> None:
            for seq_id in order:
                self.send(training, seq_id)
            self.answer(training.owner, f"{training.model_id}:{end - 1}")

        known = self.crash(work, point, hit)
        for seq_id in numbers:
            name = f"{training.model_id}:{seq_id}"
            if name in known:
                found = stored(
                    self.service.data_dir, lambda journal, seq_id=seq_id: journal.job(training.model_id, seq_id)
                )
                assert found is not None, f"{name} is lost"
            else:
                self.send(training, seq_id)

    def crash(self, work: Callable[[], None], point: tuple[Any, str, bool] | None, hit: int) -> set[str]:
        """The requests that were acknowledged before the crash. A point that is not reached is one after the work."""
        self.lives += 1
        found = self.folder / f"data{self.lives}"
        known: list[set[str]] = []
        hits = [0]

        def strike() -> None:
            with self.sending:
                known.append(set(self.acknowledged))
                self.leave(found)

        def count() -> None:
            hits[0] += 1
            if hits[0] == hit:
                strike()

        if point is not None:
            owner, name, after = point
            original = getattr(owner, name)

            def counted(*arguments: Any, **named: Any) -> Any:
                if not after:
                    count()
                result = original(*arguments, **named)
                if after:
                    count()
                return result

            setattr(owner, name, counted)
        try:
            work()
            if not known:
                hits[0] = hit  # a late hit strikes no more
                strike()
        finally:
            if point is not None:
                setattr(owner, name, original)
        self.acknowledged = known[0]
        os.fsync = REAL_FSYNC
        self.service.stop()
        before = self.data_dir
        self.open(found)
        shutil.rmtree(before)
        return known[0]

    # --- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Fills all gaps; then every accepted request has one result, the reference's, and the states are the same."""
        try:
            for training in [] if self.is_broken else self.trainings:
                self.fill(training)
                self.collect(training)
                model_id = training.model_id
                jobs = stored(self.service.data_dir, lambda journal, name=model_id: journal.jobs(name, after=-1))
                assert [job.seq_id for job in jobs] == list(range(len(training.operations)))
                assert {job.status for job in jobs} <= {"done", "failed"}
                self.send(training, training.add(Operation("forward", tokens=(1, 2))))  # restores it
                self.collect(training)
                assert self.engine.state_digest(training.model_id) == self.reference.digest(training.model_id)
        finally:
            os.fsync = REAL_FSYNC
            for owner, name, value in reversed(self.restore):
                setattr(owner, name, value)
            if hasattr(self, "service"):
                self.service.stop()
            self.runner.close()
            shutil.rmtree(self.folder, ignore_errors=True)
