"""Large bodies are decoded beside the server's process: the event loop goes on, and nothing else is different."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from server_harness import API, Person, pass_input, running, sample_body
from waiting import HANG_S

from mint import wire
from mint.errors import InvalidRequestError, MintError
from mint.server.ops.stopped_models import stopped_models
from mint.server.service.decoding_process import LESS_URGENT
from mint.server.service.large_request_reader import LARGE_JSON_BYTES, LargeRequestReader
from mint.server.service.request_reader import RequestReader

PADDING = b" " * LARGE_JSON_BYTES
JSON = wire.Encoding.JSON


def large(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + PADDING


def passing(model: str, seq_id: int = 1, **more: Any) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": pass_input(), **more}


@pytest.fixture
def reader() -> Any:
    opened = LargeRequestReader(1)
    yield opened
    opened.close()


def outcome(read: Any, *arguments: Any) -> Any:
    try:
        found = read(*arguments)
    except MintError as error:
        return type(error), str(error)
    return [(type(each), str(each)) if isinstance(each, MintError) else each for each in found]


REQUESTS = {
    "pass": ("forward_backward", large(passing("m"))),
    "pass without a gradient": ("forward_backward", large(passing("m", forward_only=True))),
    "old pass without a gradient": ("forward", large({"model_id": "m", "seq_id": 2, "forward_input": pass_input()})),
    "unknown field": ("forward_backward", large(passing("m", new=[[]] * 9))),
    "wrong field": ("forward_backward", large({"model_id": "m", "seq_id": 3, "forward_backward_input": 7})),
    "no place": ("forward_backward", large({"model_id": "m", "forward_backward_input": pass_input()})),
    "no JSON": ("forward_backward", b"[" * LARGE_JSON_BYTES),
    "cut": ("forward_backward", large(passing("m")).strip()[:-1] + PADDING),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_large_request_is_read_as_a_small_one(reader: LargeRequestReader, name: str) -> None:
    kind, body = REQUESTS[name]
    assert outcome(reader.read_training, kind, body, JSON) == outcome(RequestReader().read_training, kind, body, JSON)


@pytest.mark.parametrize("wrong", [{}, {"num_samples": 3, "prompt": 7}, {"seq_id": "x"}])
def test_a_large_sample_request_is_read_as_a_small_one(reader: LargeRequestReader, wrong: dict[str, Any]) -> None:
    body = large({**sample_body("s"), **wrong})
    assert outcome(reader.read_sample, body) == outcome(RequestReader().read_sample, body)


def note_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that are decoded in this process from now on."""
    sizes: list[int] = []
    decode = wire.decode

    def noted(kind: Any, body: bytes, encoding: wire.Encoding = JSON) -> Any:
        sizes.append(len(body))
        return decode(kind, body, encoding)

    monkeypatch.setattr(wire, "decode", noted)
    return sizes


def test_no_large_body_is_decoded_in_the_process_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as server:
        person = Person(server)
        session = person.session()
        model = person.model(session)
        sampler = person.sampler(session)
        sizes = note_decoded(monkeypatch)
        assert person.done("forward_backward", large(passing(model)))["metrics"]
        assert person.done("asample", large(sample_body(sampler)))["sequences"]
        refused = person.post("forward_backward", large({"model_id": model, "seq_id": 2, "hostile": [[]] * 9}))
        assert person.send("POST", f"{API}/retrieve_future", refused).json()["code"] == "InvalidRequestError"
        assert person.done("forward_backward", passing(model, 3))["metrics"], "the refused one has taken its place"
        monkeypatch.undo()
    assert sizes and max(sizes) < LARGE_JSON_BYTES


def test_after_a_restart_large_bodies_are_decoded_beside_the_server_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a request that is replayed, and one of a request that is still to run."""
    with running(tmp_path) as server:
        person = Person(server)
        model = person.model(person.session())
        first = person.done("forward_backward", large(passing(model)))
        waiting = person.post("forward_backward", large(passing(model, 3)))
    sizes = note_decoded(monkeypatch)
    with running(tmp_path) as server:
        person = Person(server)
        person.post("forward_backward", passing(model, 2))
        assert person.result(waiting["request_id"])["loss_fn_outputs"] == first["loss_fn_outputs"]
    assert stopped_models(tmp_path, lambda *_: True) == []
    assert sizes and max(sizes) < LARGE_JSON_BYTES


def test_a_repeated_large_request_in_other_bytes_is_the_same_request(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        person = Person(server)
        model = person.model(person.session())
        promise = person.post("forward_backward", large(passing(model)))
        assert person.post("forward_backward", large(passing(model)) + b"\n") == promise
        other = large(passing(model, forward_only=True))
        assert person.send("POST", f"{API}/forward_backward", other).status_code == 400


def test_the_process_leaves_the_cores_to_the_server_when_both_need_them(reader: LargeRequestReader) -> None:
    outcome(reader.read_training, *REQUESTS["pass"], JSON)
    [process_id] = reader.process_ids
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process_id) == min(19, own + LESS_URGENT)


def test_a_process_that_dies_is_replaced(reader: LargeRequestReader) -> None:
    kind, body = REQUESTS["pass"]
    before = outcome(reader.read_training, kind, body, JSON)
    [process_id] = reader.process_ids
    os.kill(process_id, signal.SIGKILL)
    assert outcome(reader.read_training, kind, body, JSON) == before
    assert reader.process_ids not in ([], [process_id])


def test_a_body_of_which_the_process_dies_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(InvalidRequestError, match="cannot be decoded"):
        LargeRequestReader(1).read_training(*REQUESTS["pass"], JSON)


def test_the_process_ends_with_a_server_that_is_killed() -> None:
    program = """
import os
from mint import wire
from mint.server.service.large_request_reader import LARGE_JSON_BYTES, LargeRequestReader
reader = LargeRequestReader(1)
try:
    reader.read_training("optim_step", b" " * LARGE_JSON_BYTES, wire.Encoding.JSON)
except Exception:
    print(*reader.process_ids, flush=True)
os.kill(os.getpid(), 9)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    status = Path(f"/proc/{int(found.stdout)}/stat")
    give_up_at = time.monotonic() + HANG_S
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@pytest.mark.parametrize("route", ["optim_step", "create_model", "session_heartbeat", "get_info"])
def test_a_route_without_data_takes_no_large_body(route: str, tmp_path: Path) -> None:
    with running(tmp_path) as server:
        assert Person(server).send("POST", f"{API}/{route}", b"{" + PADDING).status_code == 413
