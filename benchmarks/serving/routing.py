"""How jobs of 1,000 loras spread over replicas: mint's routing against round robin and the least load, simulated.

    python -m benchmarks.serving.routing [--jobs 20000] [--replicas 8] [--load 0.7] [--seed 1]

The loras are asked for under a Zipf law, and so are the system prompts of each. A replica loads a lora that it lacks,
computes the part of a prompt that it has not cached, and decodes up to 64 sequences at a time. The times of these are
fixed numbers, so a run gives the same figures on every machine. The wait of a job is the time from its arrival to its
first token.
"""

from __future__ import annotations

import argparse
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mint.cluster.routing import BLOCK, Needs, ReplicaState, beginnings, route

LORAS, PROMPTS_OF_A_LORA = 1000, 4
LORA_EXPONENT, PROMPT_EXPONENT = 1.1, 1.0
SYSTEM_TOKENS, OWN_TOKENS = 512, 64
LORA_BYTES, REPLICA_BYTES = 32 << 20, 2 << 30
CACHED_BLOCKS = 128 * (SYSTEM_TOKENS + OWN_TOKENS) // BLOCK
ROWS = 64
LOAD_S, PROMPT_TOKEN_S, STEP_S = 0.05, 1e-4, 0.02
"""A lora that is read from the memory of the host, a prompt token, and a token of all sequences together."""

Policy = Callable[[Mapping[int, ReplicaState], Needs], int | None]


@dataclass(frozen=True)
class Arrival:
    """A job, when it comes (s), and how many tokens each of its samples has."""

    at_s: float
    needs: Needs
    tokens: int


@dataclass(frozen=True)
class Outcome:
    """Shares of jobs whose lora was there and of prompt tokens that were cached, and the waits of jobs in s."""

    lora_hits: float
    prompt_hits: float
    waits_s: np.ndarray

    def wait_s(self, percentile: float) -> float:
        return float(np.percentile(self.waits_s, percentile))


@dataclass
class Replica:
    """What the simulated replica really has; `free_at_s` is when it can load and compute the next."""

    loras: OrderedDict[str, None] = field(default_factory=OrderedDict)
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: deque[Arrival] = field(default_factory=deque)
    rows: int = 0
    free_at_s: float = 0.0

    def begin(self, job: Arrival, now_s: float) -> tuple[bool, int, float]:
        """Starts a job; returns whether its lora was there, how many blocks were, and when its first token is."""
        needs = job.needs
        assert needs.lora is not None
        has_lora = needs.lora in self.loras
        known = 0
        while known < len(needs.beginnings) and needs.beginnings[known] in self.blocks:
            known += 1
        _use(self.loras, [needs.lora], REPLICA_BYTES // LORA_BYTES)
        _use(self.blocks, needs.beginnings[::-1], CACHED_BLOCKS)
        unknown = (len(needs.beginnings) - known) * BLOCK
        work_s = (0 if has_lora else LOAD_S) + unknown * PROMPT_TOKEN_S
        self.rows += needs.sequences
        self.free_at_s = max(self.free_at_s, now_s) + work_s
        return has_lora, known, self.free_at_s


def arrivals(count: int, *, replicas: int, load: float, seed: int) -> list[Arrival]:
    """Jobs at random times; `load` is the share of all rows that would be busy if loading and prompts took no time."""
    rng = np.random.default_rng(seed)
    loras = _zipf(rng, LORAS, LORA_EXPONENT, count)
    prompts = _zipf(rng, PROMPTS_OF_A_LORA, PROMPT_EXPONENT, count)
    samples = rng.choice([1, 4, 8], count)
    tokens = rng.integers(16, 128, count)
    row_s = float(np.mean(samples * tokens)) * STEP_S
    times = np.cumsum(rng.exponential(row_s / (load * replicas * ROWS), count))
    jobs = []
    for place in range(count):
        lora, head = int(loras[place]), 1 + int(prompts[place])
        prompt = np.concatenate([np.full(SYSTEM_TOKENS, head), rng.integers(100, 1000, OWN_TOKENS)])
        name = f"lora-{lora}"
        needs = Needs(int(samples[place]), name, LORA_BYTES, beginnings(name, "", prompt))
        jobs.append(Arrival(float(times[place]), needs, int(tokens[place])))
    return jobs


def simulate(jobs: Sequence[Arrival], policy: Policy, *, replicas: int) -> Outcome:
    """Runs all jobs; those that find no replica wait for the next end of one."""
    states = {number: ReplicaState(REPLICA_BYTES, known_blocks=CACHED_BLOCKS) for number in range(replicas)}
    real = {number: Replica() for number in range(replicas)}
    ends: list[tuple[float, int, int]] = []  # time, replica, place of the job
    unrouted: deque[Arrival] = deque()
    places = {id(job): place for place, job in enumerate(jobs)}
    lora_hits, known_blocks, waits_s = 0, 0, []

    def advance(number: int, now_s: float) -> None:
        nonlocal lora_hits, known_blocks
        own = real[number]
        while own.waiting and own.rows + own.waiting[0].needs.sequences <= ROWS:
            job = own.waiting.popleft()
            has_lora, known, first_s = own.begin(job, now_s)
            lora_hits += has_lora
            known_blocks += known
            waits_s.append(first_s - job.at_s)
            heapq.heappush(ends, (first_s + job.tokens * STEP_S, number, places[id(job)]))

    def give(job: Arrival, now_s: float) -> None:
        number = policy(states, job.needs)
        if number is None:
            unrouted.append(job)
            return
        states[number].add(job.needs)
        real[number].waiting.append(job)
        advance(number, now_s)

    def end_until(time_s: float) -> None:
        while ends and ends[0][0] <= time_s:
            now_s, number, place = heapq.heappop(ends)
            real[number].rows -= jobs[place].needs.sequences
            states[number].end(jobs[place].needs)
            advance(number, now_s)
            again = list(unrouted)
            unrouted.clear()
            for job in again:
                give(job, now_s)

    for job in jobs:
        end_until(job.at_s)
        give(job, job.at_s)
    end_until(float("inf"))
    blocks = sum(len(job.needs.beginnings) for job in jobs)
    return Outcome(lora_hits / len(jobs), known_blocks / blocks, np.array(waits_s))


def policies() -> dict[str, Policy]:
    """The three that are compared."""
    turn = iter(range(1 << 60))

    def round_robin(replicas: Mapping[int, ReplicaState], _needs: Needs) -> int:
        return sorted(replicas)[next(turn) % len(replicas)]

    def least_load(replicas: Mapping[int, ReplicaState], _needs: Needs) -> int:
        return min(replicas, key=lambda number: (replicas[number].sequences, number))

    return {"routing": route, "least load": least_load, "round robin": round_robin}


def _use(known: OrderedDict[Any, None], keys: Sequence[Any], limit: int) -> None:
    for key in keys:
        known[key] = None
        known.move_to_end(key)
    while len(known) > limit:
        known.popitem(last=False)


def _zipf(rng: np.random.Generator, size: int, exponent: float, count: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, size + 1) ** exponent
    return rng.choice(size, count, p=weights / weights.sum())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    jobs = arrivals(given.jobs, replicas=given.replicas, load=given.load, seed=given.seed)
    for name, policy in policies().items():
        found = simulate(jobs, policy, replicas=given.replicas)
        print(
            f"{name:12} lora hits {found.lora_hits:.3f}  prompt hits {found.prompt_hits:.3f}  "
            f"wait p50 {found.wait_s(50) * 1e3:.0f} ms  p99 {found.wait_s(99) * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
