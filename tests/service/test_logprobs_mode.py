"""Which logprobs a sample has whose request does not say: those of the caller's key, or else those of the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service_harness import Harness, make_sampler, open_service

from mint.server.callers import LOCAL_OWNER, Caller
from mint.types.sampling import LogprobsMode


def greedy_logprobs(
    tmp_path: Path, *, server: LogprobsMode, key: LogprobsMode | None = None, request: LogprobsMode | None = None
) -> list[float]:
    """Of a greedy sample, whose processed logprobs are 0 and whose raw ones are not."""
    service = open_service(tmp_path, logprobs_mode=server)
    try:
        harness = Harness(service)
        params = {
            "max_tokens": 3,
            "temperature": 0.0,
            "stop": [],
            **({} if request is None else {"logprobs_mode": request}),
        }
        body = {
            "sampling_session_id": make_sampler(harness),
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [5, 6]}]},
            "sampling_params": params,
        }
        caller = Caller(LOCAL_OWNER, logprobs_mode=key)
        promise = service.sampling.accept(caller, json.dumps(body).encode())
        return harness.wait(promise.request_id)["sequences"][0]["logprobs"]
    finally:
        service.stop()


@pytest.mark.parametrize(
    ("server", "key", "request_says", "processed"),
    [
        ("raw", None, None, False),
        ("processed", None, None, True),
        ("raw", "processed", None, True),
        ("processed", "raw", None, False),
        ("processed", None, "raw", False),
        ("raw", None, "processed", True),
        ("processed", "processed", "raw", False),
    ],
)
def test_the_request_comes_first_then_the_key_then_the_server(
    tmp_path: Path,
    server: LogprobsMode,
    key: LogprobsMode | None,
    request_says: LogprobsMode | None,
    processed: bool,
) -> None:
    logprobs = greedy_logprobs(tmp_path, server=server, key=key, request=request_says)
    assert (logprobs == [0.0, 0.0, 0.0]) is processed, logprobs
