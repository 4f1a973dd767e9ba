"""What clients of the protocol ask besides training and sampling: flags, cancelling, unloading, quotas, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from default_engine import fake_engine
from http_server import http_server
from service_harness import BASE, GOOD_PASS, STEP, Harness, failure, make_sampler, open_service, send_sample

from mint import wire
from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    QuotaExceededError,
    RequestCancelledError,
    SessionEndedError,
)
from mint.server.callers import LOCAL, LOCAL_OWNER, Caller, Quotas
from mint.server.limits import ServerLimits
from mint.server.queue.queue import QueueLimits, RequestQueue
from mint.types import ForwardBackwardOutput
from mint.wire import tinker_public_pb2 as pb
from mint.wire.codec import Encoding
from mint.wire.requests import ForwardBackwardRequest


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    with http_server(tmp_path / "data", engine=fake_engine()) as url, httpx.Client(base_url=f"{url}/api/v1/") as client:
        yield client


def open_session(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    return http.post("create_session", json=fields).raise_for_status().json()


def made_model(http: httpx.Client) -> str:
    body = {"session_id": open_session(http)["session_id"], "model_seq_id": 0, "base_model": BASE}
    promise = http.post("create_model", json=body).raise_for_status().json()
    while "model_id" not in (made := http.post("retrieve_future", json={"request_id": promise["request_id"]}).json()):
        assert made["type"] == "try_again", made
    return made["model_id"]


def blocked(harness: Harness) -> threading.Event:
    """Keeps the engine's thread busy until the event is set."""
    go_on = threading.Event()
    harness.service.call_soon(lambda: go_on.wait(120.0) and None)
    return go_on


# --- flags and sessions ------------------------------------------------------------------------------------------


def test_every_flag_stays_at_rest_but_the_one_that_an_old_sdk_needs(http: httpx.Client) -> None:
    for route in ("client/config", "client/dynamic_config"):
        assert http.post(route, json={"sdk_version": "0.38.0"}).json() == {}
        assert http.post(route).json() == {}
    assert http.post("client/config", json={"sdk_version": "0.22.7"}).json() == {"use_pyqwest_transport": False}


@pytest.mark.parametrize("version", ["0.39.0", "0.38.1", "1.0", "0.100.0rc1"])
def test_an_sdk_of_the_future_is_told_so_and_works(http: httpx.Client, version: str) -> None:
    opened = open_session(http, sdk_version=version, surprise=True)
    assert "0.38.0" in opened["warning_message"] and opened["session_id"]


@pytest.mark.parametrize("version", ["0.38.0", "0.6.0", "", "mint/2.0", "0.38.0.dev1"])
def test_an_sdk_that_was_tried_is_not_warned(http: httpx.Client, version: str) -> None:
    assert "warning_message" not in open_session(http, sdk_version=version)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"reason":{"type":"errored"},"detail":null}', b'{"reason":{"type":"new"}}']
)
def test_a_session_is_finished_for_whatever_reason(http: httpx.Client, body: bytes) -> None:
    session_id = open_session(http)["session_id"]
    assert http.post(f"sessions/{session_id}/finish", content=body).status_code == 200
    assert http.post("session_heartbeat", json={"session_id": session_id}).status_code == 410


def test_telemetry_is_accepted_unread_and_bounded(http: httpx.Client) -> None:
    assert http.post("telemetry", content=b"\xff not json").json() == {"status": "accepted"}
    assert http.post("telemetry", content=b"x" * 1_100_000).status_code == 400


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "train_step"),
        ("POST", "mint/forward_backward_reverse_kl"),
        ("POST", "mint/checkpoints/interpolate"),
        ("POST", "create_custom_loss"),
        ("POST", "auth/token"),
        ("GET", "auth/apikey/me"),
        ("DELETE", "auth/apikey/me"),
    ],
)
def test_what_is_not_offered_is_refused_with_a_sentence(http: httpx.Client, method: str, route: str) -> None:
    answer = http.request(method, route, content=b"\xff" if method == "POST" else None)
    error = answer.json()
    assert answer.status_code == 400 and error["category"] == "user"
    assert error["field"] == "route" and error["value"] == route and len(error["remedy"]) > 20


