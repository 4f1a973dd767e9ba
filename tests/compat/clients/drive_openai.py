"""The `openai` package: models, completions, chat, responses, streams, structured outputs, tools, errors."""

from __future__ import annotations

import asyncio
import json

import openai
from animal import FEED, Animal
from checks import MESSAGES, check, raises, report, target

TARGET = target()
MODEL = TARGET.model
CLIENT = openai.OpenAI(max_retries=0)
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}


@check("models.list, models.retrieve")
def models() -> None:
    assert MODEL in [row.id for row in CLIENT.models.list()]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


@check("completions.create: text, logprobs, echo, several prompts")
def completions() -> None:
    got = CLIENT.completions.create(prompt=["What is", "It is"], logprobs=2, echo=True, **GREEDY)
    assert [row.index for row in got.choices] == [0, 1]
    for row, prompt in zip(got.choices, ("What is", "It is"), strict=True):
        assert row.text.startswith(prompt) and row.logprobs is not None
        assert (
            len(row.logprobs.tokens or [])
            == len(row.logprobs.token_logprobs or [])
            == len(row.logprobs.top_logprobs or [])
        )
        assert "".join(row.logprobs.tokens or []).startswith(row.text)  # the end token is no text
    assert got.usage and got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


@check("completions.create: a stream has the text of the whole")
def completion_stream() -> None:
    whole = CLIENT.completions.create(prompt="What is", **GREEDY).choices[0].text
    assert (
        "".join(part.choices[0].text for part in CLIENT.completions.create(prompt="What is", stream=True, **GREEDY))
        == whole
    )


@check("chat.completions.create: n, seed, logprobs, usage")
def chat() -> None:
    options = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 8,
        "n": 2,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    first, again = (CLIENT.chat.completions.create(**options) for _ in range(2))
    assert [row.message.content for row in first.choices] == [row.message.content for row in again.choices]
    assert first.choices[0].message.content != first.choices[1].message.content
    for row in first.choices:
        assert row.message.role == "assistant" and row.finish_reason in ("stop", "length")
        assert row.logprobs and all(
            token.logprob <= 0 and len(token.top_logprobs) == 2 for token in row.logprobs.content or []
        )
    assert first.usage and first.usage.completion_tokens <= 16


@check("chat.completions.create: a stream has the text of the whole, and its usage")
def chat_stream() -> None:
    whole = CLIENT.chat.completions.create(messages=MESSAGES, **GREEDY)
    parts = list(
        CLIENT.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        == whole.choices[0].message.content
    )
    assert parts[-1].usage == whole.usage


@check("chat.completions.stream: events, a pydantic type")
def chat_events() -> None:
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Animal, max_tokens=80
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "content.done" in kinds
    assert isinstance(final.choices[0].message.parsed, Animal)


@check("chat.completions.parse: a pydantic type")
def parse() -> None:
    got = CLIENT.chat.completions.parse(model=MODEL, messages=MESSAGES, max_tokens=80, response_format=Animal)
    assert isinstance(got.choices[0].message.parsed, Animal)


@check("response_format json_object")
def json_object() -> None:
    got = CLIENT.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=200, temperature=0, response_format={"type": "json_object"}
    ).choices[0]
    assert got.finish_reason == "length" or isinstance(json.loads(got.message.content or ""), dict)


@check("tools: required, named, streamed")
def tools() -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 80, "tools": [FEED]}
    for choice in ("required", {"type": "function", "function": {"name": "feed"}}):
        [call] = (
            CLIENT.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **options)
            .choices[0]
            .message.tool_calls
            or []
        )
        assert call.function.name == "feed" and json.loads(call.function.arguments)["animal"] in ("cat", "dog")
    parts = CLIENT.chat.completions.create(tool_choice="required", parallel_tool_calls=False, stream=True, **options)
    deltas = [call for part in parts for call in (part.choices[0].delta.tool_calls or [] if part.choices else [])]
    assert json.loads("".join(call.function.arguments or "" for call in deltas if call.function))["animal"] in (
        "cat",
        "dog",
    )


@check("responses.create: the text of chat; nothing is stored")
def responses() -> None:
    chat = CLIENT.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    got = CLIENT.responses.create(model=MODEL, input=MESSAGES, temperature=0, max_output_tokens=12)
    assert got.output_text == chat
    stored = {"previous_response_id": got.id}
    raises(openai.BadRequestError, "stored", lambda: CLIENT.responses.create(model=MODEL, input="Hi", **stored))


@check("responses.stream: events, the response of the whole")
def response_stream() -> None:
    options = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 200}
    with CLIENT.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == CLIENT.responses.create(**options).output_text


@check("responses.parse: a pydantic type")
def response_parse() -> None:
    got = CLIENT.responses.parse(model=MODEL, input=MESSAGES, max_output_tokens=80, text_format=Animal)
    assert isinstance(got.output_parsed, Animal)


@check("responses: tools, required and their outputs")
def response_tools() -> None:
    tool = {"type": "function", "strict": True, **FEED["function"]}
    options = {"model": MODEL, "max_output_tokens": 80, "tools": [tool]}
    [call] = CLIENT.responses.create(
        input=MESSAGES, tool_choice="required", parallel_tool_calls=False, **options
    ).output
    assert call.name == "feed" and json.loads(call.arguments)["animal"] in ("cat", "dog")
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "It purrs."}
    history = [*MESSAGES, call.model_dump(exclude_none=True), told]
    assert CLIENT.responses.create(input=history, **options).output


@check("AsyncOpenAI: 8 requests at once")
def many() -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(max_retries=0) as client:
            got = await asyncio.gather(*(client.chat.completions.create(messages=MESSAGES, **GREEDY) for _ in range(8)))
        return [one.choices[0].message.content for one in got]

    assert len(set(asyncio.run(ask()))) == 1


@check("with_raw_response, with_streaming_response")
def raw() -> None:
    plain = CLIENT.chat.completions.with_raw_response.create(messages=MESSAGES, **GREEDY)
    assert plain.status_code == 200 and plain.parse().choices
    with CLIENT.chat.completions.with_streaming_response.create(messages=MESSAGES, **GREEDY) as streaming:
        assert b"choices" in streaming.read()


@check("errors: unknown model, unknown field, wrong key, embeddings")
def errors() -> None:
    raises(openai.NotFoundError, "no-such", lambda: CLIENT.chat.completions.create(model="no-such", messages=MESSAGES))
    unknown = {"no_such_field": 1}
    raises(
        openai.BadRequestError,
        "no_such_field",
        lambda: CLIENT.chat.completions.create(messages=MESSAGES, extra_body=unknown, **GREEDY),
    )
    other = openai.OpenAI(api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, "", lambda: other.models.list())
    raises(openai.APIStatusError, "embeddings", lambda: CLIENT.embeddings.create(model=MODEL, input="a"))


if __name__ == "__main__":
    report("openai")
