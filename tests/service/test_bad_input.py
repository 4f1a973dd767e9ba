"""Every bad request is a typed error that names field, value and remedy; the state is unchanged and work goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from service_harness import BASE, GOOD_PASS, STEP, Harness, datum, failure, pass_body

from mint.errors import InvalidRequestError, MintError, NotFoundError, PromptTooLongError, UnknownBaseModelError
from mint.server.callers import LOCAL
from mint.server.service.service import Service

NAN, INF = float("nan"), float("inf")
BAD, LONG = InvalidRequestError, PromptTooLongError
IDS, INPUTS = "data[0].model_input", "data[0].loss_fn_inputs"
POLICY = {"logprobs": [-1.0, -1.0], "advantages": [0.5, 0.5], "weights": [1.0, 1.0]}


@pytest.fixture
def harness(shared_service: Service) -> Harness:
    """A session of its own on one service: what one user does wrong is nobody else's trouble."""
    return Harness(shared_service)


def policy(**changed: Any) -> dict[str, Any]:
    inputs = {key: row for key, row in {**POLICY, **changed}.items() if row is not None}
    return pass_body(datum(1, 2, 3, **inputs), loss="ppo")


def without(key: str) -> dict[str, Any]:
    body = pass_body(datum(1, 2, 3))
    del body["forward_backward_input"]["data"][0]["loss_fn_inputs"][key]
    return body


BAD_PASSES: dict[str, tuple[dict[str, Any], str, str, type[MintError]]] = {
    # name: (body, part of the field, part of the value, kind of error)
    "token negative": (pass_body(datum(1, -2, 3)), "data[0].model_input[1]", "-2", BAD),
    "token beyond the vocabulary": (pass_body(datum(1, 2), datum(1024, 2)), "data[1].model_input[0]", "1024", BAD),
    "target beyond the vocabulary": (pass_body(datum(1, 2, 4096)), "target_tokens[1]", "4096", BAD),
    "token beyond 64 bits": (pass_body(datum(1, 2**70, 3)), "model_input", "1180591620717411303424", BAD),
    "empty data": (pass_body(), "data", "[]", BAD),
    "empty datum": (pass_body(datum(1)), IDS, "[]", BAD),
    "unequal lengths": (pass_body(datum(1, 2, 3, weights=[1.0])), f"{INPUTS}.weights", "length 1", BAD),
    "longer than the context": (pass_body(datum(*range(1, 520))), IDS, "518 tokens", LONG),
    "target_tokens missing": (without("target_tokens"), "target_tokens", "(missing)", BAD),
    "logprobs missing": (policy(logprobs=None), "logprobs", "(missing)", BAD),
    "advantages missing": (policy(advantages=None), "advantages", "(missing)", BAD),
    "unknown input": (policy(mask=[1.0, 1.0]), "loss_fn_inputs", "mask", BAD),
    "advantage NaN": (policy(advantages=[0.5, NAN]), "advantages[1]", "nan", BAD),
    "advantage infinite": (policy(advantages=[INF, 0.5]), "advantages[0]", "inf", BAD),
    "logprob NaN": (policy(logprobs=[-1.0, NAN]), "logprobs[1]", "nan", BAD),
    "weight infinite": (policy(weights=[1.0, -INF]), "weights[1]", "-inf", BAD),
    "weight null": (pass_body(datum(1, 2, 3, weights=[1.0, None])), f"{INPUTS}.weights.data[1]", "null", BAD),
    "target fraction": (pass_body(datum(1, 2, 3.5)), f"{INPUTS}.target_tokens", "3.5", BAD),
    "token fraction": (pass_body(datum(1, 2.5, 3)), "tokens[1]", "2.5", BAD),
    "token fraction of a whole number": (pass_body(datum(1, 2.0, 3)), "tokens[1]", "2.0", BAD),
    "setting null": (pass_body(loss="dro", loss_fn_config={"beta": None}), "loss_fn_config.beta", "null", BAD),
    "setting NaN": (pass_body(loss="dro", loss_fn_config={"beta": NAN}), "beta", "nan", BAD),
    "unknown loss": (pass_body(datum(1, 2, 3), loss="ppo2"), "loss_fn", "ppo2", BAD),
    "unknown setting": (pass_body(loss="ppo", loss_fn_config={"clip_hi": 1.0}), "loss_fn_config", "clip_hi", BAD),
    "not even data": ({"forward_backward_input": 3}, "forward_backward_input", "3", BAD),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PASSES)
