"""vLLM's routes for LoRA adapters: an owner's name for a checkpoint is a model of `/v1`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from field_checks import check_field, check_refused
from openai_server import MODEL, Server

import mint
from mint.server.lora_names import MAX_NAMES
from mint.types import AdamParams, Datum, ModelInput

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "What is 3 + 4?\n"


def save(trainer: mint.TrainingClient, name: str, text: str) -> str:
    """Trains a step, and saves the weights; returns their path."""
    tokens = trainer.get_tokenizer().encode(PROMPT + text)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    data = [Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)] * 2
    trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(AdamParams(learning_rate=5e-2)).result()
    return trainer.save_weights_for_sampler(name).result().path


@pytest.fixture(scope="module")
def paths(server: Server) -> Iterator[tuple[str, str]]:
    """Ada's checkpoints."""
    with server.mint_client() as service:
        trainer = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)
        yield save(trainer, "first", "abc"), save(trainer, "second", "xyz")


def said(client: openai.OpenAI, model: str) -> list[float]:
    got = client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=0)
    return got.choices[0].logprobs.token_logprobs


def load(http: httpx.Client, name: str, path: str, **fields: Any) -> httpx.Response:
    return http.post(LOAD, json={"lora_name": name, "lora_path": path, **fields})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post(UNLOAD, json={"lora_name": name})


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_loaded_name_is_a_model_until_it_is_unloaded(
    http: httpx.Client, client: openai.OpenAI, paths: tuple[str, str]
) -> None:
    first, second = paths
    loaded = load(http, "mine", first)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert said(client, "mine") == said(client, first) != said(client, MODEL)
    (shown,) = [model for model in client.models.list() if model.id == "mine"]
    assert (shown.root, shown.owned_by) == (MODEL, "ada")
    assert client.models.retrieve("mine").root == MODEL
    assert client.responses.create(model="mine", input="Hi", max_output_tokens=2).model == "mine"

    assert "load_inplace" in error_of(load(http, "mine", second), 400)["message"]
    assert load(http, "mine", second, load_inplace=True).status_code == 200
    assert said(client, "mine") == said(client, second) != said(client, first)

    unloaded = unload(http, "mine")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    with pytest.raises(openai.NotFoundError):
        said(client, "mine")
    assert "mine" not in [model.id for model in client.models.list()]
    assert error_of(unload(http, "mine"), 404)["param"] == "lora_name"
    assert said(client, second)


def test_names_are_those_of_their_owner(server: Server, http: httpx.Client, paths: tuple[str, str]) -> None:
    assert load(http, "private", paths[0]).status_code == 200
    with httpx.Client(base_url=server.url, headers={"x-api-key": server.keys["bob"]}, timeout=60) as bobs:
        for there, made_up in ((paths[0], paths[0].replace("first", "third")),):
            answers = [error_of(load(bobs, "his", path), 404) for path in (there, made_up)]
            assert [answer["param"] for answer in answers] == ["lora_path", "lora_path"]
            assert answers[0]["message"].replace(there, made_up) == answers[1]["message"]
        assert error_of(unload(bobs, "private"), 404)
    with server.client("bob") as bob:
        with pytest.raises(openai.NotFoundError):
            said(bob, "private")
        assert "private" not in [model.id for model in bob.models.list()]
    with server.client() as ada:
        assert said(ada, "private")
    assert unload(http, "private").status_code == 200


def test_a_published_checkpoint_can_be_loaded_by_everybody(
    server: Server, http: httpx.Client, paths: tuple[str, str]
) -> None:
    with server.mint_client() as service:
        service.create_rest_client().publish_checkpoint_from_tinker_path(paths[0]).result()
    with httpx.Client(base_url=server.url, headers={"x-api-key": server.keys["bob"]}, timeout=60) as bobs:
        assert load(bobs, "adas", paths[0]).status_code == 200
        with server.client("bob") as bob:
            assert said(bob, "adas")
        assert unload(bobs, "adas").status_code == 200


@pytest.mark.parametrize("path", ["/etc", "./adapter", "adapter", "../data", "file:///etc", "mint://nothing", "ckpt_0"])
def test_a_path_that_is_no_checkpoint_is_refused(http: httpx.Client, path: str) -> None:
    error = error_of(load(http, "mine", path), 400 if "://" not in path and "ckpt" not in path else 404)
    assert error["param"] == "lora_path" and path in error["message"]


@pytest.mark.parametrize("name", [MODEL, "", "a" * 257, "mint://a", "ckpt_a"])
def test_a_name_that_is_taken_or_misleads_is_refused(http: httpx.Client, paths: tuple[str, str], name: str) -> None:
    assert error_of(load(http, name, paths[0]), 400)["param"] == "lora_name"


def test_a_runs_id_cannot_be_a_name_whoever_has_the_run_or_nobody(http: httpx.Client, paths: tuple[str, str]) -> None:
    run = paths[0].partition("://")[2].partition("/")[0]
    nobodys = run.translate(str.maketrans("0123456789", "1234567890"))
    answers = [error_of(load(http, name, paths[0]), 400) for name in (run, nobodys)]
    assert answers[0]["message"].replace(run, nobodys) == answers[1]["message"]


def test_the_base_model_is_compared(http: httpx.Client, paths: tuple[str, str]) -> None:
    assert error_of(load(http, "mine", paths[0], base_model_name="other"), 400)["param"] == "base_model_name"
    assert load(http, "mine", paths[0], base_model_name=MODEL).status_code == 200
    assert unload(http, "mine").status_code == 200


def test_an_owner_has_only_so_many_names(server: Server, http: httpx.Client, paths: tuple[str, str]) -> None:
    names = [f"name-{number}" for number in range(MAX_NAMES)]
    lora = server.running.service.lora_names
    assert load(http, names[0], paths[0]).status_code == 200
    found = lora.find("ada", names[0])
    assert found is not None
    for name in names[1:]:
        lora.load("ada", name, found, in_place=False)
    assert str(MAX_NAMES) in error_of(load(http, "one-more", paths[0]), 403)["message"]
    assert load(http, names[0], paths[1], load_inplace=True).status_code == 200
    for name in names:
        lora.unload("ada", name)


@pytest.mark.parametrize("name", ["lora_name", "lora_path", "load_inplace", "base_model_name", "is_3d_lora_weight"])
def test_every_field_of_loading_is_honoured_or_refused_by_name(
    http: httpx.Client, paths: tuple[str, str], name: str
) -> None:
    body = {"lora_name": "odd", "lora_path": paths[0], "load_inplace": True}
    check_field(http, LOAD, body, name, honoured={"lora_name", "lora_path", "load_inplace", "base_model_name"})
    unload(http, "odd")


def test_fields_that_nobody_knows_are_refused(http: httpx.Client, paths: tuple[str, str]) -> None:
    check_refused(http, LOAD, {"lora_name": "odd", "lora_path": paths[0], "unheard_of": 1}, "unheard_of")
    check_refused(http, UNLOAD, {"lora_name": "odd", "lora_int_id": 1}, "lora_int_id")
