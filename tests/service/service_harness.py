"""Talks to a `Service` without HTTP, one request at a time, and runs a fixed script of operations through it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from default_engine import fake_engine

from mint import wire
from mint.engine.fake_engine import POISON_TOKEN
from mint.engine.protocol import Engine
from mint.errors import MintError, from_wire
from mint.server.callers import LOCAL, Caller
from mint.server.service.service import Service
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.types import ForwardBackwardOutput, SampleResponse

BASE = "mint/tiny"
Read = TypeVar("Read")
Op = tuple[str, dict[str, Any]]
"""Kind of request, and its body without model_id and seq_id."""


_engines: WeakKeyDictionary[Service, Engine] = WeakKeyDictionary()
_default_engine: list[Callable[[], Engine]] = [fake_engine]


@contextmanager
def services_have(engine: Callable[[], Engine]) -> Iterator[None]:
    """A block in which `open_service` makes this engine if none is given."""
    _default_engine.append(engine)
    try:
        yield
    finally:
        _default_engine.pop()


def open_service(data_dir: Path, *, engine: Engine | None = None, **options: Any) -> Service:
    engine = engine or _default_engine[-1]()
    service = Service(engine, data_dir, aliases={}, **options)
    _engines[service] = engine
    service.start()
    return service


def stored(data_dir: Path, read: Callable[[Journal], Read]) -> Read:
    """What the journal of a data directory has, read beside a running service, as `mint recover` reads it."""
    with closing(Journal(data_dir / JOURNAL_FILE, OpenFor.READING)) as journal:
        return read(journal)


def datum(*tokens: int, **inputs: Sequence[float]) -> dict[str, Any]:
    tensors = {key: {"data": list(row), "dtype": "float32"} for key, row in inputs.items()}
    tensors["target_tokens"] = {"data": list(tokens[1:]), "dtype": "int64"}
    return {"model_input": {"chunks": [{"tokens": list(tokens[:-1])}]}, "loss_fn_inputs": tensors}


def pass_body(*data: dict[str, Any], loss: str = "cross_entropy", **more: Any) -> dict[str, Any]:
    return {"forward_backward_input": {"data": list(data), "loss_fn": loss, **more}}


GOOD_PASS = pass_body(datum(1, 2, 3, 4))
STEP: dict[str, Any] = {"adam_params": {"learning_rate": 0.001}}


_loops = threading.local()
_inherited: list[asyncio.AbstractEventLoop] = []


def _event_loop() -> asyncio.AbstractEventLoop:
    """That of this thread, made once: a new one for every answer would need descriptors, which some tests use up."""
    if not hasattr(_loops, "loop"):
        _loops.loop = asyncio.new_event_loop()
    return _loops.loop


def _forget_loop() -> None:
    """A forked process has the loop, but none of the threads that its executor counts on.

    The loop is kept, not deleted: its end would take it out of the epoll set, which both processes share, and then no
    thread could wake the loop of the parent.
    """
    if hasattr(_loops, "loop"):
        _inherited.append(_loops.loop)
        del _loops.loop


os.register_at_fork(after_in_child=_forget_loop)


class Harness:
    """One session; requests as dicts, answers as dicts or raised errors."""

    def __init__(self, service: Service, session_id: str | None = None, *, caller: Caller = LOCAL) -> None:
        self.service = service
        self.caller = caller
        self.session_id = session_id or service.sessions.create(caller, b"{}").session_id

    def create_model(self, number: int = 0, *, seed: int | None = 7, rank: int = 8, **lora: Any) -> str:
        config = {"rank": rank, **({} if seed is None else {"seed": seed}), **lora}
        body = {"session_id": self.session_id, "model_seq_id": number, "base_model": BASE, "lora_config": config}
        return self.wait(self.submit("create_model", body))["model_id"]

    def submit(self, kind: str, body: dict[str, Any]) -> str:
        return self.service.training.submit(self.caller, kind, json.dumps(body).encode()).request_id

    def send(self, kind: str, model_id: str, seq_id: int, body: dict[str, Any]) -> str:
        return self.submit(kind, {"model_id": model_id, "seq_id": seq_id, **body})

    def run(self, kind: str, model_id: str, seq_id: int, body: dict[str, Any]) -> dict[str, Any]:
        return self.wait(self.send(kind, model_id, seq_id, body))

    def answer(self, request_id: str) -> bytes:
        loop = _event_loop()
        while (answer := loop.run_until_complete(self.service.results.retrieve(self.caller, request_id))) is None:
            pass
        kind = SampleResponse if ":sample:" in request_id else ForwardBackwardOutput
        return wire.result_as_json(answer.body, kind)

    def wait(self, request_id: str) -> dict[str, Any]:
        body = self.answer(request_id)
        error = wire.decode_error(body)
        if error is not None:
            raise from_wire(error)
        return json.loads(body)

    def stored(self, read: Callable[[Journal], Read]) -> Read:
        """See `stored`."""
        return stored(self.service.data_dir, read)

    @property
    def engine(self) -> Engine:
        return _engines[self.service]

    def digest(self, model_id: str) -> str:
        """That of the state which the engine holds now."""
        return self.engine.state_digest(model_id)

    def restore(self, model_id: str) -> None:
        """Sends a request that changes nothing, so that the model is in the engine."""
        row = self.stored(lambda journal: journal.model(model_id))
        assert row is not None
        self.run("forward", model_id, row.applied_seq + 1, {"forward_input": GOOD_PASS["forward_backward_input"]})

    def sample(self, sampler_id: str, seq_id: int, **fields: Any) -> dict[str, Any]:
        params = {"max_tokens": 3, **fields.pop("params", {})}
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"tokens": fields.pop("prompt", [5, 6])}]},
            "sampling_params": params,
            **fields,
        }
        return self.wait(self.service.sampling.accept(self.caller, json.dumps(body).encode()).request_id)


def make_sampler(harness: Harness, number: int = 0, *, path: str | None = None) -> str:
    """A sampler over the base model, or over the saved weights at `path`."""
    source = {"base_model": BASE} if path is None else {"model_path": path}
    body = {"session_id": harness.session_id, "sampling_session_seq_id": number, **source}
    return harness.service.sampling_sessions.create(harness.caller, json.dumps(body).encode()).sampling_session_id


def send_sample(harness: Harness, sampler: str, seq_id: int) -> str:
    """A small sample request; its id."""
    prompt = {"chunks": [{"tokens": [5, 6]}]}
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    return harness.service.sampling.accept(harness.caller, json.dumps(body).encode()).request_id


def script(steps: int) -> list[Op]:
    """Operations of every kind, good and bad; the one at index i has seq_id i + 1."""
    ops: list[Op] = []
    for step in range(steps):
        ops.append(("forward_backward", pass_body(datum(1, 2, 3 + step, 4), datum(5, 6, 7))))
        if step % 4 == 1:
            ops.append(("forward_backward", pass_body(datum(1, POISON_TOKEN, 3))))
        if step % 4 == 2:
            ops.append(("forward_backward", pass_body(datum(1, 2, -3))))
        if step % 5 == 3:
            ops.append(("optim_step", {"adam_params": {"learning_rate": -1.0}}))
        ops.append(("optim_step", {"adam_params": {"learning_rate": 0.001 * (step + 1)}}))
        if step % 3 == 0:
            ops.append(("save_weights", {"path": f"s{step}"}))
            ops.append(("save_weights_for_sampler", {"sampling_session_seq_id": step}))
        if step % 6 == 4:
            ops.append(("forward_backward", {**pass_body(datum(9, 8, 7)), "forward_only": True}))
            ops.append(("load_weights", {"path": "mint://MODEL/weights/s3", "optimizer": step % 2 == 0}))
    return ops


def run_script(
    harness: Harness, model_id: str, ops: Sequence[Op], *, seed: int | None, on_result: Callable[[int, bytes], None]
) -> None:
    """Submits all operations (shuffled in windows and doubled, with a seed), and waits for all results."""
    order = list(range(len(ops)))
    rng = random.Random(seed)
    if seed is not None:
        windows = [order[start : start + 5] for start in range(0, len(ops), 5)]
        order = [i for window in windows for i in rng.sample(window, len(window))]
        order = [copy for i in order for copy in ([i, i] if rng.random() < 0.25 else [i])]
    waiting: dict[int, str] = {}
    for place, i in enumerate(order):
        waiting[i] = send_op(harness, model_id, ops, i)
        if place % 5 == 4 and set(range(max(waiting) + 1)) == set(waiting):
            _collect(harness, waiting, on_result)
    _collect(harness, waiting, on_result)


def send_op(harness: Harness, model_id: str, ops: Sequence[Op], i: int) -> str:
    """Submits one operation in its place."""
    kind, body = ops[i]
    body = {key: value.replace("MODEL", model_id) if isinstance(value, str) else value for key, value in body.items()}
    return harness.send(kind, model_id, i + 1, body)


def _collect(harness: Harness, waiting: dict[int, str], on_result: Callable[[int, bytes], None]) -> None:
    for i, request_id in sorted(waiting.items()):
        body = harness.answer(request_id).replace(harness.session_id.encode(), b"SESSION")
        on_result(i, body)


def clean_results(data_dir: Path, ops: Sequence[Op]) -> tuple[dict[int, bytes], str]:
    """The results of an undisturbed run, and the digest of the state it ends in."""
    service = open_service(data_dir)
    try:
        harness = Harness(service)
        model_id = harness.create_model()
        results: dict[int, bytes] = {}
        run_script(harness, model_id, ops, seed=None, on_result=results.__setitem__)
        return results, harness.digest(model_id)
    finally:
        service.stop()


def failure(call: Callable[[], object]) -> MintError:
    """The error that a call raises."""
    try:
        call()
    except MintError as error:
        return error
    raise AssertionError("nothing was raised")
