"""How much of the disk an owner can fill who sends as much as they can, and what another owner notices.

    python -m benchmarks.serving.storage_flood [--seconds 60] [--quota-mib 64]

Eve sends passes of 1 MB of JSON that no step follows, and opens and ends sessions with 250 KB of metadata, as fast as
the server takes them; a pass that is refused does not stop her. Bob trains with small steps, first alone, then beside
Eve. The server is `mint serve` on the bundled model; each load is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

import mint
from benchmarks.serving.crowd_clients import API, BASE
from benchmarks.serving.processes import ServerProcess, serving
from mint import types
from mint.server.store.journal import JOURNAL_FILE

SPAWN = multiprocessing.get_context("spawn")
PASS_BYTES = 1_000_000
METADATA_BYTES = 250_000
AT_ONCE = 4
ROW = {
    "model_input": {"chunks": [{"tokens": list(range(1, 9))}]},
    "loss_fn_inputs": {"target_tokens": {"data": list(range(2, 10)), "dtype": "int64"}},
}


def flood(url: str, key: str, counts: Any, is_over: Any) -> None:
    """Eve: models that never step, and sessions with much metadata."""
    lock = threading.Lock()

    def count(name: str) -> None:
        with lock:
            counts[name] = counts.get(name, 0) + 1

    def post(http: httpx.Client, path: str, body: dict[str, Any], size_bytes: int = 0) -> httpx.Response:
        content = json.dumps(body).encode().ljust(size_bytes)  # spaces: large to store, and quick to compute
        answer = http.post(f"{API}/{path}", content=content, headers={"content-type": "application/json"})
        count(f"{path} {answer.status_code}")
        return answer

    def send_passes(number: int) -> None:
        with httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=120) as http:
            session_id = post(http, "create_session", {}).json()["session_id"]
            config = {"session_id": session_id, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 1}}
            model_id = post(http, "create_model", config).json()["model_id"]
            data = {"data": [ROW], "loss_fn": "cross_entropy"}
            seq_id = 1
            while not is_over.is_set():
                body = {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": data}
                if post(http, "forward_backward", body, PASS_BYTES).status_code == 200:
                    seq_id += 1

    def open_sessions() -> None:
        with httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=120) as http:
            while not is_over.is_set():
                opened = post(http, "create_session", {"user_metadata": {"note": "x" * METADATA_BYTES}})
                if opened.status_code == 200:
                    http.post(f"{API}/sessions/{opened.json()['session_id']}/finish", json={})

    threads = [threading.Thread(target=send_passes, args=(number,)) for number in range(AT_ONCE)]
    threads.append(threading.Thread(target=open_sessions))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def train(url: str, key: str, steps: Any, is_over: Any) -> None:
    """Bob: small steps, one after another."""
    row = types.Datum(types.ModelInput.from_ints(range(1, 65)), {"target_tokens": list(range(2, 66))})
    with mint.ServiceClient(base_url=url, api_key=key) as client:
        trainer = client.create_lora_training_client(BASE, rank=8, seed=0)
        while not is_over.is_set():
            passed = trainer.forward_backward([row] * 4, "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result(timeout=300)
            passed.result(timeout=300)
            steps.value += 1


def sizes(server: ServerProcess) -> str:
    """The data directory, the journal and its log."""
    data = server.folder / "data"
    journal, log = (path.stat().st_size / 2**20 for path in (data / JOURNAL_FILE, data / f"{JOURNAL_FILE}-wal"))
    return f"data directory {server.files[1]:.0f} MiB, journal {journal:.0f} MiB, its log {log:.0f} MiB"


def main() -> None:
    """Measures, and prints a line every ten seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quota-mib", type=int, default=64)
    options = parser.parse_args()
    os.environ["MINT_SERVE_OWNER_JOURNAL_MIB"] = str(options.quota_mib)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), ("eve", "bob")) as (server, keys):
        counts, is_over, steps = SPAWN.Manager().dict(), SPAWN.Event(), SPAWN.Value("i", 0)
        bob = SPAWN.Process(target=train, args=(server.url, keys["bob"], steps, is_over))
        bob.start()
        while steps.value < 5:
            time.sleep(0.1)
        before = steps.value
        time.sleep(10.0)
        print(f"bob alone: {(steps.value - before) / 10:.1f} steps/s; {sizes(server)}")
        eve = SPAWN.Process(target=flood, args=(server.url, keys["eve"], counts, is_over))
        eve.start()
        began, before = time.monotonic(), steps.value
        while time.monotonic() - began < options.seconds:
            time.sleep(10.0)
            rate = (steps.value - before) / (time.monotonic() - began)
            print(f"{time.monotonic() - began:4.0f} s: bob {rate:.1f} steps/s; {sizes(server)}", flush=True)
        is_over.set()
        for process in (eve, bob):
            process.join(120)
        print(f"eve's answers: {dict(sorted(counts.items()))}")
        time.sleep(2.0)
        print(f"afterwards: {sizes(server)}")


if __name__ == "__main__":
    main()
