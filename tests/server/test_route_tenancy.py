"""Every route × (own ids, another owner's, made-up ones) × (own key, another owner's, none, a revoked one).

Requests are made from the table of routes: ids and other values go by the names of fields and path parameters. So a new
route is covered by itself, unless it has a field that no other route has; the test then asks for a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin
from urllib.parse import quote

import httpx
import pytest
from pydantic import BaseModel

from mint.server.all_routes import ROUTES
from mint.server.http.route_table import RouteRow
from mint.server.openai.routes import NOT_OFFERED as OPENAI_NOT_OFFERED
from mint.server.openai.routes import PREFIXES
from tests.server.server_harness import API, BASE, Person, make_key, pass_input, running, sample_body


@dataclass(frozen=True)
class Objects:
    """What one owner has."""

    session_id: str
    model_id: str
    sampler_id: str
    request_id: str
    sample_id: str
    weights: str
    alias: str

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that nobody else may see."""
        return (self.session_id, self.alias)

    @property
    def ids(self) -> dict[str, Any]:
        """Their names, by the names of fields and of parameters in paths."""
        return {
            "session_id": self.session_id,
            "run_id": self.model_id,
            "model_id": self.model_id,
            "sampler_id": self.sampler_id,
            "sampling_session_id": self.sampler_id,
            "request_id": self.request_id,
            "CancelFutureRequest.request_id": self.sample_id,
            "alias": self.alias,
            "tinker_path": self.weights,
            "source_path": self.weights,
            "LoadWeightsRequest.path": self.weights,
            "lora_path": f"tinker://{self.model_id}/sampler_weights/sm",
            "model": f"tinker://{self.model_id}/sampler_weights/sm",
        }

    def made_up(self) -> Objects:
        """Ids of the same form that name nothing."""
        other = str.maketrans("0123456789abcdef", "123456789abcdef0")
        session_id, alias = self.session_id[-32:].translate(other), self.alias[5:].translate(other)
        return Objects(*(self.renamed(value, session_id, alias) for value in vars(self).values()))

    def renamed(self, text: str, session_id: str, alias: str) -> str:
        """The text with other ids in place of these."""
        return text.replace(self.session_id[-32:], session_id).replace(self.alias[5:], alias)


VALUES: Mapping[str, Any] = {
    "kind": "weights",
    "name": "ck",
    "file": "adapter_config.json",
    "base_model": BASE,
    "seq_id": 9,
    "model_seq_id": 5,
    "sampling_session_seq_id": 7,
    "SampleRequest.seq_id": 8,
    "path": "x",
    "forward_input": pass_input(),
    "forward_backward_input": pass_input(),
    "adam_params": {},
    "lora_config": {"rank": 4},
    "optimizer": False,
    "SampleRequest.prompt": sample_body("", 0)["prompt"],
    "CompletionRequest.prompt": "Hi",
    "InputTokensRequest.input": "Hi",
    "ResponsesRequest.input": "Hi",
    "max_output_tokens": 2,
    "lora_name": "named",
    "JoinSamplerRequest.address": "http://127.0.0.1:1",
    "JoinSamplerRequest.key": "k" * 16,
    "UnloadLoraRequest.lora_name": "never loaded",
    "load_inplace": True,
    "DetokenizeRequest.tokens": [5, 6],
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 2,
    "ttl_seconds": 7200,
    "project_id": "p",
    "destination_project_id": "p",
    "timeout": 0,
}
"""Values of what names no object, by the name of the field or parameter."""

SELDOM = frozenset(
    {
        "LoadWeightsRequest.session_id",
        "LoadWeightsRequest.model_seq_id",
        "LoadWeightsRequest.base_model",
        "CreateSessionRequest.project_id",
        "CopyWeightsRequest.session_id",
        "CopyWeightsRequest.model_seq_id",
        "CopyWeightsRequest.ttl_seconds",
        "CreateModelRequest.user_metadata",
        "TokenizeRequest.prompt",
    }
)
"""Optional fields that do not go together with the others of their message."""

OPEN = {
    ("GET", "/healthz"): 200,
    ("GET", "/health"): 200,
    ("GET", f"{API}/healthz"): 200,
    ("GET", "/readyz"): 200,
    ("GET", "/openapi.json"): 200,
    ("GET", "/docs"): 200,
    ("GET", f"{API}/downloads/{{run_id}}/{{kind}}/{{name}}/{{file}}"): 401,  # the signature in its address is the key
}
"""Everybody may ask; what they get."""

