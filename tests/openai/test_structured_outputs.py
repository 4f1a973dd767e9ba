"""Formats and forced calls at `/v1`, with the `openai` package."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, get_args

import numpy as np
import openai
import pydantic
import pytest
from openai_server import MODEL

from mint.engine.drawing.token_masks import packed
from mint.models.registry import BUNDLED
from mint.server.grammars.compiler import compile_grammar
from mint.server.openai.detokenizer import read_vocabulary
from mint.server.openai.schemas import ChatRequest
from mint.server.openai.structured import chat_grammar
from mint.types.tool_call_formats import SYNTAX, ToolCall, ToolCallFormat, parse_tool_calls, render_tool_calls

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

MESSAGES: Any = [{"role": "user", "content": "Which animal is it?"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


TOOLS = [tool("weather", days={"type": "integer", "minimum": 1, "maximum": 7}), tool("clock", zone={"enum": ["UTC"]})]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, **{"max_tokens": 80, "seed": 1, "n": 4, **fields}
    )


def test_many_prompts_with_a_new_grammar_are_one_trial(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["One"] * 16, max_tokens=9, extra_body={"guided_choice": ["a choice of many prompts"]}
    )
    assert len(reply.choices) == 16


def is_animal(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"kind", "age"} and found["kind"] in ("cat", "dog") and 0 <= found["age"] <= 9


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        is_animal,
    ),
    "structured_outputs": ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, is_animal),
    "guided_json": ({"extra_body": {"guided_json": json.dumps(SCHEMA)}}, is_animal),
    "guided_regex": ({"extra_body": {"guided_regex": "[ab]{2}/[0-9]"}}, re.compile("[ab]{2}/[0-9]").fullmatch),
    "guided_choice": ({"extra_body": {"guided_choice": ["up", "down"]}}, {"up", "down"}.__contains__),
    "guided_grammar": ({"extra_body": {"guided_grammar": 'root ::= "x" | "y"'}}, {"x", "y"}.__contains__),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_reply_has_the_format_that_is_asked_for(client: openai.OpenAI, name: str) -> None:
    fields, fits = FORMATS[name]
    for choice in ask(client, **fields).choices:
        assert choice.finish_reason == "stop" and fits(choice.message.content)
    [choice, *_] = client.completions.create(
        model=MODEL, prompt="One", max_tokens=80, **({} if "response_format" in fields else fields)
    ).choices
    assert "response_format" in fields or fits(choice.text)


def test_a_json_object_is_json_as_far_as_it_goes(client: openai.OpenAI) -> None:
    for choice in ask(client, response_format={"type": "json_object"}).choices:
        text = choice.message.content
        assert text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_a_stream_has_the_format_and_the_same_text(client: openai.OpenAI) -> None:
    fields = FORMATS["json_schema"][0]
    whole = ask(client, n=1, **fields).choices[0].message.content
    pieces = [event.choices[0].delta.content or "" for event in ask(client, n=1, stream=True, **fields)]
    assert "".join(pieces) == whole and is_animal(whole)


class Animal(pydantic.BaseModel):
    """An answer."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    age: Literal[1, 2]


def test_the_clients_own_parse_returns_an_object(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=MESSAGES, max_tokens=80, response_format=Animal)
    assert isinstance(reply.choices[0].message.parsed, Animal)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_a_forced_call_is_made(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    for reply in ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, max_tokens=160).choices:
        calls = reply.message.tool_calls
        assert calls and (parallel or len(calls) == 1)
        assert reply.finish_reason == "tool_calls" or parallel
        for call in calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "weather":
                assert choice == "required" and 1 <= arguments["days"] <= 7
            else:
                assert (call.function.name, arguments) == ("clock", {"zone": "UTC"})


def test_a_forced_call_streams(client: openai.OpenAI) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 1}
    events = list(ask(client, stream=True, **fields))
    calls = [call for event in events for call in event.choices[0].delta.tool_calls or ()]
    assert len(calls) == 1 and calls[0].function.name in ("weather", "clock")
    assert events[-1].choices[0].finish_reason == "tool_calls"


def test_with_tools_and_a_format_a_reply_is_either(client: openai.OpenAI) -> None:
    fields = FORMATS["json_schema"][0]
    for reply in ask(client, tools=TOOLS, max_tokens=120, n=8, **fields).choices:
        message = reply.message
        if reply.finish_reason != "length":
            assert message.tool_calls or is_animal(message.content)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "a"}}}, "structural_tag"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_constrained_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        ask(client, **fields)