def test_a_bad_pass_is_named_and_changes_nothing(harness: Harness, name: str) -> None:
    body, field, value, kind = BAD_PASSES[name]
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    digest = harness.run("optim_step", model_id, 2, STEP)["state_digest"]
    error = failure(lambda: harness.run("forward_backward", model_id, 3, body))
    assert type(error) is kind
    assert field in (error.field or "") and value in str(error.value)
    assert error.remedy or name in ("not even data",)
    assert harness.digest(model_id) == digest
    failure(lambda: harness.run("optim_step", model_id, 4, STEP))
    harness.run("forward_backward", model_id, 5, GOOD_PASS)
    assert harness.run("optim_step", model_id, 6, STEP)["metrics"]["step"] == 2.0


def test_garbage_logprobs_are_legal_where_the_weight_is_zero(harness: Harness) -> None:
    model_id = harness.create_model()
    for garbage in (-INF, NAN, INF):
        output = harness.run("forward_backward", model_id, 1, policy(logprobs=[garbage, -1.0], weights=[0.0, 1.0]))
        assert output["metrics"]["tokens:sum"] == 1.0
        model_id = harness.create_model(int(model_id.rsplit(":", 1)[1]) + 1)


def test_missing_weights_of_a_policy_loss_follow_the_advantages_and_say_so(harness: Harness) -> None:
    model_id = harness.create_model()
    output = harness.run("forward_backward", model_id, 1, policy(weights=None, advantages=[0.0, -0.5]))
    assert output["metrics"]["tokens:sum"] == 1.0
    assert "weights are missing in 1 of 1 datums" in output["warnings"][0]
    assert harness.run("forward_backward", model_id, 2, pass_body(datum(1, 2, 3)))["metrics"]["tokens:sum"] == 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0), ("learning_rate", NAN), ("learning_rate", INF), ("beta1", 1.0), ("beta1", -0.1),
        ("beta2", 1.5), ("eps", 0.0), ("eps", -1e-8), ("weight_decay", -0.1), ("grad_clip_norm", -1.0),
        ("grad_clip_norm", NAN), ("learning_rate", "fast"), ("momentum", 0.9),
    ],
)  # fmt: skip
def test_a_bad_step_is_named_and_changes_nothing(harness: Harness, field: str, value: object) -> None:
    model_id = harness.create_model()
    digest = harness.digest(model_id)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    error = failure(lambda: harness.run("optim_step", model_id, 2, {"adam_params": {field: value}}))
    assert isinstance(error, InvalidRequestError)
    assert field in (error.field or "") and str(value) in str(error.value)
    assert harness.digest(model_id) == digest
    assert harness.run("optim_step", model_id, 3, STEP)["metrics"]["step"] == 1.0


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_a_null_that_stands_for_nan_is_no_default(harness: Harness, field: str) -> None:
    """Other SDKs write NaN and infinity as null."""
    model_id = harness.create_model()
    digest = harness.digest(model_id)
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    error = failure(lambda: harness.run("optim_step", model_id, 2, {"adam_params": {field: None}}))
    assert isinstance(error, InvalidRequestError)
    assert (error.field or "").endswith(f"adam_params.{field}") and error.value == "null" and error.remedy
    assert harness.digest(model_id) == digest


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", 0), ("rank", -4), ("rank", 257), ("rank", 10**9), ("rank", 1.5), ("seed", -1), ("seed", 2**63)],
)
def test_a_bad_lora_is_named(harness: Harness, field: str, value: object) -> None:
    error = failure(lambda: harness.create_model(**{field: value}))
    assert isinstance(error, InvalidRequestError)
    assert field in (error.field or "") and str(error.value) == str(value)
    harness.create_model(1)


def test_a_lora_on_nothing_is_refused(harness: Harness) -> None:
    nothing = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    error = failure(lambda: harness.create_model(**nothing))
    assert isinstance(error, InvalidRequestError) and "train_attn" in (error.field or "") and error.remedy


def test_an_unknown_base_model_lists_what_there_is_and_how_to_add_one(harness: Harness) -> None:
    body = {"session_id": harness.session_id, "model_seq_id": 0, "base_model": "Qwen/Qwen9-0.1B"}
    error = failure(lambda: harness.wait(harness.submit("create_model", body)))
    assert isinstance(error, UnknownBaseModelError)
    assert BASE in str(error) and "MINT_MODELS" in str(error) and "Qwen9" in str(error)
    missing = failure(lambda: harness.run("forward_backward", f"{harness.session_id}:train:0", 1, GOOD_PASS))
    assert isinstance(missing, NotFoundError)


