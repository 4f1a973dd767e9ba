"""Completions by OpenAI's client say what mint's own sampler says: the same tokens, the same numbers, the same text."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai_server import MODEL, Server

import mint
from mint.types import ModelInput, SamplingParams

PROMPT = "What is 3 + 4?\n"
HOT: dict[str, Any] = {"temperature": 8.0, "max_tokens": 60}


@pytest.fixture(scope="module")
def sampler(server: Server) -> mint.SamplingClient:
    return server.mint_client().create_sampling_client(base_model=MODEL)


@pytest.fixture(scope="module")
def tokenizer(sampler: mint.SamplingClient) -> Any:
    return sampler.get_tokenizer()


@pytest.fixture(scope="module")
def long_seed(server: Server) -> int:
    """A seed with which the model does not stop early."""
    with server.client() as opened:
        for seed in range(100):
            got = opened.completions.create(model=MODEL, prompt=PROMPT, seed=seed, **HOT).choices[0]
            if got.finish_reason == "length" and len(got.text) > 60:
                return seed
    raise AssertionError("no seed gives a long text")


def sampled(sampler: mint.SamplingClient, prompt: list[int], **params: Any) -> Any:
    n = params.pop("n", 1)
    return sampler.sample(ModelInput.from_ints(prompt), n, SamplingParams(**params)).result().sequences


def test_a_greedy_completion_is_what_the_sampling_client_samples(
    client: openai.OpenAI, sampler: mint.SamplingClient, tokenizer: Any
) -> None:
    ids = tokenizer.encode(PROMPT)
    own = sampled(sampler, ids, max_tokens=40, temperature=0.0)[0]
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        got = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0, logprobs=0)
        choice = got.choices[0]
        assert choice.text == tokenizer.decode(own.tokens, skip_special_tokens=True)
        assert choice.logprobs.token_logprobs == own.logprobs
        assert choice.finish_reason == own.stop_reason
        assert got.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
            "prompt_tokens": len(ids), "completion_tokens": len(own.tokens), "total_tokens": len(ids) + len(own.tokens),
        }  # fmt: skip


def test_a_seeded_completion_is_what_the_sampling_client_samples(
    client: openai.OpenAI, sampler: mint.SamplingClient, tokenizer: Any
) -> None:
    ids = tokenizer.encode(PROMPT)
    own = sampled(sampler, ids, n=3, seed=5, top_p=0.9, top_k=50, **HOT)
    extra = {"return_token_ids": True, "top_k": 50}
    got = client.completions.create(
        model=MODEL, prompt=PROMPT, n=3, seed=5, top_p=0.9, logprobs=0, extra_body=extra, **HOT
    )
    for choice, sequence in zip(got.choices, own, strict=True):
        assert choice.token_ids == sequence.tokens
        assert choice.prompt_token_ids == ids
        assert choice.logprobs.token_logprobs == sequence.logprobs


def test_four_choices_differ_and_the_same_seed_gives_them_again(client: openai.OpenAI) -> None:
    def texts(**options: Any) -> list[str]:
        got = client.completions.create(model=MODEL, prompt=PROMPT, n=4, **HOT, **options)
        assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
        return [choice.text for choice in got.choices]

    first = texts(seed=-3)
    assert len(set(first)) == 4
    assert texts(seed=-3) == first
    assert texts(seed=4) != first
    assert texts() != texts()


def test_prompts_in_a_list_are_continued_in_order(client: openai.OpenAI) -> None:
    prompts = ["One", "What is 2 + 2?", "Say it: "]
    together = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=1, **HOT)
    alone = [client.completions.create(model=MODEL, prompt=prompt, n=2, seed=1, **HOT) for prompt in prompts]
    assert [c.text for c in together.choices] == [c.text for one in alone for c in one.choices]
    assert [c.index for c in together.choices] == list(range(6))
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)


def test_echo_scores_the_prompt_as_the_sampling_client_does(
    client: openai.OpenAI, sampler: mint.SamplingClient, tokenizer: Any
) -> None:
    text = "It is seven, é 漢."
    ids = tokenizer.encode(text)
    own = sampler.compute_logprobs(ModelInput.from_ints(ids)).result()
    for max_tokens in (0, 1):
        got = client.completions.create(
            model=MODEL, prompt=ids, max_tokens=max_tokens, temperature=0, echo=True, logprobs=3
        ).choices[0]
        scored = got.logprobs
        assert got.text.startswith(text)
        assert scored.token_logprobs[: len(ids)] == own
        assert len(scored.tokens) == len(ids) + max_tokens
        assert scored.top_logprobs[0] is None
        assert [len(top) in (3, 4) for top in scored.top_logprobs[1:]] == [True] * (len(ids) + max_tokens - 1)
        for token, logprob, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True):
            assert logprob is None or top[token] == logprob
        places = [scored.text_offset[place] for place in range(len(ids))]
        assert places == [len(tokenizer.decode(ids[:place]).rstrip("�")) for place in range(len(ids))]


def test_echo_without_logprobs_begins_with_the_prompt(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0).choices[0].text
    for max_tokens, text in ((9, PROMPT + plain), (0, PROMPT)):
        options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        assert client.completions.create(echo=True, **options).choices[0].text == text
        stream = client.completions.create(echo=True, stream=True, **options)
        assert "".join(event.choices[0].text for event in stream) == text


@pytest.mark.parametrize("options", [{}, {"logprobs": 0}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 3}])
def test_the_pieces_of_a_stream_are_the_whole_answer(client: openai.OpenAI, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": [PROMPT, "Let us"], "seed": 11, **HOT, **options}
    whole = client.completions.create(**asked)
    texts = [""] * len(whole.choices)
    finishes: list[str | None] = [None] * len(whole.choices)
    numbers: list[list[Any]] = [[] for _ in whole.choices]
    usage = None
    for event in client.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            scored = choice.logprobs
            if scored is not None:
                tops = scored.top_logprobs or [None] * len(scored.tokens)
                numbers[choice.index] += zip(
                    scored.tokens, scored.token_logprobs, scored.text_offset, tops, strict=True
                )
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    for got, choice in zip(numbers, whole.choices, strict=True):
        scored = choice.logprobs
        if scored is not None:
            tops = scored.top_logprobs or [None] * len(scored.tokens)
            assert got == list(zip(scored.tokens, scored.token_logprobs, scored.text_offset, tops, strict=True))


def test_a_stop_string_ends_the_text_before_it_wherever_tokens_break(client: openai.OpenAI, long_seed: int) -> None:
    seed = long_seed
    full = client.completions.create(model=MODEL, prompt=PROMPT, seed=seed, **HOT).choices[0].text
    for start in range(3, 30, 9):
        for length in (1, 2, 5, 9):
            stop = full[start : start + length]
            cut = full[: full.index(stop)]
            asked: dict[str, Any] = {
                "model": MODEL,
                "prompt": PROMPT,
                "seed": seed,
                "stop": [stop, "never said"],
                **HOT,
            }
            choice = client.completions.create(**asked).choices[0]
            assert (choice.text, choice.finish_reason) == (cut, "stop")
            if length in (2, 9):
                stream = client.completions.create(stream=True, **asked)
                assert "".join(event.choices[0].text for event in stream) == cut


def test_a_stop_token_is_sampled_and_not_said(client: openai.OpenAI, long_seed: int) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": long_seed, **HOT}
    ids = client.completions.create(extra_body={"return_token_ids": True}, **asked).choices[0].token_ids
    extra = {"return_token_ids": True, "stop_token_ids": [ids[7]], "return_tokens_as_token_ids": True}
    got = client.completions.create(extra_body=extra, logprobs=0, **asked).choices[0]
    end = ids.index(ids[7]) + 1
    assert got.token_ids == ids[:end]
    assert got.logprobs.tokens == [f"token_id:{token}" for token in ids[:end]]
    assert got.finish_reason == "stop"
    again = client.completions.create(model=MODEL, prompt=ids[: end - 1], max_tokens=0, echo=True)
    assert got.text == again.choices[0].text


def test_a_stream_of_tokens_that_are_no_characters_is_the_same_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "漢", "seed": 0, "temperature": 50.0, "max_tokens": 150, "n": 12}
    whole = [choice.text for choice in client.completions.create(**asked).choices]
    texts = [""] * 12
    events = list(client.completions.create(stream=True, **asked))
    for event in events:
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == whole
    assert len(events) > 12 * 50


def test_the_async_client_streams_and_gathers(server: Server) -> None:
    async def run() -> None:
        async with server.async_client() as client:
            asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 3, **HOT}
            whole = await client.completions.create(**asked)
            stream = await client.completions.create(stream=True, **asked)
            assert "".join([event.choices[0].text async for event in stream]) == whole.choices[0].text

    asyncio.run(run())


def test_the_path_of_tinker_and_mint_leads_to_the_same(server: Server, client: openai.OpenAI) -> None:
    with server.client(path="/oai/api/v1") as other:
        assert [model.id for model in other.models.list()] == [model.id for model in client.models.list()]
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 8, **HOT}
        assert other.completions.create(**asked).choices == client.completions.create(**asked).choices


def test_an_end_token_that_is_ignored_ends_nothing_and_stop_strings_still_do(
    client: openai.OpenAI, sampler: mint.SamplingClient, tokenizer: Any
) -> None:
    ids = tokenizer.encode(PROMPT)
    usual = sampled(sampler, ids, max_tokens=40, temperature=0.0)[0]
    assert usual.stop_reason == "stop"
    longer = sampled(sampler, ids, max_tokens=40, temperature=0.0, ignore_eos=True)[0]
    assert (longer.stop_reason, len(longer.tokens)) == ("length", 40)
    assert longer.tokens[: len(usual.tokens)] == usual.tokens
    assert longer.logprobs[: len(usual.tokens)] == usual.logprobs
    extra = {"ignore_eos": True, "return_token_ids": True}
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, extra_body=extra)
    assert got.choices[0].token_ids == longer.tokens and got.choices[0].finish_reason == "length"
    piece = tokenizer.decode([longer.tokens[1]])
    stopped = sampled(sampler, ids, max_tokens=40, temperature=0.0, ignore_eos=True, stop=[piece])[0]
    assert stopped.stop_reason == "stop" and len(stopped.tokens) <= 2
