"""What a server under load and locks does to those who wait: `/healthz`, sampling, fairness, memory.

    python -m benchmarks.serving.load [pauses] [crowd] [vanish] [fairness] [--lock-s 40] [--quick]
    python -m benchmarks.serving.load crowd --clients 1000 --calls 10 --rounds 2 --submit-s 60
    python -m benchmarks.serving.load vanish --clients 500

`pauses`: 12 clients train and sample, bodies of 36 MB of JSON arrive one after another, good and hostile ones in turn,
and another process locks the database. `crowd`: 200 clients with 1,000 open futures, among them readers that take a
few bytes at a time. `vanish`: clients that leave in the middle of a stream. `fairness`: A has 2,000 samples open all
the time, B asks for one a second. The server is `mint serve` on the bundled model, and asks for keys; each load is a
process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import mint
from benchmarks.serving.crowd_clients import API, BASE, Crowd, run_crowd
from benchmarks.serving.processes import PROBE_HEAD, Probe, ServerProcess, percentile, serving
from mint import types
from mint.errors import MintError
from mint.server.store.journal import JOURNAL_FILE

BODY_BYTES = 36_000_000
SPAWN = multiprocessing.get_context("spawn")
BUSY, STEPS = 'mint_engine_busy_seconds_total{operation="sample"}', "mint_sampling_steps_total"
SAMPLED = 'mint_tokens_total{kind="sampled"}'
FLOOD_TOKENS, FLOOD_GROUP = 64, 8
CLIENTS_OF_AN_OWNER = 200
"""An owner may have 256 sessions."""
KV_CACHE_MIB = 256
ALONE_EVERY_S = 0.1
ROWS = 512
"""Sequences that decode together."""
PROMPT = types.ModelInput.from_ints([1, 40, 60, 22])


# --- pauses ----------------------------------------------------------------------------------------------------------


def pauses(lock_s: float) -> None:
    """`/healthz` when idle, and under 12 clients, 36 MB bodies and a locked database."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), ("ada", "bob")) as (server, keys):
        with Probe(server.url) as idle:
            time.sleep(5.0)
        before = server.metrics(keys["ada"])
        counts, is_over = SPAWN.Manager().dict(), SPAWN.Event()
        loads = [
            SPAWN.Process(target=twelve_clients, args=(server.url, keys["ada"], counts, is_over)),
            SPAWN.Process(target=large_bodies, args=(server.url, keys["bob"], counts, is_over)),
        ]
        for load in loads:
            load.start()
        while not (counts.get("samples") and counts.get("steps")):
            time.sleep(0.1)
        with Probe(server.url) as busy:
            time.sleep(max(10.0, lock_s / 2))
        at_lock = dict(counts)
        lock = sqlite3.connect(server.folder / "data" / JOURNAL_FILE, isolation_level=None, timeout=30)
        lock.execute("BEGIN EXCLUSIVE")
        with Probe(server.url) as locked, Probe(server.url, f"{API}/get_server_capabilities", keys["ada"]) as keyed:
            time.sleep(lock_s)
        during = {name: counts.get(name, 0) - at_lock.get(name, 0) for name in sorted(counts.keys())}
        ready = server.get("/readyz")
        lock.execute("ROLLBACK")
        lock.close()
        unlocked_at, steps = time.monotonic(), counts["steps"]
        while counts["steps"] < steps + 6 and time.monotonic() - unlocked_at < 120:
            time.sleep(0.05)
        recovered_s = time.monotonic() - unlocked_at
        is_over.set()
        for load in loads:
            load.join(180)
        after = server.metrics(keys["ada"])
        print(PROBE_HEAD)
        print(idle.row("idle"))
        print(busy.row("12 clients, 36 MB bodies", idle))
        print(locked.row(f"the same, database locked for {lock_s:g} s", idle))
        print(keyed.row("a route that asks for a key, meanwhile", idle))
        print(f"while locked: {during}; /readyz: {ready}")
        print(f"after the lock: 6 more steps within {recovered_s:.1f} s; in all: {dict(counts)}")
        pauses_ms = shares("mint_event_loop_pause_seconds", before, after)
        print(
            f"the event loop's own pauses: {pauses_ms}, worst of the last minute "
            f"{after['mint_event_loop_worst_pause_seconds'] * 1e3:.0f} ms"
        )
        print(f"server: {server.memory_mib:.0f} MiB, {server.descriptors} descriptors, {server.threads} threads")


