"""The Responses API by OpenAI's client: the same replies as chat has, as items, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from openai_server import MODEL

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

INPUT = "What is 31 + 44?"
CHAT: list[Any] = [{"role": "user", "content": INPUT}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
ABOUT = "Evaluate an arithmetic expression."
CALCULATOR: Any = {
    "type": "function",
    "name": "calculator",
    "description": ABOUT,
    "parameters": PARAMETERS,
    "strict": True,
}
CHAT_CALCULATOR: Any = {
    "type": "function",
    "function": {"name": "calculator", "description": ABOUT, "parameters": PARAMETERS},
}
ASKED: dict[str, Any] = {"model": MODEL, "input": INPUT, "temperature": 0, "max_output_tokens": 60}


class Sum(pydantic.BaseModel):
    left: int
    right: int


def without_ids(response: Any) -> Any:
    """What two responses to the same request have in common."""
    items = [item.model_dump(exclude={"id", "call_id", "parsed", "parsed_arguments"}) for item in response.output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    usage = None if response.usage is None else (response.usage.input_tokens, response.usage.output_tokens)
    return items, usage, response.status, response.incomplete_details


@pytest.mark.parametrize(
    "same",
    [
        INPUT,
        [{"role": "user", "content": INPUT}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": INPUT}]}],
    ],
)
def test_a_reply_is_the_reply_of_chat(client: openai.OpenAI, same: Any) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=60)
    got = client.responses.create(**{**ASKED, "input": same})
    assert got.output_text == chat.choices[0].message.content
    assert (got.status, got.object, got.model) == ("completed", "response", MODEL)
    assert (got.usage.input_tokens, got.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    (message,) = got.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")


def test_instructions_are_the_systems_message_and_a_history_is_read(client: openai.OpenAI) -> None:
    history: list[Any] = [*CHAT, {"role": "assistant", "content": "75"}, {"role": "user", "content": "And 2 + 2?"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be brief."}, *history], temperature=0, max_tokens=40
    )
    got = client.responses.create(
        model=MODEL, input=history, instructions="Be brief.", temperature=0, max_output_tokens=40
    )
    assert got.output_text == chat.choices[0].message.content
    assert got.usage.input_tokens == chat.usage.prompt_tokens
    assert got.instructions == "Be brief."


def test_a_reply_that_reaches_the_limit_is_incomplete(client: openai.OpenAI) -> None:
    got = client.responses.create(**{**ASKED, "max_output_tokens": 2})
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.output[-1].status == "incomplete"
    assert got.usage.output_tokens == 2


def test_a_function_is_called_and_its_output_read(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": [CALCULATOR]}
    first = client.responses.create(**asked)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "calculator", "completed")
    assert json.loads(call.arguments) == {"expression": "31 + 44"}
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "75"}
    second = client.responses.create(**{**asked, "input": [*CHAT, *(item.model_dump() for item in first.output), told]})
    history: list[Any] = [
        *CHAT,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "75"},
    ]
    chat = client.chat.completions.create(
        model=MODEL, messages=history, tools=[CHAT_CALCULATOR], temperature=0, max_tokens=60
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "calculator"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "calculator"}]},
    ],
)
def test_a_call_can_be_forced(client: openai.OpenAI, choice: Any) -> None:
    other = {**CALCULATOR, "name": "other"}
    tools = [CALCULATOR] if choice == "required" else [other, CALCULATOR]
    got = client.responses.create(
        **{**ASKED, "input": "Hello", "max_output_tokens": 200}, tools=tools, tool_choice=choice
    )
    assert {item.name for item in got.output} == {"calculator"}
    assert json.loads(got.output[0].arguments).keys() == {"expression"}
    assert got.tool_choice == choice or got.tool_choice.model_dump() == choice


def test_no_function_is_offered_where_none_is_to_be_called(client: openai.OpenAI) -> None:
    plain = client.responses.create(**ASKED)
    none = client.responses.create(**ASKED, tools=[CALCULATOR], tool_choice="none")
    assert none.usage.input_tokens == plain.usage.input_tokens
    assert none.output_text == plain.output_text


def test_a_schema_gives_a_value_that_fits_it(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**{**ASKED, "max_output_tokens": 200}, text_format=Sum)
    assert isinstance(parsed.output_parsed, Sum)
    got = client.responses.create(**{**ASKED, "max_output_tokens": 200}, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(got.output_text), dict)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [CALCULATOR]},
        {"tools": [CALCULATOR], "tool_choice": "required", "max_output_tokens": 300},
        {"max_output_tokens": 3},
        {"temperature": 8.0, "extra_body": {"seed": 6}},
        {"include": ["message.output_text.logprobs"]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ],
)
def test_a_streamed_response_is_the_whole_response(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.responses.create(**{**ASKED, **options})
    with client.responses.stream(**{**ASKED, **options}) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert without_ids(last.response) == without_ids(whole)
    assert len({item.id for item in last.response.output}) == len(last.response.output)
    pieces = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in pieces) == whole.output_text
    done = [event.item.model_dump() for event in events if event.type == "response.output_item.done"]
    assert [item["id"] for item in done] == [item.id for item in last.response.output]
    assert [item["status"] for item in done] == [item.status for item in last.response.output]


def test_logprobs_are_those_of_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=60, logprobs=True, top_logprobs=2
    )
    got = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    ours = [entry.model_dump() for entry in got.output[0].content[0].logprobs]
    assert ours == [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    told = [*CHAT, *(item.model_dump() for item in got.output), *CHAT]
    assert client.responses.create(**{**ASKED, "input": told}).output_text


def test_tokens_are_counted_as_a_response_counts_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": INPUT, "instructions": "Be brief.", "tools": [CALCULATOR]}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**asked, max_output_tokens=1).usage.input_tokens


def test_metadata_and_settings_come_back(client: openai.OpenAI) -> None:
    got = client.responses.create(**ASKED, metadata={"a": "b"}, tools=[CALCULATOR], store=False, truncation="disabled")
    assert (got.metadata, got.temperature, got.max_output_tokens) == ({"a": "b"}, 0.0, 60)
    assert got.tools[0].name == "calculator"
    assert got.model_dump()["store"] is False


def test_nothing_is_stored_and_that_is_said(client: openai.OpenAI) -> None:
    for wrong in ({"store": True}, {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**ASKED, **wrong)
        assert error.value.param == next(iter(wrong))
        assert "no response is stored" in error.value.message
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "reasoning"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "web_search_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input_image"),
        ({"input": [{"role": "king", "content": "Hi"}]}, "role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"tools": [CALCULATOR], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "a format"),
        ({"input": 3}, "input"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [CALCULATOR], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "a"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 7}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"include": ["reasoning.encrypted_content"]}, "reasoning.encrypted_content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": 3}}, "metadata"),
        ({"instructions": 3}, "instructions"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, wrong: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**{**ASKED, **wrong}, stream=stream)
        assert named in error.value.message
        assert error.value.body.keys() == {"message", "type", "param", "code"}
