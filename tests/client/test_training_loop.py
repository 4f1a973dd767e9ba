"""The loop of the first seed, through the SDK and the whole service, with an engine that shows every slip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import HANG_S

import mint
from mint.client import chunking as chunks
from mint.errors import CheckpointError, InvalidRequestError, StepRefusedError, UnknownBaseModelError
from mint.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData, records

ADAM = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([5, 6, 7])


def datum(*tokens: int, **inputs: list[float]) -> Datum:
    whole = {"target_tokens": list(tokens[1:]), **inputs}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=whole)


DATA = [datum(1, 2, 3, 4, weights=[0.0, 1.0, 1.0]), datum(5, 6, 7)]


def trainer(client: mint.ServiceClient, **options: Any) -> mint.TrainingClient:
    return client.create_lora_training_client(base_model="mint/tiny", **{"rank": 8, "seed": 1, **options})


def test_the_whole_loop(client: mint.ServiceClient) -> None:
    training = trainer(client)
    info = training.get_info()
    assert (info.lora_rank, info.model_data.model_name, info.effective["seed"]) == (8, "mint/tiny", 1)
    for step in range(3):
        sampler = training.save_weights_and_get_sampling_client(name=f"rl-step-{step}")
        answer = sampler.sample(
            prompt=PROMPT, num_samples=2, sampling_params=SamplingParams(max_tokens=4, stop=[])
        ).result()
        datums = []
        for sequence in answer.sequences:
            assert len(sequence.tokens) == len(sequence.logprobs) == 4
            full = [*PROMPT.to_ints(), *sequence.tokens]
            inputs = {
                "target_tokens": full[1:],
                "weights": [0.0] * 2 + [1.0] * 4,
                "logprobs": [0.0] * 2 + sequence.logprobs,
                "advantages": [0.0] * 2 + [0.5] * 4,
            }
            datums.append(Datum(model_input=ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs))
        passed = training.forward_backward(datums, loss_fn="importance_sampling")
        stepped = training.optim_step(ADAM)
        for output, sequence in zip(passed.result().loss_fn_outputs, answer.sequences, strict=True):
            assert output["logprobs"].tolist()[2:] == sequence.logprobs
        assert stepped.result().metrics["step"] == step + 1
    path = training.save_state("end").result().path
    again = client.create_training_client_from_state_with_optimizer(path)
    assert again.optim_step(ADAM).result() == training.optim_step(ADAM).result()


def test_a_sampler_shows_the_step_before_it_and_never_the_step_after(client: mint.ServiceClient) -> None:
    training = trainer(client)
    params = SamplingParams(max_tokens=4, seed=9)
    samplers = []
    for _ in range(3):
        training.forward_backward(DATA, "cross_entropy")
        training.optim_step(ADAM)
        samplers.append(training.save_weights_and_get_sampling_client())
    pipelined = [sampler.sample(PROMPT, 1, params).result() for sampler in samplers]
    careful = trainer(client)
    for seen in pipelined:
        careful.forward_backward(DATA, "cross_entropy").result()
        careful.optim_step(ADAM).result()
        assert careful.save_weights_and_get_sampling_client().sample(PROMPT, 1, params).result() == seen
    assert len({str(seen) for seen in pipelined}) == 3


def test_the_same_seed_is_the_same_run(make_client: Any) -> None:
    def run(folder: str) -> list[Any]:
        training = trainer(make_client(folder))
        seen = []
        for _ in range(3):
            sampler = training.save_weights_and_get_sampling_client()
            futures = [sampler.sample(PROMPT, 2, SamplingParams(max_tokens=3)) for _ in range(8)]
            seen.append([future.result() for future in futures])
            training.forward_backward(DATA, "cross_entropy")
            seen.append(training.optim_step(ADAM).result())
        return seen

    assert run("one") == run("two")


def test_every_twin_gives_what_its_sync_form_gives(make_client: Any) -> None:
    def steps(training: mint.TrainingClient, path: str | None = None) -> list[Any]:
        result = [
            training.forward(DATA, "cross_entropy").result(),
            training.forward_backward(DATA, "cross_entropy").result(),
            training.optim_step(ADAM).result(),
            training.save_state("a").result().path.rpartition("/")[2],
            training.save_weights_for_sampler("b").result().path.rpartition("/")[2],
        ]
        path = training.save_state("c").result().path
        result.append(bool(training.load_state(path).result().path))
        result.append(bool(training.load_state_with_optimizer(path).result().path))
        sampler = training.save_weights_and_get_sampling_client()
        result.append(sampler.sample(PROMPT, 2, SamplingParams(max_tokens=3)).result())
        result.append(sampler.compute_logprobs(PROMPT).result())
        result.append(sampler.get_base_model())
        result.append(training.create_sampling_client(path).sample(PROMPT, 1, SamplingParams(max_tokens=2)).result())
        result.append(training.get_info().effective)
        return result

    async def async_steps(client: mint.ServiceClient) -> list[Any]:
        training = await client.create_lora_training_client_async("mint/tiny", rank=8, seed=1)
        result: list[Any] = [
            await (await training.forward_async(DATA, "cross_entropy")),
            await (await training.forward_backward_async(DATA, "cross_entropy")),
            await (await training.optim_step_async(ADAM)),
            (await (await training.save_state_async("a"))).path.rpartition("/")[2],
            ((await (await training.save_weights_for_sampler_async("b"))).path or "").rpartition("/")[2],
        ]
        path = (await (await training.save_state_async("c"))).path
        result.append(bool((await (await training.load_state_async(path))).path))
        result.append(bool((await (await training.load_state_with_optimizer_async(path))).path))
        sampler = await training.save_weights_and_get_sampling_client_async()
        result.append(await sampler.sample_async(PROMPT, 2, SamplingParams(max_tokens=3)))
        result.append(await sampler.compute_logprobs_async(PROMPT))
        result.append(await sampler.get_base_model_async())
        other = await training.create_sampling_client_async(path)
        result.append(await other.sample_async(PROMPT, 1, SamplingParams(max_tokens=2)))
        result.append((await training.get_info_async()).effective)
        assert (await client.get_server_capabilities_async()) == client.get_server_capabilities()
        assert (await client.create_training_client_from_state_async(path)).model_id.endswith(":train:1")
        assert (await client.create_training_client_from_state_with_optimizer_async(path)).model_id.endswith(":train:2")
        assert (await client.create_sampling_client_async(base_model="mint/tiny")).get_base_model() == "mint/tiny"
        return result

    assert steps(trainer(make_client("sync"))) == asyncio.run(async_steps(make_client("async")))


def test_what_a_future_of_a_client_gives_is_no_future(client: mint.ServiceClient) -> None:
    """Scripts for several SDKs resolve futures of futures until they have a value."""

    async def value(given: Any) -> Any:
        for _ in range(3):
            if not hasattr(given, "result") and not hasattr(given, "__await__"):
                return given
            given = await (given.result_async() if hasattr(given, "result_async") else given)
        raise AssertionError(f"still a future: {given!r}")

    async def made() -> list[Any]:
        training = await value(client.create_lora_training_client_async("mint/tiny", rank=8))
        return [
            training,
            await value(training.save_weights_and_get_sampling_client_async()),
            await value(client.create_sampling_client_async(base_model="mint/tiny")),
            await value(training.save_weights_and_get_sampling_client()),
        ]

    training, *samplers = asyncio.run(made())
    assert type(training) is mint.TrainingClient
    assert all(type(sampler) is mint.SamplingClient for sampler in samplers)


def test_a_client_and_its_future_number_their_requests_together(client: mint.ServiceClient) -> None:
    future = client.create_lora_training_client("mint/tiny", rank=8)
    training = future.result()
    for caller in (future, training, future.result()):
        caller.forward_backward(DATA, "cross_entropy").result()
    assert [caller.optim_step(ADAM).result().metrics["step"] for caller in (training, future)] == [1.0, 2.0]
    assert isinstance(future, mint.TrainingClient) and future.done()


def test_compute_logprobs_agrees_with_forward(client: mint.ServiceClient) -> None:
    training = trainer(client)
    sampler = training.save_weights_and_get_sampling_client()
    tokens = [1, 2, 3, 4]
    first, *rest = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()
    assert first is None
    assert rest == training.forward([datum(*tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()


def test_large_batches_are_split_and_joined_without_a_trace(
    client: mint.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [datum(1 + i, 2, 3, 4 + i) for i in range(10)]
    whole = trainer(client).forward(data, "cross_entropy").result()
    monkeypatch.setattr(chunks, "MAX_DATUMS", 3)
    training = trainer(client)
    parts = training.forward(data, "cross_entropy").result()
    assert parts.loss_fn_outputs == whole.loss_fn_outputs
    assert parts.metrics == pytest.approx(whole.metrics)
    training.forward_backward(data, "cross_entropy")
    assert training.optim_step(ADAM).result().metrics["step"] == 1.0


def test_an_item_that_is_no_datum_is_named_and_takes_no_place(client: mint.ServiceClient) -> None:
    training = trainer(client)
    wrong: list[Any] = [DATA[0], {"model_input": [1, 2]}]
    with pytest.raises(InvalidRequestError, match=r"data\[1\].*is not a Datum"):
        training.forward_backward(wrong, "cross_entropy")
    training.forward_backward(DATA, "cross_entropy").result()
    assert training.optim_step(ADAM).result().metrics["step"] == 1


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda training, text: training.save_state(text), "SaveWeightsRequest.path"),
        (lambda training, text: training.save_state("a", user_metadata={"of": [text]}), "user_metadata"),
        (lambda training, text: training.forward_backward(DATA, text), "forward_backward_input.loss_fn"),
        (
            lambda training, text: training.forward_backward(DATA, "ppo", {text: 1.0}),
            "forward_backward_input.loss_fn_config",
        ),
        (
            lambda training, text: training.forward_backward([datum(1, 2, **{text: [1.0]})], "cross_entropy"),
            "forward_backward_input.data[0].loss_fn_inputs",
        ),
    ],
)
def test_a_text_that_cannot_be_sent_is_named_and_takes_no_place(
    client: mint.ServiceClient, call: Callable[[mint.TrainingClient, str], Any], field: str
) -> None:
    """The server would wait for a number that is taken and never sent, and refuse all later calls in the end."""
    training = trainer(client)
    with pytest.raises(InvalidRequestError) as caught:
        call(training, "half a pair: \ud83d")
    assert field in (caught.value.field or "") and caught.value.remedy
    assert r"\ud83d" in str(caught.value) and str(caught.value).isascii()
    training.forward_backward(DATA, "cross_entropy")
    assert training.optim_step(ADAM).result(timeout=HANG_S).metrics["step"] == 1


def test_a_bad_chunk_fails_the_step(client: mint.ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_DATUMS", 2)
    training = trainer(client)
    passed = training.forward_backward([*DATA, *DATA, datum(1, 2, 5000)], "cross_entropy")
    stepped = training.optim_step(ADAM)
    with pytest.raises(InvalidRequestError, match="5000"):
        passed.result()
    with pytest.raises(StepRefusedError):
        stepped.result()
    training.forward_backward(DATA, "cross_entropy")
    assert training.optim_step(ADAM).result().metrics["step"] == 1.0


def test_a_custom_loss_that_is_cross_entropy_takes_the_same_step(client: mint.ServiceClient) -> None:
    built_in, custom = trainer(client), trainer(client)
    weights = [[0.0, 1.0, 1.0], [1.0, 1.0]]

    def loss(_data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = -sum((row * row.new_tensor(w)).sum() for row, w in zip(logprobs, weights, strict=True))
        return total, {"rows:sum": float(len(logprobs))}

    built_in.forward_backward(DATA, "cross_entropy")
    passed = custom.forward_backward_custom(DATA, loss)
    stepped = custom.optim_step(ADAM)
    assert stepped.result().state_digest == built_in.optim_step(ADAM).result().state_digest
    metrics = passed.result().metrics
    assert metrics["rows:sum"] == 2.0
    assert metrics["loss:sum"] == pytest.approx(metrics["surrogate_loss:sum"])


def test_a_custom_loss_need_not_see_the_logprobs_of_prompts(client: mint.ServiceClient) -> None:
    data = [datum(1, 2, 3, 4, weights=[0.0, 1.0, 1.0]), datum(5, 6, 7, weights=[1.0, 0.0])]
    seen: list[list[list[float]]] = []

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        seen.append([row.tolist() for row in logprobs])
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        return -sum((row**3 * own).sum() for row, own in zip(logprobs, weights, strict=True)), {}

    whole, lean = trainer(client), trainer(client)
    passed = [
        whole.forward_backward_custom(data, loss).result(),
        lean.forward_backward_custom(data, loss, trained_only=True).result(),
    ]
    (first, second), (first_lean, second_lean) = seen
    assert first_lean == [0.0, *first[1:]] and first[0] != 0
    assert second_lean == [second[0], 0.0] and second[1] != 0
    assert passed[0].metrics["loss:sum"] == passed[1].metrics["loss:sum"]
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (whole, lean)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(("sign", "named"), [(-1.0, False), (1.0, True)])
def test_a_custom_loss_with_the_wrong_sign_is_named_where_datums_have_advantages(
    client: mint.ServiceClient, sign: float, named: bool
) -> None:
    columns = [np.array([0.0, *[value] * 5], np.float32) for value in (1.0, -1.0, 0.5, -0.5) * 2]
    data = [datum(*range(1, 8), weights=[0.0, *[1.0] * 5], advantages=column.tolist()) for column in columns]

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        advantages = [one.loss_fn_inputs["advantages"].to_torch() for one in data]
        return sign * sum((row * own).sum() for row, own in zip(logprobs, advantages, strict=True)), {}

    warnings = trainer(client).forward_backward_custom(data, loss).result().warnings
    assert [warning.partition(":")[0] for warning in warnings] == ["reversed_loss"] * named


def test_a_custom_loss_that_raises_refuses_the_step(client: mint.ServiceClient) -> None:
    training = trainer(client)

    def loss(_data: list[Datum], _logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        raise ZeroDivisionError("mine")

    passed, stepped = training.forward_backward_custom(DATA, loss), training.optim_step(ADAM)
    with pytest.raises(ZeroDivisionError, match="mine"):
        passed.result()
    with pytest.raises(StepRefusedError):
        stepped.result()
    training.forward_backward(DATA, "cross_entropy")
    assert training.optim_step(ADAM).result().metrics["step"] == 1.0


def test_a_wrong_base_model_raises_where_it_was_named(client: mint.ServiceClient) -> None:
    with pytest.raises(UnknownBaseModelError, match="mint/tiny"):
        client.create_lora_training_client("no/such-model")
    with pytest.raises(UnknownBaseModelError):
        client.create_sampling_client(base_model="no/such-model")
    with pytest.raises(InvalidRequestError, match="rank"):
        trainer(client, rank=0)
    trainer(client)


def test_in_async_code_making_a_client_does_not_block_and_awaiting_raises(client: mint.ServiceClient) -> None:
    async def make() -> None:
        wrong = client.create_lora_training_client("no/such-model")
        passed = wrong.forward_backward(DATA, "cross_entropy")
        with pytest.raises(UnknownBaseModelError):
            await wrong
        with pytest.raises(UnknownBaseModelError):
            await passed
        right = client.create_lora_training_client("mint/tiny")
        assert (await right).model_id == right.model_id

    asyncio.run(make())


def test_checkpoints_outlive_their_client(make_client: Any) -> None:
    first = make_client()
    training = trainer(first)
    training.forward_backward(DATA, "cross_entropy")
    training.optim_step(ADAM)
    saved, sampled = training.save_state("a").result().path, training.save_weights_for_sampler("b").result().path
    expected = training.optim_step(ADAM).result()
    first.close()

    second = make_client()
    assert second.create_training_client_from_state_with_optimizer(saved).optim_step(ADAM).result() == expected
    params = SamplingParams(max_tokens=2, seed=1)
    one = second.create_sampling_client(model_path=saved).sample(PROMPT, 1, params).result()
    assert one == second.create_sampling_client(model_path=sampled).sample(PROMPT, 1, params).result()
    with pytest.raises(CheckpointError, match="no optimizer"):
        second.create_training_client_from_state_with_optimizer(sampled)
    info = second.create_rest_client().get_weights_info_by_tinker_path(saved).result()
    assert (info.base_model, info.lora_rank) == ("mint/tiny", 8)


def test_the_tokenizer_is_a_hugging_face_one(client: mint.ServiceClient) -> None:
    tokenizer = trainer(client).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("3 + 5")) == "3 + 5"
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert client.create_sampling_client(base_model="mint/tiny").get_tokenizer() is tokenizer


def test_a_base_model_s_name_may_stand_for_other_weights(
    make_client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINT_MODELS", "Qwen/Qwen3-0.6B=mint/tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # without models that were pulled
    monkeypatch.setenv("MINT_NATIVE", "0")  # the compiled kernels are in that cache, too
    client = make_client()
    training = client.create_lora_training_client("Qwen/Qwen3-0.6B")
    assert training.get_info().model_data.model_name == "Qwen/Qwen3-0.6B"
    assert training.get_tokenizer().encode("a")
    names = [model.model_name for model in client.get_server_capabilities().supported_models]
    assert names == ["Qwen/Qwen3-0.6B", "mint/tiny"]


def test_a_checkpoint_is_found_by_name_described_and_published(client: mint.ServiceClient) -> None:
    training = trainer(client)
    training.forward_backward(DATA, "cross_entropy")
    training.optim_step(ADAM)
    state = training.save_state("mine", ttl_seconds=7200, user_metadata={"note": "a"}).result().path
    weights = training.save_weights_for_sampler("mine").result().path
    params = SamplingParams(max_tokens=3, seed=5)
    by_path = client.create_sampling_client(model_path=weights).sample(PROMPT, 1, params).result()
    for name in ("mine", weights, state):
        found = client.create_sampling_client_from_checkpoint(checkpoint_name=name)
        assert found.sample(PROMPT, 1, params).result() == by_path
    with pytest.raises(mint.NotFoundError, match="yours"):
        client.create_sampling_client_from_checkpoint("yours")
    described = {item.checkpoint_id: item for item in training.get_checkpoint_metadata()}
    assert set(described) == {"weights/mine", "sampler_weights/mine"}
    assert described["weights/mine"].user_metadata == {"note": "a"} and described["weights/mine"].expires_at
    assert not described["sampler_weights/mine"].public
    training.publish_checkpoint(weights)
    assert {item.checkpoint_id for item in training.get_checkpoint_metadata() if item.public} == {
        "sampler_weights/mine"
    }


def test_a_checkpoint_is_found_by_name_behind_many_newer_ones(
    client: mint.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_PAGE", 2)  # of the server, which gives no longer page
    training = trainer(client)
    training.save_state("old").result()
    for number in range(4):
        training.save_state(f"new-{number}").result()
    params = SamplingParams(max_tokens=2, seed=5)
    assert client.create_sampling_client_from_checkpoint("old").sample(PROMPT, 1, params).result()


def test_in_async_code_a_name_is_looked_up_without_blocking(client: mint.ServiceClient) -> None:
    async def look_up() -> None:
        missing = client.create_sampling_client_from_checkpoint("missing")
        with pytest.raises(mint.NotFoundError, match=r"missing.*mint checkpoints list"):
            await missing

    asyncio.run(look_up())


def test_a_name_is_taken_unless_overwriting_is_asked_for(client: mint.ServiceClient) -> None:
    training = trainer(client)
    training.save_state("mine").result()
    with pytest.raises(mint.ConflictError):
        training.save_state("mine").result()
    assert training.save_state("mine", overwrite=True).result().path.endswith("/weights/mine")


def test_resuming_may_name_the_base_model_and_a_wrong_one_is_refused(client: mint.ServiceClient) -> None:
    path = trainer(client).save_state("a").result().path
    resumed = client.create_training_client_from_state(path, base_model="mint/tiny", user_metadata={"run": "2"})
    assert resumed.get_info().model_data.model_name == "mint/tiny"
    with pytest.raises(mint.MintError):
        client.create_training_client_from_state(path, base_model="other/model")


def test_an_optimizer_that_is_not_there_is_refused_by_name(client: mint.ServiceClient) -> None:
    trainer(client, optimizer={"type": "adamw"})
    with pytest.raises(InvalidRequestError, match="dimuon"):
        trainer(client, optimizer="dimuon")


def test_all_that_a_sample_can_be_asked_for_comes_back(client: mint.ServiceClient) -> None:
    sampler = trainer(client).save_weights_and_get_sampling_client()
    answer = sampler.sample(
        PROMPT,
        2,
        SamplingParams(max_tokens=3),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
        target_prompt_logprobs=TensorData.from_any([[6], [7]], dtype="int64"),
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=2,
    ).result()
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    assert answer.topk_prompt_logprobs_np is not None and answer.topk_prompt_logprobs_np.token_ids.shape == (3, 2)
    for sequence in answer.sequences:
        top = sequence.topk_logprobs_np
        assert top is not None and top.token_ids.shape == (len(sequence.tokens), 2)
    assert answer.target_prompt_logprobs is not None and answer.target_prompt_logprobs.to_numpy().shape == (2, 1)
    assert answer.prompt_alt_tokens is not None and answer.prompt_alt_tokens.tokens.to_numpy().shape == (2, 2)
    only_last = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result()
    assert only_last == [None, None, answer.prompt_logprobs[2]]


def test_a_custom_loss_may_have_several_targets_per_place(client: mint.ServiceClient) -> None:
    several = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [[2, 3], [4, 5]]})
    training = trainer(client)
    shapes = []

    def loss(_data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        shapes.extend(tuple(row.shape) for row in logprobs)
        return -sum(row.sum() for row in logprobs), {}

    training.forward_backward_custom([several, *DATA], loss).result()
    assert shapes == [(2, 2), (3,), (2,)]
    assert training.optim_step(ADAM).result().metrics["step"] == 1


def test_a_datum_without_targets_takes_no_place_in_a_custom_loss(client: mint.ServiceClient) -> None:
    training = trainer(client)
    wrong = Datum(model_input=PROMPT, loss_fn_inputs={"weights": [1.0] * 3})
    with pytest.raises(InvalidRequestError, match=r"target_tokens.*full\[1:\]"):
        training.forward_backward_custom([*DATA, wrong], lambda _data, rows: (-rows[0].sum(), {}))
    training.forward_backward(DATA, "cross_entropy")
    assert training.optim_step(ADAM).result(timeout=HANG_S).metrics["step"] == 1


def test_a_custom_loss_that_takes_the_targets_away_refuses_the_step(client: mint.ServiceClient) -> None:
    """The second pass cannot be made then: the server is told, and does not wait for it."""
    training = trainer(client)

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        data[0].loss_fn_inputs.clear()
        return -sum(row.sum() for row in logprobs), {}

    passed = training.forward_backward_custom([datum(1, 2, 3), *DATA], loss)
    stepped = training.optim_step(ADAM)
    with pytest.raises(InvalidRequestError, match="target_tokens"):
        passed.result(timeout=HANG_S)
    with pytest.raises(StepRefusedError):
        stepped.result(timeout=HANG_S)
    training.forward_backward(DATA, "cross_entropy")
    assert training.optim_step(ADAM).result(timeout=HANG_S).metrics["step"] == 1