def shares(metric: str, before: dict[str, float], after: dict[str, float], **labels: str) -> str:
    """The shares of a histogram's observations that were at most so long."""

    def counted(le: str) -> float:
        described = ",".join(f'{name}="{value}"' for name, value in {"le": le, **labels}.items())
        name = f"{metric}_bucket{{{described}}}"
        return after[name] - before.get(name, 0.0)

    found = {ms: counted(str(ms / 1000)) / counted("+Inf") for ms in (10, 50, 100, 250, 500)}
    return ", ".join(f"≤ {ms} ms: {share:.2%}" for ms, share in found.items())


def twelve_clients(url: str, key: str, counts: Any, is_over: Any) -> None:
    """Six clients that train with pipelined steps, six that sample, until it is over."""
    lock = threading.Lock()

    def count(name: str) -> None:
        with lock:
            counts[name] = counts.get(name, 0) + 1

    def train(client: mint.ServiceClient) -> None:
        trainer = client.create_lora_training_client(BASE, rank=8, seed=0)
        row = types.Datum(types.ModelInput.from_ints(range(1, 65)), {"target_tokens": list(range(2, 66))})
        while not is_over.is_set():
            passed = trainer.forward_backward([row] * 8, "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
            passed.result(timeout=300)
            stepped.result(timeout=300)
            count("steps")

    def sample(client: mint.ServiceClient) -> None:
        sampler = client.create_sampling_client(base_model=BASE)
        while not is_over.is_set():
            sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=32, stop=[])).result(timeout=300)
            count("samples")

    def run(work: Any) -> None:
        with mint.ServiceClient(base_url=url, api_key=key) as client:
            try:
                work(client)
            except MintError as error:
                count(f"failed: {type(error).__name__}: {error}"[:120])

    threads = [threading.Thread(target=run, args=(work,)) for work in [train, sample] * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def large_bodies(url: str, key: str, counts: Any, is_over: Any) -> None:
    """Sends bodies of 36 MB one after another: a good pass, and one with millions of lists in an unknown field."""
    random = np.random.default_rng(0)
    with httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=300) as http:
        session = http.post(f"{API}/create_session", json={}).json()["session_id"]
        lora = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        http.post(f"{API}/create_model", json=lora)
        ids = random.integers(0, 500, 513).tolist()
        weights = random.normal(size=512).tolist()
        datum = {
            "model_input": {"chunks": [{"tokens": ids[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": ids[1:], "dtype": "int64"},
                "weights": {"data": weights, "dtype": "float32"},
            },
        }
        rows = BODY_BYTES // len(json.dumps(datum))
        content = json.dumps({"data": [datum] * rows, "loss_fn": "no_such_loss"})  # decoded and journaled, never run
        seq_id = 0
        while not is_over.is_set():
            seq_id += 1
            head = f'{{"model_id": "{session}:train:0", "seq_id": {seq_id}'
            good = f'{head}, "forward_backward_input": {content}}}'
            hostile = f'{head}, "x": [{"[],"[:3] * (BODY_BYTES // 3)}[]]}}'
            body = (good if seq_id % 2 else hostile).encode()
            while not is_over.is_set():
                response = http.post(
                    f"{API}/forward_backward", content=body, headers={"content-type": "application/json"}
                )
                name = f"36 MB bodies: {response.status_code}"
                counts[name] = counts.get(name, 0) + 1
                if response.status_code < 429:
                    break
                time.sleep(1.0)


# --- crowd -----------------------------------------------------------------------------------------------------------


def crowd(clients: int, calls: int, rounds: int, submit_s: float, processes: int) -> None:
    """Many clients with many open futures, again and again: every answer comes, and the memory stays.

    A loop of hundreds of clients keeps each of them waiting itself. So the times that they see are reported beside
    those of one more client, which is alone on its thread and sends a request every `ALONE_EVERY_S`. The KV cache is
    bounded by itself; it is small here, so that the memory shows what requests and results take.
    """
    os.environ["MINT_KV_CACHE_MIB"] = str(KV_CACHE_MIB)
    owners = [f"owner{number}" for number in range(1 + clients // CLIENTS_OF_AN_OWNER)]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), owners) as (server, keys):
        one_a_second(server, keys[owners[0]], 3)  # loads the model
        idle_mib = server.memory_mib
        with Probe(server.url) as idle:
            time.sleep(3.0)
        print(PROBE_HEAD)
        print(idle.row("idle"))
        for number in range(rounds):
            seen, everybody = SPAWN.Manager().list(), SPAWN.Barrier(processes)
            loads = [
                SPAWN.Process(target=run_crowd, args=(asked, everybody, seen))
                for asked in (
                    Crowd(server.url, list(keys.values()), range(clients)[first::processes], calls, submit_s)
                    for first in range(processes)
                )
            ]
            before, most_open, began = server.metrics(keys[owners[0]]), 0.0, time.monotonic()
            cpu_before = server.cpu_s
            with Probe(server.url) as busy, Alone(server, keys[owners[0]]) as alone:
                for load in loads:
                    load.start()
                while any(load.is_alive() for load in loads):
                    most_open = max(most_open, sum(at_work(server, keys[owners[0]])))
                    loads[0].join(1.0)
            after = server.metrics(keys[owners[0]])
            print(busy.row(f"{clients} clients, {clients * calls} futures, round {number + 1}", idle))
            if len(seen) < processes:
                raise SystemExit("the clients failed")
            submits = [seconds for part in seen for seconds in part["submit_s"]]
            answers = sum((Counter(part["answers"]) for part in seen), Counter[str]())
            longest = {name: max(part[name] for part in seen) for name in ("longest_call_s", "longest_silence_s")}
            print(
                f"{sum(part['requests'] for part in seen)} requests, {answers.total()} answers {dict(answers)}, "
                f"{sum(part['refused'] for part in seen)} times refused with 429, in {time.monotonic() - began:.1f} s; "
                f"at most {most_open:.0f} unfinished\n"
                f"submit, as the clients of {processes} process(es) see it: {quantiles(submits)}; "
                f"as the one that is alone does: {quantiles(alone.seconds)} ({len(alone.seconds)} requests)\n"
                f"CPU: clients {sum(part['cpu_s'] for part in seen):.0f} s, server {server.cpu_s - cpu_before:.0f} s\n"
                f"longest call {longest['longest_call_s']:.1f} s (a poll is held for 25), "
                f"longest time without an answer {longest['longest_silence_s']:.1f} s\n"
                f"within the server: {shares('mint_request_seconds', before, after, route=f'{API}/asample')}\n"
                f"the event loop's own pauses: {shares('mint_event_loop_pause_seconds', before, after)}\n"
                f"server: {server.memory_mib:.0f} MiB, at most {server.peak_memory_mib:.0f}, {idle_mib:.0f} when idle; "
                f"{server.descriptors} descriptors, {server.threads} threads"
            )


def quantiles(seconds: Sequence[float]) -> str:
    """p50, p99 and the worst of some times."""
    p50, p99 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.99))
    return f"p50 {p50:.0f}, p99 {p99:.0f}, worst {max(seconds, default=float('nan')) * 1e3:.0f} ms"


class Alone:
    """A client on a thread of its own: sends a sample request every `ALONE_EVERY_S`, and keeps the times of sending."""

    def __init__(self, server: ServerProcess, key: str) -> None:
        self.seconds: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server.url, key), daemon=True)

    def __enter__(self) -> Alone:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self, url: str, key: str) -> None:
        with httpx.Client(base_url=f"{url}{API}/", headers={"x-api-key": key}, timeout=300) as http:
            session = http.post("create_session", json={}).json()["session_id"]
            made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
            sampler = http.post("create_sampling_session", json=made).json()["sampling_session_id"]
            params = {"max_tokens": 1, "stop": []}
            body = {
                "sampling_session_id": sampler,
                "prompt": {"chunks": [{"tokens": [1, 40]}]},
                "sampling_params": params,
            }
            for seq_id in itertools.count():
                began = time.perf_counter()
                http.post("asample", json=body | {"seq_id": seq_id}).raise_for_status()
                self.seconds.append(time.perf_counter() - began)
                if self._is_over.wait(ALONE_EVERY_S):
                    return


