"""`/tokenize` and `/detokenize`: the tokens that completions and chats have, and their text."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai_server import MODEL


def tokens(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/tokenize", json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_are_those_of_a_completion_and_give_the_text_back(http: httpx.Client, client: openai.OpenAI) -> None:
    text = "What is 3 + 4? é漢🙂"
    found = tokens(http, prompt=text, return_token_strs=True)
    extra = {"return_token_ids": True}
    own: Any = client.completions.create(model=MODEL, prompt=text, max_tokens=1, extra_body=extra)
    assert found["tokens"] == own.choices[0].prompt_token_ids and found["max_model_len"] > 0
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert http.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]}).json() == {"prompt": text}


def test_tokens_of_messages_are_those_of_a_chat(http: httpx.Client, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for fields in ({}, {"tools": tools}):
        extra = {"return_token_ids": True}
        own: Any = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1, extra_body=extra, **fields
        )
        found = tokens(http, messages=messages, **fields)
        assert found["tokens"] == own.prompt_token_ids and found["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"b": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "unheard_of": 1}, "unheard_of"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http: httpx.Client, path: str, fields: dict[str, Any], named: str) -> None:
    answer = http.post(path, json={"model": MODEL, **fields})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and named in message and "= None" not in message


def test_a_model_that_there_is_not_is_not_found(http: httpx.Client) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert http.post(path, json={"model": "nothing", **fields}).status_code == 404