def base_sampler(harness: Harness, number: int = 0) -> str:
    body = {"session_id": harness.session_id, "sampling_session_seq_id": number, "base_model": BASE}
    return harness.service.sampling_sessions.create(LOCAL, json.dumps(body).encode()).sampling_session_id


BAD_SAMPLES: dict[str, tuple[dict[str, Any], str, str, type[MintError]]] = {
    "empty prompt": ({"prompt": []}, "prompt", "[]", BAD),
    "token negative": ({"prompt": [5, -1]}, "prompt[1]", "-1", BAD),
    "token beyond the vocabulary": ({"prompt": [1024]}, "prompt[0]", "1024", BAD),
    "prompt longer than the context": ({"prompt": [1] * 513}, "prompt", "513 tokens", LONG),
    "prompt fills the context": ({"prompt": [1] * 512, "params": {"max_tokens": None}}, "prompt", "512 tokens", LONG),
    "prompt with max_tokens beyond": ({"params": {"max_tokens": 511}}, "prompt", "2 tokens", LONG),
    "max_tokens 0": ({"params": {"max_tokens": 0}}, "max_tokens", "0", BAD),
    "max_tokens negative": ({"params": {"max_tokens": -3}}, "max_tokens", "-3", BAD),
    "temperature negative": ({"params": {"temperature": -0.1}}, "temperature", "-0.1", BAD),
    "temperature NaN": ({"params": {"temperature": NAN}}, "temperature", "nan", BAD),
    "temperature null": ({"params": {"temperature": None}}, "sampling_params.temperature", "null", BAD),
    "top_p null": ({"params": {"top_p": None}}, "sampling_params.top_p", "null", BAD),
    "top_k null": ({"params": {"top_k": None}}, "sampling_params.top_k", "null", BAD),
    "num_samples null": ({"num_samples": None}, "num_samples", "null", BAD),
    "stop fraction": ({"params": {"stop": [1.5]}}, "stop", "1.5", BAD),
    "stop token fraction": ({"params": {"stop_token_ids": [1.5]}}, "stop_token_ids[0]", "1.5", BAD),
    "top_p 0": ({"params": {"top_p": 0.0}}, "top_p", "0.0", BAD),
    "top_p above 1": ({"params": {"top_p": 1.1}}, "top_p", "1.1", BAD),
    "top_k 0": ({"params": {"top_k": 0}}, "top_k", "0", BAD),
    "top_k below -1": ({"params": {"top_k": -2}}, "top_k", "-2", BAD),
    "top_k beyond int32": ({"params": {"top_k": 1 << 31}}, "top_k", "2147483648", BAD),
    "top_k beyond int64": ({"params": {"top_k": 1 << 63}}, "top_k", "9223372036854775808", BAD),
    "num_samples 0": ({"num_samples": 0}, "num_samples", "0", BAD),
    "num_samples absurd": ({"num_samples": 1025}, "num_samples", "1025", BAD),
    "seed negative": ({"params": {"seed": -5}}, "seed", "-5", BAD),
    "stop empty": ({"params": {"stop": ["a", ""]}}, "stop", "", BAD),
    "stops without end": ({"params": {"stop": ["a"] * 65}}, "stop", "65 entries", BAD),
    "stop token unknown": ({"params": {"stop_token_ids": [7, 5000]}}, "stop_token_ids[1]", "5000", BAD),
    "frequency_penalty absurd": ({"params": {"frequency_penalty": 2.5}}, "frequency_penalty", "2.5", BAD),
    "presence_penalty NaN": ({"params": {"presence_penalty": NAN}}, "presence_penalty", "nan", BAD),
    "repetition_penalty 0": ({"params": {"repetition_penalty": 0.0}}, "repetition_penalty", "0.0", BAD),
    "min_p above 1": ({"params": {"min_p": 1.5}}, "min_p", "1.5", BAD),
    "min_p null": ({"params": {"min_p": None}}, "min_p", "null", BAD),
    "min_tokens above max_tokens": ({"params": {"max_tokens": 3, "min_tokens": 4}}, "min_tokens", "4", BAD),
    "min_tokens negative": ({"params": {"min_tokens": -1}}, "min_tokens", "-1", BAD),
    "allowed_token_ids empty": ({"params": {"allowed_token_ids": []}}, "allowed_token_ids", "[]", BAD),
    "allowed token unknown": ({"params": {"allowed_token_ids": [3, 5000]}}, "allowed_token_ids[1]", "5000", BAD),
    "biased token unknown": ({"params": {"logit_bias": {"5000": 1.0}}}, "logit_bias", "5000", BAD),
    "bias absurd": ({"params": {"logit_bias": {"7": 101.0}}}, "logit_bias[7]", "101.0", BAD),
    "bias of a word": ({"params": {"logit_bias": {"word": 1.0}}}, "logit_bias", "word", BAD),
    "topk absurd": ({"topk_prompt_logprobs": 5000}, "topk_prompt_logprobs", "5000", BAD),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_request_is_named_and_fails_alone(harness: Harness, name: str) -> None:
    fields, field, value, kind = BAD_SAMPLES[name]
    sampler = base_sampler(harness)
    error = failure(lambda: harness.sample(sampler, 0, **dict(fields)))
    assert type(error) is kind
    assert field in (error.field or "") and value in str(error.value)
    assert error.remedy
    good = harness.sample(sampler, 1, params={"stop": []})  # the base sampler draws a seed: no end token may cut it
    assert len(good["sequences"][0]["tokens"]) == 3


def test_the_prompt_too_long_message_has_the_numbers(harness: Harness) -> None:
    error = failure(lambda: harness.sample(base_sampler(harness), 0, prompt=[1] * 500, params={"max_tokens": 20}))
    assert "500 tokens" in str(error) and "512" in str(error) and "at most 12 tokens" in str(error)
    error = failure(lambda: harness.sample(base_sampler(harness), 1, prompt=[1] * 600, params={"max_tokens": 20}))
    assert str(error.remedy) == "Shorten the prompt to at most 492 tokens"
    error = failure(lambda: harness.sample(base_sampler(harness), 2, prompt=[1] * 600, params={"max_tokens": 700}))
    assert str(error.remedy) == "Shorten the prompt, and ask for fewer tokens"


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "ü", "a" * 129, "a\0b", "a\n"])
def test_a_bad_checkpoint_name_is_refused(harness: Harness, name: str) -> None:
    model_id = harness.create_model()
    error = failure(lambda: harness.run("save_weights", model_id, 1, {"path": name}))
    assert isinstance(error, InvalidRequestError) and error.field == "name" and error.remedy
    assert harness.run("save_weights", model_id, 2, {"path": "a" * 128})["path"].endswith("a" * 128)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("nothing", InvalidRequestError), ("mint://a/b", InvalidRequestError), ("mint://a/optimizer/c", BAD),
        ("mint://x:train:0/weights/never", NotFoundError), ("mint://../weights/..", NotFoundError),
    ],
)  # fmt: skip
def test_a_bad_checkpoint_path_is_refused(harness: Harness, path: str, kind: type[MintError]) -> None:
    model_id = harness.create_model()
    digest = harness.digest(model_id)
    error = failure(lambda: harness.run("load_weights", model_id, 1, {"path": path, "optimizer": True}))
    assert isinstance(error, kind) and error.field == "path" and error.value == path and error.remedy
    assert harness.digest(model_id) == digest


