"""Replies with many alternatives to tokens take time that grows with their number, and no more than a limit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
from openai_server import MODEL

from mint.server.openai.generation_requests import MAX_ALTERNATIVES
from mint.types.sampling import SampledSequence, SampleResponse, TopkLogprobs

TOKENS = 60


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often arrays become lists, by what they hold."""
    seen: Counter[str] = Counter()
    rows = TopkLogprobs.rows
    monkeypatch.setattr(TopkLogprobs, "rows", lambda self: seen.update(["rows"]) or rows(self))
    for owner, name in (
        (SampledSequence, "tokens"),
        (SampledSequence, "logprobs"),
        (SampleResponse, "prompt_logprobs"),
    ):
        read = getattr(owner, name).fget
        counted = property(lambda self, name=name, read=read: seen.update([name]) or read(self))
        monkeypatch.setattr(owner, name, counted)
    return seen


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": 5, "ignore_eos": True},
        {"prompt_logprobs": 5, "max_tokens": 1},
        {"logprobs": 5, "echo": True, "max_tokens": 1},
    ],
)
def test_what_was_sampled_is_read_once(http: httpx.Client, conversions: Counter[str], body: dict[str, Any]) -> None:
    body = {"model": MODEL, "prompt": [list(range(3, 3 + TOKENS))], "max_tokens": TOKENS, "n": 2, **body}
    http.post("/v1/completions", json=body).raise_for_status()
    assert max(conversions.values()) < 10, conversions


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": [[5] * 900], "prompt_logprobs": 20, "n": 16}, "prompt_logprobs"),
        ("completions", {"prompt": [[5] * 900], "echo": True, "logprobs": 20, "n": 16}, "logprobs"),
        ("completions", {"prompt": ["One"] * 64, "max_tokens": 500, "logprobs": 10}, "logprobs"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "n": 128, "logprobs": True, "top_logprobs": 20},
            "logprobs",
        ),
    ],
)
def test_too_many_are_refused(http: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    response = http.post(f"/v1/{path}", json={"model": MODEL, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field and f"{MAX_ALTERNATIVES} are the most" in error["message"]
