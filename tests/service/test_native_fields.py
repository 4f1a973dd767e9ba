"""Every field of every request of the protocol is honoured or refused by name; none is ignored in silence.

Generated from `mint.wire.requests`: a field that is added there is tried here. `tests/wire/test_sdk_request_types.py`
holds those types to the newest public SDK.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest
from default_engine import fake_engine
from http_server import http_server
from pydantic import BaseModel
from service_harness import BASE, datum

from mint.types.value_classes import ArrayValue
from mint.wire import requests

ODD: tuple[Any, ...] = ({"odd": "value"}, "odd", 0.37, [[{"odd": 1}]])
"""No field takes all of these."""

PASS = {"data": [datum(1, 2, 3, 4)], "loss_fn": "cross_entropy"}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
CHECKPOINT = "tinker://run:train:0/weights/none"


class Lab:
    """A session over HTTP, and a new model or number for each request, so that none depends on another."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._numbers = itertools.count(1)
        self.session = self._post("create_session", {})["session_id"]
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": BASE}
        self.sampler = self._post("create_sampling_session", body)["sampling_session_id"]

    @property
    def number(self) -> int:
        """One that was not used before."""
        return next(self._numbers)

    def model(self) -> dict[str, Any]:
        """A new model, and the number of its first request."""
        body = {"session_id": self.session, "model_seq_id": self.number, "base_model": BASE}
        return {"model_id": self.result("create_model", body)["model_id"], "seq_id": 1}

    def result(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, or, where it promises one, the result."""
        answer = self._post(route, body)
        while "request_id" in answer and "error" not in answer:
            request_id = answer["request_id"]
            answer = self._post("retrieve_future", {"request_id": request_id})
            if answer.get("type") != "try_again":
                return answer
            answer["request_id"] = request_id
        return answer

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(route, json=body).json()
        return answer


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = http_server(tmp_path_factory.mktemp("fields"), engine=fake_engine())
    with server as url, httpx.Client(base_url=f"{url}/api/v1/", timeout=60) as http:
        yield Lab(http)


BODIES: dict[type[BaseModel], tuple[str, Any]] = {
    requests.ResizeClusterRequest: ("cluster", lambda lab: {"trainers": 1, "samplers": 1}),
    requests.JoinSamplerRequest: ("samplers", lambda lab: {"address": "http://127.0.0.1:1", "key": "k" * 16}),
    # a request: its route, and a body that is accepted
    requests.ClientConfigRequest: ("client/config", lambda lab: {}),
    requests.CreateSessionRequest: ("create_session", lambda lab: {}),
    requests.SessionRequest: ("session_heartbeat", lambda lab: {"session_id": lab.session}),
    requests.FinishSessionRequest: ("sessions/none/finish", lambda lab: {"reason": {"type": "success"}}),
    requests.CreateModelRequest: (
        "create_model",
        lambda lab: {"session_id": lab.session, "model_seq_id": lab.number, "base_model": BASE, "lora_config": {}},
    ),
    requests.ModelRequest: ("get_info", lambda lab: {"model_id": lab.model()["model_id"]}),
    requests.UnloadModelRequest: ("unload_model", lambda lab: {"model_id": lab.model()["model_id"]}),
    requests.ForwardBackwardRequest: ("forward_backward", lambda lab: {**lab.model(), "forward_backward_input": PASS}),
    requests.ForwardRequest: ("forward", lambda lab: {**lab.model(), "forward_input": PASS}),
    requests.OptimStepRequest: ("optim_step", lambda lab: {**lab.model(), "adam_params": {}}),
    requests.SaveWeightsRequest: ("save_weights", lambda lab: {**lab.model(), "path": "a"}),
    requests.SaveWeightsForSamplerRequest: ("save_weights_for_sampler", lambda lab: {**lab.model(), "path": "a"}),
    requests.SaveWeightsExternalRequest: ("save_weights_external", lambda lab: {**lab.model(), "path": "a"}),
    requests.LoadWeightsRequest: ("load_weights", lambda lab: {**lab.model(), "path": CHECKPOINT}),
    requests.CreateSamplingSessionRequest: (
        "create_sampling_session",
        lambda lab: {"session_id": lab.session, "sampling_session_seq_id": lab.number, "base_model": BASE},
    ),
    requests.SampleRequest: (
        "asample",
        lambda lab: {
            "sampling_session_id": lab.sampler,
            "seq_id": lab.number,
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 1},
        },
    ),
    requests.WeightsInfoRequest: ("weights_info", lambda lab: {"tinker_path": CHECKPOINT}),
    requests.RetrieveFutureRequest: ("retrieve_future", lambda lab: {"request_id": "none"}),
    requests.RetrieveFuturesRequest: (
        "retrieve_futures",
        lambda lab: {"target": {"sampling_session_id": lab.sampler}, "timeout": 0.0},
    ),
    requests.JoinSamplingSessionRequest: ("join_sampling_session", lambda lab: {"sampling_session_id": lab.sampler}),
    requests.CancelFutureRequest: ("cancel_future", lambda lab: {"request_id": "none"}),
}

PARTS = {requests.FinishReason, requests.ForwardBackwardInput, requests.SamplingSessionTarget}
"""Of requests, and tried within them."""

ANY: dict[tuple[str, ...], str] = {
    ("type",): "each route takes one kind of request",
    ("reason", "type"): "an SDK of tomorrow may have other reasons",
}
"""Fields that take any value, and why."""


def kinds() -> set[type[BaseModel]]:
    found = {kind for _, kind in inspect.getmembers(requests, inspect.isclass) if kind.__module__ == requests.__name__}
    return {kind for kind in found if issubclass(kind, BaseModel)} - {requests.WireRequest}


def message_in(annotation: Any) -> type[BaseModel] | None:
    """The message in an annotation, also one of a list of them; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, ArrayValue):
        return annotation.json_form
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := message_in(part)) is not None), None)


