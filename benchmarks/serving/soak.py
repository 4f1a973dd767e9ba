"""A server over a long time: random tenants, kills and restarts; memory, descriptors, files and latency must stay flat.

    python -m benchmarks.serving.soak [--minutes 30] [--tenants 6] [--seed 0]

Each tenant is a process that opens a session, trains or samples for a random time with the mint SDK, sometimes vanishes
without a word, and begins again. The server is killed or stopped at random and started again on the same folder and
port; the clients only wait. The figures are printed at minutes 1, 2, 5, 10, 15, 20 and 30. Exit code 1: something
failed, or the memory, the descriptors or the threads grew. What a server takes depends on how long it lives already, so
their highest values in the last third of the time are compared with those in the third before it: each has lives of
every length.

A release wants 30 minutes on a quiet machine. In the first 15 minutes what vanished clients have left still adds up;
then their sessions are suspended as fast as new ones come.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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

GROWTH = 1.25
TAKEN_EVERY_S = 1.0
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["mint.client.service_client", "benchmarks.serving.processes"])
ASKING = threading.Lock()
"""Held while a process is started or asked for its exit code: of two threads that ask at once, one gets 255."""


@dataclass(frozen=True)
class Taken:
    """What a server takes at one time, after so many seconds of the soak."""

    at_s: float
    memory_mib: float
    descriptors: int
    threads: int


def life(url: str, key: str, seed: int, counts: Any, log_file: Path) -> None:
    """One process of a tenant: trains and samples for a while, then closes its client, or ends without a word.

    Whatever it prints, and the stacks of its threads if a signal ends it, go to the file.
    """
    log = log_file.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    faulthandler.enable(log)
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


def tenant(url: str, key: str, seed: int, counts: Any, is_over: threading.Event, logs: Path) -> None:
    """Lives of one tenant, one after another. Prints what a life that failed has left."""
    for number in itertools.count():
        if is_over.is_set():
            return
        log_file = logs / f"life-{seed + number}.log"
        process = FORKED.Process(target=life, args=(url, key, seed + number, counts, log_file))
        with ASKING:
            process.start()
        while (code := exit_code(process)) is None:
            time.sleep(0.1)
        printed = log_file.read_text() if log_file.exists() else "(it did not come to its first line)"
        if code != 0:
            counts[f"failed: exit code {code}", seed + number] = 1
            print(f"life {seed + number} ended with exit code {code}:\n{printed}", flush=True)
        log_file.unlink(missing_ok=True)


def exit_code(process: Any) -> int | None:
    """None while it lives."""
    with ASKING:
        return process.exitcode


def soak(minutes: float, tenants: int, seed: int) -> bool:
    """Whether nothing failed and nothing grew."""
    choose = random.Random(seed)
    owners = [f"owner{number}" for number in range(tenants)]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), owners) as (server, keys):
        counts, is_over = FORKED.Manager().dict(), threading.Event()
        people = [
            threading.Thread(
                target=tenant, args=(server.url, keys[owner], seed + 1_000_000 * number, counts, is_over, Path(folder))
            )
            for number, owner in enumerate(owners)
        ]
        for person in people:
            person.start()
        began, recoveries, taken = time.monotonic(), list[float](), list[Taken]()
        left = [at for at in FIGURES_AT_MIN if at < minutes] + [minutes]
        print(
            "| minute | memory MiB | descriptors | threads | seconds since the start | files | folder MiB | "
            "healthz p50 ms | p99 ms | steps | samples | lives | longest start s |"
        )
        print("|---" * 13 + "|")
        started_at = began
        struck_at = time.monotonic() + choose.uniform(*LIFE_S)
        while left:
            if time.monotonic() >= struck_at:
                (server.kill if choose.random() < 0.7 else server.stop)()
                recoveries.append(server.start())
                started_at = time.monotonic()
                struck_at = started_at + choose.uniform(*LIFE_S)
            taken.append(Taken(time.monotonic() - began, server.memory_mib, server.descriptors, server.threads))
            if taken[-1].at_s >= left[0] * 60:
                figures(left.pop(0), server, taken[-1], time.monotonic() - started_at, counts, recoveries)
            time.sleep(TAKEN_EVERY_S)
        is_over.set()
        for person in people:
            person.join(120)
        found = totals(counts)
        failures = [f"{name} ({count}×)" for name, count in found.items() if name.startswith("failed")]
        print("\n".join(failures) or "nothing failed", f"· {dict(found)}")
        peaks = peaks_by_third(taken)
        grown = [name for name, (_, before, now) in peaks.items() if now > GROWTH * before]
        print(
            "highest values in each third of the time: " + ", ".join(f"{name} {each}" for name, each in peaks.items())
        )
        print(f"grew: {', '.join(grown) or 'nothing'}")
    return not failures and not grown


def peaks_by_third(taken: Sequence[Taken]) -> dict[str, tuple[int, int, int]]:
    """The highest memory, descriptors and threads in each third of the time."""
    whole_s = taken[-1].at_s
    first, second, third = (
        [row for row in taken if number <= 3 * row.at_s / whole_s <= number + 1] for number in range(3)
    )

    def highest(name: str, rows: Sequence[Taken]) -> int:
        return round(max(getattr(row, name) for row in rows))

    return {
        name: (highest(name, first), highest(name, second), highest(name, third))
        for name in ("memory_mib", "descriptors", "threads")
    }


def totals(counts: Any) -> Counter[str]:
    """What all tenants have counted."""
    found: Counter[str] = Counter()
    for (name, _), count in dict(counts).items():
        found[name] += count
    return found


def figures(
    minute: float, server: ServerProcess, now: Taken, lives_s: float, counts: Any, recoveries: Sequence[float]
) -> None:
    """Prints one row; the server has lived for `lives_s` seconds."""
    with Probe(server.url) as probe:
        time.sleep(5.0)
    files, folder_mib = server.files
    found = totals(counts)
    p50, p99 = (percentile(probe.seconds, share) * 1e3 for share in (0.5, 0.99))
    print(
        f"| {minute:g} | {now.memory_mib:.0f} | {now.descriptors} | {now.threads} | {lives_s:.0f} | {files} | "
        f"{folder_mib:.1f} | {p50:.1f} | {p99:.1f} | {found['steps']} | {found['samples']} | {len(recoveries) + 1} | "
        f"{max(recoveries, default=0.0):.1f} |",
        flush=True,
    )


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
