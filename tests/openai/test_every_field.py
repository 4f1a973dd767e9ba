"""Every field of OpenAI's request types, and of vLLM's that clients send, is honoured or refused by name.

Generated from the types of the `openai` package: a field that a new version adds fails here until somebody decides.
"""

from __future__ import annotations

from typing import Any

import httpx
import openai.types.chat as chat_types
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from field_checks import ODD, check_field, check_refused, names_of
from openai.types.shared_params import FunctionDefinition as FunctionParam
from openai_server import MODEL

from mint.server.openai import schemas
from mint.server.openai.schemas import ChatRequest, CompletionRequest

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "One", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}

OF_VLLM = {
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template",
    "chat_template_kwargs", "continue_final_message", "documents", "echo", "guided_choice", "guided_grammar",
    "guided_json", "guided_regex", "ignore_eos", "include_stop_str_in_output", "length_penalty", "logits_processors",
    "min_p", "min_tokens", "mm_processor_kwargs", "priority", "prompt_logprobs", "repetition_penalty", "request_id",
    "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
    "stop_token_ids", "structured_outputs", "top_k", "truncate_prompt_tokens", "use_beam_search",
}  # fmt: skip
"""The extra parameters of vLLM's OpenAI-compatible server (docs.vllm.ai)."""

LABELS = {"metadata", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier", "user"}
"""What docs/openai.md says is accepted, because it asks for nothing."""

CHAT_FIELDS = sorted({"stream", *names_of(chat_params.CompletionCreateParamsBase), *OF_VLLM})
COMPLETION_FIELDS = sorted({"stream", *names_of(completion_params.CompletionCreateParamsBase), *OF_VLLM})


@pytest.mark.parametrize("name", CHAT_FIELDS)
def test_every_field_of_a_chat_is_honoured_or_refused_by_name(http: httpx.Client, name: str) -> None:
    check_field(http, "/v1/chat/completions", CHAT, name, honoured=ChatRequest.model_fields, labels=LABELS)


@pytest.mark.parametrize("name", COMPLETION_FIELDS)
def test_every_field_of_a_completion_is_honoured_or_refused_by_name(http: httpx.Client, name: str) -> None:
    check_field(http, "/v1/completions", COMPLETION, name, honoured=CompletionRequest.model_fields, labels=LABELS)


def message_types() -> dict[str, Any]:
    roles = ("System", "Developer", "User", "Assistant", "Tool")
    return {role.lower(): getattr(chat_types, f"ChatCompletion{role}MessageParam") for role in roles}


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, kind in message_types().items() for name in names_of(kind)]
)
def test_every_field_of_a_message_is_honoured_or_refused_by_name(http: httpx.Client, role: str, name: str) -> None:
    message = {"role": role, "content": "Hi", **({"tool_call_id": "a"} if role == "tool" else {})}
    check_refused(http, "/v1/chat/completions", {**CHAT, "messages": [{**message, name: ODD}]}, name)


PARTS: dict[str, tuple[Any, Any, set[str]]] = {
    # where: (OpenAI's type, the body around a part, hints)
    "stream_options": (
        chat_types.ChatCompletionStreamOptionsParam,
        lambda part: {"stream": True, "stream_options": part},
        set(),
    ),
    "content part": (
        chat_types.ChatCompletionContentPartTextParam,
        lambda part: {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **part}]}]},
        {"prompt_cache_breakpoint"},
    ),
    "tool": (
        chat_types.ChatCompletionFunctionToolParam,
        lambda part: {"tools": [{"type": "function", "function": {"name": "f"}, **part}]},
        set(),
    ),
    "function": (
        FunctionParam,
        lambda part: {"tools": [{"type": "function", "function": {"name": "f", **part}}]},
        {"strict", "parameters"},  # parameters are a schema, which may hold anything
    ),
    "tool call": (
        chat_types.ChatCompletionMessageFunctionToolCallParam,
        lambda part: {
            "messages": [
                *CHAT["messages"],
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **part}
                    ],
                },
            ]
        },
        set(),
    ),
}


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, (kind, *_) in PARTS.items() for name in kind.__annotations__]
)
def test_every_field_of_a_part_is_honoured_or_refused_by_name(http: httpx.Client, where: str, name: str) -> None:
    _, around, hints = PARTS[where]
    if name in hints:
        assert http.post("/v1/chat/completions", json={**CHAT, **around({name: ODD})}).status_code == 200
        return
    check_refused(http, "/v1/chat/completions", {**CHAT, **around({name: ODD})}, name)


@pytest.mark.parametrize("where", PARTS)
def test_a_field_that_nobody_knows_is_refused_in_every_part(http: httpx.Client, where: str) -> None:
    check_refused(http, "/v1/chat/completions", {**CHAT, **PARTS[where][1]({"unheard_of": 1})}, "unheard_of")


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_a_field_that_nobody_knows_is_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json={**body, "temprature": 0.5})
    assert answer.status_code == 400 and "temprature = 0.5" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "temprature"
    assert http.post(path, json={**body, "temprature": None}).status_code == 200


def test_no_field_is_both_honoured_and_refused() -> None:
    for kind in (ChatRequest, CompletionRequest, schemas.ChatMessage, schemas.StreamOptions):
        assert not kind.model_fields.keys() & kind.refused.keys() - {"echo", "add_special_tokens", "best_of"}
        assert not kind.labels & kind.refused.keys()


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_what_asks_for_nothing_is_accepted(http: httpx.Client, kind: Any) -> None:
    path, body = ("/v1/chat/completions", CHAT) if kind is ChatRequest else ("/v1/completions", COMPLETION)
    for name, (harmless, _) in kind.refused.items():
        for value in () if name in kind.model_fields else (*harmless, None):
            assert http.post(path, json={**body, name: value}).status_code == 200, (name, value)
