"""What is still being done for a key ends soon after the key is revoked: streams, waits and long polls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from default_engine import in_one_process
from openai_server import MODEL, Server
from waiting import HANG_S, wait_until

from mint.server.store.keys import ApiKeys
from mint.server.worker.sampling_batch import SamplingBatch

pytestmark = in_one_process("the engine is slow")

TOKENS = 900
LONG: dict[str, Any] = {"model": MODEL, "prompt": "One", "max_tokens": TOKENS, "ignore_eos": True}
STEP_S = 0.05
"""A reply of so many steps takes much longer than it takes to notice that a key was revoked."""

API = "/api/v1"


@pytest.fixture(autouse=True)
def slow_engine(server: Server) -> Iterator[None]:
    """Each step takes `STEP_S` until the test is over. What the test asked for is then sampled to its end."""
    open_before = open_count(server)
    step = SamplingBatch.step

    def slow(self: SamplingBatch) -> Any:
        time.sleep(STEP_S)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingBatch, "step", slow)
        yield
    wait_until(lambda: open_count(server) == open_before)


@contextmanager
def revocable(server: Server) -> Iterator[tuple[httpx.Client, Callable[[], object]]]:
    """A client with a new key, and what revokes that key."""
    book: ApiKeys = server.running.service.api_keys()
    key, row = book.create("ada")
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=HANG_S) as http:
        yield http, lambda: book.revoke(row.key_id)


def open_count(server: Server) -> int:
    return server.running.service.futures.open_count


def new_sampler(http: httpx.Client) -> str:
    session = http.post(f"{API}/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    return http.post(f"{API}/create_sampling_session", json=body).json()["sampling_session_id"]


def sample_body(sampler: str) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": TOKENS, "ignore_eos": True},
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "n": 2}),
        ("/v1/responses", {"model": MODEL, "input": "One", "max_output_tokens": TOKENS, "ignore_eos": True}),
    ],
)
def test_a_stream_ends_with_an_error_and_frees_its_room(server: Server, path: str, body: dict[str, Any]) -> None:
    open_before = open_count(server)
    with (
        revocable(server) as (http, revoke),
        http.stream("POST", path, json={**body, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        for _ in range(4):
            next(lines)
        revoke()
        rest = list(lines)
    assert "the API key was revoked" in "".join(rest[-8:])
    assert len(rest) < TOKENS
    wait_until(lambda: open_count(server) == open_before)


def wait_for_reply(http: httpx.Client) -> httpx.Response:
    return http.post("/v1/completions", json=LONG)


def wait_for_sample(http: httpx.Client) -> httpx.Response:
    return http.post(f"{API}/asample", json=sample_body(new_sampler(http)), headers={"prefer": "wait"})


def poll_for_sample(http: httpx.Client) -> httpx.Response:
    request_id = http.post(f"{API}/asample", json=sample_body(new_sampler(http))).json()["request_id"]
    return http.post(f"{API}/retrieve_future", json={"request_id": request_id})


def poll_for_any_sample(http: httpx.Client) -> httpx.Response:
    sampler = new_sampler(http)
    http.post(f"{API}/asample", json=sample_body(sampler))
    return http.post(f"{API}/retrieve_futures", json={"target": {"sampling_session_id": sampler}})


@pytest.mark.parametrize("wait", [wait_for_reply, wait_for_sample, poll_for_sample, poll_for_any_sample])
def test_a_wait_ends_with_401(server: Server, wait: Callable[[httpx.Client], httpx.Response]) -> None:
    futures = server.running.service.futures
    with revocable(server) as (http, revoke), ThreadPoolExecutor(1) as pool:
        response = pool.submit(wait, http)
        wait_until(lambda: futures.waiter_count or response.done())
        revoke()
        assert response.result().status_code == 401, response.result().text


def test_keys_that_are_not_revoked_are_left_alone(server: Server) -> None:
    with revocable(server) as (http, revoke), revocable(server) as (other, _), ThreadPoolExecutor(1) as pool:
        body = {**LONG, "max_tokens": 60}
        response = pool.submit(other.post, "/v1/completions", json=body)
        stream = {**LONG, "stream": True}
        with http.stream("POST", "/v1/completions", json=stream) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            revoke()
            assert "revoked" in "".join(lines)
        assert response.result().status_code == 200