# --- results over HTTP -------------------------------------------------------------------------------------------


def test_a_client_that_polls_too_early_is_told_its_place_in_the_queue(tmp_path: Path) -> None:
    server = http_server(tmp_path, engine=fake_engine(), long_poll_s=0.05)
    with server as url, httpx.Client(base_url=f"{url}/api/v1/") as http:
        model_id = made_model(http)
        promise = http.post("optim_step", json={"model_id": model_id, "seq_id": 4}).json()
        answer = http.post("retrieve_future", json={"request_id": promise["request_id"]})
    body = answer.json()
    assert answer.status_code == 408 and body["type"] == "try_again" and body["queue_state"] == "active"
    assert body["status"] == "held" and body["queue_depth"] == 1 and "request 1, 2, 3" in body["queue_state_reason"]
    assert answer.headers["retry-after"] == "1" and answer.headers["x-queue-status"] == "held"
    assert answer.headers["x-queue-depth"] == "1" and answer.headers["x-queue-position"] == "0"


def a_pass(model_id: str, seq_id: int, **more: Any) -> pb.ForwardBackwardRequest:
    body = json.dumps({"model_id": model_id, "seq_id": seq_id, **GOOD_PASS, **more}).encode()
    request = wire.decode(ForwardBackwardRequest, body)
    return pb.ForwardBackwardRequest.FromString(wire.encode(request, Encoding.PROTO))


def test_a_result_comes_in_the_encoding_that_was_asked_for(http: httpx.Client) -> None:
    model_id = made_model(http)
    body = a_pass(model_id, 1).SerializeToString()
    proto = {"content-type": Encoding.PROTO.value}
    promise = http.post("forward_backward", content=body, headers=proto).raise_for_status().json()
    asked = {"request_id": promise["request_id"], "allow_metadata_only": True}
    as_json = http.post("retrieve_future", json=asked)
    as_proto = http.post("retrieve_future", json=asked, headers={"accept": Encoding.PROTO.value})
    both = http.post("retrieve_future", json=asked, headers={"accept": f"{Encoding.PROTO.value}, application/json"})
    assert as_json.headers["content-type"] == "application/json"
    assert as_proto.headers["content-type"] == both.headers["content-type"] == Encoding.PROTO.value
    output = wire.decode(ForwardBackwardOutput, as_proto.content, Encoding.PROTO)
    assert output == wire.decode(ForwardBackwardOutput, as_json.content)
    bad = http.post("optim_step", content=body, headers=proto)
    assert bad.status_code == 400 and "application/json" in bad.json()["error"]


def respelled(message: pb.ForwardBackwardRequest) -> bytes:
    """The same message in other bytes: its fields in another order."""
    rest = pb.ForwardBackwardRequest()
    rest.CopyFrom(message)
    rest.ClearField("model_id")
    return rest.SerializeToString() + pb.ForwardBackwardRequest(model_id=message.model_id).SerializeToString()


def test_a_repeated_request_may_be_spelled_differently_and_another_one_is_refused(harness: Harness) -> None:
    model_id = harness.create_model()
    message = a_pass(model_id, 1)
    first, again = message.SerializeToString(), respelled(message)
    assert first != again
    promises = [
        harness.service.training.submit(LOCAL, "forward_backward", body, Encoding.PROTO) for body in (first, again)
    ]
    assert promises[0] == promises[1]
    harness.wait(promises[0].request_id)
    other = a_pass(model_id, 1, forward_only=True).SerializeToString()
    assert isinstance(
        failure(lambda: harness.service.training.submit(LOCAL, "forward_backward", other, Encoding.PROTO)),
        ConflictError,
    )
    message.data[0].loss_fn_inputs["target_tokens"].dense = b"\1" * 24
    changed = message.SerializeToString()
    error = failure(lambda: harness.service.training.submit(LOCAL, "forward_backward", changed, Encoding.PROTO))
    assert isinstance(error, ConflictError) and error.status == 400