def test_a_sampler_needs_something_to_sample_from(harness: Harness) -> None:
    def create(**fields: Any) -> None:
        body = {"session_id": harness.session_id, "sampling_session_seq_id": 0, **fields}
        harness.service.sampling_sessions.create(LOCAL, json.dumps(body).encode())

    assert isinstance(failure(create), InvalidRequestError)
    assert isinstance(failure(lambda: create(base_model="nope")), UnknownBaseModelError)
    assert isinstance(failure(lambda: create(model_path="mint://x:train:0/weights/a")), NotFoundError)
    assert isinstance(failure(lambda: harness.sample(f"{harness.session_id}:sample:77", 0)), NotFoundError)


def test_what_a_newer_client_says_besides_is_ignored_and_named_in_the_log(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, {**GOOD_PASS, "surprise": 1})
    assert "surprise" in caplog.text
    harness.run("optim_step", model_id, 2, {"adam_params": {"learning_rate": 0.1, "nesterov": False}, "seed": None})
    assert "adam_params.nesterov" in caplog.text


def test_what_an_old_client_leaves_out_is_what_the_protocol_says(harness: Harness) -> None:
    model_id = harness.create_model()
    harness.run("forward_backward", model_id, 1, GOOD_PASS)
    assert harness.run("optim_step", model_id, 2, {"adam_params": {}})["metrics"]["learning_rate"] == 1e-4
