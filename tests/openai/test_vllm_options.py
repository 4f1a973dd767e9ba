"""Sampling options of OpenAI and vLLM at `/v1`, and the logprobs of prompts."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai_server import MODEL

import mint
from mint import types

PROMPT = [5, 6, 7]


def complete(client: openai.OpenAI, **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra", {})}
    fields = {"max_tokens": 10, "seed": 4, **options}
    return client.completions.create(model=MODEL, prompt=PROMPT, extra_body=extra, **fields).choices[0]


@pytest.mark.parametrize(
    "options",
    [
        {"extra": {"min_p": 0.2}},
        {"logit_bias": {"50": 15.0, "20": -100}},
        {"frequency_penalty": 1.5},
        {"presence_penalty": -1.5},
        {"extra": {"repetition_penalty": 3.0}},
        {"extra": {"allowed_token_ids": [70, 71, 72]}},
        {"extra": {"min_tokens": 10}},
    ],
)
def test_a_completion_draws_what_the_sdk_draws_with_the_same_options(
    client: openai.OpenAI, server: Any, options: dict[str, Any]
) -> None:
    choice = complete(client, logprobs=0, **options)
    own = {**options, **options.get("extra", {})}
    own.pop("extra", None)
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): float(bias) for token, bias in own["logit_bias"].items()}
    with server.mint_client() as service:
        params = types.SamplingParams(max_tokens=10, seed=4, **own)
        sampler = service.create_sampling_client(base_model=MODEL)
        [sequence] = sampler.sample(mint.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    assert choice.token_ids == sequence.tokens
    assert choice.logprobs.token_logprobs == sequence.logprobs
    if "min_tokens" not in own:
        assert choice.token_ids != complete(client).token_ids


def test_a_stop_string_counts_only_after_min_tokens(client: openai.OpenAI) -> None:
    bias = {"logit_bias": {"50": 100}}
    [piece] = {complete(client, max_tokens=1, **bias).text}
    assert piece
    early = complete(client, stop=piece, **bias)
    assert (early.text, len(early.token_ids), early.finish_reason) == ("", 1, "stop")
    late = complete(client, stop=piece, extra={"min_tokens": 4}, **bias)
    assert (late.text, len(late.token_ids), late.finish_reason) == (4 * piece, 5, "stop")


@pytest.mark.parametrize("width", [0, 3])
def test_the_logprobs_of_a_prompt_are_those_of_an_echo(client: openai.OpenAI, width: int) -> None:
    echoed = complete(client, echo=True, logprobs=width, max_tokens=0).logprobs.token_logprobs
    choice = complete(client, extra={"prompt_logprobs": width})
    assert choice.prompt_logprobs[0] is None and choice.text == complete(client).text
    for place, token in list(enumerate(PROMPT))[1:]:
        scored = choice.prompt_logprobs[place]
        assert scored[str(token)]["logprob"] == echoed[place]
        best = sorted(scored.values(), key=lambda one: -one["logprob"])
        assert [one["rank"] for one in best][:width] == [1, 2, 3][:width]
        assert width <= len(scored) <= width + 1


def test_a_chat_returns_the_logprobs_of_its_prompt(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    messages: Any = [{"role": "user", "content": "Hi"}]
    reply: Any = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=extra)
    assert len(reply.prompt_logprobs) == len(reply.prompt_token_ids) and reply.prompt_logprobs[0] is None
    for token, scored in zip(reply.prompt_token_ids[1:], reply.prompt_logprobs[1:], strict=True):
        assert str(token) in scored and 1 in [one["rank"] for one in scored.values()]
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.chat.completions.create(model=MODEL, messages=messages, stream=True, extra_body=extra)