@pytest.mark.parametrize("forward_only", [True, False])
def test_other_data_at_the_place_of_a_request_without_payload_are_refused(harness: Harness, forward_only: bool) -> None:
    """The payload of a pass without a gradient, or of one that failed, is gone at its end."""
    model_id = harness.create_model()
    message = a_pass(model_id, 1, forward_only=forward_only)
    if not forward_only:
        message.loss_fn = "none"
    promise = harness.service.training.submit(LOCAL, "forward_backward", message.SerializeToString(), Encoding.PROTO)
    harness.answer(promise.request_id)
    row = harness.stored(lambda journal: journal.job(model_id, 1))
    assert row is not None and row.payload is None
    again = harness.service.training.submit(LOCAL, "forward_backward", respelled(message), Encoding.PROTO)
    assert again == promise
    message.data[0].loss_fn_inputs["target_tokens"].dense = b"\1" * 24
    other = message.SerializeToString()
    error = failure(lambda: harness.service.training.submit(LOCAL, "forward_backward", other, Encoding.PROTO))
    assert isinstance(error, ConflictError)


def test_a_damaged_protobuf_fails_in_its_place_and_holds_nobody_up(harness: Harness) -> None:
    model_id = harness.create_model()
    body = a_pass(model_id, 1).SerializeToString()[:-5]
    promise = harness.service.training.submit(LOCAL, "forward_backward", body, Encoding.PROTO)
    assert isinstance(failure(lambda: harness.wait(promise.request_id)), InvalidRequestError)
    harness.run("forward_backward", model_id, 2, GOOD_PASS)


# --- cancelling and unloading ------------------------------------------------------------------------------------


def cancel(harness: Harness, name: str) -> None:
    harness.service.sampling.cancel(LOCAL, json.dumps({"request_id": name}).encode())


def test_a_waiting_sample_that_is_called_off_leaves_the_queue_and_its_future_says_so(harness: Harness) -> None:
    sampler = make_sampler(harness)
    go_on = blocked(harness)
    names = [send_sample(harness, sampler, seq_id) for seq_id in range(2)]
    cancel(harness, names[0])
    assert len(harness.service.pending.samples) == 1
    error = failure(lambda: harness.wait(names[0]))
    assert isinstance(error, RequestCancelledError) and error.category == "user"
    go_on.set()
    harness.wait(names[1])
    cancel(harness, names[1])  # too late: nothing happens
    assert harness.wait(names[1])["sequences"]


def test_a_running_sample_that_is_called_off_leaves_the_engine(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make_sampler(harness)
    started, go_on = threading.Event(), threading.Event()
    step, running = FakeBatch.step, []

    def slow(batch: FakeBatch) -> Any:
        started.set()
        go_on.wait(120.0)
        ended = step(batch)
        running.append(set(batch.keys))
        return ended

    monkeypatch.setattr(FakeBatch, "step", slow)
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 400, "stop": []},
    }
    name = harness.service.sampling.accept(LOCAL, json.dumps(body).encode()).request_id
    assert started.wait(120.0)
    harness.service.sampling.cancel(LOCAL, json.dumps({"request_id": name}).encode())
    go_on.set()
    assert isinstance(failure(lambda: harness.wait(name)), RequestCancelledError)
    assert len(harness.sample(sampler, 1)["sequences"]) == 1
    assert name in running[0] and name not in running[1], "it was under way, and left at the next step"


