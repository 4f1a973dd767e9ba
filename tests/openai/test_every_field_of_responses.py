"""Every field of the Responses API's request types is honoured or refused by name.

Generated from the types of the `openai` package: a field that a new version adds fails here until somebody decides.
`test_every_nested_field.py` has the fields within them, the items and the tools.
"""

from __future__ import annotations

from typing import Any, get_args

import httpx
import openai.types.responses.input_token_count_params as count_params
import openai.types.responses.response_create_params as params
import pytest
from field_checks import check_field, check_refused, names_of
from openai.types import responses as types
from openai_server import MODEL

from mint.server.openai.schemas import SamplingOptions
from mint.server.responses_api import schemas
from mint.server.responses_api.schemas import InputTokensRequest, ResponsesRequest
from mint.server.strict_fields import StrictFields

PATH = "/v1/responses"
COUNT_PATH = "/v1/responses/input_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": MODEL, "input": [USER], "max_output_tokens": 1}

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