CALL = '{"name": "clock", "arguments": {"zone": "UTC"}}'
OF_LLAMA = '{"name": "clock", "parameters": {"zone": "UTC"}}'
TEXTS: dict[str, tuple[dict[str, Any], ToolCallFormat, bool, str, bool]] = {
    # the request, the format, whether it has opened a reasoning block, a text, whether it fits
    "reasoning, then a format": ({"response_format": FORMATS["json_schema"][0]["response_format"]}, "hermes", True,
        'Hm, "x"?\n</think>\n\n{"kind": "cat", "age": 3}', True),
    "a format at once": ({"response_format": FORMATS["json_schema"][0]["response_format"]}, "hermes", True,
        '{"kind": "cat", "age": 3}', False),
    "reasoning, then a call": ({"tools": TOOLS, "tool_choice": "required"}, "hermes", True,
        f"So.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", True),
    "two calls": ({"tools": TOOLS, "tool_choice": "required"}, "hermes", False,
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", True),
    "one call": ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, "hermes", False,
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", False),
    "Llama": ({"tools": TOOLS, "tool_choice": "required"}, "llama", False, f"{OF_LLAMA}; {OF_LLAMA}", True),
    "Mistral": ({"tools": TOOLS, "tool_choice": "required"}, "mistral", False,
        f"[TOOL_CALLS][{CALL}, {CALL}]", True),
    "Mistral, named": ({"tools": TOOLS, "tool_choice": "required"}, "mistral_named", False,
        '[TOOL_CALLS]clock[ARGS]{"zone": "UTC"}', True),
    "a regular expression with tools": ({"tools": TOOLS, "guided_regex": "a/b+"}, "hermes", False, "a/bb", True),
    "a choice after reasoning": ({"guided_choice": ["x", "y"]}, "hermes", True, "</think>y", True),
}  # fmt: skip


def takes(fields: dict[str, Any], written_as: ToolCallFormat, is_thinking: bool, text: str) -> bool:
    """Whether the grammar of a request allows a text."""
    folder = BUNDLED[MODEL]
    vocabulary = read_vocabulary(folder)
    request = ChatRequest.model_validate_json(json.dumps({"model": MODEL, "messages": MESSAGES, **fields}))
    wanted = chat_grammar(request, vocabulary, written_as, is_thinking=is_thinking)
    assert wanted is not None
    ends = sorted(vocabulary.ends)
    grammar = compile_grammar(wanted, folder, ends, len(vocabulary.pieces), owner="local")
    state, bits, has_ended = grammar.start(), packed(np.array([], np.int64), len(vocabulary.pieces)), False
    for token in [*vocabulary.tokenizer.encode(text, add_special_tokens=False), ends[0]]:
        state.allowed(bits)
        if not np.unpackbits(bits, bitorder="little")[token]:
            break
        state.advance(token)
        has_ended = token in grammar.ends
    return has_ended


@pytest.mark.parametrize("name", TEXTS)
def test_grammars_take_what_the_families_write(name: str) -> None:
    fields, written_as, is_thinking, text, fits = TEXTS[name]
    assert takes(fields, written_as, is_thinking, text) == fits


@pytest.mark.parametrize("written_as", get_args(ToolCallFormat))
@pytest.mark.parametrize("count", [1, 2])
def test_forced_calls_of_each_format_are_what_its_parser_reads(written_as: ToolCallFormat, count: int) -> None:
    """The formats whose own syntax is no JSON are forced to the JSON that their parsers read, too."""
    shown_as = {"qwen_coder": "hermes", "glm": "hermes", "pythonic": "llama"}.get(written_as, written_as)
    calls = [ToolCall("clock", {"zone": "UTC"})] * count
    text = render_tool_calls(calls, shown_as)  # ty: ignore[invalid-argument-type]
    assert takes({"tools": TOOLS, "tool_choice": "required"}, written_as, False, text) == (
        count == 1 or SYNTAX[written_as].between is not None
    )
    assert not takes({"tools": TOOLS, "tool_choice": "required"}, written_as, False, f"Well. {text}")
    if count == 1 or SYNTAX[written_as].between is not None:
        assert [call.name for call in parse_tool_calls(text, written_as, ("clock",))] == ["clock"] * count
