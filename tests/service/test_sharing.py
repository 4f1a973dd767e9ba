"""Samples and training share the engine: requests join and leave what is sampled, and nobody waits for a stranger."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import GOOD_PASS, STEP, Harness, datum, make_sampler, open_service, pass_body

from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.engine.protocol import AdamSpec, LossSpec, PassResult, SampleJob, SampleResult, TokenListener, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.server.callers import LOCAL, Caller

STEP_S = 0.01


class Traced(FakeEngine):
    """Takes `STEP_S` for each step of samples, and notes all that is done, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[str, Any]] = []
        self.times: list[tuple[float, float]] = []

    def open_batch(self) -> FakeBatch:
        return TracedBatch(self)

    def forward_backward(self, model_id: str, data: list[TrainDatum], loss: LossSpec) -> PassResult:
        began = time.monotonic()
        time.sleep(5 * STEP_S)
        self.trace.append(("pass", model_id))
        result = super().forward_backward(model_id, data, loss)
        self.times.append((began, time.monotonic()))
        return result

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        began = time.monotonic()
        self.trace.append(("step", model_id))
        result = super().optim_step(model_id, adam)
        self.times.append((began, time.monotonic()))
        return result


class TracedBatch(FakeBatch):
    def __init__(self, engine: Traced) -> None:
        super().__init__(engine._chain_of, engine._vocab_size)
        self._trace = engine.trace

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        self._trace.append(("join", key))
        super().add(key, job, listener)

    def step(self) -> dict[str, SampleResult]:
        time.sleep(STEP_S)
        self._trace.append(("sample", len(self.keys)))
        return super().step()


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[Harness, Traced]]:
    engine = Traced()
    service = open_service(tmp_path, engine=engine)
    yield Harness(service), engine
    service.stop()


def ask(harness: Harness, sampler: str, seq_id: int, *, max_tokens: int, **fields: Any) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": max_tokens, "stop": [], "seed": seq_id},
        **fields,
    }
    return harness.service.sample(LOCAL, json.dumps(body).encode()).request_id


def wait_until(reached: Any) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(STEP_S / 10)


# --- samples -----------------------------------------------------------------------------------------------------