def fields_of(kind: type[BaseModel], body: Any) -> Iterator[tuple[str, ...]]:
    """Every field of a request, and those of the parts that `body` has."""
    for name, field in kind.model_fields.items():
        yield (name,)
        part = message_in(field.annotation)
        inside = body.get(name) if isinstance(body, dict) else None
        if part is not None and isinstance(inside, dict):
            yield from ((name, *rest) for rest in fields_of(part, inside))


class _NoLab:
    """Bodies without a server, to list their fields."""

    session = sampler = "none"
    number = 1

    def model(self) -> dict[str, Any]:
        return {"model_id": "none", "seq_id": 1}


CASES = [(kind, path) for kind, (_, make) in BODIES.items() for path in fields_of(kind, make(_NoLab()))]


def test_every_request_is_tried() -> None:
    assert kinds() == {*BODIES, *PARTS}


def changed(body: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**body, name: changed(body[name], tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    ("kind", "path"), CASES, ids=lambda part: part.__name__ if isinstance(part, type) else ".".join(part)
)
def test_no_field_takes_any_value(lab: Lab, kind: type[BaseModel], path: tuple[str, ...]) -> None:
    route, make = BODIES[kind]
    answers = [lab.result(route, changed(make(lab), path, odd)) for odd in ODD]
    refused = [str(answer) for answer in answers if "error" in answer and path[-1] in str(answer.get("field"))]
    if path in ANY:
        return
    assert refused, (path, answers)


REFUSED: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    # what the server cannot do: the field that the error names, and a request that asks for it
    "rollout_correction_config": (requests.CreateModelRequest, {"rollout_correction_config": {"kind": "tis"}}),
    "optimizer_config.type": (requests.CreateModelRequest, {"optimizer_config": {"type": "dimuon", "version": 1}}),
    "optimizer_config.version": (requests.CreateModelRequest, {"optimizer_config": {"type": "adamw", "version": 1}}),
    "optimizer_params.type": (requests.OptimStepRequest, {"optimizer_params": {"type": "dimuon", "learning_rate": 1}}),
    "optimizer_params.learning_rate": (
        requests.OptimStepRequest,
        {"optimizer_params": {"type": "adamw", "learning_rate": 1}},
    ),
    "kind": (requests.SaveWeightsForSamplerRequest, {"kind": "inflight"}),
    "age_encryption_recipients": (requests.SaveWeightsExternalRequest, {"age_encryption_recipients": ["age1"]}),
    "weights_access_token": (requests.LoadWeightsRequest, {"weights_access_token": "token"}),
    "loss_fn": (requests.ForwardBackwardRequest, {"forward_backward_input": {**PASS, "loss_fn": "custom"}}),
    "base_model": (requests.SampleRequest, {"base_model": BASE}),
    "model_path": (requests.SampleRequest, {"model_path": CHECKPOINT}),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_a_remedy(lab: Lab, field: str) -> None:
    kind, change = REFUSED[field]
    route, make = BODIES[kind]
    answer = lab.result(route, {**make(lab), **change})
    assert answer["category"] == "user" and answer["field"] == field and len(answer["remedy"]) > 10, answer


def test_a_loaded_model_cannot_get_another_optimizer(lab: Lab) -> None:
    trained = lab.model()
    path = lab.result("save_weights", {**trained, "path": "kept"})["path"]
    body = {**trained, "seq_id": 2, "path": path, "optimizer_config": {"type": "dimuon"}}
    assert lab.result("load_weights", body)["field"] == "optimizer_config.type"


def test_a_model_goes_on_after_inflight_weights_were_refused(lab: Lab) -> None:
    model = lab.model()
    lab.result("save_weights_for_sampler", {**model, "sampling_session_seq_id": lab.number, "kind": "inflight"})
    assert "error" not in lab.result("optim_step", {**model, "seq_id": 2})