# --- clients that vanish ---------------------------------------------------------------------------------------------


def vanish(clients: int) -> None:
    """Clients that leave in the middle of a stream: when their places in the batch are free again."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), ("ada",)) as (server, keys):
        started = SPAWN.Value("i", 0)
        load = SPAWN.Process(
            target=vanishing, args=(server.url, keys["ada"], clients, max(1, ROWS // clients), started)
        )
        load.start()
        deadline = time.monotonic() + 60
        while started.value < clients and time.monotonic() < deadline:
            time.sleep(0.02)
        sampled, waiting = at_work(server, keys["ada"])
        load.kill()
        left_at = time.monotonic()
        load.join()
        while (left := sum(at_work(server, keys["ada"]))) and time.monotonic() - left_at < 60:
            time.sleep(0.02)
        print(
            f"{started.value} streams, {sampled:.0f} sequences in the batch and {waiting:.0f} requests waiting, when "
            f"their {clients} clients are killed: {left:.0f} left after {time.monotonic() - left_at:.2f} s (0 in 5 s)"
        )


def at_work(server: ServerProcess, key: str) -> tuple[float, float]:
    """The sequences that are sampled, and the sample requests that wait."""
    now = server.metrics(key)
    return now["mint_sampled_rows"], now['mint_waiting_requests{kind="sample"}']


def vanishing(url: str, key: str, clients: int, samples: int, started: Any) -> None:
    """Opens streams that would take long, until it is killed."""

    async def stream(http: httpx.AsyncClient) -> None:
        # nearly uniform draws, so that few samples come to an end by themselves
        body = {"model": BASE, "prompt": "1", "max_tokens": 1000, "temperature": 100, "n": samples, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            is_first = True
            async for _ in response.aiter_bytes():
                if is_first:
                    started.value += 1
                is_first = False

    async def run() -> None:
        limits = httpx.Limits(max_connections=clients)
        headers = {"x-api-key": key}
        async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=300) as http:
            await asyncio.gather(*(stream(http) for _ in range(clients)))

    asyncio.run(run())


# --- fairness --------------------------------------------------------------------------------------------------------


def fairness(flood: int, asked: int) -> None:
    """The times of B's requests, alone and beside A's flood."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), ("ada", "bob")) as (server, keys):
        alone = one_a_second(server, keys["bob"], asked)
        is_flooding = SPAWN.Event()
        load = SPAWN.Process(target=flooding, args=(server.url, keys["ada"], flood, is_flooding))
        load.start()
        is_flooding.wait()
        before = server.metrics(keys["ada"])
        beside = one_a_second(server, keys["bob"], asked)
        after = server.metrics(keys["ada"])
        load.kill()
        load.join()
        busy_s, steps, sampled = (after[name] - before[name] for name in (BUSY, STEPS, SAMPLED))
        batch_ms = busy_s / steps * FLOOD_TOKENS * 1e3
        p95_alone, p95 = (percentile(seconds, 0.95) * 1e3 for seconds in (alone, beside))
        print(
            f"B alone: p95 {p95_alone:.0f} ms; beside {flood} open samples of A: p95 {p95:.0f} "
            f"ms, worst {max(beside) * 1e3:.0f} ms; {sampled / steps:.0f} sequences in a step, a batch of A takes "
            f"{batch_ms:.0f} ms: {p95 / (2 * p95_alone + batch_ms):.2f} of 2 × alone + one batch"
        )


