"""What it costs to sample on a replica: one replica against the same samples in this process.

    python -m benchmarks.serving.replica [--shape tiny] [--dtype float32] [--turns 9] [--prompts 8] [--new 128]
                                         [--streams]

A turn draws 8 samples of each prompt of 48 tokens from a LoRA, in one batch on one thread. Both sides take turns, and
every second round goes in the opposite order. The figures are CPU times of this process and of the replica, and wall
times: the median of the ratios of a round, with the smallest and the largest. With `--streams` each request has a
listener. It needs the extra `cluster`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.exactness.ranks import cpu_seconds, of_family
from mint.compose.cluster_engine import cluster_engine
from mint.compose.embedded import torch_engine
from mint.config import Settings
from mint.engine.protocol import Engine, LoraSpec, SampleJob, SampleResult, StopRule
from mint.models.random_base import SHAPES, write_random_base

SAMPLES, PROMPT_TOKENS = 8, 48
LORA = LoraSpec(32, 7, True, True, False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--streams", action="store_true")
    given = parser.parse_args(arguments)
    settings = Settings(dtype=given.dtype, threads=1, cluster="local", trainers=1, samplers=1)
    cluster = cluster_engine(settings, torch_engine)
    alone = torch_engine(settings)
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), SHAPES[given.shape], seed=1)
        vocab_size = 0
        alone.load_base("base", folder)
        alone.create_model("m", "base", LORA)
        for engine in (alone, cluster):
            vocab_size = engine.load_base("base", folder).vocab_size
            engine.load_weights("w", "base", LORA, alone.read_state("m").weights)
        jobs = requests(vocab_size, prompts=given.prompts, new=given.new)
        engines: dict[str, Engine] = {"alone": alone, "replica": cluster}
        draw(cluster, jobs, streams=False)  # it starts
        began, ray_began = time.monotonic(), of_family(cluster.replica_processes)
        cpu, wall = measure(engines, jobs, given.turns, others=cluster.replica_processes, streams=given.streams)
        ray_share = (of_family(cluster.replica_processes) - ray_began) / (time.monotonic() - began)
    cluster.close()
    print(
        f"{given.shape}, {given.dtype}, {given.prompts * SAMPLES} sequences of {given.new} tokens"
        f"{', streamed' if given.streams else ''}: {statistics.median(cpu['alone']):.3f} s of CPU alone; "
        f"one replica/alone: CPU {ratio(cpu)}, wall {ratio(wall)}; Ray's processes {ray_share:.3f} of a core"
    )


def requests(vocab_size: int, *, prompts: int, new: int) -> list[SampleJob]:
    """Requests for groups of samples that do not stop by themselves."""
    rng = np.random.default_rng(1)
    return [
        SampleJob("base", "w", rng.integers(0, vocab_size, PROMPT_TOKENS), SAMPLES, new, 1.0, -1, 1.0, seed, StopRule())
        for seed in range(prompts)
    ]


def measure(
    engines: dict[str, Engine], jobs: Sequence[SampleJob], turns: int, *, others: Sequence[int], streams: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU and wall seconds of each engine in each round, after one round that does not count; tokens are compared."""
    cpu: dict[str, list[float]] = {name: [] for name in engines}
    wall: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(turns + 1):
        drawn = set()
        for name in engines if turn % 2 else reversed(engines):
            began, cpu_began = time.perf_counter(), cpu_seconds(others)
            results = draw(engines[name], jobs, streams=streams)
            wall_s = time.perf_counter() - began
            time.sleep(0.02)  # the system counts in hundredths of a second
            drawn.add(b"".join(sample.tokens.tobytes() for result in results for sample in result.samples))
            if turn:
                cpu[name].append(cpu_seconds(others) - cpu_began)
                wall[name].append(wall_s)
        if len(drawn) != 1:
            raise AssertionError("the samples differ")
    return cpu, wall


def draw(engine: Engine, jobs: Sequence[SampleJob], *, streams: bool) -> list[SampleResult]:
    """All jobs in one batch."""
    batch = engine.open_batch()
    heard: list[tuple[int, int, float]] = []
    for place, job in enumerate(jobs):
        batch.add(str(place), job, (lambda *token: heard.append(token)) if streams else None)
    results: dict[str, SampleResult] = {}
    while batch.keys:
        results |= batch.step()
    return [results[str(place)] for place in range(len(jobs))]


def ratio(seconds: dict[str, list[float]]) -> str:
    """The median of the ratios, and their range."""
    ratios = sorted(own / alone for own, alone in zip(seconds["replica"], seconds["alone"], strict=True))
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