def test_a_training_request_cannot_be_called_off(harness: Harness) -> None:
    model_id = harness.create_model()
    go_on = blocked(harness)
    name = harness.send("forward_backward", model_id, 1, GOOD_PASS)
    cancel(harness, name)
    go_on.set()
    assert harness.wait(name)["metrics"]
    cancel(harness, "whatever")


def unload(harness: Harness, model_id: str) -> str:
    return harness.service.sessions.unload_model(LOCAL, model_id).request_id


def test_an_unloaded_model_is_gone_and_the_others_live_on(harness: Harness) -> None:
    one, two = harness.create_model(0), harness.create_model(1)
    harness.run("forward_backward", one, 1, GOOD_PASS)
    path = harness.run("save_weights", one, 2, {"path": "kept"})["path"]
    waiting = harness.send("optim_step", one, 4, STEP)
    name = unload(harness, one)
    assert harness.wait(name) == {"model_id": one, "type": "unload_model"} and unload(harness, one) == name
    assert isinstance(failure(lambda: harness.wait(waiting)), NotFoundError)
    for call in (
        lambda: harness.send("optim_step", one, 3, STEP),
        lambda: harness.create_model(0),
        lambda: harness.service.training.get_info(LOCAL, json.dumps({"model_id": one}).encode()),
    ):
        assert isinstance(failure(call), NotFoundError)
    harness.run("load_weights", two, 1, {"path": path, "optimizer": True})
    assert [model.model_id for model in harness.service.training.live_models(LOCAL).models] == [two]
    assert not harness.engine.has_model(one)


def test_an_unloaded_model_stays_gone_after_a_restart(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    harness.run("optim_step", model_id, 1, STEP)
    unload(harness, model_id)
    harness.service.stop()
    assert not list((tmp_path / "snapshots").glob("*"))
    again = open_service(tmp_path)
    error = failure(lambda: Harness(again, harness.session_id).send("optim_step", model_id, 2, STEP))
    assert isinstance(error, NotFoundError | SessionEndedError)
    again.stop()


def test_models_are_listed_and_deleted_over_http_by_their_owner(http: httpx.Client) -> None:
    model_id = made_model(http)
    (model,) = http.get("models").json()["models"]
    assert model == {"model_id": model_id, "session_id": model_id.split(":")[0], "base_model": BASE, "lora_rank": 32}
    assert http.delete(f"models/{model_id}").json() == {"model_id": model_id, "type": "unload_model"}
    assert http.get("models").json() == {"models": []}
    promise = http.post("optim_step", json={"model_id": model_id, "seq_id": 1})
    assert promise.status_code == 404


def test_every_client_that_joins_a_sampler_gets_a_number_of_its_own(harness: Harness) -> None:
    body = json.dumps({"sampling_session_id": make_sampler(harness)}).encode()
    numbers = [harness.service.sampling_sessions.join(LOCAL, body).client_counter for _ in range(20)]
    assert len(set(numbers)) == 20 and min(numbers) > 0
    assert max(numbers) * 10**9 + 10**9 < 2**63


def test_a_sample_request_that_will_fail_still_has_an_id_per_sample(harness: Harness) -> None:
    sampler = make_sampler(harness)
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 3, "prompt": {"chunks": "wrong"}}
    promise = harness.service.sampling.accept(LOCAL, json.dumps(body).encode())
    assert len(promise.sample_sequence_ids or []) == 3
    assert isinstance(failure(lambda: harness.wait(promise.request_id)), InvalidRequestError)
    for seq_id in (-1, 2**63):
        wrong = json.dumps({**body, "seq_id": seq_id}).encode()
        assert isinstance(
            failure(lambda wrong=wrong: harness.service.sampling.accept(LOCAL, wrong)), InvalidRequestError
        )


# --- quotas ------------------------------------------------------------------------------------------------------