def test_a_short_request_joins_a_long_one_and_leaves_before_it(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    sampler = make_sampler(harness)
    long = ask(harness, sampler, 0, max_tokens=400)
    wait_until(lambda: ("sample", 1) in engine.trace)
    began = time.monotonic()
    short = harness.wait(ask(harness, sampler, 1, max_tokens=3))
    assert time.monotonic() - began < 100 * STEP_S
    assert ("sample", 2) in engine.trace and harness.service.sampled_rows == 1
    harness.service.cancel(LOCAL, json.dumps({"request_id": long}).encode())
    wait_until(lambda: harness.service.sampled_rows == 0)
    assert (
        harness.wait(ask(harness, sampler, 2, max_tokens=3, sampling_params={"max_tokens": 3, "stop": [], "seed": 1}))[
            "sequences"
        ]
        == short["sequences"]
    )


def test_what_is_sampled_is_the_same_alone_and_beside_others(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    sampler = make_sampler(harness)
    names = []
    for seq_id in range(12):
        names.append(ask(harness, sampler, seq_id, max_tokens=4 + seq_id % 3, num_samples=1 + seq_id % 2))
        time.sleep(STEP_S / 2)
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
    ask(other, make_sampler(other), 0, max_tokens=500)
    wait_until(lambda: ("sample", 1) in engine.trace)
    harness.service.finish_session(LOCAL, other.session_id)
    wait_until(lambda: harness.service.sampled_rows == 0)
    assert harness.wait(ask(harness, make_sampler(harness), 0, max_tokens=2))["sequences"]


# --- beside training ---------------------------------------------------------------------------------------------


def test_samples_and_training_both_go_on(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    model_id = harness.create_model()
    passes = [harness.send("forward_backward", model_id, seq_id, GOOD_PASS) for seq_id in range(1, 21)]
    long = ask(harness, make_sampler(harness), 0, max_tokens=60)
    for name in [*passes, long]:
        harness.wait(name)
    kinds = [kind for kind, _ in engine.trace]
    first, last = kinds.index("sample"), len(kinds) - 1 - kinds[::-1].index("pass")
    shared = kinds[first:last]
    steps, trained = shared.count("sample"), shared.count("pass")
    assert trained and 0.4 < steps * STEP_S / (trained * 5 * STEP_S) < 2.5, kinds
    longest = max(len(run) for run in "".join("t" if kind == "pass" else "s" for kind in shared).split("s"))
    assert longest <= 4, "training ran for long while samples waited"


def test_one_tenants_queue_does_not_hold_up_anothers_single_request(traced: tuple[Harness, Traced]) -> None:
    busy, engine = traced
    ann, bob = Caller("ann"), Caller("bob")
    sessions = {caller.owner: busy.service.create_session(caller, b"{}").session_id for caller in (ann, bob)}
    models = {}
    for caller in (ann, bob):
        body = {"session_id": sessions[caller.owner], "model_seq_id": 0, "base_model": "mint/tiny",
                "lora_config": {"rank": 8, "seed": 7}}  # fmt: skip
        models[caller.owner] = busy.service.submit(caller, "create_model", json.dumps(body).encode()).model_id
    for seq_id in range(1, 31):
        body = {"model_id": models["ann"], "seq_id": seq_id, **GOOD_PASS}
        busy.service.submit(ann, "forward_backward", json.dumps(body).encode())
    wait_until(lambda: ("pass", models["ann"]) in engine.trace)
    body = {"model_id": models["bob"], "seq_id": 1, **GOOD_PASS}
    busy.service.submit(bob, "forward_backward", json.dumps(body).encode())
    sent_at = len(engine.trace)
    wait_until(lambda: ("pass", models["bob"]) in engine.trace)
    assert engine.trace.index(("pass", models["bob"])) - sent_at <= 2


def test_a_pass_and_the_step_behind_it_run_without_a_pause(traced: tuple[Harness, Traced]) -> None:
    """Both are queued: nothing is asked of the client in between."""
    harness, engine = traced
    model_id = harness.create_model()
    names = []
    for seq_id in range(1, 21, 2):
        names.append(harness.send("forward_backward", model_id, seq_id, GOOD_PASS))
        names.append(harness.send("optim_step", model_id, seq_id + 1, STEP))
    for name in names:
        harness.wait(name)
    assert [kind for kind, _ in engine.trace] == ["pass", "step"] * 10
    pauses = [after[0] - before[1] for before, after in zip(engine.times[::2], engine.times[1::2], strict=True)]
    assert sorted(pauses)[5] < 0.05


def test_samples_that_are_under_way_see_one_version_of_the_weights(traced: tuple[Harness, Traced]) -> None:
    harness, engine = traced
    model_id = harness.create_model()
    sampler = harness.run("save_weights_for_sampler", model_id, 1, {"sampling_session_seq_id": 0})[
        "sampling_session_id"
    ]
    under_way = ask(harness, sampler, 3, max_tokens=50)
    wait_until(lambda: ("sample", 1) in engine.trace)
    for seq_id in range(2, 10, 2):
        harness.run("forward_backward", model_id, seq_id, pass_body(datum(1, 2, 3 + seq_id)))
        harness.run("optim_step", model_id, seq_id + 1, STEP)
    beside = harness.wait(under_way)["sequences"]
    kinds = [kind for kind, _ in engine.trace]
    assert kinds.index("sample") < kinds.index("step") and kinds[-1] == "sample"
    again = ask(harness, sampler, 4, max_tokens=50, sampling_params={"max_tokens": 50, "stop": [], "seed": 3})
    assert harness.wait(again)["sequences"] == beside


# --- many tenants ------------------------------------------------------------------------------------------------


def rounds(harness: Harness, number: int, steps: int) -> tuple[list[str], float]:
    """A tenant's loop of passes, steps and samples: the digests it saw, and when it was done."""
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
    return digests, time.monotonic()


@pytest.mark.parametrize("kind", ["fake", "torch"])
def test_eight_tenants_at_once_get_the_bits_that_each_gets_alone(tmp_path: Path, kind: str) -> None:
    engine = FakeEngine() if kind == "fake" else TorchEngine(threads=1, device="cpu")
    steps = 3 if kind == "fake" else 2
    alone = {}
    service = open_service(tmp_path / "alone", engine=engine)
    for number in (0, 3, 7) if kind == "fake" else (0, 3):
        alone[number] = rounds(Harness(service), number, steps)[0]
    service.stop()
    together: dict[int, tuple[list[str], float]] = {}
    service = open_service(tmp_path / "together", engine=engine)
    harnesses = [Harness(service) for _ in range(8)]
    began = time.monotonic()
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
    assert {number: together[number][0] for number in alone} == alone
    seconds = [together[number][1] - began for number in range(8)]
    assert max(seconds) < 1.3 * min(seconds), seconds
