"""A server without the extra `structured` says which extra a request for a format needs."""

from __future__ import annotations

import sys
from typing import Any

import openai
import pytest
from openai_server import MODEL, Server

import mint
from mint import types
from mint.errors import MissingExtraError

REMEDY = r"pip install .*\[structured\]"
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
FORMATS: dict[str, dict[str, Any]] = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    },
    "guided_regex": {"extra_body": {"guided_regex": "[ab]+"}},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
}


@pytest.fixture(autouse=True)
def without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed: importing it raises."""
    monkeypatch.setitem(sys.modules, "llguidance", None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_request_for_a_format_is_told_which_extra_is_missing(client: openai.OpenAI, name: str) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    # 400, because the package sends a request again after every 5xx.
    with pytest.raises(openai.BadRequestError, match=f"llguidance.*{REMEDY}"):
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, **FORMATS[name])


def test_the_mint_sdk_raises_the_error_of_a_missing_extra(server: Server) -> None:
    wanted = types.StructuredOutputs(json_object=True)
    with server.mint_client() as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        params = types.SamplingParams(max_tokens=4, structured_outputs=wanted)
        with pytest.raises(MissingExtraError, match=REMEDY):
            sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params).result()
        plain = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=4)).result()
    assert len(plain.sequences) == 1


def test_the_embedded_service_raises_it_too() -> None:
    with mint.ServiceClient() as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        params = types.SamplingParams(max_tokens=4, structured_outputs=types.StructuredOutputs(regex="a+"))
        with pytest.raises(MissingExtraError, match=REMEDY):
            sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params).result()