def test_a_quota_of_sessions_and_models_is_named_when_it_is_used_up(harness: Harness) -> None:
    caller = Caller("one", quotas=Quotas(max_sessions=1, max_models=1))
    session_id = harness.service.sessions.create(caller, b"{}").session_id
    error = failure(lambda: harness.service.sessions.create(caller, b"{}"))
    assert isinstance(error, QuotaExceededError) and error.field == "max_sessions" and error.status == 403
    made_up = {"session_id": "made-up-by-a-script", "model_seq_id": 0, "base_model": BASE}
    error = failure(lambda: harness.service.training.submit(caller, "create_model", json.dumps(made_up).encode()))
    assert isinstance(error, QuotaExceededError) and error.field == "max_sessions"
    bodies = [
        json.dumps({"session_id": session_id, "model_seq_id": number, "base_model": BASE}).encode() for number in (0, 1)
    ]
    first = harness.service.training.submit(caller, "create_model", bodies[0])
    assert harness.service.training.submit(caller, "create_model", bodies[0]) == first
    error = failure(lambda: harness.service.training.submit(caller, "create_model", bodies[1]))
    assert isinstance(error, QuotaExceededError) and error.field == "max_models"
    harness.service.sessions.finish(caller, session_id)
    harness.service.sessions.create(caller, b"{}")


def test_the_limits_of_all_owners_together_are_named_with_the_setting_that_raises_them(tmp_path: Path) -> None:
    service = open_service(tmp_path, limits=ServerLimits(max_sessions=2, max_models=1))
    harness = Harness(service)
    harness.create_model()
    service.sessions.create(Caller("other"), b"{}")
    error = failure(lambda: service.sessions.create(Caller("third"), b"{}"))
    assert isinstance(error, OverloadedError) and "MINT_SERVE_MAX_SESSIONS" in str(error)
    error = failure(lambda: harness.create_model(1))
    assert isinstance(error, OverloadedError) and "MINT_SERVE_MAX_MODELS" in str(error)
    service.stop()


