"""An error in the middle of a stream is told in the stream, in the form of its protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from default_engine import in_one_process
from openai_server import MODEL

from mint.engine.sampling.sampler import Sampler

pytestmark = in_one_process("an error is planted")

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me all."}]
LONG: dict[str, Any] = {"model": MODEL, "temperature": 50.0, "seed": 3, "stream": True}
STEPS = 20


@pytest.fixture(autouse=True)
def engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine breaks after some tokens."""
    step = Sampler.step
    steps = 0

    def failing(self: Sampler) -> Any:
        nonlocal steps
        steps += 1
        if steps > STEPS:
            raise RuntimeError("the engine broke")
        return step(self)

    monkeypatch.setattr(Sampler, "step", failing)
    yield
    assert steps > STEPS


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names and the data of the events."""
    events, name = [], ""
    with http.stream("POST", path, json={**LONG, **body}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            if key == "data":
                events.append((name, json.loads(value) if value.startswith("{") else value))
    return events


def test_a_stream_of_chat_ends_with_the_error(http: httpx.Client) -> None:
    events = stream(http, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 500})
    assert len(events) > 2
    assert "the engine broke" in events[-2][1]["error"]["message"]
    assert events[-1][1] == "[DONE]"


def test_a_streamed_response_fails(http: httpx.Client) -> None:
    events = stream(http, "/v1/responses", {"input": "Tell me all.", "max_output_tokens": 500})
    assert len(events) > 2
    name, last = events[-1]
    assert name == last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "the engine broke" in last["response"]["error"]["message"]


def test_a_streamed_message_ends_with_the_error(http: httpx.Client) -> None:
    events = stream(http, "/v1/messages", {"messages": MESSAGES, "max_tokens": 500})
    assert events[0][0] == "message_start"
    name, last = events[-1]
    assert name == last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert "the engine broke" in last["error"]["message"]
