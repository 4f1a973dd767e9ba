"""What it costs to train on ranks: a step on one rank against the same step in this process.

    python -m benchmarks.exactness.ranks [--shape tiny] [--dtype float32] [--turns 9] [--rank 32] [--prompts 8]

A step is a pass over prompts of 48 tokens with 8 samples of 32 tokens each, an optimizer step and a digest, on one
thread, in micro-batches of 1,024 rows. Both sides take turns, and every second round goes in the opposite order. The
figures are CPU times of this process and of the rank: the median of the ratios of a round, with the smallest and the
largest. What Ray's own processes take is said beside it. It needs the extra `cluster`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.exactness import gradient_order
from mint.compose.cluster_engine import MICRO_BATCH_ROWS, cluster_engine
from mint.compose.embedded import torch_engine
from mint.config import Settings
from mint.engine.protocol import AdamSpec, Engine, LoraSpec, TrainDatum, resolve_loss
from mint.models.random_base import SHAPES, write_random_base

ADAM = AdamSpec(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=8)
    given = parser.parse_args(arguments)
    gradient_order.PROMPTS = given.prompts
    settings = Settings(dtype=given.dtype, threads=1, micro_batch_rows=MICRO_BATCH_ROWS, cluster="local", trainers=1)
    cluster = cluster_engine(settings, torch_engine)
    engines: dict[str, Engine] = {"alone": torch_engine(settings), "rank": cluster}
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), SHAPES[given.shape], seed=1)
        vocab_size = 0
        for engine in engines.values():
            vocab_size = engine.load_base("base", folder).vocab_size
            engine.create_model("m", "base", LoraSpec(given.rank, 7, True, True, False))
        began, ray_began = time.monotonic(), of_family(cluster.processes)
        seconds = measure(engines, gradient_order.request(vocab_size), given.turns)
        ray_share = (of_family(cluster.processes) - ray_began) / (time.monotonic() - began)
    ratios = sorted(rank / alone for rank, alone in zip(seconds["rank"], seconds["alone"], strict=True))
    print(
        f"{given.shape}, {given.dtype}, LoRA rank {given.rank}, {given.prompts} prompts: "
        f"{statistics.median(seconds['alone']):.3f} s of CPU alone; one rank/alone "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); "
        f"Ray's processes {ray_share:.3f} of a core"
    )


def measure(engines: dict[str, Engine], data: Sequence[TrainDatum], turns: int) -> dict[str, list[float]]:
    """CPU seconds of each engine in each round, after one round that does not count; their digests are compared."""
    loss = resolve_loss("importance_sampling", {"trained_only": 1})
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    ranks: Any = engines["rank"]
    for turn in range(turns + 1):
        digests = set()
        for name in engines if turn % 2 else reversed(engines):
            began = cpu_seconds(ranks.processes)
            engines[name].forward_backward("m", data, loss)
            engines[name].optim_step("m", ADAM)
            digests.add(engines[name].state_digest("m"))
            time.sleep(0.02)  # the system counts in hundredths of a second
            if turn:
                seconds[name].append(cpu_seconds(ranks.processes) - began)
        if len(digests) != 1:
            raise AssertionError(f"the states differ: {digests}")
    return seconds


def cpu_seconds(others: Sequence[int]) -> float:
    """The CPU time of this process and of others."""
    return sum(ticks_of(stat_of(Path(f"/proc/{pid}"))) for pid in (os.getpid(), *others)) / TICKS_PER_S


def of_family(known: Sequence[int]) -> float:
    """The CPU time of Ray's own processes: all that this one has started, without the `known` ones."""
    fields = {path.name: stat_of(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    family = {str(os.getpid())}
    while more := {pid for pid, own in fields.items() if own and own[1] in family} - family:
        family |= more
    others = family - {str(pid) for pid in (os.getpid(), *known)}
    return sum(ticks_of(fields[pid]) for pid in others) / TICKS_PER_S


def ticks_of(fields: list[str]) -> int:
    """User and system time, in the system's ticks."""
    return int(fields[11]) + int(fields[12]) if fields else 0


def stat_of(process: Path) -> list[str]:
    """The fields of `/proc/PID/stat` behind the name; none if the process has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    main()
