"""No value at any place of a request of the Responses or the Messages API breaks the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_server import MODEL

Path = tuple[str | int, ...]

RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ],
    "max_output_tokens": 2,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
}
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
}
ODD: list[Any] = [
    None, True, 0, -1, 1.5, float("inf"), 2**70, "", "a", "\ud800", [], {}, [None], [[]], ["a"], [{}], {"a": 1},
    {"type": None}, {"type": "text"}, "function", "required", "json_schema",
]  # fmt: skip


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from places(inner, (*path, key))


def changed(value: Any, path: Path, odd: Any) -> Any:
    """The same with another value at one place."""
    if not path:
        return odd
    key = path[0]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], path[1:], odd)  # ty: ignore[invalid-assignment]
    return copy


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_value_at_any_place_breaks_the_server(
    http: httpx.Client, path: str, body: dict[str, Any], data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from(list(places(body))))
    sent = json.dumps(changed(body, place, data.draw(st.sampled_from(ODD))))
    response = http.post(path, content=sent, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (sent, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
