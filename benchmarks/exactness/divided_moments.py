"""What dividing the moments of a large LoRA between two ranks saves: a step with its digest, divided and whole.

    python -m benchmarks.exactness.divided_moments [--numbers 16777216] [--turns 7]

Two processes of one thread each advance a LoRA of so many numbers with AdamW and hash its state, in turns: each the
whole of it, and each one half of the moments. The figures are seconds by the clock on the first process (the median,
with the smallest and the largest), the bytes of moments that it keeps, and whether the digests are the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed.distributed_c10d as dist

from mint.cluster.collectives.progress import Progress
from mint.cluster.collectives.state_ranks import divide_state
from mint.engine.optimizer import AdamState, step_adam
from mint.engine.protocol import AdamSpec
from mint.engine.reductions.state_division import StateDivision
from mint.engine.state_digest import blocks_of, digest_of, digest_of_divided

RANKS = 2
ADAM = AdamSpec(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)


def run_rank(rank: int, store: str, numbers: int, turns: int) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Seconds and digests of each turn, divided and whole; the first turn does not count."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    arrays = {"a": (slice(0, numbers), (numbers,))}
    divided = divide_state(blocks_of(arrays), Progress())
    assert divided is not None, "so few numbers are not divided"
    sides: dict[str, StateDivision | None] = {"divided": divided, "whole": None}
    start = torch.randn(numbers, generator=torch.Generator().manual_seed(1))
    weights = {name: start.clone() for name in sides}
    states = {"divided": AdamState.fresh(start[divided.own]), "whole": AdamState.fresh(start)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    digests: dict[str, list[str]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        gradient = torch.randn(numbers, generator=torch.Generator().manual_seed(turn))
        for name, division in sides.items() if turn % 2 else reversed(sides.items()):
            own, state = gradient.clone(), states[name]
            dist.barrier()
            began = time.perf_counter()
            step_adam(weights[name], own, state, ADAM, division=division)
            moments = state.exp_avg, state.exp_avg_sq
            if division is None:
                digests[name].append(digest_of(state.step, arrays, (weights[name], *moments)))
            else:
                digests[name].append(digest_of_divided(state.step, arrays, weights[name], moments, division))
            if turn:
                seconds[name].append(time.perf_counter() - began)
    dist.destroy_process_group()
    return seconds, digests


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1 << 24)
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        store = str(Path(folder) / "store")
        ranks = [pool.submit(run_rank, rank, store, given.numbers, given.turns) for rank in range(RANKS)]
        seconds, digests = ranks[0].result()
    for name, share in (("whole", 1), ("divided", RANKS)):
        own = sorted(seconds[name])
        kept = 8 * given.numbers / share / 2**20
        print(f"{name}: {statistics.median(own):.3f} s ({own[0]:.3f} to {own[-1]:.3f}), {kept:.0f} MiB of moments")
    ratios = sorted(a / b for a, b in zip(seconds["divided"], seconds["whole"], strict=True))
    same = "the same" if digests["whole"] == digests["divided"] else "OTHER"
    print(f"divided/whole {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); {same} digests")


if __name__ == "__main__":
    main()
