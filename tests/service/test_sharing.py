"""Samples and training share the engine: requests join and leave what is sampled, and nobody waits for a stranger.

Whose turn it is depends on how long things take. Here they take what the tests say, on a clock that only the engine
moves, and the engine stands still wherever a test wants to send more: what is asserted is order, never time.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine, torch_engine
from service_harness import GOOD_PASS, STEP, Harness, datum, make_sampler, open_service, pass_body
from waiting import wait_until

from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.engine.protocol import (
    AdamSpec,
    LossSpec,
    MicroBatching,
    PassResult,
    SampleJob,
    SampleResult,
    TokenListener,
    TrainDatum,
)
from mint.server.callers import LOCAL, Caller
from mint.server.queue.queue import RequestQueue
from mint.server.queue.scheduler import Lane

STEP_S = 2.0**-7
PASS_S = 5 * STEP_S  # exact in binary, so that equal shares are equal


class Traced(FakeEngine):
    """Notes all that is done, in order, and stands still after as many passes and steps of samples as it `may_do`."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[str, Any]] = []
        self.now_s = 0.0
        self.pass_s: dict[str, float] = {}
        self.stands_still = self.notes_waits = False
        self._allowed = math.inf
        self._changed = threading.Condition()

    def may_do(self, count: float) -> None:
        with self._changed:
            self._allowed = count
            self._changed.notify_all()

    def take(self, kind: str, what: Any, seconds: float) -> None:
        with self._changed:
            self.stands_still = self._allowed == 0
            self._changed.wait_for(lambda: self._allowed > 0)
            self.stands_still = False
            self._allowed -= 1
        self.now_s += seconds
        self.trace.append((kind, what))

    def count(self, kind: str) -> int:
        return sum(done == kind for done, _ in self.trace)

    def open_batch(self) -> FakeBatch:
        return TracedBatch(self)

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> PassResult:
        self.take("pass", model_id, self.pass_s.get(model_id, PASS_S))
        return super().forward_backward(model_id, data, loss)

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        self.trace.append(("step", model_id))
        return super().optim_step(model_id, adam)


class TracedQueue(RequestQueue):
    """Notes when the worker sleeps, once it is asked to."""

    def __init__(self, engine: Traced) -> None:
        super().__init__()
        self._engine = engine

    def wait(self, timeout_s: float | None, *, lane: Lane = "all") -> None:
        if self._engine.notes_waits:
            self._engine.trace.append(("wait", timeout_s))
        super().wait(timeout_s, lane=lane)


class TracedBatch(FakeBatch):
    def __init__(self, engine: Traced) -> None:
        super().__init__(engine)
        self._engine = engine

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        self._engine.trace.append(("join", key))
        super().add(key, job, listener)

    def step(self) -> dict[str, SampleResult]:
        self._engine.take("sample", len(self.keys), STEP_S)
        return super().step()


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[Harness, Traced]]:
    engine = Traced()
    service = open_service(tmp_path, engine=engine, clock=lambda: engine.now_s, queue=TracedQueue(engine))
    yield Harness(service), engine
    engine.may_do(math.inf)
    service.stop()


def ask(harness: Harness, sampler: str, seq_id: int, *, max_tokens: int, **fields: Any) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": max_tokens, "stop": [], "seed": seq_id},
        **fields,
    }
    return harness.service.sampling.accept(LOCAL, json.dumps(body).encode()).request_id


def tenant(harness: Harness, owner: str, number: int = 0) -> tuple[Caller, str]:
    """A caller with a session and a model."""
    caller = Caller(owner)
    session_id = harness.service.sessions.create(caller, b"{}").session_id
    config = {"rank": 8, "seed": 7}
    body = {"session_id": session_id, "model_seq_id": number, "base_model": "mint/tiny", "lora_config": config}
    return caller, harness.service.training.submit(caller, "create_model", json.dumps(body).encode()).model_id


def send_passes(harness: Harness, who: tuple[Caller, str], count: int) -> None:
    caller, model_id = who
    for seq_id in range(1, count + 1):
        body = {"model_id": model_id, "seq_id": seq_id, **GOOD_PASS}
        harness.service.training.submit(caller, "forward_backward", json.dumps(body).encode())


# --- samples -----------------------------------------------------------------------------------------------------


