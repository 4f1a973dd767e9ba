"""Every route × (own key, another owner's, none, a revoked one). A new route without a rule here fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from mint.server.all_routes import ROUTES
from mint.server.http.route_table import RouteRow
from tests.server.server_harness import API, BASE, Person, make_key, pass_input, running, sample_body

Row = tuple[str, str]


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


@dataclass(frozen=True)
class World:
    """Two owners at one server, and somebody whose key was revoked."""

    ann: Person
    bob: Person
    revoked: Person
    nobody: Person
    data_dir: Path


Body = Callable[[Objects], Any] | None


@dataclass(frozen=True)
class Open:
    """Everybody may ask; `status` for a stranger."""

    status: int = 200


@dataclass(frozen=True)
class Anyone:
    """Whoever has a key may ask, and sees nothing of others. `status` is what they get."""

    body: Body = None
    status: tuple[int, ...] = (200,)


@dataclass(frozen=True)
class Owned:
    """Names an object: for others it is not there. `hidden` is how that is said."""

    body: Body = None
    kind: str = "weights"
    name: str = "ck"
    hidden: tuple[int, ...] = (404,)
    status: tuple[int, ...] = (200,)


def _train(objects: Objects, **more: Any) -> dict[str, Any]:
    return {"model_id": objects.model_id, "seq_id": 9, **more}


def _complete(objects: Objects, **more: Any) -> dict[str, Any]:
    return {"model": f"tinker://{objects.model_id}/sampler_weights/sm", "max_tokens": 2, **more}


PROMPT = {"prompt": "Hi"}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
RUN = f"{API}/training_runs/{{run_id}}"
CHECKPOINT = f"{RUN}/checkpoints/{{kind}}/{{name}}"

RULES: dict[Row, Open | Anyone | Owned] = {
    ("GET", "/healthz"): Open(),
    ("GET", "/health"): Open(),
    ("GET", f"{API}/healthz"): Open(),
    ("GET", "/readyz"): Open(),
    ("GET", "/openapi.json"): Open(),
    ("GET", "/docs"): Open(),
    ("GET", f"{API}/downloads/{{run_id}}/{{kind}}/{{name}}/{{file}}"): Open(status=401),  # its address is the key
    ("GET", "/metrics"): Anyone(status=(403,)),  # for operators: ann and bob are two owners, and none is named
    ("POST", f"{API}/client/config"): Anyone(lambda o: {}),
    ("POST", f"{API}/client/dynamic_config"): Anyone(lambda o: {}),
    ("POST", f"{API}/telemetry"): Anyone(lambda o: {"events": [], "session_id": o.session_id}),
    ("POST", f"{API}/create_session"): Anyone(lambda o: {}),
    ("GET", f"{API}/get_server_capabilities"): Anyone(),
    ("GET", f"{API}/training_runs"): Anyone(),
    ("GET", f"{API}/checkpoints"): Anyone(),
    ("GET", f"{API}/sessions"): Anyone(),
    ("POST", f"{API}/sessions/search"): Anyone(lambda o: {}),
    ("GET", f"{API}/audit"): Anyone(status=(400,)),
    ("GET", f"{API}/billing/usage/events"): Anyone(status=(400,)),
    ("GET", f"{API}/billing/usage/checkpoints/current"): Anyone(status=(400,)),
    ("GET", f"{API}/models"): Anyone(),
    ("POST", f"{API}/train_step"): Anyone(lambda o: {}, status=(400,)),
    ("POST", f"{API}/mint/forward_backward_reverse_kl"): Anyone(lambda o: {}, status=(400,)),
    ("POST", f"{API}/mint/checkpoints/interpolate"): Anyone(lambda o: {}, status=(400,)),
    ("POST", f"{API}/create_custom_loss"): Anyone(lambda o: {}, status=(400,)),
    ("POST", f"{API}/auth/token"): Anyone(lambda o: {}, status=(400,)),
    ("GET", f"{API}/auth/apikey/me"): Anyone(status=(400,)),
    ("DELETE", f"{API}/auth/apikey/me"): Anyone(status=(400,)),
    ("POST", f"{API}/checkpoints/upload"): Anyone(lambda o: b"", status=(400,)),
    ("GET", f"{API}/tokenizers/{{base_model:path}}"): Anyone(),
    ("GET", "/v1/models"): Anyone(),
    ("GET", "/oai/api/v1/models"): Anyone(),
    ("POST", f"{API}/session_heartbeat"): Owned(lambda o: {"session_id": o.session_id}),
    ("POST", f"{API}/sessions/{{session_id}}/finish"): Owned(lambda o: {}),
    ("POST", f"{API}/create_model"): Owned(
        lambda o: {"session_id": o.session_id, "model_seq_id": 5, "base_model": BASE, "lora_config": {"rank": 4}}
    ),
    ("POST", f"{API}/unload_model"): Owned(lambda o: {"model_id": o.model_id}),
    ("DELETE", f"{API}/models/{{model_id}}"): Owned(),
    ("POST", f"{API}/get_info"): Owned(lambda o: {"model_id": o.model_id}),
    ("POST", f"{API}/forward"): Owned(lambda o: _train(o, forward_input=pass_input())),
    ("POST", f"{API}/forward_backward"): Owned(lambda o: _train(o, forward_backward_input=pass_input())),
    ("POST", f"{API}/optim_step"): Owned(lambda o: _train(o, adam_params={})),
    ("POST", f"{API}/save_weights"): Owned(lambda o: _train(o, path="x")),
    ("POST", f"{API}/save_weights_for_sampler"): Owned(lambda o: _train(o, path="x")),
    ("POST", f"{API}/save_weights_external"): Owned(lambda o: _train(o, path="x")),
    ("POST", f"{API}/load_weights"): Owned(lambda o: _train(o, path=o.weights, optimizer=False)),
    ("POST", f"{API}/create_sampling_session"): Owned(
        lambda o: {"session_id": o.session_id, "sampling_session_seq_id": 7, "base_model": BASE}
    ),
    ("GET", f"{API}/samplers/{{sampler_id}}"): Owned(),
    ("POST", f"{API}/asample"): Owned(lambda o: sample_body(o.sampler_id, 8)),
    # an error as the final answer of a future, as if there never had been one
    ("POST", f"{API}/retrieve_future"): Owned(lambda o: {"request_id": o.request_id}, hidden=(200, 404)),
    ("POST", f"{API}/retrieve_futures"): Owned(
        lambda o: {
            "target": {"type": "sampling_session", "sampling_session_id": o.sampler_id, "cloned_sampler_id": 0},
            "prev_cursor": 0,
            "timeout": 0,
            "retrieved_request_ids": [],
        }
    ),
    ("POST", f"{API}/cancel_future"): Owned(lambda o: {"request_id": o.sample_id}, hidden=(404,)),
    ("POST", f"{API}/join_sampling_session"): Owned(lambda o: {"sampling_session_id": o.sampler_id}),
    ("POST", f"{API}/weights_info"): Owned(lambda o: {"tinker_path": o.weights}),
    ("POST", f"{API}/copy_weights"): Owned(lambda o: {"source_path": o.weights, "destination_project_id": "p"}),
    ("GET", RUN): Owned(),
    ("GET", f"{RUN}/checkpoints"): Owned(),
    ("GET", f"{API}/checkpoints/{{alias}}"): Owned(),
    ("GET", CHECKPOINT): Owned(),
    ("DELETE", CHECKPOINT): Owned(),
    ("GET", f"{CHECKPOINT}/archive"): Owned(status=(302,)),
    ("POST", f"{CHECKPOINT}/publish"): Owned(),
    ("DELETE", f"{CHECKPOINT}/publish"): Owned(),
    ("PUT", f"{CHECKPOINT}/ttl"): Owned(lambda o: {"ttl_seconds": 7200}),
    ("GET", f"{RUN}/checkpoints/external_weights/{{name}}/external_weights_urls"): Owned(name="ex"),
    ("GET", f"{API}/sessions/{{session_id}}"): Owned(),
    ("PUT", f"{API}/sessions/{{session_id}}/project"): Owned(lambda o: {"project_id": "p"}),
    ("GET", f"{API}/sessions/{{session_id}}/trace_export"): Owned(),
    ("GET", "/v1/models/{model:path}"): Owned(),
    ("GET", "/oai/api/v1/models/{model:path}"): Owned(),
    ("POST", "/v1/completions"): Owned(lambda o: _complete(o, **PROMPT)),
    ("POST", "/oai/api/v1/completions"): Owned(lambda o: _complete(o, **PROMPT)),
    ("POST", "/v1/chat/completions"): Owned(lambda o: _complete(o, **MESSAGES)),
    ("POST", "/oai/api/v1/chat/completions"): Owned(lambda o: _complete(o, **MESSAGES)),
}
"""What each route promises. A route of the table that is missing here fails `test_every_route_has_a_rule`."""

ROWS = [row for row in ROUTES if (row.method, row.path) in RULES]
IDS = [f"{row.method} {row.path}" for row in ROWS]


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


def ask(person: Person, row: RouteRow, objects: Objects) -> Any:
    rule = RULES[row.method, row.path]
    kind, name = (rule.kind, rule.name) if isinstance(rule, Owned) else ("weights", "ck")
    values = {
        "{session_id}": objects.session_id,
        "{run_id}": objects.model_id,
        "{model_id}": objects.model_id,
        "{sampler_id}": objects.sampler_id,
        "{alias}": objects.alias,
        "{kind}": kind,
        "{name}": name,
        "{file}": "adapter_config.json",
        "{base_model:path}": BASE,
        "{model:path}": quote(f"tinker://{objects.model_id}/sampler_weights/sm"),
    }
    path = row.path
    for template, value in values.items():
        path = path.replace(template, value)
    assert "{" not in path, f"no value for {path}"
    body = None if isinstance(rule, Open) or rule.body is None else rule.body(objects)
    return person.send(row.method, path, body)


def test_every_route_has_a_rule() -> None:
    missing = [f"{row.method} {row.path}" for row in ROUTES if (row.method, row.path) not in RULES]
    assert missing == []


def test_only_what_must_be_open_is_open() -> None:
    opened = {(row.method, row.path) for row in ROUTES if row.is_open}
    assert opened == {key for key, rule in RULES.items() if isinstance(rule, Open)}


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_without_a_key_or_with_a_revoked_one_a_route_says_401(world: World, belongings: Objects, row: RouteRow) -> None:
    rule = RULES[row.method, row.path]
    for person in (world.nobody, world.revoked):
        response = ask(person, row, belongings)
        assert response.status_code == (rule.status if isinstance(rule, Open) else 401), response.text
        if not isinstance(rule, Open):
            assert "API key" in response.text
        assert not any(mark in response.text for mark in belongings.marks)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.is_open], ids=lambda row: f"{row.method} {row.path}")
def test_what_others_own_is_not_there(world: World, belongings: Objects, row: RouteRow) -> None:
    rule = RULES[row.method, row.path]
    response = ask(world.bob, row, belongings)
    if isinstance(rule, Owned):
        assert response.status_code in rule.hidden, response.text
        if response.status_code == 200:
            assert response.json()["code"] in ("NotFoundError", "SessionEndedError"), response.text
    else:
        assert response.status_code in rule.status, response.text
        assert not any(mark in response.text for mark in belongings.marks)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.is_open], ids=lambda row: f"{row.method} {row.path}")
def test_the_owner_is_let_through(world: World, row: RouteRow) -> None:
    rule = RULES[row.method, row.path]
    response = ask(world.ann, row, make_objects(world.ann) if isinstance(rule, Owned) else NOTHING)
    assert response.status_code in rule.status, response.text


NOTHING = Objects("none", "none", "none", "none", "none", "tinker://none/weights/ck", "ckpt_none")


def test_others_attempts_change_nothing(world: World, belongings: Objects) -> None:
    for row in ROWS:
        if isinstance(RULES[row.method, row.path], Owned):
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
