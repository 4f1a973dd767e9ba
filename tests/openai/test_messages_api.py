"""Anthropic's Messages API: the same replies as chat has, as blocks, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai_server import MODEL, Server

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

QUESTION = "What is 31 + 44?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
ABOUT = "Evaluate an arithmetic expression."
CALCULATOR: Any = {"name": "calculator", "description": ABOUT, "input_schema": SCHEMA}
CHAT_CALCULATOR: Any = {
    "type": "function",
    "function": {"name": "calculator", "description": ABOUT, "parameters": SCHEMA},
}
USE: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "calculator", "input": {"expression": "1"}}
ASKED: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 60}


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/messages", json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    events = []
    with http.stream("POST", "/v1/messages", json={**ASKED, "stream": True, **fields}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in response.iter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            if key == "data":
                events.append(json.loads(value))
                assert events[-1]["type"] == name
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream give."""
    message = dict(events[0]["message"])
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[event["index"]]["text"] += event["delta"]["text"]
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
        if event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return {**message, "content": blocks}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


@pytest.mark.parametrize(
    "content", [QUESTION, [{"type": "text", "text": "What is "}, {"type": "text", "text": "31 + 44?"}]]
)
def test_a_reply_is_the_reply_of_chat(client: openai.OpenAI, http: httpx.Client, content: Any) -> None:
    chat = client.chat.completions.create(**ASKED)
    got = ask(http, messages=[{"role": "user", "content": content}])
    assert got["content"] == [{"type": "text", "text": chat.choices[0].message.content, "citations": None}]
    assert (got["type"], got["role"], got["model"], got["stop_reason"]) == ("message", "assistant", MODEL, "end_turn")
    assert got["usage"]["input_tokens"] == chat.usage.prompt_tokens
    assert got["usage"]["output_tokens"] == chat.usage.completion_tokens


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]])
def test_the_systems_text_comes_first(client: openai.OpenAI, http: httpx.Client, system: Any) -> None:
    history: list[Any] = [*CHAT, {"role": "assistant", "content": "75"}, {"role": "user", "content": "And 2 + 2?"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be brief."}, *history], temperature=0, max_tokens=40
    )
    got = ask(http, system=system, messages=history, max_tokens=40)
    assert got["content"][0]["text"] == chat.choices[0].message.content
    assert got["usage"]["input_tokens"] == chat.usage.prompt_tokens


def test_a_tool_is_used_and_its_result_read(client: openai.OpenAI, http: httpx.Client) -> None:
    first = ask(http, tools=[CALCULATOR])
    (call,) = first["content"]
    assert first["stop_reason"] == "tool_use"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "calculator", {"expression": "31 + 44"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "75"}
    told = [*CHAT, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = ask(http, tools=[CALCULATOR], messages=told)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            *CHAT,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": call["id"],
                        "type": "function",
                        "function": {"name": "calculator", "arguments": json.dumps(call["input"])},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": "75"},
        ],
        tools=[CHAT_CALCULATOR],
        temperature=0,
        max_tokens=60,
    )
    assert second["content"][0]["text"] == chat.choices[0].message.content
    assert second["usage"]["input_tokens"] == chat.usage.prompt_tokens


def test_the_model_reads_that_a_result_is_an_error(http: httpx.Client) -> None:
    def count(**fields: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "a", **fields}
        told = [*CHAT, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
        return ask(http, tools=[CALCULATOR], messages=told, max_tokens=1)["usage"]["input_tokens"]

    assert count(content="no", is_error=True) == count(content="Error: no") > count(content="no", is_error=False)


def test_results_and_texts_of_one_message_keep_their_order(http: httpx.Client, client: openai.OpenAI) -> None:
    uses = [{"type": "tool_use", "id": name, "name": "calculator", "input": {}} for name in "ab"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name * 3} for name in "ab"]
    told = [
        *CHAT,
        {"role": "assistant", "content": [{"type": "text", "text": "Two."}, *uses]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    calls = [{"id": name, "type": "function", "function": {"name": "calculator", "arguments": "{}"}} for name in "ab"]
    chat: list[Any] = [
        *CHAT,
        {"role": "assistant", "content": "Two.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": name * 3} for name in "ab"),
        {"role": "user", "content": "Go on."},
    ]
    asked = client.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=8)
    got = ask(http, messages=told, max_tokens=8)
    assert got["content"][0]["text"] == asked.choices[0].message.content
    assert got["usage"]["input_tokens"] == asked.usage.prompt_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "calculator"}])