NOT_OFFERED = {
    f"{API}/audit",
    f"{API}/billing/usage/events",
    f"{API}/billing/usage/checkpoints/current",
    f"{API}/train_step",
    f"{API}/mint/forward_backward_reverse_kl",
    f"{API}/mint/checkpoints/interpolate",
    f"{API}/create_custom_loss",
    f"{API}/auth/token",
    f"{API}/auth/apikey/me",
}
STATUS = {
    **dict.fromkeys(NOT_OFFERED, 400),
    **dict.fromkeys((f"{prefix}/{path}" for prefix in PREFIXES for path in OPENAI_NOT_OFFERED), 404),
    **dict.fromkeys((f"{prefix}/unload_lora_adapter" for prefix in PREFIXES), 404),
    f"{API}/checkpoints/upload": 400,  # an empty body
    "/metrics": 403,  # for operators: ann and bob are two owners, and none is named
    f"{API}/cluster": 403,  # the same
    f"{API}/samplers": 403,
    f"{API}/samplers/loras/{{name}}": 403,
    f"{API}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}/archive": 302,
}
"""What the owner gets, where it is not 200."""

HIDDEN = {
    f"{API}/retrieve_future": 200,  # an error is the final result of a future, as if there never had been one
    f"{API}/sessions/search": 200,  # nothing is found
}
"""How it is said that there is no such thing, where it is not 404."""

ROWS = ROUTES
IDS = [f"{row.method} {row.path}" for row in ROWS]
KEYED = [row for row in ROWS if not row.is_open]
KEYED_IDS = [f"{row.method} {row.path}" for row in KEYED]


@dataclass(frozen=True)
class World:
    """Two owners at one server, and somebody whose key was revoked."""

    ann: Person
    bob: Person
    revoked: Person
    nobody: Person
    data_dir: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data_dir = tmp_path_factory.mktemp("tenancy")
    keys = {owner: make_key(data_dir, owner) for owner in ("ann", "bob", "carl")}
    with running(data_dir) as server:
        row = next(row for row in server.keys.list() if row.owner == "carl")
        server.keys.revoke(row.key_id)
        people = {owner: Person(server, key) for owner, key in keys.items()}
        yield World(people["ann"], people["bob"], people["carl"], Person(server), data_dir)


@pytest.fixture(scope="module")
def belongings(world: World) -> Objects:
    """Ann's, which the others try to reach."""
    return make_objects(world.ann)


