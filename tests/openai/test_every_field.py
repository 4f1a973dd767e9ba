"""Every field of OpenAI's request types, and of vLLM's that clients send, is honoured or refused by name.

Generated from the types of the `openai` package: a field that a new version adds fails here until somebody decides.
`test_every_nested_field.py` has the fields within them.
"""

from __future__ import annotations

from typing import Any

import httpx
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from field_checks import check_field, names_of
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
