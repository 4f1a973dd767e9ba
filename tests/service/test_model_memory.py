"""Models that are not used leave memory when others need it, and come back with the same bits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from service_harness import BASE, GOOD_PASS, STEP, Harness, datum, failure, open_service, pass_body

from mint.engine.fake_engine import MODEL_BYTES, FakeEngine
from mint.engine.protocol import Engine
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError
from mint.server.callers import LOCAL_OWNER, Caller
from mint.server.limits import ServerLimits
from mint.server.service.service import Service

RANK = 8
MEMORY_FOR_TWO = ServerLimits(model_memory_bytes=2 * RANK * MODEL_BYTES)


def train_in_turns(harness: Harness, count: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Models that take turns, each with a pass before and after its step; all that they answered."""
    models = [harness.create_model(number, rank=RANK) for number in range(count)]
    answers: list[list[dict[str, Any]]] = [[] for _ in models]
    for turn in range(rounds):
        for number, model_id in enumerate(models):
            first = 3 * turn + 1
            some = pass_body(datum(1, 2, 3 + turn, 4 + number))
            answers[number].append(harness.run("forward_backward", model_id, first, some))
            answers[number].append(harness.run("optim_step", model_id, first + 1, STEP))
            answers[number].append(harness.run("forward_backward", model_id, first + 2, GOOD_PASS))
    return answers


def loaded(engine: Engine, service: Service, owner: str = LOCAL_OWNER) -> set[str]:
    """The models of an owner that are in the engine's memory."""
    names = (model.model_id for model in service.training.live_models(Caller(owner)).models)
    return {name for name in names if engine.has_model(name)}


@pytest.mark.parametrize("state_bytes", [0, 4096], ids=["small", "large"])
def test_models_that_leave_memory_answer_the_same_as_those_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_bytes: int
) -> None:
    if state_bytes:  # saved at intervals, so that parking has something to save
        monkeypatch.setattr("mint.server.worker.snapshots.SMALL_STATE_BYTES", 1000)
    free = Harness(open_service(tmp_path / "free", engine=FakeEngine(state_bytes=state_bytes)))
    expected = train_in_turns(free, 5, 6)
    free.service.stop()
    engine = FakeEngine(state_bytes=state_bytes)
    narrow = Harness(open_service(tmp_path / "narrow", engine=engine, limits=MEMORY_FOR_TWO))
    assert train_in_turns(narrow, 5, 6) == expected
    assert len(loaded(engine, narrow.service)) == 2
    narrow.service.stop()


def test_the_torch_engines_models_leave_memory_and_come_back(tmp_path: Path) -> None:
    answers = []
    limits = ServerLimits()
    for name in ("free", "narrow"):
        engine = TorchEngine(dtype="float32", threads=1, device="cpu")
        harness = Harness(open_service(tmp_path / name, engine=engine, limits=limits))
        answers.append(train_in_turns(harness, 3, 2))
        assert len(loaded(engine, harness.service)) == (3 if name == "free" else 2)
        limits = ServerLimits(model_memory_bytes=harness.service.memory.used_bytes - 1)
        harness.service.stop()
    assert answers[0] == answers[1]


def test_a_model_that_cannot_fit_fails_with_the_limit_and_the_remedy(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path, limits=MEMORY_FOR_TWO))
    kept = harness.create_model(0, rank=RANK)
    error = failure(lambda: harness.create_model(1, rank=RANK * 3))
    assert isinstance(error, InvalidRequestError) and error.field == "model_memory"
    assert str(2 * RANK * MODEL_BYTES) in str(error) and "MINT_MODEL_MEMORY_MIB" in str(error)
    assert harness.run("forward_backward", kept, 1, GOOD_PASS)
    harness.service.stop()


def test_without_a_setting_models_may_take_half_of_what_is_free_with_the_base(tmp_path: Path) -> None:
    engine = FakeEngine(memory_bytes=6 * RANK * MODEL_BYTES)
    harness = Harness(open_service(tmp_path, engine=engine))
    for number in range(6):
        harness.create_model(number, rank=RANK)
    assert len(loaded(engine, harness.service)) == 3
    harness.service.stop()


def test_the_models_of_the_owner_with_most_memory_are_parked_first(tmp_path: Path) -> None:
    engine = FakeEngine()
    service = open_service(tmp_path, engine=engine, limits=ServerLimits(model_memory_bytes=3 * RANK * MODEL_BYTES))
    models = {"small": _create(service, "small", 1), "large": _create(service, "large", 5)}
    assert loaded(engine, service, "small") == set(models["small"])
    assert loaded(engine, service, "large") == set(models["large"][-2:])
    service.stop()


def _create(service: Any, owner: str, count: int) -> list[str]:
    caller = Caller(owner)
    session_id = service.sessions.create(caller, b"{}").session_id
    found = []
    for number in range(count):
        config = {"rank": RANK, "seed": 1}
        body = {"session_id": session_id, "model_seq_id": number, "base_model": BASE, "lora_config": config}
        promise = service.training.submit(caller, "create_model", json.dumps(body).encode())
        found.append(_result(service, caller, promise.request_id)["model_id"])
    return found


def _result(service: Any, caller: Caller, name: str) -> dict[str, Any]:
    while (answer := asyncio.run(service.results.retrieve(caller, name))) is None:
        pass
    return json.loads(answer.body)
