"""Every field of Anthropic's request types is honoured or refused by name.

`anthropic_fields.json` has the names. `tests/compat/clients` compares them with the `anthropic` package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from field_checks import ODD, check_field, check_refused
from openai_server import MODEL

from mint.server.messages_api import schemas
from mint.server.messages_api.schemas import MessagesRequest, TokenCountRequest
from mint.server.openai.schemas import SamplingOptions
from mint.server.strict_fields import StrictFields

FIELDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "anthropic_fields.json").read_text())

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 1}
COUNTED: dict[str, Any] = {"model": MODEL, "messages": [USER]}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
USE: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "content": "1"}


@pytest.mark.parametrize("name", sorted({"stream", *FIELDS["request"], *SamplingOptions.model_fields}))
def test_every_field_of_a_request_is_honoured_or_refused_by_name(http: httpx.Client, name: str) -> None:
    honoured = MessagesRequest.model_fields
    check_field(http, PATH, ASKED, name, honoured=honoured, labels={"cache_control", "metadata"})


@pytest.mark.parametrize("name", FIELDS["count"])
def test_every_field_of_a_count_is_honoured_or_refused_by_name(http: httpx.Client, name: str) -> None:
    honoured = TokenCountRequest.model_fields
    check_field(http, COUNT_PATH, COUNTED, name, honoured=honoured, labels={"cache_control"})


def in_content(role: str, block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": [block]}, USER]}


PARTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], set[str]]] = {
    # where: (the body around a part, labels and hints)
    "message": (lambda part: {"messages": [{**USER, **part}]}, set()),
    "system": (lambda part: {"system": [{"type": "text", "text": "Hi", **part}]}, {"cache_control"}),
    "text": (lambda part: in_content("user", {"type": "text", "text": "Hi", **part}), {"cache_control"}),
    "tool_use": (lambda part: in_content("assistant", {**USE, **part}), {"cache_control", "input"}),
    "tool_result": (lambda part: in_content("user", {**RESULT, **part}), {"cache_control"}),
    "tool": (
        lambda part: {"tools": [{**TOOL, **part}]},
        {"cache_control", "eager_input_streaming", "strict", "input_schema"},  # a schema may hold anything
    ),
    "tool_choice": (lambda part: {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f", **part}}, set()),
    "output_config": (lambda part: {"output_config": part}, set()),
    "format": (
        lambda part: {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}, **part}}},
        {"schema"},
    ),
}


@pytest.mark.parametrize(("where", "name"), [(where, name) for where in PARTS for name in FIELDS[where]])
def test_every_field_of_a_part_is_honoured_or_refused_by_name(http: httpx.Client, where: str, name: str) -> None:
    around, hints = PARTS[where]
    if name in hints:
        assert http.post(PATH, json={**ASKED, **around({name: ODD})}).status_code == 200
        return
    check_refused(http, PATH, {**ASKED, **around({name: ODD})}, name)


@pytest.mark.parametrize("where", PARTS)
def test_a_field_that_nobody_knows_is_refused_in_every_part(http: httpx.Client, where: str) -> None:
    check_refused(http, PATH, {**ASKED, **PARTS[where][0]({"unheard_of": 1})}, "unheard_of")


@pytest.mark.parametrize("path", [PATH, COUNT_PATH])
def test_a_field_that_nobody_knows_is_refused(http: httpx.Client, path: str) -> None:
    body = ASKED if path == PATH else COUNTED
    check_refused(http, path, {**body, "temprature": 1}, "temprature")


@pytest.mark.parametrize("kind", sorted({*FIELDS["blocks"]} - {"text", "tool_use", "tool_result"}))
def test_every_other_kind_of_block_is_refused_by_name(http: httpx.Client, kind: str) -> None:
    for role in ("user", "assistant"):
        check_refused(http, PATH, {**ASKED, **in_content(role, {"type": kind})}, kind)


@pytest.mark.parametrize("kind", sorted({*FIELDS["result_blocks"]} - {"text"}))
def test_every_other_kind_of_result_is_refused_by_name(http: httpx.Client, kind: str) -> None:
    result = {**RESULT, "content": [{"type": kind}]}
    check_refused(http, PATH, {**ASKED, **in_content("user", result)}, kind)


@pytest.mark.parametrize("kind", sorted({*FIELDS["tools"]} - {"custom"}))
def test_every_tool_of_a_provider_is_refused_by_name(http: httpx.Client, kind: str) -> None:
    check_refused(http, PATH, {**ASKED, "tools": [{"type": kind, "name": "f"}]}, kind)


def test_what_asks_for_nothing_is_accepted(http: httpx.Client) -> None:
    for name, (harmless, _) in MessagesRequest.refused.items():
        for value in (*harmless, None):
            assert http.post(PATH, json={**ASKED, name: value}).status_code == 200, (name, value)


def test_no_field_is_both_honoured_and_refused() -> None:
    kinds = [one for one in vars(schemas).values() if isinstance(one, type) and issubclass(one, StrictFields)]
    assert len(kinds) > 8
    for kind in kinds:
        fields = {field.alias or name for name, field in kind.model_fields.items()}
        assert not fields & kind.refused.keys()
        assert not kind.labels & (kind.refused.keys() | fields)
