"""Streams are real: tokens leave while others are sampled, many at once, and a client that leaves frees its room."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai_server import MODEL, Server

from mint.server.running_samples import RunningSamples

LONG: dict[str, Any] = {"model": MODEL, "prompt": "One", "temperature": 50.0, "max_tokens": 900}
"""Hot enough that nearly every token is as likely as any other, so that most samples go on to the end."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, int]]]:
    """When the engine made a step, and with how many sequences."""
    seen: list[tuple[float, int]] = []
    step = RunningSamples.step

    def counted(self: RunningSamples) -> Any:
        seen.append((time.monotonic(), self.rows))
        return step(self)

    monkeypatch.setattr(RunningSamples, "step", counted)
    yield seen


def test_the_first_token_leaves_long_before_the_last_is_sampled(client: openai.OpenAI) -> None:
    started = time.monotonic()
    stream = client.completions.create(stream=True, n=4, seed=1, **{**LONG, "max_tokens": 400})
    arrivals = [time.monotonic() - started for _ in stream]
    assert len(arrivals) > 500
    assert arrivals[0] < 0.3 * arrivals[-1]
    assert arrivals[len(arrivals) // 2] < 0.8 * arrivals[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_room_within_a_second(
    server: Server, rows: list[tuple[float, int]], stream: bool
) -> None:
    body = {**LONG, "n": 64, "stream": stream}
    headers = {"Authorization": f"Bearer {server.keys['ada']}"}

    async def leave() -> float:
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as http:
            asking = asyncio.create_task(read(http))
            while not rows:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return time.monotonic()

    async def read(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=body, timeout=None) as response:
            async for _line in response.aiter_lines():
                pass

    left_at = asyncio.run(leave())
    with server.client() as client:
        client.completions.create(model=MODEL, prompt="Two", max_tokens=1)
    assert time.monotonic() - left_at < 1.5
    assert max(count for _, count in rows) >= 32
    assert [moment - left_at for moment, count in rows if count >= 32][-1] < 1.0


def test_a_client_that_leaves_the_queue_is_not_sampled_for(server: Server, rows: list[tuple[float, int]]) -> None:
    hold = threading.Event()
    server.running.service.run_soon(lambda: hold.wait(5))
    try:
        with server.client() as client, pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(**{**LONG, "n": 100})
        deadline = time.monotonic() + 2
        while server.running.service.waiting.samples and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(server.running.service.waiting.samples) == []
    finally:
        hold.set()
    with server.client() as client:
        client.completions.create(model=MODEL, prompt="Two", max_tokens=2)
    assert max((count for _, count in rows), default=0) < 100


def test_a_long_stream_holds_nobody_up(server: Server, client: openai.OpenAI) -> None:
    with server.client("bob") as other:
        long = other.completions.create(stream=True, n=8, seed=3, **LONG)
        next(iter(long))
        began = time.monotonic()
        client.completions.create(**{**LONG, "max_tokens": 5})
        short_s = time.monotonic() - began
        for _ in long:
            pass
        assert short_s < 0.3 * (time.monotonic() - began)


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
