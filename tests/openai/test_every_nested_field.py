"""Every field within OpenAI's requests, however deep, is honoured or refused by name.

Generated from the types of the `openai` package: a type or a field that a new version adds fails here until somebody
decides. The fields of the requests themselves are in `test_every_field.py` and `test_every_field_of_responses.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.input_token_count_params as count_params
import openai.types.responses.response_create_params as response_params
import pytest
from nested_fields import Body, walk
from openai_server import MODEL

USER: Body = {"role": "user", "content": "Hi"}
SCHEMA: Body = {"type": "object"}
TOOL: Body = {"type": "function", "function": {"name": "a"}}
FUNCTION: Body = {"type": "function", "name": "a", "parameters": None, "strict": None}
CALL: Body = {"type": "function_call", "call_id": "a", "name": "a", "arguments": "{}"}
REPLY: Body = {"type": "message", "id": "a", "role": "assistant", "status": "completed"}


@dataclass(frozen=True)
class Request:
    """A type of request, a request of it, and what is known of the types within."""

    kind: Any
    body: Body
    honoured: set[str]
    """All other types are refused wherever they stand."""
    take_anything: set[str] = field(default_factory=set)
    """Labels, hints and schemas, named `Type.field`."""
    before: dict[str, list[Body]] = field(default_factory=dict)
    examples: dict[str, Body] = field(default_factory=dict)


BREAKPOINT = {"PromptCacheBreakpoint.mode", "PromptCacheBreakpoint.ttl", "PromptCacheBreakpoint.unheard_of"}
"""A hint for the cache of a provider."""

HONOURED_IN_CHAT = {
    "ChatCompletionAssistantMessageParam", "ChatCompletionContentPartTextParam", "ChatCompletionDeveloperMessageParam",
    "ChatCompletionFunctionToolParam", "ChatCompletionMessageFunctionToolCallParam",
    "ChatCompletionNamedToolChoiceParam", "ChatCompletionStreamOptionsParam", "ChatCompletionSystemMessageParam",
    "ChatCompletionToolMessageParam", "ChatCompletionUserMessageParam", "Function", "FunctionDefinition", "JSONSchema",
    "PromptCacheBreakpoint", "PromptCacheOptions", "ResponseFormatJSONObject", "ResponseFormatJSONSchema",
    "ResponseFormatText",
}  # fmt: skip
ANYTHING_IN_CHAT = {
    *BREAKPOINT, "ChatCompletionContentPartTextParam.prompt_cache_breakpoint", "FunctionDefinition.parameters",
    "FunctionDefinition.strict", "JSONSchema.description", "JSONSchema.name", "JSONSchema.schema", "JSONSchema.strict",
}  # fmt: skip
HONOURED_IN_RESPONSES = {
    "CallerDirect", "EasyInputMessageParam", "FunctionCallOutput", "FunctionCallOutputCallerDirect",
    "FunctionToolParam", "Logprob", "LogprobTopLogprob", "Message", "PromptCacheBreakpoint", "Reasoning",
    "ResponseFormatJSONObject", "ResponseFormatText", "ResponseFormatTextJSONSchemaConfigParam",
    "ResponseFunctionToolCallParam", "ResponseInputTextContentParam", "ResponseInputTextParam",
    "ResponseOutputMessageParam", "ResponseOutputTextParam", "ToolChoiceAllowedParam", "ToolChoiceFunctionParam",
}  # fmt: skip
ANYTHING_IN_RESPONSES = {
    *BREAKPOINT, "FunctionCallOutput.id", "FunctionCallOutput.status", "FunctionToolParam.parameters",
    "FunctionToolParam.strict", "Logprob.bytes", "Logprob.logprob", "Logprob.token", "Logprob.top_logprobs",
    "Logprob.unheard_of", "LogprobTopLogprob.bytes", "LogprobTopLogprob.logprob", "LogprobTopLogprob.token",
    "LogprobTopLogprob.unheard_of", "Message.status", "ResponseFormatTextJSONSchemaConfigParam.description",
    "ResponseFormatTextJSONSchemaConfigParam.name", "ResponseFormatTextJSONSchemaConfigParam.schema",
    "ResponseFormatTextJSONSchemaConfigParam.strict", "ResponseFunctionToolCallParam.id",
    "ResponseFunctionToolCallParam.status", "ResponseInputTextContentParam.prompt_cache_breakpoint",
    "ResponseInputTextParam.prompt_cache_breakpoint", "ResponseOutputMessageParam.id",
    "ResponseOutputMessageParam.status", "ResponseOutputTextParam.logprobs",
}  # fmt: skip
"""The logprobs of an earlier reply come back with it."""
EXAMPLES_OF_RESPONSES: dict[str, Body] = {
    "FunctionCallOutput": {"type": "function_call_output", "call_id": "a", "output": "a"},
    "ResponseFormatTextJSONSchemaConfigParam": {"type": "json_schema", "name": "a", "schema": SCHEMA},
    "ResponseOutputMessageParam": {**REPLY, "content": []},
    "ResponseOutputTextParam": {"type": "output_text", "text": "a", "annotations": []},
    "ToolChoiceAllowedParam": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]},
}

REQUESTS = {
    "/v1/chat/completions": Request(
        chat_params.CompletionCreateParamsBase,
        {"model": MODEL, "messages": [USER], "max_tokens": 1, "tools": [TOOL]},
        HONOURED_IN_CHAT,
        ANYTHING_IN_CHAT,
        before={"messages": [USER]},
        examples={
            "JSONSchema": {"name": "a", "schema": SCHEMA},
            "ResponseFormatJSONSchema": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    "/v1/completions": Request(
        completion_params.CompletionCreateParamsBase,
        {"model": MODEL, "prompt": "Hi", "max_tokens": 1},
        {"ChatCompletionStreamOptionsParam"},
    ),
    "/v1/responses": Request(
        response_params.ResponseCreateParamsBase,
        {"model": MODEL, "input": [USER], "max_output_tokens": 1, "tools": [FUNCTION]},
        {
            *HONOURED_IN_RESPONSES,
            *("BackgroundOptions", "Image", "PromptCacheOptions", "ResponseTextConfigParam", "StreamOptions"),
        },
        ANYTHING_IN_RESPONSES,
        before={"input": [USER, CALL]},
        examples=EXAMPLES_OF_RESPONSES,
    ),
    "/v1/responses/input_tokens": Request(
        count_params.InputTokenCountParams,
        {"model": MODEL, "input": [USER], "tools": [FUNCTION]},
        {*HONOURED_IN_RESPONSES, "Text"},
        ANYTHING_IN_RESPONSES,
        before={"input": [USER, CALL]},
        examples=EXAMPLES_OF_RESPONSES,
    ),
}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_within_a_request_is_honoured_or_refused_by_name(http: httpx.Client, path: str) -> None:
    asked = REQUESTS[path]
    found = walk(http, path, asked.kind, asked.body, before=asked.before, examples=asked.examples)
    assert found.unnamed == {}
    assert found.accepted == asked.honoured
    assert found.take_anything == asked.take_anything
