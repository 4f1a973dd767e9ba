"""What it costs to add micro-batches in a fixed tree, and to cut a request into more of them.

    python -m benchmarks.exactness.gradient_order [--shape tiny] [--dtype float32] [--turns 9] [--rank 32]

One pass over 8 prompts of 48 tokens with 8 samples of 32 tokens each, on one thread. It runs in micro-batches of
several sizes, each with both orders of the sum: `tree`, and `running` (one after the other, as older versions did). All
variants take turns, and every second round goes in the opposite order. The figures are CPU times, because other work on
the machine disturbs them less: the median of the ratios of a round, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from mint.config import read_settings
from mint.engine.protocol import LoraSpec, MicroBatching, TrainDatum, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import SHAPES, write_random_base

ROWS = (4096, 1024, 512, 256)
ORDERS: tuple[Literal["tree", "running"], ...] = ("tree", "running")
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 48, 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints one line for each size of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rank", type=int, default=32)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), SHAPES[given.shape], seed=1)
        engine = TorchEngine(dtype=given.dtype, threads=1, device="cpu", native=read_settings().native_folder)
        info = engine.load_base("base", folder)
        engine.create_model("m", "base", LoraSpec(given.rank, 7, True, True, False))
        data = request(info.vocab_size)
        print(f"{given.shape}, {given.dtype}, rank {given.rank}, attention {info.settings['attention']}")
        seconds = measure(engine, data, given.turns)
    first = seconds[ROWS[0], "tree"]
    for rows in ROWS:
        tree, running = seconds[rows, "tree"], seconds[rows, "running"]
        print(
            f"{rows:5} rows: {statistics.median(tree):.3f} s of CPU; tree/running {_ratios(tree, running)}; "
            f"against {ROWS[0]} rows {_ratios(tree, first)}"
        )


def request(vocab_size: int) -> list[TrainDatum]:
    """The samples of one GRPO step."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(PROMPTS):
        prompt = rng.integers(0, vocab_size, PROMPT_TOKENS)
        for _ in range(SAMPLES):
            whole = np.concatenate([prompt, rng.integers(0, vocab_size, NEW_TOKENS)])
            weights = (np.arange(len(whole) - 1) >= PROMPT_TOKENS - 1).astype(np.float32)
            advantages = np.full(len(whole) - 1, rng.normal(), np.float32)
            inputs = {"logprobs": np.full(len(whole) - 1, -6.0, np.float32), "advantages": advantages}
            data.append(TrainDatum(whole[:-1], whole[1:], weights, inputs))
    return data


def measure(engine: TorchEngine, data: Sequence[TrainDatum], turns: int) -> dict[tuple[int, str], list[float]]:
    """CPU seconds of each variant in each round, after one round that does not count."""
    loss = resolve_loss("importance_sampling", {"trained_only": 1})
    variants = {(rows, order): MicroBatching(rows, None, order) for rows in ROWS for order in ORDERS}
    seconds: dict[tuple[int, str], list[float]] = {variant: [] for variant in variants}
    for turn in range(turns + 1):
        for variant in variants if turn % 2 else reversed(variants):
            began = time.process_time()
            engine.forward_backward("m", data, loss, micro_batching=variants[variant])
            elapsed = time.process_time() - began
            engine.clear_gradient("m")
            if turn:
                seconds[variant].append(elapsed)
    return seconds


def _ratios(mine: Sequence[float], other: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
