"""A model's name leads to a base, to a checkpoint, or to what a run has published last; others' things do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from default_engine import fake_engine
from openai_server import MODEL, Server, serving

import mint
from mint.server.store.database import OpenFor, insert
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.rows import CheckpointRow, TrainingRunRow
from mint.types import AdamParams, Datum, ModelInput, SamplingParams
from mint.types.records import MAX_PAGE

PROMPT = "What is 3 + 4?\n"


def datum(tokenizer: Any, text: str) -> Datum:
    tokens = tokenizer.encode(PROMPT + text)
    weights = [1.0] * (len(tokens) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights}
    )


def step(trainer: mint.TrainingClient, text: str) -> None:
    data = [datum(trainer.get_tokenizer(), text)] * 2
    trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(AdamParams(learning_rate=5e-2)).result()


@pytest.fixture
def trainer(server: Server) -> Iterator[mint.TrainingClient]:
    with server.mint_client() as service:
        yield service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)


def said(client: openai.OpenAI, model: str) -> tuple[list[int], list[float]]:
    extra = {"return_token_ids": True}
    got = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=0, extra_body=extra
    ).choices[0]
    return got.token_ids, got.logprobs.token_logprobs


def sampled(sampler: mint.SamplingClient) -> tuple[list[int], list[float]]:
    prompt = ModelInput.from_ints(sampler.get_tokenizer().encode(PROMPT))
    (own,) = sampler.sample(prompt, 1, SamplingParams(max_tokens=8, temperature=0)).result().sequences
    return own.tokens, own.logprobs


def test_a_run_answers_with_its_newest_weights_while_it_trains(
    server: Server, client: openai.OpenAI, trainer: mint.TrainingClient
) -> None:
    run = trainer.model_id
    assert run not in [model.id for model in client.models.list()]
    with pytest.raises(openai.NotFoundError, match="no weights yet"):
        said(client, run)
    answers = [said(client, MODEL)]
    fingerprints = set()
    for text in ("xyz", "abc"):
        step(trainer, text)
        sampler = trainer.save_weights_and_get_sampling_client()
        own = sampled(sampler)
        answers.append(said(client, run))
        assert answers[-1] == own
        fingerprints.add(client.completions.create(model=run, prompt=PROMPT, max_tokens=1).system_fingerprint)
    step(trainer, "named")
    path = trainer.save_weights_for_sampler("newest").result().path
    answers.append(said(client, run))
    assert answers[-1] == said(client, path)
    assert len({tuple(logprobs) for _, logprobs in answers}) == 4
    assert len(fingerprints) == 2
    (shown,) = [model for model in client.models.list() if model.id == run]
    assert (shown.root, shown.owned_by) == (MODEL, "ada")
    assert said(client, MODEL) == answers[0]


def test_a_checkpoint_answers_under_each_of_its_names(
    server: Server, client: openai.OpenAI, trainer: mint.TrainingClient
) -> None:
    step(trainer, "seven")
    sampling = trainer.save_weights_for_sampler("one").result().path
    training = trainer.save_state("two").result().path
    own = sampled(server.mint_client().create_sampling_client(model_path=sampling))
    (alias,) = [
        kept.alias
        for kept in server.running.service.checkpoints.checkpoints("ada").checkpoints
        if kept.tinker_path == sampling
    ]
    for name in (sampling, sampling.replace("mint://", "tinker://"), training, alias):
        assert said(client, name) == own
    listed = [model.id for model in client.models.list()]
    assert {sampling, training, MODEL} <= set(listed)
    for name in (MODEL, sampling, trainer.model_id):
        found = client.models.retrieve(name)
        assert (found.id, found.root, found.max_model_len) == (name, MODEL, 1024)


def test_a_checkpoint_is_listed_with_its_base_however_many_runs_are_newer(tmp_path: Path) -> None:
    with serving(tmp_path, engine=fake_engine()) as server, server.mint_client() as service:
        trainer = service.create_lora_training_client(base_model=MODEL, rank=4)
        path = trainer.save_state("old").result().path
        opened = closing(Journal(tmp_path / JOURNAL_FILE, OpenFor.COMMAND))
        with opened as journal, journal.database.transaction() as transaction:
            for number in range(MAX_PAGE):
                run = TrainingRunRow(f"newer{number}", "gone", "ada", 4e9, 4e9)
                transaction.execute(insert(TrainingRunRow, "runs"), **vars(run))
            row = CheckpointRow("newer0", "weights", "damaged", "checkpoints/gone", 4e9, owner="ada")
            transaction.execute(insert(CheckpointRow, "checkpoints"), **vars(row))
        with server.client() as client:
            listed = {model.id: model.model_extra or {} for model in client.models.list()}
    assert listed[path]["root"] == MODEL and listed[path]["max_model_len"] > 0
    assert listed["mint://newer0/weights/damaged"].get("root") is None


def test_an_ended_run_answers_with_its_last_checkpoint(server: Server, client: openai.OpenAI) -> None:
    with server.mint_client() as service:
        trainer = service.create_lora_training_client(base_model=MODEL, rank=4, seed=2)
        step(trainer, "kept")
        path = trainer.save_weights_for_sampler("kept").result().path
        step(trainer, "lost")
        own = sampled(trainer.save_weights_and_get_sampling_client())
        run, before = trainer.model_id, said(client, trainer.model_id)
        assert before == own
    assert said(client, run) == said(client, path) != before


def test_what_others_own_is_not_there_until_it_is_published(
    server: Server, client: openai.OpenAI, trainer: mint.TrainingClient
) -> None:
    step(trainer, "mine")
    path = trainer.save_weights_for_sampler("mine").result().path
    with server.client("bob") as bob:
        assert {path, trainer.model_id}.isdisjoint(model.id for model in bob.models.list())
        for name in (path, trainer.model_id):
            with pytest.raises(openai.NotFoundError) as refusal:
                said(bob, name)
            with pytest.raises(openai.NotFoundError):
                bob.models.retrieve(name)
            with pytest.raises(openai.NotFoundError) as nothing:
                said(bob, name.replace("sess", "sess0"))
            assert refusal.value.body["message"].replace("sess", "sess0") == nothing.value.body["message"]
        server.running.service.checkpoints.publish("ada", path, public=True)
        assert said(bob, path) == said(client, path)
        assert path not in [model.id for model in bob.models.list()]


def test_requests_leave_no_session_and_no_sampler_behind(server: Server, client: openai.OpenAI) -> None:
    service = server.running.service

    def rows() -> list[int]:
        with closing(Journal(service.data_dir / JOURNAL_FILE, OpenFor.READING)) as journal:
            return [journal.database.value(f"SELECT count(*) FROM {table}") for table in ("sessions", "samplers")]

    futures = service.futures
    before, open_before, results = rows(), len(service.session_owners), futures.finished_count
    for _ in range(5):
        said(client, MODEL)
    assert (rows(), len(service.session_owners)) == (before, open_before)
    assert service.pending.samples == []
    assert futures.finished_count == results and futures.open_count == 0
