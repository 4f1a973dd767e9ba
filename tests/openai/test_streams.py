"""Streams are real: tokens leave while others are sampled, many at once, and a client that leaves frees its room."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from default_engine import in_one_process
from openai_server import MODEL, Server
from waiting import HANG_S, wait_until

from mint.server.openai.generation import PROMPTS_AT_ONCE
from mint.server.service.sampling_requests import SamplingRequests
from mint.server.worker.sampling_batch import SamplingBatch

LONG: dict[str, Any] = {"model": MODEL, "prompt": "One", "temperature": 50.0, "max_tokens": 900}
"""Hot enough that nearly every token is as likely as any other, so that most samples go on to the end."""


class Steps:
    """The engine's steps: how many sequences each was for. The engine stands still before one that may not come yet."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.allowed = math.inf
        self.has_hung = False
        self._changed = threading.Condition()

    def allow(self, count: float) -> None:
        """So many in all."""
        with self._changed:
            self.allowed = count
            self._changed.notify_all()

    def begin(self, rows: int) -> None:
        with self._changed:
            self.has_hung |= not self._changed.wait_for(lambda: len(self.rows) < self.allowed, HANG_S)
            self.rows.append(rows)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    seen = Steps()
    step = SamplingBatch.step

    def counted(self: SamplingBatch) -> Any:
        seen.begin(self.sequences)
        return step(self)

    monkeypatch.setattr(SamplingBatch, "step", counted)
    yield seen
    seen.allow(math.inf)
    assert not seen.has_hung


@in_one_process("the steps of the engine are held")
def test_tokens_leave_while_others_are_still_to_be_sampled(client: openai.OpenAI, steps: Steps) -> None:
    steps.allow(100)
    stream = client.completions.create(stream=True, n=4, seed=1, **{**LONG, "max_tokens": 400})
    for allowed in (200, 300, math.inf):
        for _ in range(100):  # of some 400 that have been sampled
            next(stream)
        steps.allow(allowed)
    assert len(list(stream)) > 200


def leave(server: Server, body: dict[str, Any], once: Callable[[], Any]) -> None:
    """Asks, and goes away."""

    async def ask(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=body, timeout=None) as response:
            async for _line in response.aiter_lines():
                pass

    async def ask_and_leave() -> None:
        headers = {"Authorization": f"Bearer {server.keys['ada']}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as http:
            asking = asyncio.create_task(ask(http))
            await asyncio.to_thread(wait_until, once)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask_and_leave())


@in_one_process("the steps of the engine are held")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_room_at_once(server: Server, steps: Steps, stream: bool) -> None:
    open_before = server.running.service.futures.open_count
    steps.allow(20)
    leave(server, {**LONG, "n": 64, "stream": stream}, lambda: len(steps.rows) == 20)
    wait_until(lambda: server.running.service.futures.open_count == open_before)
    steps.allow(math.inf)
    with server.client() as client:
        client.completions.create(model=MODEL, prompt="Two", max_tokens=1)
    assert max(steps.rows) >= 32
    assert max(steps.rows[22:], default=0) < 32


def test_a_request_of_many_prompts_leaves_the_event_loop_to_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many prompts are sent to the engine, or cancelled, in one turn of the event loop."""
    turns = {"begun": [0], "ended": [0]}
    sample_now = SamplingRequests.sample_now

    def count(what: str) -> None:
        turns[what][-1] += 1
        if turns[what][-1] == 1:
            asyncio.get_running_loop().call_soon(turns[what].append, 0)

    async def counted(self: SamplingRequests, *args: Any, **kwargs: Any) -> Any:
        count("begun")
        try:
            return await sample_now(self, *args, **kwargs)
        finally:
            count("ended")

    monkeypatch.setattr(SamplingRequests, "sample_now", counted)
    hold = threading.Event()
    server.running.service.call_soon(lambda: hold.wait(2 * HANG_S))
    prompts = ["One"] * 400
    try:
        leave(server, {**LONG, "prompt": prompts}, lambda: sum(turns["begun"]) == len(prompts))
        wait_until(lambda: sum(turns["ended"]) == len(prompts))
    finally:
        hold.set()
    assert max(turns["begun"]) <= PROMPTS_AT_ONCE
    assert max(turns["ended"]) <= PROMPTS_AT_ONCE


@in_one_process("the steps of the engine are held")
def test_a_client_that_leaves_the_queue_is_not_sampled_for(server: Server, steps: Steps) -> None:
    hold = threading.Event()
    server.running.service.call_soon(lambda: hold.wait(2 * HANG_S))
    waiting = lambda: server.running.service.pending.samples  # noqa: E731
    try:
        leave(server, {**LONG, "n": 100}, waiting)
        wait_until(lambda: not waiting())
    finally:
        hold.set()
    with server.client() as client:
        client.completions.create(model=MODEL, prompt="Two", max_tokens=2)
    assert max(steps.rows, default=0) < 100


@in_one_process("the steps of the engine are held")
def test_a_long_stream_holds_nobody_up(server: Server, client: openai.OpenAI, steps: Steps) -> None:
    with server.client("bob") as other:
        steps.allow(20)
        long = other.completions.create(stream=True, n=8, seed=3, **{**LONG, "max_tokens": 300})
        next(iter(long))
        wait_until(lambda: len(steps.rows) == 20)
        steps.allow(120)
        client.completions.create(**{**LONG, "max_tokens": 5})  # while the long one stands still, far from its end
        assert server.running.service.sampled_sequences > 0
        steps.allow(math.inf)
        assert len(list(long)) > 100


def test_fifty_streams_at_once_say_what_each_says_alone(server: Server, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "One", "temperature": 8.0, "max_tokens": 40}

    async def one(opened: openai.AsyncOpenAI, seed: int) -> str:
        stream = await opened.completions.create(stream=True, seed=seed, **asked)
        return "".join([event.choices[0].text async for event in stream])

    async def all_of_them() -> list[str]:
        async with server.async_client() as opened:
            return await asyncio.gather(*(one(opened, seed) for seed in range(50)))

    together = asyncio.run(all_of_them())
    assert len(together) == 50
    for seed in range(0, 50, 7):
        assert together[seed] == client.completions.create(seed=seed, **asked).choices[0].text


def test_training_goes_on_beside_a_stream(server: Server, client: openai.OpenAI) -> None:
    with server.mint_client() as service:
        trainer = service.create_lora_training_client(base_model=MODEL, rank=4)
        stream = client.completions.create(stream=True, n=2, **{**LONG, "max_tokens": 200})
        next(iter(stream))
        path = trainer.save_weights_for_sampler("beside").result().path
        assert len(list(stream)) > 50
        assert client.completions.create(model=path, prompt="One", max_tokens=1).choices
