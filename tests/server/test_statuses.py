"""Statuses: what can never succeed is refused with one after which no SDK sends the request again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mint import errors
from mint.errors import MintError
from tests.server.server_harness import API, Person, make_key, running, sample_body

SENT_AGAIN = {408, 409, 425, 429}
"""The public SDK sends a request again after these, and after every 5xx."""


def subclasses(kind: type[MintError]) -> set[type[MintError]]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


OF_SERVERS = sorted(
    {kind for kind in subclasses(MintError) if kind.__module__ == errors.__name__}
    - {errors.ResultTimeoutError},  # raised by clients only
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", OF_SERVERS)
def test_the_fault_of_a_user_has_a_status_that_ends_the_request(kind: type[MintError]) -> None:
    assert kind.category != "user" or (kind.status < 500 and kind.status not in SENT_AGAIN)


def test_a_request_that_can_never_succeed_is_refused_for_good(tmp_path: Path) -> None:
    key = make_key(tmp_path, "somebody")
    with running(tmp_path) as server:
        person = Person(server, key)
        session_id = person.session()
        model_id, sampler_id = person.model(session_id), person.sampler(session_id)
        place = {"model_id": model_id, "seq_id": 1}
        person.done("optim_step", {**place, "adam_params": {"learning_rate": 0.1}})
        person.done("asample", sample_body(sampler_id))
        other_sampler = {
            "session_id": session_id,
            "sampling_session_seq_id": 0,
            "model_path": f"mint://{model_id}/weights/a",
        }
        refused = [
            ("optim_step", {**place, "adam_params": {"learning_rate": 0.2}}),
            ("asample", sample_body(sampler_id, tokens=[7, 8])),
            ("create_sampling_session", other_sampler),
        ]
        for route, body in refused:
            response = person.send("POST", f"{API}/{route}", body)
            assert (response.status_code, response.json()["code"]) == (400, "ConflictError"), response.text


@pytest.mark.parametrize("number", ["9" * 4400, str(2**63), str(2**70), "0" * 100 + "1"], ids=lambda text: text[:5])
def test_the_number_of_a_request_may_be_too_large(tmp_path: Path, number: str) -> None:
    with running(tmp_path) as server:
        person = Person(server)
        session_id = person.session()
        for target_id in (person.model(session_id), person.sampler(session_id), "x"):
            asked = {"request_id": f"{target_id}:{number}"}
            found = person.send("POST", f"{API}/retrieve_future", asked)
            assert found.status_code in (200, 410), found.text  # 200: a final error
            assert found.json()["code"] == "NotFoundError" and found.json()["field"] == "request_id"
            assert person.send("POST", f"{API}/cancel_future", asked).status_code < 500


def test_a_boundary_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        content_type = "multipart/form-data; boundary=" + "b" * 1000
        refused = Person(server).send("POST", f"{API}/checkpoints/upload", b"x", content_type=content_type)
    assert refused.status_code == 400 and refused.json()["field"] == "boundary"


def test_a_server_without_memory_for_a_thread_asks_to_send_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_none_for_requests(thread: threading.Thread) -> None:
        if thread.name.startswith(("mint-http", "mint-accept")):
            raise RuntimeError("can't start new thread")
        start(thread)

    with running(tmp_path) as server:
        person = Person(server)
        with monkeypatch.context() as shortage:
            shortage.setattr(threading.Thread, "start", start_none_for_requests)
            refused = person.send("POST", f"{API}/create_session", {})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "memory is short" in refused.text
        assert person.session()