def test_a_session_whose_id_its_client_chooses_counts_in_the_limits_too(tmp_path: Path) -> None:
    service = open_service(tmp_path, limits=ServerLimits(max_sessions=2))
    harness = Harness(service)
    body: dict[str, Any] = {"model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    harness.submit("create_model", {"session_id": "my-own-session-0", **body})
    sampler = {"session_id": "my-own-session-1", "sampling_session_seq_id": 0, "base_model": BASE}
    for open_another in (
        lambda: harness.submit("create_model", {"session_id": "my-own-session-1", **body}),
        lambda: service.sampling_sessions.create(LOCAL, json.dumps(sampler).encode()),
    ):
        error = failure(open_another)
        assert isinstance(error, OverloadedError) and "MINT_SERVE_MAX_SESSIONS" in str(error)
    harness.submit("create_model", {"session_id": "my-own-session-0", **body, "model_seq_id": 1})  # it is open
    service.stop()


def test_weights_without_a_name_do_not_count_as_checkpoints(harness: Harness) -> None:
    model_id = harness.create_model()
    harness.run("save_weights", model_id, 1, {"path": "a"})
    caller = Caller("local", quotas=Quotas(max_checkpoint_bytes=1))
    body = json.dumps({"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 0}).encode()
    assert harness.wait(harness.service.training.submit(caller, "save_weights_for_sampler", body).request_id)


def test_a_full_queue_refuses_what_is_new_but_never_what_runs_next(harness: Harness) -> None:
    model_id = harness.create_model()
    caller = Caller("local", quotas=Quotas(max_waiting_requests=2))

    def send(seq_id: int) -> str:
        body = json.dumps({"model_id": model_id, "seq_id": seq_id, **STEP}).encode()
        return harness.service.training.submit(caller, "optim_step", body).request_id

    waiting = [send(2), send(3)]
    error = failure(lambda: send(4))
    assert isinstance(error, OverloadedError) and error.field == "max_waiting_requests"
    assert send(3) == waiting[1]  # a repeated one is no new one
    harness.wait(send(1))
    for name in waiting:
        harness.wait(name)
    harness.wait(send(4))


def test_first_requests_of_many_models_keep_to_the_bytes_that_may_wait(tmp_path: Path) -> None:
    queue = RequestQueue(QueueLimits(owner_bytes=100_000))
    service = open_service(tmp_path, queue=queue)
    harness = Harness(service)
    models = [harness.create_model(number) for number in range(4)]
    go_on = blocked(harness)

    def send(model_id: str, seq_id: int, size_bytes: int) -> str:
        body = json.dumps({"model_id": model_id, "seq_id": seq_id, **STEP}).encode().ljust(size_bytes)
        return service.training.submit(LOCAL, "optim_step", body).request_id

    waiting = [send(models[0], 1, 60_000), send(models[1], 2, 30_000)]
    for model_id in (models[2], models[3]):
        error = failure(lambda model_id=model_id: send(model_id, 1, 60_000))
        assert isinstance(error, OverloadedError) and error.field == "max_waiting_bytes"
    waiting.append(send(models[1], 1, 60_000))  # another request waits for this one
    assert send(models[1], 1, 60_000) == waiting[-1]
    go_on.set()
    for name in waiting:
        harness.wait(name)
    harness.wait(send(models[3], 1, 60_000))
    service.stop()


def test_a_save_counts_by_what_it_will_store(tmp_path: Path) -> None:
    service = open_service(tmp_path, engine=FakeEngine(state_bytes=60_000))
    harness = Harness(service)
    model_id = harness.create_model()
    harness.run("save_weights", model_id, 1, {"path": "a"})
    size = service.checkpoints.used_bytes(LOCAL_OWNER)
    caller = Caller(LOCAL_OWNER, quotas=Quotas(max_checkpoint_bytes=int(1.9 * size)))

    def save(kind: str, seq_id: int, **fields: Any) -> dict[str, Any]:
        body = json.dumps({"model_id": model_id, "seq_id": seq_id, **fields}).encode()
        return harness.wait(service.training.submit(caller, kind, body).request_id)

    error = failure(lambda: save("save_weights", 2, path="b"))
    assert isinstance(error, InvalidRequestError) and error.field == "max_checkpoint_bytes"
    assert service.checkpoints.used_bytes(LOCAL_OWNER) == size and len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert save("save_weights", 3, path="a", overwrite=True)["path"]  # what it replaces does not count
    service.stop()


def test_saves_that_wait_together_get_no_more_than_the_quota(harness: Harness) -> None:
    model_id = harness.create_model()
    caller = Caller("local", quotas=Quotas(max_checkpoint_bytes=1000))  # for one

    def save(seq_id: int) -> str:
        body = json.dumps({"model_id": model_id, "seq_id": seq_id, "path": f"s{seq_id}"}).encode()
        return harness.service.training.submit(caller, "save_weights", body).request_id

    later = [save(seq_id) for seq_id in (2, 3, 4)]  # nothing is saved yet: they wait for the first
    harness.wait(save(1))
    for name in later:
        error = failure(lambda name=name: harness.wait(name))
        assert isinstance(error, InvalidRequestError) and error.field == "max_checkpoint_bytes"
    harness.run("optim_step", model_id, 5, STEP)


def test_a_quota_of_checkpoints_fails_the_save_in_its_place(harness: Harness) -> None:
    model_id = harness.create_model()
    caller = Caller("local", quotas=Quotas(max_checkpoint_bytes=1000))  # for one

    def save(seq_id: int) -> str:
        body = json.dumps({"model_id": model_id, "seq_id": seq_id, "path": f"s{seq_id}"}).encode()
        return harness.service.training.submit(caller, "save_weights", body).request_id

    harness.wait(save(1))
    error = failure(lambda: harness.wait(save(2)))
    assert isinstance(error, InvalidRequestError) and error.field == "max_checkpoint_bytes"
    harness.run("optim_step", model_id, 3, STEP)
