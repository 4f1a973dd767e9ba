"""Chat by OpenAI's client: the model's own template, tool calls there and back, streamed as answered whole."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai_server import MODEL, Server

import mint
from mint.types import ModelInput, SamplingParams

QUESTION: list[Any] = [{"role": "user", "content": "What is 31 + 44?"}]
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@pytest.fixture(scope="module")
def sampler(server: Server) -> mint.SamplingClient:
    return server.mint_client().create_sampling_client(base_model=MODEL)


def test_a_reply_is_what_the_sampling_client_says_to_the_same_template(
    client: openai.OpenAI, sampler: mint.SamplingClient
) -> None:
    tokenizer = sampler.get_tokenizer()
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    own = (
        sampler.sample(ModelInput.from_ints(ids), 1, SamplingParams(max_tokens=40, temperature=0)).result().sequences[0]
    )
    extra = {"return_token_ids": True}
    got = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_completion_tokens=40,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=extra,
    )
    choice = got.choices[0]
    assert choice.message.content == tokenizer.decode(own.tokens, skip_special_tokens=True)
    assert got.prompt_token_ids == ids
    assert choice.token_ids == own.tokens
    assert [entry.logprob for entry in choice.logprobs.content] == own.logprobs
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes).decode() == entry.token
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")


def test_parts_of_text_and_a_developer_are_read(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "31 + 44?"}]
    one = client.chat.completions.create(
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}], **asked
    )
    other = client.chat.completions.create(messages=[{"role": "system", "content": "Be brief."}, *QUESTION], **asked)
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.choices == other.choices


def test_a_tool_is_called_and_its_answer_read(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [CALCULATOR], "max_tokens": 60, "temperature": 0}
    first = client.chat.completions.create(messages=QUESTION, **asked).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name) == ("function", "calculator")
    assert json.loads(call.function.arguments) == {"expression": "31 + 44"}
    told = {"role": "tool", "tool_call_id": call.id, "content": "75"}
    second = client.chat.completions.create(messages=[*QUESTION, first.message.model_dump(), told], **asked).choices[0]
    assert second.finish_reason == "stop"
    assert "75" in second.message.content


def test_a_streamed_call_is_the_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [CALCULATOR], "max_tokens": 60, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(messages=QUESTION, **asked)
    with client.chat.completions.stream(messages=QUESTION, stream_options={"include_usage": True}, **asked) as stream:
        for _event in stream:
            pass
        got = stream.get_final_completion()
    assert got.usage == whole.usage
    for one, other in zip(got.choices, whole.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.tool_calls[0].function.name == other.message.tool_calls[0].function.name
        assert one.message.tool_calls[0].function.arguments == other.message.tool_calls[0].function.arguments


def test_no_tool_is_offered_where_none_is_to_be_chosen(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "temperature": 0}
    asked["extra_body"] = {"return_token_ids": True}
    plain = client.chat.completions.create(**asked)
    none = client.chat.completions.create(tools=[CALCULATOR], tool_choice="none", **asked)
    assert none.prompt_token_ids == plain.prompt_token_ids
    assert none.choices[0].message == plain.choices[0].message


@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"n": 3}])
def test_the_pieces_of_a_streamed_reply_are_the_whole_reply(client: openai.OpenAI, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 6, "temperature": 8.0, "max_tokens": 50}
    whole = client.chat.completions.create(**asked, **options)
    contents = [""] * len(whole.choices)
    scored: list[list[Any]] = [[] for _ in whole.choices]
    finishes: list[str | None] = [None] * len(whole.choices)
    roles: list[str] = []
    for event in client.chat.completions.create(stream=True, **asked, **options):
        (choice,) = event.choices
        roles += [choice.delta.role] if choice.delta.role else []
        contents[choice.index] += choice.delta.content or ""
        finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        scored[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert contents == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant"] * len(whole.choices)
    assert scored == [choice.logprobs.content if choice.logprobs else [] for choice in whole.choices]


def test_tokens_in_and_out_need_no_text(client: openai.OpenAI) -> None:
    """What a loop of reinforcement learning needs: the ids and logprobs of a reply, and a next turn made of ids."""
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"return_token_ids": True}}
    turn = client.chat.completions.create(messages=QUESTION, logprobs=True, max_tokens=30, **asked)
    history = [*turn.prompt_token_ids, *turn.choices[0].token_ids]
    scored = client.completions.create(prompt=history, echo=True, logprobs=0, max_tokens=0, **asked).choices[0]
    start = len(turn.prompt_token_ids)
    sampled = [entry.logprob for entry in turn.choices[0].logprobs.content]
    assert scored.logprobs.token_logprobs[start:] == pytest.approx(sampled, abs=1e-5)