def make_objects(person: Person) -> Objects:
    session_id = person.session()
    model_id = person.model(session_id)
    promise = person.post(
        "forward_backward", {"model_id": model_id, "seq_id": 1, "forward_backward_input": pass_input()}
    )
    person.result(promise["request_id"])
    weights = person.done("save_weights", {"model_id": model_id, "seq_id": 2, "path": "ck"})["path"]
    person.done("save_weights_for_sampler", {"model_id": model_id, "seq_id": 3, "path": "sm"})
    person.done("save_weights_external", {"model_id": model_id, "seq_id": 4, "path": "ex"})
    # the numbers up to the one that the rules use
    for seq_id in range(5, 9):
        person.done("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
    sampler_id = person.sampler(session_id)
    sample_id = person.post("asample", sample_body(sampler_id))["request_id"]
    person.result(sample_id)
    listed = person.send("GET", f"{API}/training_runs/{model_id}/checkpoints/weights/ck").json()
    return Objects(session_id, model_id, sampler_id, promise["request_id"], sample_id, weights, listed["alias"])


def ask(person: Person, row: RouteRow, objects: Objects) -> httpx.Response:
    path = row.path
    for part in [part for part in path.split("/") if part.startswith("{")]:
        name = part.strip("{}").partition(":")[0]
        value = "ex" if name == "name" and "external_weights" in path else objects.ids.get(name, VALUES.get(name))
        assert value is not None, f"give a value for {name} of {path}, in `Objects.ids` or in VALUES"
        path = path.replace(part, quote(value) if name == "model" else value)
    return person.send(row.method, path, _body(row, objects))


def _body(row: RouteRow, objects: Objects) -> Any:
    if row.streams_body:
        return b"" if row.path.endswith("upload") else {"events": [], "session_id": objects.session_id}
    if row.request is not None:
        return _message(row.request, objects)
    return None if row.method in ("GET", "DELETE") else {}


def _message(kind: type[BaseModel], objects: Objects) -> dict[str, Any]:
    """A message with all fields that have a value here, and with all that it needs."""
    body: dict[str, Any] = {}
    known = {**VALUES, **objects.ids}
    for name, field in kind.model_fields.items():
        full = f"{kind.__name__}.{name}"
        nested = _message_of(field.annotation)
        if full in SELDOM:
            continue
        if full in known or name in known:
            body[name] = known.get(full, known.get(name))
        elif nested is not None and field.is_required():
            body[name] = _message(nested, objects)
        else:
            assert not field.is_required(), f"give a value for {full}, in `Objects.ids` or in VALUES"
    return body


def _message_of(annotation: Any) -> type[BaseModel] | None:
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def names_something(row: RouteRow, objects: Objects) -> bool:
    """Whether a request carries an id of an object, and not only for the record."""
    in_path = any(f"{{{name}" in row.path for name in objects.ids)
    return in_path or (not row.streams_body and any(mark in str(_body(row, objects)) for mark in objects.marks))


def test_only_what_must_be_open_is_open() -> None:
    assert {(row.method, row.path) for row in ROUTES if row.is_open} == set(OPEN)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_without_a_key_or_with_a_revoked_one_a_route_says_401(world: World, belongings: Objects, row: RouteRow) -> None:
    for person in (world.nobody, world.revoked):
        response = ask(person, row, belongings)
        assert response.status_code == (OPEN[row.method, row.path] if row.is_open else 401), response.text
        if not row.is_open:
            assert "API key" in response.text
        assert not any(mark in response.text for mark in belongings.marks)


@pytest.mark.parametrize("row", KEYED, ids=KEYED_IDS)
def test_what_others_own_is_not_there_in_the_words_for_what_nobody_owns(
    world: World, belongings: Objects, row: RouteRow
) -> None:
    response, unknown = (ask(world.bob, row, objects) for objects in (belongings, belongings.made_up()))
    if not names_something(row, belongings):
        assert response.status_code == STATUS.get(row.path, 200), response.text
        assert not any(mark in response.text for mark in belongings.marks)
        return
    assert response.status_code == HIDDEN.get(row.path, 404), response.text
    assert _without_ids(response, belongings) == _without_ids(unknown, belongings)


def _without_ids(response: httpx.Response, objects: Objects) -> tuple[int, str, dict[str, str]]:
    """All that the sender learns, with one word for each id, whether it is somebody's or made up."""
    text = response.text
    for named in (objects, objects.made_up()):
        text = named.renamed(text, "SESSION", "ALIAS")
    headers = {name: value for name, value in response.headers.items() if name not in ("date", "x-request-id")}
    return response.status_code, text, headers


@pytest.mark.parametrize("row", KEYED, ids=KEYED_IDS)
def test_the_owner_is_let_through(world: World, belongings: Objects, row: RouteRow) -> None:
    own = make_objects(world.ann) if names_something(row, belongings) else belongings
    response = ask(world.ann, row, own)
    assert response.status_code == STATUS.get(row.path, 200), response.text
    if names_something(row, own) and row.path.endswith("retrieve_future"):
        assert "error" not in response.json()


def test_others_attempts_change_nothing(world: World, belongings: Objects) -> None:
    for row in KEYED:
        if names_something(row, belongings):
            ask(world.bob, row, belongings)
    listed = world.ann.send("GET", f"{API}/training_runs/{belongings.model_id}/checkpoints").json()["checkpoints"]
    assert sorted(item["checkpoint_id"] for item in listed) == [
        "external_weights/ex",
        "sampler_weights/sm",
        "weights/ck",
    ]
    assert not any(item["public"] for item in listed)
    world.ann.done("optim_step", {"model_id": belongings.model_id, "seq_id": 9, "adam_params": {}})


def test_metrics_are_for_operators_and_name_nobody(tmp_path: Path) -> None:
    keys = {owner: make_key(tmp_path, owner) for owner in ("ann", "bob", "scraper")}
    with running(tmp_path, operators=("scraper",)) as server:
        person = Person(server, keys["ann"])
        session_id = person.session()
        for other in ("ann", "bob"):
            refused = Person(server, keys[other]).send("GET", "/metrics")
            assert refused.status_code == 403 and "--operator" in refused.json()["remedy"]
            assert "mint_" not in refused.text
        text = Person(server).send("GET", "/metrics", None, authorization=f"Bearer {keys['scraper']}").text
    assert "mint_requests_total" in text
    assert not any(name in text for name in ("ann", "bob", session_id))
