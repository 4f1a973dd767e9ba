"""Whatever is wrong with a request is said in OpenAI's shape, with a status that OpenAI's clients understand."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_server import MODEL, Server, serving

from mint.server.messages_api.schemas import MessagesRequest
from mint.server.openai.routes import NOT_OFFERED
from mint.server.openai.schemas import ChatRequest, CompletionRequest
from mint.server.queue.queue import QueueLimits, RequestQueue
from mint.server.responses_api.schemas import ResponsesRequest

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "One", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "."), ("logit_bias", {"1": 200}), ("presence_penalty", 2.5), ("frequency_penalty", -3.0),
        ("best_of", 3), ("min_p", 1.5),
        ("min_tokens", 5000), ("logit_bias", {"a": 1}), ("allowed_token_ids", []), ("prompt_logprobs", 21),
        ("guided_regex", "(a"), ("structured_outputs", {}),
        ("n", 0), ("n", 129), ("max_tokens", -1), ("max_tokens", "1"), ("max_tokens", 5000), ("temperature", -1),
        ("temperature", "hot"), ("top_p", 0), ("top_p", 2), ("top_k", -2), ("seed", 1.5), ("stop", [""]),
        ("stop", ["a"] * 65), ("stop", 3), ("stop_token_ids", [-1]), ("stop_token_ids", [10**30]),
        ("stop_token_ids", ["a"]), ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("echo", "yes"),
        ("stream", 1), ("stream_options", []), ("prompt", []), ("prompt", ""), ("prompt", [[]]), ("prompt", [[[]]]),
        ("prompt", 3), ("prompt", [-1]), ("prompt", [1024]), ("prompt", [10**30]), ("prompt", ["a", 3]),
        ("prompt", ["a"] * 1025), ("prompt", [1] * 2000), ("model", None), ("model", 3),
    ],
)  # fmt: skip
def test_a_completion_that_cannot_be_is_refused_by_its_field(http: httpx.Client, field: str, value: Any) -> None:
    for stream in (False, True):
        error = refusal(http.post("/v1/completions", json={**COMPLETION, "stream": stream, field: value}))
        echoed = {**COMPLETION, "echo": True, "stream": stream, field: value}
        assert refusal(http.post("/v1/completions", json=echoed)) == error or field == "echo"
        assert error["type"] == "invalid_request_error"
        assert field in error["message"] or (field, value) == ("max_tokens", 5000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []), ("messages", None), ("messages", "Hi"), ("messages", [{"content": "Hi"}]),
        ("messages", [{"role": "king", "content": "Hi"}]), ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("tools", [{"type": "function"}]), ("tools", "all"), ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}), ("functions", [{}]),
        ("modalities", ["audio"]), ("parallel_tool_calls", 1), ("logprobs", 3), ("top_logprobs", 3),
        ("max_tokens", 0), ("max_completion_tokens", 0), ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}), ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"conversations": []}), ("prompt_logprobs", 21),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_is_refused_by_its_field(http: httpx.Client, field: str, value: Any) -> None:
    error = refusal(http.post("/v1/chat/completions", json={**CHAT, field: value}))
    assert field.removesuffix("_kwargs") in error["message"]


def test_what_says_nothing_is_no_reason_to_refuse(client: openai.OpenAI) -> None:
    nulls = {name: None for name in CompletionRequest.model_fields if name not in COMPLETION}
    rest = {
        "suffix": "", "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "user": "me",
        "metadata": {"a": "b"}, "top_k": 0, "stop": [],
    }  # fmt: skip
    assert client.completions.create(**COMPLETION, extra_body={**nulls, **rest}).choices
    nulls = {name: None for name in ChatRequest.model_fields if name not in CHAT}
    rest = {
        "response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True, "store": False,
        "tools": [], "tool_choice": "auto",
    }  # fmt: skip
    assert client.chat.completions.create(**CHAT, extra_body={**nulls, **rest}).choices


@pytest.mark.parametrize("prefix", ["/v1", "/oai/api/v1"])
def test_a_route_that_there_is_not_is_refused_in_openais_shape(http: httpx.Client, prefix: str) -> None:
    error = refusal(http.post(f"{prefix}/unheard_of", json={}), 404)
    assert error["type"] == "invalid_request_error" and "/unheard_of" in error["message"]
    error = refusal(http.get(f"{prefix}/chat/completions"), 405)
    assert "GET" in error["message"] and "POST" in error["message"]


@pytest.mark.parametrize("path", sorted(NOT_OFFERED))
def test_a_route_that_is_not_offered_says_what_to_do_instead(http: httpx.Client, path: str) -> None:
    error = refusal(http.post(f"/v1/{path}", content=b"anything"), 404)
    assert f"/v1/{path}: is not offered" in error["message"].replace(" = ", ": ").replace("path: ", "")
    assert NOT_OFFERED[path] in error["message"]


def test_clients_raise_what_they_raise_for_an_unknown_url(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="continue texts"):
        client.embeddings.create(model=MODEL, input="One")
    with pytest.raises(openai.NotFoundError, match="only text"):
        client.images.generate(model=MODEL, prompt="One")
    with pytest.raises(openai.NotFoundError, match="on your side"):
        client.moderations.create(input="One")


def test_a_route_of_the_training_protocol_that_there_is_not_is_refused_in_its_shape(http: httpx.Client) -> None:
    response = http.post("/api/v1/unheard_of", json={})
    assert response.status_code == 404 and response.json()["code"] == "NotFoundError"


def test_each_kind_of_refusal_has_its_exception(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="nobody/nothing", prompt="One")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="mint://sess-0:train:0/weights/a", messages=CHAT["messages"])
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="One", max_tokens=2000)
    assert error.value.code == "context_length_exceeded"
    for key in ("wrong", "tml-mint-wrong"):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as stranger:
            for call in (stranger.models.list, lambda to=stranger: to.completions.create(**COMPLETION)):
                with pytest.raises(openai.AuthenticationError) as error:
                    call()
                assert error.value.code == "invalid_api_key"


def test_a_full_queue_asks_to_come_again(tmp_path: Path) -> None:
    queue = RequestQueue(QueueLimits(owner_requests=2))
    with serving(tmp_path, queue=queue) as server, httpx.Client(base_url=server.url) as http:
        http.headers["Authorization"] = f"Bearer {server.keys['ada']}"
        held, let_go = threading.Event(), threading.Event()
        server.running.service.call_soon(lambda: (held.set(), let_go.wait(10)))
        assert held.wait(10)
        try:
            response = http.post("/v1/completions", json={**COMPLETION, "prompt": ["One"] * 3})
        finally:
            let_go.set()
        assert refusal(response, 429)["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"
        assert http.post("/v1/completions", json={**COMPLETION, "prompt": ["One"] * 2}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/oai/api/v1/completions", "/v1/responses"]
)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"3", b'"a"', b"{", b"{}", b"\xff\xfe", b'{"model": "\xff"}', b"{" * 100_000,
        b'{"a": ' * 100_000, b'{"model": "mint/tiny", "prompt": "\\ud800"}', b'{"model": "a\\u0000b", "prompt": "a"}',
        b'{"model": "mint/tiny", "prompt": "a", "temperature": NaN}', b'{"model": "mint/tiny", "messages": [[]]}',
        b'{"model": "mint/tiny", "prompt": "a", "temperature": 1e999}', b'{"model": "../..", "prompt": "a"}',
    ],
)  # fmt: skip
def test_a_malformed_body_is_refused_in_openais_shape(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500
    refusal(response, response.status_code)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_value_of_any_field_breaks_the_server(http: httpx.Client, data: st.DataObject) -> None:
    kind, path, base = data.draw(
        st.sampled_from([
            (CompletionRequest, "/v1/completions", COMPLETION), (ChatRequest, "/v1/chat/completions", CHAT),
            (ResponsesRequest, "/v1/responses", RESPONSE), (MessagesRequest, "/v1/messages", CHAT),
        ])
    )  # fmt: skip
    names = data.draw(st.lists(st.sampled_from(sorted(kind.model_fields)), max_size=2))
    body = json.dumps({**base, **{name: data.draw(JSON) for name in names}})
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (body, response.text)
        if kind is not MessagesRequest:  # which has another shape
            refusal(response, response.status_code)