def one_a_second(server: ServerProcess, key: str, count: int) -> list[float]:
    """The seconds that each of `count` samples takes."""
    seconds = []
    with mint.ServiceClient(base_url=server.url, api_key=key) as client:
        sampler = client.create_sampling_client(base_model=BASE)
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=16, stop=[])).result(timeout=300)
        for _ in range(count):
            began = time.perf_counter()
            sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=16, stop=[])).result(timeout=300)
            seconds.append(time.perf_counter() - began)
            time.sleep(max(0.0, 1.0 - seconds[-1]))
    return seconds


def flooding(url: str, key: str, count: int, is_flooding: Any) -> None:
    """Asks for `count` samples at once, and for another group whenever one has ended, until it is killed."""
    with mint.ServiceClient(base_url=url, api_key=key) as client:
        sampler = client.create_sampling_client(base_model=BASE)
        params = types.SamplingParams(max_tokens=FLOOD_TOKENS, stop=[])

        async def ask_again_and_again() -> None:
            while True:
                await sampler.sample_async(PROMPT, FLOOD_GROUP, params)
                is_flooding.set()

        async def run() -> None:
            await asyncio.gather(*(ask_again_and_again() for _ in range(count // FLOOD_GROUP)))

        asyncio.run(run())


def main() -> None:
    """Runs the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["pauses", "crowd", "vanish", "fairness"], default=[])
    parser.add_argument("--lock-s", type=float, default=40.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--calls", type=int, default=5, help="futures of each client of the crowd")
    parser.add_argument("--rounds", type=int, default=3, help="of the crowd")
    parser.add_argument("--processes", type=int, default=1, help="of the crowd's clients")
    parser.add_argument("--submit-s", type=float, default=5.0, help="how long the crowd takes to send its requests")
    parser.add_argument("--quick", action="store_true", help="a tenth of the crowd and of the flood")
    options = parser.parse_args()
    share = 10 if options.quick else 1
    parts = {
        "pauses": lambda: pauses(options.lock_s),
        "crowd": lambda: crowd(
            options.clients // share, options.calls, options.rounds, options.submit_s, options.processes
        ),
        "vanish": lambda: vanish(options.clients // share),
        "fairness": lambda: fairness(2000 // share, 30),
    }
    for name, part in parts.items():
        if name in (options.parts or parts):
            print(f"\n## {name}\n")
            part()


if __name__ == "__main__":
    main()
