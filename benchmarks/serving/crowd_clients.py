"""A crowd of clients in a few processes: each opens its futures over its own connection, then fetches all answers.

Nobody fetches before all futures are open. A tenth of the clients reads 16 bytes at a time. A client that is refused
with 429 waits as long as the response says, and sends the request again.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

API = "/api/v1"
BASE = "mint/tiny"
SLOW_ONES = 10
"""Every so many clients, one reads slowly."""


@dataclass(frozen=True)
class Crowd:
    """Who asks for what in one process: the clients of these numbers.

    Clients take turns with the keys, and send their requests over `submit_s` seconds.
    """

    url: str
    keys: Sequence[str]
    clients: range
    calls: int
    submit_s: float
    max_tokens: int = 64


@dataclass
class Seen:
    """What the clients saw."""

    requests: int = 0
    refused: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    submit_s: list[float] = field(default_factory=list)
    longest_call_s: float = 0.0
    longest_silence_s: float = 0.0
    last_answer_at: float = 0.0
    cpu_s: float = 0.0

    def note_answer(self, status: str) -> None:
        """Counts an answer, and the time since the last one."""
        now = time.perf_counter()
        self.answers[status] += 1
        self.longest_silence_s = max(self.longest_silence_s, now - self.last_answer_at)
        self.last_answer_at = now


def run_crowd(crowd: Crowd, everybody: Any, found: Any) -> None:
    """Runs the clients of a process, and appends what they saw to `found`; `everybody` is a barrier of processes."""
    seen = Seen()

    async def run() -> None:
        own, all_are_open = asyncio.Barrier(len(crowd.clients)), asyncio.Event()

        async def wait_for_all() -> None:
            if await own.wait() == 0:
                await asyncio.to_thread(everybody.wait)
                all_are_open.set()
            await all_are_open.wait()

        await asyncio.gather(*(_client(crowd, number, seen, wait_for_all) for number in crowd.clients))

    asyncio.run(run())
    seen.cpu_s = time.process_time()
    found.append(vars(seen) | {"answers": dict(seen.answers)})


async def _client(crowd: Crowd, number: int, seen: Seen, wait_for_all: Callable[[], Awaitable[None]]) -> None:
    pauses = random.Random(number)
    key = crowd.keys[number % len(crowd.keys)]
    # without `verify` no certificates are loaded: nothing here is encrypted
    async with httpx.AsyncClient(base_url=crowd.url, headers={"x-api-key": key}, timeout=120, verify=False) as http:
        await asyncio.sleep(pauses.uniform(0, crowd.submit_s / 4))
        session = (await _post(http, seen, "create_session", {})).json()["session_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = (await _post(http, seen, "create_sampling_session", made)).json()["sampling_session_id"]
        names = []
        for seq_id in range(crowd.calls):
            await asyncio.sleep(pauses.uniform(0, 1.5 * crowd.submit_s / crowd.calls))
            body = {
                "sampling_session_id": sampler,
                "seq_id": seq_id,
                "prompt": {"chunks": [{"tokens": [1 + number % 400, 40]}]},
                "sampling_params": {"max_tokens": crowd.max_tokens, "stop": []},
            }
            names.append((await _post(http, seen, "asample", body, is_timed=True)).json()["request_id"])
            seen.requests += 1
        await wait_for_all()
        seen.last_answer_at = seen.last_answer_at or time.perf_counter()
        for name in names:
            if number % SLOW_ONES:
                while (answer := await _post(http, seen, "retrieve_future", {"request_id": name})).status_code == 408:
                    pass
                seen.note_answer(str(answer.status_code))
            else:
                seen.note_answer(await _read_slowly(crowd.url, key, name))
        await _post(http, seen, f"sessions/{session}/finish", {})


async def _post(http: httpx.AsyncClient, seen: Seen, path: str, body: Any, *, is_timed: bool = False) -> httpx.Response:
    while True:
        began = time.perf_counter()
        response = await http.post(f"{API}/{path}", json=body)
        seconds = time.perf_counter() - began
        seen.longest_call_s = max(seen.longest_call_s, seconds)
        if is_timed:
            seen.submit_s.append(seconds)
        if response.status_code != 429:
            return response
        seen.refused += 1
        await asyncio.sleep(float(response.headers["retry-after"]))


async def _read_slowly(url: str, key: str, name: str) -> str:
    """The status of an answer that is read 16 bytes at a time."""
    address = httpx.URL(url)
    body = json.dumps({"request_id": name}).encode()
    while True:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=64)
        head = f"POST {API}/retrieve_future HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\nconnection: close\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        read = b""
        while part := await reader.read(16):
            read += part
            await asyncio.sleep(0.02)
        writer.close()
        status = read.split(b" ", 2)[1].decode() if read else "nothing"
        if status != "408":
            return f"{status}, slowly"
