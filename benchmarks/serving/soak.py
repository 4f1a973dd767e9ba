"""A server over a long time: random tenants, kills and restarts; memory, descriptors, files and latency must stay flat.

    python -m benchmarks.serving.soak [--minutes 30] [--tenants 6] [--seed 0]

Each tenant is a process that opens a session, trains or samples for a random time with the mint SDK, sometimes vanishes
without a word, and begins again. The server is killed or stopped at random and started again on the same folder and
port; the clients only wait. The figures are printed at minutes 1, 2, 5, 10, 15, 20 and 30. Exit code 1: something
failed, or the memory, the descriptors or the threads grew by more than half from the middle row to the last.

A release wants 30 minutes on a quiet machine. In the first 15 minutes what vanished clients have left still adds up;
then their sessions are suspended as fast as new ones come.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import mint
from benchmarks.serving.processes import Probe, ServerProcess, percentile, serving
from mint import types
from mint.errors import MintError

BASE = "mint/tiny"
FIGURES_AT_MIN = (1, 2, 5, 10, 15, 20, 30, 60, 120)
LIFE_S = (20.0, 60.0)
"""Between these, the server lives until it is killed or stopped."""

GROWTH = 1.5
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["mint.client.service_client", "benchmarks.serving.processes"])


def life(url: str, key: str, seed: int, counts: Any) -> None:
    """One process of a tenant: trains and samples for a while, then closes its client, or ends without a word."""
    choose = random.Random(seed)
    row = types.Datum(types.ModelInput.from_ints(range(1, 33)), {"target_tokens": list(range(2, 34))})
    params = types.SamplingParams(max_tokens=16, stop=[])
    done: Counter[str] = Counter()
    until = time.monotonic() + choose.uniform(5, 30)
    client = mint.ServiceClient(base_url=url, api_key=key)
    try:
        trainer = client.create_lora_training_client(BASE, rank=8, seed=seed)
        while time.monotonic() < until:
            passed = trainer.forward_backward([row] * 4, "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
            passed.result(timeout=300)
            stepped.result(timeout=300)
            done["steps"] += 1
            if choose.random() < 0.2:
                sampler = trainer.save_weights_and_get_sampling_client()
                found = [sampler.sample(types.ModelInput.from_ints([1, 40]), 2, params) for _ in range(4)]
                for future in found:
                    future.result(timeout=300)
                done["samples"] += len(found)
    except MintError as error:
        done[f"failed: {type(error).__name__}: {error}"[:200]] += 1
    says_goodbye = choose.random() < 0.7
    done["closed" if says_goodbye else "vanished"] += 1
    for name, count in done.items():
        counts[name, seed] = count
    if says_goodbye:
        client.close()
    else:
        os._exit(0)


def tenant(url: str, key: str, seed: int, counts: Any, is_over: threading.Event) -> None:
    """Lives of one tenant, one after another."""
    for number in itertools.count():
        if is_over.is_set():
            return
        process = FORKED.Process(target=life, args=(url, key, seed + number, counts))
        process.start()
        process.join()
        if process.exitcode != 0:
            counts[f"failed: exit code {process.exitcode}", seed + number] = 1


def soak(minutes: float, tenants: int, seed: int) -> bool:
    """Whether nothing failed and nothing grew."""
    choose = random.Random(seed)
    owners = [f"owner{number}" for number in range(tenants)]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), owners) as (server, keys):
        counts, is_over = FORKED.Manager().dict(), threading.Event()
        people = [
            threading.Thread(target=tenant, args=(server.url, keys[owner], seed + 1_000_000 * number, counts, is_over))
            for number, owner in enumerate(owners)
        ]
        for person in people:
            person.start()
        began, recoveries, rows = time.monotonic(), [], []
        left = [at for at in FIGURES_AT_MIN if at < minutes] + [minutes]
        print(
            "| minute | memory MiB | descriptors | threads | files | folder MiB | healthz p50 ms | p99 ms | steps | "
            "samples | lives | longest start s |"
        )
        print("|---" * 12 + "|")
        struck_at = time.monotonic() + choose.uniform(*LIFE_S)
        while left:
            if time.monotonic() >= struck_at:
                (server.kill if choose.random() < 0.7 else server.stop)()
                recoveries.append(server.start())
                struck_at = time.monotonic() + choose.uniform(*LIFE_S)
            if time.monotonic() - began >= left[0] * 60:
                rows.append(figures(left.pop(0), server, counts, recoveries))
            time.sleep(0.2)
        is_over.set()
        for person in people:
            person.join(120)
        found = totals(counts)
        failures = [f"{name} ({count}×)" for name, count in found.items() if name.startswith("failed")]
        print("\n".join(failures) or "nothing failed", f"· {dict(found)}")
        names = ("memory", "descriptors", "threads")
        middle = rows[(len(rows) - 1) // 2]
        grown = [name for name, then, now in zip(names, middle, rows[-1], strict=True) if now > GROWTH * then]
        print(f"grew: {', '.join(grown) or 'nothing'}")
    return not failures and not grown


def totals(counts: Any) -> Counter[str]:
    """What all tenants have counted."""
    found: Counter[str] = Counter()
    for (name, _), count in dict(counts).items():
        found[name] += count
    return found


def figures(minute: float, server: ServerProcess, counts: Any, recoveries: list[float]) -> tuple[float, int, int]:
    """Prints one row; returns the memory, the descriptors and the threads."""
    with Probe(server.url) as probe:
        time.sleep(5.0)
    files, folder_mib = server.files
    found = totals(counts)
    now = (server.memory_mib, server.descriptors, server.threads)
    p50, p99 = (percentile(probe.seconds, share) * 1e3 for share in (0.5, 0.99))
    print(
        f"| {minute:g} | {now[0]:.0f} | {now[1]} | {now[2]} | {files} | {folder_mib:.1f} | {p50:.1f} | {p99:.1f} | "
        f"{found['steps']} | {found['samples']} | {len(recoveries) + 1} | "
        f"{max(recoveries, default=0.0):.1f} |",
        flush=True,
    )
    return now


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tenants", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(0 if soak(options.minutes, options.tenants, options.seed) else 1)


if __name__ == "__main__":
    main()
