"""Every field of the Responses API's request types is honoured or refused by name.

Generated from the types of the `openai` package: a field, an item or a tool that a new version adds fails here until
somebody decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import httpx
import openai.types.responses.input_token_count_params as count_params
import openai.types.responses.response_create_params as params
import pytest
from field_checks import ODD, check_field, check_refused, names_of
from openai.types import responses as types
from openai.types.responses import response_input_item_param, response_input_param
from openai_server import MODEL

from mint.server.openai.schemas import SamplingOptions
from mint.server.responses_api import schemas
from mint.server.responses_api.schemas import InputTokensRequest, ResponsesRequest
from mint.server.strict_fields import StrictFields

PATH = "/v1/responses"
COUNT_PATH = "/v1/responses/input_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": MODEL, "input": [USER], "max_output_tokens": 1}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": None, "strict": None}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}

LABELS = {"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
"""What docs/openai.md says is accepted, because it asks for nothing."""

FIELDS = sorted({"stream", *names_of(params.ResponseCreateParamsBase), *SamplingOptions.model_fields})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_request_is_honoured_or_refused_by_name(http: httpx.Client, name: str) -> None:
    honoured = set(ResponsesRequest.model_fields)
    if name == "input":
        assert http.post(PATH, json={**ASKED, "input": "odd"}).status_code == 200
    check_field(http, PATH, ASKED, name, honoured=honoured, labels=LABELS)


@pytest.mark.parametrize("name", names_of(count_params.InputTokenCountParams))
def test_every_field_of_a_count_is_honoured_or_refused_by_name(http: httpx.Client, name: str) -> None:
    asked = {"model": MODEL, "input": [USER]}
    check_field(http, COUNT_PATH, asked, name, honoured=InputTokensRequest.model_fields)


def in_message(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{**USER, **part}]}


def in_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", **part}]}]}


PARTS: dict[str, tuple[Any, Callable[[dict[str, Any]], dict[str, Any]], set[str]]] = {
    # where: (OpenAI's type, the body around a part, labels and hints)
    "easy message": (types.EasyInputMessageParam, in_message, set()),
    "message": (response_input_item_param.Message, in_message, {"status"}),
    "reply": (types.ResponseOutputMessageParam, in_message, {"id", "status"}),
    "input text": (types.ResponseInputTextParam, in_part, {"prompt_cache_breakpoint"}),
    "output text": (types.ResponseOutputTextParam, in_part, {"logprobs"}),
    "call": (types.ResponseFunctionToolCallParam, lambda part: {"input": [USER, {**CALL, **part}]}, {"id", "status"}),
    "output": (
        response_input_item_param.FunctionCallOutput,
        lambda part: {"input": [USER, CALL, {"type": "function_call_output", "call_id": "a", "output": "1", **part}]},
        {"id", "status"},
    ),
    "tool": (
        types.FunctionToolParam,
        lambda part: {"tools": [{**FUNCTION, **part}]},
        {"strict", "parameters"},  # parameters are a schema, which may hold anything
    ),
    "named tool": (
        types.ToolChoiceFunctionParam,
        lambda part: {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f", **part}},
        set(),
    ),
    "text": (types.ResponseTextConfigParam, lambda part: {"text": part}, set()),
    "format": (
        types.ResponseFormatTextJSONSchemaConfigParam,
        lambda part: {
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, **part}},
        },
        {"name", "description", "strict", "schema"},  # a schema may hold anything
    ),
    "stream_options": (params.StreamOptions, lambda part: {"stream": True, "stream_options": part}, set()),
}


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, (kind, *_) in PARTS.items() for name in names_of(kind)]
)
def test_every_field_of_a_part_is_honoured_or_refused_by_name(http: httpx.Client, where: str, name: str) -> None:
    _, around, hints = PARTS[where]
    if name in hints:
        assert http.post(PATH, json={**ASKED, **around({name: ODD})}).status_code == 200
        return
    expected = "tool_choice" if where == "named tool" else name
    check_refused(http, PATH, {**ASKED, **around({name: ODD})}, expected)


@pytest.mark.parametrize("where", PARTS)
def test_a_field_that_nobody_knows_is_refused_in_every_part(http: httpx.Client, where: str) -> None:
    expected = "tool_choice" if where == "named tool" else "unheard_of"
    check_refused(http, PATH, {**ASKED, **PARTS[where][1]({"unheard_of": 1})}, expected)


def kinds(union: Any) -> set[str]:
    """The values of `type` in a union of typed dictionaries."""
    found = set[str]()
    for member in get_args(union):
        found |= set(get_args(get_args(get_type_hints(member, include_extras=True)["type"])[0]) or ())
    return found


ITEMS = sorted(
    kinds(response_input_param.ResponseInputItemParam) - {"message", "function_call", "function_call_output"}
)
TOOLS = sorted(kinds(types.ToolParam) - {"function"})


@pytest.mark.parametrize("kind", ITEMS)
def test_every_other_kind_of_item_is_refused_by_name(http: httpx.Client, kind: str) -> None:
    check_refused(http, PATH, {**ASKED, "input": [{"type": kind}]}, kind)


@pytest.mark.parametrize("kind", TOOLS)
def test_every_tool_of_a_provider_is_refused_by_name(http: httpx.Client, kind: str) -> None:
    check_refused(http, PATH, {**ASKED, "tools": [{"type": kind}]}, kind)


@pytest.mark.parametrize("kind", sorted(get_args(types.ResponseIncludable)))
def test_everything_else_that_could_be_included_is_refused_by_name(http: httpx.Client, kind: str) -> None:
    if kind == schemas.LOGPROBS:
        assert http.post(PATH, json={**ASKED, "include": [kind]}).status_code == 200
        return
    check_refused(http, PATH, {**ASKED, "include": [kind]}, kind)


def test_what_asks_for_nothing_is_accepted(http: httpx.Client) -> None:
    for name, (harmless, _) in ResponsesRequest.refused.items():
        for value in (*harmless, None):
            assert http.post(PATH, json={**ASKED, name: value}).status_code == 200, (name, value)


def test_no_field_is_both_honoured_and_refused() -> None:
    kinds = [one for one in vars(schemas).values() if isinstance(one, type) and issubclass(one, StrictFields)]
    assert len(kinds) > 10
    for kind in kinds:
        fields = {field.alias or name for name, field in kind.model_fields.items()}
        assert not fields & kind.refused.keys()
        assert not kind.labels & (kind.refused.keys() | fields)
