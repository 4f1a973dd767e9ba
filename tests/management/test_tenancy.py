"""What another owns does not exist, unless they have published it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from owners import Place, refusal

import mint
from mint.client.rest_client import RestClient
from mint.errors import NotFoundError

Ask = Callable[[RestClient, str, str], object]
"""(who asks, alice's run, alice's checkpoint)."""

CHANGES: dict[str, Ask] = {
    "delete": lambda rest, _run, path: rest.delete_checkpoint_from_tinker_path(path).result(),
    "publish": lambda rest, _run, path: rest.publish_checkpoint_from_tinker_path(path).result(),
    "unpublish": lambda rest, _run, path: rest.unpublish_checkpoint_from_tinker_path(path).result(),
    "ttl": lambda rest, _run, path: rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(),
    "no ttl": lambda rest, _run, path: rest.set_checkpoint_ttl_from_tinker_path(path, None).result(),
}
QUESTIONS: dict[str, Ask] = {
    "run": lambda rest, run, _path: rest.get_training_run(run, "accessible").result(),
    "checkpoints": lambda rest, run, _path: rest.list_checkpoints(run).result(),
    "checkpoint": lambda rest, _run, path: rest.get_checkpoint(path).result(),
    "weights info": lambda rest, _run, path: rest.get_weights_info_by_tinker_path(path).result(),
    "copy": lambda rest, _run, path: rest.copy_weights(path).result(),
}


@pytest.mark.parametrize("ask", [*CHANGES.values(), *QUESTIONS.values()], ids=[*CHANGES, *QUESTIONS])
def test_what_another_owns_is_not_there(place: Place, ask: Ask) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    error = refusal(lambda: ask(place.rest("bob"), trainer.model_id, path))
    assert isinstance(error, NotFoundError)
    assert "not a" in str(error)
    assert place.rest("alice").get_checkpoint(path).result().public is False


@pytest.mark.parametrize("ask", CHANGES.values(), ids=CHANGES)
def test_what_is_published_is_still_not_anybodys_to_change(place: Place, ask: Ask) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    alice = place.rest("alice")
    alice.publish_checkpoint_from_tinker_path(path).result()
    assert isinstance(refusal(lambda: ask(place.rest("bob"), trainer.model_id, path)), NotFoundError)
    kept = alice.get_checkpoint(path).result()
    assert (kept.public, kept.expires_at) == (True, None)


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_publishing_makes_readable_and_unpublishing_hides_again(place: Place, ask: Ask) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    trainer.save_state("secret").result()
    alice, bob = place.rest("alice"), place.rest("bob")
    alice.publish_checkpoint_from_tinker_path(path).result()
    ask(bob, trainer.model_id, path)
    assert [kept.checkpoint_id for kept in bob.list_checkpoints(trainer.model_id).result().checkpoints] == [
        "weights/one"
    ]
    alice.unpublish_checkpoint_from_tinker_path(path).result()
    assert isinstance(refusal(lambda: ask(bob, trainer.model_id, path)), NotFoundError)


def test_a_published_checkpoint_is_trained_on_and_sampled_by_others(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    place.rest("alice").publish_checkpoint_from_tinker_path(path).result()
    bob = place.client("bob")
    assert bob.create_training_client_from_state(path).get_info().lora_rank == 4
    sampler = bob.create_sampling_client(model_path=path)
    params = mint.types.SamplingParams(max_tokens=2)
    assert sampler.sample(mint.types.ModelInput.from_ints([1, 2]), 1, params).result().sequences


def test_listings_hold_what_is_published_only_where_the_scope_says_so(place: Place) -> None:
    trainer = place.trainer("alice", user_metadata={"note": "private"})
    path = trainer.save_state("one").result().path
    place.rest("alice").publish_checkpoint_from_tinker_path(path).result()
    place.trainer("bob").save_state("mine").result()
    bob = place.rest("bob")
    own, accessible = bob.list_training_runs().result(), bob.list_training_runs(access_scope="accessible").result()
    assert [run.model_owner for run in own.training_runs] == ["bob"]
    assert [run.model_owner for run in accessible.training_runs] == ["bob", "alice"]
    assert accessible.training_runs[1].user_metadata is None
    assert len(bob.list_user_checkpoints().result().checkpoints) == 1
    assert len(bob.list_user_checkpoints(access_scope="accessible").result().checkpoints) == 2
    assert isinstance(refusal(lambda: bob.get_training_run(trainer.model_id).result()), NotFoundError)


def test_sessions_and_samplers_of_others_are_not_there(place: Place) -> None:
    alice = place.client("alice")
    alice.create_sampling_client(base_model="mint/tiny").result()
    bob = place.rest("bob")
    for ask in (
        lambda: bob.get_session(alice.session_id).result(),
        lambda: bob.get_sampler(f"{alice.session_id}:sample:0").result(),
        lambda: bob.assign_session_project(alice.session_id, "mine").result(),
    ):
        assert isinstance(refusal(ask), NotFoundError)
    assert bob.list_sessions().result().sessions == []
    found = bob.search_sessions(
        mint.types.SessionSearchRequest(
            session_id=alice.session_id, owner=mint.types.SessionSearchOwner(type="accessible")
        )
    )
    assert found.result().sessions == []


def test_nobody_can_open_a_session_under_the_name_of_a_copys_run(place: Place) -> None:
    path = place.trainer("alice").save_state("one").result().path
    copy = place.rest("alice").copy_weights(path).result()
    session_id = copy.removeprefix("mint://").partition(":")[0]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "mint/tiny"}
    answer = httpx.post(f"{place.url}/api/v1/create_model", json=body, headers={"x-api-key": "bob"})
    assert answer.status_code == 404
    assert place.rest("bob").list_sessions().result().sessions == []
    assert session_id in place.rest("alice").list_sessions().result().sessions
