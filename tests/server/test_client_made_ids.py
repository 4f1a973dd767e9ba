"""Ids of sessions that clients choose: two owners who choose the same one neither meet nor learn of each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_harness import API, BASE, Person, make_key, pass_input, running

CHOSEN = "queue-2f9c1a"
STEP = {"adam_params": {"learning_rate": 0.001}}


@pytest.fixture
def people(tmp_path: Path) -> Iterator[tuple[Person, Person]]:
    """Ann, who was first, and Eve."""
    keys = [make_key(tmp_path, owner) for owner in ("ann", "eve")]
    with running(tmp_path) as server:
        yield Person(server, keys[0]), Person(server, keys[1])


def create(person: Person, session_id: str, *, seed: int = 1) -> dict[str, Any]:
    lora = {"rank": 4, "seed": seed}
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
    response = person.send("POST", f"{API}/create_model", body)
    return {"status": response.status_code, **response.json()}


def train(person: Person, model_id: str) -> str:
    person.done("forward_backward", {"model_id": model_id, "seq_id": 1, "forward_backward_input": pass_input()})
    return person.done("optim_step", {"model_id": model_id, "seq_id": 2, **STEP})["state_digest"]


def test_two_owners_train_in_sessions_of_one_chosen_id(people: tuple[Person, Person]) -> None:
    made = [create(person, CHOSEN, seed=7) for person in people]
    models = [person.result(answer["request_id"])["model_id"] for person, answer in zip(people, made, strict=True)]
    assert models[0] != models[1]
    assert create(people[0], CHOSEN, seed=7)["request_id"] == made[0]["request_id"]  # a repeated request
    assert train(people[0], models[0]) == train(people[1], models[1])
    for stranger, model_id in ((people[1], models[0]), (people[0], models[1])):
        assert stranger.send("POST", f"{API}/get_info", {"model_id": model_id}).status_code == 404


def test_what_eve_hears_does_not_tell_whether_ann_has_chosen_an_id(people: tuple[Person, Person]) -> None:
    ann, eve = people
    anns = ann.result(create(ann, CHOSEN)["request_id"])["model_id"].partition(":")[0]
    made_by_server = ann.session()

    def hears(session_id: str) -> list[Any]:
        sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
        answers: list[Any] = []
        for path, body in (
            ("session_heartbeat", {"session_id": session_id}),
            (f"sessions/{session_id}/finish", {}),
            ("create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": BASE}),
            ("create_sampling_session", sampler),
            ("session_heartbeat", {"session_id": session_id}),
            (f"sessions/{session_id}/finish", {}),
            ("create_model", {"session_id": session_id, "model_seq_id": 1, "base_model": BASE}),
        ):
            response = eve.send("POST", f"{API}/{path}", body)
            answers.append((path.replace(session_id, "ID"), response.status_code, sorted(response.json())))
        return answers

    unknown = hears("nobody-chose-this")
    assert hears(CHOSEN) == unknown
    assert hears(anns) == unknown
    assert hears(made_by_server) == hears(f"sess-{0:032}")
    for session_id in (CHOSEN, made_by_server):
        assert ann.send("POST", f"{API}/session_heartbeat", {"session_id": session_id}).status_code == 200
    train(ann, f"{anns}:train:0")


def test_the_chosen_id_leads_to_the_session_again_also_after_a_restart(tmp_path: Path) -> None:
    key = make_key(tmp_path, "ann")
    with running(tmp_path) as server:
        ann = Person(server, key)
        model_id = ann.result(create(ann, CHOSEN)["request_id"])["model_id"]
    with running(tmp_path) as server:
        ann = Person(server, key)
        assert ann.send("POST", f"{API}/session_heartbeat", {"session_id": CHOSEN}).status_code == 200
        assert ann.result(create(ann, CHOSEN)["request_id"])["model_id"] == model_id
        train(ann, model_id)
        assert ann.send("POST", f"{API}/sessions/{CHOSEN}/finish", {}).status_code == 200
        assert ann.send("POST", f"{API}/get_info", {"model_id": model_id}).status_code == 404


def test_without_keys_the_chosen_id_is_the_sessions_id(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        person = Person(server)
        model_id = person.result(create(person, CHOSEN)["request_id"])["model_id"]
        assert model_id == f"{CHOSEN}:train:0"
        train(person, model_id)


def test_a_request_for_a_session_that_comes_again_gets_the_same_one_also_after_a_restart(tmp_path: Path) -> None:
    keys = [make_key(tmp_path, owner) for owner in ("ann", "eve")]
    wanted, other = {"request_key": "0" * 32}, {"request_key": "1" * 32}

    def opened(person: Person, body: dict[str, Any]) -> str:
        return person.post("create_session", body)["session_id"]

    with running(tmp_path, owner_sessions=2) as server:
        ann, eve = (Person(server, key) for key in keys)
        first = opened(ann, wanted)
        assert opened(ann, wanted) == first
        assert opened(ann, other) != first
        assert opened(ann, wanted) == first  # a full quota does not stop a copy
        assert opened(eve, wanted) != first
        assert ann.send("POST", f"{API}/create_session", {"request_key": "2" * 32}).status_code == 403
        assert ann.send("POST", f"{API}/create_session", {"request_key": "short"}).status_code == 400
    with running(tmp_path, owner_sessions=2) as server:
        ann = Person(server, keys[0])
        assert opened(ann, wanted) == first
        assert len(server.service.session_owners) == 3
        assert ann.model(first)
