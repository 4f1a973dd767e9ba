"""mint's routing against round robin and the least load on real replicas, with the load of the simulation made small.

    python -m benchmarks.serving.routing_replicas [--replicas 3] [--jobs 300] [--loads 0.5 0.8] [--rounds 2] [--seed 1]

The bundled model's shape at random, and 60 LoRAs of which each replica may hold 12; LoRAs and the system prompts of
each are asked for under a Zipf law. Each policy gets the same jobs at the same times, on replicas that have just
started, and policies take turns. `--loads` are shares of the jobs that the replicas take per second when all come at
once. The wait of a job is the time from its arrival to its first token, as a listener hears it. Below each figure
stands what the simulation (`routing.py`) says of the same jobs, with times of this model. It needs the extra `cluster`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from mint.config import prepare_ray

prepare_ray()  # before anything below imports ray

from benchmarks.serving import routing  # noqa: E402
from benchmarks.serving.routing import Arrival, Policy, policies, simulate  # noqa: E402
from mint.cluster import replicas as cluster_replicas  # noqa: E402
from mint.cluster.replicas import HEARTBEAT_S, Replicas  # noqa: E402
from mint.cluster.routing import Needs, ReplicaState, beginnings  # noqa: E402
from mint.engine.protocol import LoraSpec, SampleJob, SampleResult, StopRule  # noqa: E402
from mint.engine.reductions.division import Peers  # noqa: E402
from mint.engine.torch_engine import TorchEngine  # noqa: E402
from mint.models.random_base import SHAPES, write_random_base  # noqa: E402

LORAS, HELD, PROMPTS_OF_A_LORA = 60, 12, 4
SYSTEM_TOKENS, OWN_TOKENS = 384, 32
VOCABULARY = SHAPES["tiny"].vocabulary
LORA = LoraSpec(32, 7, True, True, False)
LORA_LOAD_S, PROMPT_TOKEN_S, STEP_S, ROWS = 0.02, 3e-4, 0.01, 64
"""Of the simulation: a LoRA that a replica loads, a prompt token, a token of all sequences; and their number."""


@dataclass(frozen=True)
class Job:
    """A request: when it comes (s), and what it asks for."""

    at_s: float
    lora: int
    prompt: np.ndarray
    samples: int
    tokens: int


@dataclass(frozen=True)
class Measured:
    """Shares of jobs whose LoRA the replica held and of prompt tokens that it had cached; waits in s."""

    lora_hits: float
    prompt_hits: float
    waits_s: np.ndarray

    def __str__(self) -> str:
        p50, p99 = np.percentile(self.waits_s, [50, 99]) * 1e3
        hits = f"lora hits {self.lora_hits:.3f}  prompt hits {self.prompt_hits:.3f}"
        return f"{hits}  wait p50 {p50:.0f} ms  p99 {p99:.0f} ms"


def requests(count: int, *, rate: float, seed: int) -> list[Job]:
    """`rate` jobs per second at random times; at 0, all at once."""
    rng = np.random.default_rng(seed)
    loras = routing._zipf(rng, LORAS, routing.LORA_EXPONENT, count)
    heads = routing._zipf(rng, PROMPTS_OF_A_LORA, routing.PROMPT_EXPONENT, count)
    times = np.cumsum(rng.exponential(1 / rate, count)) if rate else np.zeros(count)
    jobs = []
    for place in range(count):
        head = np.random.default_rng([int(loras[place]), int(heads[place])]).integers(1, VOCABULARY, SYSTEM_TOKENS)
        prompt = np.concatenate([head, rng.integers(1, VOCABULARY, OWN_TOKENS)])
        samples, tokens = int(rng.choice([1, 2, 4])), int(rng.integers(8, 32))
        jobs.append(Job(float(times[place]), int(loras[place]), prompt, samples, tokens))
    return jobs


def measure(folder: str, jobs: Sequence[Job], policy: Policy, *, replicas: int) -> tuple[Measured, float]:
    """Runs the jobs on new replicas; also returns how long all took, in s."""
    size = 4 * sum(array.size for array in _weights(folder, 0).values())
    hits = []

    def choose(states: Mapping[int, ReplicaState], needs: Needs) -> int | None:
        if len(states) < replicas:
            return None
        number = policy(states, needs)
        if number is not None:
            hits.append(states[number].has_lora(needs))
        return number

    with patch.object(cluster_replicas, "route", choose):
        members = Replicas(_open, replicas, check_base=lambda _info: None, lora_limit_bytes=HELD * size)
        members.load_base("base", folder)
        for lora in range(LORAS):
            members.add_weights(f"lora-{lora}", "base", LORA, _weights(folder, lora))
        batch = members.open_batch()
        for warm in range(replicas):  # they start, load the base, and record their steps
            prompt = np.full(SYSTEM_TOKENS, 1 + warm)
            batch.add(f"warm-{warm}", SampleJob("base", None, prompt, 4, 8, 1.0, -1, 1.0, 1, StopRule()))
        while batch.keys:
            _require_samples(batch.step())
        hits.clear()
        _listen(members)
        before, waits, began, given = members.sampling_counters(), dict[int, float](), time.perf_counter(), 0
        while given < len(jobs) or batch.keys:
            now_s = time.perf_counter() - began
            while given < len(jobs) and jobs[given].at_s <= now_s:
                listener = partial(_hear, waits, given, began + jobs[given].at_s)
                batch.add(str(given), _asked(jobs[given], given), listener)
                given += 1
            if batch.keys:
                _require_samples(batch.step())
            else:
                time.sleep(0.002)
        took_s = time.perf_counter() - began
        _listen(members)
        after = members.sampling_counters()
        members.close()
    reused, computed = (after[name] - before[name] for name in ("reused", "prefilled"))
    return Measured(float(np.mean(hits)), reused / (reused + computed), np.array(list(waits.values()))), took_s


def _require_samples(results: Mapping[str, SampleResult]) -> None:
    for result in results.values():
        assert result.error is None, result.error


def _listen(members: Replicas) -> None:
    """Hears of what was counted: that comes with each sign of life."""
    until = time.monotonic() + 2 * HEARTBEAT_S
    while time.monotonic() < until:
        members.step(0.1)


def simulated(jobs: Sequence[Job], policy: Policy, *, replicas: int) -> Measured:
    """What the simulation says of the same jobs."""
    size = 1 << 20
    constants: dict[str, Any] = {
        "LORA_BYTES": size, "REPLICA_BYTES": HELD * size, "ROWS": ROWS, "LOAD_S": LORA_LOAD_S,
        "PROMPT_TOKEN_S": PROMPT_TOKEN_S, "STEP_S": STEP_S,
    }  # fmt: skip
    with patch.multiple(routing, **constants):
        arrivals = [
            Arrival(
                job.at_s,
                Needs(job.samples, f"lora-{job.lora}", size, beginnings(f"lora-{job.lora}", "", job.prompt)),
                job.tokens,
            )
            for job in jobs
        ]
        found = simulate(arrivals, policy, replicas=replicas)
    return Measured(found.lora_hits, found.prompt_hits, found.waits_s)


def _asked(job: Job, seed: int) -> SampleJob:
    lora = f"lora-{job.lora}"
    return SampleJob("base", lora, job.prompt, job.samples, job.tokens, 1.0, -1, 1.0, seed, StopRule())


def _open(peers: Peers) -> TorchEngine:
    return TorchEngine(dtype="float32", threads=1, device="cpu", kv_cache_bytes=192 << 20, peers=peers)


_drawn: dict[int, dict[str, np.ndarray]] = {}


def _weights(folder: str, lora: int) -> dict[str, np.ndarray]:
    """Random weights of a LoRA."""
    if not _drawn:
        engine = TorchEngine(dtype="float32", threads=1, device="cpu")
        engine.load_base("base", folder)
        engine.create_model("m", "base", LORA)
        _drawn[0] = dict(engine.read_state("m").weights)
    if lora not in _drawn:
        rng = np.random.default_rng(lora)
        _drawn[lora] = {name: rng.normal(0, 0.01, own.shape).astype(np.float32) for name, own in _drawn[0].items()}
    return _drawn[lora]


def _hear(waits: dict[int, float], place: int, came: float, *_token: object) -> None:
    waits.setdefault(place, time.perf_counter() - came)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints two lines for each load and policy: measured and simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), SHAPES["tiny"], seed=1)
        at_once = requests(given.jobs, rate=0, seed=given.seed)
        _, took_s = measure(folder, at_once, policies()["routing"], replicas=given.replicas)
        print(f"{given.jobs} jobs at once took {took_s:.1f} s", flush=True)
        for load in given.loads:
            for number in range(given.rounds):
                jobs = requests(given.jobs, rate=load * given.jobs / took_s, seed=given.seed + number)
                chosen = policies()
                for name in chosen if number % 2 == 0 else reversed(chosen):
                    found, _ = measure(folder, jobs, chosen[name], replicas=given.replicas)
                    expected = simulated(jobs, policies()[name], replicas=given.replicas)
                    print(f"load {load} seed {given.seed + number}  {name:12} measured   {found}", flush=True)
                    print(f"{'':32}simulated  {expected}", flush=True)


if __name__ == "__main__":
    main()