def test_a_tool_can_be_forced(http: httpx.Client, choice: Any) -> None:
    tools = [CALCULATOR] if choice["type"] == "any" else [{**CALCULATOR, "name": "other"}, CALCULATOR]
    choice = {**choice, "disable_parallel_tool_use": True}
    got = ask(http, messages=[{"role": "user", "content": "Hello"}], tools=tools, tool_choice=choice, max_tokens=200)
    (call,) = got["content"]
    assert (call["type"], call["name"]) == ("tool_use", "calculator")
    assert call["input"].keys() == {"expression"}


def test_no_tool_is_offered_where_none_is_to_be_used(http: httpx.Client) -> None:
    assert without_ids(ask(http, tools=[CALCULATOR], tool_choice={"type": "none"})) == without_ids(ask(http))


def test_a_reply_says_why_it_ended(http: httpx.Client) -> None:
    cut = ask(http, max_tokens=2)
    assert (cut["stop_reason"], cut["stop_sequence"], cut["usage"]["output_tokens"]) == ("max_tokens", None, 2)
    whole = ask(http)["content"][0]["text"]
    stop = whole[3:5]
    stopped = ask(http, stop_sequences=["never said", stop])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == whole[: whole.index(stop)]


def test_a_schema_gives_a_value_that_fits_it(http: httpx.Client) -> None:
    got = ask(http, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=200)
    assert json.loads(got["content"][0]["text"]).keys() == {"expression"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [CALCULATOR]},
        {"tools": [CALCULATOR], "tool_choice": {"type": "any"}, "max_tokens": 300},
        {"max_tokens": 3},
        {"temperature": 8.0, "seed": 6, "top_k": 50},
        {"stop_sequences": ["5"]},
    ],
)
def test_a_streamed_message_is_the_whole_message(http: httpx.Client, options: dict[str, Any]) -> None:
    events = stream(http, **options)
    assert without_ids(joined(events)) == without_ids(ask(http, **options))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[0]["message"]["content"] == []


def test_tokens_are_counted_as_a_reply_counts_them(http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": CHAT, "system": "Be brief.", "tools": [CALCULATOR]}
    counted = http.post("/v1/messages/count_tokens", json=asked).json()
    got = ask(http, system="Be brief.", tools=[CALCULATOR], max_tokens=1)
    assert counted == {"input_tokens": got["usage"]["input_tokens"]}


def test_the_key_may_come_as_anthropics_clients_send_it(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for headers in ({"x-api-key": server.keys["ada"]}, {"authorization": f"Bearer {server.keys['ada']}"}):
            assert http.post("/v1/messages", json=ASKED, headers=headers).status_code == 200
        refusal(http.post("/v1/messages", json=ASKED), 401, "authentication_error")
        refusal(http.post("/v1/messages", json=ASKED, headers={"x-api-key": "no"}), 401, "authentication_error")


def refusal(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    return body["error"]["message"]


def test_a_thread_is_refused_with_the_code_that_lets_a_client_do_without(http: httpx.Client) -> None:
    response = http.post("/v1/messages", json={**ASKED, "thread": {"type": "create"}})
    assert response.status_code == 400
    assert response.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert "no message is stored" in response.json()["error"]["message"]


def test_errors_have_anthropics_shape(http: httpx.Client) -> None:
    unknown = http.post("/v1/messages", json={**ASKED, "model": "nobody/nothing"})
    assert "nobody/nothing" in refusal(unknown, 404, "not_found_error")
    refusal(http.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    refusal(http.post("/v1/messages", json={**ASKED, "max_tokens": 5000}), 400, "invalid_request_error")
    assert "/v1/messages/batches" in refusal(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    assert "POST" in refusal(http.get("/v1/messages"), 405, "invalid_request_error")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "The"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "thinking"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "tool_use"),
        ({"system": [{"type": "image"}]}, "image"),
        ({"system": 3}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CALCULATOR], "tool_choice": {"type": "tool"}}, "name"),
        ({"tools": [CALCULATOR], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "high"}}, "effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, wrong: dict[str, Any], named: str) -> None:
    for streams in (False, True):
        response = http.post("/v1/messages", json={**ASKED, "stream": streams, **wrong})
        assert named in refusal(response, 400, "invalid_request_error")