def test_a_short_request_joins_a_long_one_and_leaves_before_it(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    sampler = make_sampler(harness)
    engine.may_do(1)
    long = ask(harness, sampler, 0, max_tokens=400)
    wait_until(lambda: engine.count("sample") == 1)
    name = ask(harness, sampler, 1, max_tokens=3)
    engine.may_do(4)  # it may have been late for the first of them
    wait_until(lambda: engine.count("sample") == 5)
    assert engine.trace.count(("sample", 2)) == 3
    short = harness.wait(name)
    assert harness.service.sampled_sequences == 1
    harness.service.sampling.cancel(LOCAL, json.dumps({"request_id": long}).encode())
    engine.may_do(math.inf)
    wait_until(lambda: harness.service.sampled_sequences == 0)
    assert engine.count("sample") < 100
    again = ask(harness, sampler, 2, max_tokens=3, sampling_params={"max_tokens": 3, "stop": [], "seed": 1})
    assert harness.wait(again)["sequences"] == short["sequences"]


def test_what_is_sampled_is_the_same_alone_and_beside_others(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    sampler = make_sampler(harness)
    names = []
    for seq_id in range(12):
        engine.may_do(1)
        names.append(ask(harness, sampler, seq_id, max_tokens=4 + seq_id % 3, num_samples=1 + seq_id % 2))
        wait_until(lambda seq_id=seq_id: engine.count("sample") > seq_id)
    engine.may_do(math.inf)
    together = [harness.wait(name)["sequences"] for name in names]
    assert max(rows for kind, rows in engine.trace if kind == "sample") > 3
    for seq_id, expected in enumerate(together):
        again = ask(
            harness, make_sampler(harness, 1 + seq_id), seq_id, max_tokens=4 + seq_id % 3, num_samples=1 + seq_id % 2
        )
        assert harness.wait(again)["sequences"] == expected


def test_the_end_of_a_session_ends_what_it_has_under_way(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    other = Harness(harness.service)
    engine.may_do(1)
    ask(other, make_sampler(other), 0, max_tokens=500)
    wait_until(lambda: engine.count("sample") == 1)
    harness.service.sessions.finish(LOCAL, other.session_id)
    engine.may_do(math.inf)
    wait_until(lambda: harness.service.sampled_sequences == 0)
    assert engine.count("sample") <= 3
    assert harness.wait(ask(harness, make_sampler(harness), 0, max_tokens=2))["sequences"]


# --- beside training ---------------------------------------------------------------------------------------------


def test_samples_and_training_both_go_on(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    model_id = harness.create_model()
    engine.may_do(0)
    passes = [harness.send("forward_backward", model_id, seq_id, GOOD_PASS) for seq_id in range(1, 21)]
    long = ask(harness, make_sampler(harness), 0, max_tokens=60)
    engine.may_do(math.inf)
    for name in [*passes, long]:
        harness.wait(name)
    kinds = [kind for kind, _ in engine.trace if kind != "join"]
    first, last = kinds.index("sample"), len(kinds) - 1 - kinds[::-1].index("sample")
    shared = kinds[first:last]
    assert shared.count("pass") * PASS_S == pytest.approx(shared.count("sample") * STEP_S, rel=0.1), kinds
    training = max(len(run) for run in "".join(kind[0] for kind in kinds[: last + 1]).split("s"))
    sampling = max(len(run) for run in "".join(kind[0] for kind in shared).split("p"))
    assert training <= 4 and sampling <= 6, "one of them ran for long while the other waited"


def test_one_tenants_queue_does_not_hold_up_anothers_single_request(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    ann, bob = tenant(harness, "ann"), tenant(harness, "bob")
    engine.may_do(3)
    send_passes(harness, ann, 30)
    wait_until(lambda: engine.count("pass") == 3)
    send_passes(harness, bob, 1)
    engine.may_do(2)  # the next of hers may have been chosen already
    wait_until(lambda: engine.count("pass") == 5)
    assert ("pass", bob[1]) in engine.trace


def test_a_pass_and_the_step_behind_it_run_without_a_pause(traced: tuple[Harness, Traced]) -> None:
    """Both are queued: nothing is asked of the client in between, and the engine's thread waits for nothing."""
    harness, engine = traced
    model_id = harness.create_model()
    engine.may_do(0)
    names = [harness.send("forward_backward", model_id, 1, GOOD_PASS)]
    wait_until(lambda: engine.stands_still)
    engine.notes_waits = True
    names.append(harness.send("optim_step", model_id, 2, STEP))
    for seq_id in range(3, 21, 2):
        names.append(harness.send("forward_backward", model_id, seq_id, GOOD_PASS))
        names.append(harness.send("optim_step", model_id, seq_id + 1, STEP))
    engine.may_do(math.inf)
    for name in names:
        harness.wait(name)
    kinds = [kind for kind, _ in engine.trace]
    assert kinds[: len(names)] == ["pass", "step"] * 10


def test_samples_that_are_under_way_see_one_version_of_the_weights(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    model_id = harness.create_model()
    sampler = harness.run("save_weights_for_sampler", model_id, 1, {"sampling_session_seq_id": 0})[
        "sampling_session_id"
    ]
    engine.may_do(1)
    under_way = ask(harness, sampler, 3, max_tokens=50)
    wait_until(lambda: engine.count("sample") == 1)
    for seq_id in range(2, 10, 2):
        harness.send("forward_backward", model_id, seq_id, pass_body(datum(1, 2, 3 + seq_id)))
        harness.send("optim_step", model_id, seq_id + 1, STEP)
    engine.may_do(math.inf)
    beside = harness.wait(under_way)["sequences"]
    kinds = [kind for kind, _ in engine.trace]
    assert kinds.index("sample") < kinds.index("step") and kinds[-1] == "sample" and kinds.count("step") == 4
    again = ask(harness, sampler, 4, max_tokens=50, sampling_params={"max_tokens": 50, "stop": [], "seed": 3})
    assert harness.wait(again)["sequences"] == beside


# --- many tenants ------------------------------------------------------------------------------------------------


def rounds(harness: Harness, number: int, steps: int) -> list[str]:
    """A tenant's loop of passes, steps and samples: the digests it saw."""
    model_id = harness.create_model(seed=number)
    digests = []
    for step in range(steps):
        first = 4 * step + 1
        published = harness.run("save_weights_for_sampler", model_id, first, {"sampling_session_seq_id": step})
        drawn = harness.sample(published["sampling_session_id"], 0, num_samples=2, params={"max_tokens": 4, "stop": []})
        data = [datum(1 + number, *sequence["tokens"]) for sequence in drawn["sequences"]]
        one = harness.send("forward_backward", model_id, first + 1, pass_body(*data))
        two = harness.send("forward_backward", model_id, first + 2, pass_body(datum(1, 2, 3 + number)))
        harness.wait(one), harness.wait(two)
        digests.append(harness.run("optim_step", model_id, first + 3, STEP)["state_digest"])
    return digests


@pytest.mark.parametrize("kind", ["fake", "torch"])
def test_eight_tenants_at_once_get_the_bits_that_each_gets_alone(tmp_path: Path, kind: str) -> None:
    engine = fake_engine() if kind == "fake" else torch_engine(threads=1, device="cpu")
    steps = 3 if kind == "fake" else 2
    alone = {}
    service = open_service(tmp_path / "alone", engine=engine)
    for number in (0, 3, 7) if kind == "fake" else (0, 3):
        alone[number] = rounds(Harness(service), number, steps)
    service.stop()
    together: dict[int, list[str]] = {}
    service = open_service(tmp_path / "together", engine=engine)
    harnesses = [Harness(service) for _ in range(8)]
    threads = [
        threading.Thread(
            target=lambda number=number: together.update({number: rounds(harnesses[number], number, steps)})
        )
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.stop()
    assert {number: together[number] for number in alone} == alone


@pytest.mark.parametrize("are_owners", [True, False], ids=["eight owners", "eight models of one owner"])
@pytest.mark.parametrize("costs", [(1,), (1, 3)], ids=["equal passes", "some three times as long"])
def test_eight_tenants_that_queue_at_once_get_equal_shares_all_along(
    traced: tuple[Harness, Traced], costs: tuple[int, ...], are_owners: bool
) -> None:
    """Whoever sent first and whoever sends larger passes: nobody is ever ahead of another by more than one of them."""
    harness, engine = traced
    first = tenant(harness, "first")
    tenants = [tenant(harness, f"tenant{number}" if are_owners else "one", number) for number in range(8)]
    for number, (_, model_id) in enumerate(tenants):
        wait_until(lambda model_id=model_id: engine.has_model(model_id))
        engine.pass_s[model_id] = costs[number % len(costs)] * PASS_S
    engine.may_do(0)
    send_passes(harness, first, 1)
    for who in tenants:
        send_passes(harness, who, 12)
    engine.may_do(math.inf)
    wait_until(lambda: engine.count("pass") == 1 + 8 * 12)
    done = dict.fromkeys((model_id for _, model_id in tenants), 0)
    order = [model_id for kind, model_id in engine.trace if model_id in done]
    while max(done.values()) < 12:  # all have some left
        done[order[sum(done.values())]] += 1
        had = [engine.pass_s[model_id] * passes for model_id, passes in done.items()]
        assert max(had) - min(had) <= max(costs) * PASS_S, order
